"""Plans kept on disk between runs: what a plan depends on in, the plan that was made for it before out.

There is one file per plan. Its name is a digest of all that the plan depends on: the program, its rules, mesh,
topology, options, and the versions of autoshard and JAX. A file is written beside its place and then moved there. So a
reader finds all of it or none, and if several processes write at once, the file of the last process stays. A file that
is not what was written is ignored with a warning, and written anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import jax

from autoshard.errors import PlanError, warn
from autoshard.files import is_special, sweep, write_whole
from autoshard.lower.on_shards import check_plan
from autoshard.options import Options
from autoshard.program import Program
from autoshard.program.paths import printable
from autoshard.program.signature import text_of_function
from autoshard.propagation import Rule
from autoshard.tactics.requests import text_of_tactic
from autoshard.user_plan import Plan

_KIND = "autoshard plan"  # the first words of a file


class CacheWarning(UserWarning):
    """A plan could not be kept in the cache folder, or what is there is not what was written."""


def key_of(program: Program, rules: Sequence[Rule], options: Options) -> str:
    """The key of a plan: equal in any process if the same plan would be made."""
    rule_texts = [
        (str(rule), *(sorted(kind) for kind in _kinds(rule)), sorted(rule.given.items()), sorted(rule.open_axes))
        for rule in rules
    ]
    parts = (*versions(), program.fingerprint, rule_texts, *key_parts(options))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def key_parts(options: Options) -> tuple[Any, ...]:
    """All that options say of a plan; its text is the same in any process, if no function is among it."""
    return (
        dict(options.mesh.shape),
        options.topology,
        _constants(options.backend),
        options.memory,
        sorted((path, str(spec)) for path, spec in options.fixed.items()),
        options.time_limit,
        options.refine,
        options.ignore_constraints,
        sorted(options.trips.items()),
        options.compiled_for and options.compiled_for.devices.flat[0].device_kind,
        sorted(options.pinned.items()),
        text_of_function(options.search) if callable(options.search) else options.search,
        list(map(text_of_tactic, options.tactics)),
        *([options.reductions] if options.reductions else []),
        *([f"statistics {options.statistics}"] if options.statistics else []),
        options.like and [(one.name, one.type, one.layout) for one in options.like.arguments],
    )


def versions() -> tuple[str, str]:
    """Those of autoshard and JAX."""
    return _version("autoshard"), jax.__version__


def _constants(part: Any) -> Any:
    """A backend's constants, of which sets are sorted: their text is the same in any process."""
    if is_dataclass(part):
        return [(field.name, _constants(getattr(part, field.name))) for field in fields(part)]
    return sorted(part) if isinstance(part, frozenset) else part


Loaded = TypeVar("Loaded")


def read_entry(folder: Path, key: str, load: Callable[[str, str], Loaded]) -> Loaded | None:
    """What was made of the text that was kept under `key`; None if there is none.

    Args:
        load: takes the text and the path of its file. It checks what it reads: in a folder that several users share,
            one may have written anything.

    Warns:
        CacheWarning: there is a file, but it is not what `write` wrote, or `load` refuses it.
    """
    path = folder / f"{key}.plan"
    try:
        if is_special(path):
            raise PlanError("it is no file")
        head, _, text = path.read_text(encoding="utf-8").partition("\n")
        if head != _head(key, text):
            raise PlanError("it is not what was written")
        return load(text, str(path))
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever it is, the step runs without the file
        _warn(f"the cached plan {path} cannot be used", error, "The step is planned anew.")
        return None


def load_plan(folder: Path, key: str, program: Program, options: Options) -> Plan | None:
    """The plan that was kept under `key`; None if there is none.

    Warns:
        CacheWarning: there is a file, but it is not what `keep` wrote.
    """

    def load(text: str, where: str) -> Plan:
        found = Plan.loads(text, options.mesh, where=where).bound_to(program)
        check_plan(program, found.annotations, dict(options.mesh.shape))
        return found

    return read_entry(folder, key, load)


def store_plan(folder: Path, key: str, plan: Plan) -> None:
    """Writes the plan under `key`, in the place of what is there.

    Warns:
        CacheWarning: the folder cannot be written to.
    """
    write_entry(folder, key, plan.dumps)


def write_entry(folder: Path, key: str, dumps: Callable[[], str]) -> None:
    """Writes a text under `key`, in the place of what is there.

    Args:
        dumps: makes the text.

    Warns:
        CacheWarning: the folder cannot be written to.
    """
    try:
        text = dumps()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}.plan"
        if is_special(path):
            raise OSError(f"{path} is no file")
        write_whole(path, f"{_head(key, text)}\n{text}")
        sweep(folder, r"[0-9a-f]+\.plan", path.stat().st_mtime)
    except Exception as error:  # whatever it is, the step runs without the file
        _warn(f"the plan is not kept in {folder}", error, "The step runs, and is planned again next time.")


def _warn(what: str, error: Exception, then: str) -> None:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    warn(printable(f"{what}: {reason}.\n{then}", kept="\n"), CacheWarning)


def _head(key: str, text: str) -> str:
    """The first line of a file: what it is, what it was made for, and a digest of the rest."""
    return f"{_KIND} {key} {hashlib.sha256(text.encode()).hexdigest()}"


def _kinds(rule: Rule) -> tuple[frozenset[str], ...]:
    return rule.reduction, rule.need_replication, rule.permutation


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a folder that is not installed
        return ""
