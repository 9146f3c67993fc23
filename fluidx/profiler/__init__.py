"""Profiler of runs, under fluid's names: a table of the most expensive operators, and a timeline for Perfetto.

While a profiler is on, every run of every executor makes its steps one by one and each is timed, on each rank, whatever ranks are. What a
step moves and computes is known from its plan (`executor/plan/cost.py`), so that its time can be held against what the machine can do
(`ceilings`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..comm.launch_environment import rank
from ..executor.run import observers
from ..fluid_names import module_getattr
from ..ir.errors import ExecutionError, nearest
from .ceilings import Ceilings, ceilings
from .profile import SORTED_BY, Exposed, Profile, Row

__all__ = ["Ceilings", "Exposed", "Profile", "Row", "ceilings", "profiler", "reset_profiler", "start_profiler", "stop_profiler"]
__getattr__ = module_getattr("profiler", __all__)

_STATES = ("CPU", "GPU", "All")
_OPTIONS = ("Default", "OpDetail", "AllOpDetail")
_on: list[Profile] = []  # the one that `start_profiler` switched on


@contextmanager
def profiler(
    state: str = "All", sorted_key: str | None = None, profile_path: str | Path | None = None, tracer_option: str = "Default"
) -> Iterator[Profile]:
    """A context that times every step of the runs inside, and gives a `Profile`; its `.table()` and `.save(path)` also work after the
    block.

    `sorted_key` prints the table at the end, sorted by "total", "calls", "ave", "max", "min" or "default", the order of the first run;
    without it nothing is printed. `profile_path` writes the timeline. Where each rank runs the script all see all ranks, and rank 0 prints
    and writes. `state` and `tracer_option` are fluid's and have no effect.

    >>> import numpy as np, fluidx as fx
    >>> main = fx.Program("double")
    >>> with fx.program_guard(main):
    ...     y = fx.layers.scale(fx.data("x", [-1, 2], "float32"), scale=2.0)
    >>> with fx.profiler.profiler() as profile:
    ...     _ = fx.Executor().run(main, feed={"x": np.ones((8, 2), "float32")}, fetch_list=[y])
    >>> [(row.name, row.calls, row.flops, row.nbytes) for row in profile.rows()]
    [('scale', 1, 16, 128)]
    """
    _check(state, tracer_option, sorted_key)
    profile = Profile()
    observers.watchers.append(profile)
    try:
        yield profile
    finally:
        observers.watchers.remove(profile)
    _report(profile, sorted_key, profile_path)


def start_profiler(state: str = "All", tracer_option: str = "Default") -> None:
    """Time every step of the runs from here to `stop_profiler`. If the profiler is on already, it stays on."""
    _check(state, tracer_option)
    if not _on:
        _on.append(Profile())
        observers.watchers.append(_on[0])


def stop_profiler(sorted_key: str | None = None, profile_path: str | Path | None = None) -> Profile | None:
    """End the profile of `start_profiler`, print and write it as `profiler` does, and return it; None if the profiler was not on."""
    _check("All", "Default", sorted_key)
    if not _on:
        return None
    profile = _on.pop()
    observers.watchers.remove(profile)
    _report(profile, sorted_key, profile_path)
    return profile


def reset_profiler() -> None:
    """Drop the runs profiled so far, for example after a warm-up. Active profilers stay on.

    >>> start_profiler()
    >>> reset_profiler()
    >>> stop_profiler().runs
    []
    """
    for w in observers.watchers:
        if isinstance(w, Profile):
            w.reset()


def _check(state: str, tracer_option: str, sorted_key: str | None = None) -> None:
    said = (("state", state, _STATES), ("tracer_option", tracer_option, _OPTIONS), ("sorted_key", sorted_key, SORTED_BY))
    for name, value, known in said:
        if value is not None and value not in known:
            raise ExecutionError(f"profiler: unknown {name}={value!r}; {nearest(str(value), known, 'there are')}")


def _report(profile: Profile, sorted_key: str | None, path: str | Path | None) -> None:
    if rank() > 0:  # rank 0 has the runs of all ranks and prints them
        return
    if path is not None:
        profile.save(path)
    if sorted_key is not None:
        print(profile.table(sort=sorted_key))
