"""Tasks run in processes of their own, so that one that ends its process, or never ends, is a result like others."""

import collections
import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

STALLS = 5  # times the seconds of a task, after which a process that waits is ended, too
Name = TypeVar("Name", bound=Hashable)


def in_turns(names: Iterable[Name], families: Mapping[Name, str], seed: int) -> list[Name]:
    """The names in an order in which every family has its turn, shuffled within a turn."""
    shuffled = list(names)
    random.Random(seed).shuffle(shuffled)
    taken: collections.Counter = collections.Counter()
    turn = {}
    for name in shuffled:
        turn[name] = taken[families[name]]
        taken[families[name]] += 1
    return sorted(shuffled, key=turn.__getitem__)


@dataclass(frozen=True)
class Ended:
    """A process ended, or was ended, instead of an answer."""

    detail: str
    late: bool  # it took longer than it may


@dataclass
class Worker:
    """A process that answers tasks one after the other, a line of JSON each; the next one takes its place if it ends.

    The process is a script of Python's, which calls `serve`.
    """

    command: Sequence[str]  # the script and its arguments
    environment: Mapping[str, str]  # beside that of this process
    seconds: float  # of the CPU for one task, and in `STALLS` times as many it ends whatever it has used
    _process: subprocess.Popen | None = None
    _said: collections.deque = field(default_factory=lambda: collections.deque(maxlen=20))  # last lines of its errors

    def __call__(self, task: Any) -> Any:
        """The answer to a task, or how the process ended."""
        process = self._process or self._started()
        late, answered = threading.Event(), threading.Event()
        threading.Thread(target=self._end_if_late, args=(process, late, answered), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(task), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        answered.set()
        if answer:
            return json.loads(answer)
        self._process = None
        return Ended(f"exit status {process.wait()}: {' '.join(self._said).strip()[-300:]}", late.is_set())

    def _end_if_late(self, process: subprocess.Popen, late: threading.Event, answered: threading.Event) -> None:
        """Kills a process that has not answered in time. On a machine that others share, time is what it has used."""
        used, started = cpu_seconds(process.pid), time.monotonic()
        while not answered.wait(min(1.0, self.seconds)):
            waited = time.monotonic() - started
            if cpu_seconds(process.pid) - used > self.seconds or waited > STALLS * self.seconds:
                late.set()
                process.kill()
                return

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()

    def _started(self) -> subprocess.Popen:
        pipe = subprocess.PIPE
        command, environment = [sys.executable, *self.command], os.environ | self.environment
        process = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        self._process = process
        self._said.clear()
        threading.Thread(target=self._said.extend, args=(process.stderr,), daemon=True).start()
        return process


def cpu_seconds(process: int) -> float:
    """What all threads of a process have used; what its clock says where the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(answer: Callable[[Any], Any]) -> None:
    """Answers the tasks that a `Worker` sends; what they print goes to the standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answers(tasks: Sequence[Any], jobs: int, worker: Callable[[], Callable[[Any], Any]]) -> Iterator[tuple[Any, Any]]:
    """Each task and its answer, as they come, of so many workers."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def run() -> None:
        answer = worker()
        with contextlib.suppress(queue.Empty):
            while True:
                task = waiting.get_nowait()
                done.put((task, answer(task)))
        answer.close()

    for _ in range(jobs):
        threading.Thread(target=run, daemon=True).start()
    for _ in tasks:
        yield done.get()
