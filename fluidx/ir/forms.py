"""One walk over a program whose values have forms: where a reader wants a value in another form, a converter stands between.

What a form is, a `ValueForm` says: a dtype (mixed precision), a memory (offload), an order of axes (channels last). The walk itself knows
the forms in which each value is at hand and under which names, and the *home* of each variable: the form of what has the variable's own
name. A copy in another form has a name of its own and serves all readers until the value is written again. A result in another form than
the home of its variable gets a name of its own too, and is converted home behind the operator.

Bodies of loops and branches are part of the walk. They begin with what is at hand in front of the operator that runs them, without copies
of what they write; branches leave each result in one form; behind the operator no copy that a body made is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from . import flow
from .flow import listed
from .opdef import OpDef, opdef
from .operator import Operator
from .program import Block, Program
from .unique_name import unused
from .var import Var

Names = Sequence["str | None"]
Slots = Mapping[str, tuple[str, ...]]


class Held(NamedTuple):
    """The forms in which a value is at hand, and a mark of the form's own on the value."""

    forms: tuple[Any, ...]
    mark: Any = None


class FormChoice(NamedTuple):
    """What an operator does: the form in which it reads each operand (None: as it is), how each result is made, in one form, and other
    attributes than it has (None: those that it has)."""

    ins: Sequence[Any]
    outs: Sequence[Held]
    attrs: Mapping[str, Any] | None = None


class ValueForm(ABC):
    """What one kind of walk means by a form. Forms are compared by `==`."""

    by_name: ClassVar[bool] = False  # whether operands are converted in the order of their names, not in that of the slots

    @abstractmethod
    def stored(self, d: Var) -> Any:
        """The home of a variable that has one before the program runs; None: where the first operator that writes it leaves it."""

    @abstractmethod
    def given(self, d: Var) -> Any:
        """The form of a variable that is read before an operator of the walk has written it."""

    @abstractmethod
    def choose(self, walk: FormWalk, op: Operator, definition: type[OpDef], ins: Names, outs: Names) -> FormChoice | None:
        """What an operator does; None: it stays as it is, and what it reads and writes is at home."""

    @abstractmethod
    def convert(self, walk: FormWalk, name: str, source: str, target: str, want: Any, near: Operator) -> None:
        """Append operators to `walk.out` that make `target`, in the form `want`, of `source`; both are the value `name`."""

    @abstractmethod
    def declared(self, d: Var, form: Any) -> Var:
        """The declaration of a variable like `d` whose home is that form."""

    @abstractmethod
    def copy(self, d: Var, form: Any) -> Var:
        """The declaration of a copy of `d` in that form; the walk names it."""

    def ending(self, form: Any) -> str:
        """What the name of a copy in a form ends in."""
        return str(form)

    def numbered(self, k: int) -> str:
        """What follows in the name of a copy where others have the names with smaller numbers."""
        return str(k)

    def before(self, walk: FormWalk, op: Operator) -> None:  # noqa: B027
        """Called in front of each operator."""

    def enters(self, op: Operator) -> bool:
        """Whether the walk goes into the blocks that an operator runs. Else what they read and write is at home."""
        return True

    def keeps(self, op: Operator) -> bool:
        """Whether what is converted for an operator serves other readers too, and it reads what was converted for others."""
        return True

    def returns(self, name: str) -> bool:
        """Whether a result that is made in another form than its home is converted home."""
        return True

    def common(self, op: Operator, held: Sequence[Held]) -> Held:
        """How all branches leave a result that they have at hand so; it has no home yet."""
        return held[0]


