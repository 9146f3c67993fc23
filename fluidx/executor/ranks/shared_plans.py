"""SharedPlans: ranks with equal programs and equal local sizes share one plan."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

from ...ir.change_stamps import Stamp
from ...ir.program import Program
from ..plan.planner import plan
from ..plan.records import Plan


class SharedPlans:
    """Plans rank programs. Among equal programs only the first is planned; its outline caches the plan for the others (see plan_cache)."""

    def __init__(self, stamp: Stamp, *programs: Sequence[Program]):
        self._first: dict[int, tuple[Program, Lock]] = {}  # by the id of a program: the first that is equal
        for some in programs:
            for first, ranks in stamp.twins(some):
                lock = Lock()  # ranks are planned at the same time: the others wait for the first
                self._first.update((id(some[r]), (first, lock)) for r in ranks)

    def plan(self, program: Program, *args: Any, **how: Any) -> Plan:
        """The plan of one of the programs. Arguments are those of `plan`."""
        first, lock = self._first[id(program)]
        with lock:
            planned = plan(first, *args, **how)
        return planned if first is program else planned._replace(program=program)
