"""Random programs, meshes and PartitionSpecs for hypothesis: small, of every family of operations, loops included."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from autoshard.layout import MeshShape

SIZES = (2, 4, 8, 16)
MESHES: tuple[MeshShape, ...] = ({"x": 4, "y": 2}, {"x": 8}, {"x": 2, "y": 2, "z": 2}, {"x": 2, "y": 4})
ODD_MESHES: tuple[MeshShape, ...] = (  # axes of one, primes, four axes
    {"x": 3, "y": 2}, {"x": 5}, {"x": 7}, {"x": 2, "y": 1, "z": 4}, {"x": 1, "y": 6}, {"x": 2, "y": 2, "z": 2, "w": 1},
    {"x": 1, "y": 2, "z": 1, "w": 3}, {"x": 2, "y": 3, "z": 1}, {"x": 1},
)  # fmt: skip
_LARGEST = 2**14  # elements of one value
_DEEPEST = 2  # loops and branches in each other

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One value more: what makes it of those there are, and how that reads."""

    text: str
    reads: tuple[int, ...]
    run: Callable


@dataclass(frozen=True)
class RandomProgram:
    """A function of arrays, made of instructions that each add one value; it returns some of them."""

    shapes: tuple[Shape, ...]  # of the arguments, all float32
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]

    def __call__(self, *arguments: jax.Array) -> list[jax.Array]:
        values = list(arguments)
        for instruction in self.instructions:
            values.append(instruction.run(*(values[i] for i in instruction.reads)))
        return [values[i] for i in self.results]

    @property
    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]

    def __repr__(self) -> str:
        lines = [f"v{i} = argument {list(shape)}" for i, shape in enumerate(self.shapes)]
        for i, instruction in enumerate(self.instructions, len(self.shapes)):
            lines.append(f"v{i} = {instruction.text}({', '.join(f'v{j}' for j in instruction.reads)})")
        return "\n".join([*lines, f"return {', '.join(f'v{i}' for i in self.results)}"])


@st.composite
def programs(draw, arguments: int = 3, length: int = 8, sizes: Sequence[int] = SIZES) -> RandomProgram:
    """Programs of up to so many arguments and instructions."""
    count = draw(st.integers(1, arguments))
    shapes = tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=3).map(tuple)) for _ in range(count))
    return _program(draw, shapes, draw(st.integers(3, length)), depth=0)


def sizes_for(mesh: MeshShape, most: int = 24) -> list[int]:
    """Sizes of dims that some axes of the mesh divide, or all, or none."""
    axes = itertools.chain.from_iterable(itertools.combinations(mesh.values(), n) for n in range(len(mesh) + 1))
    products = {math.prod(sizes) for sizes in axes}
    found = {product * times for product in products for times in (1, 2, 3)} | {product + 1 for product in products}
    return sorted(size for size in found if 1 < size <= most)


@st.composite
def specs(draw, shapes: Sequence[Shape], mesh: MeshShape, least: int = 1) -> list[PartitionSpec | None]:
    """For each shape a PartitionSpec that `jax.jit` takes, or None; at least so many are there, if there are shapes."""
    found: list[PartitionSpec | None] = []
    for position, shape in enumerate(shapes):
        if position >= least and draw(st.booleans()):
            found.append(None)
            continue
        left = dict(enumerate(shape))
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis, devices in mesh.items():
            fitting = [None, *(dim for dim, size in left.items() if size % devices == 0)]
            dim = draw(st.sampled_from(fitting))
            if dim is not None:
                left[dim] //= devices
                dims[dim] += (axis,)
        found.append(PartitionSpec(*dims))
    return found


def _program(draw, shapes: Sequence[Shape], length: int, depth: int) -> RandomProgram:
    pool = list(shapes)
    instructions = []
    for _ in range(length):
        families = [f for f in _FAMILIES if depth < _DEEPEST or f not in _NESTED]
        made = draw(st.sampled_from(families))(draw, pool, depth)
        if made is None:
            continue
        operands = [jax.ShapeDtypeStruct(pool[i], jnp.float32) for i in made.reads]
        result = jax.eval_shape(made.run, *operands)
        assert result.dtype == jnp.float32, made.text
        if 0 < math.prod(result.shape) <= _LARGEST and len(result.shape) <= 4:
            instructions.append(made)
            pool.append(result.shape)
    last = len(pool) - 1
    read = {i for instruction in instructions for i in instruction.reads}
    unread = [i for i in range(len(shapes), last) if i not in read]
    also = draw(st.lists(st.integers(0, last), max_size=2, unique=True))
    return RandomProgram(tuple(shapes), tuple(instructions), (last, *unread, *also))


