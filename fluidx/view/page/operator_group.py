"""A group of operators in the tree of a page, and the sections that the roles of operators belong to."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ir.operator import Role

SECTION, SCOPE, REPEAT, COPY, PART = "section", "scope", "repeat", "copy", "part"
SECTIONS = {
    Role.FORWARD: "forward", Role.LOSS: "forward", Role.BACKWARD: "backward", Role.LR_SCHED: "update", Role.OPTIMIZE: "update",
}  # fmt: skip


@dataclass(eq=False)
class OperatorGroup:
    """Consecutive operators. Children are groups, and indices of operators."""

    title: str
    kind: str
    children: list[Item] = field(default_factory=list)
    each: str = ""  # for a repeat: the name of one copy

    def ops(self) -> list[int]:
        """Indices of all operators below, in order."""
        return [k for c in self.children for k in (c.ops() if isinstance(c, OperatorGroup) else (c,))]


Item = OperatorGroup | int
