"""Stage programs run one after the other on one device: the oracle of cutting. It knows no schedule and no mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.extend import core

from autoshard.program.tracing import traced_step
from autoshard.propagation.registry import has_rule
from autoshard.stages.cutting import CuttableStep, cut
from autoshard.stages.programs import Key

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile


@functools.cache
def jitted(jaxpr):
    return jax.jit(core.jaxpr_as_fun(jaxpr), compiler_options=QUICK)


def cuttable(step, args, microbatches):
    traced = traced_step(step, args, {}, has_rule=has_rule, obey=False)
    return CuttableStep.of(traced, microbatches, traced.carried, step.__name__)


def cut_evenly(step, args, microbatches, stages, *, weight_programs=False):
    found = cuttable(step, args, microbatches)
    units = found.units(stages)
    return cut(found, units.boundaries(units.balanced(stages)), weight_programs=weight_programs)


def run_in_order(programs, leaves):
    """The results of the step: every microbatch forward through all stages and back, then what comes after."""
    store = {Key("argument", i): leaf for i, leaf in enumerate(leaves)}
    store |= {Key("constant", i): const for i, const in enumerate(programs.constants)}
    for i, piece in enumerate(programs.pieces):
        store[Key("piece", i)] = leaves[piece.argument][piece.start : piece.stop]

    def run(program, microbatch=None):
        arrays, rows = [], {}
        for key in program.inputs:
            if key.kind == "microbatch":
                arrays.append(jnp.int32(microbatch))
            elif key.kind == "value":
                arrays.append(store[key, microbatch])
            elif key.kind == "rows":
                arrays.append(store[key, rows.setdefault(key, 0)])
                rows[key] += 1
            else:
                arrays.append(store[(key, program.stage) if key.kind == "early" else key])
        for key, array in zip(program.outputs, jitted(program.jaxpr)(*arrays), strict=True):
            if key.kind in ("value", "rows"):
                store[key, microbatch] = array
            else:
                store[(key, program.stage) if key.kind == "early" else key] = array

    for program in programs.before.values():
        run(program)
    for microbatch in range(programs.microbatches):
        for program in programs.programs:
            if program.kind in ("F", "B", "W"):
                run(program, microbatch)
    for program in programs.after:
        run(program)
    return [
        jnp.concatenate([store[key] for key in keys]) if isinstance(keys, tuple) and len(keys) > 1 else store[keys[0]]
        for keys in programs.results
    ]
