"""Products whose sums are scattered along the second operand's dims: numbers on devices, layouts in TPU programs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax.sharding import PartitionSpec as P
from oracles import mesh_of

import autoshard
from autoshard.compiled.verification import compiled
from autoshard.lower import on_shards
from autoshard.mesh.targets import target_mesh
from autoshard.operations.reduce_scatter import scattered_product, scatters_second

PRODUCTS = {  # shapes of both operands, dimension numbers, the dim that is scattered, whether it is the second's first
    "matrices": ((64, 8), (64, 256), (((0,), (0,)), ((), ())), 1, True),
    "heads": ((4, 16, 2, 8), (4, 16, 64), (((0, 1), (0, 1)), ((), ())), 2, True),
    "two free dims of the second": ((64, 8), (64, 32, 128), (((0,), (0,)), ((), ())), 1, True),
    "the first operand's dim": ((64, 256), (64, 8), (((0,), (0,)), ((), ())), 0, False),
    "the second's last dim": ((64, 8), (64, 32, 128), (((0,), (0,)), ((), ())), 2, False),
    "a batch": ((16, 64, 8), (16, 64, 256), (((1,), (1,)), ((0,), (0,))), 2, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_slices_are_those_of_the_sum(name):
    first, second, numbers, dim, is_second = PRODUCTS[name]
    random = np.random.default_rng(0)
    operands = [jnp.asarray(random.standard_normal((8, *shape)), jnp.float32) for shape in (first, second)]
    assert scatters_second(numbers, len(first), dim) == is_second
    if not is_second:
        return
    params = {"dimension_numbers": numbers, "precision": None, "preferred_element_type": jnp.float32}

    @functools.partial(
        jax.shard_map, mesh=mesh_of({"x": 8}), in_specs=P("x"), out_specs=P(*[None] * dim, "x"), check_vma=False
    )
    def sliced(*shards):
        return scattered_product(params, [one[0] for one in shards], ((("x",), None),), ())

    whole = sum(jax.lax.dot_general(a, b, numbers) for a, b in zip(*operands, strict=True))
    assert_equal(sliced(*operands), whole)


def layer(y, weights):
    up, down = (weights[name].astype(y.dtype) for name in ("up", "down"))
    return y + jax.nn.relu(y @ up) @ down


def trained(weights, x):
    """Layers in a loop; each weight's rows lie split as the batch does."""

    def loss(weights):
        y, _ = jax.lax.scan(lambda y, w: (layer(y, w), None), x, weights)
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def stacks_of_gradients() -> set[str]:
    """The orders in which a program for TPU has the stack of the gradients of `up`."""
    mesh = target_mesh("v5e:2x2", {"x": 4})
    weights = {"up": (2, 1024, 512), "down": (2, 512, 1024)}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in weights.items()}
    lies = {"weights/up": P(None, "x"), "weights/down": P(None, None, "x"), "x": P("x")}
    plan = autoshard.plan(
        trained, shapes, jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16), mesh=mesh, fixed=lies, donate_argnums=0
    )
    assert any(one.kind == "reduce_scatter" for one in plan.predicted.collectives)
    text = compiled(plan.lowering(mesh), mesh, plan.planner.options.topology).program.as_text()
    return set(re.findall(r"f32\[2,256,512\]\{([\d,]*)", text))


def test_a_stack_of_gradients_is_not_turned(monkeypatch):
    pytest.importorskip("libtpu")
    assert stacks_of_gradients() == {"2,1,0"}
    monkeypatch.setattr(on_shards, "scatters_second", lambda *_: False)
    assert "1,2,0" in stacks_of_gradients()
