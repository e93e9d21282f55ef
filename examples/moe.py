"""A mixture-of-experts layer in plain einsum, whose plan has all-to-alls that nobody wrote.

    python examples/moe.py

The layer is GShard's (Lepikhin et al. 2020, algorithm 1): each token goes to its two best experts. Nothing in it says
"expert parallel". The experts' weights are large beside the tokens, so the cheapest plan keeps each expert on one
device and exchanges tokens between them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard import autoshard

GROUPS, TOKENS, WIDTH, HIDDEN, EXPERTS = 8, 256, 128, 1024, 8
CAPACITY = 2 * TOKENS // EXPERTS  # tokens that one expert takes from one group

optimizer = optax.adam(1e-3)


def top_2_gating(logits):
    """How to combine the experts' results: `[group, token, expert, capacity]`."""
    gates = jax.nn.softmax(logits)
    first = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    second = jax.nn.one_hot(jnp.argmax(jnp.where(first > 0, -1.0, gates), -1), EXPERTS)
    position_first = (jnp.cumsum(first, 1) - first) * first
    position_second = (jnp.cumsum(second, 1) - second + first.sum(1, keepdims=True)) * second
    total = (gates * (first + second)).sum(-1)

    def combine(chosen, position):
        slot = jax.nn.one_hot(position.sum(-1).astype(jnp.int32), CAPACITY)  # all zeros when the expert is full
        return jnp.einsum("GS,GSE,GSC->GSEC", (gates * chosen).sum(-1) / total, chosen, slot)

    return combine(first, position_first) + combine(second, position_second)


def moe(params, x):
    """Tokens to their experts, through them, and back: `[group, token, width]` in and out."""
    combine = top_2_gating(jnp.einsum("GSM,ME->GSE", x, params["gate"]))
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("GSEC,GSM->EGCM", dispatch, x)
    hidden = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", inputs, params["up"]))
    outputs = jnp.einsum("EGCH,EHM->EGCM", hidden, params["down"])
    return jnp.einsum("GSEC,EGCM->GSM", combine, outputs)


def train_step(state, batch):
    """One step of Adam."""
    params, opt_state = state

    def loss_of(params):
        return jnp.mean((batch["x"] + moe(params, batch["x"]) - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def init():
    """Fresh parameters and optimizer state, the same at every call."""
    gate, up, down = jax.random.split(jax.random.key(0), 3)
    params = {
        "gate": jax.random.normal(gate, (WIDTH, EXPERTS)) * WIDTH**-0.5,
        "up": jax.random.normal(up, (EXPERTS, WIDTH, HIDDEN)) * WIDTH**-0.5,
        "down": jax.random.normal(down, (EXPERTS, HIDDEN, WIDTH)) * HIDDEN**-0.5,
    }
    return params, optimizer.init(params)


def batch_of(step):
    """Random tokens, and a fixed map of them that the layer should learn."""
    x = np.random.default_rng(step).normal(size=(GROUPS, TOKENS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(np.roll(x, 1, axis=-1))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)  # counts only where there is no accelerator
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    machine = f"v5e:{mesh.size}"  # priced as TPU v5e chips, whatever it runs on
    step = autoshard(train_step, mesh=mesh, topology=machine, donate_argnums=0)

    plan = step.plan(init(), batch_of(0))
    print(plan)
    print("\nAll-to-alls of the plan:")
    for collective in plan.predicted.collectives:
        if collective.kind == "all_to_all":
            print(f"  {collective.count} x {collective.bytes / collective.count:,.0f} bytes, from {collective.source}")

    single, state, reference = jax.jit(train_step), init(), init()
    for i in range(options.steps):
        state, loss = step(state, batch_of(i))
        reference, expected = single(reference, batch_of(i))
        if (i + 1) % 5 == 0 or i + 1 == options.steps:
            print(f"step {i + 1:3}  loss {loss:.5f}  on one device {expected:.5f}")


if __name__ == "__main__":
    main()
