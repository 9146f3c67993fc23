"""MeasuredCollectives: the times of collectives among the ranks of a host, from the curves of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log

from ..ir.errors import FluidxError
from .calibration.records import MESSAGE, CurvePoint, Measured
from .estimate import CostEstimate

# the collective that was measured for each method
MEASURED_OP = {
    "all_reduce": "all_reduce", "reduce": "reduce_scatter", "spread": "all_gather", "exchange": "all_to_all", "to_root": "reduce",
    "from_root": "broadcast", "root_parts": "all_to_all",  # of both, each rank copies its n-th of the value in shared memory
}  # fmt: skip


class MeasuredCollectives:
    """The curves of one kind of ranks ("processes", "threads", "mpi"); without a kind, of the one that was measured."""

    def __init__(self, measured: Measured, name: str, kind: str | None = None):
        self.kind = kind or measured.kind
        self.curves, self.name, self.drift = measured.curves.get(self.kind, {}), name, measured.spread

    def estimate(self, method: str, n: int, nbytes: float) -> CostEstimate:
        """The time of a collective by its method or its op, among n ranks. Raises FluidxError, with what to do, if it was not measured."""
        op = MEASURED_OP.get(method, method)
        points = self.curves.get(n, {}).get(op)
        if not points:
            measured = ", ".join(map(str, sorted(self.curves))) or "none"
            raise FluidxError(
                f"{self.name} has no times of {op} among {n} {self.kind} (numbers of ranks that were measured: {measured}); "
                f"run `fluidx calibrate -n {','.join(map(str, sorted({*self.curves, n})))} --backend {self.kind}`"
            )
        return on_curve(points, nbytes).wider(self.drift)

    def message(self, n: int) -> Callable[[float], float] | None:
        """The seconds of a message by its bytes, with n ranks or the nearest number that was measured; None if none was."""
        known = {k: ops[MESSAGE] for k, ops in self.curves.items() if ops.get(MESSAGE)}
        if not known:
            return None
        points = known[min(known, key=lambda k: (abs(k - n), k))]
        return lambda nbytes: on_curve(points, nbytes).seconds


def on_curve(points: Sequence[CurvePoint], nbytes: float) -> CostEstimate:
    """The time on a curve: a straight line between two points in logarithms; the least time below the first point, and beyond the last one
    in proportion to the bytes.

    >>> points = [CurvePoint(100, 1e-6, 0.0), CurvePoint(400, 4e-6, 0.1)]
    >>> [round(1e6 * on_curve(points, n).seconds, 3) for n in (0, 100, 200, 800)]
    [1.0, 1.0, 2.0, 8.0]
    """
    first, last = points[0], points[-1]
    if nbytes <= first.nbytes:
        return CostEstimate(first.seconds, first.spread, "measured")
    if nbytes >= last.nbytes:
        return CostEstimate(last.seconds * nbytes / last.nbytes, last.spread, "measured")
    k = next(k for k, p in enumerate(points) if p.nbytes >= nbytes)
    low, high = points[k - 1], points[k]
    part = log(nbytes / low.nbytes) / log(high.nbytes / low.nbytes)
    seconds = exp(log(low.seconds) + part * log(high.seconds / low.seconds))
    return CostEstimate(seconds, max(low.spread, high.spread), "measured")
