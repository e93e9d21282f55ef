"""Machines that are not there: what they are refused for, and small programs that are compiled for them and read."""

import functools
import importlib.util
import itertools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import adjusted, tally

import autoshard
from autoshard.compiled.collectives import peak_bytes, read_collectives
from autoshard.compiled.module import Module, shape_bytes
from autoshard.compiled.schedule import schedule_of
from autoshard.errors import MeshError
from autoshard.layout import layout_of
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.machines import parse_machine
from autoshard.mesh.targets import compiler_options, target_mesh
from autoshard.model.pricing.prices import PriceList
from autoshard.model.xla.backends import V5E, backend_of
from autoshard.options import options_of
from autoshard.planning import cheapest, formulated, lowered
from autoshard.plans.make_plan import make_plan
from autoshard.program import Value, trace
from autoshard.propagation import rules_for
from autoshard.user_plan import Plan

# chip -> what compiles for it
EXTRAS = {"v5e": "libtpu", "v5p": "libtpu", "v6e": "libtpu", "h100": "jax_cuda13_plugin"}


def needs(machine: str) -> None:
    for chip, extra in EXTRAS.items():
        if chip in machine:
            pytest.importorskip(extra)


@pytest.mark.parametrize(
    "name, message",
    [
        ("v5e:4x4", "compiling for v5e:4x4 needs libtpu: pip install 'autoshard[tpu]'"),
        ("2x v5e:4x4", "compiling for 2 x v5e:4x4 needs libtpu"),
        ("h100:2x8", "compiling for h100:2x8 needs the CUDA plugin of JAX: pip install 'autoshard[cuda]'"),
        ("cpu:8", "cpu:8 is no TPU or GPU; jax.config.update('jax_num_cpu_devices', ...) makes CPU devices"),
        ("abacus:8", "no machine 'abacus:8'"),
    ],
)
def test_what_cannot_be_had(monkeypatch, name, message):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in EXTRAS.values() else found(name))
    with pytest.raises(MeshError) as caught:
        target_mesh(name, {"x": 16})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, axes, message",
    [
        ("v5e:2x2", {"x": 8}, "v5e:2x2 has 4 devices, the mesh {'x': 8} has 8"),
        ("h100:2x2", {"x": 2}, "h100:2x2 has 4 devices, the mesh {'x': 2} has 2"),
        ("3x v5e:2x2", {"x": 2, "y": 6}, "the outermost of the mesh axes (2, 6) do not make up 3 slices"),
        ("v5e:3x3", {"x": 9}, "the compiler for v5e:3x3 cannot be had here"),
    ],
)
def test_meshes_that_do_not_fit(name, axes, message):
    needs(name)
    with pytest.raises(MeshError) as caught:
        target_mesh(name, axes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name, axes",
    [
        ("v5e:4x4", {"x": 4, "y": 4}),  # of 4 and 8 chips of a v5e JAX makes a ring
        ("v5p:4x4x4", {"x": 4, "y": 4, "z": 4}),
        ("2x v5e:4x4", {"slice": 2, "x": 4, "y": 4}),
        ("2x v5e:4x4", {"x": 8, "y": 4}),
        ("h100:2x4", {"x": 2, "y": 4}),
    ],
)
def test_meshes_of_machines_that_are_not_there(name, axes):
    needs(name)
    mesh = target_mesh(name, axes)
    assert dict(mesh.shape) == axes and set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert len(set(mesh.devices.flat)) == mesh.size
    assert mesh.devices.flat[0].platform == ("gpu" if "h100" in name else "tpu")
    if "h100" in name:  # as numbered: a host's are next to each other
        assert [device.id for device in mesh.devices.flat] == list(range(mesh.size))
        return
    slices = [_slice(device) for device in mesh.devices.flat]
    assert slices == sorted(slices)  # outermost
    _assert_neighbours(mesh.devices)


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", 0)


def _assert_neighbours(devices: np.ndarray) -> None:
    """Along each axis, and inside a slice, devices stand next to each other on the torus."""
    for axis in range(devices.ndim):
        for line in np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis]):
            for one, other in itertools.pairwise(line):
                if _slice(one) == _slice(other):
                    away = np.abs(np.array(one.coords) - np.array(other.coords))
                    assert away.sum() == 1, (one, other)


def test_devices_out_of_order_are_caught():
    needs("v5e")
    devices = target_mesh("v5e:4x4", {"x": 4, "y": 4}).devices
    with pytest.raises(AssertionError):
        _assert_neighbours(devices[[0, 2, 1, 3]])


@pytest.mark.parametrize("name, axes", [("v5e:4x4", {"x": 2, "y": 8}), ("v5p:2x2x4", {"x": 2, "y": 2, "z": 4})])
def test_axes_that_are_parts_of_a_dim_of_the_torus(name, axes):
    needs(name)
    assert dict(target_mesh(name, axes).shape) == axes


def step(weights, x):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


