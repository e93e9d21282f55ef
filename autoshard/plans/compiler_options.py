"""Options of XLA that move operations about and change no number: what `refine` tries, and what plan files may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Options = Mapping[str, bool | int]

_PIPELINED = ("xla_gpu_enable_pipelined_all_gather", "xla_gpu_enable_pipelined_reduce_scatter")

# Per platform, groups of options, each tried on top of what was taken before, in this order. XLA for GPU hides latency
# by default, within one turn of a loop; pipelined collectives run beside the turn before or after. Seven options of
# libtpu for asynchronous collectives and windowed products changed nothing in the two-layer loop that they were tried
# on, so that none is listed.
TRIED: Mapping[str, Sequence[Options]] = {
    "gpu": (
        dict.fromkeys((*_PIPELINED, "xla_gpu_enable_pipelined_all_reduce"), True),
        {"xla_gpu_enable_while_loop_double_buffering": True},
        {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    ),
}
SCHEDULING_OPTIONS = frozenset(name for tried in TRIED.values() for options in tried for name in options)


def options_for(platform: str, chosen: Options) -> dict[str, bool | int]:
    """Those of the chosen options that the compiler of a platform knows: "tpu", "gpu" or "cpu".

    >>> options_for("cpu", TRIED["gpu"][0])
    {}
    """
    known = {name for options in TRIED.get(platform, ()) for name in options}
    return {name: value for name, value in chosen.items() if name in known}
