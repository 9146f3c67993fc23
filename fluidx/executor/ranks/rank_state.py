"""RankState: read and set the state variables of ranks, as global values, or (for checkpoints) as local values."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...ir.entries import is_local
from ...ir.errors import FeedError, NotInitializedError
from ...ir.parts import cut, holds
from ...ir.program import Program
from ...ir.var import Var
from ..plan.allocation import fetched
from ..scope import Scope
from .rank_group import RankGroup, ScriptProcesses
from .rank_programs import RankPrograms
from .state import StateHolder

if TYPE_CHECKING:
    from .background_writer import SharedCopy


class RankState(StateHolder):
    """The part of a ParallelExecutor that reads and sets state variables; it is a State."""

    world_size: int
    scopes: Sequence[Scope]
    programs: RankPrograms
    group: RankGroup
    _lock: threading.RLock

    def _desc(self, name: str) -> Var:
        d = self.programs.descs.get(name)
        return self.programs.mains[0].global_block().desc(name) if d is None else d  # desc() words the error

    def state(self, name: str) -> np.ndarray:
        """The global value of a persistable variable, joined from the ranks' local values. All processes of a launched script must call
        it."""
        with self._lock, self.group.published([name]):
            d = self._desc(name)
            if not d.placement:
                return next((s for s in self.scopes if name in s.arrays), self.scopes[0]).get(name)
            if is_local(d.placement):
                raise FeedError(f"variable {name!r} is local: every rank has its own, and there is no global value")
            values: list[Any] = [None] * self.world_size
            for r in self.programs.splitter.holders(d.placement):
                found = self.scopes[r].arrays.get(name)
                values[r] = found if type(found) is np.ndarray else self.scopes[r].get(name)  # get() words the error of a missing value
            merged = self.programs.splitter.merge(name, values, d.placement, d.type.shape)
            return merged.copy() if any(v is not None and np.may_share_memory(v, merged) for v in values) else merged

    def value_here(self, name: str) -> np.ndarray:
        """The global value of a persistable variable, or a local rank's value of a replica-local one. Other processes are asked only if no
        rank of this process has the whole value."""
        own = next((self.scopes[r] for r in self.group.own if name in self.scopes[r].arrays), None)
        whole = all(e.is_own for e in self._desc(name).placement)
        return own.get(name) if own is not None and whole else self.state(name)

    def is_global(self, name: str) -> bool:
        """Has a persistable variable a global value? A `local` variable has none."""
        return not is_local(self._desc(name).placement)

    def set_state(self, name: str, value: Any) -> None:
        """Set the global value of a persistable variable: every rank gets its part. All processes of a launched script must call it with
        the same value."""
        self.group.script.setting(name)
        with self._lock:
            d, value = self._desc(name), np.asarray(value)
            if is_local(d.placement):
                raise FeedError(f"variable {name!r} is local: each rank has its own")
            if len(value.shape) != d.type.ndim or any(a not in (b, -1) for a, b in zip(d.type.shape, value.shape, strict=True)):
                raise FeedError(f"variable {name!r} is declared {d.type}, the new value is {value.dtype}{list(value.shape)}")
            for main, scope, coords in zip(self.programs.mains, self.scopes, self.programs.splitter.coords, strict=True):
                if name in main.global_block().descs and holds(d.placement, coords):
                    scope.set(name, cut(value, d.placement, coords))

    # -- for checkpoints -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of steps so far. Random numbers depend on it and on their seeds."""
        return self.scopes[0].steps.get(self.programs.mains[0], 0)

    @step.setter
    def step(self, runs: int) -> None:
        for s, m in zip(self.scopes, self.programs.mains, strict=True):
            s.steps[m] = runs

    def layout(self) -> Program:
        """The persistable variables of all ranks with their placements, as a program without operators."""
        first = self.programs.mains[0]
        found = Program(first.name)
        found.groups.update(first.groups)
        found.turns.update(first.turns)
        for main in {id(m): m for m in self.programs.mains}.values():
            found.global_block().descs.update((n, d) for n, d in main.global_block().descs.items() if d.persistable)
        return found

    def parts(self) -> dict[int, dict[str, np.ndarray]]:
        """The local values of this process's ranks, on the host: {rank: {name: value}}. A part that several ranks hold appears once;
        replica-local values appear for every rank. Raises NotInitializedError if a variable has no value."""
        with self._lock:
            found: dict[int, dict[str, np.ndarray]] = {rank: {} for rank in self.group.own}
            for name, d in self.layout().global_block().descs.items():
                for rank in found.keys() & self._holders_of(d):
                    if name not in self.scopes[rank].arrays:
                        raise NotInitializedError(f"variable {name!r} has no value on rank {rank}; call run_startup() first")
                    value = self.scopes[rank].arrays[name]
                    found[rank][name] = value if type(value) is np.ndarray else fetched(value)
            return found

    def set_parts(self, name: str, parts: Mapping[int, np.ndarray]) -> None:
        """Set the local values of a variable, as `parts` returned them. A rank that is not in `parts` gets the value of its equal rank."""
        with self._lock:
            d = self._desc(name)
            given = {self._position(d, rank): part for rank, part in parts.items()}
            for rank, (main, scope) in enumerate(zip(self.programs.mains, self.scopes, strict=True)):
                if name in main.global_block().descs and holds(d.placement, self.programs.splitter.coords[rank]):
                    scope.set(name, given[self._position(d, rank)])

    def _holders_of(self, d: Var) -> list[int]:
        if is_local(d.placement):
            return [r for r, m in enumerate(self.programs.mains) if d.name in m.global_block().descs]
        there = [r for r in self.programs.splitter.holders(d.placement) if d.name in self.programs.mains[r].global_block().descs]
        return there or [r for r, m in enumerate(self.programs.mains) if d.name in m.global_block().descs][:1]

    def _position(self, d: Var, rank: int) -> tuple[int, ...]:
        """The position of a rank among the ranks that hold different parts of a variable."""
        return (rank,) if is_local(d.placement) else tuple(self.programs.splitter.coords[rank][e.group][0] for e in d.placement)

    # -- State -----------------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> RankState:
        return self

    @property
    def script(self) -> ScriptProcesses:
        """The processes that run this script. All of them must make the same calls."""
        return self.group.script

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> Mapping[int, SharedCopy]:
        """A thread in each process of a rank that this process started, with variables (see State.background_copies)."""
        self._check_process()
        with self._lock:
            return self.group.background_copies(function, names, copies)

    def _check_process(self) -> None:
        """Raise ExecutionError in a fork of the executor's process."""
