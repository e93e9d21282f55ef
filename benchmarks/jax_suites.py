"""JAX's own tests with `jax.jit` replaced by autoshard: which fail that pass under `jax.jit`.

    python benchmarks/jax_suites.py --jax-tests ~/jax/tests                          # all suites: hours
    python benchmarks/jax_suites.py --jax-tests ~/jax/tests --suites nn_test --sample 50
    python benchmarks/jax_suites.py --jax-tests ~/jax/tests --only scan --rows FILE  # adds to the results in the file

The tests are not in JAX's wheels: PATH is the folder `tests` of a checkout of JAX at the version that is installed. In
them, and in JAX's test utilities, `jax.jit(fn)` called with arrays is `autoshard(fn)` on eight CPU devices, for a
machine whose links cost nothing, so that all that can be split is split. Under a trace, with a tracer among the
arguments, with keywords that autoshard has not (`in_shardings`, `device`, ...), and where a test asks the jitted
function for more than a call, it is `jax.jit`. Tests that fail run again with `jax.jit` left as it is; those that pass
then are faults, unless `KNOWN` says why not. The exit status is 1 if there are any.
"""

import argparse
import collections
import fnmatch
import functools
import importlib
import itertools
import json
import os
import random
import sys
import time
import traceback
import unittest
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from harnesses import FLAGS, PLANNING_SECONDS, fast_links  # noqa: E402  (needs the path above)
from workers import Ended, Worker, answers, serve  # noqa: E402