# Families: each draws one instruction from the shapes there are, or None where none fits.


def _pick(draw, pool: Sequence[Shape], fits: Callable[[Shape], bool] = lambda shape: True) -> int | None:
    found = [i for i, shape in enumerate(pool) if fits(shape)]
    return draw(st.sampled_from(found)) if found else None


def _dim(draw, shape: Shape) -> int:
    return draw(st.integers(0, len(shape) - 1))


def _has_dims(shape: Shape) -> bool:
    return len(shape) > 0


def _unary(draw, pool, depth):
    name = draw(st.sampled_from(["tanh", "sin", "exp", "abs", "square", "negative", "sign", "floor"]))
    fn = getattr(jnp, name)
    return Instruction(name, (_pick(draw, pool),), (lambda x: jnp.exp(-jnp.abs(x))) if name == "exp" else fn)


def _binary(draw, pool, depth):
    i = _pick(draw, pool)
    j = _pick(draw, pool, lambda shape: shape == pool[i])
    name = draw(st.sampled_from(["add", "multiply", "maximum", "subtract"]))
    return Instruction(name, (i, j), getattr(jnp, name))


def _broadcast(draw, pool, depth):
    i = _pick(draw, pool)
    j = _pick(draw, pool, lambda shape: pool[i][len(pool[i]) - len(shape) :] == shape)
    return Instruction("add, broadcast", (i, j), jnp.add)


def _outer(draw, pool, depth):
    i, j = _pick(draw, pool), _pick(draw, pool)
    return Instruction("outer", (i, j), lambda x, y: jnp.multiply(jnp.expand_dims(x, tuple(range(-y.ndim, 0))), y))


def _where(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    dim = _dim(draw, pool[i])
    return Instruction(
        f"masked {dim}", (i,), lambda x: jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, dim) > 1, x, 0.0)
    )


