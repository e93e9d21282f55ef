"""The published ways to share out a train step, each as what it says of its mesh axes.

A tactic restricts; it does not say where everything lies. The solver finds the cheapest plan of those that it leaves:
which dim of a weight is its column, along which dim a gradient is scattered, and all along other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from autoshard.errors import ArgumentError
from autoshard.tactics.roles import Dim, GroupRole, StateRole
from autoshard.tactics.rules import ANYTHING, NOTHING, AllowedSplit, AxisRule, Payload, Storage

_NONE = frozenset[str]()
_GATHERS, _EXCHANGES = frozenset({"all_gather"}), frozenset({"all_to_all"})
_REDUCES, _SUMS = frozenset({"all_reduce"}), frozenset({"all_reduce", "reduce_scatter"})
_OPTIMIZER = (StateRole.OPTIMIZER, StateRole.EXPERT_OPTIMIZER, StateRole.PARAMETER_OPTIMIZER)
_STAYING = (StateRole.WEIGHT, StateRole.EXPERT, StateRole.TABLE, StateRole.PARAMETER, *_OPTIMIZER)

_DATA = AxisRule(
    state=dict.fromkeys(_STAYING, Storage.WHOLE),
    batch=Dim.BATCH,
    splits={**dict.fromkeys(GroupRole, AllowedSplit(Dim.BATCH)), GroupRole.UPDATE: NOTHING},
    reshardings=dict.fromkeys(Payload, _NONE),
    sums=dict.fromkeys(GroupRole, _REDUCES),
)
_ZERO = {
    1: AxisRule(
        state=dict.fromkeys(_OPTIMIZER, Storage.SPLIT),
        splits={GroupRole.UPDATE: ANYTHING},
        reshardings={Payload.PARAMETERS: _GATHERS, Payload.UPDATES: _GATHERS},
        sums={GroupRole.GRADIENT: _SUMS, GroupRole.SUM: _SUMS},
    ),
    2: AxisRule(
        state=dict.fromkeys(_OPTIMIZER, Storage.SPLIT),
        splits={GroupRole.UPDATE: ANYTHING},
        reshardings={Payload.PARAMETERS: _GATHERS, Payload.UPDATES: _GATHERS},
        sums={GroupRole.GRADIENT: _SUMS, GroupRole.SUM: _SUMS},
        scatters=frozenset({GroupRole.GRADIENT}),
    ),
    3: AxisRule(
        state={**dict.fromkeys(_STAYING, Storage.SPLIT), StateRole.PARAMETER: Storage.OPEN},
        splits={GroupRole.UPDATE: ANYTHING},
        reshardings={Payload.PARAMETERS: _GATHERS, Payload.STACKS: _NONE, Payload.UPDATES: _GATHERS},
        sums={GroupRole.GRADIENT: _SUMS, GroupRole.SUM: _SUMS},
        scatters=frozenset({GroupRole.GRADIENT}),
    ),
}
_MEGATRON = AxisRule(
    state={StateRole.WEIGHT: Storage.FEATURES, StateRole.EXPERT: Storage.FEATURES},
    batch=Dim.OTHER,
    splits={
        GroupRole.PRODUCT: AllowedSplit(Dim.FEATURE),
        GroupRole.EXPERT: AllowedSplit(Dim.FEATURE),
        GroupRole.ATTENTION: AllowedSplit(Dim.HEAD),
        GroupRole.ACTIVATION: AllowedSplit(Dim.FEATURE, is_required=False),
        **dict.fromkeys((GroupRole.GRADIENT, GroupRole.SUM), AllowedSplit(Dim.FEATURE, is_required=False)),
        GroupRole.UPDATE: ANYTHING,
    },
    reshardings=dict.fromkeys(Payload, _NONE),
    sums=dict.fromkeys(GroupRole, _REDUCES),
)
_SEQUENCE = AxisRule(
    batch=Dim.SEQUENCE | Dim.OTHER,
    splits={
        GroupRole.ACTIVATION: AllowedSplit(Dim.FEATURE | Dim.SEQUENCE),
        GroupRole.SUM: AllowedSplit(Dim.FEATURE | Dim.SEQUENCE),
    },
    reshardings={Payload.ACTIVATIONS: _GATHERS},
    sums={GroupRole.PRODUCT: _SUMS},
    scatters=frozenset({GroupRole.PRODUCT}),
)
_ULYSSES = AxisRule(
    state=dict.fromkeys(_STAYING, Storage.WHOLE),
    batch=Dim.SEQUENCE,
    splits={
        **dict.fromkeys(GroupRole, AllowedSplit(Dim.SEQUENCE)),
        GroupRole.ATTENTION: AllowedSplit(Dim.HEAD),
        GroupRole.ACTIVATION: AllowedSplit(Dim.SEQUENCE | Dim.HEAD),
        GroupRole.UPDATE: NOTHING,
    },
    reshardings={**dict.fromkeys(Payload, _NONE), Payload.ACTIVATIONS: _EXCHANGES, Payload.UPDATES: _GATHERS},
    sums=dict.fromkeys(GroupRole, _REDUCES),
)
_EXPERTS = AxisRule(
    state={StateRole.EXPERT: Storage.EXPERTS, StateRole.EXPERT_OPTIMIZER: Storage.EXPERTS},
    splits={
        GroupRole.EXPERT: AllowedSplit(Dim.EXPERT),
        **dict.fromkeys(
            (GroupRole.ACTIVATION, GroupRole.ATTENTION, GroupRole.GRADIENT, GroupRole.SUM),
            AllowedSplit(Dim.BATCH | Dim.EXPERT),
        ),
        GroupRole.UPDATE: ANYTHING,
    },
    reshardings={Payload.ACTIVATIONS: _EXCHANGES},
)
_COLUMNS = AxisRule(
    state={StateRole.WEIGHT: Storage.FEATURES, StateRole.EXPERT: Storage.FEATURES},
    splits={
        **dict.fromkeys(GroupRole, AllowedSplit(Dim.FEATURE)),
        GroupRole.ATTENTION: AllowedSplit(Dim.HEAD),
        GroupRole.UPDATE: ANYTHING,
    },
    reshardings={**dict.fromkeys(Payload, _NONE), Payload.ACTIVATIONS: _GATHERS},
    sums=dict.fromkeys(GroupRole, _SUMS),
    scatters=frozenset({GroupRole.PRODUCT, GroupRole.EXPERT}),
)
# Scales and biases lie as the features that they meet, and so do their moments: a few bytes, which need no gathers.
_ROWS = _ZERO[3].refined(AxisRule(state={StateRole.PARAMETER_OPTIMIZER: Storage.OPEN}))
_CUBE = AxisRule(
    state={StateRole.WEIGHT: Storage.FEATURES, StateRole.EXPERT: Storage.FEATURES},
    splits={
        GroupRole.PRODUCT: AllowedSplit(Dim.FEATURE),
        GroupRole.EXPERT: AllowedSplit(Dim.FEATURE),
        GroupRole.ATTENTION: AllowedSplit(Dim.HEAD | Dim.BATCH),
        GroupRole.ACTIVATION: AllowedSplit(Dim.FEATURE | Dim.SEQUENCE | Dim.BATCH),
        GroupRole.GRADIENT: AllowedSplit(Dim.FEATURE),
        GroupRole.SUM: AllowedSplit(Dim.FEATURE | Dim.SEQUENCE | Dim.BATCH),
        GroupRole.UPDATE: ANYTHING,
    },
    reshardings={**dict.fromkeys(Payload, _NONE), Payload.ACTIVATIONS: _GATHERS},
    sums=dict.fromkeys(GroupRole, _SUMS),
    scatters=frozenset({GroupRole.PRODUCT, GroupRole.EXPERT}),
)


class Tactic:
    """One published scheme on some mesh axes.

    Attributes:
        axes: the mesh axes; () where they are those of the data parallel tactic before it.
    """

    needs: ClassVar[Dim]  # what a step must have for it
    order: ClassVar[int] = 0  # of those that rest on the same rule, on one axis: what a later one says stands

    def __init__(self, *axes: str) -> None:
        if not all(isinstance(axis, str) for axis in axes):
            raise ArgumentError(f"{type(self).__name__}{axes!r}: names of mesh axes are needed, as in 'data'")
        if len(set(axes)) < len(axes):
            raise ArgumentError(f"{type(self).__name__}{axes!r}: every mesh axis may be named once")
        self.axes = axes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._arguments()))})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def _arguments(self) -> tuple[Any, ...]:
        return self.axes

    def axes_after(self, earlier: Sequence[Tactic], mesh: Iterable[str]) -> tuple[str, ...]:
        """Its mesh axes, when these tactics come before it."""
        if not self.axes:
            raise ArgumentError(f"{self}: name the mesh axis, one of {', '.join(map(repr, mesh))}")
        return self.axes

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> what the scheme rests on, and what it says itself."""
        raise NotImplementedError