WEIGHTS, X = {"down": f32(2048, 512), "up": f32(512, 2048)}, f32(1024, 512)
SPECS = {"down": P("y", "x"), "up": P("x", "y")}, P("x")  # FSDP over x, Megatron over y
UP, SUM = 512 * 2048 // 4, 1024 // 2 * 512  # elements of a weight split over y, and of the activations that y sums up
COMPILED = {  # machine -> bytes by kind and axes; TPU gathers what products read in bfloat16
    "v5e:2x4": {("all_gather", ("x",)): 2 * 2 * UP, ("reduce_scatter", ("x",)): 2 * 4 * UP // 2,
                ("all_reduce", ("y",)): 4 * SUM, ("all_reduce", ("x",)): 4},
    "h100:2x4": {("all_gather", ("x",)): 2 * 4 * UP, ("reduce_scatter", ("x",)): 2 * 4 * UP // 2,
                 ("all_reduce", ("y",)): 4 * SUM, ("all_reduce", ("x",)): 4},
}  # fmt: skip


@pytest.mark.parametrize("machine", COMPILED)
def test_a_plan_for_a_machine_that_is_not_there(machine):
    needs(machine)
    plan = autoshard.evaluate(
        step, WEIGHTS, X, mesh=AbstractMesh((2, 4), ("x", "y")), topology=machine, in_shardings=SPECS, donate_argnums=0
    )
    found = plan.verify()  # compiles for the machine that it was planned for
    assert tally(plan.predicted.collectives) == found.actual == COMPILED[machine]
    assert found.collectives_agree, str(found)
    line = f"test_targets.py:{step.__code__.co_firstlineno + 2}"
    assert {(one.source, one.why) for one in found.collectives} >= {(line, "dot_general"), (line, "reduce_sum")}
    gathered = {one.why.split(" for ")[0] for one in found.collectives if one.kind == "all_gather"}
    assert gathered and gathered <= {"weights/down", "weights/up"}  # GPU gathers both at once
    assert 0.5 < found.predicted_seconds / found.schedule.step_seconds < 2
    assert "estimated time" in str(found)


MIB = 2**20
BOTH = P(("x", "y"))
GATHERED = [  # machine, mesh, how it is split, bytes that are gathered, what XLA makes of it
    ("v5e:8x8", (8, 8), BOTH, 16 * MIB, {("all_reduce", ("x", "y")): 16 * MIB}),
    ("v5e:8x8", (8, 8), BOTH, 17 * MIB, {("all_gather", ("x", "y")): 17 * MIB}),
    ("v5e:8x8", (8, 8), P("y"), MIB, {("all_gather", ("y",)): MIB}),  # not all devices
    ("v5e:4x8", (4, 8), BOTH, MIB, {("all_gather", ("x", "y")): MIB}),  # not many
    ("v6e:8x8", (8, 8), BOTH, 16 * MIB, {("all_reduce", ("x", "y")): 16 * MIB}),
    ("v5p:4x4x4", (16, 4), BOTH, 64 * MIB, {("all_reduce", ("x", "y")): 64 * MIB}),  # a torus of three dims: any size
    ("v5p:4x4x4", (16, 4), P("x"), MIB, {("all_gather", ("x",)): MIB}),
    ("v5e:8x8", (8, 8), P("x", "y"), 8 * MIB, {("all_reduce", ("x", "y")): 8 * MIB}),  # several dims at once
    ("v5e:8x8", (8, 8), P("x", "y"), 32 * MIB, {("all_gather", ("x", "y")): 32 * MIB}),
    ("h100:2x8", (2, 8), P("x", "y"), 8 * MIB, {("all_gather", ("y",)): 4 * MIB, ("all_gather", ("x",)): 8 * MIB}),
]


