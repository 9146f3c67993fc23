"""FormWalk: a walk over a program that inserts a conversion where an operator reads a value in another form than the value has.

The walk records the available forms of each value with their names, and the *home form* of each variable: the form of the value under the
variable's own name. A copy in another form has its own name, and all readers use it until the value is written again. A result in another
form than the home form gets a new name, and is converted to the home form after the operator. Subclasses define the forms (ir/forms.py).

The walk includes bodies of loops and branches. A body begins with the forms that are available before the operator that runs it, without
copies of values that it writes. All branches return a result in the same form. After the operator, copies made in a body are not available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from . import flow
from .flow import listed
from .forms import FormChoice, Forms, Held, Names, Results, Slots, State, with_names
from .opdef import OPS, OpDef, opdef
from .operator import Operator, attrs_key
from .program import Block, Program
from .unique_name import unused
from .var import Var


class FormWalk(Forms):
    """Rewrites the operators of one program, in place."""

    _before: ClassVar[Callable[..., None] | None] = None  # called before every operator: _before(op, the names that it reads)

    def __init__(self, program: Program):
        self.program = program
        self.block = program.blocks[0]
        self.out: list[Operator] = []
        self.taken = {n for block in program.blocks for n in block.descs}
        self.home: dict[str, Any] = {}
        self.at: dict[Any, Held] = {}
        self.choices: dict[tuple, FormChoice | None] = {}
        self.numbers: dict[Any, int] = {}  # numbers of types and attributes, as small keys
        self.by_id: dict[int, int] = {}  # id of an attribute mapping or a type -> its number
        self.type_of: dict[str | None, int] = {None: -1}  # the numbers of the types of variables
        self.names: dict[Any, tuple[str, ...]] = {}  # for values with copies: the names, one for each available form

    # -- available forms -------------------------------------------------------------------------------------------------------

    def held(self, name: str) -> Held:
        """The available forms of a value."""
        found = self.at.get(name)
        if found is None:
            if name not in self.home:
                self.home[name] = self.given(self.block.desc(name))
            found = self.at[name] = Held((self.home[name],))
        return found

    def hold(self, name: str, held: Held, *names: str) -> None:
        """Record the available forms of a value, and their names; without names, the value's own name."""
        self.at[name] = held
        if names:
            self.names[name] = names
        else:
            self.names.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """Record that these names were written: only their home forms are available."""
        for n in names:
            self.at.pop(n, None)
            self.names.pop(n, None)

    def drop_copies(self, names: Iterable[str]) -> None:
        """Drop the copies of these values; only their home forms are available."""
        for n in names:
            if n in self.names:
                self.hold(n, Held((self.home[n],), self.at[n].mark))

    def local(self, name: str, k: int) -> str:
        """The name of a value in its available form number `k`."""
        names = self.names.get(name)
        return names[k] if names else name

    def also(self, name: str, held: Held, form: Any) -> Held:
        """`held` with one more form."""
        return Held((*held.forms, form), held.mark)

    def bring(self, name: str, form: Any, op: Operator, why: str = "") -> str:
        """The name of a value in a form; inserts a conversion if the form is not available."""
        held, names, keeps = self.held(name), self.names.get(name) or (name,), self.keeps(op)
        if form in held.forms and (keeps or names[held.forms.index(form)] == name):
            return names[held.forms.index(form)]
        copy = name if form == self.home[name] else self.new(name, form, self.ending(form))
        self.convert(name, names[0], copy, form, op)
        if keeps:
            self.hold(name, self.also(name, held, form), *names, copy)
        return copy

    def new(self, name: str, form: Any, ending: str) -> str:
        """Declare a copy of a variable in a form."""
        return self.declare(f"{name}.{ending}", self.copy(self.block.desc(name), form))

    def declare(self, base: str, d: Var) -> str:
        """Declare a variable like `d` under an unused name: `base`, or `base` with an ending."""
        name = unused(base, self.taken, self.numbered)
        self.taken.add(name)
        self.block.descs[name] = d.changed(name=name)
        return name

    # -- operators ---------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Rewrite block 0 and the blocks that it runs."""
        self._block(self.block)

    def _block(self, block: Block) -> None:
        outer, self.block = (self.block, self.out), block
        self._begin_block(block)
        ops, block.oplist = block.oplist, []
        self.out = block.oplist
        self._operators(ops)
        self._end_block(block)
        self.block, self.out = outer

    def _begin_block(self, block: Block) -> None:
        for d in block.descs.values():
            self.at.pop(d.name, None)
            self.home.pop(d.name, None)
            if (form := self.stored(d)) is not None:
                self.home[d.name] = form

    def _end_block(self, block: Block) -> None:
        for d in list(block.descs.values()):
            if (form := self.home.get(d.name)) is not None:
                block.descs[d.name] = self.declared(d, form)

    def _number(self, thing: Any, key: Any) -> int:
        """The number of an object that lives as long as the program; objects with equal keys have one number."""
        n = self.by_id[id(thing)] = self.numbers.setdefault(key, len(self.numbers))
        return n

    def _operators(self, ops: Sequence[Operator]) -> None:
        choices, numbers, type_of, before, keeps = self.choices, self.by_id, self.type_of, self._before, self.keeps_choices
        for op in ops:
            type_, inputs, outputs, attrs, _, role_var, _, device, reads, writes = op
            definition = OPS.get(type_) or opdef(type_)
            if before is not None:
                before(op, reads)
            if definition.control.bodies:
                self._control(op, definition)
                continue
            ins: Names = definition.flat_slots(inputs, definition.in_slots) if definition.optional_ins else reads
            outs: Names = definition.flat_slots(outputs, definition.out_slots) if definition.optional_outs else writes
            if keeps:
                said = numbers.get(id(attrs)) if attrs else -1
                if said is None:
                    said = self._number(attrs, attrs_key(attrs))
                key = (type_, device, said, *map(self.at.get, ins), None, *map(type_of.get, outs))
                choice = choices.get(key)
                if choice is None:
                    choice = choices[key] = self.choose(op, definition, ins, outs)
            else:
                choice = self.choose(op, definition, ins, outs)
            if choice is None:
                self.forget(writes)
                self.out.append(op)
                continue
            if choice.asks:
                found = self.special(op, definition, ins, outs, choice)
                if isinstance(found, list):
                    self._operators(found)
                    continue
                choice = found
            still = choice.still and self.names.keys().isdisjoint(ins)
            self._write(op, None if still else self._brought(op, definition, ins, choice), outs, choice.outs, choice.attrs)
            if role_var:
                self._finish(role_var, op)

    def _brought(self, op: Operator, definition: type[OpDef], ins: Names, choice: FormChoice) -> Slots | None:
        """Convert the operands of an operator; returns its new inputs, or None if they are unchanged."""
        changed: dict[int, str] = {}
        operands: Iterable[Any] = enumerate(zip(ins, choice.take, choice.ins, strict=True))
        for k, (n, at_hand, form) in sorted(operands, key=_name) if self.by_name else operands:
            if at_hand is None or n is None:
                continue
            local = self.bring(n, form, op, choice.why) if at_hand < 0 or not self.at[n].forms else self.local(n, at_hand)
            if local != n:
                changed[k] = local
        return with_names(op, definition, ins, changed) if changed else None

    def _write(self, op: Operator, inputs: Slots | None, outs: Names, results: Results, attrs: Any = None) -> None:
        """Append the operator, with `inputs` and `attrs` if given, and then the conversions of its results to their home forms."""
        at, home = self.at, self.home
        away: dict[str, Held] = {}
        for n, (made, form) in zip(outs, results, strict=True):
            if n is None:
                continue
            rests = home.setdefault(n, form)
            if rests is form or rests == form:
                at[n] = made
                if n in self.names:
                    del self.names[n]
            else:
                away[n] = made
        if away:
            self._write_away(op if attrs is None else op.replace(attrs=attrs), inputs or op.inputs, away)
        else:
            self.out.append(op if inputs is attrs is None else op.replace(inputs=inputs, attrs=attrs))

    def _write_away(self, op: Operator, inputs: Slots, away: Mapping[str, Held]) -> None:
        """Append an operator with results that are not in their home forms: they get new names and are converted. For a final gradient, the
        conversion is then the operator that finishes it."""
        renamed = {n: self._new_result(n, made.forms[0]) for n, made in away.items()}
        pairs = [*zip(op.role_var[::2], op.role_var[1::2], strict=True)] if op.role_var else ()
        left = tuple([n for pair in pairs if pair[1] not in away for n in pair])
        outputs = {s: tuple([renamed.get(n, n) for n in names]) for s, names in op.outputs.items()}
        self.out.append(op.replace(inputs=inputs, outputs=outputs, role_var=left))
        for n, made in away.items():
            self.hold(n, made, renamed[n])
            if self.returns(n, op):
                self._go_home(n, renamed[n], made, op)
                if pairs and (finished := tuple([m for pair in pairs if pair[1] == n for m in pair])):
                    self.out[-1] = self.out[-1].replace(role_var=finished)

    def _new_result(self, name: str, form: Any) -> str:
        return self.new(name, form, self.ending(form))

    def _go_home(self, name: str, new: str, made: Held, op: Operator) -> None:
        """Convert the new value of a variable, which has its own name, to the variable's home form."""
        home = self.home[name]
        self.convert(name, new, name, home, op)
        if self.keeps(op):
            self.hold(name, self.also(name, made, home), new, name)
        else:
            self.hold(name, Held((home,), made.mark))

    def _finish(self, finished: tuple[str, ...], op: Operator) -> None:
        """Called after an operator that finishes final gradients: [param, grad, ...]."""

    # -- operators that run blocks ---------------------------------------------------------------------------------------------

    def _control(self, op: Operator, definition: type[OpDef]) -> None:
        """Walk the blocks that an operator runs, and let all branches return their results in the same forms."""
        if not self.enters(op):
            self.forget(flow.writes(self.program, op))
            self.out.append(op)
            return
        bodies = [(self.program.blocks[op.attrs[which].idx], results) for which, results in definition.control.bodies.items()]
        blocks = [block for block, _ in bodies]
        changed = self._ahead(op, definition, blocks)
        carried = self._carry(op, definition, blocks)
        outer = self.at, self.names
        ends: list[State] = []
        for block in blocks:
            self._enter(outer)
            self._block(block)
            ends.append((self.at, self.names))
        self._settle(op, outer, ends, carried)
        attrs, results = dict(op.attrs), []
        handing = [(which, block, end) for (block, which), end in zip(bodies, ends, strict=True) if which]
        for k, out in enumerate(op.output_arg_names if handing else ()):
            made = self._left_alike(op, attrs, k, out, handing)
            results.append((made, made.forms[0]))
        self._enter(outer)
        moved = op.renamed(changed) if changed else op
        if any(attrs[a] != v for a, v in op.attrs.items()):
            moved = moved.replace(attrs=attrs)
        moved = listed(self.program, moved)
        self._replaced(op, moved)
        self._write(moved, None, op.output_arg_names if handing else (), results)

    def _ahead(self, op: Operator, definition: type[OpDef], blocks: Sequence[Block]) -> Mapping[str, str]:
        """Convert the operands that an operator needs before its blocks run; returns new names for its inputs."""
        return {}

    def _carry(self, op: Operator, definition: type[OpDef], blocks: Sequence[Block]) -> Any:
        """Before blocks run, convert the values that they write to their home forms. The result is passed to `_settle`."""
        for n in dict.fromkeys(n for block in blocks for n in flow.sub_writes(self.program, block)):
            if n in self.at and self.home[n] not in self.at[n].forms:
                self.bring(n, self.home[n], op)
            self.forget([n])

    def _enter(self, state: State) -> None:
        """Continue with these available forms."""
        self.at, self.names = dict(state[0]), dict(state[1])

    def _settle(self, op: Operator, outer: State, ends: Sequence[State], carried: Any) -> None:
        """Called after the blocks were walked; `ends` are the available forms at the end of each."""

    def _left_alike(self, op: Operator, attrs: dict[str, Any], k: int, out: str, handing: Sequence[tuple[str, Block, State]]) -> Held:
        """The form in which all branches return result number k; conversions are added to the branches, and `attrs` get the names."""
        here = self.block, self.out
        found = []
        for which, block, (self.at, self.names) in handing:
            self.block, self.out = block, block.oplist
            found.append((attrs[which][k], self.held(attrs[which][k])))
        made = self.common(op, out, found)
        for which, block, (self.at, self.names) in handing:
            self.block, self.out = block, block.oplist
            local = self.bring(attrs[which][k], made.forms[0], op, f"{op.type}: its branches leave %{out} alike")
            attrs[which] = (*attrs[which][:k], local, *attrs[which][k + 1 :])
        self.block, self.out = here
        return made

    def _replaced(self, op: Operator, moved: Operator) -> None:
        """Called when an operator that runs blocks is replaced by `moved`."""


def _name(operand: Any) -> str:
    """Of (number, (name, ...))."""
    return operand[1][0] or ""
