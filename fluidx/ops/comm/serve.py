"""Between trainers and servers: push and pull, written out as send, recv and sum once a rank is chosen."""

from __future__ import annotations

from typing import Any

from ...ir.errors import ProgramError
from ...ir.offsets import Offsets
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import TensorType
from ..shared.samples import counting
from .collective import check_cut


class _Served(OpDef):
    """Base of the two: `group` has all ranks, `trainers` those that train."""

    inputs = ("X",)
    attrs = {"group": Required(str), "trainers": Required(str), "root": 0, "bounds": Offsets()}
    effect = Effect.COLLECTIVE
    abstract = True

    @classmethod
    def infer(cls, x: TensorType, *, group: str, trainers: str, root: int, bounds: Offsets, same: bool = False) -> TensorType:
        if bounds:
            check_cut(cls.name, x, 0, 1, bounds)
        return x

    @staticmethod
    def bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        raise ProgramError("this operator is for the program for all ranks; take one rank's program with get_trainer_program(rank)")

    @staticmethod
    def samples():
        yield Sample.of(counting(4), group="ps", trainers="dp", grad=(), why="lowered before it runs")
        yield Sample.of(counting(4), group="ps", trainers="dp", bounds=(0, 1, 4), grad=(), why="lowered before it runs")


class Push(_Served):
    """The sum of the terms that the trainers hold, on the server that is `root`, or in flat ranges on several; with `same`, the value that
    all trainers have, which one of them sends.

    Source: the send operator of fluid's trainers, whose blocks the servers add up.
    """

    name = "push"
    attrs = {**_Served.attrs, "same": False}


class Pull(_Served):
    """The value that a server holds, or several hold in flat ranges, on every trainer.

    Source: the recv operator of fluid's trainers.
    """

    name = "pull"