@pytest.mark.parametrize("machine, shape, spec, size, expected", GATHERED)
def test_what_gathers_become(machine, shape, spec, size, expected):
    """TPU sums those over all of many devices, and gathers several dims at once; GPU gathers as it is told."""
    needs(machine)
    mesh = AbstractMesh(shape, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def gathered(x):
        return jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P())) + 1

    x = jax.ShapeDtypeStruct((size // 2048, 1024), jnp.bfloat16)
    plan = autoshard.evaluate(gathered, x, mesh=mesh, topology=machine, in_shardings=(spec,))
    found = plan.verify(target=machine)
    assert found.predicted == found.actual == expected, str(found)


@pytest.mark.parametrize("spec, copied", [(P("x", "y"), False), (P("x", None, "y"), True)])
def test_pieces_that_come_in_order_are_not_copied(spec, copied):
    """Weights of 8 experts, gathered at once: one of them in each piece, of which some rows, or else some columns."""
    needs("v5e")
    axes, experts = {"x": 8, "y": 8}, jax.ShapeDtypeStruct((8, 2048, 1024), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((64, 8, 128, 2048), jnp.bfloat16)
    mesh = target_mesh("v5e:8x8", axes).abstract_mesh

    def multiplied(x, w):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return jnp.einsum("bgrm,gmh->bgrh", x, w)

    hlo = compiled_for("v5e:8x8", axes, multiplied, (P(("x", "y")), spec), P(("x", "y")), rows, experts)
    assert [one.kind for one in read_collectives(hlo, axes)] == ["all_gather"]
    copies = [step for _, step, _ in Module.of(hlo).executed() if step.opcode == "copy"]
    assert any(shape_bytes(step.shape) >= 2 * experts.size for step in copies) == copied
    found, plain = (
        PriceList(axes, autoshard.topology("v5e:8x8", axes), backend=backend).resharding(
            Value(0, experts.shape, experts.dtype, experts.size * 2), layout_of(spec, 3), ((),) * 3
        )
        for backend in (V5E, adjusted(V5E, "recopies", pieces=0))
    )
    assert (found > plain) == copied


def test_pieces_that_cut_tiles_are_put_in_order():
    """A stack of matrices that is gathered before the loop over it: by 63 rows, or by 256 columns."""
    needs("v5e")
    axes, stack = {"x": 16}, jax.ShapeDtypeStruct((8, 1008, 4096), jnp.bfloat16)
    mesh = target_mesh("v5e:4x4", axes).abstract_mesh

    def layers(x, stack):
        stack = jax.lax.with_sharding_constraint(stack, NamedSharding(mesh, P()))
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w.T, None), x, stack)[0]

    def cycles(spec):
        x = jax.ShapeDtypeStruct((16 * 2048, 1008), jnp.bfloat16)
        hlo = compiled_for("v5e:4x4", axes, layers, (P("x"), spec), P("x"), x, stack)
        assert [one.kind for one in read_collectives(hlo, axes)] == ["all_gather"]
        return sum(step.cycles * count for _, step, count in Module.of(hlo).executed())

    asked = PriceList(axes, autoshard.topology("v5e:4x4", axes), backend=V5E)
    value = Value(0, stack.shape, stack.dtype, stack.size * 2)
    rows, columns = P(None, "x"), P(None, None, "x")
    by_rows, by_columns = (asked.resharding(value, layout_of(spec, 3), ((),) * 3) for spec in (rows, columns))
    slower = (cycles(rows) - cycles(columns)) / CHIPS["v5e"].clock
    assert slower > by_rows - by_columns > 0


@pytest.mark.parametrize("machine, hidden", [("v5e:4x4", 1792), ("v5p:4x4x1", 1792), ("v5p:4x4x1", 2048)])
def test_columns_that_cut_tiles_are_put_in_order(machine, hidden):
    """Weights of 4 experts that are gathered for products both ways: 112 columns take longer than 128 rows do on v5p.

    On v5e they take a few percent longer; and 128 columns, which fill their tiles, on neither.
    """
    needs(machine)
    axes, experts = {"x": 16}, jax.ShapeDtypeStruct((4, 2048, hidden), jnp.bfloat16)
    mesh = target_mesh(machine, axes)

    def multiplied(x, w):
        w = jax.lax.with_sharding_constraint(jnp.sin(w), NamedSharding(mesh.abstract_mesh, P()))
        return jnp.einsum("egh,emh->egm", jnp.tanh(jnp.einsum("egm,emh->egh", x, w)), w)

    def cycles(spec):
        x = jax.ShapeDtypeStruct((4, 16 * 1024, 2048), jnp.bfloat16)
        hlo = compiled_for(machine, axes, multiplied, (P(None, "x"), spec), P(None, "x"), x, experts)
        return sum(step.cycles * count for _, step, count in Module.of(hlo).executed())

    asked = PriceList(axes, autoshard.topology(machine, axes), backend=backend_of(mesh))
    value = Value(0, experts.shape, experts.dtype, experts.size * 2)
    by_rows, by_columns = P(None, "x"), P(None, None, "x")
    rows, columns = (asked.resharding(value, layout_of(spec, 3), ((),) * 3) for spec in (by_rows, by_columns))
    slower = cycles(by_columns) / cycles(by_rows)
    assert (columns > rows) == (slower > 1.05)
    assert (columns - rows) * CHIPS[parse_machine(machine).chip].clock <= max(0, cycles(by_columns) - cycles(by_rows))


@pytest.mark.parametrize("machine", ["v5e:2x2", "v5p:2x2x1"])
def test_a_slice_takes_an_operation(machine):
    """However little a device cuts out of what it has."""
    needs(machine)
    hlo = compiled_for(machine, {"x": 4}, lambda row: row, (P(),), P("x"), f32(4, 128))
    slices = [step for _, step, _ in Module.of(hlo).executed() if "dynamic-slice" in step.name and step.cycles]
    clock = CHIPS[parse_machine(machine).chip].clock
    assert [step.cycles / clock for step in slices] == [pytest.approx(V5E.operations.least_seconds, rel=0.05)]


OPERATIONS = {  # function of what shapes: how many operations libtpu counts, each of 1.2 us and its work
    "elementwise": (lambda x, y: jnp.tanh(x) + y, [f32(8, 128), f32(8, 128)]),
    "a sum, and what it divides": (lambda x: x / x.sum(1, keepdims=True), [f32(64, 128)]),
    "a product of arguments": (jnp.matmul, [f32(64, 64), f32(64, 64)]),
    "a product and what is made of it alone": (lambda x, w: jnp.tanh(x @ w), [f32(64, 64), f32(64, 64)]),
    "a result that is a view": (lambda x: x.reshape(-1), [f32(8, 128)]),
    "a result that repeats": (lambda x: jnp.broadcast_to(x[:, None], (64, 8, 128)), [f32(64, 128)]),
    "numbers alone": (lambda x: jnp.sin(x) * x, [f32()]),
    "a Fourier transform": (lambda x: jnp.fft.fft2(x), [jax.ShapeDtypeStruct((8, 256, 256), jnp.complex64)]),
    "an insertion into an argument that stays": (
        lambda x, y, i: jax.lax.dynamic_update_slice(x, y, (i, 0)),
        [f32(4096, 128), f32(8, 128), jax.ShapeDtypeStruct((), jnp.int32)],
    ),
    "an insertion into zeros": (
        lambda y, i: jax.lax.dynamic_update_slice(jnp.zeros((4096, 128)), y, (i, 0)),
        [f32(8, 128), jax.ShapeDtypeStruct((), jnp.int32)],
    ),
}
# On v5p a turn of the loop over these takes five operations, and not three.
OPERATIONS_OF_V5E = {
    "slices in a batch": (
        jax.vmap(lambda x, i: jax.lax.dynamic_slice(x, (i,), (8,))),
        [f32(64, 64), jax.ShapeDtypeStruct((64,), jnp.int32)],
    ),
}


@pytest.mark.parametrize("machine", ["v5e:2x2", "v5p:2x2x1"])
def test_what_operations_take_however_little_they_do(machine):
    """Within a third of libtpu's cycles."""
    needs(machine)
    chip, axes = parse_machine(machine).chip, {"x": 4}
    mesh, clock = AbstractMesh((4,), ("x",)), CHIPS[parse_machine(machine).chip].clock
    for name, (fn, shapes) in (OPERATIONS | (OPERATIONS_OF_V5E if chip == "v5e" else {})).items():
        whole = [P()] * len(shapes)
        hlo = compiled_for(machine, axes, fn, tuple(whole), P(), *shapes)
        schedule = schedule_of(hlo, axes, autoshard.topology(machine, axes), clock)
        assert schedule.unestimated == (), name
        foreseen = autoshard.evaluate(
            fn, *shapes, in_shardings=tuple(whole), out_shardings=P(), mesh=mesh, topology=machine
        ).predicted.comparable_seconds
        assert foreseen == pytest.approx(schedule.compute_seconds, rel=1 / 3, abs=1e-7), (chip, name)


PEAKS = {  # function of what shapes: what a TPU has in the memory that arrays come from
    "temporaries lie in the chip": (lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w) @ w, [f32(512, 512), f32(512, 512)]),
    "what is sorted does not": (lambda x: jnp.sort(jnp.sin(x), 1).sum(), [f32(256, 1024)]),
    "what a loop waits for does not": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() > 0, jnp.sin, x * 2).sum(0),
        [f32(256, 1024)],
    ),
    "numbers do not": (
        lambda key, x: jax.random.bits(jax.random.wrap_key_data(key), (8, 128)) + x,
        [jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in ((2,), (8, 128))],
    ),
    "parts of a complex number do not": (lambda c: jnp.exp(c).real, [jax.ShapeDtypeStruct((), jnp.complex64)]),
    "what is too large does not": (lambda x: jnp.sort(jnp.sort(x, 1) * 2, 1).sum(), [f32(2**14, 1024)]),
}


