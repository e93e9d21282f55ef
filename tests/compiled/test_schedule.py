"""Seconds of compiled TPU programs in the order of their operations: small modules written as libtpu writes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import topology
from autoshard.compiled.schedule import schedule_of
from autoshard.errors import MeshError
from autoshard.mesh.collectives import seconds
from autoshard.mesh.host import host_seconds
from autoshard.model.xla.operations import KERNEL_SECONDS

MESH = {"x": 4, "y": 4}
MACHINE = topology("v5e:4x4", MESH)
CLOCK = 1e9
GROUPS = {"x": "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}",
          "y": "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}"}  # fmt: skip
ROWS = 1 << 20
GATHERED = f"bf16[{ROWS}]"
PIECE = f"bf16[{ROWS // 4}]"
TAKES = {axis: seconds("all_gather", (axis,), 2 * ROWS, MESH, MACHINE) for axis in MESH}


def work(name: str, cycles: int, operand: str = "p") -> str:
    config = f'backend_config={{"estimated_cycles":"{cycles}"}}'
    return f"%{name} = f32[8]{{0}} fusion(%{operand}), kind=kLoop, calls=%body_of_{name}, {config}"


def start(name: str, axis: str, channel: int) -> str:
    shape = f"({PIECE}{{0}}, {GATHERED}{{0}})"
    return f"%{name} = {shape} all-gather-start(%q), channel_id={channel}, {GROUPS[axis]}, dimensions={{0}}"


def done(name: str, begun: str) -> str:
    return f"%{name} = {GATHERED}{{0}} all-gather-done(%{begun})"


def gather(name: str, axis: str, channel: int) -> str:
    return f"%{name} = {GATHERED}{{0}} all-gather(%q), channel_id={channel}, {GROUPS[axis]}, dimensions={{0}}"


def module(*entry: str, **others: str) -> str:
    """The text of a module; fusions that compute have bodies of their own."""
    bodies = {f"body_of_w{n}": "  ROOT %r = f32[8]{0} parameter(0)" for n in range(9)} | others
    texts = [f"%{name} (a: f32[8]) -> f32[8] {{\n{text}\n}}" for name, text in bodies.items()]
    parameters = "%p = f32[8]{0} parameter(0)", f"%q = {PIECE}{{0}} parameter(1)"
    lines = "\n".join(f"  {line}" for line in (*parameters, *entry))
    return "HloModule m, num_partitions=16\n\n" + "\n\n".join(texts) + f"\n\nENTRY %main () -> f32[8] {{\n{lines}\n}}\n"


def found(*entry: str, **others: str):
    return schedule_of(module(*entry, **others), MESH, MACHINE, CLOCK)


def cycles(share: float) -> int:
    """So many that they last this share of a gather over one axis."""
    return round(share * TAKES["x"] * CLOCK)


def near(value: float):
    return pytest.approx(value, rel=1e-4)


def test_alone_it_is_waited_for():
    schedule = found(work("w1", 1000), gather("g", "x", 1), work("w2", 500))
    assert schedule.compute_seconds == near(1.5e-6)
    assert schedule.communication == schedule.exposed == {"all_gather": near(TAKES["x"])}
    assert schedule.step_seconds == near(1.5e-6 + TAKES["x"])


@pytest.mark.parametrize("share, exposed", [(0.25, 0.75), (1.0, 0.0), (3.0, 0.0)])
def test_between_start_and_done_it_is_hidden(share, exposed):
    schedule = found(start("s", "x", 1), work("w1", cycles(share)), done("d", "s"), work("w2", 1000))
    assert schedule.exposed["all_gather"] == pytest.approx(exposed * TAKES["x"], abs=1e-9)
    assert schedule.step_seconds == near(max(share, 1.0) * TAKES["x"] + 1e-6)


@pytest.mark.parametrize("axis, exposed", [("x", 1.5), ("y", 0.5)])
def test_links_of_one_axis_carry_one_after_the_other(axis, exposed):
    schedule = found(start("s", "x", 1), start("t", axis, 2), work("w1", cycles(0.5)), done("d", "s"), done("e", "t"))
    assert schedule.communication["all_gather"] == near(2 * TAKES["x"])
    assert schedule.exposed["all_gather"] == near(exposed * TAKES["x"])


def test_what_holds_up_another_is_exposed_itself():
    reduce = f"%r = f32[{ROWS}]{{0}} all-reduce(%p), channel_id=2, {GROUPS['x']}, to_apply=%add"
    schedule = found(start("s", "x", 1), reduce, done("d", "s"))
    reduced = seconds("all_reduce", ("x",), 4 * ROWS, MESH, MACHINE)
    assert schedule.exposed == {"all_gather": near(TAKES["x"]), "all_reduce": near(reduced)}


@pytest.mark.parametrize("source, ends", [("", 1), ("S(1)", 0), ("S(5)", 0)])
@pytest.mark.parametrize("share", [0.25, 3.0])
def test_copies_run_beside_work_at_the_rate_of_memory(source, ends, share):
    """What is waited for counts as computing; what moves inside the chip, or comes from the host, takes memory none."""
    moved = f"(f32[{ROWS}]{{0:S(1)}}, f32[{ROWS}]{{0:T(128){source}}}, u32[]{{:S(2)}})"
    begin, end = f"%c = {moved} copy-start(%p)", f"%e = f32[{ROWS}]{{0:S(1)}} copy-done(%c)"
    takes = 4 * ROWS / MACHINE.memory_bandwidth
    schedule = found(begin, work("w1", round(share * takes * CLOCK)), end, work("w2", 1000))
    assert schedule.compute_seconds == pytest.approx(max(share, ends) * takes + 1e-6, rel=1e-3)
    assert set(schedule.communication) == ({"host"} if source == "S(5)" else set())


SLICES = {"slices": 2, "x": 4, "y": 4}
NETWORK = topology("2x v5e:4x4", SLICES)


def between(*order: str) -> list[str]:
    """A gather between slices, its instructions and work in this order."""
    host = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
    told = '_xla_host_transfer_rendezvous="all-gather_0",_xla_megascale_target="{1,2}x{0:15}"'
    told = f'is_host_transfer=true, frontend_attributes={{{host},{told},_xla_megascale_transfer_type="ALL_GATHER"}}'
    lines = {
        "send": f"%send = ({PIECE}{{0}}, u32[], token[]) send(%q, %after), channel_id=2, {told}",
        "recv": f"%recv = ({GATHERED}{{0}}, u32[], token[]) recv(%after), channel_id=1, {told}",
        "send-done": "%send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true",
        "recv-done": f"%recv-done = ({GATHERED}{{0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true",
        "in slice": gather("g", "x", 1),
    }
    return [lines[name] if name in lines else work(name, 10**5) for name in order]


@pytest.mark.parametrize(
    "order, hidden",  # of the gather between slices, 0.1 ms
    [
        (["send", "recv", "send-done", "recv-done", "w1"], 0),
        (["send", "recv", "w1", "send-done", "recv-done"], 1),
        (["send", "w1", "recv", "w2", "recv-done", "send-done"], 2),
        (["w1", "recv", "w2", "send", "w3", "recv-done"], 1),
    ],
)
def test_between_slices_it_runs_from_send_to_recv_done(order, hidden):
    text = module(*between(*order))
    schedule = schedule_of(text, SLICES, NETWORK, CLOCK)
    takes = seconds("all_gather", ("slices",), 2 * ROWS, SLICES, NETWORK)
    assert schedule.communication == {"all_gather": near(takes)}
    assert schedule.exposed == {"all_gather": near(max(0, takes - hidden * 1e-4))}


def test_the_network_and_the_links_of_a_slice_work_at_once():
    schedule = schedule_of(module(*between("send", "recv", "in slice", "recv-done")), SLICES, NETWORK, CLOCK)
    assert schedule.step_seconds == near(seconds("all_gather", ("slices",), 2 * ROWS, SLICES, NETWORK))


def test_what_is_never_sent_does_not_come():
    with pytest.raises(MeshError, match="nothing is sent for recv"):
        schedule_of(module(*between("recv", "recv-done")), SLICES, NETWORK, CLOCK)


def part(axis: str) -> str:
    return "  " + gather("inside", axis, 7)


def in_fusion(name: str, count: int) -> str:
    config = f'backend_config={{"estimated_cycles":"{count}"}}'
    return f"%{name} = {GATHERED}{{0}} fusion(%q), kind=kCustom, calls=%calls_{name}, {config}"


def test_parts_in_several_fusions_are_one():
    """It begins with the first of them, and is done with the last."""
    fusions = in_fusion("f1", 0), in_fusion("f2", cycles(0.5)), in_fusion("f3", 0)
    schedule = found(*fusions, calls_f1=part("x"), calls_f2=part("x"), calls_f3=part("x"))
    assert schedule.communication == {"all_gather": near(TAKES["x"])}
    assert schedule.exposed["all_gather"] == near(0.5 * TAKES["x"])


def loop(turns: int) -> str:
    known = f'backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    return f"%loop = (s32[]) while(%p), condition=%condition, body=%turn, {known}"


CONDITION = "  ROOT %c = pred[] parameter(0)"


def test_what_is_inside_a_fusion_has_been_counted():
    inside = '  %c = f32[8]{0} convolution(%a, %a), backend_config={"estimated_cycles":"70"}'
    assert found(work("f", 1000), work("w2", 20), body_of_f=inside).compute_seconds == near(1.02e-6)
    called = "%called = f32[8]{0} call(%p), to_apply=%aside"
    assert found(called, aside=f"  {work('w1', 70)}").compute_seconds == near(70e-9)


def test_programs_for_cpu_say_nothing():
    text = jax.jit(jnp.sin).lower(np.zeros(8, np.float32)).compile().as_text()
    assert schedule_of(text, MESH, MACHINE, CLOCK).step_seconds == 0


def test_loops_turn():
    turn = "  " + "\n  ".join([work("w1", 1000), gather("g", "y", 1)])
    schedule = found(loop(5), condition=CONDITION, turn=turn)
    assert schedule.compute_seconds == near(5e-6)
    assert schedule.communication == schedule.exposed == {"all_gather": near(5 * TAKES["y"])}
    assert schedule.step_seconds == near(5e-6 + 5 * TAKES["y"])


def test_parts_in_a_loop_are_of_the_one_outside():
    """A gather that goes on beside a loop stands in the loop's body, too."""
    turn = "  " + in_fusion("f2", cycles(0.125))
    bodies = {"calls_f1": part("x"), "calls_f2": part("x"), "calls_f3": part("x")}
    schedule = found(in_fusion("f1", 0), loop(4), in_fusion("f3", 0), condition=CONDITION, turn=turn, **bodies)
    assert schedule.communication == {"all_gather": near(TAKES["x"])}
    assert schedule.exposed["all_gather"] == near(0.5 * TAKES["x"])


