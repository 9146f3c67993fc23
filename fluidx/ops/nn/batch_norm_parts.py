"""The operators into which batch_norm in training is expanded when the batch is sharded: sums over the batch, and elementwise results.

Each operator can be sharded by rows: the sums become partial sums, and the other operators need only the complete sums. Variances are sums
of squared deviations from the complete mean: a difference of E[x^2] and E[x]^2 would lose digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from ...ir import Native, OpDef, Sample, Storage, TensorType
from ..expr.native import expression_calls
from ..expr.nodes import const, make_node, sym
from ..parts_kernel import by_parts
from ..shared.native import all_of, reduce_calls
from ..shared.samples import f32, positive
from .batch_norm import channel_words
from .norm_shared import ChannelParts, channel_count, check_weight, stat_dtype


def _rest(x: Any, layout: str) -> tuple[int, ...]:
    """The axes other than the channels."""
    return tuple(k for k in range(x.ndim) if k != (1 if layout == "NCHW" else x.ndim - 1))


def _along_channels(values: dict[str, Any], x: Any, layout: str) -> dict[str, Any]:
    """Arrays of one element per channel, reshaped so that they broadcast against X."""
    shape = [1] * x.ndim
    shape[1 if layout == "NCHW" else -1] = -1
    return {name: a.reshape(shape) for name, a in values.items()}


# The expressions of the C kernels: a is X, d the gradient of Y; m and v are the mean and the variance of the batch, i is 1 / deviation.
_A, _D, _M, _V, _I, _SCALE = (sym(n) for n in "admvis")
_SHIFTED = _A - _M


def _inverse(epsilon: float) -> Any:
    return const(1.0) / make_node("sqrt", _V + epsilon)


def _samples(seed: int = 0) -> Iterator[tuple[np.ndarray, str]]:
    for shape, layout in (((5, 3, 2, 4), "NCHW"), ((5, 2, 4, 3), "NHWC"), ((7, 3), "NCHW")):
        yield f32(*shape, seed=seed), layout


class BnMean(OpDef):
    """The mean of each channel over the whole batch."""

    name = "bn_mean"
    inputs, outputs = ("X",), ("Mean",)
    attrs = {"data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{channel_words(ins[0], attrs)} -> c | n:+ *:+ #n #* L(0)"

    @staticmethod
    def infer(x, *, data_layout):
        return TensorType(stat_dtype(x), (channel_count("bn_mean", x, data_layout),))

    @staticmethod
    def decompose(d):
        by = ChannelParts(d)
        by.mean(by.wide("X"), "Mean")

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        x, axes = ins[0], _rest(ins[0], attrs["data_layout"])
        count = prod(x.shape[k] for k in axes) if part is None else part.count
        return reduce_calls("sum", x, axes, outs[0], count, dry) if count else None

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        for x, layout in _samples():
            yield Sample.of(x, data_layout=layout)


class BnVariance(OpDef):
    """The mean of the squared deviation from Mean, for each channel over the whole batch."""

    name = "bn_variance"
    inputs, outputs = ("X", "Mean"), ("Variance",)
    attrs = {"data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        return f"{channel_words(ins[0], attrs)}, c -> c | n:+ *:+ #n #*"

    @staticmethod
    def infer(x, mean, *, data_layout):
        check_weight("bn_variance", "Mean", mean, channel_count("bn_variance", x, data_layout), x)
        return mean

    @staticmethod
    def decompose(d):
        by = ChannelParts(d)
        by.mean(d("square", by.centered("Mean")), "Variance")

    kernel = by_parts

    @staticmethod
    def _scratch(ins, outs, attrs):
        return [ins[0].with_dtype(stat_dtype(ins[0]))]

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None, scratch=()):
        (x, mean), axes, layout = ins, _rest(ins[0], attrs["data_layout"]), attrs["data_layout"]
        count = prod(x.shape[k] for k in axes) if part is None else part.count
        squares = x if dry else scratch[0] if scratch else np.empty(x.shape, np.promote_types(x.dtype, np.float32))
        values = {"a": x, **_along_channels({"m": mean}, x, layout)}
        made = expression_calls(_SHIFTED * _SHIFTED, values, squares, dry) if count else None
        return all_of([made, reduce_calls("sum", squares, axes, outs[0], count, dry)])

    native = Native(calls=_calls, halves=True, scratch=_scratch)

    @staticmethod
    def samples():
        for x, layout in _samples():
            yield Sample.of(x, f32(3, seed=1), data_layout=layout)


class BnApply(OpDef):
    """The outputs of batch_norm in training, from the mean and the variance of the whole batch; the values are the same."""

    name = "bn_apply"
    inputs = ("X", "Scale", "Bias", "Mean", "Variance", "BatchMean", "BatchVariance")
    outputs = ("Y", "MeanOut?", "VarianceOut?", "SavedMean?", "SavedVariance?")
    attrs = {"momentum": 0.9, "epsilon": 1e-5, "data_layout": "NCHW"}
    storage = Storage(inplace=(("Mean", "MeanOut"), ("Variance", "VarianceOut")))

    @staticmethod
    def pattern(ins, outs, attrs):
        x = channel_words(ins[0], attrs)
        return f"{x}, c, c, c, c, c, c -> {x}, c, c, c, c | n:= *:= L(1,2>0)"

    @staticmethod
    def infer(x, scale, bias, mean, variance, batch_mean, batch_variance, *, data_layout, **_):
        c = channel_count("bn_apply", x, data_layout)
        stats = {"Mean": mean, "Variance": variance, "BatchMean": batch_mean, "BatchVariance": batch_variance}
        for slot, w in {"Scale": scale, "Bias": bias, **stats}.items():
            check_weight("bn_apply", slot, w, c, x)
        return x, mean, variance, mean, variance

    @staticmethod
    def decompose(d):
        by = ChannelParts(d)
        inverse = by.inverse("BatchVariance", "SavedVariance")
        factor = d("elementwise_mul", by.wide("Scale"), inverse)
        by.finish(by.centered("BatchMean"), ("elementwise_mul", factor), ("elementwise_add", by.wide("Bias")), slot="Y")
        for slot, new in (("Mean", d["BatchMean"]), ("Variance", d["BatchVariance"])):
            if d.out(f"{slot}Out"):
                moved = d("scale", new, scale=1 - d.attrs["momentum"])
                d.chain(d[slot], ("scale", {"scale": d.attrs["momentum"]}), ("elementwise_add", moved, {}), out=d.out(f"{slot}Out"))
        if d.out("SavedMean"):
            d("assign", d["BatchMean"], out=d.out("SavedMean"))

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False):
        (x, scale, bias, mean, variance, batch_mean, batch_variance), epsilon, momentum = ins, attrs["epsilon"], attrs["momentum"]
        if any(a.dtype != x.dtype for a in ins):
            return None
        y = _SHIFTED * (_SCALE / make_node("sqrt", _V + epsilon)) + sym("b")
        channels = {"m": batch_mean, "v": batch_variance, "s": scale, "b": bias}
        moving = sym("x") * momentum + sym("y") * (1 - momentum)
        made = [
            (y, {"a": x, **_along_channels(channels, x, attrs["data_layout"])}), (moving, {"x": mean, "y": batch_mean}),
            (moving, {"x": variance, "y": batch_variance}), (_M, {"m": batch_mean}), (_inverse(epsilon), {"v": batch_variance}),
        ]  # fmt: skip
        return all_of([expression_calls(e, values, out, dry) for (e, values), out in zip(made, outs, strict=True) if out is not None])

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        for x, layout in _samples():
            rest = [positive(3, seed=1), f32(3, seed=2), f32(3, seed=3), positive(3, seed=4), f32(3, seed=5), positive(3, seed=6)]
            yield Sample.of(x, *rest, data_layout=layout)


class BnGradSums(OpDef):
    """The gradients of batch_norm's Bias and Scale, sums over the batch; the gradient of X needs them too.

    Only the type of Scale is read.
    """

    name = "bn_grad_sums"
    inputs, outputs = ("X", "Scale", "SavedMean", "SavedVariance", "Y@GRAD"), ("Bias@GRAD", "Scale@GRAD")
    attrs = {"data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = channel_words(ins[0], attrs)
        return f"{x}, ~c, c, c, {x} -> c, c | n:+ *:+ L(4)"

    @staticmethod
    def infer(x, scale, mean, inv, g, *, data_layout):
        return scale, scale

    @staticmethod
    def decompose(d):
        by = ChannelParts(d)
        by.total(by.wide("Y@GRAD"), "Bias@GRAD")
        normal = by.by_channel("elementwise_mul", by.centered("SavedMean"), d["SavedVariance"])
        by.total(d("elementwise_mul", by.wide("Y@GRAD"), normal), "Scale@GRAD")

    kernel = by_parts

    @staticmethod
    def _scratch(ins, outs, attrs):
        return [ins[0].with_dtype(stat_dtype(ins[0]))]

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, scratch=()):
        (x, _, mean, inv, g), layout = ins, attrs["data_layout"]
        products = x if dry else scratch[0] if scratch else np.empty(x.shape, np.promote_types(x.dtype, np.float32))
        return all_of([
            expression_calls(_D * (_SHIFTED * _I), {"a": x, "d": g, **_along_channels({"m": mean, "i": inv}, x, layout)}, products, dry),
            reduce_calls("sum", products, _rest(x, layout), outs[1], dry=dry),
            reduce_calls("sum", g, _rest(x, layout), outs[0], dry=dry),
        ])  # fmt: skip

    native = Native(calls=_calls, halves=True, scratch=_scratch)

    @staticmethod
    def samples():
        for x, layout in _samples():
            yield Sample.of(x, positive(3, seed=1), f32(3, seed=2), positive(3, seed=3), f32(*x.shape, seed=4), data_layout=layout,
                            grad=(), why="a gradient itself")  # fmt: skip


class BnGradApply(OpDef):
    """The gradient of batch_norm's X in training, from the gradients of Bias and Scale over the whole batch."""

    name = "bn_grad_apply"
    inputs, outputs = ("X", "Scale", "SavedMean", "SavedVariance", "Y@GRAD", "Bias@GRAD", "Scale@GRAD"), ("X@GRAD",)
    attrs = {"data_layout": "NCHW"}

    @staticmethod
    def pattern(ins, outs, attrs):
        x = channel_words(ins[0], attrs)
        return f"{x}, c, c, c, {x}, c, c -> {x} | #n #* L(4,5,6)"

    @staticmethod
    def infer(x, *rest, data_layout):
        return x

    @staticmethod
    def decompose(d):
        by, inverse = ChannelParts(d), d["SavedVariance"]
        along = by.by_channel("elementwise_mul", by.centered("SavedMean"), by.share(d("elementwise_mul", by.wide("Scale@GRAD"), inverse)))
        even, factor = d("elementwise_sub", by.wide("Y@GRAD"), along), d("elementwise_mul", by.wide("Scale"), inverse)
        by.finish(even, ("elementwise_sub", by.share(by.wide("Bias@GRAD"))), ("elementwise_mul", factor), slot="X@GRAD")

    kernel = by_parts

    @staticmethod
    def _calls(ins, outs, attrs, dry=False, part=None):
        (x, scale, mean, inv, g, dbias, dscale), layout = ins, attrs["data_layout"]
        count = prod(x.shape[k] for k in _rest(x, layout)) if part is None else part.count
        if not count or any(a.dtype != x.dtype for a in ins):
            return None
        n = const(float(count))
        e = (_D - _SHIFTED * (sym("ds") * _I / n) - sym("db") / n) * (_SCALE * _I)
        channels = _along_channels({"s": scale, "m": mean, "i": inv, "db": dbias, "ds": dscale}, x, layout)
        return expression_calls(e, {"a": x, "d": g, **channels}, outs[0], dry)

    native = Native(calls=_calls, halves=True)

    @staticmethod
    def samples():
        for x, layout in _samples():
            weights = [positive(3, seed=1), f32(3, seed=2), positive(3, seed=3)]
            yield Sample.of(x, *weights, f32(*x.shape, seed=4), f32(3, seed=5), f32(3, seed=6), data_layout=layout, grad=(),
                            why="a gradient itself")  # fmt: skip
