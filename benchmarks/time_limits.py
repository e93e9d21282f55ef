"""Whether planning keeps its time limit, and always has a plan, whatever the step.

Each step of `late_steps.py` is planned in a process of its own, whose clock is the time that the process has used, so
that other processes change nothing. A row has the seconds beside those of tracing, and how the plan ended.

    python benchmarks/time_limits.py [--limits 2 10] [--only WORDS] [--asks plan largest_batch frontier fewest_devices]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
import traceback
import warnings

time.monotonic = time.process_time  # before anything is imported that takes it by name

from late_steps import STEPS, Late  # noqa: E402

import autoshard.api  # noqa: E402, all of it: that takes a second
from autoshard.program import tracing  # noqa: E402

TIMES, MORE = 1.5, 3.0  # of a limit, and seconds: what planning may take beside tracing
KILLED_AFTER = 20.0  # times the limit, and seconds more
traced = 0.0  # s


def timed_tracing() -> None:
    """Counts the seconds in which steps are traced."""
    whole, depth = tracing.traced_step, [0]

    def timed(*args, **keywords):
        global traced
        depth[0] += 1
        start = time.process_time()
        try:
            return whole(*args, **keywords)
        finally:
            depth[0] -= 1
            traced += 0.0 if depth[0] else time.process_time() - start

    tracing.traced_step = timed
    for module in list(sys.modules.values()):
        if module.__name__.startswith("autoshard") and getattr(module, "traced_step", None) is whole:
            module.traced_step = timed


def asked(late: Late, ask: str, limit: float) -> str:
    """What is asked for, in words."""
    keywords = {**late.keywords(), "time_limit": limit}
    if ask == "plan":
        plan = autoshard.plan(late.step, *late.args, **keywords)
        return f"gap {plan.gap:.1%}{' LATE' if getattr(plan, 'is_late', False) else ''}"
    if ask == "largest_batch":
        return f"{autoshard.largest_batch(late.step, *late.args, **keywords).rows} rows"
    if ask == "fewest_devices":
        del keywords["mesh"], keywords["topology"]
        found = autoshard.fewest_devices(late.step, *late.args, chip="v5e", most=64, **keywords)
        return f"{found.mesh.size} devices"
    return f"{len(autoshard.frontier(late.step, *late.args, points=4, **keywords).plans)} plans"


def row(name: str, ask: str, limit: float) -> bool:
    """Plans in a process of its own, and prints how that went; whether the limit was kept."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (int(KILLED_AFTER + 5 * limit),) * 2)
        timed_tracing()
        start, good, detail = time.process_time(), True, ""
        try:
            detail = asked(STEPS[name], ask, limit)
        except autoshard.MemoryLimitError as error:
            detail = f"MemoryLimitError {str(error).splitlines()[0][:90]}"
        except autoshard.ArgumentError as error:  # it has no batch that can be of another size
            detail = f"refused: {str(error).splitlines()[0][:120]}"
        except autoshard.AutoshardError as error:
            good, detail = False, f"{type(error).__name__} {str(error)[:150]}"
        except BaseException as error:
            good, detail = False, f"BARE {type(error).__name__} {str(error)[:150]}"
            if os.environ.get("TB"):
                traceback.print_exc()
        took = time.process_time() - start - traced
        good &= took <= TIMES * limit + MORE
        says = "ok  " if good else "LATE" if took > TIMES * limit + MORE else "FAIL"
        print(f"{says} {name} | {ask} | {limit:g} s | {took:.1f} s and {traced:.1f} of tracing | {detail}", flush=True)
        os.write(writing, b"1" if good else b"0")
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 1)
    os.close(reading)
    os.waitpid(child, 0)
    if not said:
        print(f"DEAD {name} | {ask} | {limit:g} s | ended by force", flush=True)
    return said == b"1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", nargs="+", type=float, default=[2.0, 10.0])
    parser.add_argument("--only", default="")
    parser.add_argument("--asks", nargs="+", default=["plan"])
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    kept = [
        row(name, ask, limit) for name in STEPS if chosen.only in name for ask in chosen.asks for limit in chosen.limits
    ]
    print(f"{sum(kept)} of {len(kept)} keep their limit")


if __name__ == "__main__":
    main()
