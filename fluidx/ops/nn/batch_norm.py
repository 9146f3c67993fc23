"""batch_norm and its gradient, whose parts are the operators that a sharded batch needs (batch_norm_parts.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ir import Arithmetic, Autocast, Native, OpDef, ProgramError, Rewrite, Sample, Storage, TensorType
from ..parts_kernel import by_parts
from ..shared.samples import f32, positive
from . import batch_norm_native
from .norm_shared import ChannelParts, channel_count, check_weight, only_first_has_gradient, weight_dtype

_BATCH_ATTRS = {"momentum": 0.9, "epsilon": 1e-5, "is_test": False, "data_layout": "NCHW", "use_global_stats": False}


def channel_words(x: TensorType | None, attrs: Mapping[str, Any]) -> str:
    """The axis words of X in the access pattern of an op that works by channel."""
    return "n * c" if attrs["data_layout"] == "NHWC" and x is not None and x.ndim > 2 else "n c *"


class BatchNorm(OpDef):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias with the mean and variance of each channel over the batch.

    Training uses the batch's own statistics, and MeanOut = momentum * Mean + (1 - momentum) * batch mean, VarianceOut likewise (the biased
    variance); they overwrite Mean and Variance if they have the same names. With `is_test` or `use_global_stats`, Mean and Variance are
    used and returned unchanged. SavedMean and SavedVariance hold the used mean and 1 / sqrt(variance + epsilon), for the gradient. Source:
    Ioffe and Szegedy 2015; fluid 1.8 `batch_norm`.
    """

    name = "batch_norm"
    autocast = Autocast(mixed="any", wide=("Scale", "Bias", "Mean", "Variance"))
    rewrite = Rewrite(layout=("data_layout", ("X", "Y")))
    arithmetic = Arithmetic(flops=7)
    inputs = ("X", "Scale", "Bias", "Mean", "Variance")
    outputs = ("Y", "MeanOut?", "VarianceOut?", "SavedMean?", "SavedVariance?")
    attrs = _BATCH_ATTRS
    storage = Storage(inplace=(("Mean", "MeanOut"), ("Variance", "VarianceOut")))

    @staticmethod
    def decompose(d):
        """In training: operators that compute mean and variance as sums over the batch, and then the outputs."""
        a, layout = d.attrs, d.attrs["data_layout"]
        if a["is_test"] or a["use_global_stats"]:
            by = ChannelParts(d)
            mean, inverse = by.wide("Mean"), by.inverse("Variance", "SavedVariance")
            factor = d("elementwise_mul", by.wide("Scale"), inverse)
            shift = d("elementwise_sub", by.wide("Bias"), d("elementwise_mul", mean, factor))
            by.finish(by.wide("X"), ("elementwise_mul", factor), ("elementwise_add", shift), slot="Y")
            for slot, source in (("MeanOut", "Mean"), ("VarianceOut", "Variance"), ("SavedMean", "Mean")):
                if d.out(slot):
                    d("assign", d[source], out=d.out(slot))
            return
        mean = d("bn_mean", d["X"], word="mean", data_layout=layout)
        variance = d("bn_variance", d["X"], mean, word="variance", data_layout=layout)
        ins = {**d.op.inputs, "BatchMean": (mean,), "BatchVariance": (variance,)}
        d.append("bn_apply", ins, d.op.outputs, data_layout=layout, momentum=a["momentum"], epsilon=a["epsilon"])

    @staticmethod
    def pattern(ins, outs, attrs):
        x, fixed = channel_words(ins[0], attrs), attrs["is_test"] or attrs["use_global_stats"]
        return f"{x}, c, c, c, c -> {x}, c, c, c, c | {'n:= *:=' if fixed else 'n! *!'} L(1,2>0)"

    @staticmethod
    def infer(x, scale, bias, mean, variance, *, momentum, epsilon, is_test, data_layout, use_global_stats):
        c = channel_count("batch_norm", x, data_layout)
        if epsilon < 0:
            raise ProgramError(f"op batch_norm: epsilon must not be negative, got {epsilon}")
        for slot, w in (("Scale", scale), ("Bias", bias), ("Mean", mean), ("Variance", variance)):
            check_weight("batch_norm", slot, w, c, x)
        weight_dtype("batch_norm", x, Scale=scale, Bias=bias, Mean=mean, Variance=variance)
        return x, mean, variance, mean, variance

    @staticmethod
    def grad(b, op, g):
        only_first_has_gradient("batch_norm", op, g, ("SavedMean", "SavedVariance"))
        a = op.attrs
        dx, ds, db = b.batch_norm_grad(op["X"], op["Scale"], op["SavedMean"], op["SavedVariance"], g[0], data_layout=a["data_layout"],
                                       use_global_stats=a["use_global_stats"] or a["is_test"])  # fmt: skip
        return dx, ds, db, None, None

    kernel = by_parts
    native = Native(calls=batch_norm_native.forward, halves=True, scratch=batch_norm_native.scratch_types, any_size=True, tail=True)

    @staticmethod
    def samples():
        why = "statistics are not differentiable"
        rest = [positive(3, seed=1), f32(3, seed=2), f32(3, seed=3), positive(3, seed=4)]
        for k, shape, layout in ((0, (5, 3, 2, 4), "NCHW"), (0, (5, 2, 4, 3), "NHWC"), (5, (6, 3), "NCHW"), (6, (3, 3, 4), "NCHW")):
            x = f32(*shape, seed=k)
            yield Sample.of(x, *rest, data_layout=layout, grad=("X", "Scale", "Bias"), tolerance=2e-2, why=why)
        yield Sample.of(f32(5, 3, 2, 4, seed=7), *rest, is_test=True, epsilon=1e-3, grad=("X", "Scale", "Bias"), why=why)
        yield Sample.of(f32(3, 3, 2, 2, seed=7), *rest, use_global_stats=True, momentum=0.5, grad=("X", "Scale", "Bias"), why=why)


