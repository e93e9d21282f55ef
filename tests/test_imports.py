"""Importing autoshard starts nothing; its imports run one way; its public names are documented."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType

import forked
import pytest

import autoshard
import autoshard.ops
import autoshard.pipeline
import autoshard.rewrites
import autoshard.solver
import autoshard.tactics

PACKAGE = Path(autoshard.__file__).parent

# Rooms in the order of the way of the data. A room imports only rooms written before it, and itself.
ROOMS = {
    "base": ["autoshard.errors", "autoshard.files", "autoshard.layout"],
    "program": [*("autoshard.experimental", "autoshard.jaxprs", "autoshard.primitives"), "autoshard.program"],
    "propagation": ["autoshard.propagation"],
    "operations": ["autoshard.operations", "autoshard.ops"],
    "microbatches": ["autoshard.microbatches"],
    "mesh": ["autoshard.mesh"],
    "solver": ["autoshard.solver"],
    "model": ["autoshard.model"],
    "specs": ["autoshard.specs"],
    "tactics": ["autoshard.tactics"],
    "plans": ["autoshard.plans"],
    "arrays": ["autoshard.arrays"],
    "report": ["autoshard.report"],
    "compiled": ["autoshard.compiled"],
    "lower": ["autoshard.lower"],
    "remat": ["autoshard.remat", "autoshard.batching", "autoshard.trips"],
    "rewrites": ["autoshard.rewrites"],
    "recognition": ["autoshard.recognition"],
    "export": ["autoshard.export"],
    "user_plan": ["autoshard.user_plan"],
    "pipeline": ["autoshard.pipeline", "autoshard.stage_search"],
    "api": [
        *("autoshard.options", "autoshard.cache", "autoshard.processes"),
        *("autoshard.refine", "autoshard.planning", "autoshard.replanning", "autoshard.variants"),
        *(
            "autoshard.decorated",
            "autoshard.stages",
            "autoshard.stage_planning",
            "autoshard.one_jit",
            "autoshard.meshes",
        ),
        *("autoshard.api", "autoshard.together", "autoshard.frontiers", "autoshard.padding", "autoshard.__init__"),
    ],
}

# Rooms that work on plain data: from autoshard one imports only itself, the errors and the rooms named, and never JAX.
WITHOUT_JAX = {"autoshard.solver": (), "autoshard.pipeline": (), "autoshard.stage_search": ("autoshard.pipeline",)}

# Unstable parts of JAX and optional packages, and in how many files each may be imported.
UNSTABLE = {"jax._src": 0, "jax.extend": 1, "jax.experimental": 1, "flax": 1, "equinox": 0}


def within(module: str, package: str) -> bool:
    """Whether `module` is `package` or stands below it."""
    return module == package or module.startswith(package + ".")


def core_of(module: str) -> str | None:
    """The room without JAX that a module is in."""
    return next((room for room in WITHOUT_JAX if within(module, room)), None)


def room_of(module: str) -> int | None:
    """The index of a module's room; None when the table has none for it."""
    rooms = (i for i, names in enumerate(ROOMS.values()) if any(within(module, name) for name in names))
    return next(rooms, None)


@cache  # two tests ask of every file
def imports_of(source: str, package: str) -> frozenset[str]:
    """Every module that code standing in `package` imports when it runs, as absolute dotted names.

    `from a import b` counts as `a.b`, since b may be a module. Imports under `if TYPE_CHECKING` never run.
    """
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.expr):  # none holds a statement
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return frozenset(found)


