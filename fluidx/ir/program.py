"""Program, Block, Variable and Parameter as fluid users know them, append-only while they are written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from . import flow, unique_name
from .constants import Array, arrays_in
from .dtypes import as_dtype
from .errors import ProgramError, nearest
from .graph import dependence_graph
from .opdef import OPS, OpDef, Slot, opdef
from .operator import Frozen, Operator, Role
from .source_location import Site, call_site, wrong
from .sub_blocks import check_body, runners
from .text import show_block, show_program
from .types import ANY, REPLICATE, Dim, TensorType, size_names
from .valuetypes import ValueType, as_type, on_host
from .var import PARAM_DEFAULTS, Var, check_attrs
from .variable import Parameter, Variable

_UNNAMED = "program"

# how a form of programs is read, by its name; parser.py fills in "text": it makes Programs, so it imports this module
READERS: dict[str, Callable[[str, Mapping[str, Any] | None], Program]] = {}


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
            if definition.bodies:
                self._check_bodies(op)
        except ProgramError as e:
            named = ", ".join(n for names in inputs.values() for n in names)
            where = f"\n  written at {site}" if site else ""
            raise e.__class__(f"{e}\n  in {type}({named}){where}") from None
        program._touch()
        self.oplist.append(op)
        return op

    def repeat(self, op: Operator, inputs: dict[str, tuple[str, ...]], outputs: dict[str, tuple[str, ...]]) -> Operator:
        """Append `op` once more, over other variables that are declared and have the types of its own: nothing is left to check."""
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
                args.append([] if many else None if optional else definition.check_slots(op))  # which says what is wrong
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
        if definition.bodies:
            for n in op.output_arg_names:
                self.desc(n)  # what a body writes is declared by whoever writes the body; no rule over X gives its type
            return
        stop = stop or definition.constant
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


_SIZES = frozenset({int, Dim})
_MOST = 4096  # answers of type rules that a program remembers


class _ById(dict):
    """A dict with ids in its keys. In a copy the objects are others, so it starts empty."""

    def __reduce__(self) -> tuple:
        return self.__class__, ()


class Program:
    """A program: block 0 with its operators in order, and the sub-blocks that control flow runs.

    `str(program)` is text that `Program.parse_from_string` reads back to an equal program.

    >>> p = Program("empty")
    >>> p
    <Program empty: 0 ops, 0 params>
    """

    def __init__(self, name: str = _UNNAMED):
        self.name = name
        self._site = call_site() if name == _UNNAMED else None  # what errors call it by
        self.blocks: list[Block] = [Block(self, 0)]
        self._random_seed = 0
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.turns: dict[str, int] = {}  # axes of time, and how many turns they have (see turns.py)
        self.rank: int | None = None
        self.strategy = ""  # set on the results of a transpile; transpiling them again is refused
        self._origin: object = ""
        self.version = 0
        self.frozen = False
        self._current = 0
        self._role = Role.FORWARD
        self._device = ""
        self._runners: dict[int, Operator] | None = None
        self._types: dict[tuple[str, tuple[int, ...], tuple[str | None, ...]], TensorType] = {}
        self._inferred = _ById()
        self.readers: list[Any] = []  # loaders that runs without a feed take their batches from; no part of what the program says
        self.notes: dict[Any, Any] = _ById()  # what those who plan the program worked out of it, under keys of their own

    # -- fluid's accessors ------------------------------------------------------------------------------------------

    def global_block(self) -> Block:
        """Block 0."""
        return self.blocks[0]

    def block(self, i: int) -> Block:
        """Block `i`; ProgramError when there is none."""
        if not 0 <= i < len(self.blocks):
            raise ProgramError(f"{self.label()} has no block {i}; it has {len(self.blocks)}")
        return self.blocks[i]

    def current_block(self) -> Block:
        """The block that layers append operators to."""
        return self.blocks[self._current]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.blocks)

    def list_vars(self) -> Iterator[Variable]:
        """The variables of all blocks."""
        for block in self.blocks:
            yield from block.vars.values()

    def all_parameters(self) -> list[Parameter]:
        """The parameters that block 0 declares."""
        return self.global_block().all_parameters()

    @property
    def random_seed(self) -> int:
        """What the seeds of random operators are derived from; 0 stands for one that is drawn."""
        return self._random_seed

    @random_seed.setter
    def random_seed(self, seed: int) -> None:
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise wrong(f"random_seed must be an integer, got {type(seed).__name__}: {seed!r}")
        self._random_seed = int(seed)

    def global_seed(self, seed: int = 0) -> None:
        """Set `random_seed`."""
        self.random_seed = seed

    @property
    def ops(self) -> tuple[Operator, ...]:
        """The operators of block 0."""
        return self.blocks[0].ops

    def label(self) -> str:
        """What messages call it: its name, or else where it was made."""
        if self._site is None:
            return f"program {self.name}"
        return f"the program made at {os.path.basename(self._site.filename)}:{self._site.lineno}"

    def __repr__(self) -> str:
        n = len(self.all_parameters())
        return f"<Program {self.name}: {sum(len(b.oplist) for b in self.blocks)} ops, {n} param{'' if n == 1 else 's'}>"

    # -- text -----------------------------------------------------------------------------------------------------------

    def to_string(self, throw_on_error: bool = True, with_details: bool = False, fluid_names: bool = False) -> str:
        """The program as text. `fluid_names` writes collectives under fluid's historic names (for reading, not for parsing)."""
        return show_program(self, fluid_names=fluid_names)

    def __str__(self) -> str:
        return self.to_string()

    @staticmethod
    def parse_from_string(text: str, constants: Mapping[str, Any] | None = None) -> Program:
        """Read the text form back; `constants` are the arrays that it names, by digest.

        Raises ParseError with the line for text that is truncated or not a program, or names an array that is not given.
        """
        return READERS["text"](text, constants)

    def constants(self) -> dict[str, Array]:
        """The arrays that the text names by digest and does not hold.

        >>> p = Program("p")
        >>> p.parse_from_string(str(p), p.constants()) == p
        True
        """
        held = [op.attrs for b in self.blocks for op in b.oplist] + [d.attrs for b in self.blocks for d in b.descs.values() if d.attrs]
        return {a.digest: a for attrs in held for a in arrays_in(attrs.values())}

    def graph(self) -> Any:
        """The dependence view: a networkx.DiGraph whose nodes are operator indices of block 0."""
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

    # fluid's names, which its optimizers and transpilers call

    @contextmanager
    def _lr_schedule_guard(self, is_with_opt: bool = False) -> Iterator[None]:
        """Operators appended inside belong to the learning rate's schedule, or with `is_with_opt` to the updates."""
        with self.role_guard(Role.OPTIMIZE if is_with_opt else Role.LR_SCHED):
            yield

    @contextmanager
    def _optimized_guard(self, param_and_grads: Sequence[Variable | str]) -> Iterator[None]:
        """Operators appended inside are updates."""
        for v in param_and_grads:
            self.current_block().desc(_name(v))
        with self.role_guard(Role.OPTIMIZE):
            yield

    @contextmanager
    def _backward_role_guard(self) -> Iterator[None]:
        """Operators appended inside are of the backward pass."""
        with self.role_guard(Role.BACKWARD):
            yield

    def _prune(self, targets: Any) -> Program:
        """A copy with the operators that `targets`, variables or names, need."""
        return self._prune_with_input([], targets)

    def _prune_with_input(self, feeded_var_names: Sequence[str], targets: Any) -> Program:
        """A copy with the operators that `targets` need where the variables `feeded_var_names` are fed."""
        names = list(names_of(list(targets) if isinstance(targets, (list, tuple)) else [targets]))
        for n in (*feeded_var_names, *names):
            self.global_block().desc(n)
        new = self.copy()
        block = new.global_block()
        block.oplist = list(flow.live_ops(new, names, given=set(feeded_var_names)))
        new._drop_unrun_blocks()
        used = {n for op in block.oplist for n in (*flow.reads(new, op), *flow.writes(new, op))} | {*names, *feeded_var_names}
        block.descs = {n: d for n, d in block.descs.items() if n in used}
        return new

    def infer(self, definition: type[OpDef], args: Sequence[Any], attrs: Frozen) -> Any:
        """What an op's type rule says of operand types and attributes. Layers of a model mostly ask again what others asked.

        They are known again by identity: equal sizes or attributes need not be the same, (1,) and (True,) are not.
        """
        if not args:
            return self.shared(definition.infer(**attrs))
        key = (definition, id(attrs), *map(id, args))
        known = self._inferred.get(key)
        if known is None:
            if len(self._inferred) >= _MOST:
                self._inferred.clear()
            # what was asked is kept too, so that nothing else gets its ids
            known = self._inferred[key] = self.shared(definition.typed(*args, **attrs)), attrs, args
        return known[0]

    def shared(self, found: Any) -> Any:
        """A type, or what a rule gave, with one record for equal types, so that `infer` knows them again."""
        if found.__class__ is TensorType:
            # sizes of other kinds are equal too, (1,) and (True,), but not the same, and names are all equal to -1
            kinds = {*map(type, found.shape)}
            if found.dtype.__class__ is not str or not _SIZES.issuperset(kinds):
                return found
            return self._types.setdefault((found.dtype, found.shape, size_names(found.shape) if Dim in kinds else ()), found)
        return found.__class__(map(self.shared, found)) if found.__class__ in (tuple, list) else found

    def create_block(self, parent_idx: int | None = None) -> Block:
        """A new block in the current one, or in block `parent_idx`; one operator there is to run it."""
        parent = self.block(self._current if parent_idx is None else parent_idx)
        self.blocks.append(Block(self, len(self.blocks), parent.idx))
        return self.blocks[-1]

    def drop_blocks(self, start: int) -> None:
        """Remove the blocks from index `start` on, which no operator runs any more."""
        del self.blocks[start:]
        self._runners = None

    def empty_blocks(self, start: int) -> None:
        """Empty the blocks from index `start` on that no operator runs; the others keep their indices."""
        run = set(range(start))
        for block in self.blocks:  # a block stands behind the one that its operator is in
            if block.idx in run:
                run.update(idx for op in block.oplist for idx in op.sub_blocks())
            else:
                block.oplist.clear()
                block.descs.clear()
        self._runners = None

    def declares(self, name: str) -> bool:
        """Whether any block declares a variable of that name: a run knows values of all blocks by their names."""
        return any(name in block.descs for block in self.blocks)

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

    @property
    def origin(self) -> str:
        """Of a rank's program, a text that is the same for all ranks of one transpile; empty where it is not known."""
        return str(self._origin)

    @origin.setter
    def origin(self, said: object) -> None:
        """`said` is the text, or gives it when it is asked for."""
        self._origin = said

    # -- copies ---------------------------------------------------------------------------------------------------------

    def copy(self, name: str | None = None) -> Program:
        """An independent program that shares the immutable operators and records."""
        new = Program(name or self.name)
        new.random_seed, new.rank, new.strategy, new._origin = self.random_seed, self.rank, self.strategy, self._origin
        new.groups, new.turns, new.readers = dict(self.groups), dict(self.turns), list(self.readers)
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
        new._drop_unrun_blocks()
        for b in new.blocks:
            b.oplist = [flow.listed(new, op) if opdef(op.type).repeats else op for op in b.oplist]
        for b in new.blocks:
            used = {n for op in b.oplist for n in (*flow.reads(new, op), *flow.writes(new, op))}
            b.descs = {n: d for n, d in b.descs.items() if n in used or d.is_data or d.is_parameter}
        return new

    def _drop_unrun_blocks(self) -> None:
        """Empty the blocks that no operator runs, and remove the last ones: others have numbers behind them."""
        run, left = {0}, [0]
        while left:
            found = [idx for op in self.blocks[left.pop()].oplist for idx in op.sub_blocks()]
            run.update(found)
            left += found
        for b in self.blocks:
            if b.idx not in run:
                b.oplist, b.descs = [], {}
        self.drop_blocks(max(run) + 1)

    def become(self, other: Program) -> None:
        """Hold what `other`, which a pass made of this program, holds: variables and operators of every block.

        So a call that changes a program of the user's, as fluid's do, is a pass too. Blocks stay the same objects, and variables valid.
        """
        self._touch()
        self.blocks = [*self.blocks[: len(other.blocks)], *(Block(self, b.idx) for b in other.blocks[len(self.blocks) :])]
        for mine, theirs in zip(self.blocks, other.blocks, strict=True):
            mine.parent_idx, mine.descs, mine.oplist = theirs.parent_idx, dict(theirs.descs), list(theirs.oplist)
        self._runners = None

    # -- equality -----------------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Two programs are equal when they declare the same variables and operators in the same order; call sites do not count."""
        if not isinstance(other, Program):
            return NotImplemented
        if self is other:
            return True
        mine = (self.name, self.groups, self.turns, self.rank, self.strategy, self.origin, self.random_seed, len(self.blocks))
        theirs = (other.name, other.groups, other.turns, other.rank, other.strategy, other.origin, other.random_seed, len(other.blocks))
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
        """The number of ranks that the groups name, at least 1."""
        return 1 + max((r for sets in self.groups.values() for s in sets for r in s), default=0)


@dataclass(frozen=True)
class ProgramPair:
    """Main and startup as one unit: what passes take and give, and what the text form prints with a `startup:` section."""

    main: Program
    startup: Program

    def __str__(self) -> str:
        return show_program(self.main, startup=self.startup)

    def constants(self) -> dict[str, Array]:
        """The arrays that the text of the two names by digest."""
        return {**self.startup.constants(), **self.main.constants()}


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
    """The names in what a slot is given: a Variable, its record or its name, a list of them, or None."""
    if isinstance(value, (Variable, Var)):  # a Var is a tuple too
        return (value.name,)
    if isinstance(value, (list, tuple)):
        return tuple([_name(v) for v in value])
    return () if value is None else (_name(value),)


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    name = getattr(value, "name", None)
    if isinstance(name, str):
        return name
    raise ProgramError(f"expected a Variable or a variable name, got {type(value).__name__}: {value!r}")
