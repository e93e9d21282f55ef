"""One call of an operation and how it is split in, the function that runs it on a mesh out.

The function takes whole arrays. Inside, each device runs an implementation on its shards under `jax.shard_map`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autoshard.layout import Layout, MeshShape, in_mesh_order, ordered_axes, shards, spec_of
from autoshard.operations.operation import Implementation, Operation
from autoshard.operations.primitive import Batched, mapped
from autoshard.operations.split import Axes, CallRun, CallSplit
from autoshard.program import Equation
from autoshard.propagation.projection import layout_of_factors
from autoshard.propagation.rule import Dims, Rule


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operation."""

    operation: Operation
    static: tuple[tuple[str, Any], ...]  # keyword arguments of the function
    batched: Batched
    precision: str | None  # of products, as `jax.default_matmul_precision` had it at the call
    rule: Rule  # with a factor for each leading dim of a batch of calls

    @classmethod
    def of(cls, equation: Equation, rule: Rule) -> Call:
        params = equation.params
        return cls(params["operation"], params["static"], params["batched"], params["precision"], rule)

    # How it can be split.

    def runs(self, mesh: MeshShape) -> Iterator[CallRun]:
        """Every way to run it on a mesh: an implementation, and what each mesh axis does in it.

        The first splits nothing. Dims that axes do not divide are not split.
        """
        known: dict[Any, bool] = {}
        for implementation in (None, *self.operation.implementations):
            roles = () if implementation is None else tuple(implementation.splits)
            taken = set() if implementation is None else set(itertools.chain(*implementation.splits.values()))
            factors = [factor for factor in self.rule.sizes if factor in self.rule.splittable and factor not in taken]
            for choice in itertools.product([None, *factors, *roles], repeat=len(mesh)):
                if implementation is not None and not set(roles) & set(choice):
                    continue
                found: dict[str, Axes] = {}
                for axis, role in zip(mesh, choice, strict=True):
                    if role is not None:
                        found[role] = (*found.get(role, ()), axis)
                run = CallRun("" if implementation is None else implementation.name, tuple(found.items()))
                if self._fits(run, implementation, mesh, known):
                    yield run

    def can_run(self, run: CallRun, mesh: MeshShape) -> bool:
        """Whether the operation has such an implementation with such roles, and the axes divide what they split."""
        names = {one.name: one for one in self.operation.implementations}
        if run.name and run.name not in names:
            return False
        implementation = names.get(run.name)
        own = {} if implementation is None else implementation.splits
        beside = self.rule.splittable.difference(itertools.chain(*own.values()))
        return {role for role, _ in run.roles} <= {*own, *beside} and self._fits(run, implementation, mesh, {})

    def _fits(
        self, run: CallRun, implementation: Implementation | None, mesh: MeshShape, known: dict[Any, bool]
    ) -> bool:
        """Whether the axes divide what they split, and the implementation takes such a call.

        Args:
            known: dims of a tensor and the axes that split each -> whether it can lie so. This call adds to it.
        """
        assigned = self.assignment(run, mesh)
        if any(self.rule.sizes[factor] % shards(axes, mesh) for factor, axes in assigned.items()):
            return False
        for dims in (*self.rule.operands, *self.rule.results):
            key = dims, tuple(assigned.get(factor) for factor in itertools.chain(*dims))
            if key not in known:
                layout = layout_of_factors(dims, assigned, self.rule.sizes, mesh)
                known[key] = layout is not None and in_mesh_order(layout, mesh)
            if not known[key]:
                return False
        where = None if implementation is None else implementation.where
        return where is None or bool(where(self.split(run, mesh), **dict(self.static)))

    def assignment(self, run: CallRun, mesh: MeshShape) -> dict[str, Axes]:
        """Factor -> the axes that split it, in mesh order."""
        implementation = self.operation.named(run.name)
        splits: Mapping[str, tuple[str, ...]] = {} if implementation is None else implementation.splits
        found: dict[str, set[str]] = {}
        for role, axes in run.roles:
            for factor in splits.get(role, (role,)):
                found.setdefault(factor, set()).update(axes)
        return {factor: ordered_axes(axes, mesh) for factor, axes in found.items()}

    def layouts(self, run: CallRun, mesh: MeshShape) -> tuple[list[Layout], list[Layout]]:
        """How the operands are read, and how the results are left."""
        assigned, sizes = self.assignment(run, mesh), self.rule.sizes

        def layouts(tensors: Sequence[Any]) -> list[Layout]:
            found = [layout_of_factors(dims, assigned, sizes, mesh) for dims in tensors]
            assert None not in found, "`can_run` has looked"
            return [layout for layout in found if layout is not None]

        return layouts(self.rule.operands), layouts(self.rule.results)

    def split(self, run: CallRun, mesh: MeshShape) -> CallSplit:
        return CallSplit(dict(run.roles), self.rule.sizes, dict(mesh))

    def partial(self, run: CallRun, mesh: MeshShape) -> list[Axes]:
        """Per result the axes over which the devices' results are summed up; a role's axes are the function's own."""
        own, found = self.own_roles(run), []
        for dims in self.rule.results:
            has = set(itertools.chain(*dims))
            summed = {
                axis
                for factor, axes in run.roles
                if factor not in own and factor not in has
                if self.operation.sums_shared or factor in self.rule.reduction
                for axis in axes
            }
            found.append(ordered_axes(summed, mesh))
        return found

    def own_roles(self, run: CallRun) -> dict[str, Axes]:
        """What the implementation does along which axes; nothing, where each device runs the function itself."""
        implementation = self.operation.named(run.name)
        own = () if implementation is None else implementation.splits
        return {role: axes for role, axes in run.roles if role in own}

    def interchangeable(self, run: CallRun) -> frozenset[str]:
        """The factors of which only the product of a device's sizes matters: what is said so, of the same tensors."""
        implementation = self.operation.named(run.name)
        declared = (self.operation if implementation is None else implementation).interchangeable
        tensors = [set(itertools.chain(*dims)) for dims in (*self.rule.operands, *self.rule.results)]
        return declared if all(declared <= has or not declared & has for has in tensors) else frozenset()

    # How it runs.

    def local(self, run: CallRun, mesh: MeshShape) -> Callable[..., list]:
        """What each device makes of its shards; mesh axes are bound."""
        function = mapped(self._local(run, mesh), self.batched)

        def local(*shards: Any) -> list:
            with jax.default_matmul_precision(self.precision):
                return list(function(*shards))

        return local

    def _local(self, run: CallRun, mesh: MeshShape) -> Callable[..., list]:
        """The same of one call of a batch."""
        implementation = self.operation.named(run.name)
        split, static = self.split(run, mesh), dict(self.static)

        def one(*shards: Any) -> list:
            if implementation is None:
                return jax.tree.leaves(self.operation.function(*shards, **static))
            return jax.tree.leaves(implementation.local(split, *shards, **static))

        return self._derivative(run, mesh) if self.operation.is_derived(run.name) else one

    def _derivative(self, run: CallRun, mesh: MeshShape) -> Callable[..., list]:
        """The derivative of an implementation's local function, collectives included.

        Inside a `shard_map` JAX differentiates the sum of what all devices make. A result that several devices hold
        alike stands in that sum as often, so its cotangent is shared out among them. An operand that they hold alike
        has the sum of their gradients.
        """
        forward, implementation = self.operation.forward, self.operation.named(run.name)
        assert forward is not None and implementation is not None, "only implementations of backward passes are derived"
        operands, results = self.rule.operands, len(forward.made)
        count = len(operands) - results - sum(forward.made)
        of_forward = replace(self.rule, operands=operands[:count], results=operands[count : count + results])
        forward_of = replace(self, operation=forward.operation, rule=of_forward)._local(run, mesh)
        assigned = self.assignment(run, mesh)
        by_roles = set(itertools.chain(*self.own_roles(run).values()))

        def alike(dims: Dims) -> Axes:
            """The axes of roles along which devices hold the same of a tensor."""
            split = {axis for factor in itertools.chain(*dims) for axis in assigned.get(factor, ())}
            return ordered_axes(by_roles - split, mesh)

        shared_out = [shards(alike(dims), mesh) for dims in operands[count + results :]]
        summed = [alike(dims) for dims in self.rule.results]

        def gradients(*arrays: Any) -> list:
            inputs = arrays[:count]

            def of_wanted(*some: Any) -> list:
                own = dict(enumerate(inputs)) | dict(zip(forward.wrt, some, strict=True))
                made = forward_of(*own.values())
                return [one for one, has in zip(made, forward.made, strict=True) if has]

            _, pull = jax.vjp(of_wanted, *(inputs[i] for i in forward.wrt))
            cotangents = [ct / n if n > 1 else ct for ct, n in zip(arrays[count + results :], shared_out, strict=True)]
            found = zip(pull(cotangents), summed, strict=True)
            return [jax.lax.psum(one, axes) if axes else one for one, axes in found]

        return gradients

    def on_mesh(self, run: CallRun, mesh: Mesh | AbstractMesh) -> Callable[..., list]:
        """The call as a function of whole arrays to the list of its results."""
        shape = dict(mesh.shape)
        reads, leaves = self.layouts(run, shape)
        partial, local = self.partial(run, shape), self.local(run, shape)

        def on_one_device(*shards: Any) -> list:
            made = local(*shards)
            return [jax.lax.psum(x, axes) if axes else x for x, axes in zip(made, partial, strict=True)]

        return jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=tuple(map(spec_of, reads)),
            out_specs=list(map(spec_of, leaves)),
            check_vma=False,
        )
