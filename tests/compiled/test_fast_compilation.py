"""Tests compile with fewer passes than users do (`conftest.py`): what tests read of programs is the same.

Memory differs by less than a hundredth: XLA's emitters of fusions share some small buffers. Of the CNN it is 0.6%.
"""

import jax
import pytest
from oracles import SMALL, mesh_of, v5e
from sweeps import some

import autoshard
from autoshard.compiled.collectives import peak_bytes, read_collectives

SHAPE = {"x": 4, "y": 2}
AS_USERS_DO = {
    "xla_backend_optimization_level": 2,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_parallel_codegen_split_count": 32,
    **({"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}),
}


@pytest.mark.parametrize("name", some(["cnn", "mlp", "lstm"], "cnn", "mlp"))
def test_collectives_and_memory_are_those_that_users_have(name):
    model = SMALL[name]()
    specs = jax.tree.map(lambda leaf: jax.P(None, "y") if leaf.ndim == 2 else jax.P(), model.state)
    lowering = autoshard.evaluate(
        model.step, model.state, model.batches(0), mesh=mesh_of(SHAPE), topology=v5e(SHAPE),
        in_shardings=(specs, jax.P("x")), donate_argnums=0,
    ).lowering()  # fmt: skip
    fast, slow = lowering.compile(), lowering.compile(compiler_options=AS_USERS_DO)
    assert read_collectives(fast.as_text(), SHAPE) == read_collectives(slow.as_text(), SHAPE)
    assert peak_bytes(fast) == pytest.approx(peak_bytes(slow), rel=1e-2)
