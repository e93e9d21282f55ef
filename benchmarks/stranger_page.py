"""Rows of `strangers.py` in, the page out: the shares that come true, and every exception by kind."""

import collections
from collections.abc import Iterable, Mapping, Sequence

from stranger_rows import BARS, MACHINES, Row


def shares(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Per bar, how many rows are within it, of how many."""
    found = {}
    every = list(rows)
    for bar in BARS:
        measured = [row for row in every if row.applies(bar)]
        if measured:
            found[bar] = sum(bar not in row.misses for row in measured), len(measured)
    return found


def kind_of(row: Row, bar: str) -> str:
    """What exceptions of one kind have in common: the primitive, and the sign of what is off."""
    if bar == "collectives":
        signs = []
        for kind in row.kinds_off:
            predicted, compiled = row.predicted.get(kind, 0), row.compiled.get(kind, 0)
            more = compiled is None or compiled > predicted
            signs.append(f"{kind} {'not ' if more and not predicted else 'too few ' if more else 'too many '}predicted")
        return f"{row.family}: {', '.join(signs)}"
    predicted, compiled = (row.predicted_seconds, row.seconds) if bar == "seconds" else (row.predicted_peak, row.peak)
    return f"{row.family}: predicted {'low' if predicted < (compiled or 0) else 'high'}"


def page(rows: Sequence[Row], chosen: str = "") -> str:
    """The page, in Markdown; `chosen` are the options that chose the programs."""
    lines = [
        "# Programs from elsewhere",
        "",
        f"What `python benchmarks/strangers.py{chosen}` compares: predictions for programs that were written for other",
        "purposes, beside what XLA compiles. The head of that script says which programs, and what the bars are.",
        "",
        "| machine | programs | " + " | ".join(f"{bar} (aim {aim:.0%})" for bar, aim in BARS.items()) + " |",
        "|---|--:|" + "--:|" * len(BARS),
    ]
    for machine in MACHINES:
        of = [row for row in rows if row.machine == machine]
        figures = shares(of)
        cells = [f"{100 * figures[bar][0] / figures[bar][1]:.1f}%" if bar in figures else "" for bar in BARS]
        lines.append(f"| {machine} | {sum(row.outcome == 'compared' for row in of)} | {' | '.join(cells)} |")
    over = collections.Counter(row.machine for row in rows if row.is_over)
    refused = collections.Counter(row.machine for row in rows if row.is_over and row.checked_peak is None)
    lines += ["", "Over their limit before the check of compiled programs: " + _counts(over) + "."]
    lines += ["", "No plan within it, which a `MemoryLimitError` says: " + _counts(refused) + "."]
    unknown = collections.Counter(row.machine for row in rows if row.outcome == "compared" and row.unestimated)
    lines += ["", "With operations of which XLA has no estimate: " + _counts(unknown) + "."]
    others = collections.Counter((row.machine, row.outcome) for row in rows if row.outcome != "compared")
    lines += ["", "Not compared: " + ", ".join(f"{n} {what} on {on}" for (on, what), n in sorted(others.items())) + "."]
    for bar in BARS:
        kinds = collections.defaultdict(list)
        for row in rows:
            if bar in row.misses:
                kinds[row.machine, kind_of(row, bar), row.reason(bar)].append(row)
        if not kinds:
            continue
        lines += ["", f"## Exceptions: {bar}", "", "| machine | kind | programs | for example | reason |"]
        lines += ["|---|---|--:|---|---|"]
        for (machine, kind, why), of in sorted(kinds.items(), key=lambda item: (item[0][0], -len(item[1]))):
            one = min(of, key=lambda row: len(row.name))
            example = f"`{one.name.replace('|', ' ')[:60]}` {one.form}: {one.misses[bar]}"
            lines.append(f"| {machine} | {kind} | {len(of)} | {example} | {why} |")
    for outcome in ("raises", "crashes", "hangs"):
        for row in rows:
            if row.outcome == outcome:
                lines += ["", f"`{row.name[:80]}` {row.form} on {row.machine} {outcome}: {row.detail[:160]}"]
    return "\n".join(lines) + "\n"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} on {machine}" for machine, count in counts.items()) or "none"


def print_kinds(rows: Sequence[Row], most: int) -> None:
    """Shares, and the kinds of exceptions that have the most programs."""
    for machine in MACHINES:
        of = [row for row in rows if row.machine == machine]
        outcomes = collections.Counter(row.outcome for row in of)
        if not of:
            continue
        over = [row for row in of if row.is_over]
        refused = sum(row.checked_peak is None for row in over)
        print(f"\n{machine}: {dict(outcomes)}, {len(over)} over before the check, {refused} refused by it")
        for bar, (within, total) in shares(of).items():
            print(f"  {bar}: {within} of {total}, {within / total:.1%}")
            kinds = collections.defaultdict(list)
            for row in of:
                if bar in row.misses:
                    kinds[kind_of(row, bar)].append(row)
            for kind, alike in sorted(kinds.items(), key=lambda item: -len(item[1]))[:most]:
                one = min(alike, key=lambda row: len(row.name))
                print(f"    {len(alike):4} {kind} | {one.name[:60]} {one.form}: {one.misses[bar]}")
        for row in of:
            if row.outcome in ("raises", "crashes", "hangs"):
                print(f"  {row.outcome} {row.name[:60]} {row.form}: {row.detail[:150]}")