class FormWalk:
    """Rewrites the operators of a program in place, by what a form says of each."""

    def __init__(self, program: Program, form: ValueForm):
        self.program, self.form = program, form
        self.block = program.blocks[0]
        self.out: list[Operator] = []
        self.taken = {n for block in program.blocks for n in block.descs}
        self.home: dict[str, Any] = {}
        self.at: dict[str, Held] = {}
        self.names: dict[str, tuple[str, ...]] = {}  # of what is at hand under other names than its own, one for each form

    def run(self) -> None:
        """Rewrite block 0 and the blocks that it runs."""
        self._block(self.block)

    def _block(self, block: Block) -> None:
        outer = self.block, self.out
        for d in block.descs.values():
            self.at.pop(d.name, None)
            self.home.pop(d.name, None)
            if (form := self.form.stored(d)) is not None:
                self.home[d.name] = form
        self.block, ops = block, block.oplist
        self.out = block.oplist = []
        for op in ops:
            self.form.before(self, op)
            definition = opdef(op.type)
            if definition.bodies:
                self._control(op, definition)
            else:
                self._operator(op, definition)
        self.block, self.out = outer

    # -- what is at hand -------------------------------------------------------------------------------------------------------

    def held(self, name: str) -> Held:
        """The forms in which a value is at hand."""
        found = self.at.get(name)
        if found is None:
            if name not in self.home:
                self.home[name] = self.form.given(self.block.desc(name))
            found = self.at[name] = Held((self.home[name],))
        return found

    def hold(self, name: str, held: Held, *names: str) -> None:
        """A value is at hand so, under these names; under its own without any."""
        self.at[name] = held
        if names:
            self.names[name] = names
        else:
            self.names.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """These have other values from here on, which are at home."""
        for n in names:
            self.at.pop(n, None)
            self.names.pop(n, None)

    def drop_copies(self, names: Iterable[str]) -> None:
        """What was converted of these, which are at home, serves no more readers."""
        for n in names:
            if n in self.names:
                self.hold(n, Held((self.home[n],), self.at[n].mark))

    def bring(self, name: str, form: Any, op: Operator) -> str:
        """The name under which a value is at hand in a form, behind a converter if it is not yet."""
        held, names, keeps = self.held(name), self.names.get(name) or (name,), self.form.keeps(op)
        if form in held.forms and (keeps or names[held.forms.index(form)] == name):
            return names[held.forms.index(form)]
        copy = name if form == self.home[name] else self.new(name, form)
        self.form.convert(self, name, names[0], copy, form, op)
        if keeps:
            self.hold(name, Held((*held.forms, form), held.mark), *names, copy)
        return copy

    def new(self, name: str, form: Any) -> str:
        """Declare a copy of a variable in a form."""
        return self.declare(f"{name}.{self.form.ending(form)}", self.form.copy(self.block.desc(name), form))

    def declare(self, base: str, d: Var) -> str:
        """Declare a variable like `d` under a name that nothing has: `base`, or that with an ending."""
        name = unused(base, self.taken, self.form.numbered)
        self.taken.add(name)
        self.block.descs[name] = d.changed(name=name)
        return name

    # -- one operator ----------------------------------------------------------------------------------------------------------

    def _operator(self, op: Operator, definition: type[OpDef]) -> None:
        ins: Names = definition.flat_slots(op.inputs, definition.in_slots) if definition.optional_ins else op.input_arg_names
        outs: Names = definition.flat_slots(op.outputs, definition.out_slots) if definition.optional_outs else op.output_arg_names
        choice = self.form.choose(self, op, definition, ins, outs)
        if choice is None:
            self.forget(op.output_arg_names)
            self.out.append(op)
            return
        changed: dict[int, str] = {}
        wanted = [(k, n, form) for k, (n, form) in enumerate(zip(ins, choice.ins, strict=True)) if n is not None and form is not None]
        for k, n, form in sorted(wanted, key=itemgetter(1)) if self.form.by_name else wanted:
            if (local := self.bring(n, form, op)) != n:
                changed[k] = local
        if changed:
            op = op.replace(inputs=with_names(op, definition, ins, changed))
        self._write(op if choice.attrs is None else op.replace(attrs=choice.attrs), outs, choice.outs)

    def _write(self, op: Operator, outs: Names, results: Sequence[Held]) -> None:
        """Append an operator, and behind it what brings its results home."""
        away: dict[str, Held] = {}
        for n, made in zip(outs, results, strict=True):
            if n is None:
                continue
            if n not in self.home:
                self._settle(n, made.forms[0])
            if self.home[n] == made.forms[0]:
                self.hold(n, made)
            else:
                away[n] = made
        if away:
            self._write_away(op, away)
        else:
            self.out.append(op)

    def _write_away(self, op: Operator, away: Mapping[str, Held]) -> None:
        """Append an operator whose results are made in other forms than at home. What comes home is finished there."""
        renamed = {n: self.new(n, made.forms[0]) for n, made in away.items()}
        pairs = [*zip(op.role_var[::2], op.role_var[1::2], strict=True)]
        left = tuple([n for pair in pairs if pair[1] not in away for n in pair])
        outputs = {s: tuple([renamed.get(n, n) for n in names]) for s, names in op.outputs.items()}
        self.out.append(op.replace(outputs=outputs, role_var=left))
        for n, made in away.items():
            self.hold(n, made, renamed[n])
            if self.form.returns(n):
                self.form.convert(self, n, renamed[n], n, self.home[n], op)
                if finished := tuple([m for pair in pairs if pair[1] == n for m in pair]):
                    self.out[-1] = self.out[-1].replace(role_var=finished)
                if self.form.keeps(op):
                    self.hold(n, Held((self.home[n], *made.forms), made.mark), n, renamed[n])
                else:
                    self.hold(n, Held((self.home[n],), made.mark))

    def _settle(self, name: str, form: Any) -> None:
        """This form is the home of a variable."""
        self.home[name] = form
        block: Block | None = self.block
        while block is not None and name not in block.descs:
            block = block.parent
        if block is not None:
            block.descs[name] = self.form.declared(block.descs[name], form)

    # -- operators that run blocks ---------------------------------------------------------------------------------------------

    def _control(self, op: Operator, definition: type[OpDef]) -> None:
        written = flow.writes(self.program, op)
        if not self.form.enters(op):
            self.forget(written)
            self.out.append(op)
            return
        bodies = [(self.program.blocks[op.attrs[which].idx], results) for which, results in definition.bodies.items()]
        for n in dict.fromkeys(n for block, _ in bodies for n in flow.sub_writes(self.program, block) if n in self.at):
            if self.home[n] not in self.at[n].forms:
                self.bring(n, self.home[n], op)
            self.forget([n])
        outer, ends = (self.at, self.names), []
        for block, _ in bodies:
            self.at, self.names = dict(outer[0]), dict(outer[1])
            self._block(block)
            ends.append((block, (self.at, self.names)))
        self.at, self.names = outer
        attrs, results = dict(op.attrs), []
        handing = [(which, *end) for (_, which), end in zip(bodies, ends, strict=True) if which]
        for k, out in enumerate(op.output_arg_names if handing else ()):
            attrs, made = self._left_alike(op, attrs, k, out, handing)
            results.append(made)
        self.at, self.names = outer
        self.forget(written)
        moved = listed(self.program, op if attrs == op.attrs else op.replace(attrs=attrs))
        self._write(moved, op.output_arg_names if handing else (), results)

    def _left_alike(
        self, op: Operator, attrs: dict[str, Any], k: int, out: str, handing: Sequence[tuple[str, Block, Any]]
    ) -> tuple[dict[str, Any], Held]:
        """Attributes by which all branches leave result number k in one form, and that form."""
        helds = []
        for which, block, state in handing:
            outer = self._into(block, state)
            helds.append(self.held(attrs[which][k]))
            self.block, self.out = outer
        made = Held((self.home[out],)) if out in self.home else self.form.common(op, helds)
        for which, block, state in handing:
            outer = self._into(block, state)
            local = self.bring(attrs[which][k], made.forms[0], op)
            attrs[which] = (*attrs[which][:k], local, *attrs[which][k + 1 :])
            self.block, self.out = outer
        return attrs, made

    def _into(self, block: Block, state: Any) -> tuple[Block, list[Operator]]:
        """Go on at the end of a block; where the walk was is returned."""
        outer = self.block, self.out
        self.block, self.out = block, block.oplist
        self.at, self.names = state
        return outer


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


__all__ = ["FormChoice", "FormWalk", "Held", "Names", "Slots", "ValueForm", "with_names"]
