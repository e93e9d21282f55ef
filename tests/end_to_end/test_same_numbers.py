"""A plan never changes the numbers: every model, mesh, machine and memory limit against one device."""

import jax
import pytest
from oracles import MACHINES, MESHES, SMALL, assert_same_numbers, mesh_of

from autoshard import autoshard
from autoshard.model.xla.backends import CPU

# What the default run takes of the product: every model, nearly always where everything is split or under a limit;
# every mesh and machine with some model.
CHOSEN = {
    ("cnn", "4x2", "slow chips", "free"),
    ("tied", "2x2x2", "v5e", "tight"),
    ("gpt", "1", "slow chips", "free"),
    ("gpt scan", "8", "slow chips", "free"),
    ("lstm", "4x2", "slow chips", "free"),
    ("mlp", "4x2", "v5e", "tight"),
    ("moe", "4x2", "slow chips", "free"),
    ("moe", "8", "v5e", "tight"),
}
TIGHT_SHARE = 0.55  # of what the free plan holds; the least that any plan of these models holds is a third or less
CASES = [
    pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.slow, id="-".join(case))
    for case in (
        (name, mesh, machine, memory)
        for name in SMALL
        for mesh in MESHES
        for machine in MACHINES
        for memory in ("free", "tight")
        if (mesh, memory) != ("1", "tight")  # one device has one plan
    )
]


@pytest.mark.parametrize("name, mesh, machine, memory", CASES)
def test_five_steps_equal_one_device(name, mesh, machine, memory):
    model, axes = SMALL[name](), MESHES[mesh]
    arguments = model.state, model.batches(0)
    options = {"mesh": mesh_of(axes), "topology": MACHINES[machine](axes), "donate_argnums": 0, "time_limit": 2}
    step = autoshard(model.step, **options)
    if memory == "tight":
        free = step.plan(*arguments)
        step = autoshard(model.step, memory=TIGHT_SHARE * free.predicted.peak_bytes / CPU.usable, **options)
        assert step.plan(*arguments).annotations != free.annotations
    assert_same_numbers(name, step)


def test_the_oracle_sees_a_wrong_step():
    """A step that forgets a thousandth of its update is found out."""
    model = SMALL["mlp"]()

    def wrong(state, batch):
        new, loss = jax.jit(model.step)(state, batch)
        return jax.tree.map(lambda old, new: old + 0.999 * (new - old), state, new), loss

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_numbers("mlp", wrong)
