"""State: the persistable variables of a program, in a scope or on many ranks, as saving and loading see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...ir.errors import NotInitializedError
from ...ir.program import Program
from ..scope import Scope
from .rank_group import OneProcess, ScriptProcesses

if TYPE_CHECKING:
    from .background_writer import SharedCopy


class State(Protocol):
    """Persistable variables, where a program has run. tests/executor/test_state.py checks every implementation."""

    @property
    def world_size(self) -> int:
        """The number of ranks that hold values."""

    @property
    def script(self) -> ScriptProcesses:
        """The processes that hold values. All of them must make the same calls."""

    @property
    def step(self) -> int:
        """The number of steps so far. Random numbers depend on it and on their seeds."""

    @step.setter
    def step(self, runs: int) -> None: ...

    def state(self, name: str) -> np.ndarray:
        """The global value of a variable."""

    def set_state(self, name: str, value: Any) -> None:
        """Set the global value of a variable."""

    def layout(self) -> Program:
        """The variables with their placements, as a program without operators."""

    def parts(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        """The local values of this process's ranks, on the host: {rank: {name: value}}. A part that several ranks hold appears once;
        replica-local values appear for every rank. Raises NotInitializedError if a variable has no value."""

    def set_parts(self, name: str, parts: Mapping[int, np.ndarray]) -> None:
        """Set the local values of a variable, as `parts` returned them. A rank that is not in `parts` gets the value of its equal rank."""

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> Mapping[int, SharedCopy]:
        """A thread in each process of a rank that this process started: it calls `function`, "module:function", with the values of
        variables, or with copies of them. Empty where there are no such processes, or where they have ended."""


class StateHolder(ABC):
    """An executor with a State of its own. Other executors run programs in scopes."""

    @property
    @abstractmethod
    def held(self) -> State:
        """The state of its programs."""


class ScopeState:
    """The State of a program on one device: the variables of a scope.

    >>> scope = Scope(); scope.set("w", np.ones(2, "float32"))
    >>> ScopeState(Program("net"), scope).state("w").tolist()
    [1.0, 1.0]
    """

    world_size = 1
    script = OneProcess()

    def __init__(self, program: Program, scope: Scope):
        self.program, self.scope = program, scope

    @property
    def step(self) -> int:
        return self.scope.steps.get(self.program, 0)

    @step.setter
    def step(self, runs: int) -> None:
        self.scope.steps[self.program] = runs

    def state(self, name: str) -> np.ndarray:
        found = self.scope.find_var(name)
        if found is None:
            raise NotInitializedError(
                f"cannot save variable {name!r}: it has no value in this scope; run the startup program first, or give executor=exe where "
                "the ranks of a ParallelExecutor have run it"
            )
        return np.asarray(found.get_tensor())

    def set_state(self, name: str, value: Any) -> None:
        self.scope.set(name, value)

    def layout(self) -> Program:
        found = Program(self.program.name)
        found.global_block().descs.update((n, d) for n, d in self.program.global_block().descs.items() if d.persistable)
        return found

    def parts(self) -> Mapping[int, Mapping[str, np.ndarray]]:
        return {0: {name: self.state(name) for name in self.layout().global_block().descs}}

    def set_parts(self, name: str, parts: Mapping[int, np.ndarray]) -> None:
        self.set_state(name, next(iter(parts.values())))

    def background_copies(self, function: str, names: Mapping[int, Sequence[str]], copies: bool) -> Mapping[int, SharedCopy]:
        return {}