def _dot(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    j = None if i is None else _pick(draw, pool, lambda shape: set(shape) & set(pool[i]))
    if j is None:
        return None
    pairs = [(a, b) for a, size in enumerate(pool[i]) for b, other in enumerate(pool[j]) if size == other]
    contracted = draw(st.sampled_from(pairs))
    rest = [(a, b) for a, b in pairs if a != contracted[0] and b != contracted[1]]
    batch = [draw(st.sampled_from(rest))] if rest and draw(st.booleans()) else []
    numbers = (((contracted[0],), (contracted[1],)), (tuple(a for a, _ in batch), tuple(b for _, b in batch)))
    return Instruction(f"dot {numbers}", (i, j), lambda x, y: lax.dot_general(x, y, numbers))


def _transpose(draw, pool, depth):
    i = _pick(draw, pool)
    permutation = tuple(draw(st.permutations(range(len(pool[i])))))
    return Instruction(f"transpose {permutation}", (i,), lambda x: jnp.transpose(x, permutation))


def _reshape(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    shape = pool[i]
    dim = _dim(draw, shape)
    if draw(st.booleans()) and dim + 1 < len(shape):
        to = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    else:
        piece = draw(st.sampled_from([size for size in (1, 2, 3, 4, 5, 7, 8) if shape[dim] % size == 0]))
        to = (*shape[:dim], shape[dim] // piece, piece, *shape[dim + 1 :])
    return Instruction(f"reshape {to}", (i,), lambda x: x.reshape(to))


def _reduce(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    dim, name = _dim(draw, pool[i]), draw(st.sampled_from(["sum", "max", "min", "mean", "argmax"]))
    return Instruction(f"{name} {dim}", (i,), lambda x: getattr(jnp, name)(x, axis=dim).astype(jnp.float32))


def _softmax(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    dim = _dim(draw, pool[i])
    return Instruction(f"softmax {dim}", (i,), lambda x: jax.nn.softmax(x, axis=dim))


def _along(draw, pool, depth):
    """What runs along a dim or shifts it."""
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    dim = _dim(draw, pool[i])
    size = pool[i][dim]
    name, fn = draw(st.sampled_from([
        ("cumsum", lambda x: jnp.cumsum(x, axis=dim)),
        ("sort", lambda x: jnp.sort(x, axis=dim)),
        ("flip", lambda x: jnp.flip(x, axis=dim)),
        ("roll", lambda x: jnp.roll(x, 1, axis=dim)),
        ("half", lambda x: lax.slice_in_dim(x, 0, max(size // 2, 1), axis=dim)),
        ("every other", lambda x: lax.slice_in_dim(x, 0, size, stride=2, axis=dim)),
        ("pad", lambda x: jnp.pad(x, [(0, 0)] * dim + [(1, 1)] + [(0, 0)] * (x.ndim - dim - 1))),
        ("repeat", lambda x: jnp.repeat(x, 2, axis=dim)),
        ("expand", lambda x: jnp.expand_dims(x, dim)),
        ("top", lambda x: lax.top_k(jnp.moveaxis(x, dim, -1), max(size // 2, 1))[0]),
        ("scan", lambda x: lax.associative_scan(jnp.add, x, axis=dim)),
    ]))  # fmt: skip
    return Instruction(f"{name} {dim}", (i,), fn)


def _concatenate(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    j, dim = _pick(draw, pool, lambda shape: shape == pool[i]), _dim(draw, pool[i])
    stacks = draw(st.booleans())
    fn = jnp.stack if stacks else jnp.concatenate
    return Instruction(f"{fn.__name__} {dim}", (i, j), lambda x, y: fn([x, y], axis=dim))


def _gather(draw, pool, depth):
    i, j = _pick(draw, pool, _has_dims), _pick(draw, pool)
    if i is None:
        return None
    dim = _dim(draw, pool[i])

    def take(x, y):
        return jnp.take(x, (jnp.abs(y) * 7).astype(jnp.int32) % x.shape[dim], axis=dim)

    return Instruction(f"take {dim}", (i, j), take)


def _scatter(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    dim = _dim(draw, pool[i])
    rest = pool[i][:dim] + pool[i][dim + 1 :]
    fits = [j for j, shape in enumerate(pool) for at in range(len(shape)) if shape[:at] + shape[at + 1 :] == rest]
    j = draw(st.sampled_from(fits))
    at = draw(st.sampled_from([at for at in range(len(pool[j])) if pool[j][:at] + pool[j][at + 1 :] == rest]))
    mode = draw(st.sampled_from(["add", "set", "max"]))

    def put(x, y):
        x, y = jnp.moveaxis(x, dim, 0), jnp.moveaxis(y, at, 0)
        indices = (jnp.arange(y.shape[0]) * 3) % x.shape[0]  # each at most once if there are few
        indices = jnp.minimum(indices, jnp.arange(y.shape[0])) if mode == "set" else indices
        return getattr(x.at[indices % x.shape[0]], mode)(y) if mode != "set" or len(y) <= len(x) else x + y.sum(0)

    return Instruction(f"scatter {mode} {dim} {at}", (i, j), put)


def _batched_gather(draw, pool, depth):
    """Each row looks up elements of its own; or adds to them, which is the gradient of that."""
    i = _pick(draw, pool, lambda shape: len(shape) > 1)
    if i is None:
        return None
    j, adds = _pick(draw, pool, lambda shape: shape[0:1] == pool[i][0:1] and len(shape) > 1), draw(st.booleans())

    def one(x, y):
        indices = (jnp.abs(y) * 7).astype(jnp.int32) % x.shape[0]
        return x.at[indices].add(1.0) if adds else x[indices]

    return Instruction("batched scatter" if adds else "batched take", (i, j), jax.vmap(one))


def _dynamic(draw, pool, depth):
    i = _pick(draw, pool, _has_dims)
    if i is None:
        return None
    dim = _dim(draw, pool[i])
    size = max(pool[i][dim] // 2, 1)

    def read(x):
        start = (jnp.abs(x).sum() * 10).astype(jnp.int32) % 2
        return lax.dynamic_slice_in_dim(x, start, size, axis=dim)

    def write(x):
        start = (jnp.abs(x).sum() * 10).astype(jnp.int32) % 2
        return lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(x, 0, size, axis=dim) * 2, start, axis=dim)

    name, fn = draw(st.sampled_from([("dynamic slice", read), ("dynamic update", write)]))
    return Instruction(f"{name} {dim}", (i,), fn)


def _convolution(draw, pool, depth):
    """Of any rank, dims in any order, with feature groups, strides and dilation."""
    i = _pick(draw, pool, lambda shape: 2 <= len(shape) <= 4)
    j = None if i is None else _pick(draw, pool, lambda shape: len(shape) == len(pool[i]))
    if j is None:
        return None
    images, kernel, rank = pool[i], pool[j], len(pool[i])
    roles = [  # batch and features of the images, features out and in of the kernel
        (batch, features, out, into)
        for batch, features in itertools.permutations(range(rank), 2)
        for out, into in itertools.permutations(range(rank), 2)
        if images[features] % kernel[into] == 0 and kernel[out] % (images[features] // kernel[into]) == 0
    ]
    if not roles:
        return None
    batch, features, out, into = draw(st.sampled_from(roles))
    numbers = lax.ConvDimensionNumbers(
        lhs_spec=(batch, features, *(dim for dim in range(rank) if dim not in (batch, features))),
        rhs_spec=(out, into, *(dim for dim in range(rank) if dim not in (out, into))),
        out_spec=tuple(draw(st.permutations(range(rank)))),
    )
    groups = images[features] // kernel[into]
    how = {
        "window_strides": [draw(st.sampled_from([1, 1, 2])) for _ in range(rank - 2)],
        "padding": draw(st.sampled_from(["SAME", "VALID"])),
        "rhs_dilation": [draw(st.sampled_from([1, 1, 2])) for _ in range(rank - 2)],
    }

    def convolve(images, kernel):
        return lax.conv_general_dilated(images, kernel, dimension_numbers=numbers, feature_group_count=groups, **how)

    return Instruction(f"convolution {numbers} {groups} {how}", (i, j), convolve)


def _pool(draw, pool, depth):
    i = _pick(draw, pool, lambda shape: len(shape) == 3 and shape[1] % 2 == 0)
    if i is None:
        return None
    window = (1, 2, 1)
    return Instruction("max pool", (i,), lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"))


def _scan(draw, pool, depth):
    """Of one carry or two, over the slices of one stack."""
    carries = [_pick(draw, pool) for _ in range(draw(st.integers(1, 2)))]
    j = _pick(draw, pool, lambda shape: shape and shape[0] <= 8)
    if j is None:
        return None
    starts = [pool[i] for i in carries]
    body = _program(draw, (*starts, pool[j][1:]), draw(st.integers(1, 3)), depth + 1)
    handed_on = [
        draw(st.sampled_from([k for k, shape in enumerate(_shapes(body)) if shape == start])) for start in starts
    ]
    body = RandomProgram(body.shapes, body.instructions, (*handed_on, body.results[0]))
    which = draw(st.integers(0, len(carries)))
    reverse = draw(st.booleans())

    def loop(*operands):
        def step(carry, x):
            *carry, y = body(*carry, x)
            return tuple(carry), y

        finals, stack = lax.scan(step, operands[:-1], operands[-1], reverse=reverse)
        return (*finals, stack)[which]

    return Instruction(f"scan[{_nested(body)}][{which}]", (*carries, j), loop)


def _fori(draw, pool, depth):
    i = _pick(draw, pool)
    body = _program(draw, (pool[i],), draw(st.integers(1, 3)), depth + 1)
    keeps = [k for k, shape in enumerate(_shapes(body)) if shape == pool[i]]
    body = RandomProgram(body.shapes, body.instructions, (draw(st.sampled_from(keeps)),))

    def loop(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, *body(c[1])), (0, x))[1]

    return Instruction(f"while[{_nested(body)}]", (i,), loop)


def _cond(draw, pool, depth):
    i, j = _pick(draw, pool), _pick(draw, pool)
    branches = []
    for _ in range(2):
        body = _program(draw, (pool[i], pool[j]), draw(st.integers(1, 2)), depth + 1)
        keeps = [k for k, shape in enumerate(_shapes(body)) if shape == pool[i]]
        branches.append(RandomProgram(body.shapes, body.instructions, (draw(st.sampled_from(keeps)),)))
    one, other = branches

    def branch(x, y):
        return lax.cond(x.sum() > 0, lambda *xs: one(*xs)[0], lambda *xs: other(*xs)[0], x, y)

    return Instruction(f"cond[{_nested(one)} | {_nested(other)}]", (i, j), branch)


def _gradient(draw, pool, depth):
    i, j = _pick(draw, pool), _pick(draw, pool)
    body = _program(draw, (pool[i], pool[j]), draw(st.integers(1, 3)), _DEEPEST)
    smooth = RandomProgram(body.shapes, body.instructions, body.results[:1])
    return Instruction(f"grad[{_nested(smooth)}]", (i, j), jax.grad(lambda x, y: jnp.sum(smooth(x, y)[0])))


def _shapes(program: RandomProgram) -> list[Shape]:
    count = len(program.shapes) + len(program.instructions)
    every = RandomProgram(program.shapes, program.instructions, tuple(range(count)))
    return [x.shape for x in jax.eval_shape(every, *program.arguments)]


def _nested(program: RandomProgram) -> str:
    return repr(program).replace("\n", "; ")


_NESTED = (_scan, _fori, _cond, _gradient)
_FAMILIES = (
    _unary, _binary, _broadcast, _outer, _where, _dot, _dot, _transpose, _reshape, _reshape, _reduce, _softmax, _along,
    _concatenate, _gather, _scatter, _batched_gather, _dynamic, _convolution, _pool, *_NESTED, *_NESTED,
)  # fmt: skip
