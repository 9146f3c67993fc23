"""Communication between trainers and servers: push and pull, which become send, recv and sum operators in rank programs."""

from __future__ import annotations

from typing import Any

from ...ir.errors import ProgramError
from ...ir.offsets import Offsets
from ...ir.op_facets import Control, Native
from ...ir.opdef import Effect, OpDef, Required, Sample
from ...ir.types import TensorType
from ..shared.samples import counting
from .collective_base import check_cut


class _ServerOperator(OpDef):
    """Base of both operators: `group` has all ranks, `trainers` lists the ranks that train."""

    inputs = ("X",)
    attrs = {"group": Required(str), "trainers": Required(str), "root": 0, "bounds": Offsets()}
    effect = Effect.COLLECTIVE
    control = Control(abstract=True)

    @classmethod
    def infer(cls, x: TensorType, *, group: str, trainers: str, root: int, bounds: Offsets, same: bool = False) -> TensorType:
        if bounds:
            check_cut(cls.name, x, 0, 1, bounds)
        return x

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        raise ProgramError("this operator is for the program for all ranks; take one rank's program with get_trainer_program(rank)")

    native = Native(bind=_bind)

    @staticmethod
    def samples():
        yield Sample.of(counting(4), group="ps", trainers="dp", grad=(), why="lowered before it runs")
        yield Sample.of(counting(4), group="ps", trainers="dp", bounds=(0, 1, 4), grad=(), why="lowered before it runs")


class Push(_ServerOperator):
    """The sum of the partial values of the trainers, on the server `root`, or in flat ranges on several servers. With `same`, the value
    that all trainers have; one of them sends it.

    Source: the send operator of fluid's trainers, whose blocks the servers add up.
    """

    name = "push"
    attrs = {**_ServerOperator.attrs, "same": False}


class Pull(_ServerOperator):
    """The value that one server holds, or several servers hold in flat ranges, on every trainer.

    Source: the recv operator of fluid's trainers.
    """

    name = "pull"
