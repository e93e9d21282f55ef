"""What a type checker, and so an editor, knows of a decorated step; public names are checked by all strict rules."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

import autoshard
import autoshard.ops
import autoshard.pipeline
import autoshard.rewrites
import autoshard.solver
import autoshard.tactics

PUBLIC = (autoshard, autoshard.ops, autoshard.pipeline, autoshard.rewrites, autoshard.solver, autoshard.tactics)

STEPS = """
import jax
from jax.sharding import AbstractMesh
from typing import Any, reveal_type

from autoshard import autoshard

mesh = AbstractMesh((8,), ("data",))


@autoshard(mesh=mesh, donate_argnums=0)
def step(weights: jax.Array, rate: float = 0.1, *, steps: int) -> tuple[jax.Array, float]:
    return weights, rate


def loss(weights: jax.Array) -> float:
    return 0.0


class Trainer:
    @autoshard(mesh=mesh, static_argnums=0)
    def step(self, batch: jax.Array) -> int:
        return 0


def calls(x: jax.Array, like: jax.ShapeDtypeStruct) -> None:
    reveal_type(step)
    reveal_type(step(x, steps=3))
    reveal_type(step.plan(like, steps=3))
    reveal_type(step.lower(like, steps=3))
    reveal_type(step.trace(like, steps=3))
    reveal_type(autoshard(loss, mesh=mesh)(x))
    reveal_type(Trainer().step(x))
    step(x)
    step("x", steps=3)
    step(x, steps=3, rates=0.1)
    autoshard(loss, mesh=mesh)(x, x)
    autoshard(loss)
    Trainer().step()
    step.plans(x)
"""
REVEALED = [
    r"autoshard\.decorated\.ShardedFunction\[\[weights: jax\S*\.Array, rate: float =, \*, steps: int\], "
    r"tuple\[jax\S*\.Array, float\]\]",
    r"tuple\[jax\S*\.Array, float\]",
    r"autoshard\.user_plan\.Plan",
    r"jax\S*\.Lowered",
    r"autoshard\.program\.program\.Program",
    r"float",
    r"int",
]
# What the types of a decorated step are made of: to read all of JAX and of the package takes three times as long, and
# .ci/run checks the package anyhow.
READ = [
    "autoshard", "autoshard.api", "autoshard.decorated", "autoshard.program", "autoshard.program.program",
    "autoshard.program.user_code", "autoshard.user_plan", "jax", "jax.sharding", "jax.stages", "jax._src.api",
    "jax._src.basearray", "jax._src.core", "jax._src.stages",
]  # fmt: skip
ONLY = f"""
[mypy-autoshard.*,jax.*,numpy.*,flax.*,optax.*]
follow_imports = skip
[mypy-{",".join(READ)}]
follow_imports = silent
"""
ERRORS = ["call-arg", "arg-type", "call-arg", "call-arg", "call-overload", "call-arg", "attr-defined"]


def test_a_decorated_step_keeps_its_signature_and_has_methods(tmp_path):
    """Each line of `calls` is said to be of its type, or to be wrong in its way."""
    (tmp_path / "steps.py").write_text(STEPS)
    root = Path(__file__).parents[1]
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {root}\nfollow_imports = silent\n{ONLY}")
    options = [
        "--config-file",
        "mypy.ini",
        "--ignore-missing-imports",
        "--cache-dir",
        str(root / ".mypy_cache" / "tests"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "steps.py"], cwd=tmp_path, capture_output=True, text=True
    )
    revealed = re.findall(r'note: Revealed type is "(.*)"', done.stdout)
    errors = re.findall(r"error: .*\[(.*)\]$", done.stdout, flags=re.MULTILINE)
    assert errors == ERRORS, done.stdout + done.stderr
    assert len(revealed) == len(REVEALED), done.stdout
    for found, expected in zip(revealed, REVEALED, strict=True):
        assert re.fullmatch(expected, found.replace("builtins.", "")), found


def loosely_checked(strict: Collection[str]) -> set[str]:
    """Modules that define public names of the package and match none of the patterns of strictly checked modules."""
    found = {getattr(getattr(package, name), "__module__", None) for package in PUBLIC for name in package.__all__}
    homes = {module for module in found if module and module.startswith("autoshard.")}
    return {module for module in homes if not any(fnmatch.fnmatch(module, pattern) for pattern in strict)}


def test_modules_of_public_names_are_checked_by_all_strict_rules():
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    (strict,) = (row["module"] for row in settings["tool"]["mypy"]["overrides"] if "strict_equality" in row)
    assert loosely_checked(strict) == set()
    assert loosely_checked([one for one in strict if one != "autoshard.solver.solve"]) == {"autoshard.solver.solve"}
