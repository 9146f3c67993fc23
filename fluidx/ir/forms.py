"""Forms: the interface between the walk of ir/form_walk.py and one kind of form, such as placement or dtype.

A form is a property in which copies of a value may differ: the placement (transpiler/placement), the dtype (mixed precision), the memory
(offload), or the order of axes (channels last). A subclass of Forms says in which form variables are stored, which forms operators read and
make, and how values are converted.
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
State = tuple[dict[Any, "Held"], dict[Any, tuple[str, ...]]]  # the available forms of values, and the names of their copies


@dataclass(eq=False, slots=True)
class Held:
    """The forms in which a value is available, and a mark that the subclass sets on the value. Compared by identity."""

    forms: tuple[Any, ...]
    mark: Any = None


@dataclass(eq=False, slots=True)
class FormChoice:
    """The forms in which an operator reads its operands and makes its results.

    `take` has, for each operand, the number of the available form that the operator reads; -1: the operand is converted to the form in
    `ins`; None: it is read unchanged. `outs` are pairs (Held, form) of the results, each made in one form. `still`: no operand is
    converted; each is read in its first form. `attrs` replace the operator's attributes. `asks`: the walk then calls `Forms.special`.
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
        """A choice in which each operand is converted to the form in `ins`; None: it is read unchanged."""
        take, made = [None if form is None else -1 for form in ins], [(held, held.forms[0]) for held in outs]
        return FormChoice(take, ins, made, attrs=attrs, asks=attrs is not None)


class Forms(ABC):
    """One kind of form, for the values of one program. Forms are compared by `==`."""

    by_name: ClassVar[bool] = False  # operands are converted in the order of their names, not of their slots
    # whether a choice follows from the operator's type, device, attributes, how its operands are held and the types of its results
    keeps_choices: ClassVar[bool] = False

    block: Block  # the current block of the walk
    home: dict[str, Any]  # the home form of each variable: that of the value under the variable's own name
    out: list[Operator]  # the new operators of the block so far

    @abstractmethod
    def choose(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice | None:
        """The choice for an operator; None: the operator is not changed, and uses its variables in their home forms."""

    def special(self, op: Operator, definition: type[OpDef], ins: Names, outs: Names, choice: FormChoice) -> FormChoice | list[Operator]:
        """The choice for this one operator, if its first choice `asks`; or a list of operators that replace it."""
        return choice

    @abstractmethod
    def convert(self, name: str, source: str, target: str, want: Any, near: Operator) -> None:
        """Append operators to `out` that make `target`, in the form `want`, from `source`; both are the value `name`."""

    @abstractmethod
    def declared(self, d: Var, form: Any) -> Var:
        """The declaration of a variable like `d` with that home form."""

    @abstractmethod
    def copy(self, d: Var, form: Any) -> Var:
        """The declaration of a copy of `d` in that form; the walk names it."""

    def stored(self, d: Var) -> Any:
        """The home form of a variable that exists before the program runs; None: the form in which its first writer makes it."""
        return None

    def given(self, d: Var) -> Any:
        """The form of a variable that is read before an operator of the walk has written it."""
        return self.stored(d)

    def ending(self, form: Any) -> str:
        """The ending of the name of a copy in a form."""
        return str(form)

    def numbered(self, k: int) -> str:
        """The ending with number `k`, for the name of a copy if the names with smaller numbers are used."""
        return str(k)

    def enters(self, op: Operator) -> bool:
        """Whether the walk rewrites the blocks that an operator runs. Otherwise they use variables in their home forms."""
        return True

    def keeps(self, op: Operator) -> bool:
        """Whether an operator shares converted copies with other readers."""
        return True

    def returns(self, name: str, op: Operator) -> bool:
        """Whether a result that an operator makes in another form is converted to its home form."""
        return True

    def common(self, op: Operator, out: str, held: Sequence[tuple[str, Held]]) -> Held:
        """The form in which all branches return a result; `held` has, for each branch, its name there and its available forms."""
        return Held((self.home[out],), held[0][1].mark) if out in self.home else held[0][1]


def with_names(op: Operator, definition: type[OpDef], ins: Names, changed: Mapping[int, str]) -> Slots:
    """The inputs of an operator, with new names for some operands by their number: two operands may be one value in two forms."""
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
