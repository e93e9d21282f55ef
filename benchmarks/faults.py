"""Faults put in the way of plan files and caches, and how many plans are lost by them.

    python benchmarks/faults.py                # writes docs/benchmarks/faults.md
    python benchmarks/faults.py --times 3      # so many faults of each kind; only prints

A plan is lost if a file that was whole before can no longer be loaded, if a damaged file gives a plan that differs from
the one that was saved, or if a step does not run, or by another plan, because of what is in its cache. A file that was
edited, and so has no digest, has to end in a `PlanError` or in a plan that can be shown, used and saved.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import resource
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
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

    def ends_in_another_error(self, text: str) -> bool:
        """Whether a file without a digest, as users edit them, ends in an error that is no `PlanError`."""
        try:
            loaded = Plan.loads(text, self.mesh)
            _ = loaded.in_shardings, loaded.out_shardings, loaded.abstract(0), str(loaded), loaded.to_code()
            Plan.loads(loaded.dumps(), self.mesh)
        except PlanError:
            return False
        except Exception:  # whatever it is, it is not what callers wait for
            return True
        return False

    def with_other_state(self, key: object) -> bool:
        """Whether a step whose state has such a key cannot be planned, kept in a cache and found there again."""

        def step(state: dict, x: jax.Array) -> dict:
            return {key: value - x.sum() for key, value in state.items()}

        cache, state, x = Path(tempfile.mkdtemp(dir=self.folder)), {key: jnp.ones((16, 16))}, jnp.ones((16, 16))
        with warnings.catch_warnings():
            warnings.simplefilter("error", CacheWarning)
            try:
                makes = [autoshard.autoshard(step, mesh=self.mesh, topology="cpu:8", cache=cache) for _ in range(2)]
                made = [run(state, x)[key] for run in makes]
                plan = makes[0].plan(state, x)
                same = Plan.loads(plan.dumps(), self.mesh).in_shardings == plan.in_shardings
            except Exception:  # a cache is never a reason not to run
                return True
        return not same or len(list(cache.glob("*.plan"))) != 1 or not np.array_equal(*made)

    def cached(self) -> tuple[Path, Path]:
        """A cache with the plan in it, and its file."""
        cache = Path(tempfile.mkdtemp(dir=self.folder))
        self.planned(cache=cache)
        (file,) = cache.glob("*.plan")
        return cache, file

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
            began, begins = os.pipe()
            child = os.fork()
        if child == 0:
            os.write(begins, b".")
            while True:
                self.write(self.file, self.text)
        os.read(began, 1)
        os.close(began)
        os.close(begins)
        time.sleep(self.random.uniform(0.002, 0.02))
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
        cache, file = self.cached()
        file.write_bytes(self.with_bit_flipped(file.read_bytes()))
        return self.step_is_lost(cache)

    def cached_file_is_no_file(self) -> bool:
        """A folder or a pipe is in the place of a cached file."""
        cache, file = self.cached()
        file.unlink()
        self.random.choice([os.mkdir, os.mkfifo])(file)
        return self.step_is_lost(cache)

    def cache_is_no_folder(self) -> bool:
        """A file is in the place of the cache."""
        cache = Path(tempfile.mkdtemp(dir=self.folder)) / "cache"
        cache.write_text("")
        return self.step_is_lost(cache)

    def over_the_quota(self) -> bool:
        """The file may not get so large."""
        self.file.write_text(self.text)

        def child() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails, as on a disk that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.random.randrange(len(self.text)),) * 2)
            with contextlib.suppress(OSError):
                self.write(self.file, self.text)

        in_a_child(child)
        return self.file_is_lost()

    def edited(self) -> bool:
        """Parts of the file are others: of another kind, from elsewhere in the file, twice there, or gone."""
        document = json.loads(self.text)
        del document["digest"]
        for _ in range(self.random.randint(1, 3)):
            edit(document, self.random)
        return self.ends_in_another_error(json.dumps(document))

    def nested(self) -> bool:
        """A part of the file is nested deep."""
        document = json.loads(self.text)
        del document["digest"]
        parts = [key for key in document if document[key]]
        key, depth, open_, close = self.random.choice(parts), self.random.choice([20, 900, 90_000]), "[", "]"
        if self.random.random() < 0.5:
            open_, close = '{"a":', "}"
        text = json.dumps({**document, key: "HERE"})
        return self.ends_in_another_error(text.replace('"HERE"', open_ * depth + "1" + close * depth))

    def oversized(self) -> bool:
        """A number or a name of the file is long."""
        document = json.loads(self.text)
        del document["digest"]
        text = json.dumps({**document, self.random.choice(sorted(document)): "HERE"})
        long = self.random.choice(["9" * 100_000, '"' + "x" * 10_000_000 + '"', "[" + "0," * 1_000_000 + "0]"])
        return self.ends_in_another_error(text.replace('"HERE"', long))

    def odd_key(self) -> bool:
        """The state has keys that are no plain words."""
        keys = [
            "",
            "a/b",
            "a[0]",
            "*",
            "\x1b[31m",
            "\ud800",
            b"a",
            (1, "a"),
            ((), b"x"),
            3,
            -1,
            2.5,
            True,
            10**30,
            None,
        ]
        return self.with_other_state(self.random.choice(keys))

    def another_users_cache(self) -> bool:
        """The file or the folder of the cache is another user's."""
        cache, file = self.cached()
        name = self.random.choice(["pathlib.Path.read_text", "pathlib.Path.mkdir", "os.open", "os.replace", "os.chmod"])
        if self.random.random() < 0.5:
            file.write_text("other")
        with mock.patch(name, side_effect=PermissionError(13, "Permission denied")):
            return self.step_is_lost(cache)

    def clock_went_back(self) -> bool:
        """Files of the cache are from the future, a half written one among them."""
        cache, file = self.cached()
        part = file.with_name(f"{file.name}.0123abcd.part")
        part.write_text(self.text[:100])
        for one in (file, part):
            os.utime(one, (time.time() + 1e9,) * 2)
        if self.random.random() < 0.5:
            file.unlink()
        return self.step_is_lost(cache) or not file.exists()

    def kinds(self) -> Iterator[tuple[Callable[[], bool], int]]:
        """Each kind of fault, and how often it is injected: those that plan a step less often."""
        yield from ((fault, 200) for fault in (self.full_disk, self.over_the_quota, self.cut, self.flipped))
        yield self.killed, 50
        yield self.edited, 2000
        yield from ((fault, 50) for fault in (self.nested, self.oversized))
        yield self.odd_key, 30
        yield from ((fault, 5) for fault in (self.cached_file_damaged, self.cached_file_is_no_file))
        yield from ((fault, 10) for fault in (self.another_users_cache, self.clock_went_back))
        yield self.cache_is_no_folder, 2


def in_a_child(run: Callable[[], None]) -> None:
    """Runs in a fork of this process, which does not call JAX, and waits for its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks
        child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


ODD_PARTS: list[Any] = [
    *(None, True, 0, -1, 7, 1.5, float("nan"), 10**30, 2**63, "", "x", "data", "\x1b[31m", "\ud800", "<b>"),
    *([], [[]], {}, {"x": 1}, {"": {}}, [1, 2, 3], ["data"], [["data"], ["data"]], [None] * 5),
]


def edit(document: Any, rng: random.Random) -> None:
    """Makes one part of a JSON document another, in place."""
    found = list(parts_of(document))
    holder, key = rng.choice(found)
    kind = rng.randrange(4)
    if kind == 0:
        holder[key] = copy.deepcopy(rng.choice(ODD_PARTS))
    elif kind == 1:
        other, name = rng.choice(found)
        holder[key] = copy.deepcopy(other[name])
    elif kind == 2:
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[rng.choice(["x", "", "0", "999999"])] = copy.deepcopy(holder[key])


def parts_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of a document, as what holds it and the key."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from parts_of(node[key])


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