@pytest.mark.parametrize("case", PEAKS)
def test_what_lies_outside_the_chip(case):
    """Within a fifth, or two numbers of 16 KiB, of what libtpu needs; `peak_memory_in_bytes` counts the chip, too."""
    needs("v5e:2x2")
    fn, shapes = PEAKS[case]
    whole = tuple(P() for _ in shapes)
    mesh = target_mesh("v5e:2x2", {"x": 4})
    shardings = tuple(NamedSharding(mesh, spec) for spec in whole)
    compiled = jax.jit(fn, in_shardings=shardings, out_shardings=NamedSharding(mesh, P())).lower(*shapes).compile()
    made = autoshard.evaluate(
        fn, *shapes, in_shardings=whole, out_shardings=P(), mesh=AbstractMesh((4,), ("x",)), topology="v5e:2x2"
    )
    assert made.predicted.peak_bytes == pytest.approx(peak_bytes(compiled), rel=0.2, abs=2**15)
    if case == "temporaries lie in the chip":
        assert compiled.memory_analysis().peak_memory_in_bytes > 1.2 * peak_bytes(compiled)


def test_operations_without_an_estimate_are_named():
    """Of a sort libtpu writes no cycles, of a loop it does not know how often it turns."""
    needs("v5e:2x2")
    axes = {"x": 4}
    hlo = compiled_for("v5e:2x2", axes, lambda x: jnp.sort(x, 1), (P(),), P(), f32(8, 128))
    schedule = schedule_of(hlo, axes, autoshard.topology("v5e:2x2", axes), CHIPS["v5e"].clock)
    assert schedule.unestimated == ("sort",)


