"""One device's values, and whether rank programs give them: what every verdict of the proof is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fluidx as fx

from . import api
from .models import Model

_TIMEOUT = 0.8  # seconds that a rank waits for another; a deadlock costs this much
_AGAIN = 6.0  # and when that is tried once more, because the machine may have been busy


@dataclass
class Step:
    feed: dict[str, np.ndarray]
    fetch: str  # "merged", "each" or "" (nothing)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Reference:
    """What one device computes in a few steps, and which of it the unbroken ranks are known to give."""

    model: Model
    begin: dict[str, np.ndarray]
    steps: list[Step]
    known: set[str]  # values that a fetch gives
    replicas: dict[int, set[str]] = field(default_factory=dict)  # state that each rank holds whole
    every: set[str] = field(default_factory=set)  # values that every rank has whole
    wrong: list[str] = field(default_factory=list)  # what the unbroken ranks give otherwise


def plan_for(ranks: int) -> list[tuple[int, str]]:
    """Rows and fetch of four steps: an even batch, an uneven one, one with fewer rows than ranks, and an even one."""
    return [(2 * ranks, "merged"), (2 * ranks + 1, ""), (max(1, ranks - 1), "merged"), (ranks, "each")]


def reference(model: Model, plan: Sequence[tuple[int, str]]) -> Reference:
    """What one device computes in these steps."""
    exe, scope = fx.Executor(), fx.executor.Scope()
    exe.run(model.startup, scope=scope)
    block = model.main.global_block()
    data = {d.name for d in block.descs.values() if d.is_data}
    made = {n for op in block.oplist for n in op.output_arg_names} | data
    names = [d.name for d in block.descs.values() if not d.persistable and d.name in made]
    state = [d.name for d in block.descs.values() if d.persistable and d.name in scope.arrays]
    begin = {n: scope.get(n) for n in state}
    steps = []
    for k, (rows, fetch) in enumerate(plan):
        step = Step(model.feed(rows, k), fetch)
        values = exe.run(model.main, feed=step.feed, fetch_list=names, scope=scope)
        step.values = dict(zip(names, values, strict=True))
        step.state = {n: scope.get(n) for n in state}
        steps.append(step)
    return Reference(model, begin, steps, set(names))


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Equal up to rounding: an error relative to the largest value, for the order of additions differs."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.name == "bfloat16":  # for NumPy no float
        a, b = a.astype(np.float32), b.astype(np.float32)
    if a.dtype.kind not in "fc":
        return bool(np.array_equal(a, b))
    if not a.size or np.array_equal(a, b, equal_nan=True):
        return True
    if not (np.isfinite(a) == np.isfinite(b)).all():
        return False
    with np.errstate(all="ignore"):
        top = np.max(np.abs(np.where(np.isfinite(b), b, 0)))
        off = np.abs(np.where(np.isfinite(b), a - b, 0))
        return bool((off <= tolerance * (top + 1e-5)).all() and np.array_equal(a[~np.isfinite(b)], b[~np.isfinite(b)], equal_nan=True))


class Differs(Exception):
    """The ranks' values are not one device's."""


def baseline(ref: Reference, ranks: api.Ranks) -> None:
    """Run the unbroken ranks and note what they give: fetches that fail or differ are listed and not asked of mutants."""
    first = next(s for s in ref.steps if s.fetch == "merged")
    with ranks.executor(_AGAIN) as exe:
        exe.run_startup()
        try:
            exe.run(feed=first.feed, fetch_list=sorted(ref.known))
        except fx.FluidxError:
            ref.known = {n for n in sorted(ref.known) if _fetchable(ranks, first, n)}
    with ranks.executor(_AGAIN) as exe:
        exe.run_startup()
        _state(ref, exe, ref.begin, "after startup", note=True)
        for k, step in enumerate(ref.steps):
            names = sorted(ref.known)
            got = exe.run(feed=step.feed, fetch_list=names if step.fetch else [], return_merged=step.fetch != "each")
            if step.fetch == "merged":
                for n, a in zip(names, got, strict=True):
                    if not close(a, step.values[n], ref.model.tolerance):
                        ref.wrong.append(f"{n} in step {k}")
                        ref.known.discard(n)
            elif step.fetch == "each":
                whole = {n for n, a in zip(names, got, strict=True) if all(close(v, step.values[n], ref.model.tolerance) for v in a)}
                ref.every = whole & ref.known
            _state(ref, exe, step.state, f"after step {k}", note=True)
        for r in range(len(ranks.mains)):
            held = api.arrays_of(exe, r)
            final = ref.steps[-1].state
            ref.replicas[r] = {n for n, a in final.items() if n in held and close(held[n], a, ref.model.tolerance)}
            ref.replicas[r] -= {d.name for d in ranks.mains[r].global_block().descs.values() if d.placement}


def _fetchable(ranks: api.Ranks, step: Step, name: str) -> bool:
    try:
        with ranks.executor(_AGAIN) as exe:
            exe.run_startup()
            exe.run(feed=step.feed, fetch_list=[name])
    except fx.FluidxError:
        return False
    return True


def _state(ref: Reference, exe: Any, want: Mapping[str, np.ndarray], when: str, note: bool = False) -> None:
    for n in list(want):
        try:
            off = None if close(exe.state(n), want[n], ref.model.tolerance) else f"{n} {when}"
        except fx.FluidxError as e:
            off = f"{n} {when}: {e}"
        if off and note:
            ref.wrong.append(off)
            ref.begin.pop(n, None)
            for s in ref.steps:
                s.state.pop(n, None)
        elif off:
            raise Differs(f"state {off}")


def run(ref: Reference, ranks: api.Ranks, timeout: float = _TIMEOUT, fetch: bool = True) -> None:
    """Run startup and the steps. Differs when a value is not one device's; whatever else the executor raises."""
    fetches: list[str] = []
    with ranks.executor(timeout) as exe:
        exe.run_startup()
        _state(ref, exe, ref.begin, "after startup")
        for k, step in enumerate(ref.steps):
            names = sorted(ref.known if step.fetch == "merged" else ref.every if step.fetch == "each" else ()) if fetch else []
            got = exe.run(feed=step.feed, fetch_list=names, return_merged=step.fetch != "each")
            _state(ref, exe, step.state, f"after step {k}")
            for n, a in zip(names, got, strict=True):
                for v in a if step.fetch == "each" else [a]:
                    if not close(v, step.values[n], ref.model.tolerance):
                        fetches.append(f"{n} in step {k}")
                        break
        _replicas(ref, exe, ranks)
    if fetches:
        raise Differs(f"fetched {', '.join(fetches[:3])}")


