"""An argument and who reads it in, its options out: the layouts in which it can lie, and the copies that are read."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import ConflictError
from autoshard.layout import Layout, layouts_of, replicated, spec_of, without_axes, without_idle_axes
from autoshard.model.equations import stays_whole
from autoshard.model.pricing.cost_tables import ArgumentOption, gathers_to
from autoshard.model.pricing.prices import PriceList
from autoshard.model.resharding_memory import ValueReader, narrow_groups
from autoshard.program import Value


@dataclass(frozen=True)
class ArgumentHomes:
    """What decides where arguments can lie."""

    prices: PriceList
    readers: Mapping[int, Sequence[ValueReader]]  # value id -> who reads it
    fixed: Mapping[int, Layout]  # argument index -> the layout that it must have
    open_axes: Mapping[int, frozenset[str]]  # argument index -> mesh axes that may split it further than is fixed

    def options(self, index: int, value: Value) -> tuple[ArgumentOption, ...]:
        """Where an argument can lie, and which copies of it can be read."""
        mesh, fixed = self.prices.mesh, None
        homes = [replicated(len(value.shape))] if stays_whole(value) else layouts_of(value.shape, mesh)
        if self.prices.offered is not None and index not in self.fixed:
            homes = self.prices.offered.of_argument(index, homes, list(mesh))
        if index in self.fixed:
            fixed = without_idle_axes(self.fixed[index], mesh)
            if stays_whole(value) and fixed not in homes:
                raise ConflictError(f"{value} cannot be {spec_of(fixed)}: XLA's collectives mix up numbers of two bits")
            if fixed not in homes:
                raise ConflictError(
                    f"{value} cannot be {spec_of(self.fixed[index])}: a fixed sharding must split every dim evenly, "
                    f"with its axes in the order of the mesh {dict(mesh)}"
                )
            if axes := self.open_axes.get(index):
                homes, fixed = [home for home in homes if without_axes(home, axes) == fixed], None
        readers = self.readers.get(value.id, ())
        # a home that elementwise readers like is among the options
        apart = tuple(fixed is None and reader.computes_on_shards for reader in readers)
        # what a constraint says has to be reached, however
        is_constrained = tuple(
            bool(r.group and r.group.given and not alone) for r, alone in zip(readers, apart, strict=True)
        )
        fewer = narrow_groups(readers, value, self.prices.itemsizes)
        narrow = tuple(bool(fewer) and reader.group in fewer for reader in readers)

        def options(*wants: tuple[Layout, ...]) -> tuple[ArgumentOption, ...]:
            others = list(itertools.compress(wants, map(operator.not_, narrow)))
            smaller = set(itertools.chain(*itertools.compress(wants, narrow)))
            wanted = dict.fromkeys(itertools.chain(*itertools.compress(wants, map(operator.not_, apart))))
            elementwise = list(itertools.compress(wants, apart))
            reached = set(itertools.chain(*itertools.compress(wants, is_constrained)))
            found = []
            for home in homes if fixed is None else [fixed]:
                found.append(ArgumentOption(home, home))
                if not value.on_host:
                    # ... but of one in whose shards it cannot compute: rows, of which it makes batches
                    unread = [want for want in elementwise if not any(gathers_to(one, home) for one in want)]
                    copies = dict.fromkeys(itertools.chain(wanted, *unread))
                    read = [copy for copy in copies if gathers_to(home, copy) or copy in reached]
                    found += [ArgumentOption(home, copy) for copy in read if copy != home]
                    if all(home in want for want in others):
                        # ... and of one axis ahead of a cast, so that its result is gathered along the others, later
                        nearest = (without_axes(home, [axis]) for axis in itertools.chain(*home))
                        read += dict.fromkeys(copy for copy in nearest if gathers_to(home, copy) and copy not in read)
                        found += [ArgumentOption(home, copy, True) for copy in read if copy != home and copy in smaller]
            return tuple(found)

        what = value.shape, value.on_host, fixed, is_constrained, apart, narrow, tuple(homes)
        return self.prices.memo.once(options, *(reader.wants for reader in readers), of=what)