def heads_step(weights, x):
    """Gradients of [512, 16, 64], which lie split along each of their dims, and of [512, 2048]."""

    def loss(weights):
        heads = sum(jnp.tanh(jnp.einsum("bm,mhd->bhd", x, w)) for w in weights["heads"])
        return jnp.sum(jnp.tanh(heads.reshape(len(x), -1) @ weights["out"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(jnp.subtract, weights, gradients), value


@pytest.mark.parametrize("axes", [{"x": 4, "y": 4}, {"x": 16}])
def test_tpu_reduce_scatters_what_a_plan_does(axes):
    """Whatever dim is scattered, over all devices of a mesh of two axes and of one; XLA's own are all_reduces."""
    needs("v5e:4x4")
    every = tuple(axes)
    weights = {"heads": [f32(512, 16, 64)] * 3, "out": f32(1024, 2048)}
    heads = {f"weights/heads/{dim}": P(*[None] * dim, every) for dim in range(3)}
    mesh, fixed = AbstractMesh(tuple(axes.values()), every), {**heads, "weights/out": P(None, every), "x": P(every)}
    options = options_of(mesh, topology="v5e:4x4", fixed=fixed)
    program = trace(heads_step, (weights, f32(8192, 512)), {}, donate_argnums=0)
    formulation = formulated(program, rules_for(program), options)
    scattering = {}  # a plan that reduce_scatters wherever it may, also where all_reduces are as fast
    for group in formulation.groups:
        ways = formulation.priced[group.index].strategies
        kinds = [{finish.kind for finish in way.finishes} for way in ways]
        if any("reduce_scatter" in kind for kind in kinds) and group.outputs[0].value.shape:
            scattering[formulation.group_node(group)] = [i for i, kind in enumerate(kinds) if "all_reduce" not in kind]
    restricted = replace(formulation, problem=formulation.problem.restrict(scattering))
    made = make_plan(formulation, cheapest(restricted, 20), mesh, ())
    plan = lowered(program, Plan.of(made), {})
    found = plan.verify(target="v5e:4x4")
    scattered = {one: bytes for one, bytes in found.actual.items() if one[0] == "reduce_scatter"}
    expected = {one: bytes for one, bytes in found.predicted.items() if one[0] == "reduce_scatter"}
    assert expected and scattered.keys() == expected.keys(), str(found)
    for one, bytes in expected.items():
        assert scattered[one] == pytest.approx(bytes, rel=0.1)
    assert sum(bytes for one, bytes in found.actual.items() if one[0] == "all_reduce") < 1e4, str(found)


@pytest.mark.parametrize("machine", COMPILED)
def test_a_jitted_function_for_a_machine_that_is_not_there(machine):
    needs(machine)
    mesh = target_mesh(machine, {"x": 2, "y": 4})
    placed = jax.tree.map(
        lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec)),
        (WEIGHTS, X), SPECS,
    )  # fmt: skip
    found = autoshard.verify(jax.jit(step, donate_argnums=0), *placed)
    assert not found.unpredicted and found.actual == COMPILED[machine], str(found)


@pytest.mark.parametrize("width, gathers", [(512, 1), (4096, 4)])
def test_gpu_combines_what_nothing_waits_for(width, gathers):
    """Gathers of weights become one of up to 30 MiB, and so do reduce_scatters of gradients, whose results count."""
    needs("h100")
    mesh, layers = target_mesh("h100:8", {"x": 8}), 4

    def runs(collectives):
        return sum((Counter({one.kind: one.count}) for one in collectives), Counter())

    def step(weights, x):
        def loss_of(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        gradients = jax.grad(loss_of)(weights)
        return [w - g for w, g in zip(weights, gradients, strict=True)]

    weights = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16)] * layers
    x = jax.ShapeDtypeStruct((4096, width), jnp.bfloat16)
    plan = autoshard.plan(step, weights, x, mesh=mesh, topology="h100:8", donate_argnums=0, fixed={"*": P("x")})
    compiled = plan.lowering().compile(compiler_options=compiler_options(mesh))
    planned, found = map(runs, (plan.predicted.collectives, read_collectives(compiled.as_text(), {"x": 8})))
    assert planned["all_gather"] >= layers and planned["reduce_scatter"] == layers
    assert (found["all_gather"], found["reduce_scatter"]) == (gathers, 1)


def test_gpu_pads_as_it_reads():
    """An associative scan puts sums of half the length between each other by padding them; no such array is stored."""
    needs("h100")

    def scanned(x):
        decayed = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.exp(-x), x * x), axis=1)
        return jnp.sum(decayed[1], axis=2)

    mesh = AbstractMesh((8,), ("x",))
    plan = autoshard.evaluate(scanned, f32(64, 256, 1024), mesh=mesh, topology="h100:8", in_shardings=(P("x"),))
    assert plan.predicted.peak_bytes < 8 * MIB * 2.5  # what is read, and pairs of the first level
    assert (found := plan.verify(target="h100:8")).memory_agrees, str(found)


def test_a_mesh_without_devices_needs_a_target():
    plan = autoshard.evaluate(jnp.sin, X, mesh=AbstractMesh((2, 4), ("x", "y")), in_shardings=(P("x"),))
    with pytest.raises(MeshError, match=r"Name a machine, as in verify\(target='v5e:4x4'\)"):
        plan.verify()