def _replicas(ref: Reference, exe: Any, ranks: api.Ranks) -> None:
    """What every rank holds whole must be right on every rank, not only where the executor reads it."""
    final = ref.steps[-1].state
    for r, names in ref.replicas.items():
        held = api.arrays_of(exe, r)
        descs = ranks.mains[r].global_block().descs
        for n in sorted(names & final.keys()):
            if n in descs and (descs[n].placement or not descs[n].persistable):
                continue  # said to lie elsewhere
            if n in held and not close(held[n], final[n], ref.model.tolerance):
                raise Differs(f"state {n} on rank {r}")


ERRORS = (fx.FluidxError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, MemoryError, AssertionError)


def verdict(ref: Reference, ranks: api.Ranks) -> tuple[str, str]:
    """("equal" | "wrong" | "fetch" | "deadlock" | "loud", what was seen); "fetch" when state is right and only a fetch goes wrong."""
    kind, text = _verdict(ref, ranks, True)
    if kind in ("loud", "deadlock") and _verdict(ref, ranks, False)[0] == "equal":
        return "fetch", text
    return kind, text


def _verdict(ref: Reference, ranks: api.Ranks, fetch: bool) -> tuple[str, str]:
    try:
        try:
            run(ref, ranks, fetch=fetch)
        except fx.RankError as e:
            if not _waited(e):
                raise
            run(ref, ranks, _AGAIN, fetch)
    except Differs as e:
        return ("fetch" if str(e).startswith("fetched") else "wrong"), str(e)
    except ERRORS as e:
        return ("deadlock" if isinstance(e, fx.RankError) and _waited(e) else "loud"), shown(e)
    return "equal", ""


def _waited(e: fx.RankError) -> bool:
    return " waited " in str(e) or "did not arrive" in str(e)


def shown(e: BaseException) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"


def right(ref: Reference, ranks: api.Ranks) -> str:
    """Run ranks that should be right and say what differs; "" when nothing does."""
    try:
        try:
            _right(ref, ranks, _AGAIN)
        except fx.RankError as e:
            if not _waited(e):
                raise
            _right(ref, ranks, 5 * _AGAIN)  # the machine was busy, perhaps
    except Differs as e:
        return str(e)
    except ERRORS as e:
        return shown(e)
    return ""


def _right(ref: Reference, ranks: api.Ranks, timeout: float) -> None:
    with ranks.executor(timeout) as exe:
        exe.run_startup()
        _state(ref, exe, ref.begin, "after startup")
        for k, step in enumerate(ref.steps):
            names = sorted(step.values) if step.fetch == "merged" else []
            got = exe.run(feed=step.feed, fetch_list=names)
            for n, a in zip(names, got, strict=True):
                if not close(a, step.values[n], ref.model.tolerance):
                    raise Differs(f"{n} in step {k}")
            _state(ref, exe, step.state, f"after step {k}")