def test_a_turn_before_the_loop_shares_its_channel():
    schedule = found(gather("g1", "x", 7), loop(4), condition=CONDITION, turn="  " + gather("g2", "x", 7))
    assert schedule.communication == schedule.exposed == {"all_gather": near(5 * TAKES["x"])}


def test_what_shards_write_shares_a_channel():
    """All collectives of `shard_map` have one channel, and differ in where they come from."""
    names = ['metadata={op_name="jit(f)/a"}', 'metadata={op_name="jit(f)/b"}']
    first, second = (f"{gather(f'g{n}', 'x', 1)}, {name}" for n, name in enumerate(names))
    schedule = found(first, work("w1", cycles(1.0)), second)
    assert schedule.exposed == {"all_gather": near(2 * TAKES["x"])}


def test_a_gpu_program_lasts_as_long_as_its_roofline():
    """Of a gather that a sum of two vectors runs beside, what is longer than the sum is waited for."""
    body = "  %a = f32[64]{0} parameter(0)\n  ROOT %r = f32[64]{0} add(%a, %a)"
    added = "%w1 = f32[64]{0} fusion(%p), kind=kLoop, calls=%body_of_w1"
    text = module(start("s", "x", 1), added, done("d", "s"), body_of_w1=body)
    found = schedule_of(text, MESH, MACHINE, None)
    sums = KERNEL_SECONDS + 2 * 64 * 4 / MACHINE.memory_bandwidth  # 256 bytes read, as many written
    assert found.compute_seconds == pytest.approx(sums, rel=1e-9)
    assert found.exposed["all_gather"] == pytest.approx(TAKES["x"] - sums, rel=1e-9)


