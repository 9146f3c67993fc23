"""Read program text back into programs: a recursive-descent parser over tokens that come line by line, linear in the text.

Types, placements and attributes are read in value_parser.py. The text may come from anywhere. Text that is not a program ends in a
ParseError that shows the line, the place in it, what was expected and what was found; nesting and numbers are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import ParseError, ProgramError
from .fluid_text import read_attrs, type_of, why_not
from .opdef import OPS, Slot, instead_of
from .operator import Operator, Role
from .program import READERS, Block, Program, ProgramPair
from .sub_blocks import check_body
from .text import IMPLIED, quote, startup_name, var_name
from .time_axes import MAX_TURNS
from .value_parser import MAX_INDEX, MAX_INT, ValueParser
from .var import PARAM_DEFAULTS, Var, check_attrs

_Slots = dict[str, tuple[str, ...]]
_ROLES = {r.value: r for r in Role}


def parse_program(text: str, constants: Mapping[str, Any] | None = None) -> Program:
    """The program that a text describes, `constants` being the arrays that it names by digest. Raises ParseError, pointing at the line, for
    anything else.

    >>> parse_program("program p { data %x: f32[-1,2]; var %y: i64[3] persistable }")
    <Program p: 0 ops, 0 params>
    """
    parser = _Parser(text, constants)
    main, startup = parser.program()
    if startup is not None:
        raise ParseError(f"program {main.name} has a startup section, so it describes two programs; read it with parse_pair")
    return main


READERS["text"] = parse_program


def parse_pair(text: str, constants: Mapping[str, Any] | None = None) -> ProgramPair:
    """Main and startup as `show_program(main, startup=startup)` wrote them; without a startup section, startup is empty."""
    main, startup = _Parser(text, constants).program()
    if startup is None:
        startup = _like(main)
    return ProgramPair(main, startup)


def parse_any(text: str, constants: Mapping[str, Any] | None = None) -> Program | ProgramPair:
    """The pair, where the text has a startup section, or else the program."""
    main, startup = _Parser(text, constants).program()
    return main if startup is None else ProgramPair(main, startup)


def _like(main: Program) -> Program:
    startup = Program(startup_name(main.name))
    startup.rank, startup.strategy, startup.origin = main.rank, main.strategy, main.origin
    startup.random_seed, startup.groups = main.random_seed, dict(main.groups)
    return startup


class _Parser(ValueParser):
    def __init__(self, text: str, constants: Mapping[str, Any] | None):
        super().__init__(text, constants)
        self.runs: list[tuple[int, int, Block, Operator]] = []  # (row, column, block, operator) of those that run sub-blocks

    # -- the program --------------------------------------------------------------------------------------------------------------------

    def program(self) -> tuple[Program, Program | None]:
        self._skip_lines()
        if not self._at_word("program"):
            first = self.texts[self.k]
            if first in ("{", "[") and self.kinds[self.k] == first:
                self._fail("program NAME {", found=f"{quote(first)}; JSON is read with from_json")
            self._fail("program NAME {")
        self.k += 1
        main = Program(self._word("the name of the program"))
        opened = self.row + 1
        self._take("{", "'{' after the name of the program")
        self._body(main, opened)
        self._skip_lines()
        if self.kinds[self.k] != "end":
            self._fail("the end of the text after the closing '}'")
        for row, col, program, idx in self.blocks:
            if not 0 <= idx < len(program.blocks):
                self._wrong_at(row, col, f"there is no block {idx}; {program.label()} has {len(program.blocks)} blocks")
        run: dict[Program, dict[int, Operator]] = {p: {} for p in (main, self.startup) if p is not None}
        for row, col, block, op in self.runs:
            for idx in op.sub_blocks():
                try:
                    check_body(op, block, idx, run[block.program])
                except ProgramError as e:
                    self._wrong_at(row, col, str(e))
                run[block.program][idx] = op
        return main, self.startup

    def _body(self, main: Program, opened: int) -> None:
        self.startup: Program | None = None
        self.declared = main.blocks[0].descs
        self.shared: dict[str, Var] = {}  # what startup may take over from main's declarations
        self.without: set[str] = set()
        self.settings: set[str] = set()  # those written in the startup section
        program, role, in_startup, begun = main, Role.FORWARD, False, False
        while True:
            self._skip_lines()
            kind = self.kinds[self.k]
            if kind == "}":
                self.k += 1
                return
            if kind == "end":
                self._fail(f"'}}' to close program {main.name}, opened on line {opened}")
            if kind == "word":
                after = self.kinds[self.k + 1]
                text = self.texts[self.k]
                if after == ":" or (text == "startup" and after == "word"):
                    block_ahead = self.texts[self.k + 1] == "block"
                    if text == "startup":
                        if begun:
                            self._wrong("startup comes before the other sections")
                        if self.startup is None:
                            self.startup = _like(main)
                            self.shared = dict(main.blocks[0].descs)
                        in_startup, program = True, self.startup
                        self.k += 1
                        if block_ahead:
                            self._sub_block(program)
                            continue
                        role = Role.FORWARD if self.kinds[self.k] == ":" else self._role()
                    else:
                        in_startup, begun, program, role = False, True, main, self._role()
                    self._take(":")
                    continue
                if text == "block" and after == "number":
                    in_startup, begun, program = False, True, main
                    self._sub_block(main)
                    continue
                if after != "(" and after != "=" and self._statement(program, in_startup):
                    continue
            self._operator(program, program.blocks[0], role, in_startup)

    def _role(self) -> Role:
        text = self._take("word", "a section")
        if text not in _ROLES:
            self._fail(f"a section: startup, {', '.join(_ROLES)}", self.k - 1)
        return _ROLES[text]

    def _statement(self, program: Program, in_startup: bool) -> bool:
        """A setting or a declaration; False when the line is none of them."""
        text = self.texts[self.k]
        if text in IMPLIED:
            self._declaration(program.blocks[0], "startup" if in_startup else "program")
            return True
        if text == "group":
            self._group(program, in_startup)
        elif text == "turns":
            self._turns(program)
        elif text == "rank":
            self.k += 1
            program.rank = None if self._took_word("none") else self._int("a rank", 0, MAX_INDEX)
        elif text == "seed":
            self.k += 1
            program.random_seed = self._int("a seed", 1 - MAX_INT, MAX_INT - 1)
        elif text == "strategy":
            self.k += 1
            program.strategy = self._string()
        elif text == "origin":
            self.k += 1
            program.origin = self._string()
        elif text == "name" and in_startup:
            self.k += 1
            program.name = self._word("the name of the startup program")
        elif text == "without" and in_startup:
            self.k += 1
            self.without.add(self._name())
            while self._took(","):
                self.without.add(self._name())
        else:
            return False
        self._line_end(text)
        return True

    def _group(self, program: Program, in_startup: bool) -> None:
        self.k += 1
        if in_startup and "group" not in self.settings:  # startup's own groups replace those taken over from main
            self.settings.add("group")
            program.groups = {}
        at = self.k
        if in_startup and self._at_word("none") and self.kinds[self.k + 1] != "=":
            self.k += 1
            return
        name = self._word("the name of a group")
        if name in program.groups:
            self._wrong(f"group {name} is declared twice", at)
        self._take("=", "'=' after the name of the group")
        sets = []
        while self._took("["):
            ranks: list[int] = []
            while not self._took("]"):
                if ranks:
                    self._take(",", "',' or ']' after a rank")
                ranks.append(self._int("a rank", 0, MAX_INDEX))
            sets.append(tuple(ranks))
        program.groups[name] = tuple(sets)

    def _turns(self, program: Program) -> None:
        self.k += 1
        at, axis = self.k, self._word("the name of an axis of time")
        if axis in program.turns or axis in program.groups:
            self._wrong(f"{axis} is declared twice", at)
        self._take("=", "'=' after the name of the axis")
        program.turns[axis] = self._int("how many turns there are", 1, MAX_TURNS)

    def _sub_block(self, program: Program) -> None:
        at, opened = self.k, self.row + 1
        self._take("word")
        idx = self._int("the index of the block", 0, MAX_INDEX)
        if idx != len(program.blocks):
            self._wrong(f"blocks come in order: expected block {len(program.blocks)}, found block {idx}", at)
        if not self._took_word("in"):
            self._fail("'in' and the index of the enclosing block")
        block = Block(program, idx, self._int("the index of an earlier block", 0, idx - 1))
        program.blocks.append(block)
        self._take("{", "'{' after the index of the enclosing block")
        role = Role.FORWARD
        while True:
            self._skip_lines()
            kind = self.kinds[self.k]
            if kind == "}":
                self.k += 1
                self._line_end("'}'")
                return
            if kind == "end":
                self._fail(f"'}}' to close block {idx}, opened on line {opened}")
            if kind == "word":
                after = self.kinds[self.k + 1]
                if after == ":":
                    role = self._role()
                    self.k += 1
                    continue
                if after == "name" and self.texts[self.k] in IMPLIED:
                    self._declaration(block, f"block {idx}")
                    continue
            self._operator(program, block, role, False)

    # -- variables ----------------------------------------------------------------------------------------------------------------------

    def _declaration(self, block: Block, where: str) -> None:
        kind = self.texts[self.k]
        self.k += 1
        at = self.k
        name = self._name()
        self._take(":", f"':' and a type after {var_name(name)}")
        desc = self._record(name, IMPLIED[kind])
        attrs: dict[str, Any] = {}
        only = False
        if self._took("{"):
            only = self._at_word("only") and self.kinds[self.k + 1] != "="
            self.k += only
            attrs = self._attrs(block.program)
        try:
            check_attrs(name, attrs)
        except ProgramError as e:
            self._wrong(str(e), at)
        if kind == "param" and not only:
            attrs = {**PARAM_DEFAULTS, **attrs}
        desc = desc.changed(attrs=attrs)
        self._declare(block, desc, at)
        self._line_end(f"the declaration of {var_name(name)}")

    def _declare(self, block: Block, desc: Var, at: int) -> None:
        old = block.descs.get(desc.name)
        if old is not None and (old != desc or not old.type.says(desc.type)):
            self._wrong(f"{var_name(desc.name)} is declared twice, before as {old.type}; leave the type out where it is written again", at)
        block.descs[desc.name] = desc

    # -- operators ----------------------------------------------------------------------------------------------------------------------

    def _operator(self, program: Program, block: Block, role: Role, in_startup: bool) -> None:
        outs: list[Any] | _Slots = []
        kind = self.kinds[self.k]
        if not (kind in ("word", "string") and self.kinds[self.k + 1] == "("):
            if kind not in ("name", "[", "word", "string"):
                self._fail("an operator, a declaration, a section or '}'")
            if kind == "word" and self.texts[self.k] != "_" and self.kinds[self.k + 1] != "=":
                self._fail("an operator, a declaration, a section or '}'")
            outs = self._slots(lambda: self._output(block))
            self._take("=", "'=' after the outputs")
        at = self.k
        named_by_fluid = self.kinds[at] == "word" and not isinstance(outs, dict)
        op_type = name = self._word("the type of an operator")
        self._take("(", f"'(' after {op_type}")
        ins: list[Any] | _Slots = [] if self.kinds[self.k] == ")" else self._slots(self._name)
        self._take(")", f"',' or ')' after an input of {op_type}")
        full = type_of(name) if named_by_fluid and not isinstance(ins, dict) else name
        op_type = full.partition(".")[0] if full != name else name
        definition = OPS.get(op_type)
        try:
            inputs = _fill(op_type, ins, definition.in_slots if definition else None, "input")
            outputs = _fill(op_type, outs, definition.out_slots if definition else None, "output")
        except ProgramError as e:
            self._wrong(str(e), at)
        attrs: dict[str, Any] = {}
        only, named = False, len(self.blocks)
        if self._took("{"):
            only = self._at_word("only") and self.kinds[self.k + 1] != "="
            self.k += only
            attrs = self._attrs(program)
        if definition is not None:
            try:
                attrs = read_attrs(full, name, attrs, program)
                attrs = attrs if only else definition.complete_attrs(attrs)
            except ProgramError as e:
                self._wrong(str(e), at)
        role_var: tuple[str, ...] = ()
        if self._took_word("for"):
            names = [self._name()]
            while self._took(","):
                names.append(self._name())
            role_var = tuple(names)
        device = self._device() if self._took_word("device") else ""
        self._line_end(f"operator {op_type}")
        op = Operator(op_type, inputs, outputs, attrs, role, role_var, None, device)
        block.oplist.append(op)
        if named < len(self.blocks):
            self.runs.append((self.row, self.cols[at], block, op))
        if in_startup and self.shared:
            for n in (*op.input_arg_names, *op.output_arg_names):
                if n in self.shared and n not in block.descs and n not in self.without:
                    block.descs[n] = self.shared[n]

    def _output(self, block: Block) -> str:
        at = self.k
        name = self._name()
        if self._took(":"):
            self._declare(block, self._record(name, None), at)
        return name

    def _slots(self, one: Callable[[], str]) -> list[Any] | _Slots:
        """Slots by position: a name, a list, or None for `_`; or by name: a dict of tuples."""
        if self.kinds[self.k] in ("word", "string") and self.kinds[self.k + 1] == "=":
            slots: dict[str, tuple[str, ...]] = {}
            while True:
                at = self.k
                slot = self._word("the name of a slot")
                if slot in slots:
                    self._wrong(f"slot {slot} is given twice", at)
                self._take("=", f"'=' after slot {slot}")
                slots[slot] = tuple(self._list_of(one))
                # a comma must follow when there is one more slot; `Out=[...] = op` ends the outputs
                if not self._took(","):
                    return slots
        values: list[Any] = []
        while True:
            if self.kinds[self.k] == "[":
                values.append(self._list_of(one))
            elif self._took_word("_"):
                values.append(None)
            else:
                values.append(one())
            if not self._took(","):
                return values

    def _list_of(self, one: Callable[[], str]) -> list[str]:
        self._take("[")
        names: list[str] = []
        while not self._took("]"):
            if names:
                self._take(",", "',' or ']'")
            names.append(one())
        return names

    def _device(self) -> str:
        if self.kinds[self.k] == "string":
            return self._string()
        device = self._take("word", "a device such as gpu:1")
        if self._took(":"):
            index = self._take("number", "an index after ':'")
            if not index.isdigit() or len(index) > 9:
                self._fail("an index after ':'", self.k - 1)
            device += f":{index}"
        return device

def _fill(op_type: str, given: list[Any] | _Slots, slots: tuple[Slot, ...] | None, kind: str) -> _Slots:
    """Slot names to tuples of variable names, from values by position or by name."""
    if isinstance(given, dict):
        return given
    if slots is None:
        if not given:
            return {}
        raise ProgramError(f"there is no op {op_type!r}; {why_not(op_type) or instead_of(op_type)} (a foreign op names its slots: X=[%x])")
    if len(given) > len(slots):
        listed = f" ({', '.join(s.name for s in slots)})" if slots else ""
        raise ProgramError(f"op {op_type} has {len(slots)} {kind}s{listed}, {len(given)} are given")
    out = {}
    for slot, value in zip(slots, given):
        if isinstance(value, list):
            if not slot.many:
                raise ProgramError(f"op {op_type} takes one variable as {kind} {slot.name!r}, a list was given")
            if value:
                out[slot.name] = tuple(value)
        elif value is not None:
            out[slot.name] = (value,)
    return out
