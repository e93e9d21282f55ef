"""Faults put in the way of plan files and caches, and how many plans are lost by them.

    python benchmarks/faults.py                # writes docs/benchmarks/faults.md
    python benchmarks/faults.py --times 3      # so many faults of each kind; only prints

A plan is lost if a file that was whole before can no longer be loaded, if a damaged file gives a plan that differs from
the one that was saved, or if a step does not run, or by another plan, because of what is in its cache.
"""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard import Plan, PlanError
from autoshard.cache import CacheWarning
from autoshard.files import write_whole

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "faults.md"
HEAD = """# Faults and lost plans

Written by `python benchmarks/faults.py`, whose head says when a plan counts as lost.

fault | injected | plans lost
--- | --: | --:
"""
Write = Callable[[Path, str], None]


def step(weights: jax.Array, batch: jax.Array) -> jax.Array:
    return weights - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weights)


class Faults:
    """The plan that is in danger, and a folder for it."""

    def __init__(self, folder: Path, write: Write = write_whole, seed: int = 0):
        """
        Args:
            write: writes files, as `autoshard.files.write_whole` does.
        """
        self.folder, self.write, self.random = folder, write, random.Random(seed)
        self.mesh = jax.make_mesh((4, 2), ("data", "model"))
        self.arguments = jnp.ones((64, 32)), jnp.ones((16, 64))
        self.plan = self.planned()
        self.text, self.expected = self.plan.dumps(), np.asarray(step(*self.arguments))
        self.file = folder / "plan.json"

    def planned(self, **options: object) -> Plan:
        return autoshard.plan(step, *self.arguments, mesh=self.mesh, topology="cpu:8", **options)

    # What is lost.

    def file_is_lost(self) -> bool:
        """Whether the file does not hold the plan, whole."""
        try:
            return Plan.load(self.file, self.mesh).dumps() != self.text
        except PlanError:
            return True

    def damage_is_unseen(self, text: bytes) -> bool:
        """Whether a damaged file is taken for another plan, or ends in an error that is no `PlanError`."""
        self.file.write_bytes(text)
        try:
            return Plan.load(self.file, self.mesh).dumps() != self.text
        except PlanError:
            return False
        except Exception:  # whatever it is, it is not what callers wait for
            return True

    def step_is_lost(self, cache: Path) -> bool:
        """Whether a step does not run as planned with this folder for its cache."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            try:
                run = autoshard.autoshard(step, mesh=self.mesh, topology="cpu:8", cache=cache)
                made = run(*self.arguments)
            except Exception:  # a cache is never a reason not to run
                return True
            same = run.plan(*self.arguments).in_shardings == self.plan.in_shardings
        return not same or not np.allclose(made, self.expected, rtol=1e-5)

    # Faults.

    def full_disk(self) -> bool:
        """An operation of saving fails."""
        self.file.write_text(self.text)
        name = self.random.choice(["os.fsync", "os.replace", "os.open"])
        with mock.patch(name, side_effect=OSError(28, "No space left on device")), contextlib.suppress(OSError):
            self.write(self.file, self.text)
        return self.file_is_lost()

    def killed(self) -> bool:
        """The process is killed while it saves."""
        self.file.write_text(self.text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns of forks; the child does not call it
            child = os.fork()
        if child == 0:
            while True:
                self.write(self.file, self.text)
        time.sleep(self.random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return self.file_is_lost()

    def cut(self) -> bool:
        """The file is cut."""
        text = self.text.encode()
        return self.damage_is_unseen(text[: self.random.randrange(len(text))])

    def flipped(self) -> bool:
        """A bit is flipped."""
        return self.damage_is_unseen(self.with_bit_flipped(self.text.encode()))

    def with_bit_flipped(self, text: bytes) -> bytes:
        place = self.random.randrange(len(text))
        return text[:place] + bytes([text[place] ^ 1 << self.random.randrange(8)]) + text[place + 1 :]

    def cached_file_damaged(self) -> bool:
        """A bit of a cached file is flipped."""
        cache = Path(tempfile.mkdtemp(dir=self.folder))
        self.planned(cache=cache)
        (file,) = cache.glob("*.plan")
        file.write_bytes(self.with_bit_flipped(file.read_bytes()))
        return self.step_is_lost(cache)

    def cached_file_is_no_file(self) -> bool:
        """A folder or a pipe is in the place of a cached file."""
        cache = Path(tempfile.mkdtemp(dir=self.folder))
        self.planned(cache=cache)
        (file,) = cache.glob("*.plan")
        file.unlink()
        self.random.choice([os.mkdir, os.mkfifo])(file)
        return self.step_is_lost(cache)

    def cache_is_no_folder(self) -> bool:
        """A file is in the place of the cache."""
        cache = Path(tempfile.mkdtemp(dir=self.folder)) / "cache"
        cache.write_text("")
        return self.step_is_lost(cache)

    def kinds(self) -> Iterator[tuple[Callable[[], bool], int]]:
        """Each kind of fault, and how often it is injected: those that plan a step less often."""
        yield from ((fault, 200) for fault in (self.full_disk, self.cut, self.flipped))
        yield self.killed, 50
        yield from ((fault, 5) for fault in (self.cached_file_damaged, self.cached_file_is_no_file))
        yield self.cache_is_no_folder, 2


def rows(faults: Faults, times: int | None = None) -> Iterator[tuple[str, int, int]]:
    """Fault, how often it was injected, and how many plans were lost."""
    for fault, often in faults.kinds():
        count = often if times is None else min(times, often)
        yield (fault.__doc__ or "").rstrip("."), count, sum(fault() for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int)
    times = parser.parse_args().times
    jax.config.update("jax_num_cpu_devices", 8)
    text = HEAD
    with tempfile.TemporaryDirectory() as folder:
        for name, injected, lost in rows(Faults(Path(folder)), times):
            text += f"{name} | {injected} | {lost}\n"
            print(text.splitlines()[-1], flush=True)
    if times is None:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