def test_a_fusion_that_a_collective_stands_in_computes_too():
    """The cycles that XLA notes on it count, beside what the collective takes."""
    fused = gather("g", "x", 1).replace("%g =", "  ROOT %g =").replace("%q", "%a")
    body = f"  %a = {PIECE}{{0}} parameter(0)\n{fused}"
    waits = found(work("w1", cycles(0.5), operand="q"), body_of_w1=body)
    assert waits.compute_seconds == near(0.5 * TAKES["x"])
    assert waits.exposed["all_gather"] == near(0.5 * TAKES["x"])


STACK, SLICE = f"f32[4,{ROWS}]{{1,0:T(1024)S(5)}}", f"f32[1,{ROWS}]{{1,0:T(1024)}}"
TAKES_HOST = host_seconds(4 * ROWS, MACHINE)
TRANSFERS = {
    "sent": f"%s = (({STACK}, {SLICE}, s32[]), {STACK}, u32[]{{:S(2)}}) dynamic-update-slice-start(%h, %v, %i)",
    "fetched": f"%f = (({STACK}, s32[]), {SLICE}, u32[]{{:S(2)}}) dynamic-slice-start(%h, %i)",
    "copied": f"%c = (f32[{ROWS}]{{0:S(5)}}, f32[{ROWS}]{{0}}, u32[]{{:S(2)}}) copy-start(%v)",
    "inside": f"%n = (f32[{ROWS}]{{0:S(1)}}, f32[{ROWS}]{{0}}, u32[]{{:S(2)}}) copy-start(%v)",
    "on the host": f"%k = (f32[{ROWS}]{{0:S(5)}}, f32[{ROWS}]{{0:S(5)}}, u32[]{{:S(2)}}) copy-start(%v)",
}


