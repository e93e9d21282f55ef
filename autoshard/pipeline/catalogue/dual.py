"""DualPipe (DeepSeek-V3, arXiv:2412.19437) and DualPipeV, its half: forward and backward run as one program.

Microbatches come in from two ends. In the middle of the schedule, a device runs the forward pass of one together with
the backward pass of another, so that the communication of each hides behind the computation of the other.
"""

from __future__ import annotations

from autoshard.pipeline.catalogue.one_direction import v_placement
from autoshard.pipeline.catalogue.zero_bubble import OrderWriter
from autoshard.pipeline.orders import Schedule, chain


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Two pipelines in opposite directions, each with half of the microbatches and a copy of the weights."""
    half = microbatches // 2
    orders, fused = [], []
    for device in range(stages):
        down, up = (device, 0), (2 * stages - 1 - device, half)
        ends = (down, up) if device < stages // 2 else (up, down)
        order = _order(OrderWriter(*ends), stages // 2, min(device, stages - 1 - device), half)
        orders.append(tuple(order.tasks))
        fused += order.groups
    return Schedule(
        "dualpipe", microbatches, tuple(orders), v_placement(stages), chain(stages, 2), replicas=2, fused=tuple(fused)
    )


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """The first half of DualPipe's devices, with the pipeline of the other half folded back onto them."""
    orders, fused = [], []
    for device in range(stages):
        order = _order(OrderWriter((device, 0), (2 * stages - 1 - device, 0)), stages, device, microbatches)
        orders.append(tuple(order.tasks))
        fused += order.groups
    return Schedule(
        "dualpipe_v", microbatches, tuple(orders), v_placement(stages), chain(2 * stages), fused=tuple(fused)
    )


def _order(order: OrderWriter, length: int, depth: int, count: int) -> OrderWriter:
    """The order of the device at `depth` of `length` from an end, with `count` microbatches from each direction.

    Chunk 0 is of the direction that comes in at this end, chunk 1 of the other.
    """
    behind = length - depth - 1
    for _ in range(2 * behind):
        order.forward(0)
    for _ in range(depth + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(behind):
        order.backward(1)
        order.weight()
        order.forward(1)
    for i in range(count - 2 * length + depth + 1):
        forward = order.forward(0)
        if i == 0 and behind == 0:
            order.whole_backward(1)  # the device in the middle has nothing to hide it behind
        else:
            order.whole_backward(1, forward)
        order.whole_backward(0, order.forward(1))
    for _ in range(behind):
        order.whole_backward(1)
        order.whole_backward(0, order.forward(1))
    for i in range(2 * (depth + 1)):
        if i <= depth:
            order.whole_backward(1 - i % 2)
        else:
            order.backward(1 - i % 2)
    for _ in range(behind):
        order.weight()
        order.backward(0)
    order.weights()
    return order