class _UniformTactic(Tactic):
    """A scheme that says the same of each of its axes."""

    rule: ClassVar[tuple[AxisRule, AxisRule]]

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> what the scheme rests on, and what it says itself: the same of every axis."""
        return dict.fromkeys(axes, self.rule)

    def __init__(self, axis: str, *axes: str) -> None:
        super().__init__(axis, *axes)


class DataParallel(_UniformTactic):
    """The whole state on every device, a share of the batch on each; gradients are all_reduced.

    Li et al., "PyTorch Distributed", VLDB 2020.

    Args:
        axis: the mesh axis that splits the batch; further ones split it further.
    """

    rule = (_DATA, AxisRule())
    needs = Dim.BATCH


class ZeRO(Tactic):
    """Data parallelism whose state is split over the same devices.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    Args:
        level: 1, the optimizer's state; 2, and gradients are reduce_scattered; 3, and parameters are split, too.
        axes: mesh axes; by default those of the data parallel tactic before it, or else the axis "data".
    """

    needs = Dim.BATCH
    order = 1

    def __init__(self, level: int, *axes: str) -> None:
        super().__init__(*axes)
        if isinstance(level, bool) or not isinstance(level, int) or level not in _ZERO:
            raise ArgumentError(f"ZeRO({level!r}): a level is needed: 1, 2 or 3")
        self.level = level

    def _arguments(self) -> tuple[Any, ...]:
        return self.level, *self.axes

    def axes_after(self, earlier: Sequence[Tactic], mesh: Iterable[str]) -> tuple[str, ...]:
        """The axes that it names, else those of the data parallelism before it, else `data`."""
        known = [axis for one in earlier if isinstance(one, DataParallel) for axis in one.axes]
        return self.axes or tuple(known) or (("data",) if "data" in mesh else super().axes_after(earlier, mesh))

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> data parallelism, and what the level splits along the axis."""
        return dict.fromkeys(axes, (_DATA, _ZERO[self.level]))