SUITES = ("lax_control_flow_test", "nn_test", "random_lax_test", "fft_test", "linalg_test", "pjit_test")
KEYWORDS = {"static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "keep_unused", "compiler_options"}
LEFT_OUT = ("pjit_test.ShardingInTypesTest",)  # asserts the shardings of traced values, unless --only asks for it
COUNTS = "counts traces, lowerings or cache hits of jax.jit"
PLACES = "asserts where a result lies or what is annotated; a plan says that"
PARTS = "passes or returns parts of a sum, for which plans have no layout"
TAKEN = "asserts an error of what autoshard takes"
TYPES = "asserts the type of an argument on Auto axes, which autoshard traces without a mesh"
OTHER_DEVICES = "puts or constrains an array to devices other than the plan's, as jax.jit with shardings refuses too"
ROUNDINGS = "compares the last digits of sums in another order; noise in the input makes as large a difference"
KNOWN: dict[str, str] = {  # pattern of "test: detail" -> why it cannot pass
    "*: ValueError: Received incompatible devices for jitted computation*": OTHER_DEVICES,
    "*: autoshard.errors.MeshError: * runs on devices *": OTHER_DEVICES,
    "*: autoshard.errors.ConflictError: * the mesh *": OTHER_DEVICES,
    "*: autoshard.errors.ConflictError: an argument or result has the type *": PARTS,
    "*: autoshard.errors.MeshError: JAX refuses * for its shardings *": "asserts an error of JAX's, which is named",
    "*.test_auto_axes_numpy_array: *": TYPES,
    "*.test_auto_mode_no_context_mesh: *": TYPES,
    "*.test_broadcasting_nary_error: *": TAKEN,
    "*.test_random_normal_wo_mesh_context_error: *": TAKEN,
    "*.test_wsc_error: *": TAKEN,
    "*.test_changing_abstract_device: *": COUNTS,
    "*.test_compilation_cache_miss_when_devices_change: *": COUNTS,
    "*.test_eval_shape_jitted_fun_cache_hit: *": COUNTS,
    "*.test_auto_user: *": PLACES,
    "*.test_dot_empty_mesh_lhs_rhs: *": PLACES,
    "*.test_explicit_axes_top_level: *": PLACES,
    "*.test_only_auto: *": PLACES,
    "*.test_out_sharding_mix_axis_types: *": PLACES,
    "*.test_rng_bit_generator: *": PLACES,
    "*.test_set_mesh_none: *": PLACES,
    "*.test_wsc_mix_axis_types: *": PLACES,
    "*.test_check_arg_error: *": "asserts the words of an error",
    "*.test_vmap_spmd_axis_name_error: *": "asserts the words of an error",
    "*.test_jit_with_sharding_constraint_committed_inp_error: *": "asserts an error; arguments are moved to the mesh",
    "*.test_device_put_copy_donate: *": "a donated array that has to be moved is copied, and stays",
    "*.test_cache_miss_explanations*": COUNTS,
    "*.test_different_devices_wsc_abstract_mesh_cache_hit: *": COUNTS,
    "*.test_jit_cpp_cache_obj_config: *": COUNTS,
    "*.test_jit_submhlo_cached: *": COUNTS,
    "*lowering_cache_hit_*": COUNTS,
    "*.test_wsc_aval_cache_hit: *": COUNTS,
    "*.testShardingConstraintPyTree*": PLACES,
    "*.test_jit_mul_sum_sharding_preserved: *": PLACES,
    "*.test_partial_sharded_prng_key_inp: *": PLACES,
    "*.test_prng_sharding_propagation*": PLACES,
    "*.test_single_device_*sharding_preserved: *": PLACES,
    "*.test_with_sharding_constraint_jit: *": PLACES,
    "*.test_wsc_named_sharding_nullary: *": PLACES,
    "*.test_wsc_vmap_abstract_mesh: *": PLACES,
} | {  # of other sizes they pass
    f"linalg_test.ScipyLinalgTest.{name}: AssertionError:  Not equal to tolerance *": ROUNDINGS
    for name in (
        *(f"testSqrtmPSDMatrix{i}" for i in (3, 6, 7)),
        *(f"testRsf2csf{i}" for i in (0, 4, 5, 6, 7, 8)),
        *(f"test_solve_sylvester{i}" for i in (1, 2, 3, 4, 5, 7, 8, 9)),
    )
}  # fmt: skip
TEST_SECONDS = 300
KEPT_TESTS = 20  # before JAX forgets what it compiled


@dataclass(frozen=True)
class Row:
    """What became of one test."""

    test: str  # module.class.method
    outcome: str  # "passes", "skipped", "fails", "crashes", "hangs"
    calls: int = 0  # of autoshard
    plain: str = ""  # the outcome under `jax.jit`, if it does not pass under autoshard
    detail: str = ""
    seconds: float = 0.0

    @property
    def known(self) -> str | None:
        said = f"{self.test}: {self.detail}"
        return next((reason for pattern, reason in KNOWN.items() if fnmatch.fnmatchcase(said, pattern)), None)

    @property
    def is_fault(self) -> bool:
        return self.outcome in ("fails", "crashes", "hangs") and self.plain == "passes"


# In a worker.


class Replacement:
    """What stands for `jax.jit`: makes functions that autoshard runs where it can."""

    def __init__(self, jit: Callable):
        functools.update_wrapper(self, jit)  # haiku and others read its name
        self.jit, self.calls = jit, 0

    @functools.cached_property
    def mesh(self) -> Any:
        """Of the devices that there are once a test runs: libraries may ask for fewer than eight."""
        import jax

        pairs = max(1, jax.device_count() // 2)
        return jax.make_mesh((pairs, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def __call__(self, fn: Callable | None = None, **keywords: Any) -> Any:
        keywords = {name: value for name, value in keywords.items() if value is not None}
        return functools.partial(self, **keywords) if fn is None else Jitted(fn, keywords, self)


class Jitted:
    """A jitted function that autoshard calls if it can."""

    def __init__(self, fn: Callable, keywords: dict[str, Any], replacement: Replacement):
        functools.update_wrapper(self, fn)  # first: it copies what another one of these has
        self._fn, self._keywords, self._replacement = fn, keywords, replacement
        self._jitted = replacement.jit(fn, **keywords)
        self._steps: dict[Any, Callable] = {}  # by mesh

    def _step(self, leaves: Sequence[Any]) -> Callable:
        """The function under autoshard, on the mesh that the arguments or the test are on, if it is on any."""
        import jax

        from autoshard import autoshard

        context = jax.sharding.get_mesh()
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        meshes = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding) and x.mesh.size > 1]
        mesh = context if not context.empty else meshes[0] if meshes else self._replacement.mesh
        if mesh not in self._steps:
            options = {"mesh": mesh, "topology": fast_links(mesh.shape), "time_limit": PLANNING_SECONDS}
            self._steps[mesh] = autoshard(self._fn, **options, **self._keywords)
        return self._steps[mesh]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import jax
        from jax._src.core import trace_state_clean

        leaves = jax.tree.leaves((args, kwargs), is_leaf=_may_hold_itself)
        traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        inside = not trace_state_clean() or jax.config.jax_disable_jit
        if traced or inside or self._keywords.keys() - KEYWORDS:
            return self._jitted(*args, **kwargs)
        self._replacement.calls += 1
        return self._step(leaves)(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def _may_hold_itself(node: Any) -> bool:
    """Whether it is an nnx module, a graph that need not be a tree."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and nnx.graph.is_graph_node(node)


def ran(test: str, replaces: bool) -> Row:
    """One test run, under autoshard or not."""
    import jax
    from jax._src import api, test_util

    started = time.perf_counter()
    name, case, method = test.split(".", 2)
    module = importlib.import_module(name)
    result, replacement = unittest.TestResult(), Replacement(jax.jit)
    loaded = getattr(module, case)(method)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=_unknown_primitive())
        if replaces:
            with _replaced(jax, replacement), _replaced(module, replacement), _utilities(test_util, api, replacement):
                loaded.run(result)
        else:
            loaded.run(result)
    bad = [*result.errors, *result.failures]
    outcome = "fails" if bad else "skipped" if result.skipped else "passes"
    detail = _last(bad[0][1]) if bad else ""
    return Row(test, outcome, replacement.calls, detail=detail, seconds=time.perf_counter() - started)


def _unknown_primitive() -> type[Warning]:
    from autoshard.propagation import UnknownPrimitiveWarning

    return UnknownPrimitiveWarning


def _replaced(module: ModuleType, replacement: Replacement) -> Any:
    """A context in which the module's name for `jax.jit` is another."""
    names = {name: replacement for name, value in vars(module).items() if value is replacement.jit}
    return unittest.mock.patch.multiple(module, **names) if names else unittest.mock.patch.dict({})


def _utilities(test_util: ModuleType, api: ModuleType, replacement: Replacement) -> Any:
    """A context in which JAX's test utilities compile by another function."""
    return unittest.mock.patch.object(test_util, "api", SimpleNamespace(**vars(api) | {"jit": replacement}))


def _last(text: str) -> str:
    """The error of a printed traceback, and whether it came out of autoshard."""
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line[0] not in " \t" and not line.startswith(("Traceback", "---"))]
    errors = [i for i in starts if lines[i].split(":")[0].replace(".", "").isidentifier()]
    where = [line.strip() for line in lines if "/autoshard/" in line]
    at = f" [{where[-1].split('/')[-1]}]" if where else ""
    return f"{' '.join(lines[errors[-1] if errors else -1 :])[:400]}{at}"


def work(path: str, replaces: bool) -> None:
    import jax

    sys.path.insert(0, path)
    count = 0

    def answer(test: str) -> dict:
        nonlocal count
        count += 1
        if count % KEPT_TESTS == 0:
            jax.clear_caches()
        try:
            return asdict(ran(test, replaces))
        except BaseException as error:  # such as SystemExit; only what ends the process is left to the parent
            return asdict(Row(test, "fails", detail="".join(traceback.format_exception_only(error))[:300]))

    serve(answer)


# In this process.


def tests_of(path: Path, suites: Sequence[str], only: str | None, sample: int | None, seed: int) -> list[str]:
    """The tests' names, so many of each suite, one of each in turn."""
    sys.path.insert(0, str(path))
    turns = []
    for suite in suites:
        tests = _flat(unittest.defaultTestLoader.loadTestsFromName(suite))
        names = [f"{suite}.{type(test).__name__}.{test._testMethodName}" for test in tests]
        names = [name for name in names if (only in name if only else not name.startswith(LEFT_OUT))]
        random.Random(seed).shuffle(names)
        turns.append(names[:sample])
    return [name for turn in itertools.zip_longest(*turns) for name in turn if name is not None]


def _flat(suite: Any) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestSuite):
        for one in suite:
            yield from _flat(one)
    else:
        yield suite


def rows_of(tests: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """What became of the tests, as they end."""
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "JAX_NUM_GENERATED_CASES": str(options.cases)}
    command = [__file__, "--jax-tests", str(options.jax_tests), "--worker"]
    plain = Worker([*command, "jit"], environment, TEST_SECONDS)
    worker = functools.partial(Worker, [*command, "autoshard"], environment, TEST_SECONDS)
    for test, answer in answers(tests, options.jobs, worker):
        row = _row(test, answer)
        if row.outcome not in ("passes", "skipped"):
            row = replace(row, plain=_row(test, plain(test)).outcome)
        yield row
    plain.close()


def _row(test: str, answer: Any) -> Row:
    if isinstance(answer, Ended):
        return Row(test, "hangs" if answer.late else "crashes", detail=answer.detail)
    return Row(**answer)


def print_table(rows: Sequence[Row]) -> None:
    columns = ("tests", "called", "skipped", "passes", "fails as jit", "known", "faults")
    print(f"{'suite':24} " + " ".join(f"{column:>12}" for column in columns))
    for suite in dict.fromkeys(row.test.split(".")[0] for row in rows):
        of = [row for row in rows if row.test.split(".")[0] == suite]
        outcomes = collections.Counter(row.outcome for row in of)
        faults = [row for row in of if row.is_fault]
        known = sum(row.known is not None for row in faults)
        as_jit = len(of) - outcomes["passes"] - outcomes["skipped"] - len(faults)
        called = sum(row.calls > 0 for row in of)
        figures = len(of), called, outcomes["skipped"], outcomes["passes"], as_jit, known, len(faults) - known
        print(f"{suite:24} " + " ".join(f"{figure:>12}" for figure in figures))


def print_faults(rows: Sequence[Row]) -> None:
    for row in rows:
        if row.is_fault:
            print(f"\n{row.test} {row.outcome}\n    {row.known or row.detail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax-tests", type=Path, required=True, metavar="PATH", help="the folder tests of a checkout")
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--only", help="a part of the tests' names")
    parser.add_argument("--sample", type=int, help="how many tests of each suite")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--cases", type=int, default=10, help="how many cases JAX draws of each of its products")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=Path, help="a file of results to add to, one line of JSON each")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(str(options.jax_tests), options.worker == "autoshard")
        return 0
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_GENERATED_CASES": str(options.cases)}
    tests = tests_of(options.jax_tests, options.suites, options.only, options.sample, options.seed)
    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else ()
    found = {row.test: row for row in (Row(**json.loads(line)) for line in kept)}
    left, started = [test for test in tests if test not in found], time.perf_counter()
    with open(options.rows or os.devnull, "a") as file:
        for count, row in enumerate(rows_of(left, options), 1):
            found[row.test] = row
            print(json.dumps(asdict(row)), file=file, flush=True)
            if row.is_fault and not row.known:
                print(f"{row.test} {row.outcome}: {row.detail}", flush=True)
            if count % 100 == 0:
                print(f"{count} of {len(left)}, {count / (time.perf_counter() - started):.2f} a second", flush=True)
    rows = [found[test] for test in tests]
    print_table(rows)
    print_faults(rows)
    return int(any(row.is_fault and not row.known for row in rows))


if __name__ == "__main__":
    sys.exit(main())
