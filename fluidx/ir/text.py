"""The text form of programs: one operator a line, sections for roles, a type where a name is defined. `parser.py` reads it back.

Grammar in short (`;` may stand for a line end, `#` starts a comment):

    program NAME { settings, declarations, sections, blocks }
    types          f32[batch,10] | f32[*] of any rank | str[4] | seq<f32[4]> | opt<f32[4]> | map<i64,f32[]>
    settings       rank 2 | strategy "..." | seed 7 | group dp = [0, 1] [2, 3] | turns mb = 4
    declarations   (data | param | var) %name: f32[batch,10] placement... flags... {attributes}     an open axis is a name, or -1
    sections       forward: | loss: | backward: | lr_sched: | optimize: | dist:      and before them  startup: | startup dist: | ...
    operator       %out: type placement flags, _, [%a, %b] = type(%x, _, [%y, %z]) {name=value} for %w, %w@GRAD device gpu:1
    blocks         block 1 in 0 { declarations, sections }

Attributes are sorted; one that equals the default of the op (or of parameters) is left out, except `group`, `op` and `root`, and
`{only a=1}` says that no default is to be filled in. A large array is named by digest and kept beside the text (`Program.constants`):
`array("sha256:...", f32[64,3,7,7])`. An operator whose slots are not those of a declared op names them:
`Out=[%y: f32[3]] = foreign(X=[%x])`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from .attributes import BlockRef, fits
from .constants import Array
from .errors import ProgramError
from .fluid_text import FluidNames, type_of
from .offsets import Offsets
from .opdef import OPS, OpDef, Required, Slot
from .roles import Role
from .types import WORD, Entry, Placement
from .valuetypes import ValueType
from .var import PARAM_DEFAULTS, Var

if TYPE_CHECKING:
    from .operator import Operator
    from .program import Block, Program

ALWAYS_SHOWN = frozenset({"group", "op", "root"})
NAME = r"[A-Za-z0-9_.@/\-:]*[A-Za-z0-9_.@/\-]"
_word_re = re.compile(WORD)
_name_re = re.compile(NAME)
_device_re = re.compile(WORD + r"(?::[0-9]{1,9})?")
_MISSING = object()

# The flags that a kind of declaration implies; only differences are written, as `flag` or `not flag`.
FLAGS = ("persistable", "stop_gradient", "is_data", "is_parameter", "on_host")
IMPLIED: Mapping[str, frozenset[str]] = {
    "data": frozenset({"is_data", "stop_gradient"}),
    "param": frozenset({"is_parameter", "persistable"}),
    "var": frozenset(),
}


def show_program(program: Program, startup: Program | None = None, fluid_names: bool | str = False) -> str:
    """The program as text; `parse_program` reads it back to an equal program.

    With `startup` the pair prints as one program whose `startup:` section comes first; `parse_pair` reads it back. There a variable
    that startup shares with main's declarations is declared once, and startup's settings are main's unless written.
    `fluid_names` writes collectives under fluid's historic names: True or "nccl" as in the NCCL design (`ncclAllReduce`), "c" as in fluid
    1.5 and later (`c_allreduce_sum`, with `ring_id` and `nranks`). A comment lists the operators that have no such name.
    """
    fluid = FluidNames.of(fluid_names, program)
    lines = [f"program {word(program.name)} {{", *settings(program)]
    if fluid and (missing := fluid.missing(op for p in (program, startup) if p for b in p.blocks for op in b.oplist)):
        lines.append(f"  # without a name in fluid: {', '.join(missing)}")
    declared, inline = declarations(program.blocks[0])
    lines += [f"  {show_var(d)}" for d in declared.values()]
    if startup is not None:
        lines += _startup_lines(program, declared, startup, FluidNames.of(fluid_names, startup))
    _section_lines(lines, program.blocks[0].oplist, inline, "", "  ", fluid)
    for block in program.blocks[1:]:
        _block_lines(lines, block, "", fluid)
    lines.append("}")
    return "\n".join(lines) + "\n"


def show_block(block: Block) -> str:
    """A block's declarations and operators as text, without the program around them.

    >>> from fluidx.ir import Program
    >>> x = Program("p").global_block().create_var("x", [2], "float32")
    >>> print(show_block(x.block))
    var %x: f32[2]
    """
    declared, inline = declarations(block)
    lines = [show_var(d) for d in declared.values()]
    _section_lines(lines, block.oplist, inline, "", "", None)
    return "\n".join(lines)


def show_op(op: Operator, types: Mapping[str, Var | ValueType] | None = None, fluid_names: bool | str = False) -> str:
    """The operator as one line. Outputs found in `types` are written with their type, as where a name is defined.

    >>> from fluidx.ir import Operator, TensorType
    >>> show_op(Operator("foreign", {"X": ("x",)}, {"Out": ("y",)}, {"scale": 0.5}), {"y": TensorType("float32", (-1, 3))})
    'Out=[%y: f32[-1,3]] = foreign(X=[%x]) {scale=0.5}'
    """
    known, pending = types or {}, {}
    for n in op.output_arg_names:
        if (record := known.get(n)) is not None:
            pending[n] = record if isinstance(record, Var) else Var(n, record, stop_gradient=not record.is_float)
    return op_text(op, pending, FluidNames.of(fluid_names))


def show_var(desc: Var) -> str:
    """The declaration of a variable as one line.

    >>> from fluidx.ir import TensorType
    >>> attrs = {**PARAM_DEFAULTS, "learning_rate": 0.5}
    >>> show_var(Var("w", TensorType("float32", (784, 10)), persistable=True, is_parameter=True, attrs=attrs))
    'param %w: f32[784,10] {learning_rate=0.5}'
    """
    kind = "param" if desc.is_parameter else "data" if desc.is_data else "var"
    shown, only = desc.attrs, ""
    if desc.is_parameter:
        if desc.attrs.keys() >= PARAM_DEFAULTS.keys():
            shown = {k: v for k, v in desc.attrs.items() if k not in PARAM_DEFAULTS or not _same(v, PARAM_DEFAULTS[k])}
        else:
            only = "only " if desc.attrs else "only"
    attrs = f" {{{only}{_attr_list(sorted(shown.items()))}}}" if shown or only else ""
    return f"{kind} {var_name(desc.name)}: {_record(desc, IMPLIED[kind])}{attrs}"


def excerpt(program: Program, index: int, before: int = 3, after: int = 2, block: int = 0) -> str:
    """The numbered lines around operator `index` of a block, `>` marking it, under a line that names program and section."""
    b = program.blocks[block]
    ops = b.oplist
    if not 0 <= index < len(ops):
        raise ProgramError(f"{program.label()}, block {block} has no operator {index}; it has {len(ops)}")
    start, stop = max(0, index - before), min(len(ops), index + after + 1)
    _, inline = declarations(b)
    for op in ops[:start]:
        for n in op.output_arg_names:
            inline.pop(n, None)
    where = f", block {block}" if block else ""
    lines = [f"  in {program.label()}{where}, section {ops[index].role.value}:"]
    width = max(2, len(str(stop - 1)))
    for k in range(start, stop):
        text = op_text(ops[k], inline)
        if len(text) > 160:
            text = text[:157] + "..."
        lines.append(f"    {'>' if k == index else ' '}  {k:>{width}}  {text}")
    return "\n".join(lines)


# -- words, names and values ---------------------------------------------------------------------------------------------------


def quote(text: str) -> str:
    """A quoted and escaped string; characters that a terminal cannot show are escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def word(text: str) -> str:
    """A name outside of variables (of a program, group, op, slot or attribute), quoted when it holds odd characters."""
    return text if _word_re.fullmatch(text) and text != "_" else quote(text)