def convolve(images, kernel):
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def compiled_for(name, axes, fn, in_specs, out_spec, *arguments):
    mesh = target_mesh(name, axes)
    shardings = [tuple(NamedSharding(mesh, spec) for spec in in_specs), NamedSharding(mesh, out_spec)]
    lowered = jax.jit(fn, in_shardings=shardings[0], out_shardings=shardings[1]).lower(*arguments)
    return lowered.compile(compiler_options=compiler_options(mesh)).as_text()


ROWS = f32(512, 1024)
BETWEEN = [  # axes of two slices, function, shardings, collectives
    ({"s": 2, "x": 4}, lambda a: a.sum(0), P("s"), P(), [("all_reduce", ("s",))]),
    ({"s": 2, "x": 4}, lambda a: a.sum(0), P(("s", "x")), P(), [("all_reduce", ("x",)), ("all_reduce", ("s",))]),
    ({"s": 2, "x": 4}, lambda a: a * 2, P("s"), P(), [("all_gather", ("s",))]),
    ({"s": 2, "x": 4}, lambda a: a * 2, P("s"), P(None, "s"), [("all_to_all", ("s",))]),
    ({"a": 4, "x": 2}, lambda a: a.sum(0), P("a"), P(), [("all_reduce", ("a",)), ("all_reduce", ("a",))]),
    ({"s": 2, "x": 2, "y": 2}, lambda a: a * 2, P(("s", "x")), P(None, ("s", "x")), [("all_to_all", ("s", "x"))]),
    ({"s": 2, "x": 2, "y": 2}, lambda a: a * 2, P(("s", "y")), P(None, ("s", "y")), [("all_to_all", ("s", "y"))]),
]


@pytest.mark.parametrize("axes, fn, source, target, expected", BETWEEN)
def test_what_goes_on_between_slices(axes, fn, source, target, expected):
    needs("v5e")
    hlo = compiled_for("2x v5e:2x2", axes, fn, (source,), target, ROWS)
    assert read_between(hlo, axes) == expected


def read_between(hlo, axes):
    ids = [device.id for device in target_mesh("2x v5e:2x2", axes).devices.flat]
    return [(one.kind, one.axes) for one in read_collectives(hlo, axes, device_ids=ids)]


STAGES = [  # axes of the reduce_scatters of a program for two slices, what TPU makes of them
    ([("s", "x", "y")], [("all_reduce", ("x", "y")), ("reduce_scatter", ("s",))]),
    ([("s", "x")], [("all_reduce", ("x",)), ("reduce_scatter", ("s",))]),
    ([("y",), ("x",), ("s",)], [("reduce_scatter", ("y",)), ("reduce_scatter", ("x",)), ("reduce_scatter", ("s",))]),
]


@pytest.mark.parametrize("stages, expected", STAGES)
def test_scatters_between_slices_are_alone(stages, expected):
    """Together with some inside a slice they are an all_reduce there first: why we run them in stages."""
    needs("v5e")
    axes, everywhere = {"s": 2, "x": 2, "y": 2}, ("s", "x", "y")

    def scattered(a):
        for stage in stages:
            a = jax.lax.psum_scatter(a, stage, tiled=True)
        return a

    target = P(tuple(axis for axis in everywhere if any(axis in stage for stage in stages)))
    mesh = target_mesh("2x v5e:2x2", axes).abstract_mesh
    step = jax.shard_map(scattered, mesh=mesh, in_specs=P(None, everywhere), out_specs=target, check_vma=False)
    hlo = compiled_for("2x v5e:2x2", axes, step, (P(None, everywhere),), target, f32(4096, 8192))
    assert read_between(hlo, axes) == expected