class FSDP(ZeRO):
    """`ZeRO` of level 3: state is split, and parameters are gathered where they meet activations.

    Zhao et al., "PyTorch FSDP", VLDB 2023.

    Args:
        axes: mesh axes; by default those of the data parallel tactic before it, or else the axis "data".
    """

    def __init__(self, *axes: str) -> None:
        super().__init__(3, *axes)

    def _arguments(self) -> tuple[Any, ...]:
        return self.axes


class HSDP(Tactic):
    """State is split within a group of devices, and every group has all of it: FSDP inside, data parallel between.

    Zhao et al., "PyTorch FSDP", VLDB 2023.

    Args:
        shard: the mesh axis within a group.
        replica: the mesh axis between groups.
    """

    needs = Dim.BATCH
    order = 1

    def __init__(self, shard: str, replica: str) -> None:
        super().__init__(shard, replica)

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> ZeRO of level 3 for the axis of shards, data parallelism for that of replicas."""
        shard, replica = axes
        return {shard: (_DATA, _ZERO[3]), replica: (_DATA, AxisRule())}


class MiCS(HSDP):
    """State is split within the smallest group that holds it, the partition group; groups are data parallel.

    Zhang et al., "MiCS", VLDB 2022.

    Args:
        shard: the mesh axis within a partition group.
        replica: the mesh axis between such groups.
    """


class Megatron(_UniformTactic):
    """Weights are split along columns or rows, activations between blocks are whole, partial sums are all_reduced.

    Which dims are columns follows from the program: each weight product is split along a feature, never along rows, and
    no array is gathered. Shoeybi et al., "Megatron-LM", 2019.

    Args:
        axis: the mesh axis.
    """

    rule = (_MEGATRON, AxisRule())
    needs = Dim.FEATURE


class SequenceParallel(_UniformTactic):
    """`Megatron` with the sequence split between blocks, so that norms and dropout are not computed on every device.

    Where rows of the step have no dim of a sequence, the batch takes its place. Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models", MLSys 2023.

    Args:
        axis: the mesh axis, that of `Megatron` if this stands before it.
    """

    rule = (_MEGATRON, _SEQUENCE)
    needs = Dim.FEATURE
    order = 1


class Ulysses(_UniformTactic):
    """The sequence is split, but for attention, whose heads are; weights are whole.

    Jacobs et al., "DeepSpeed Ulysses", 2023.

    Args:
        axis: the mesh axis.
    """

    rule = (_DATA, _ULYSSES)
    needs = Dim.SEQUENCE | Dim.HEAD


class ExpertParallel(_UniformTactic):
    """Experts are split, all else is data parallel; all_to_alls take tokens to their experts.

    Lepikhin et al., "GShard", ICLR 2021.

    Args:
        axis: the mesh axis; it may be that of a data parallel tactic.
    """

    rule = (_DATA, _EXPERTS)
    needs = Dim.EXPERT
    order = 2  # what it says of experts stands, whatever others say of weights


class TwoDimensional(Tactic):
    """Activations are split along rows and features, weights along both dims: SUMMA.

    Xu et al., "An Efficient 2D Method for Training Super-Large Deep Learning Models" (Optimus), 2021.

    Args:
        rows: the mesh axis along which rows of activations are split.
        columns: the mesh axis along which their features are.
    """

    needs = Dim.BATCH | Dim.FEATURE

    def __init__(self, rows: str, columns: str) -> None:
        super().__init__(rows, columns)

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> what the scheme says of the axis of rows and of that of columns."""
        rows, columns = axes
        return {rows: (_DATA, replace(_ROWS, apart_from=frozenset({columns}))), columns: (_COLUMNS, AxisRule())}


