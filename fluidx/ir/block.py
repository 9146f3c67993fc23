"""Block: a list of operators and the variables they name, append-only while a program is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from . import unique_name
from .dtypes import as_dtype
from .errors import ProgramError, nearest
from .opdef import OPS, OpDef, Slot, opdef
from .operator import Operator, Role
from .source_location import Site, call_site
from .sub_blocks import check_body
from .text import show_block
from .types import ANY, REPLICATE, Dim, TensorType
from .valuetypes import ValueType, as_type, on_host
from .var import PARAM_DEFAULTS, Var, check_attrs
from .variable import Parameter, Variable

if TYPE_CHECKING:
    from .program import Program


class Block:
    """A list of operators and the variables that they name. Block 0 is the program; other blocks are branches or loop bodies."""

    def __init__(self, program: Program, idx: int, parent_idx: int = -1):
        self.program = program
        self.idx = idx
        self.parent_idx = parent_idx
        self.descs: dict[str, Var] = {}
        self.oplist: list[Operator] = []

    @property
    def ops(self) -> tuple[Operator, ...]:
        """The operators, in order."""
        return tuple(self.oplist)

    @property
    def vars(self) -> dict[str, Variable]:
        """The variables that the block itself declares, by name."""
        return {name: self._handle(d) for name, d in self.descs.items()}

    @property
    def parent(self) -> Block | None:
        """The enclosing block; None for block 0."""
        return self.program.blocks[self.parent_idx] if self.parent_idx >= 0 else None

    def _handle(self, desc: Var) -> Variable:
        return (Parameter if desc.is_parameter else Variable)(self, desc.name)

    # -- looking up ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Var | None:
        """The record declared under `name` here or in an enclosing block."""
        d = self.descs.get(name)
        return d if d is not None or self.parent_idx < 0 else self.program.blocks[self.parent_idx].find(name)

    def desc(self, name: str) -> Var:
        return self.descs.get(name) or self.find(name) or self._unknown(name)

    def _unknown(self, name: str) -> NoReturn:
        raise ProgramError(f"{self.program.label()} has no variable {name!r}; {nearest(name, self._names(), 'it declares')}")

    def _names(self) -> list[str]:
        names: list[str] = []
        block: Block | None = self
        while block is not None:
            names += list(block.descs)
            block = block.parent
        return names

    def has_var(self, name: str) -> bool:
        """Does the block itself declare a variable of that name?"""
        return name in self.descs

    def var(self, name: str) -> Variable:
        """The variable of that name, here or in an enclosing block; ProgramError with the nearest name otherwise."""
        block = self
        while (d := block.descs.get(name)) is None:
            block = block.parent or self._unknown(name)
        return (Parameter if d.is_parameter else Variable)(block, name)

    def all_parameters(self) -> list[Parameter]:
        """The parameters that the block declares."""
        return [Parameter(self, d.name) for d in self.descs.values() if d.is_parameter]

    iter_parameters = all_parameters

    # -- writing ------------------------------------------------------------------------------------------------------

    def declare(self, desc: Var) -> Var:
        """Put a record into the block, replacing one of the same name."""
        self.program._touch()
        self.descs[desc.name] = desc
        return desc

    def create_var(
        self,
        name: str | None = None,
        shape: Sequence[int | str] = (),
        dtype: Any = "float32",
        persistable: bool = False,
        stop_gradient: bool = False,
        is_data: bool = False,
        type: Any = None,
        **attrs: Any,
    ) -> Variable:
        """Declare a variable; without a name it gets a fresh one. An existing variable of the same type is returned.

        An axis of `shape` is a size, -1 where the feed decides it, or a name: axes of one name have one size in a run. `type`, a type or
        its text, stands for shape and dtype: "seq<f32[n,4]>", "opt<f32[4]>", "map<i64,f32[]>", "f32[*]" for a tensor of any rank.

        >>> from fluidx.ir import Program
        >>> Program("p").global_block().create_var("parts", type="seq<f32[n,4]>")
        <Variable parts: seq<f32[n,4]>>
        """
        name = name or unique_name.generate("_generated_var")
        type_ = self.program.shared(TensorType(as_dtype(dtype), _check_shape(name, shape)) if type is None else _given_type(name, type))
        if persistable and (type_.__class__ is not TensorType or on_host(type_)):
            raise ProgramError(f"variable {name!r}: {type_} cannot be persistable; state is tensors of numbers")
        old = self.descs.get(name)
        if old is not None:
            if not old.type.says(type_):
                raise ProgramError(f"variable {name!r} is already declared as {old.type}, not {type_}; choose another name")
            return self._handle(old)
        check_attrs(name, attrs)
        self.declare(Var(name, type_, REPLICATE, persistable, stop_gradient, is_data, False, attrs))
        return Variable(self, name)

    def create_parameter(
        self, shape: Sequence[int], dtype: Any = "float32", name: str | None = None, trainable: bool = True, **attrs: Any
    ) -> Parameter:
        """Declare a persistable variable that optimizers train. Its sizes must be known."""
        name = name or unique_name.generate("_param")
        type_ = self.program.shared(TensorType(as_dtype(dtype), _check_shape(name, shape)))
        if on_host(type_):
            raise ProgramError(f"parameter {name!r} is declared {type_}; a parameter is a tensor of numbers")
        if ANY in type_.shape:
            raise ProgramError(f"parameter {name!r} has shape {list(shape)}; every size of a parameter must be known")
        block = self.program.global_block()
        if (old := block.descs.get(name)) is not None:
            if old.type != type_ or not old.is_parameter:
                raise ProgramError(f"parameter {name!r} is already declared as {old.type}, not {type_}; choose another name")
            return Parameter(block, name)
        check_attrs(name, attrs)
        block.declare(Var(name, type_, REPLICATE, True, not trainable, False, True, {**PARAM_DEFAULTS, "trainable": trainable, **attrs}))
        return Parameter(block, name)

    def append_op(
        self,
        type: str,
        inputs: Mapping[str, Any] | None = None,
        outputs: Mapping[str, Any] | None = None,
        attrs: Mapping[str, Any] | None = None,
        role: Role | None = None,
        role_var: tuple[str, ...] = (),
    ) -> Operator:
        """Append an operator, as in fluid. Slots take a variable, a name, or a list of them.

        Shapes and dtypes are inferred here; an output that is not declared yet is declared with the inferred type.
        Raises ProgramError, pointing at the calling line, when the operator does not fit its inputs.
        """
        definition = OPS.get(type)
        ins, outs = _names(inputs), _names(outputs)
        if definition is not None:  # slots in the order of the declaration, however the caller listed them
            ins, outs = _in_order(ins, definition.in_slots), _in_order(outs, definition.out_slots)
        return self.write(type, ins, outs, attrs or {}, role, role_var)

    def write(
        self,
        type: str,
        inputs: dict[str, tuple[str, ...]],
        outputs: dict[str, tuple[str, ...]],
        attrs: Mapping[str, Any],
        role: Role | None = None,
        role_var: tuple[str, ...] = (),
        site: Site | None = None,
        device: str | None = None,
    ) -> Operator:
        """`append_op` for slots that are names in the declared order already. `site` is the calling line if left out."""
        program = self.program
        site = site or call_site()
        try:
            definition = opdef(type)
            full = definition.complete_attrs(attrs) if attrs or definition.required else definition.defaults
            if device is None:
                device = program._device
            op = Operator(type, inputs, outputs, full, role or program._role, role_var, site, device)
            self._infer(definition, op)
            if definition.control.bodies:
                self._check_bodies(op)
        except ProgramError as e:
            named = ", ".join(n for names in inputs.values() for n in names)
            where = f"\n  written at {site}" if site else ""
            raise e.__class__(f"{e}\n  in {type}({named}){where}") from None
        program._touch()
        self.oplist.append(op)
        return op

    def repeat(self, op: Operator, inputs: dict[str, tuple[str, ...]], outputs: dict[str, tuple[str, ...]]) -> Operator:
        """Append a copy of `op` over other declared variables of the same types. Nothing is checked again."""
        again = op.replace(inputs=inputs, outputs=outputs)
        self.program._touch()
        self.oplist.append(again)
        return again

    def _check_bodies(self, op: Operator) -> None:
        run = self.program._run_by()
        for idx in op.sub_blocks():
            check_body(op, self, idx, run)
        run.update(dict.fromkeys(op.sub_blocks(), op))

    def _infer(self, definition: type[OpDef], op: Operator) -> None:
        """Check an operator's slots and the types of its inputs, and declare the outputs that are not declared."""
        args: list[Any] = []
        descs, given, stop, absent = self.descs, op.inputs, True, 0
        for slot, optional, many in definition.in_slots:
            names = given.get(slot)
            if not names:
                absent += 1
                args.append([] if many else None if optional else definition.check_slots(op))  # raises the error
            elif many:
                found = [descs.get(n) or self.desc(n) for n in names]
                args.append([d.type for d in found])
                stop = stop and all(d.stop_gradient for d in found)
            else:
                if len(names) > 1:
                    definition.check_slots(op)
                d = descs.get(names[0]) or self.desc(names[0])
                args.append(d.type)
                if not d.stop_gradient:
                    stop = False
        made, out_slots = op.outputs, definition.out_slots
        if absent != len(definition.in_slots) - len(given) or len(made) != len(out_slots):
            definition.check_slots(op)
        results = self.program.infer(definition, args, op.attrs)
        if definition.control.bodies:
            for n in op.output_arg_names:
                self.desc(n)  # the caller that writes a body declares its results; no type rule over the inputs gives their types
            return
        stop = stop or definition.rewrite.constant
        for (slot, _, many), result in zip(out_slots, (results,) if len(out_slots) == 1 else results, strict=True):
            names, types = made.get(slot) or (), result if many else (result,)
            if len(names) != len(types) and (many or names):
                definition.check_slots(op)
                raise ProgramError(f"op {op.type} makes {len(types)} outputs {slot!r}, {len(names)} names were given")
            for name, inferred in zip(names, types):
                declared = descs.get(name) or self.find(name)
                if declared is None:
                    descs[name] = Var(name, inferred, REPLICATE, False, stop or not inferred.is_float)
                elif declared.type is not inferred and not declared.type.accepts(inferred):
                    raise ProgramError(f"op {op.type} writes {inferred} into {name!r}, which is declared {declared.type}")

    def __repr__(self) -> str:
        return f"<Block {self.idx} of {self.program.label()}: {len(self.oplist)} ops, {len(self.descs)} vars>"

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        """The declarations and operators as text."""
        return show_block(self)

    __str__ = to_string


