"""What a verification proved."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.change_stamps import Stamp


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
    loaded: list[str] = field(default_factory=list)  # state that no startup writes, on one device neither
    rounded: dict[str, int] = field(default_factory=dict)  # what is done to so many values that is not exact
    stamp: Stamp | None = field(default=None, repr=False, compare=False)  # the rank programs as they were proved

    def __str__(self) -> str:
        lines = [
            f"proved for {self.label} on {count(self.ranks, 'rank')}:",
            f"  operators    {self.operators}: every input is defined; types and placements follow from each operator's rule",
            f"  collectives  {self.collectives}: every rank calls the same ones in the same order, with equal sizes and roots",
            f"  messages     {self.messages}: every send has its recv, with the same sizes and dtype",
            "  no deadlock  every rank reaches the end of startup and of a step",
            f"  startup      {count(self.initial, 'variable')}: every rank starts with its part of one device's initial values",
            f"  step         {count(self.parameters, 'parameter')} and {count(self.states, 'other state variable')} "
            "equal those of one device after each step",
            f"  fetches      {count(self.values, 'value')} can be fetched and equal those of one device",
        ]
        if self.loaded:
            named = f"{', '.join(f'%{n}' for n in self.loaded[:3])}{f' and {len(self.loaded) - 3} more' if len(self.loaded) > 3 else ''}"
            lines.append(f"  to load      {named}: no startup writes it, on one device neither; load a value before the first step")
        if self.own:
            lines.append(f"  replicas     {self.own} of these are replica-local: computed by each rank on its own rows")
        lines += [f"  rounded      {n} values {what}" for what, n in self.rounded.items()]
        lines.append("  not checked  rounding: the proof treats arithmetic as exact")
        return "\n".join(lines)


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{n} {noun}{'s' * (n != 1)}"