class TwoAndAHalf(Tactic):
    """`TwoDimensional` on several copies of the weights, each with a share of the batch.

    Wang et al., "Tesseract", 2021.

    Args:
        rows: the mesh axis along which rows of activations are split.
        columns: the mesh axis along which their features are.
        depth: the mesh axis along which weights are copied.
    """

    needs = Dim.BATCH | Dim.FEATURE

    def __init__(self, rows: str, columns: str, depth: str) -> None:
        super().__init__(rows, columns, depth)

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> what the scheme says of the axes of rows, columns and depth."""
        rows, columns, depth = axes
        return {
            rows: (_DATA, replace(_ROWS, apart_from=frozenset({columns}))),
            columns: (_COLUMNS, AxisRule()),
            depth: (_DATA, AxisRule()),
        }


class ThreeDimensional(Tactic):
    """Rows of activations along one axis, the two dims of each weight along two others.

    Activations are gathered along one of the two before a product, and reduce_scattered along the other one after it,
    in turns. Weights are whole along `rows`, where the paper has a piece on each device and gathers them. What is moved
    is the same, since gradients are all_reduced. `ZeRO(1, rows)` splits the optimizer's state as well. Bian et al.,
    "Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021.

    Args:
        rows: the mesh axis along which rows are split; it stands before the others in the mesh.
        first: one mesh axis for the dims of weights.
        second: the other.
    """

    needs = Dim.BATCH | Dim.FEATURE

    def __init__(self, rows: str, first: str, second: str) -> None:
        super().__init__(rows, first, second)

    def rules(self, axes: Sequence[str]) -> Mapping[str, tuple[AxisRule, AxisRule]]:
        """Axis -> what the scheme says of the axis of rows and of the other two of the cube."""
        rows, first, second = axes
        cube = replace(_CUBE, apart_from=frozenset({first, second}))
        return {rows: (_DATA, AxisRule()), first: (cube, AxisRule()), second: (cube, AxisRule())}