def _given_type(name: str, type_: Any) -> ValueType:
    try:
        return as_type(type_)
    except ProgramError as e:
        raise ProgramError(f"variable {name!r}: {e}") from None


def _check_shape(name: str, shape: Sequence[int | str]) -> tuple[int, ...]:
    try:
        result = tuple([d if d.__class__ is Dim else Dim(d) if isinstance(d, str) else int(d) for d in shape])
    except ProgramError as e:
        raise ProgramError(f"variable {name!r}: {e}") from None
    except (TypeError, ValueError):
        raise ProgramError(f"variable {name!r}: shape must be a list of integers and names, got {shape!r}") from None
    if result and min(result) < ANY:
        raise ProgramError(f"variable {name!r}: a size must be 0 or more, or -1 or a name for an open axis, got {list(shape)}")
    return result


def _names(slots: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Slots as they are stored: names in tuples, absent ones left out."""
    named = {slot: names_of(value) for slot, value in (slots or {}).items()}
    return {slot: names for slot, names in named.items() if names}


def _in_order(slots: dict[str, tuple[str, ...]], declared: tuple[Slot, ...]) -> dict[str, tuple[str, ...]]:
    if len(slots) < 2:
        return slots
    known = {s.name: slots[s.name] for s in declared if s.name in slots}
    return known if len(known) == len(slots) else {**known, **slots}


def names_of(value: Any) -> tuple[str, ...]:
    """The variable names in an argument for a slot: a Variable, its record or its name, a list of these, or None."""
    if isinstance(value, (Variable, Var)):  # Var is a named tuple, so this test comes before the one for tuples
        return (value.name,)
    if isinstance(value, (list, tuple)):
        return tuple([name_of(v) for v in value])
    return () if value is None else (name_of(value),)


def name_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    raise ProgramError(f"expected a Variable or a variable name, got {type(value).__name__}: {value!r}")
