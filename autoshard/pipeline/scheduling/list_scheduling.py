"""List scheduling under a memory limit: a free device starts the ready task that comes first in a list.

A forward task may start only if the microbatches that hold memory can still all end, one after the other. So orders
within the limit are found wherever one microbatch alone fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.pipeline.scheduling.problem import TOLERANCE, HeldLimit, OrderProblem, Rows

Priority = Callable[[int], Any]  # of a task by its number; the least goes first


def list_schedule(problem: OrderProblem, priority: Priority) -> Rows:
    """Orders of all devices. One microbatch must fit on every device within every limit."""
    return _ListScheduler(problem, priority).run()


def priorities(problem: OrderProblem, starts: Sequence[float]) -> list[Priority]:
    """Lists worth trying. `starts` are the seconds at which tasks start in a known order."""
    tasks, tails = problem.tasks, problem.tails
    rank = {"B": 0, "F": 1, "W": 2}

    def as_known(i: int) -> Any:
        return (tasks[i].kind == "W", starts[i])

    def backward_first(i: int) -> Any:
        return (rank[tasks[i].kind], -tasks[i].virtual_stage, tasks[i].microbatch)

    def oldest_first(i: int) -> Any:
        return (tasks[i].kind == "W", tasks[i].microbatch // problem.schedule.slices, rank[tasks[i].kind], -tails[i])

    def longest_tail(i: int) -> Any:
        return (tasks[i].kind == "W", -tails[i], tasks[i].microbatch)

    def deepest_forward_first(i: int) -> Any:
        return (tasks[i].kind == "W", tasks[i].kind == "B", -tasks[i].virtual_stage, tasks[i].microbatch)

    return [as_known, backward_first, oldest_first, longest_tail, deepest_forward_first]


class _ListScheduler:
    """Devices, tasks and memory while time passes."""

    def __init__(self, problem: OrderProblem, priority: Priority):
        self.problem = problem
        self.priority = priority
        self.rows: Rows = [[] for _ in range(problem.schedule.stages)]
        self.free = [0.0] * len(self.rows)
        self.arrivals = [0.0] * len(problem.tasks)  # when the last of a task's inputs is there
        self.missing = [len(inputs) for inputs in problem.lags]
        # Of each line only the first task that has not run is looked at.
        self.lines: list[list[list[int]]] = [[] for _ in self.rows]
        for line in problem.lines.values():
            self.lines[problem.devices[line[0]]].append(line[::-1])
        self.memory = [_MicrobatchMemory(problem, limit) for limit in problem.limits]

    def run(self) -> Rows:
        moments = [0.0]
        now = -1.0
        while moments:
            moment = heapq.heappop(moments)
            if moment <= now:
                continue
            now = moment
            started = True
            while started:  # tasks of no seconds make others ready at once
                started = False
                for device in range(len(self.rows)):
                    task = self._next(device, now)
                    if task is not None:
                        started = True
                        end = self._start(task, device, now)
                        heapq.heappush(moments, end)
                        for _, lag in self.problem.readers[task]:
                            heapq.heappush(moments, end + lag)
        return self.rows

    def _next(self, device: int, now: float) -> int | None:
        """The first task of the list that a device can start now."""
        if self.free[device] > now:
            return None
        ready = [
            line[-1]
            for line in self.lines[device]
            if line and not self.missing[line[-1]] and self.arrivals[line[-1]] <= now
        ]
        for task in sorted(ready, key=self.priority):
            if all(memory.has_room(task) for memory in self.memory):
                return task
        return None

    def _start(self, task: int, device: int, now: float) -> float:
        """Runs a task from now on; the moment of its end."""
        problem = self.problem
        end = self.free[device] = now + problem.seconds[task]
        self.rows[device].append(task)
        next(line for line in self.lines[device] if line and line[-1] == task).pop()
        for reader, lag in problem.readers[task]:
            self.missing[reader] -= 1
            self.arrivals[reader] = max(self.arrivals[reader], end + lag)
        for memory in self.memory:
            memory.run(task)
        return end


class _MicrobatchMemory:
    """What devices hold of each microbatch, and what each microbatch will still take."""

    def __init__(self, problem: OrderProblem, limit: HeldLimit):
        self.limit, self.devices = limit, problem.devices
        schedule = problem.schedule
        per_replica = schedule.microbatches // schedule.replicas
        # Microbatches in the order in which they are sure to be able to end; replicas take turns.
        self.place = [
            (i // schedule.slices % per_replica) * schedule.replicas + i // schedule.slices // per_replica
            for i in range(schedule.units)
        ]
        self.owner = [self.place[task.microbatch] for task in problem.tasks]
        count = schedule.microbatches
        self.held = [[0.0] * count for _ in range(schedule.stages)]
        self.wanted = [[0.0] * count for _ in range(schedule.stages)]
        self.left = [0] * count  # tasks that have not run
        for task, owner in enumerate(self.owner):
            self.wanted[self.devices[task]][owner] += limit.at_start[task]
            self.left[owner] += 1
        self.first = 0  # microbatch that has not ended
        self.last = -1  # microbatch that has started

    def has_room(self, task: int) -> bool:
        """Whether all microbatches that have started can still end, in their order, if this task runs now."""
        size, owner, device = self.limit.at_start[task], self.owner[task], self.devices[task]
        if not size:
            return True
        held, wanted = self.held[device], self.wanted[device]
        room = self.limit.most * (1 + TOLERANCE) - sum(held[self.first : self.last + 1]) - size
        if room < 0:
            return False
        for microbatch in range(self.first, max(self.last, owner) + 1):
            own = size if microbatch == owner else 0.0
            if wanted[microbatch] - own > room:
                return False
            room += held[microbatch] + own
        return True

    def run(self, task: int) -> None:
        owner, device = self.owner[task], self.devices[task]
        self.held[device][owner] += self.limit.at_start[task] + self.limit.at_end[task]
        self.wanted[device][owner] -= self.limit.at_start[task]
        self.left[owner] -= 1
        if self.limit.at_start[task]:
            self.last = max(self.last, owner)
        while self.first < len(self.left) and not self.left[self.first]:
            self.first += 1