def var_name(name: str) -> str:
    """A variable as text writes it: `%fc_0.w_0@GRAD`, `%"an odd name"`."""
    return f"%{name}" if _name_re.fullmatch(name) else f"%{quote(name)}"


def show_value(value: Any) -> str:
    """An attribute value as text.

    >>> show_value((1, 0.5, True, "a", None, float("inf")))
    '[1, 0.5, true, "a", none, inf]'
    """
    kind = type(value)
    if kind is bool:
        return "true" if value else "false"
    if kind is int or kind is float:
        return repr(value)
    if kind is str:
        return quote(value)
    if value is None:
        return "none"
    if isinstance(value, (tuple, list, Offsets)):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, BlockRef):
        return f"block {value.idx}"
    if isinstance(value, Array):
        return repr(value)
    if isinstance(value, float):  # NumPy's float64 is one
        return float.__repr__(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, str):
        return quote(str(value))
    return f"<{kind.__name__}>"  # no valid attribute; error messages must still be able to show it


def _attr_list(items: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{word(k)}={show_value(v)}" for k, v in items)


def _same(a: Any, b: Any) -> bool:
    """Do two attributes have the same text? 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return a is b or (a == b and repr(a) == repr(b))


# -- types, placements and flags --------------------------------------------------------------------------------------------------


def show_entries(placement: Placement) -> str:
    """Placement entries as text, each with a space in front; nothing for a replicated value."""
    return "".join(map(_entry_text, placement))


@cache
def _entry_text(p: Entry) -> str:
    return f" {p.spelling}" if p.is_local else f" {p.spelling} over {word(p.group)}"


def _record(d: Var, implied: frozenset[str]) -> str:
    text = repr(d.type)
    if d.placement:
        text += show_entries(d.placement)
    for flag in FLAGS:
        if getattr(d, flag) != (flag in implied):
            text += f" {flag}" if getattr(d, flag) else f" not {flag}"
    return text


_PLAIN: frozenset[str] = frozenset()
_STOPPED = frozenset({"stop_gradient"})


def implied_inline(type_: ValueType) -> frozenset[str]:
    """Flags that a definition by an operator implies: no gradient flows through a value that is not a float."""
    return _PLAIN if type_.is_float else _STOPPED


# -- which variables the head declares ----------------------------------------------------------------------------------------------


def declarations(block: Block) -> tuple[dict[str, Var], dict[str, Var]]:
    """(variables declared ahead, variables whose type stands where an operator first defines them)."""
    descs = block.descs
    read: set[str] = set()
    inline: dict[str, Var] = {}
    for op in block.oplist:
        for names in op.inputs.values():
            read.update(names)
        for names in op.outputs.values():
            for n in names:
                if n not in read and n not in inline:
                    d = descs.get(n)
                    if d is not None and not d.attrs and not d.is_data and not d.is_parameter:
                        inline[n] = d
    return {n: d for n, d in descs.items() if n not in inline}, inline


def settings(program: Program) -> list[str]:
    lines = []
    if program.rank is not None:
        lines.append(f"  rank {program.rank}")
    if program.strategy:
        lines.append(f"  strategy {quote(program.strategy)}")
    if program.origin:
        lines.append(f"  origin {quote(program.origin)}")
    if program.random_seed:
        lines.append(f"  seed {program.random_seed}")
    return lines + group_lines(program) + turn_lines(program)


def group_lines(program: Program) -> list[str]:
    """One line for each group of ranks that the program declares."""
    return [" ".join([f"  group {word(g)} =", *(f"[{', '.join(map(str, s))}]" for s in sets)]) for g, sets in program.groups.items()]


def turn_lines(program: Program) -> list[str]:
    """One line for each axis of time that the program declares."""
    return [f"  turns {word(axis)} = {n}" for axis, n in program.turns.items()]


def startup_name(main: str) -> str:
    """The default name of the startup program."""
    return "startup" if main == "main" else main


def _startup_lines(program: Program, declared: Mapping[str, Var], startup: Program, fluid: FluidNames | None) -> list[str]:
    head = []
    if startup.name != startup_name(program.name):
        head.append(f"  name {word(startup.name)}")
    if startup.rank != program.rank:
        head.append(f"  rank {'none' if startup.rank is None else startup.rank}")
    if startup.strategy != program.strategy:
        head.append(f"  strategy {quote(startup.strategy)}")
    if startup.origin != program.origin:
        head.append(f"  origin {quote(startup.origin)}")
    if startup.random_seed != program.random_seed:
        head.append(f"  seed {startup.random_seed}")
    if startup.groups != program.groups:
        head += group_lines(startup) or ["  group none"]
    head += turn_lines(startup)
    block = startup.blocks[0]
    own, inline = declarations(block)
    named = {n for op in block.oplist for n in (*op.input_arg_names, *op.output_arg_names)}
    shared = {n for n in named if n in declared and block.descs.get(n) == declared[n]}
    head += [f"  {show_var(d)}" for n, d in own.items() if n not in shared]
    if foreign := sorted(n for n in named if n in declared and n not in block.descs):
        head.append(f"  without {', '.join(map(var_name, foreign))}")
    lines: list[str] = []
    inline = {n: d for n, d in inline.items() if n not in shared}
    if head or not block.oplist:
        lines += ["startup:", *head]
    _section_lines(lines, block.oplist, inline, "startup", "  ", fluid, Role.FORWARD if head else None)
    for b in startup.blocks[1:]:
        _block_lines(lines, b, "startup ", fluid)
    return lines


# -- operators ---------------------------------------------------------------------------------------------------------------------


def _section_lines(
    lines: list[str],
    ops: Iterable[Operator],
    inline: dict[str, Var],
    section: str,
    indent: str,
    fluid: FluidNames | None,
    role: Role | None = None,
) -> None:
    pending = dict(inline)
    for op in ops:
        if op.role is not role:
            role = op.role
            lines.append(section_header(section, role))
        lines.append(indent + op_text(op, pending, fluid))


def section_header(section: str, role: Role) -> str:
    """`backward:`; within the startup section `startup:` for its plain operators and `startup dist:` for others."""
    if not section:
        return f"{role.value}:"
    return f"{section}:" if role is Role.FORWARD else f"{section} {role.value}:"


def _block_lines(lines: list[str], block: Block, section: str, fluid: FluidNames | None) -> None:
    lines.append(f"{section}block {block.idx} in {block.parent_idx} {{")
    declared, inline = declarations(block)
    lines += [f"  {show_var(d)}" for d in declared.values()]
    _section_lines(lines, block.oplist, inline, "", "  ", fluid)
    lines.append("}")


def op_text(op: Operator, pending: dict[str, Var], fluid: FluidNames | None = None) -> str:
    """One line. Outputs in `pending` are written with their type and taken out of it."""
    definition = OPS.get(op.type)
    kind, attrs = op.type, op.attrs
    ins = None if definition is None else _positional(op.inputs, definition.in_slots, None)
    if ins is None:
        ins = _by_slot(op.inputs, None)
    outs = None if definition is None else _positional(op.outputs, definition.out_slots, pending)
    if outs is None:
        outs = _by_slot(op.outputs, pending)
    only = (shown := _attrs_shown(definition, attrs)) is None
    shown = attrs if shown is None else shown
    if fluid is not None and definition is not None:
        kind, shown = fluid.written(definition, shown)
    if not _plain_op(kind) or (definition is None and type_of(kind) != kind):  # in quotes, a word is no name of fluid
        kind = quote(kind)
    text = f"{outs} = {kind}({ins})" if outs else f"{kind}({ins})"
    if shown or (only and definition):
        text += f" {{{'only ' if only and definition else ''}{_attr_list(sorted(shown.items()))}}}"
    if op.role_var:
        text += f" for {', '.join(map(var_name, op.role_var))}"
    if op.device:
        text += f" device {show_device(op.device)}"
    return text


@cache
def _plain_op(kind: str) -> bool:
    return word(kind) == kind


def show_device(device: str) -> str:
    """A device: `gpu:1`, or a quoted string when it holds odd characters."""
    return device if _device_re.fullmatch(device) else quote(device)


def _defined(name: str, pending: dict[str, Var] | None) -> str:
    if pending:
        d = pending.pop(name, None)
        if d is not None:
            return f"{var_name(name)}: {_record(d, implied_inline(d.type))}"
    return var_name(name)


def _by_slot(slots: Mapping[str, tuple[str, ...]], pending: dict[str, Var] | None) -> str:
    return ", ".join(f"{word(s)}=[{', '.join([_defined(n, pending) for n in names])}]" for s, names in slots.items())


def _positional(slots: Mapping[str, tuple[str, ...]], declared: tuple[Slot, ...], pending: dict[str, Var] | None) -> str | None:
    """The slots as positional text; None when they are not the declared ones in the declared order."""
    present = []
    for slot in declared:
        names = slots.get(slot.name)
        if names is not None:
            if not names or (len(names) > 1 and not slot.many):
                return None
            present.append(slot.name)
    if present != list(slots):
        return None
    if not present:
        return ""
    parts = []
    for slot in declared:
        names = slots.get(slot.name, ())
        if slot.many:
            parts.append(f"[{', '.join([_defined(n, pending) for n in names])}]")
        else:
            parts.append(_defined(names[0], pending) if names else "_")
    return ", ".join(parts)


def _attrs_shown(definition: type[OpDef] | None, attrs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The attributes that differ from their defaults, and those that are always shown; None if they are not the declared ones, so that all
    are written."""
    declared = {} if definition is None else definition.attrs
    if definition is None or len(attrs) != len(declared):
        return None
    shown = {}
    for name, default in declared.items():
        value = attrs.get(name, _MISSING)
        if value is _MISSING:
            return None
        if isinstance(default, Required):
            if not fits(value, default.type):
                return None
        elif value is default or _same(value, default):
            if name not in ALWAYS_SHOWN:
                continue
        elif default is not None and not fits(value, type(default)):
            return None
        shown[name] = value
    return shown