class BatchNormGrad(OpDef):
    """Gradients of batch_norm with respect to X, Scale and Bias from the statistics that the forward pass saved."""

    name = "batch_norm_grad"
    autocast = Autocast(mixed="any", wide=("Scale", "SavedMean", "SavedVariance"))
    rewrite = Rewrite(layout=("data_layout", ("X", "Y@GRAD", "X@GRAD")))
    arithmetic = Arithmetic(flops=11)
    inputs, outputs = ("X", "Scale", "SavedMean", "SavedVariance", "Y@GRAD"), ("X@GRAD", "Scale@GRAD", "Bias@GRAD")
    attrs = {"data_layout": "NCHW", "use_global_stats": False}

    @staticmethod
    def decompose(d):
        """Operators for the sums over the batch (the gradients of Bias and Scale), and in training for the gradient of X from them."""
        layout, outs = d.attrs["data_layout"], d.op.outputs
        sums = {slot: outs[slot] for slot in ("Bias@GRAD", "Scale@GRAD")}
        d.append("bn_grad_sums", d.op.inputs, sums, data_layout=layout)
        if d.attrs["use_global_stats"]:
            by = ChannelParts(d)
            by.finish(by.wide("Y@GRAD"), ("elementwise_mul", d("elementwise_mul", by.wide("Scale"), d["SavedVariance"])), slot="X@GRAD")
        else:
            d.append("bn_grad_apply", {**d.op.inputs, **sums}, {"X@GRAD": outs["X@GRAD"]}, data_layout=layout)

    @staticmethod
    def pattern(ins, outs, attrs):
        x = channel_words(ins[0], attrs)
        return f"{x}, c, c, c, {x} -> {x}, c, c | {'n:+ *:+' if attrs['use_global_stats'] else 'n! *!'} L(4)"

    @staticmethod
    def infer(x, scale, mean, inv, g, **attrs):
        return x, scale, scale

    kernel = by_parts
    native = Native(calls=batch_norm_native.backward, halves=True, scratch=batch_norm_native.scratch_types, any_size=True)

    @staticmethod
    def samples():
        x, g = f32(5, 3, 2, 4), f32(5, 3, 2, 4, seed=1)
        stats = [positive(3, seed=2), x.mean(axis=(0, 2, 3)), 1 / x.std(axis=(0, 2, 3))]
        yield Sample.of(x, *stats, g, grad=(), why="a gradient itself")
        yield Sample.of(x, *stats, g, use_global_stats=True, grad=(), why="a gradient itself")