def finished(name: str) -> str:
    begun = TRANSFERS[name].split(" ")[0]
    kind = TRANSFERS[name].split("-start(")[0].split(" ")[-1]
    return f"{begun}-done = {STACK} {kind}-done({begun})"


@pytest.mark.parametrize(
    "order, exposed",  # of one transfer's time; None: nothing goes to the host
    [
        (["sent", "done sent"], 1.0),
        (["sent", "half", "done sent"], 0.5),
        (["sent", "fetched", "half", "done sent", "done fetched"], 0.5),  # both ways at once
        (["sent", "copied", "done sent", "done copied"], 2.0),  # one way, one after the other
        (["inside", "half", "done inside"], None),
        (["on the host", "half", "done on the host"], None),
    ],
)
def test_what_goes_to_the_host_and_back(order, exposed):
    lines = {"half": work("w1", round(0.5 * TAKES_HOST * CLOCK))} | TRANSFERS
    schedule = found(*(finished(name[5:]) if name.startswith("done ") else lines[name] for name in order))
    assert schedule.exposed == ({} if exposed is None else {"host": pytest.approx(exposed * TAKES_HOST, rel=1e-3)})


def test_a_copy_from_the_host_is_waited_for():
    there = f"%h = f32[{ROWS}]{{0:S(5)}} get-tuple-element(%t), index=0"
    schedule = found(there, f"%c = f32[{ROWS}]{{0}} copy(%h)", work("w1", 1000))
    assert schedule.step_seconds == near(TAKES_HOST + 1e-6)
