"""Program and ProgramPair: blocks of operators, the groups of ranks, and the guards and copies that fluid has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import flow
from .block import Block, name_of, names_of
from .constants import Array, arrays_in
from .errors import ProgramError, nearest
from .graph import dependence_graph
from .opdef import OpDef, opdef
from .operator import Frozen, Operator, Role
from .source_location import call_site, wrong
from .sub_blocks import runners
from .text import show_program
from .types import Dim, TensorType, size_names
from .variable import Parameter, Variable

_UNNAMED = "program"

# readers of program formats by name; parser.py adds "text": it makes Programs, so it imports this module
READERS: dict[str, Callable[[str, Mapping[str, Any] | None], Program]] = {}


_SIZES = frozenset({int, Dim})
# caches of all programs of the process
_MOST = 1 << 14  # the most entries of each
_TYPES: dict[tuple[str, tuple[int, ...], tuple[str | None, ...]], TensorType] = {}
_INFERRED: dict[tuple[Any, ...], tuple[Any, Frozen, Sequence[Any]]] = {}


class _ById(dict):
    """A dict with ids in its keys. A copy has other objects, so it starts empty."""

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
        self._site = call_site() if name == _UNNAMED else None  # how errors name the program
        self.blocks: list[Block] = [Block(self, 0)]
        self._random_seed = 0
        self.groups: dict[str, tuple[tuple[int, ...], ...]] = {}
        self.turns: dict[str, int] = {}  # axes of time, and how many turns they have (see time_axes.py)
        self.rank: int | None = None
        self.strategy = ""  # set on the results of a transpile; transpiling them again is refused
        self._origin: object = ""
        self.version = 0
        self.frozen = False
        self._current = 0
        self._role = Role.FORWARD
        self._device = ""
        self._runners: dict[int, Operator] | None = None
        self.readers: list[Any] = []  # data loaders for runs without a feed; no part of the text
        self.notes: dict[Any, Any] = _ById()  # caches of the executor, each under a key of its own

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
        """The seed from which the seeds of random operators are derived; 0: a random seed."""
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
        """The program in messages: its name, or the line that made it."""
        if self._site is None:
            return f"program {self.name}"
        return f"the program made at {os.path.basename(self._site.filename)}:{self._site.lineno}"

    def __repr__(self) -> str:
        n = len(self.all_parameters())
        return f"<Program {self.name}: {sum(len(b.oplist) for b in self.blocks)} ops, {n} param{'' if n == 1 else 's'}>"

    # -- text -----------------------------------------------------------------------------------------------------------

    def to_string(self, throw_on_error: bool = True, with_details: bool = False, fluid_names: bool | str = False) -> str:
        """The program as text. `fluid_names` writes collectives under fluid's historic names: "c" (`c_allreduce_sum`), or True for those of
        the NCCL design (`ncclAllReduce`). `parse_from_string` reads either."""
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
            self.current_block().desc(name_of(v))
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
        """The result types by an op's type rule, cached for all programs: the layers of a model mostly ask for the same types, and so do
        the programs that strategies make of it.

        The key is made of identities: equal sizes or attributes may still differ, as (1,) and (True,) do.
        """
        if not args:
            return self.shared(definition.infer(**attrs))
        key = (definition, id(attrs), *map(id, args))
        known = _INFERRED.get(key)
        if known is None:
            # the arguments are kept too, so that no other object gets their ids
            known = self.shared(definition.typed(*args, **attrs)), attrs, args
            if next(arrays_in(attrs.values()), None) is not None:  # a cache of the process would keep the memory of a constant
                return known[0]
            if len(_INFERRED) >= _MOST:
                _INFERRED.clear()
            _INFERRED[key] = known
        return known[0]

    def shared(self, found: Any) -> Any:
        """A type, or the result of a type rule, with one object for equal types, so that `infer` finds them in its cache."""
        if found.__class__ is TensorType:
            # (1,) and (True,) are equal but not the same, and all names are equal to -1
            kinds = {*map(type, found.shape)}
            if found.dtype.__class__ is not str or not _SIZES.issuperset(kinds):
                return found
            if len(_TYPES) >= _MOST:
                _TYPES.clear()
            return _TYPES.setdefault((found.dtype, found.shape, size_names(found.shape) if Dim in kinds else ()), found)
        return found.__class__(map(self.shared, found)) if found.__class__ in (tuple, list) else found

    def create_block(self, parent_idx: int | None = None) -> Block:
        """A new block in the current one, or in block `parent_idx`, where one operator may run it."""
        parent = self.block(self._current if parent_idx is None else parent_idx)
        self.blocks.append(Block(self, len(self.blocks), parent.idx))
        return self.blocks[-1]

    def drop_blocks(self, start: int) -> None:
        """Remove the blocks from index `start` on. No operator may run them."""
        del self.blocks[start:]
        self._runners = None

    def empty_blocks(self, start: int) -> None:
        """Empty the blocks from index `start` on that no operator runs; the others keep their indices."""
        run = set(range(start))
        for block in self.blocks:  # a block comes after the block of the operator that runs it
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
        """A text that is the same for all rank programs of one transpile; empty if it is not known."""
        return str(self._origin)

    @origin.setter
    def origin(self, said: object) -> None:
        """Set the text, or an object whose `str` gives it later."""
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
            b.oplist = [flow.listed(new, op) if opdef(op.type).control.repeats else op for op in b.oplist]
        for b in new.blocks:
            used = {n for op in b.oplist for n in (*flow.reads(new, op), *flow.writes(new, op))}
            b.descs = {n: d for n, d in b.descs.items() if n in used or d.is_data or d.is_parameter}
        return new

    def _drop_unrun_blocks(self) -> None:
        """Empty the blocks that no operator runs, and remove those at the end; in the middle the numbers of others would change."""
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
        """Take over the variables and operators of `other`, which a pass made from this program. With it, a call that changes a user's
        program in place, as in fluid, can use a pass. Blocks stay the same objects, and variables stay valid.
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
    """Main and startup program as one unit: passes take and return pairs, and the text form prints a pair with a `startup:` section."""

    main: Program
    startup: Program

    def __str__(self) -> str:
        return show_program(self.main, startup=self.startup)

    def constants(self) -> dict[str, Array]:
        """The arrays that the text of the two names by digest."""
        return {**self.startup.constants(), **self.main.constants()}
