"""The oracle of the search of stages: every cut, sub-mesh, schedule and number of microbatches, simulated one by one.

It shares no code with the search. Seconds and bytes come from `autoshard.pipeline.simulate`.
"""

import itertools

from autoshard.errors import ArgumentError
from autoshard.pipeline import schedule, simulate


def cuts_of(layers, stages):
    """Every way to cut layers into so many runs: the layers at which each begins, and the end."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def rows_of(tables, devices, stages, start=0):
    """Every choice of a table per stage whose sub-meshes take the whole row, with the positions they begin at."""
    if stages == 0:
        if start == devices:
            yield ()
        return
    for table in tables:
        if start in table.shape.starts:
            for rest in rows_of(tables, devices, stages - 1, start + table.shape.devices):
                yield ((table, start), *rest)


def transfer(row, size, one, other):
    """Seconds between neighbours: the smaller sub-mesh says how many pairs of devices send at a time."""
    (table, _), (next_table, next_start) = sorted((one, other), key=lambda stage: stage[1])
    channel = row.channels[next_start - 1]
    pairs = min(table.shape.devices, next_table.shape.devices)
    return channel.latency + size / (channel.bandwidth * pairs) if size else 0.0


def seconds_of(space, name, microbatches, cuts, chosen):
    """Seconds of one pipeline with a virtual stage per device; None if it does not fit, or has no such schedule."""
    count, costs = len(chosen), space.costs[microbatches]
    try:
        made = schedule(name, count, microbatches)
    except ArgumentError:
        return None
    at = list(itertools.pairwise(cuts))
    least = space.least_task_seconds

    def of(kind):
        return [float(getattr(table, kind)[run]) for (table, _), run in zip(chosen, at, strict=True)]

    weight = of("weight")
    backward = of("backward") if made.has_weight_tasks else [a + b for a, b in zip(of("backward"), weight, strict=True)]
    matrix = [[0.0] * count for _ in chosen]
    for i, cut in enumerate(cuts[1:-1]):
        matrix[i][i + 1] = transfer(space.row, costs.sent_forward[cut], chosen[i], chosen[i + 1])
        matrix[i + 1][i] = transfer(space.row, costs.sent_backward[cut], chosen[i], chosen[i + 1])
    timeline = simulate(
        made,
        [max(one, least) for one in of("forward")],
        [max(one, least) for one in backward],
        [max(one, least) for one in weight] if made.has_weight_tasks else 0.0,
        matrix,
        memory=of("microbatch_bytes"),
    )
    held = zip(of("fixed_bytes"), of("working_bytes"), timeline.peak_bytes, chosen, strict=True)
    if any(fixed + working + peak > table.shape.memory_bytes for fixed, working, peak, (table, _) in held):
        return None
    return timeline.makespan + max(of("after"))


def every_pipeline(space):
    """Every pipeline of a space whose devices have one virtual stage each: its seconds, and what it is."""
    for microbatches, costs in space.costs.items():
        for stages in range(1, space.layers + 1):
            for chosen in rows_of(costs.tables, space.row.devices, stages):
                for cuts in cuts_of(space.layers, stages):
                    for name, chunks in space.schedules:
                        if chunks == 1:
                            seconds = seconds_of(space, name, microbatches, cuts, chosen)
                            if seconds is not None:
                                yield seconds, (name, microbatches, cuts, tuple(t.shape.name for t, _ in chosen))
