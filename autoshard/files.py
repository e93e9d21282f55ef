"""A text in, a file that holds all of it or is as it was before out."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from autoshard.errors.kinds import checks_kinds

PART = ".part"  # how the name of a file ends that is being written
ABANDONED = 3600.0  # s, after which such a file is taken for one that a process left when it ended


@checks_kinds()
def write_whole(path: str | Path, text: str) -> None:
    """Writes a file beside its place and then moves it there, so that a reader finds all of it or what was there.

    Who may read it says the umask, or the file that is replaced. What other processes left half written is removed.
    A link is followed. What is no regular file, as a pipe, is written to.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    if is_special(Path(path)):
        Path(path).write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PART}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w", encoding="utf-8") as file:
            with contextlib.suppress(OSError):  # there is none, or it is another user's
                os.chmod(part, stat.S_IMODE(target.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            now = os.fstat(file.fileno()).st_mtime  # by the clock of the file's own machine
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    sweep(target.parent, re.escape(target.name), now)


def is_special(path: Path) -> bool:
    """Whether it is a pipe, device or the like, which to open may be to wait."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def sweep(folder: Path, names: str, now: float) -> None:
    """Removes what `write_whole` left half written when its process ended.

    Args:
        names: a pattern for the names of the files that were to be.
        now: the time, in seconds, by the clock that the files have theirs from.
    """
    pattern = re.compile(rf"({names})\.[0-9a-f]{{8}}{re.escape(PART)}")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if pattern.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another process was faster, or it is another user's
                    if now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                        os.unlink(entry.path)
