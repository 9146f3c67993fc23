"""Changes of placement without communication, and `redistribute`, which stands for any change until it is lowered."""

from __future__ import annotations

from typing import Any

from ...ir.errors import ProgramError
from ...ir.offsets import Offsets
from ...ir.op_facets import Arithmetic, Comm, Control, Native, Storage
from ...ir.opdef import OpDef, Required, Sample
from ...ir.types import TensorType
from ..shared.native import all_of, copy_calls, fill_calls
from ..shared.samples import counting
from .collective_base import at_root, check_cut, cut, cut_views, moved, partial_sums, whole


class _Cut(OpDef):
    """Base of the operators between a whole value and this rank's part of it."""

    inputs = ("X",)
    attrs = {"group": Required(str), "axis": 0, "unit": 1, "bounds": Offsets()}

    @classmethod
    def infer(cls, x: TensorType, *, group: str, axis: int, unit: int, bounds: Offsets) -> TensorType:
        check_cut(cls.name, x, axis, unit, bounds)
        return x


class OwnPart(_Cut):
    """This rank's part of a replicated value.

    The parts are shards along `axis`, between blocks of `unit` neighbours, or flat ranges between `bounds`.
    """

    name = "part"
    arithmetic = Arithmetic(flops=0)

    comm = Comm(move=moved(whole, gives=cut))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.pad_part(g, **op.attrs)

    @staticmethod
    def _view_ctx(x: Any, ctx: Any, *, group: str, axis: int, unit: int, bounds: Offsets) -> Any:
        if bounds and not x.flags.c_contiguous:
            return None
        k, n = ctx.seat(group)
        return cut_views(x, n, axis, unit, bounds)[k]

    storage = Storage(view_ctx=_view_ctx)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, axis: int, unit: int, bounds: Offsets) -> None:
        k, n = ctx.seat(group)
        out[...] = cut_views(x, n, axis, unit, bounds)[k]

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", axis=1)


class PadPart(_Cut):
    """This rank's part of a value at its position, with zeros elsewhere: a partial sum of the value."""

    name = "pad_part"
    arithmetic = Arithmetic(flops=0)

    comm = Comm(move=moved(cut, gives=partial_sums))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.part(g, **op.attrs)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, axis: int, unit: int, bounds: Offsets) -> None:
        k, n = ctx.seat(group)
        out.fill(0)
        cut_views(out, n, axis, unit, bounds)[k][...] = x

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        k, n = ctx.seat(attrs["group"])
        part = cut_views(outs[0], n, attrs["axis"], attrs["unit"], attrs["bounds"])[k]
        return all_of([fill_calls(outs[0], 0, dry), copy_calls(part, ins[0], dry)])

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp", axis=1)


class OwnTerm(OpDef):
    """X on the root, zeros on the other ranks of the group: partial sums of X. X is read on the root only."""

    name = "own_term"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    attrs = {"group": Required(str), "root": 0}
    storage = Storage(inplace=(("X", "Out"),))

    @staticmethod
    def infer(x: TensorType, *, group: str, root: int) -> TensorType:
        return x

    comm = Comm(move=moved(at_root, whole, gives=partial_sums))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return b.own_term(g, **op.attrs)

    @staticmethod
    def kernel(xp: Any, x: Any, *, ctx: Any, out: Any, group: str, root: int) -> None:
        if ctx.seat(group)[0] == root:
            xp.copyto(out, x)
        else:
            out.fill(0)

    @staticmethod
    def _calls(ins: list, outs: list, attrs: Any, ctx: Any, dry: bool = False) -> Any:
        here = ctx.seat(attrs["group"])[0] == attrs["root"]
        return copy_calls(outs[0], ins[0], dry) if here else fill_calls(outs[0], 0, dry)

    native = Native(calls=_calls)

    @staticmethod
    def samples():
        yield Sample.of(counting(4, 3), group="dp")


class Redistribute(OpDef):
    """X in the placement that Out declares; the global value is the same.

    It stands for the necessary communication until the program is lowered. `reason` says which part of the program needs this placement.
    """

    name = "redistribute"
    arithmetic = Arithmetic(flops=0)
    inputs = ("X",)
    attrs = {"reason": ""}

    @staticmethod
    def infer(x: TensorType, *, reason: str) -> TensorType:
        return x

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        return g

    @staticmethod
    def _bind(ins: list, outs: list, attrs: Any, ctx: Any) -> Any:
        raise ProgramError("redistribute is a placeholder for communication; lower the program before it runs")

    native = Native(bind=_bind)

    @staticmethod
    def _run_reference(op: Any, env: dict, run_block: Any, ctx: Any) -> None:
        env[op.output_arg_names[0]] = env[op.input_arg_names[0]]

    control = Control(run_reference=_run_reference, abstract=True)
