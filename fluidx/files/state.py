"""Read and set state variables for saving and loading, in the global scope or on the ranks of a ParallelExecutor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .._checks import wrong
from ..ir import FeedError, Program, TensorType, Var, as_dtype, default_main_program
from ..ir.constants import is_digest
from .atomic import CheckpointError

if TYPE_CHECKING:
    from ..executor.ranks.state import State

T = TypeVar("T")


def program_or_default(program: Any) -> Program:
    if program is None:
        return default_main_program()
    program = getattr(program, "program", program)  # of a CompiledProgram
    if not isinstance(program, Program):
        raise wrong(f"expected a Program, got {type(program).__name__}: {program!r}")
    return program


def persistables(program: Program) -> list[Var]:
    return [d for d in program.global_block().descs.values() if d.persistable]


def state_of(executor: Any, program: Program | None = None) -> State:
    """The state that an executor of ranks holds, or that of `program` in the global scope."""
    from ..executor import global_scope
    from ..executor.ranks.state import ScopeState, StateHolder

    return executor.held if isinstance(executor, StateHolder) else ScopeState(program or Program(), global_scope())


def get(executor: Any, var: Var) -> np.ndarray:
    """The value of a persistable variable, checked against its declaration."""
    try:
        return checked(var, state_of(executor).state(var.name))
    except FeedError as e:
        raise CheckpointError(f"cannot save: {e}") from None


def checked(var: Var, value: np.ndarray) -> np.ndarray:
    """A value to save. Raises CheckpointError if it is not of the declared type."""
    found = TensorType(as_dtype(value.dtype), value.shape)
    if not var.type.accepts(found):
        raise CheckpointError(f"cannot save variable {var.name!r}: it is declared {var.type}, its value is {found}")
    return value


def put_all(executor: Any, values: Sequence[tuple[str, np.ndarray]]) -> None:
    held = state_of(executor)
    with held.script.loading():
        for name, value in values:
            held.set_state(name, value)


def check_state(where: str, wanted: Sequence[Var], held: Collection[str], instead: str) -> None:
    """Raise CheckpointError if only optimizer state is missing among the wanted variables: `where` was then written with another optimizer,
    or without one. `instead` is the call that loads parameters only."""
    missing = [var for var in wanted if var.name not in held]
    state = [var.name for var in missing if "state_of" in var.attrs]
    if not state or any(var.is_parameter for var in missing):
        return
    known = {var.name for var in wanted}
    others = [name for name in held if name not in known and not is_digest(name)]
    with_ = f"with another optimizer: it holds {_some(others)}" if others else "without an optimizer's state: it holds parameters"
    raise CheckpointError(
        f"{where} was written {with_}, and the program has {_some(state)}\n  load parameters only, the optimizer begins anew: {instead}"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def from_first(executor: Any, what: str, make: Callable[[], Any]) -> Any:
    """The result of `make()` in the process of rank 0, in all processes."""
    script = state_of(executor).script
    return script.gather_each(what, lambda: make() if script.is_first else None)[0]


def made_by_all(executor: Any, what: str, make: Callable[[], T]) -> T:
    """Call `make()` in all processes and return this process's result. The first error is raised in all processes."""
    made: list[T] = []
    state_of(executor).script.gather_each(what, lambda: made.append(make()))
    return made[0]
