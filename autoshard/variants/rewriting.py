"""A step in all its variants and the laws to rewrite it by in, the step rewritten as is predicted to be fastest out.

The search is greedy: the sites that save the most work are planned first, and each that is faster stays. A rewrite that
does not pay by itself is kept if another, which it makes possible, pays with it: a product in a loop with something
concatenated is split first, and then taken out of the loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic

import jax

from autoshard.errors import MemoryLimitError, MicrobatchError, PlanError
from autoshard.jaxprs import ClosedJaxpr
from autoshard.mesh.topology import Topology
from autoshard.program import Program
from autoshard.program.program import RewrittenPlaces
from autoshard.program.tracing import TracedStep
from autoshard.remat.costs import seconds_again
from autoshard.rewrites import REWRITES, Rewrite
from autoshard.rewrites.applying import Site, forms, rewritten, sites
from autoshard.solver.runtime.cutoff import CutoffEnd
from autoshard.variants.choosing import LEAST_GAIN, Planned, proven
from autoshard.variants.variant import StepVariants


@dataclass(frozen=True, eq=False)
class RewrittenStep:
    """A step, and the laws by which it was rewritten, one after the other."""

    closed: ClosedJaxpr  # rewritten
    laws: Sequence[Rewrite]  # by which it may be rewritten further
    devices: int
    done: tuple[RewrittenPlaces, ...] = ()

    @cached_property
    def sites(self) -> Mapping[Any, Site]:
        """Key -> the places that can be rewritten."""
        return {site.key: site for law in self.laws for site in sites(self.closed, law, self.devices)}

    def at(self, site: Site) -> RewrittenStep:
        """The step with these places rewritten, too."""
        closed = rewritten(self.closed, site.rewrite, site.places, self.devices)
        return replace(self, closed=closed, done=(*self.done, site.rewritten_places))

    def work(self, topology: Topology) -> float:
        """Seconds of one device that computes all of it, collectives left aside."""
        seconds = (seconds_again(eqn, topology) for eqn in self.closed.jaxpr.eqns)
        return math.fsum(one for one in seconds if math.isfinite(one))


def by_laws(variants: StepVariants, done: Sequence[RewrittenPlaces], devices: int) -> StepVariants:
    """The variants of a step that is rewritten so.

    Raises:
        PlanError: there is no law of some name.
    """
    if not done:
        return variants
    laws = [(_law(one.name), one.places) for one in done]
    traced = variants.step

    def applied(closed: ClosedJaxpr) -> ClosedJaxpr:
        with jax.sharding.use_abstract_mesh(variants.mesh):
            for law, places in laws:
                closed = rewritten(closed, law, places, devices)
        return closed

    def again(types: Sequence[Any]) -> ClosedJaxpr:
        made, whole = traced.again(types), traced.closed
        with jax.sharding.use_abstract_mesh(variants.mesh):
            for law, places in laws:
                if forms(made, law, places, devices) != forms(whole, law, places, devices):
                    raise MicrobatchError(
                        f"{law.name} applies in other places, or otherwise, to the step of a microbatch than to the "
                        "whole step.\nLeave this law out of rewrites=, or try another number of microbatches."
                    )
                made, whole = (rewritten(one, law, places, devices) for one in (made, whole))
        return made

    def read(closed: ClosedJaxpr) -> Program:
        return replace(traced.read(closed), rewritten=tuple(done))

    step: TracedStep = replace(traced, closed=applied(traced.closed), again=again, read=read)
    return variants.of(step)


def _law(name: str) -> Rewrite:
    if name not in REWRITES:
        raise PlanError(
            f"the plan has the step rewritten by {name!r}, which is not registered; there are {', '.join(REWRITES)}.\n"
            "Import what registers it, or plan anew."
        )
    return REWRITES[name]


def as_planned(variants: StepVariants, laws: Sequence[tuple[str, Sequence[int]]], devices: int) -> StepVariants:
    """The step rewritten as a plan has it.

    Raises:
        PlanError: there is no law of some name, or it does not apply in some place.
    """
    step = RewrittenStep(variants.step.closed, (), devices)
    with jax.sharding.use_abstract_mesh(variants.mesh):
        for name, places in laws:
            law = _law(name)
            found = sites(step.closed, law, devices)
            planned = [one for one in found if set(one.places) <= set(places)]
            if not set(places) <= {place for one in planned for place in one.places}:
                raise PlanError(
                    f"the plan has the step rewritten by {name!r} in places {', '.join(map(str, places))}; it applies "
                    "in other ones alone.\nThe plan is for another step; plan anew."
                )
            lines = tuple(dict.fromkeys(line for one in planned for line in one.lines))
            arguments = frozenset[int]().union(*(one.arguments for one in planned))
            done = RewrittenPlaces(name, law.law, tuple(places), lines, arguments)
            step = replace(step, closed=rewritten(step.closed, law, places, devices), done=(*step.done, done))
    return by_laws(variants, step.done, devices)


class RewriteSearch(Generic[Planned]):
    """The search through the ways to rewrite a step."""

    def __init__(
        self,
        variants: StepVariants,
        laws: Sequence[str],
        devices: int,
        topology: Topology,
        planned: Callable[[StepVariants, float, float], Planned],
        until: float,
    ):
        """
        Args:
            laws: names of those that are tried.
            devices: of the mesh.
            planned: plans the variants of a step, and may raise `CutoffEnd` once that is proven to take more than
                so many seconds. It is also told which share of the time limit it has.
            until: when nothing more is planned, as `time.monotonic` has it; infinite if no clock counts.
        """
        self.variants, self.topology, self.planned, self.until = variants, topology, planned, until
        self.step = RewrittenStep(variants.step.closed, [_law(name) for name in laws], devices)
        # Without a clock, what there is to plan at first shares the time limit.
        self.share = 1 / (1 + len(self.step.sites)) if math.isinf(until) else 1.0
        self.best: Planned | None = None
        self.bounds: list[float] = []  # s, of what was planned
        self.error: MemoryLimitError | CutoffEnd | None = None  # of the step as it is written

    def fastest(self) -> Planned:
        """The step planned as it is predicted to be fastest: as it is written, unless rewriting it gains something.

        Its bound is that of all that was planned.

        Raises:
            MemoryLimitError: it fits in no way that was tried.
            CutoffEnd: nobody would want it in any way that was tried.
        """
        self.faster(self.step)
        waiting, seen = self.ordered(self.step, frozenset()), set[Any]()
        while waiting and time.monotonic() < self.until:
            key = waiting.pop(0)
            seen.add(key)
            site = self.step.sites.get(key)
            if site is None:
                continue
            for tried in self.with_consequences(site, seen):
                if time.monotonic() > self.until:
                    break
                if self.faster(tried):
                    new = frozenset(tried.sites) - frozenset(self.step.sites) - seen
                    self.step = tried
                    waiting += [one for one in self.ordered(tried, seen) if one in new and one not in waiting]
                    break
        if self.best is None:
            assert self.error is not None, "else it fits"
            raise self.error
        return proven(self.best, min(self.bounds))

    def with_consequences(self, site: Site, seen: set[Any]) -> Iterator[RewrittenStep]:
        """The step with a site rewritten, and the same with what only that makes possible."""
        first = self.step.at(site)
        yield first
        new = frozenset(first.sites) - frozenset(self.step.sites) - seen
        yield from (first.at(first.sites[key]) for key in self.ordered(first, seen) if key in new)

    def ordered(self, step: RewrittenStep, seen: frozenset[Any] | set[Any]) -> list[Any]:
        """The keys of its sites, those first that save the most work of one device."""
        work = step.work(self.topology)
        saved = {key: work - step.at(site).work(self.topology) for key, site in step.sites.items() if key not in seen}
        return sorted(saved, key=lambda key: -saved[key])

    def faster(self, step: RewrittenStep) -> bool:
        """Plans a step; whether it is faster than what is known, so that it is now the best."""
        known = math.inf if self.best is None else self.best.plan.cost * (1 - LEAST_GAIN)
        try:
            found = self.planned(by_laws(self.variants, step.done, step.devices), known, self.share)
        except (MemoryLimitError, CutoffEnd) as error:
            self.error = self.error or error
            self.bounds += [error.bound] if isinstance(error, CutoffEnd) else []
            return False
        except MicrobatchError:  # the rewritten step needs the whole batch where the step itself did not
            if not step.done:
                raise
            return False
        self.bounds.append(found.plan.bound)
        if found.plan.cost >= known:
            return False
        self.best = found
        return True
