"""Fourier transforms of complex numbers, which are stored as pairs of floats."""

from __future__ import annotations

from math import log2
from typing import Any

from ...ir.axis_letters import but
from ...ir.dtypes import HALVES
from ...ir.errors import ProgramError
from ...ir.op_facets import Arithmetic
from ...ir.opdef import OpDef, Sample
from ..shared.samples import f32
from ..shared.types import need_float, need_ndim, norm_axis


class Fft(OpDef):
    """The discrete Fourier transform along `axis`. The last axis of X holds real and imaginary parts (size 2) or real numbers (size 1).

    Element k of the result, which is complex, is the sum of x[j] exp(-2 pi i j k / n); with `inverse`, the sum of x[j] exp(2 pi i j k / n),
    divided by n, which inverts the transform.
    """

    name = "fft"
    inputs = ("X",)
    attrs = {"axis": -2, "inverse": False}
    arithmetic = Arithmetic(flops=lambda ins, outs, attrs: int(2.5 * abs(outs[0].numel) * log2(max(ins[0].shape[attrs["axis"]], 2))))

    @staticmethod
    def pattern(ins: Any, outs: Any, attrs: Any) -> str:
        x = but((attrs["axis"], -1), ins[0].ndim)
        return f"{x} -> {x} | L(0)"

    @staticmethod
    def infer(x: Any, *, axis: int, inverse: bool) -> Any:
        need_ndim("fft", "X", x, 2, 99)
        need_float("fft", "X", x)
        at = norm_axis("fft", axis, x.ndim)
        if at == x.ndim - 1 or x.shape[-1] not in (1, 2):
            raise ProgramError(f"op fft: expected 1 or 2 along the last axis of X, and an `axis` before it; found {x}, {axis=}")
        if x.shape[at] < 1:
            raise ProgramError(f"op fft: axis {at} of {x} cannot be transformed: it is open or empty")
        return x.with_shape((*x.shape[:-1], 2))

    @staticmethod
    def grad(b: Any, op: Any, g: Any) -> Any:
        x, inverse = op["X"], op.attrs["inverse"]
        n = x.shape[op.attrs["axis"]]
        back = b.scale(b.fft(g, axis=op.attrs["axis"], inverse=not inverse), scale=1 / n if inverse else float(n))
        return back if x.shape[-1] == 2 else b.slice(back, axes=(len(x.shape) - 1,), starts=(0,), ends=(1,))

    @staticmethod
    def kernel(xp: Any, x: Any, *, out: Any, axis: int, inverse: bool) -> None:
        if x.dtype.name in HALVES:
            x = x.astype("float32")
        z = x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]
        at = axis % x.ndim
        y = xp.fft.ifft(z, axis=at) if inverse else xp.fft.fft(z, axis=at)
        out[..., 0], out[..., 1] = y.real, y.imag

    @staticmethod
    def samples():
        yield Sample.of(f32(5, 2))
        yield Sample.of(f32(3, 5, 4, 2), axis=1, inverse=True)
        yield Sample.of(f32(3, 6, 1))
        yield Sample.of(f32(4, 3, 1), axis=0, inverse=True)
