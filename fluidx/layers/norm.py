"""Normalization layers: over batches, rows, groups of channels and neighbouring channels."""

from __future__ import annotations

from math import prod
from typing import Any

from .._checks import number, whole, wrong
from ..initializer import Constant
from ..ir import Variable
from ..param_attr import ParamAttr
from .helper import LayerWriter
from .layer_from_signature import row


def _wide(dtype: str) -> str:
    """The dtype of statistics and scales: float32 for 16-bit inputs."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def batch_norm(
    input: Variable,
    act: str | None = None,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    data_layout: str = "NCHW",
    in_place: bool = False,
    name: str | None = None,
    moving_mean_name: str | None = None,
    moving_variance_name: str | None = None,
    do_model_average_for_mean_and_var: bool = True,
    use_global_stats: bool = False,
    sub_batches: int = 1,
) -> Variable:
    """Batch normalization over all axes but the channels: (x - mean) / sqrt(variance + epsilon) * scale + bias.

    In training, mean and variance are those of the batch, and the moving ones become momentum * moving + (1 - momentum) * batch's. With
    is_test (set by `Program.clone(for_test=True)`) or use_global_stats, the moving ones are used. Scale and bias are `w_0` and `b_0`; the
    moving mean and variance are `w_1` and `w_2`, parameters that are not trained. `in_place` has no effect.

    `sub_batches=g` is ghost batch normalization: in training, a batch of B rows is split into g parts, rows k*B//g to (k+1)*B//g, and each
    part is normalized by its own mean and variance. The moving statistics use the mean of the parts' means and variances with equal
    weights; a part without rows (in a batch of fewer than g) does not count. One device and ranks compute the same: if the number of ranks
    divides g, ranks hold whole parts and exchange only the moving statistics; otherwise they gather the batch. Source: Hoffer, Hubara and
    Soudry 2017, "Train longer, generalize better".

    Shapes: the result has input's shape, [n, c] or [n, c, ...]; scale, bias, mean and variance are [c].

    Types: input is float16, bfloat16, float32 or float64, and so is the result. The statistics of 16-bit input are float32.

    Raises ProgramError if the channel axis is open, or if scale or bias is left out.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.batch_norm(fx.data("x", [-1, 1], "float32"), sub_batches=2)
    >>> exe = fx.Executor(fx.CPUPlace())
    >>> _ = exe.run(startup)
    >>> x = np.float32([[1], [3], [100], [300]])
    >>> exe.run(main, feed={"x": x}, fetch_list=[y])[0].ravel().round(2).tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    helper = LayerWriter("batch_norm", name)
    x = helper.variable(input, "input")
    runs = whole(helper.label, "sub_batches", sub_batches, 1)
    layout = helper.layout(data_layout, "data_layout")
    helper.rank(x, "input", 2, 3, 4, 5)
    shape, dtype = (helper.known(x, "input", 1 if layout == "NCHW" else x.ndim - 1),), _wide(x.dtype)
    scale = helper.parameter(param_attr, shape, dtype, default=Constant(1.0))
    bias = helper.parameter(bias_attr, shape, dtype, is_bias=True)
    if scale is None or bias is None:
        raise wrong(f"{helper.label}: scale and bias cannot be left out; ParamAttr(trainable=False) keeps them at 1 and 0")
    mean = helper.parameter(ParamAttr(moving_mean_name, Constant(0.0), trainable=False), shape, dtype)
    variance = helper.parameter(ParamAttr(moving_variance_name, Constant(1.0), trainable=False), shape, dtype)
    new = {"MeanOut": mean, "VarianceOut": variance}
    momentum, epsilon = number(helper.label, "momentum", momentum), number(helper.label, "epsilon", epsilon)
    if runs > 1 and not is_test and not use_global_stats:
        y, _, _, batch = helper.op(
            "ghost_batch_norm", x, scale, bias, mean, variance, sub_batches=runs, epsilon=epsilon, data_layout=layout
        )
        helper.op("bn_running", mean, variance, batch, out=new, momentum=momentum)
        return helper.activate(y, act)
    y, *_ = helper.op(
        "batch_norm",
        x,
        scale,
        bias,
        mean,
        variance,
        out=new,
        momentum=momentum,
        epsilon=epsilon,
        is_test=bool(is_test),
        use_global_stats=bool(use_global_stats),
        data_layout=layout,
    )
    return helper.activate(y, act)


