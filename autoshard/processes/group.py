"""Messages between the processes that share a mesh: texts that one of them posts and the others read.

They go through the key-value store of `jax.distributed`, so that nothing waits in a collective of devices. Of several
processes the one with the least index *leads*. A process that fails says so, and one that ends without a word is known
by its heartbeat, which stands still. Whoever waits for such a process raises.

Two processes, of which the second fails before it has planned:

=====================  ==========================================
process 0 (leads)      process 1
=====================  ==========================================
posts its plan         posts ``failed/0/1``: ZeroDivisionError
reads ``answer/0/1``   raises ZeroDivisionError
raises ProcessError
=====================  ==========================================
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autoshard import errors
from autoshard.errors import AutoshardError, MemoryLimitError, ProcessError
from autoshard.experimental import KeyValueStore, key_value_store


@dataclass(frozen=True)
class Patience:
    """How long processes wait for each other, in seconds."""

    poll: float = 0.25  # between two looks at what another process has posted
    beat: float = 2.0  # between two signs of life
    silence: float = 20.0  # without a sign of life, after which a process counts as ended
    arrival: float = 300.0  # for a process that lives and has not come to where it is waited for


PATIENCE = Patience()
_WORKING = "{}"  # what the leader posts before it makes something


class ProcessGroup:
    """The processes of one mesh, as one of them sees them.

    What belongs together on all processes is one *round*: the first run of a step. Rounds are counted alike everywhere.
    """

    def __init__(self, processes: tuple[int, ...], here: int, store: KeyValueStore):
        """
        Args:
            processes: their indices, sorted; more than one.
            here: the index of this process, one of them.
        """
        self.processes, self.here, self.round = processes, here, 0
        self._store, self._prefix = store, f"autoshard/{hashlib.sha256(repr(processes).encode()).hexdigest()[:16]}"
        self._said: dict[str, str] = {}  # what this process has made for all, by key
        self._raised: set[str] = set()  # failures of the leader's that this process has raised
        self._heard: dict[int, tuple[str | None, float]] = {}  # process -> its last sign of life, and when that came
        self.lock = threading.RLock()  # one step at a time is prepared
        self._depth = 0  # of steps that are prepared while another is traced
        _start_heart(store, here)

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> ProcessGroup | None:
        """The group of a mesh; None if one process has all of its devices, or if this process has none.

        None, too, where JAX runs without `jax.distributed`: then nobody can be asked.
        """
        if not isinstance(mesh, Mesh):
            return None
        here = jax.process_index()
        processes = tuple(sorted({device.process_index for device in mesh.devices.flat}))
        store = key_value_store() if len(processes) > 1 and here in processes else None
        return None if store is None else _group(processes, here, store)

    def __deepcopy__(self, memo: Any) -> ProcessGroup:
        return self

    @property
    def leader(self) -> int:
        """The process that plans for all."""
        return self.processes[0]

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.here == self.leader

    def post(self, key: str, text: str) -> None:
        """Writes a text that the other processes can read, in the place of what is there.

        Raises:
            ProcessError: the store is gone.
        """
        with self._reached():
            self._store.key_value_set(f"{self._prefix}/{key}", text, allow_overwrite=True)

    def peek(self, key: str) -> str | None:
        """The text under a key, if there is one by now."""
        with self._reached():
            return _peek(self._store, f"{self._prefix}/{key}")

    def read(self, key: str, by: int, watch: Callable[[], None] = lambda: None, *, after: str | None = None) -> str:
        """The text that a process posts under a key, once it is there.

        Args:
            watch: called again and again meanwhile; it may raise.
            after: what was read there before; another text is waited for.

        Raises:
            ProcessError: the process has failed or ended, or has not come.
        """
        late = time.monotonic() + PATIENCE.arrival
        while (text := self._next(key, after)) is None:
            try:
                self._check(by)
            except ProcessError:
                text = self.peek(key)  # it may have posted this before it failed
                if text is None or text == after:
                    raise
                return text
            watch()
            if time.monotonic() > late and after != _WORKING:
                raise ProcessError(
                    f"process {by} has not come to this step in {PATIENCE.arrival:g} s: process {self.here} waits for "
                    f"it.\nLet every process of the mesh call the same steps in the same order."
                )
        return text

    def _next(self, key: str, after: str | None) -> str | None:
        """The text under a key; None if it is not there, or still the same, after a moment."""
        with self._reached():
            if after is None:
                return _wait(self._store, f"{self._prefix}/{key}", PATIENCE.poll)
            text = _peek(self._store, f"{self._prefix}/{key}")
        if text != after:
            return text
        time.sleep(PATIENCE.poll)
        return None

    def leader_says(self, key: str, make: Callable[[], str], watch: Callable[[], None] = lambda: None) -> str:
        """What the leader makes: it makes and posts it once, the others read it. Its error is everybody's, too.

        Raises:
            AutoshardError: the leader raised it.
            ProcessError: the leader raised another error, has ended, or has not come.
        """
        if self.leads:
            if key not in self._said:
                self.post(key, _WORKING)
                try:
                    self._said[key] = make()
                except BaseException as error:
                    self.post(key, _failure(self.here, error))
                    raise
                self.post(key, json.dumps({"text": self._said[key]}))
            return self._said[key]
        posted = None
        while True:
            posted = self.read(key, self.leader, watch, after=posted)
            message = json.loads(posted)
            if "text" in message:
                return str(message["text"])
            if "error" in message and posted not in self._raised:  # else the leader may try again
                self._raised.add(posted)
                raise _raised_by_leader(message)

    def has_said(self, key: str) -> bool:
        """Whether the leader has made what `leader_says` waits for, or failed to."""
        text = self.peek(key)
        return text is not None and text != _WORKING and text not in self._raised

    def exchange(self, name: str, answer: str, combine: Callable[[dict[int, str]], str]) -> str:
        """What the leader makes of the answers of all processes in this round.

        Args:
            combine: takes an answer per process.

        Raises:
            ProcessError: a process has failed or ended, or has not come.
        """
        at = f"{name}/{self.round}"
        if not self.leads:
            self.post(f"{at}/{self.here}", answer)
            return self.read(at, self.leader)
        others = (process for process in self.processes if process != self.here)
        answers = {self.here: answer} | {process: self.read(f"{at}/{process}", process) for process in others}
        combined = combine(answers)
        self.post(at, combined)
        return combined

    @contextlib.contextmanager
    def joined(self, *, runs: bool) -> Iterator[None]:
        """What the processes do together: if it fails here, the others get to know.

        Args:
            runs: whether all processes do it. Else others wait only where processes differ.
        """
        with self.lock:
            self._depth += 1
            try:
                yield
            except BaseException as error:
                if self._depth == 1 and (runs or isinstance(error, ProcessError)):
                    with contextlib.suppress(ProcessError):  # the store may be what is gone
                        self.post(f"failed/{self.round}/{self.here}", _failure(self.here, error))
                    self.round += 1
                raise
            finally:
                self._depth -= 1

    def watch(self) -> None:
        """
        Raises:
            ProcessError: another process has failed or ended.
        """
        for process in self.processes:
            if process != self.here:
                self._check(process)

    def _check(self, process: int) -> None:
        """Raises ProcessError if a process has failed in this round, or gives no sign of life."""
        failed = self.peek(f"failed/{self.round}/{process}")
        if failed is not None:
            raise _told(json.loads(failed))
        with self._reached():
            sign = _peek(self._store, _heart_key(process))
        now = time.monotonic()
        last, since = self._heard.get(process, (None, now))
        if sign is None or sign != last:
            self._heard[process] = sign, now
        elif now - since > PATIENCE.silence:
            raise ProcessError(
                f"process {process} has ended or hangs: it has given no sign of life for {PATIENCE.silence:g} s.\n"
                f"Its own output says why; start all processes again."
            )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(
                f"process {self.here} cannot reach the other processes of the mesh any more: "
                f"{str(error).splitlines()[0]}\nStart all processes again."
            ) from error


@functools.cache
def _group(processes: tuple[int, ...], here: int, store: KeyValueStore) -> ProcessGroup:
    """The one group of these processes: rounds are counted over all steps."""
    return ProcessGroup(processes, here, store)


def _peek(store: KeyValueStore, key: str) -> str | None:
    try:
        return store.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None


def _wait(store: KeyValueStore, key: str, seconds: float) -> str | None:
    try:
        return store.blocking_key_value_get(key, round(1000 * seconds))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def _failure(process: int, error: BaseException) -> str:
    """An error as the others get to know it; one that was told of by another process stays that one's."""
    numbers = {"budget": error.budget, "needed": error.needed} if isinstance(error, MemoryLimitError) else {}
    kind = type(error).__name__ if isinstance(error, AutoshardError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}".removesuffix(": ")
    return json.dumps(
        {
            "error": text,
            "kind": kind,
            "numbers": numbers,
            "process": process,
            "is_told": isinstance(error, ProcessError),
            "at": time.time_ns(),  # that one failure is told from the next
        }
    )


