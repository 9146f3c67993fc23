"""Read and set state variables for saving and loading, in the global scope or on the ranks of a ParallelExecutor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from .._checks import wrong
from ..ir import FeedError, NotInitializedError, Program, TensorType, Var, as_dtype, default_main_program
from ..ir.constants import is_digest
from .atomic import CheckpointError

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


def get(executor: Any, var: Var) -> np.ndarray:
    """The value of a persistable variable, checked against its declaration."""
    if hasattr(executor, "state"):
        try:
            value = np.asarray(executor.state(var.name))
        except FeedError as e:
            raise CheckpointError(f"cannot save: {e}") from None
    else:
        value = _in_scope(var.name)
    found = TensorType(as_dtype(value.dtype), value.shape)
    if not var.type.accepts(found):
        raise CheckpointError(f"cannot save variable {var.name!r}: it is declared {var.type}, its value is {found}")
    return value


def _in_scope(name: str) -> np.ndarray:
    from ..executor import global_scope

    held = global_scope().find_var(name)
    if held is None:
        raise NotInitializedError(
            f"cannot save variable {name!r}: it has no value in this scope; run the startup program first, or give executor=exe where the "
            "ranks of a ParallelExecutor have run it"
        )
    return np.asarray(held.get_tensor())


def put(executor: Any, name: str, value: np.ndarray) -> None:
    if hasattr(executor, "set_state"):
        executor.set_state(name, value)
        return
    from ..executor import global_scope

    global_scope().set(name, value)


def put_all(executor: Any, values: Sequence[tuple[str, np.ndarray]]) -> None:
    with settled(executor):
        for name, value in values:
            put(executor, name, value)


def layout(program: Program, executor: Any) -> Program:
    """The persistable variables of the program and of its strategy, with their placements."""
    if hasattr(executor, "layout"):
        return executor.layout()
    found = Program(program.name)
    found.global_block().descs.update((d.name, d) for d in persistables(program))
    return found


def parts(program: Program, executor: Any) -> Mapping[int, Mapping[str, np.ndarray]]:
    """The local values of persistable variables on this process's ranks: {rank: {name: value}}; each part appears once."""
    if hasattr(executor, "parts"):
        return executor.parts()
    return {0: {d.name: get(executor, d) for d in persistables(program)}}


def background_copies(executor: Any, role: str, names: Mapping[int, Sequence[str]], copies: bool) -> Mapping[int, Any]:
    """For ranks that are other processes: threads there that call `role` with values of variables. Empty for other executors."""
    return executor.background_copies(role, names, copies) if hasattr(executor, "background_copies") else {}


def world_size(executor: Any) -> int:
    return executor.world_size if hasattr(executor, "parts") else 1


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


class OneProcess:
    """A group of one process, for an Executor. A ParallelExecutor is itself the group of the processes that hold its values."""

    spans_processes = False  # do other processes take part?
    is_first = True  # is this the process of rank 0?

    def gather_each(self, what: str, make: Callable[[], Any]) -> list[Any]:
        """Call `make()` in each process and gather the results (JSON data). The first error is raised in all processes."""
        return [make()]


def group(executor: Any) -> Any:
    return executor if hasattr(executor, "gather_each") else OneProcess()


def from_first(executor: Any, what: str, make: Callable[[], Any]) -> Any:
    """The result of `make()` in the process of rank 0, in all processes."""
    processes = group(executor)
    return processes.gather_each(what, lambda: make() if processes.is_first else None)[0]


def made_by_all(executor: Any, what: str, make: Callable[[], T]) -> T:
    """Call `make()` in all processes and return this process's result. The first error is raised in all processes."""
    made: list[T] = []
    group(executor).gather_each(what, lambda: made.append(make()))
    return made[0]


def settled(executor: Any) -> AbstractContextManager[None]:
    """A context in which many variables are set."""
    return executor.loading() if hasattr(executor, "loading") else nullcontext()


def step(program: Program, executor: Any) -> int:
    """The number of runs of the program so far. Random numbers depend on it and on their seeds."""
    if hasattr(executor, "layout"):
        return executor.step
    from ..executor import global_scope

    return global_scope().steps.get(program, 0)


def set_step(program: Program, executor: Any, runs: int) -> None:
    """Set the number of runs of the program."""
    if hasattr(executor, "layout"):
        executor.step = runs
        return
    from ..executor import global_scope

    global_scope().steps[program] = runs
