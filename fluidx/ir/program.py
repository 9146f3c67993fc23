"""Program, Block, Variable and Parameter as fluid users know them, append-only while they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import flow, unique_name
from .bodies import check_body, runners
from .dtypes import as_dtype
from .errors import ProgramError, nearest
from .opdef import OpDef, opdef
from .operator import Frozen, Operator, Role
from .records import PARAM_DEFAULTS, Var, check_attrs
from .site import call_site
from .types import ANY, REPLICATE, TensorType
from .variable import Parameter, Variable


class Block:
    """A list of operators and the variables they name. Block 0 is the program; others are bodies of control flow."""

    def __init__(self, program: Program, idx: int, parent_idx: int = -1):
        self.program = program
        self.idx = idx
        self.parent_idx = parent_idx
        self.descs: dict[str, Var] = {}
        self.oplist: list[Operator] = []

    @property
    def ops(self) -> tuple[Operator, ...]:
        return tuple(self.oplist)

    @property
    def vars(self) -> dict[str, Variable]:
        return {name: self._handle(d) for name, d in self.descs.items()}

    @property
    def parent(self) -> Block | None:
        return self.program.blocks[self.parent_idx] if self.parent_idx >= 0 else None

    def _handle(self, desc: Var) -> Variable:
        return (Parameter if desc.is_parameter else Variable)(self, desc.name)

    # -- looking up ---------------------------------------------------------------------------------------------------

    def find(self, name: str) -> Var | None:
        """The record declared under `name` here or in an enclosing block."""
        block: Block | None = self
        while block is not None:
            if (d := block.descs.get(name)) is not None:
                return d
            block = block.parent
        return None

    def desc(self, name: str) -> Var:
        d = self.find(name)
        if d is None:
            raise ProgramError(f"{self.program.label()} has no variable {name!r}; {nearest(name, self._names(), 'it declares')}")
        return d

    def _names(self) -> list[str]:
        names: list[str] = []
        block: Block | None = self
        while block is not None:
            names += list(block.descs)
            block = block.parent
        return names

    def has_var(self, name: str) -> bool:
        return name in self.descs

    def var(self, name: str) -> Variable:
        """The variable of that name, here or in an enclosing block; ProgramError with the nearest name otherwise."""
        block: Block | None = self
        while block is not None:
            if (d := block.descs.get(name)) is not None:
                return block._handle(d)
            block = block.parent
        self.desc(name)
        raise AssertionError("unreachable")

    def all_parameters(self) -> list[Parameter]:
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
        shape: Sequence[int] = (),
        dtype: Any = "float32",
        persistable: bool = False,
        stop_gradient: bool = False,
        is_data: bool = False,
        **attrs: Any,
    ) -> Variable:
        """Declare a variable; without a name it gets a fresh one. An existing variable of the same type is returned."""
        name = name or unique_name.generate("_generated_var")
        type_ = TensorType(as_dtype(dtype), _check_shape(name, shape))
        old = self.descs.get(name)
        if old is not None:
            if old.type != type_:
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
        type_ = TensorType(as_dtype(dtype), _check_shape(name, shape))
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
        site = call_site()
        op = Operator(type, _names(inputs), _names(outputs), None, role or self.program._role, role_var, site, self.program._device)
        try:
            definition = opdef(type)
            definition.check_slots(op)
            _declared_order(op, definition)
            object.__setattr__(op, "attrs", Frozen(definition.complete_attrs(attrs or {})))
            self._infer(definition, op)
            bodies = op.sub_blocks()
            for idx in bodies:
                check_body(op, self, idx, self.program._run_by())
        except ProgramError as e:
            raise _at_site(e, op, site) from None
        self.program._touch()
        self.oplist.append(op)
        for idx in bodies:
            self.program._run_by()[idx] = op
        return op

    def _infer(self, definition: type[OpDef], op: Operator) -> None:
        types = {slot: [self.desc(n).type for n in names] for slot, names in op.inputs.items()}
        results = definition.infer_outputs(types, op.attrs)
        if op.sub_blocks():
            for n in op.output_arg_names:
                self.desc(n)  # what a body writes is declared by whoever writes the body; no rule over X gives its type
            return
        stop = definition.constant or all(self.desc(n).stop_gradient for n in op.input_arg_names)
        for slot, result in zip(definition.out_slots, results, strict=True):
            names = op.outputs.get(slot.name, ())
            result = list(result) if slot.many else [result]
            if slot.many and len(names) != len(result):
                raise ProgramError(f"op {op.type} makes {len(result)} outputs {slot.name!r}, {len(names)} names were given")
            for name, inferred in zip(names, result, strict=False):
                declared = self.find(name)
                if declared is None:
                    self.descs[name] = Var(name, inferred, REPLICATE, False, stop or not inferred.is_float)
                elif not declared.type.accepts(inferred):
                    raise ProgramError(f"op {op.type} writes {inferred} into {name!r}, which is declared {declared.type}")

    def __repr__(self) -> str:
        return f"<Block {self.idx} of {self.program.label()}: {len(self.oplist)} ops, {len(self.descs)} vars>"

    def to_string(self, throw_on_error: bool = True, with_details: bool = False) -> str:
        from .text import show_block

        return show_block(self)

    __str__ = to_string


class Program:
    """A program: block 0 with its operators in order, and the sub-blocks that control flow runs.

    `str(program)` is text that `Program.parse_from_string` reads back to an equal program.

    >>> p = Program("empty")
    >>> p
    <Program empty: 0 ops, 0 params>
    """

    def __init__(self, name: str = "program"):
        self.name = name
        self.blocks: list[Block] = [Block(self, 0)]
        self.random_seed = 0
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.rank: int | None = None
        self.strategy = ""  # set on the results of a transpile; transpiling them again is refused
        self.version = 0
        self.frozen = False
        self._current = 0
        self._role = Role.FORWARD
        self._device = ""
        self._runners: dict[int, Operator] | None = None

    # -- fluid's accessors ------------------------------------------------------------------------------------------

    def global_block(self) -> Block:
        return self.blocks[0]

    def block(self, i: int) -> Block:
        if not 0 <= i < len(self.blocks):
            raise ProgramError(f"{self.label()} has no block {i}; it has {len(self.blocks)}")
        return self.blocks[i]

    def current_block(self) -> Block:
        return self.blocks[self._current]

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def list_vars(self) -> Iterator[Variable]:
        for block in self.blocks:
            yield from block.vars.values()

    def all_parameters(self) -> list[Parameter]:
        return self.global_block().all_parameters()

    def global_seed(self, seed: int = 0) -> None:
        self.random_seed = int(seed)

    @property
    def ops(self) -> tuple[Operator, ...]:
        return self.blocks[0].ops

    def label(self) -> str:
        return f"program {self.name}"

    def __repr__(self) -> str:
        n = len(self.all_parameters())
        return f"<Program {self.name}: {sum(len(b.oplist) for b in self.blocks)} ops, {n} param{'' if n == 1 else 's'}>"

    # -- text -----------------------------------------------------------------------------------------------------------

    def to_string(self, throw_on_error: bool = True, with_details: bool = False, fluid_names: bool = False) -> str:
        """The program as text. `fluid_names` writes collectives under fluid's historic names (for reading, not for parsing)."""
        from .text import show_program

        return show_program(self, fluid_names=fluid_names)

    def __str__(self) -> str:
        return self.to_string()

    @staticmethod
    def parse_from_string(text: str) -> Program:
        """Read the text form back. Raises ParseError with the line for text that is truncated or not a program."""
        from .parser import parse_program

        return parse_program(text)

    def graph(self) -> Any:
        """The dependence view: a networkx.DiGraph whose nodes are operator indices of block 0."""
        from .graph import dependence_graph

        return dependence_graph(self)

    # -- writing ----------------------------------------------------------------------------------------------------------

    def _touch(self) -> None:
        if self.frozen:
            raise ProgramError(
                f"{self.label()} is the result of transpiling with {self.strategy or 'a pass'} and is frozen; "
                "change the program it was made from and transpile that"
            )
        self.version += 1

    @contextmanager
    def role_guard(self, role: Role) -> Iterator[None]:
        """Operators appended inside get `role`."""
        old, self._role = self._role, role
        try:
            yield
        finally:
            self._role = old

    @contextmanager
    def device_guard(self, device: str) -> Iterator[None]:
        """Operators appended inside carry `device`."""
        old, self._device = self._device, device
        try:
            yield
        finally:
            self._device = old

    def create_block(self, parent_idx: int | None = None) -> Block:
        """A new block in the current one, or in block `parent_idx`; one operator there is to run it."""
        parent = self.block(self._current if parent_idx is None else parent_idx)
        self.blocks.append(Block(self, len(self.blocks), parent.idx))
        return self.blocks[-1]

    def drop_blocks(self, start: int) -> None:
        """Remove the blocks from index `start` on, which no operator runs any more."""
        del self.blocks[start:]
        self._runners = None

    def _run_by(self) -> dict[int, Operator]:
        """The operator that runs each sub-block, kept while the program is written."""
        if self._runners is None:
            self._runners = runners(self)
        return self._runners

    @contextmanager
    def sub_block(self, parent_idx: int | None = None) -> Iterator[Block]:
        """A new block, as of `create_block`; operators appended inside go there."""
        block, old = self.create_block(parent_idx), self._current
        self._current = block.idx
        try:
            yield block
        finally:
            self._current = old

    # -- copies ---------------------------------------------------------------------------------------------------------

    def copy(self, name: str | None = None) -> Program:
        """An independent program that shares the immutable operators and records."""
        new = Program(name or self.name)
        new.random_seed, new.rank, new.strategy = self.random_seed, self.rank, self.strategy
        new.groups = dict(self.groups)
        new.blocks = []
        for b in self.blocks:
            nb = Block(new, b.idx, b.parent_idx)
            nb.descs, nb.oplist = dict(b.descs), list(b.oplist)
            new.blocks.append(nb)
        return new

    def clone(self, for_test: bool = False) -> Program:
        """A copy; with `for_test` only the forward part, with dropout and batch_norm in their inference form."""
        new = self.copy()
        if not for_test:
            return new
        drop = (Role.BACKWARD, Role.OPTIMIZE, Role.LR_SCHED, Role.DIST)
        for b in new.blocks:
            kept = [op for op in b.oplist if op.role not in drop]
            b.oplist = [op.replace(attrs={**op.attrs, "is_test": True}) if "is_test" in op.attrs else op for op in kept]
            used = {n for op in b.oplist for n in (*flow.reads(new, op), *flow.writes(new, op))}
            b.descs = {n: d for n, d in b.descs.items() if n in used or d.is_data or d.is_parameter}
        return new

    # -- equality -----------------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Two programs are equal when they declare the same variables and operators in the same order; call sites do not count."""
        if not isinstance(other, Program):
            return NotImplemented
        if self is other:
            return True
        mine = (self.name, self.groups, self.rank, self.strategy, self.random_seed, len(self.blocks))
        theirs = (other.name, other.groups, other.rank, other.strategy, other.random_seed, len(other.blocks))
        return mine == theirs and all(
            a.parent_idx == b.parent_idx and a.descs == b.descs and a.oplist == b.oplist
            for a, b in zip(self.blocks, other.blocks, strict=True)
        )

    __hash__ = object.__hash__

    def group_ranks(self, group: str, rank: int) -> tuple[int, ...]:
        """The ranks of `group` that `rank` communicates with, itself included, in order."""
        if group not in self.groups:
            raise ProgramError(f"{self.label()} declares no group {group!r}; {nearest(group, self.groups, 'it declares')}")
        for members in self.groups[group]:
            if rank in members:
                return members
        return ()

    @property
    def world_size(self) -> int:
        return 1 + max((r for sets in self.groups.values() for s in sets for r in s), default=0)