def violations(sources: dict[str, str]) -> list[str]:
    """What is wrong with the imports of `sources`, from dotted module name (packages end in `.__init__`) to text."""
    problems = []
    users = {name: [] for name in UNSTABLE}

    def resolve(target: str) -> str:
        """The module that importing `target` runs: the name may be one inside a module."""
        for module in (target, target.rpartition(".")[0]):
            for name in (module, f"{module}.__init__"):
                if name in sources:
                    return name
        return target

    for module, source in sorted(sources.items()):
        if room_of(module) is None:
            problems.append(f"{module} has no room; add it to ROOMS")
            continue
        imported = imports_of(source, package=module.rpartition(".")[0])
        inside = {resolve(target) for target in imported if within(target, "autoshard")}
        for target in sorted(inside):
            if room_of(target) is not None and room_of(target) > room_of(module):
                problems.append(f"{module} imports {target}, a later room")
        if core := core_of(module):
            jax = {target for target in imported if within(target, "jax") or within(target, "jaxlib")}
            allowed = (core, "autoshard.errors", *WITHOUT_JAX[core])
            other = {target for target in inside if not any(within(target, one) for one in allowed)}
            problems += [f"{module} imports {target}" for target in sorted(jax | other)]
        for unstable, files in users.items():
            if any(within(target, unstable) for target in imported):
                files.append(module)
    for unstable, files in users.items():
        if len(files) > UNSTABLE[unstable]:
            problems.append(f"{unstable} is imported by {', '.join(files)}; {UNSTABLE[unstable]} file(s) may")
    return problems


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Modules that import each other when they run, be it late, inside of functions."""
    imported = {
        module: {
            name
            for target in imports_of(source, package=module.rpartition(".")[0])
            for name in (target if target in sources else target.rpartition(".")[0],)
            if name in sources and name != module
        }
        for module, source in sources.items()
    }
    while ends := {module for module, others in imported.items() if not others & imported.keys()}:
        imported = {module: others for module, others in imported.items() if module not in ends}
    while starts := imported.keys() - {one for others in imported.values() for one in others}:
        imported = {module: others for module, others in imported.items() if module not in starts}
    return [[module, *sorted(others & imported.keys())] for module, others in sorted(imported.items())]


def package_sources() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file.read_text() for file in files}


def test_imports_run_one_way():
    assert violations(package_sources()) == []


def test_no_import_closes_a_circle():
    assert circles(package_sources()) == []


def test_a_circle_that_a_late_import_closes_is_found():
    late = "def f():\n    from autoshard import b\n"
    sources = {"autoshard.a": late, "autoshard.b": "import autoshard.c", "autoshard.c": "from autoshard.a import f"}
    assert [row[0] for row in circles(sources | {"autoshard.d": "import autoshard.a"})] == [*sources]
    typed = "if TYPE_CHECKING:\n    from autoshard.a import f\n"
    assert circles(sources | {"autoshard.c": typed}) == []


NEW = "autoshard.plans.new"  # a module of the middle
PLANTED = [  # module, its text, the one thing that the checker must say about it
    ("autoshard.layout", "from autoshard.solver import Problem", "imports autoshard.solver.__init__, a later room"),
    ("autoshard.layout", "from .program import Value", "autoshard.layout imports autoshard.program, a later room"),
    ("autoshard.mesh.topology", "def f():\n    import autoshard.plans.new", "imports autoshard.plans.new, a later"),
    ("autoshard.mesh.topology", "from autoshard import plan", "imports autoshard.__init__, a later room"),
    ("autoshard.mesh.topology", "from ..report import text", "autoshard.mesh.topology imports autoshard.report.text"),
    ("autoshard.model.__init__", "from .. import api", "autoshard.model.__init__ imports autoshard.api, a later"),
    (NEW, "if TYPE_CHECKING:\n    pass\nelse:\n    import autoshard.api", "imports autoshard.api, a"),
    (NEW, "from autoshard import lower", "autoshard.plans.new imports autoshard.lower.__init__, a later room"),
    ("autoshard.solver.exact.new", "import jax.numpy as jnp", "autoshard.solver.exact.new imports jax.numpy"),
    ("autoshard.solver.local_search.new", "from autoshard.mesh import Link", "new imports autoshard.mesh.__init__"),
    ("autoshard.pipeline.new", "from autoshard.solver import Problem", "new imports autoshard.solver.__init__"),
    (NEW, "from jax._src import core", "jax._src is imported by autoshard.plans.new; 0 file(s) may"),
    (NEW, "def text(plan):\n    from autoshard.report import text", "imports autoshard.report.text, a"),
    ("autoshard.helpers", "", "autoshard.helpers has no room"),
]
ALLOWED = [
    (NEW, "if TYPE_CHECKING:\n    from autoshard.api import plan"),
    ("autoshard.model.formulation", "import jax\nfrom autoshard.mesh.topology import Link"),
    ("autoshard.solver.new", "from autoshard.errors import SolverError\nfrom autoshard.solver.problem import Problem"),
    ("autoshard.__init__", "from autoshard.api import plan"),
]


def planted(module: str, text: str) -> dict[str, str]:
    """A small package with `text` in `module`, and nothing in its other files."""
    files = "__init__ api errors lower.__init__ plans.__init__ plans.new program mesh.__init__ mesh.topology"
    files += " report.__init__ report.text solver.__init__ solver.problem"
    return {f"autoshard.{name}": "" for name in files.split()} | {module: text}


@pytest.mark.parametrize("module, text, expected", PLANTED)
def test_the_checker_sees_planted_imports(module, text, expected):
    (problem,) = violations(planted(module, text))
    assert expected in problem


@pytest.mark.parametrize("module, text", ALLOWED)
def test_the_checker_lets_allowed_imports_pass(module, text):
    assert violations(planted(module, text)) == []


def test_the_checker_counts_the_users_of_unstable_parts():
    assert violations({"autoshard.program": "import jax.extend.core"}) == []
    problems = violations({"autoshard.program": "import jax.extend.core", "autoshard.lower": "from jax import extend"})
    assert problems == ["jax.extend is imported by autoshard.lower, autoshard.program; 1 file(s) may"]


# Modules that write environment variables, when they are called, and why. None reads one.
WRITERS = {
    "autoshard.mesh.targets": "libtpu takes from there alone that it need not look for the machine it runs on",
}


def touches_the_environment(module: str, source: str) -> bool:
    """Whether a module reads environment variables, or writes them unless it may."""
    if module in WRITERS:
        source = re.sub(r"\bos\.environ\.update\(", "", source)
    return bool(re.search(r"\b(environ|getenv|putenv)\b", source))


def test_no_environment_variable_is_read():
    assert [name for name, text in package_sources().items() if touches_the_environment(name, text)] == []


@pytest.mark.parametrize(
    "module, text",
    [
        ("autoshard.mesh.targets", "os.environ.update(A='1')\nhome = os.environ['HOME']"),
        ("autoshard.mesh.targets", "os.getenv('HOME')"),
        ("autoshard.api", "os.environ.update(A='1')"),
        ("autoshard.api", "from os import environ"),
    ],
)
def test_the_checker_sees_planted_environment_variables(module, text):
    assert touches_the_environment(module, text)


IMPORT_ALONE = """
import sys
import cvxpy, jax, numpy, rich  # what these read on import is their own affair
opened = []
def hook(event, args):
    name = str(args[0]) if args else ""
    own = name.endswith((".py", ".pyc")) or "__pycache__" in name or name.isdigit()  # a number: as it writes bytecode
    if event == "open" and not own:
        opened.append(name)
