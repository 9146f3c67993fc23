"""What a walk over forms asks of each kind of form: where variables are at home, what operators choose, how values are converted.

A form is how a value is at hand: its placement (transpiler/placement), its dtype (mixed precision), the memory that it is in (offload), the
order of its axes (channels last). ir/form_walk.py has the walk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .opdef import OpDef
from .operator import Operator
from .program import Block
from .var import Var

Names = Sequence["str | None"]
Slots = Mapping[str, tuple[str, ...]]
Results = Sequence[tuple["Held", Any]]
State = tuple[dict[Any, "Held"], dict[Any, tuple[str, ...]]]  # the forms of values, and under which names these are at hand


@dataclass(eq=False, slots=True)
class Held:
    """The forms in which a value is at hand, and a mark of the subclass's own on the value. Compared by identity."""

    forms: tuple[Any, ...]
    mark: Any = None


@dataclass(eq=False, slots=True)
class FormChoice:
    """What an operator does.

    `take` says which of the forms at hand each operand is read in, by its number; -1: it is brought to the form in `ins`; None: it is read
    as it is. `outs` are how the results are made, each in one form, which is given too. `still`: nothing is brought, and every operand is
    read in its first form. `attrs` are other attributes than the operator has. `asks`: the choice is not all, see `Forms.special`.
    """

    take: Sequence[int | None]
    ins: Sequence[Any]
    outs: Results
    why: str = ""
    still: bool = False
    asks: bool = False
    attrs: Mapping[str, Any] | None = None

    @staticmethod
    def of(ins: Sequence[Any], outs: Sequence[Held], attrs: Mapping[str, Any] | None = None) -> FormChoice:
        """Each operand is brought to the form in `ins`; None: it is read as it is."""
        take, made = [None if form is None else -1 for form in ins], [(held, held.forms[0]) for held in outs]
        return FormChoice(take, ins, made, attrs=attrs, asks=attrs is not None)


class Forms(ABC):
    """One kind of forms, over the blocks of one program. Forms are compared by `==`."""

    by_name: ClassVar[bool] = False  # operands are brought in the order of their names, not of their slots
    # whether a choice follows from the operator's type, device, attributes, how its operands are held and the types of its results
    keeps_choices: ClassVar[bool] = False

    block: Block  # that the walk is in
    home: dict[str, Any]  # the form of what has a variable's own name
    out: list[Operator]  # the operators of the block up to here

    @abstractmethod
    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice | None:
        """What an operator does; None: it stays as it is, and what it names is at home."""

    def special(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names, choice: FormChoice) -> FormChoice | list[Operator]:
        """What this one operator does, where its choice asks; a list: these operators stand for it."""
        return choice

    @abstractmethod
    def convert(self, name: str, source: str, target: str, want: Any, near: Operator) -> None:
        """Append operators to `out` that make `target`, in the form `want`, of `source`; both are the value `name`."""

    @abstractmethod
    def declared(self, d: Var, form: Any) -> Var:
        """The declaration of a variable like `d` whose home is that form."""

    @abstractmethod
    def copy(self, d: Var, form: Any) -> Var:
        """The declaration of a copy of `d` in that form; the walk names it."""

    def stored(self, d: Var) -> Any:
        """The home of a variable that has one before the program runs; None: where the first operator that writes it leaves it."""
        return None

    def given(self, d: Var) -> Any:
        """The form of a variable that is read before an operator of the walk has written it."""
        return self.stored(d)

    def ending(self, form: Any) -> str:
        """What the name of a copy in a form ends in."""
        return str(form)

    def numbered(self, k: int) -> str:
        """What follows in the name of a copy where others have the names with smaller numbers."""
        return str(k)

    def enters(self, op: Operator) -> bool:
        """Whether the walk goes into the blocks that an operator runs. Else what they read and write is at home."""
        return True

    def keeps(self, op: Operator) -> bool:
        """Whether what is converted for an operator serves other readers too, and it reads what was converted for others."""
        return True

    def returns(self, name: str, op: Operator) -> bool:
        """Whether a result that an operator makes in another form than its home is converted home."""
        return True

    def common(self, op: Operator, out: str, held: Sequence[tuple[str, Held]]) -> Held:
        """How all branches leave a result; each has it at hand so, under its name there."""
        return Held((self.home[out],), held[0][1].mark) if out in self.home else held[0][1]


def with_names(op: Operator, definition: type[OpDef], ins: Names, changed: Mapping[int, str]) -> Slots:
    """What an operator reads, with other names for some operands by their number: two of them may be one value in two forms."""
    names: list[Any] = list(ins)
    for k, n in changed.items():
        names[k] = n
    inputs: dict[str, tuple[str, ...]] = {}
    k = 0
    for slot, _, many in definition.in_slots:
        old = op.inputs.get(slot)
        if old is None:
            k += not many
            continue
        inputs[slot] = tuple(names[k : k + len(old)])
        k += len(old)
    return inputs


__all__ = ["FormChoice", "Forms", "Held", "Names", "Results", "Slots", "State", "with_names"]