@dataclass(frozen=True)
class ProgramPair:
    """Main and startup as one unit: what passes take and give, and what the text form prints with a `startup:` section."""

    main: Program
    startup: Program

    def __str__(self) -> str:
        from .text import show_program

        return show_program(self.main, startup=self.startup)


def _check_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(int(d) for d in shape)
    except (TypeError, ValueError):
        raise ProgramError(f"variable {name!r}: shape must be a list of integers, got {shape!r}") from None
    for d in result:
        if d < ANY:
            raise ProgramError(f"variable {name!r}: a size must be 0 or more, or -1 for an open axis, got {list(shape)}")
    return result


def _names(slots: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    out = {}
    for slot, value in (slots or {}).items():
        if value is None:
            continue
        items: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
        out[slot] = tuple(_name(v) for v in items)
    return {k: v for k, v in out.items() if v}


def _declared_order(op: Operator, definition: type[OpDef]) -> None:
    """Slots in the order of the declaration, however the caller listed them."""
    for which, slots in (("inputs", definition.in_slots), ("outputs", definition.out_slots)):
        given = getattr(op, which)
        if len(given) > 1:
            object.__setattr__(op, which, Frozen((s.name, given[s.name]) for s in slots if s.name in given))


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    raise ProgramError(f"expected a Variable or a variable name, got {type(value).__name__}: {value!r}")


def _at_site(error: ProgramError, op: Operator, site: Any) -> ProgramError:
    where = f"\n  written at {site}" if site else ""
    return type(error)(f"{error}\n  in {op.type}({', '.join(op.input_arg_names)}){where}")
