"""Operators on values of which every rank may have its own: on one device there is one, and they leave it as it is."""

from __future__ import annotations

from typing import Any

from ...ir.opdef import OpDef, Sample
from ...ir.types import TensorType
from ..shared.samples import counting


class ReplicaMean(OpDef):
    """The mean of the values that the ranks have of their own; on one device, X.

    Where every rank has the same value, that is it. Source: the averages of LocalSGD (Stich, "Local SGD Converges Fast and Communicates
    Little", 2019) and of the `c_allreduce_avg` that fluid's transpiler writes for it.
    """

    name = "replica_mean"
    flops = 0
    inputs = ("X",)
    pattern = "* -> * | R L(0) U(0)"
    inplace = (("X", "Out"),)
    meets_by = "all_reduce", {"op": "avg"}

    @staticmethod
    def infer(x: TensorType) -> TensorType:
        return x

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.replica_mean(g)

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any) -> None:
        xp.copyto(out, x)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3))