@pytest.mark.parametrize("machine, products", [("v5e:2x2", 6), ("v5e:2x2", 8), ("v5p:2x2x1", 2)])
def test_what_a_loop_adds_up_stays_in_the_chip(machine, products):
    """Products of 16 MiB: XLA writes what it puts into the chip's own memory as in space 1."""
    needs(machine)

    def added(totals, xs):
        rows = lambda x, i: jnp.sin(x * i)  # noqa: E731
        return jax.lax.scan(lambda t, x: ([a + rows(x, i).T @ x for i, a in enumerate(t)], None), totals, xs)[0]

    totals = [f32(2048, 2048)] * products
    hlo = compiled_for(machine, {"x": 4}, added, (P(), P()), P(), totals, f32(8, 128, 2048))
    made = re.findall(r"= f32\[2048,2048\](\S+) fusion\(.*/while/body/.*dot_general", hlo)
    assert len(made) == products
    inside = sum("S(1)" in layout for layout in made)
    backend = backend_of(target_mesh(machine, {"x": 4}))
    fits = products * 2**24 <= backend.loop_memory.bytes
    assert (inside == products) == (fits and backend.loop_memory.keeps_sums) and (
        inside > 0
    ) == backend.loop_memory.keeps_sums


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("machine, weights", [("v5e:2x2", 12), ("v5e:2x2", 16), ("v5p:2x2x1", 4), ("v5p:2x2x1", 6)])
def test_what_a_loop_only_reads_stays_in_the_chip(machine, weights, gathered):
    """Of 8 MiB in bfloat16: as many as are said to, unless they are gathered just before, and then a share of them."""
    needs(machine)
    axes, spec = {"x": 4}, P("x") if gathered else P()
    mesh = target_mesh(machine, axes).abstract_mesh

    def recurrent(ws, state):
        ws = [jax.lax.with_sharding_constraint(2 * w, NamedSharding(mesh, spec)) for w in ws]
        ws = [jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P())) for w in ws]
        turn = lambda h, _: (functools.reduce(lambda h, w: jnp.tanh(h @ w), ws, h), None)  # noqa: E731
        return jax.lax.scan(turn, state, length=16)[0]

    hlo = compiled_for(machine, axes, recurrent, (spec, P()), P(), [f32(2048, 2048)] * weights, f32(128, 2048))
    (loop,) = re.findall(r"= (\(.*\)) while\(", hlo)
    read = re.findall(r"bf16\[2048,2048\]\{\S*\}", loop)
    assert len(read) == weights
    inside = sum("S(1)" in layout for layout in read)
    backend = backend_of(target_mesh(machine, axes))
    fits = weights * 2**23 <= backend.loop_memory.bytes
    fetched = backend.loop_memory.fetched_share if gathered else 0.0
    assert inside == weights * (1 - fetched) if fits else 0 < inside < weights


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("machine", ["v5e:2x2", "v5p:2x2x1"])
def test_products_with_a_vector_are_elementwise(machine, dtype):
    """The cycles of one row are those that are said; of two rows the matrix unit makes a product."""
    needs(machine)
    backend, clock = backend_of(target_mesh(machine, {"x": 4})), CHIPS[parse_machine(machine).chip].clock
    bandwidth = autoshard.topology(machine, {"x": 4}).memory_bandwidth
    matrix = jax.ShapeDtypeStruct((1024, 4096), dtype)
    said = (
        matrix.size
        * matrix.dtype.itemsize
        / (bandwidth * backend.vector_products.bandwidth_share[2 if dtype == jnp.bfloat16 else 4])
    )
    for rows in (1, 2):
        hlo = compiled_for(
            machine, {"x": 4}, jnp.matmul, (P(), P()), P(), jax.ShapeDtypeStruct((rows, 1024), dtype), matrix
        )
        longest = max(step.cycles for _, step, _ in Module.of(hlo).executed())
        assert (abs(longest / clock / said - 1) < 0.1) == ("multiply_reduce" in hlo) == (rows == 1)


@pytest.mark.parametrize("machine", ["v5e:2x2", "v5p:2x2x1"])
def test_weights_are_rounded_before_loops(machine):
    """Once, at the share of the memory's bandwidth that is said."""
    needs(machine)
    turn = lambda h, w: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=16)[0]  # noqa: E731
    hlo = compiled_for(machine, {"x": 4}, turn, (P(), P()), P(), f32(128, 2048), f32(2048, 2048))
    (rounded,) = (step for _, step, _ in Module.of(hlo).executed() if step.opcode == "convert")
    bandwidth = autoshard.topology(machine, {"x": 4}).memory_bandwidth
    share = backend_of(target_mesh(machine, {"x": 4})).loop_memory.rounding_share
    said = 6 * 2048 * 2048 / (bandwidth * share)
    assert rounded.cycles / CHIPS[parse_machine(machine).chip].clock == pytest.approx(said, rel=0.1)


BATCH, FEATURES = P(("x", "y")), P("x", None, None, "y")


