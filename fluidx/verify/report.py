"""The report of a verification: what was proved, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.change_stamps import Stamp


@dataclass
class Report:
    """What was proved, and for how many ranks. `str()` is a text for users."""

    label: str
    ranks: int
    operators: int = 0
    collectives: int = 0
    messages: int = 0
    initial: int = 0
    parameters: int = 0
    states: int = 0
    values: int = 0
    own: int = 0  # of these, replica-local values
    loaded: list[str] = field(default_factory=list)  # state that no startup program writes, also on one device
    rounded: dict[str, int] = field(default_factory=dict)  # kind of rounding -> number of values
    stamp: Stamp | None = field(default=None, repr=False, compare=False)  # identifies the rank programs that were proved

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
            lines.append(f"  to load      {named}: no startup program writes it, also on one device; load a value before the first step")
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
