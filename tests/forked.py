"""Code in processes of its own, each forked from one that has imported what code of the project imports first.

That takes half of the time of a new process. The package itself is imported by the code, from the folder that it is
given: a copy of the package is seen as a user would see it.
"""

import io
import multiprocessing
import os
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["jax.numpy", "jax.experimental.pallas", "numba", "scipy.optimize", "scipy.sparse"])


def run(code: str, folders: list[Path], timeout: float = 200) -> subprocess.CompletedProcess:
    """Runs code in the first of the folders, modules of which come first; its status, and what it wrote of errors."""
    ours, theirs = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_run, args=(code, [str(folder) for folder in folders], theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise subprocess.TimeoutExpired(code, timeout)
        errors = ours.recv()
    except EOFError:
        errors = "the process ended before its code"
    finally:
        process.kill()
        process.join()
        ours.close()
    return subprocess.CompletedProcess(code, int(bool(errors)), stderr=errors)


def _run(code: str, folders: list[str], answer: Connection) -> None:
    sys.path[:0] = folders
    os.chdir(folders[0])
    sys.stdout = io.StringIO()
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except BaseException:
        answer.send(traceback.format_exc())
    else:
        answer.send("")
