"""What a verification proved."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.stamp import Stamp


@dataclass
class Report:
    """What was proved, for which ranks."""

    label: str
    ranks: int
    operators: int = 0
    collectives: int = 0
    messages: int = 0
    initial: int = 0
    parameters: int = 0
    states: int = 0
    values: int = 0
    own: int = 0  # of these, what every rank has of its own
    rounded: dict[str, int] = field(default_factory=dict)  # what is done to so many values that is not exact
    stamp: Stamp | None = field(default=None, repr=False, compare=False)  # the rank programs as they were proved

    def __str__(self) -> str:
        n = self.ranks
        return "\n".join([
            f"proved for {self.label} on {n} rank{'s' * (n != 1)}:",
            f"  operators    {self.operators}: inputs defined, types as their rules infer them, placements by a rule of each op",
            f"  collectives  {self.collectives} meetings: same order, type, sizes, reduction and root on every member",
            f"  messages     {self.messages} sends, each with its recv: same peer, sizes and dtype",
            "  no deadlock  all ranks reach the end of startup and of a step, even if sends wait for their recvs",
            f"  startup      every rank begins with its part of what one device begins with ({self.initial} variables)",
            f"  same answers {self.parameters} parameters and {self.states} other states end the step with one device's value",
            f"  fetches      {self.values} values that can be fetched are one device's",
            *([f"  replicas     {self.own} of these are each rank's own: what one device computes of a batch, it computes of its rows"]
              if self.own else []),
            *[f"  rounded      {count} values {what}" for what, count in self.rounded.items()],
            "  in exact arithmetic: the order of sums, and weights beyond the twelfth digit, are not looked at",
        ])  # fmt: skip