@pytest.mark.parametrize("machine", ["v5e:4x4", "v5p:4x4x1"])
@pytest.mark.parametrize("source, target", [(FEATURES, BATCH), (BATCH, FEATURES)])
@pytest.mark.parametrize("pixels, channels", [(28, 128), (14, 512)])
def test_pieces_of_images_are_copied(machine, source, target, pixels, channels):
    """Pieces of 32 channels and of 128: predicted are a third to all of libtpu's own cycles."""
    needs(machine)
    axes = {"x": 4, "y": 4}
    mesh = target_mesh(machine, axes).abstract_mesh

    def convolved(x, before, after):
        x = jax.nn.relu(convolve(x, before))
        for spec in (source, target):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        return jax.nn.relu(convolve(x, after))

    images = jax.ShapeDtypeStruct((512, pixels, pixels, channels), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((3, 3, channels, channels), jnp.bfloat16)
    kernels = (P(None, None, None, "y"), P()) if source == FEATURES else (P(), P(None, None, "y"))
    hlo = compiled_for(machine, axes, convolved, (BATCH, *kernels), P("x"), images, kernel, kernel)
    done = [step for _, step, _ in Module.of(hlo).executed() if "sharding_constraint" in step.rest]
    seen = sum(step.cycles for step in done) / CHIPS[parse_machine(machine).chip].clock

    def predicted(backend):
        asked = PriceList(axes, autoshard.topology(machine, axes), backend=backend, images={0: (0, 3)})
        value = Value(0, images.shape, images.dtype, images.size * 2)
        return asked.resharding(value, *(layout_of(spec, 4) for spec in (source, target)))

    copies = predicted(V5E) - predicted(adjusted(V5E, "recopies", pieces=0, image_pieces=0))
    assert 1 / 3 < copies / seen < 1


def scanned(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def test_loops_of_tpu_programs():
    """XLA does not say how often they run: six layers, each of which scatters what it sums up."""
    needs("v5e")
    axes = {"x": 4, "y": 4}
    hlo = compiled_for("v5e:4x4", axes, scanned, (P("x"), P(None, "y")), P("x"), f32(1024, 512), f32(6, 512, 512))
    assert "known_trip_count" not in hlo
    reduced, gathered = read_collectives(hlo, axes)
    assert (reduced.kind, reduced.axes, reduced.count) == ("reduce_scatter", ("y",), 6)
    assert reduced.bytes == 6 * 256 * 128 * 4
    assert (gathered.kind, gathered.axes, gathered.count) == ("all_gather", ("y",), 1)
    twice = compiled_for("v5e:4x4", axes, scanned, (P("x"), P(None, "y")), P("x"), f32(1024, 512), f32(12, 512, 512))
    short, long = (schedule_of(text, axes, autoshard.topology("v5e:4x4", axes), 1.5e9) for text in (hlo, twice))
    layer = (long.compute_seconds - short.compute_seconds) / 6
    assert 0 < layer * 6 < short.compute_seconds < layer * 12


@pytest.mark.parametrize("machine, ahead", [("v5e:2x2", True), ("v5p:2x2x1", False)])
def test_loops_wait_for_stacks_that_are_gathered_and_on_v5p_for_slices(machine, ahead):
    """Nothing of these gathers is hidden."""
    needs(machine)
    axes = {"x": 4}
    mesh = target_mesh(machine, axes)
    whole = NamedSharding(mesh.abstract_mesh, P())

    def gathered(ws):
        return [jax.lax.with_sharding_constraint(w, whole) for w in ws]

    def step(x, *stacks):
        def layer(x, ws):
            up, down = ws if ahead else gathered(ws)
            return jnp.tanh(x @ up) @ down, None

        return jax.lax.scan(layer, x, gathered(stacks) if ahead else stacks)[0]

    shapes = (16384, 1024), (2, 1024, 4096), (2, 4096, 1024)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    hlo = compiled_for(machine, axes, step, (P("x"), P(None, "x"), P(None, "x")), P("x"), *operands)
    clock = CHIPS[parse_machine(machine).chip].clock
    schedule = schedule_of(hlo, axes, autoshard.topology(machine, axes), clock)
    hidden = 1 - schedule.exposed["all_gather"] / schedule.communication["all_gather"]
    assert hidden == pytest.approx(0, abs=0.1)
    assert ahead or backend_of(mesh).overlap.of("all_gather") == 0


TOKENS, MODEL, HIDDEN = 65536, 4096, 16384
FOUR, SIXTEEN = {"x": 4, "y": 4}, {"x": 1, "y": 16}
GATHERS = (P("x", "y"), P(None, "y")), ((TOKENS, MODEL), (MODEL, HIDDEN)), "all_gather"
SCATTERS = (P("x", "y"), P("y")), ((TOKENS, HIDDEN), (HIDDEN, MODEL)), "reduce_scatter"


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes, product, elements",
    [
        (FOUR, GATHERS, TOKENS // 4 * MODEL),
        (FOUR, SCATTERS, TOKENS // 4 * MODEL // 4),
        (SIXTEEN, GATHERS, TOKENS * MODEL),
        (SIXTEEN, SCATTERS, TOKENS * MODEL // 16),
    ],
)
def test_windowed_einsums(axes, product, elements):
    """Products so large that XLA does them piece by piece: unrolled over 4 devices, in a loop over 16."""
    needs("v5e")
    in_specs, shapes, kind = product
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    hlo = compiled_for("v5e:4x4", axes, jnp.matmul, in_specs, P("x", "y"), *operands)
    assert "collective-permute" in hlo and " all-gather(" not in hlo
    (one,) = read_collectives(hlo, axes)
    assert (one.kind, one.axes, one.count, one.bytes) == (kind, ("y",), 1, 2 * elements)


def test_keys_that_are_folded_in_on_a_mesh_without_devices():
    """What a trace makes of numbers may carry the mesh that it was made under, and be refused on that of the target."""
    needs("v5e:2x4")

    def step(weights, count, x, key):
        keep = jax.random.bernoulli(jax.random.fold_in(key, jnp.uint32(7)), 0.9, x.shape)
        return weights - 0.1 * jax.grad(lambda w: jnp.mean(((x * keep) @ w) ** 2))(weights), count + 1

    types = [((512, 512), "float32"), ((), "int32"), ((1024, 512), "float32"), ((2,), "uint32")]
    mesh = AbstractMesh((2, 4), ("x", "y"))
    arguments = [jax.ShapeDtypeStruct(*type_) for type_ in types]
    plan = autoshard.plan(step, *arguments, mesh=mesh, topology="v5e:2x4", donate_argnums=(0, 1))
    assert plan.verify(target="v5e:2x4").memory_agrees
