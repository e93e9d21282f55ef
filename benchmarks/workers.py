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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
    seconds: float  # for one task
    _process: subprocess.Popen | None = None
    _said: collections.deque = field(default_factory=lambda: collections.deque(maxlen=20))  # last lines of its errors

    def __call__(self, task: Any) -> Any:
        """The answer to a task, or how the process ended."""
        process = self._process or self._started()
        late = threading.Event()
        alarm = threading.Timer(self.seconds, lambda: (late.set(), process.kill()))
        alarm.start()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(task), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        alarm.cancel()
        if answer:
            return json.loads(answer)
        self._process = None
        return Ended(f"exit status {process.wait()}: {' '.join(self._said).strip()[-300:]}", late.is_set())

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
