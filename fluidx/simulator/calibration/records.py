"""What a calibration has measured, and its JSON form: the section "measured" of a machine's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from ...ir.errors import FluidxError
from ...ir.types import TensorType
from ...ir.valuetypes import read_type
from ..step_table import TimedStep
from ..work import StepWork
from .machine import CalibratedMachine


class CurvePoint(NamedTuple):
    """A point of a curve: bytes, seconds, and the relative spread of these."""

    nbytes: int
    seconds: float
    spread: float


class ProbedSpeed(NamedTuple):
    """The speed of the machine while it was calibrated: the median seconds of the probe's product and of its copy, and their spread."""

    product: float
    copy: float
    spread: float


MESSAGE = "message"  # the curve of messages of one rank to another
Curves = Mapping[str, tuple[CurvePoint, ...]]  # by type of operator


class TracedProfile(NamedTuple):
    """The steps of a profile that was merged in. Their prediction is a replay."""

    file: str
    ranks: int
    steps: tuple[TimedStep, ...]


@dataclass(frozen=True)
class Measured:
    """The tables of a calibration. `steps` are by the number of ranks that computed at once, `runs` and `curves` by the kind of ranks
    ("processes", "threads", "mpi"; "one" for one device) and their number. Older files have no `probe`."""

    machine: CalibratedMachine
    steps: Mapping[int, tuple[TimedStep, ...]]
    runs: Mapping[str, Mapping[int, CurvePoint]]
    curves: Mapping[str, Mapping[int, Curves]]
    profiles: tuple[TracedProfile, ...] = field(default=())
    probe: ProbedSpeed | None = None

    @property
    def kind(self) -> str:
        """The kind of ranks that was measured; if there are several, the first one."""
        return next((kind for kind in self.runs if kind != "one"), "processes")

    @property
    def spread(self) -> float:
        """The relative spread of the machine's own speed."""
        return self.probe.spread if self.probe else 0.0

    def run(self, kind: str | None, ranks: int, name: str) -> CurvePoint:
        """A run of an empty program by ranks of a kind. Raises FluidxError, with what to do, if it was not measured."""
        kind = "one" if ranks == 1 else kind or self.kind
        if (found := self.runs.get(kind, {}).get(ranks)) is None:
            raise FluidxError(f"{name} has no runs of {ranks} {kind}; run `fluidx calibrate -n {ranks} --backend {kind}`")
        return found

    def check(self) -> None:
        """Raise ValueError or TypeError if a table lacks a part, or has a time that is none."""
        if 1 not in self.steps:
            raise ValueError("it has no steps of one rank")
        times = [s.seconds for some in self.steps.values() for s in some]
        times += [p.seconds for some in self.runs.values() for p in some.values()]
        times += self.probe or ()
        wrong = next((t for t in times if not 0 <= t < inf), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is no number of seconds")
        wrong_key = next((s.work.key for some in self.steps.values() for s in some if not isinstance(s.work.ops, str)), None)
        if wrong_key is not None:
            raise ValueError(f"{wrong_key!r} is no key of a step")

    def as_json(self) -> dict[str, Any]:
        """The JSON form, which `from_json` reads to an equal record."""
        found = {
            "machine": self.machine._asdict(),
            "steps": {str(n): [_row(s) for s in some] for n, some in self.steps.items()},
            "runs": {kind: {str(n): list(p) for n, p in some.items()} for kind, some in self.runs.items()},
            "curves": {
                kind: {str(n): {op: [list(p) for p in points] for op, points in ops.items()} for n, ops in some.items()}
                for kind, some in self.curves.items()
            },
            "profiles": [{"file": p.file, "ranks": p.ranks, "steps": [_row(s) for s in p.steps]} for p in self.profiles],
        }
        return found if self.probe is None else {**found, "probe": list(self.probe)}

    @staticmethod
    def from_json(data: Any, name: str) -> Measured:
        """The tables in a section "measured" of the machine `name`. Raises FluidxError if it is not one."""
        try:
            found = Measured(
                CalibratedMachine(**data["machine"]),
                {int(n): tuple(map(_step, some)) for n, some in data["steps"].items()},
                {kind: {int(n): CurvePoint(*p) for n, p in some.items()} for kind, some in data["runs"].items()},
                {
                    kind: {int(n): {op: tuple(CurvePoint(*p) for p in points) for op, points in ops.items()} for n, ops in some.items()}
                    for kind, some in data["curves"].items()
                },
                tuple(TracedProfile(p["file"], p["ranks"], tuple(map(_step, p["steps"]))) for p in data["profiles"]),
                ProbedSpeed(*map(float, data["probe"])) if "probe" in data else None,
            )
            found.check()
            return found
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as e:
            raise FluidxError(
                f"the section \"measured\" of {name} is not that of a calibration ({type(e).__name__}: {e}); run `fluidx calibrate` again"
            ) from None


def _row(step: TimedStep) -> list[Any]:
    w = step.work
    return [w.ops, w.kernel, " ".join(map(str, w.types)), w.flops, w.nbytes, step.seconds, round(step.spread, 4)]


def _step(row: Any) -> TimedStep:
    ops, kernel, types, flops, nbytes, seconds, spread = row
    return TimedStep(StepWork(ops, kernel, tuple(map(tensor_type, types.split())), flops, nbytes), float(seconds), float(spread))


def tensor_type(text: str) -> TensorType:
    """The type of a tensor from its text.

    >>> tensor_type("f32[8,2]")
    f32[8,2]
    """
    found = _types.get(text)
    if found is None:
        made = read_type(text)
        assert isinstance(made, TensorType)
        if len(_types) > 1 << 14:
            _types.clear()
        found = _types[text] = made
    return found


_types: dict[str, TensorType] = {}
