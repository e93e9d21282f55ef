"""Options under which XLA compiles for CPU devices fast, rather than programs that run fast.

They change what comes after the passes over HLO. Collectives and memory are those of a program as users compile it
(`compiled/test_fast_compilation.py`).
"""

import os
import threading

import jax
from jax._src.interpreters import mlir

FEWER_PASSES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PLAIN = f"{os.environ.get('XLA_FLAGS', '')} {FEWER_PASSES}"

# For processes that compile for CPU devices alone. XLA ends a process in which the variable has a flag that XLA does
# not know: JAX 0.12 no longer has the first of these, and libtpu has neither.
CPU_ONLY = PLAIN
if jax.__version_info__ < (0, 11):
    CPU_ONLY += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


class SharedContexts(threading.local):
    """The context of MLIR in which the next program is written: a new one takes half of the time of a small program.

    JAX 0.12 has programs of a thread share them itself. They keep what they know of types and locations, and so are
    made anew after some programs.
    """

    programs = 50
    left = 0

    def next(self):
        if not self.left:
            self.left, self.context = self.programs, _new_context()
        self.left -= 1
        return self.context


_new_context = mlir.make_ir_context


def share_contexts() -> None:
    """What this process lowers from now on shares contexts."""
    if jax.__version_info__ < (0, 11):
        mlir.make_ir_context = SharedContexts().next
