"""Eight virtual CPU devices for every test, and programs compiled fast rather than to run fast."""

import gc
import os
from dataclasses import replace

import jax
import pytest

from autoshard import planning
from autoshard.batching import boundary

collect_ignore = ["many_processes.py"]  # a program, which tests start

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# What the CPU compiler does after its passes over HLO: collectives and memory are those of a program that is compiled
# to run fast (`compiled/test_fast_compilation.py`). Without its emitters of fusions XLA takes a third of the time.
fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
plain = f"{os.environ.get('XLA_FLAGS', '')} {fast}"
without_emitters = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# XLA ends a process in which the variable has a flag that it does not know. JAX 0.12 no longer has the first of these.
# libtpu has neither, and reads the variable when it compiles: by then jaxlib, which reads it once, has done so.
os.environ["XLA_FLAGS"] = f"{plain} {without_emitters}" if jax.__version_info__ < (0, 11) else plain
jax.devices()
os.environ["XLA_FLAGS"] = plain

boundary.RAISES = True  # faults that users would find in a log alone

# Jaxprs are many small objects that live on: with Python's own thresholds the collector takes a twentieth of the time.
gc.set_threshold(100_000, 50, 100)


@pytest.fixture
def blind(monkeypatch):
    """The planner takes every peak for a share of what it is: `blind(0.3)`."""

    def make(share):
        honest = planning.formulated

        def formulated(*args):
            formulation = honest(*args)
            lives = tuple(replace(live, usage=live.usage * share) for live in formulation.problem.lives)
            return replace(formulation, problem=replace(formulation.problem, lives=lives, checked=True))

        monkeypatch.setattr(planning, "formulated", formulated)

    return make