def layer_norm(
    input: Variable,
    scale: bool = True,
    shift: bool = True,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Normalization over the axes from `begin_norm_axis` on: (x - mean) / sqrt(variance + epsilon) * scale + bias.

    Scale and bias are vectors over the normalized elements.

    Shapes: the result has input's shape.

    Types: input is float16, bfloat16, float32 or float64, and so is the result. Scale and bias of 16-bit input are float32.

    Raises ProgramError when a normalized axis has an open size.

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
    ...     y = fx.layers.layer_norm(fx.data("x", [-1, 8, 16], "float32"), begin_norm_axis=2)
    >>> y.shape, [p.shape for p in main.all_parameters()]
    ((-1, 8, 16), [(16,), (16,)])
    """
    helper = LayerWriter("layer_norm", name)
    x, axis, sizes = _rows(helper, input, begin_norm_axis)
    w = helper.parameter(param_attr, (prod(sizes),), _wide(x.dtype), default=Constant(1.0)) if scale else None
    b = helper.parameter(bias_attr, (prod(sizes),), _wide(x.dtype), is_bias=True) if shift else None
    y, *_ = helper.op("layer_norm", x, w, b, begin_norm_axis=axis, epsilon=number(helper.label, "epsilon", epsilon))
    return helper.activate(y, act)


def rms_norm(
    input: Variable,
    scale: bool = True,
    shift: bool = False,
    begin_norm_axis: int = 1,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Division by the root of the mean square over the axes from `begin_norm_axis` on: x / sqrt(mean(x * x) + epsilon) * scale + bias.

    Scale, and with `shift` a bias, are vectors over the normalized elements, whose sizes must be known. Raises ProgramError unless input
    has floats and an axis before `begin_norm_axis`.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     y = fx.layers.rms_norm(fx.data("x", [-1, 4], "float32"), epsilon=0.0)
    >>> exe = fx.Executor()
    >>> _ = exe.run(startup)
    >>> exe.run(main, feed={"x": np.float32([[4, 0, 0, 0], [3, -3, 3, 3]])}, fetch_list=[y])[0].tolist()  # the roots are 2 and 3
    [[2.0, 0.0, 0.0, 0.0], [1.0, -1.0, 1.0, 1.0]]
    """
    helper = LayerWriter("rms_norm", name)
    x, axis, sizes = _rows(helper, input, begin_norm_axis)
    w = helper.parameter(param_attr, (prod(sizes),), _wide(x.dtype), default=Constant(1.0)) if scale else None
    y, _ = helper.op("rms_norm", x, w, begin_norm_axis=axis, epsilon=number(helper.label, "epsilon", epsilon))
    b = helper.parameter(bias_attr, (prod(sizes),), x.dtype, is_bias=True) if shift else None
    if b is not None:
        y = helper.op("elementwise_add", y, helper.op("reshape", b, shape=sizes), axis=axis)
    return helper.activate(y, act)


def _rows(helper: LayerWriter, input: Any, begin_norm_axis: int) -> tuple[Variable, int, tuple[int, ...]]:
    """The input of a layer, the first axis that it normalizes, and the sizes of the normalized axes."""
    x = helper.variable(input, "input")
    axis = helper.axis(x, begin_norm_axis, "begin_norm_axis")
    return x, axis, tuple(helper.known(x, "input", a) for a in range(axis, x.ndim))


def group_norm(
    input: Variable,
    groups: int,
    epsilon: float = 1e-5,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    data_layout: str = "NCHW",
    name: str | None = None,
) -> Variable:
    """Normalization of each sample over groups of channels; scale and bias are vectors over the channels (False leaves one out).

    Shapes: the result has input's shape, [n, c, ...].

    Types: input is float16, bfloat16, float32 or float64, and so is the result. Scale and bias of 16-bit input are float32.

    Raises ProgramError when `groups` does not divide the channels.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.group_norm(fx.data("x", [-1, 8, 4, 4], "float32"), 2)
    <Variable group_norm_0.tmp_0: f32[-1,8,4,4]>
    """
    helper = LayerWriter("group_norm", name)
    x = helper.variable(input, "input")
    layout = helper.layout(data_layout, "data_layout")
    channels = helper.known(x, "input", 1 if layout == "NCHW" else x.ndim - 1)
    groups = whole(helper.label, "groups", groups, 1)
    if channels % groups:
        raise wrong(f"{helper.label}: {channels} channels do not divide into {groups} groups")
    w = helper.parameter(param_attr, (channels,), _wide(x.dtype), default=Constant(1.0))
    b = helper.parameter(bias_attr, (channels,), _wide(x.dtype), is_bias=True)
    y, *_ = helper.op("group_norm", x, w, b, groups=groups, epsilon=number(helper.label, "epsilon", epsilon), data_layout=layout)
    return helper.activate(y, act)


def instance_norm(
    input: Variable, epsilon: float = 1e-5, param_attr: Any = None, bias_attr: Any = None, name: str | None = None
) -> Variable:
    """Normalization of each channel of each sample; scale and bias are vectors over the channels (False leaves one out)."""
    helper = LayerWriter("instance_norm", name)
    x = helper.variable(input, "input")
    channels = helper.known(x, "input", 1)
    w = helper.parameter(param_attr, (channels,), _wide(x.dtype), default=Constant(1.0))
    b = helper.parameter(bias_attr, (channels,), _wide(x.dtype), is_bias=True)
    y, *_ = helper.op("instance_norm", x, w, b, epsilon=number(helper.label, "epsilon", epsilon))
    return y


def cos_sim(X: Variable, Y: Variable) -> Variable:
    """The cosine of the angle between each row of X [n, d] and that of Y, [n, d] or [1, d], as [n, 1].

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()):
    ...     x, y = fx.data("x", [None, 2], "float32"), fx.data("y", [None, 2], "float32")
    ...     similar = fx.layers.cos_sim(x, y)
    >>> feed = {"x": np.float32([[3, 4], [1, 0]]), "y": np.float32([[3, 4], [0, 2]])}
    >>> fx.Executor().run(main, feed=feed, fetch_list=[similar])[0].tolist()
    [[1.0], [0.0]]
    """
    helper = LayerWriter("cos_sim")
    x, y = helper.variable(X, "X"), helper.variable(Y, "Y")
    helper.rank(x, "X", 2)
    helper.rank(y, "Y", 2)
    product = helper.op("reduce_sum", helper.op("elementwise_mul", x, y), dim=(1,), keep_dim=True)
    lengths = [helper.op("sqrt", helper.op("reduce_sum", helper.op("square", v), dim=(1,), keep_dim=True)) for v in (x, y)]
    return helper.op("elementwise_div", product, helper.op("elementwise_mul", *lengths))


def lrn(
    input: Variable, n: int = 5, k: float = 1.0, alpha: float = 1e-4, beta: float = 0.75, name: str | None = None, data_format: str = "NCHW"
) -> Variable:
    """Local response normalization over `n` neighbouring channels of [n, c, h, w]: x / (k + alpha * sum of squares) ** beta."""
    helper = LayerWriter("lrn", name)
    x = helper.variable(input, "input")
    helper.rank(x, "input", 4)
    if helper.layout(data_format) == "NHWC":
        raise wrong(f"{helper.label}: data_format='NHWC' is not supported; transpose the input to NCHW")
    numbers: dict[str, Any] = {key: number(helper.label, key, v) for key, v in (("k", k), ("alpha", alpha), ("beta", beta))}
    y, _ = helper.op("lrn", x, n=whole(helper.label, "n", n, 1), **numbers)
    return y


def _axis_or_only(helper: LayerWriter, what: str, value: Any, x: Variable) -> int:
    return helper.axis(x, 0 if x.ndim == 1 else value, what)


# fmt: off
l2_normalize = row(
    "l2_normalize(x, axis: int, epsilon=1e-12, name=None)",
    "x divided by its L2 norm along an axis: x / sqrt(sum(x * x) + epsilon).", "norm", result=0, axis=_axis_or_only,
)
# fmt: on

__all__ = ["batch_norm", "cos_sim", "group_norm", "instance_norm", "l2_normalize", "layer_norm", "lrn", "rms_norm"]