sys.addaudithook(hook)
import autoshard
for name in autoshard.__all__:  # each is imported when it is first asked for
    getattr(autoshard, name)
assert not jax._src.xla_bridge._backends, "importing autoshard started a JAX backend"
assert not opened, f"importing autoshard read {opened}"
"""


ALONE = """
import sys
sys.modules["jax"] = None  # importing it raises ImportError; cvxpy does so too, and goes on without
import autoshard.{room}
"""


@pytest.mark.parametrize("room", ["solver", "pipeline", "stage_search"])
def test_rooms_of_plain_data_do_without_jax(room):
    subprocess.run([sys.executable, "-c", ALONE.format(room=room)], check=True, timeout=120)


def test_names_are_there_when_asked_for():
    assert {*autoshard.__all__} <= {*dir(autoshard)}
    assert autoshard.solver.Problem.__module__ == "autoshard.solver.problem"  # without an import of its own
    with pytest.raises(AttributeError, match="module 'autoshard' has no attribute 'shard'"):
        _ = autoshard.shard
    with pytest.raises(ImportError):
        from autoshard import shard  # noqa: F401


def test_importing_starts_no_device_and_reads_nothing():
    subprocess.run([sys.executable, "-c", IMPORT_ALONE], check=True, timeout=120)


@pytest.mark.parametrize("planted, fault", [("jax.devices()", "backend"), ("open('/dev/null')", "/dev/null")])
def test_the_import_check_sees_planted_faults(planted, fault):
    script = IMPORT_ALONE.replace("import autoshard\n", f"import autoshard\n{planted}\n")
    result = forked.run(script, [Path(autoshard.__file__).parents[1]])
    assert result.returncode and fault in result.stderr.splitlines()[-1]


def has_docstring(name: str, value: object) -> bool:
    """Whether somebody wrote a docstring; dataclasses write their signature where there is none."""
    own = value.func if isinstance(value, cached_property) else getattr(value, "__func__", value)
    doc = vars(own).get("__doc__") if isinstance(own, type) else own.__doc__
    return bool(doc and doc.strip()) and not doc.startswith(f"{name.rpartition('.')[2]}(")


def undocumented(module: str, names: Iterable[str]) -> list[str]:
    """Public names of a module without a docstring, and the public methods and properties of its classes without."""
    home = importlib.import_module(module)
    found = {f"{module}.{name}": getattr(home, name) for name in names}
    for name, value in list(found.items()):
        if isinstance(value, type):
            members = {f"{name}.{member}": one for member, one in vars(value).items() if not member.startswith("_")}
            kinds = (FunctionType, property, cached_property, classmethod, staticmethod)
            found |= {member: one for member, one in members.items() if isinstance(one, kinds)}
    return [name for name, value in found.items() if not has_docstring(name, value)]


TYPES = {name: value for name, value in vars(autoshard.errors).items() if isinstance(value, type)}
ERRORS = [name for name, value in TYPES.items() if issubclass(value, Exception)]
PUBLIC = [("autoshard", autoshard.__all__)]
PUBLIC += [
    (room.__name__, [name for name in room.__all__ if callable(getattr(room, name))])
    for room in (autoshard.ops, autoshard.pipeline, autoshard.rewrites, autoshard.solver, autoshard.tactics)
]
PUBLIC += [("autoshard.decorated", ["ShardedFunction"]), ("autoshard.errors", ERRORS)]
PUBLIC += [("autoshard.compiled.verification", ["Verification"]), ("autoshard.user_plan", ["Plan"])]


@pytest.mark.parametrize("module, names", PUBLIC, ids=[module for module, _ in PUBLIC])
def test_public_names_have_docstrings(module, names):
    assert undocumented(module, names) == []


def test_a_missing_docstring_is_found(monkeypatch):
    monkeypatch.setattr(autoshard.Topology.save, "__doc__", None)
    monkeypatch.setattr(autoshard.evaluate, "__doc__", " ")
    monkeypatch.setattr(autoshard.Link, "__doc__", "Link(latency: float, bandwidth: float)")
    assert undocumented("autoshard", ["Link", "Topology", "evaluate"]) == [
        *("autoshard.Link", "autoshard.evaluate", "autoshard.Topology.save"),
    ]