def _raised_by_leader(message: dict[str, Any]) -> AutoshardError:
    """The leader's error: of its own class, so that all processes go on alike."""
    kind = getattr(errors, message["kind"], None) if message["kind"] else None
    if kind is None or kind is ProcessError:
        return _told(message)
    made: AutoshardError = kind(message["error"], **message["numbers"])
    return made


def _told(message: dict[str, Any]) -> ProcessError:
    if message["is_told"]:
        return ProcessError(message["error"])
    return ProcessError(
        f"process {message['process']} of the mesh failed: {message['error']}\n"
        "Its own output has the traceback. The other processes stop here, since they cannot run without it."
    )


def _heart_key(process: int) -> str:
    return f"autoshard/beat/{process}"


@functools.cache
def _start_heart(store: KeyValueStore, here: int) -> None:
    """Gives signs of life from now on until the process ends."""
    stopped = threading.Event()

    def beat() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store is gone: whoever waits finds out
            for count in itertools.count():
                store.key_value_set(_heart_key(here), str(count), allow_overwrite=True)
                if stopped.wait(PATIENCE.beat):
                    return

    thread = threading.Thread(target=beat, daemon=True, name="autoshard heartbeat")
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join(timeout=PATIENCE.beat)

    atexit.register(stop)  # a thread that returns from C++ while Python ends would abort the process
