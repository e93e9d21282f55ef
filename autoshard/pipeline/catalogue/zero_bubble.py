"""Schedules that split W from B, so that W fills what would be bubbles (Qi et al., arXiv:2401.10241)."""

from __future__ import annotations

from collections import Counter, deque

from autoshard.pipeline.catalogue.one_direction import v_placement
from autoshard.pipeline.orders import Schedule, Task, chain


class OrderWriter:
    """Writes the order of one device whose tasks of each kind and virtual stage come in the order of microbatches."""

    def __init__(self, *chunks: tuple[int, int]):
        """`chunks`: the device's virtual stages, each with the first microbatch that goes through it."""
        self.tasks: list[Task] = []
        self.groups: list[tuple[Task, ...]] = []  # tasks that are one program
        self.done: Counter[tuple[str, int]] = Counter()  # tasks per kind and chunk
        self._chunks = chunks
        self._pending: deque[Task] = deque()  # whose W is still to come

    def forward(self, chunk: int = 0) -> Task:
        """The next F of a chunk."""
        return self._add("F", chunk)

    def backward(self, chunk: int = 0) -> None:
        """The next B of a chunk, its W left for later."""
        self._pending.append(self._add("B", chunk)._replace(kind="W"))

    def weight(self) -> None:
        """The W that has waited longest, if there is one."""
        if self._pending:
            self.tasks.append(self._pending.popleft())

    def weights(self) -> None:
        """Every W that is left."""
        while self._pending:
            self.weight()

    def whole_backward(self, chunk: int, *forward: Task) -> None:
        """The next B of a chunk and its W as one program, with the forward task just written if it is given."""
        task = self._add("B", chunk)
        self.tasks.append(task._replace(kind="W"))
        self.groups.append((*forward, *self.tasks[-2:]))

    def _add(self, kind: str, chunk: int) -> Task:
        stage, first = self._chunks[chunk]
        self.tasks.append(Task(kind, first + self.done[kind, chunk], stage))
        self.done[kind, chunk] += 1
        return self.tasks[-1]


def zb_h(name: str, stages: int, microbatches: int, warmups: list[int], lags: list[int]) -> Schedule:
    """1F1B in which a device has `warmups` microbatches in flight at first, and W follows `lags` B later."""
    orders = []
    for stage, (warmup, lag) in enumerate(zip(warmups, lags, strict=True)):
        order = OrderWriter((stage, 0))
        for _ in range(min(warmup, microbatches)):
            order.forward()
        for microbatch in range(microbatches):
            order.backward()
            if microbatch >= lag:
                order.weight()
            if order.done["F", 0] < microbatches:
                order.forward()
        order.weights()
        orders.append(tuple(order.tasks))
    return Schedule(name, microbatches, tuple(orders), tuple(range(stages)), chain(stages))


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """The memory of 1F1B, and a third of its bubble where F, B and W take equally long."""
    return zb_h("zb_h1", stages, microbatches, list(range(stages, 0, -1)), list(range(stages)))


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Twice that memory, and no bubble between a device's own first and last task."""
    warmups = [2 * (stages - stage) - 1 for stage in range(stages)]
    return zb_h("zb_h2", stages, microbatches, warmups, [2 * stage for stage in range(stages)])


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks forth and back: the memory of 1F1B, and no bubble between a device's own first and last task.

    The first cotangent comes back to a device as early as it has forward tasks to do, since the last chunk is where
    the first is. Orders are those of at least 2 * stages - 1 microbatches, without the tasks of those beyond.
    """
    count = max(microbatches, 2 * stages - 1)
    orders = []
    for device in range(stages):
        order = OrderWriter((device, 0), (2 * stages - 1 - device, 0))
        for _ in range(2 * (stages - device) - 1):
            order.forward(0)
        for _ in range(device):
            order.forward(1)
            order.forward(0)
        for _ in range(stages - device):
            order.forward(1)
            order.backward(1)
            order.weight()
        while order.done["F", 1] < count:
            if order.done["F", 0] < count:
                order.forward(0)
            order.backward(0)
            order.weight()
            order.forward(1)
            order.backward(1)
            order.weight()
        for _ in range(device):
            order.backward(0)
            order.backward(1)
        while order.done["B", 0] < count:
            order.backward(0)
            order.weight()
        order.weights()
        orders.append(tuple(task for task in order.tasks if task.microbatch < microbatches))
    return Schedule("zb_v", microbatches, tuple(orders), v_placement(stages), chain(2 * stages))
