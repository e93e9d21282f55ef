"""Where the plan of a step with stages is from: the user, the cache folder, the process that leads, or the planner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.cache import key_of, load_plan, store_plan
from autoshard.options import Options
from autoshard.processes import ProcessGroup
from autoshard.processes.agreement import Claims, plan_of_all
from autoshard.program import Program
from autoshard.propagation import rules_for
from autoshard.user_plan import Plan


@dataclass(frozen=True, eq=False)
class PlanSource:
    """What finds the plan of a step."""

    options: Options
    jit_keywords: Mapping[str, Any]
    group: ProcessGroup | None  # the processes that share the mesh; None if one has all of it
    given: Plan | None = None  # by the user

    def plan(
        self, program: Program, asked: str, make: Callable[[], Plan], bound: Callable[[Plan], Plan]
    ) -> tuple[Plan, Claims | None]:
        """The plan of a step, and what processes agree on before they run it.

        Args:
            asked: what the user asks of the pipeline.
            make: makes the plan if it is not there.
            bound: binds one that was read to the step.
        """
        if self.group is None:
            return bound(self.given) if self.given is not None else self._kept(program, asked, make, bound), None
        claims = Claims.of(program, rules_for(program), self.options, self.jit_keywords, self.given)
        key = hashlib.sha256(f"{claims.key} {asked}".encode()).hexdigest()
        claims = replace(claims, key=key, compared={**claims.compared, "pipeline": asked})
        if self.given is not None:
            return bound(self.given), claims
        made = plan_of_all(
            self.group,
            claims,
            lambda: self._kept(program, asked, make, bound),
            lambda text: bound(Plan.loads(text, self.options.mesh)),
        )
        return made, claims

    def _kept(self, program: Program, asked: str, make: Callable[[], Plan], bound: Callable[[Plan], Plan]) -> Plan:
        """The plan in the cache folder, or one that is made and kept there."""
        folder = self.options.cache
        if folder is None:
            return make()
        text = f"{key_of(program, rules_for(program), self.options)} {asked}"
        key = hashlib.sha256(text.encode()).hexdigest()
        found = load_plan(Path(folder), key, program, self.options)
        if found is not None:
            return bound(found)
        made = make()
        store_plan(Path(folder), key, made)
        return made
