"""The layers of neural networks: fc, convolutions, pooling, normalization, dropout, embedding, softmax, attention, matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from .._checks import number, one_of, unsupported, whole, wholes, wrong
from ..initializer import Constant, Normal, derive_seed
from ..ir import Variable, as_dtype
from ..param_attr import ParamAttr
from .helper import LayerHelper

# -- dense ---------------------------------------------------------------------------------------------------------------


def fc(
    input: Variable | Sequence[Variable],
    size: int,
    num_flatten_dims: int = 1,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """A fully connected layer: act(input @ w + b).

    The axes of input before `num_flatten_dims` stay, the others are flattened into the axis that w, of shape [their product, size],
    meets. Several inputs have a weight each, and their products are added up; `param_attr` may then be a list.

    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     fx.layers.fc(fx.data("x", [-1, 64], "float32"), 128, act="relu")
    <Variable fc_0.tmp_2: f32[-1,128]>
    >>> main.all_parameters()
    [<Parameter fc_0.w_0: f32[64,128], persistable>, <Parameter fc_0.b_0: f32[128], persistable>]
    """
    helper = LayerHelper("fc", name)
    xs = helper.variables(input, "input")
    size = whole(helper.label, "size", size, 1)
    dims = whole(helper.label, "num_flatten_dims", num_flatten_dims)
    attrs = list(param_attr) if isinstance(param_attr, list) else [param_attr] * len(xs)
    if len(attrs) != len(xs):
        raise wrong(f"{helper.label}: {len(xs)} inputs but {len(attrs)} param_attr were given")
    products = []
    for x, attr in zip(xs, attrs):
        at = x.ndim + dims if dims < 0 else dims
        if not 0 < at < x.ndim:
            raise wrong(
                f"{helper.label}: num_flatten_dims is {num_flatten_dims}; variable {x.name!r} with shape {list(x.shape)} "
                f"{f'allows 1 to {x.ndim - 1}' if x.ndim > 1 else 'has no axis left to flatten, it needs 2 or more'}"
            )
        rows = 1
        for axis in range(at, x.ndim):
            rows *= helper.known(x, "input", axis)
        w = helper.parameter(attr, (rows, size), x.dtype)
        if w is None:
            raise wrong(f"{helper.label}: param_attr=False leaves no weight")
        products.append(helper.op("mul", x, w, x_num_col_dims=at, y_num_col_dims=1))
    y = products[0] if len(products) == 1 else helper.op("sum", products)
    return helper.activate(helper.add_bias(y, bias_attr, size, axis=y.ndim - 1), act)


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Variable:
    """The rows of a trained [vocabulary, width] table that the integer ids in `input` name.

    A last axis of size 1 is replaced by the width ([batch, 1] gives [batch, width]); other ids get a width axis behind them
    ([batch, length] gives [batch, length, width]). The row `padding_idx` reads as zeros and is not trained. `is_sparse` and
    `is_distributed` have no effect: gradients are dense.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.embedding(fx.data("ids", [-1, 7, 1], "int64"), [1000, 16])
    <Variable embedding_0.tmp_0: f32[-1,7,16]>
    """
    return _embedding(LayerHelper("embedding"), input, size, padding_idx, param_attr, dtype, drop=True)


def fluid_embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Variable:
    """The rows of a trained [vocabulary, width] table that the integer ids in `input` name, along an axis behind those of input.

    This is `fluidx.embedding`: [batch, 1] gives [batch, 1, width], where `layers.embedding` gives [batch, width].

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.embedding(fx.data("ids", [-1, 1], "int64"), [1000, 16])
    <Variable embedding_0.tmp_0: f32[-1,1,16]>
    """
    return _embedding(LayerHelper("embedding", label="embedding"), input, size, padding_idx, param_attr, dtype, drop=False)


def _embedding(
    helper: LayerHelper, input: Variable, size: Sequence[int], padding_idx: int | None, param_attr: Any, dtype: Any, drop: bool
) -> Variable:
    ids = helper.variable(input, "input")
    if ids.dtype not in ("int32", "int64"):
        raise wrong(f"{helper.label}: input must hold int64 or int32 ids; variable {ids.name!r} is {ids.dtype}")
    rows, _ = wholes(helper.label, "size", size, 2, 1)
    pad = -1 if padding_idx is None else whole(helper.label, "padding_idx", padding_idx)
    if padding_idx is not None:
        if not -rows <= pad < rows:
            raise wrong(f"{helper.label}: padding_idx is {pad}; the table has {rows} rows")
        pad %= rows
    table = helper.parameter(param_attr, tuple(size), dtype)
    if table is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no table")
    return helper.op("lookup_table" if drop and _ends_in_one(ids) else "lookup_table_v2", table, ids, padding_idx=pad)


def _ends_in_one(x: Variable) -> bool:
    """Whether the last axis of `x` is there for form only, as fluid.layers has it."""
    return x.ndim >= 2 and x.shape[-1] == 1


def mul(x: Variable, y: Variable, x_num_col_dims: int = 1, y_num_col_dims: int = 1, name: str | None = None) -> Variable:
    """The matrix product of x and y, each flattened to a matrix at its `num_col_dims`; the result has the axes that remain."""
    helper = LayerHelper("mul", name)
    dims = whole(helper.label, "x_num_col_dims", x_num_col_dims, 1), whole(helper.label, "y_num_col_dims", y_num_col_dims, 1)
    return helper.op("mul", helper.variable(x, "x"), helper.variable(y, "y"), x_num_col_dims=dims[0], y_num_col_dims=dims[1])


def matmul(
    x: Variable, y: Variable, transpose_x: bool = False, transpose_y: bool = False, alpha: float = 1.0, name: str | None = None
) -> Variable:
    """alpha * x @ y over the last two axes, the others broadcast; `transpose_x` and `transpose_y` swap those two axes first.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     q = fx.data("q", [-1, 8, 16], "float32")
    ...     fx.layers.matmul(q, q, transpose_y=True, alpha=0.25)
    <Variable matmul_0.tmp_0: f32[-1,8,8]>
    """
    helper = LayerHelper("matmul", name)
    x, y = helper.variable(x, "x"), helper.variable(y, "y")
    alpha = number(helper.label, "alpha", alpha)
    return helper.op("matmul", x, y, transpose_x=bool(transpose_x), transpose_y=bool(transpose_y), alpha=alpha)


def bmm(x: Variable, y: Variable, name: str | None = None) -> Variable:
    """The matrix products of two batches: [b, n, k] and [b, k, m] give [b, n, m]."""
    helper = LayerHelper("bmm", name)
    x, y = helper.variable(x, "x"), helper.variable(y, "y")
    helper.rank(x, "x", 3)
    helper.rank(y, "y", 3)
    return helper.op("matmul", x, y)


# -- convolution ------------------------------------------------------------------------------------------------------------


def _paddings(helper: LayerHelper, padding: Any, layout: str) -> dict[str, Any]:
    """fluid's forms of a padding as attributes: (height, width) or (top, bottom, left, right), and the algorithm."""
    if isinstance(padding, str):
        return {"padding_algorithm": one_of(helper.label, "padding", padding.upper(), ("SAME", "VALID"))}
    if isinstance(padding, (list, tuple)) and len(padding) == 4 and all(isinstance(p, (list, tuple)) for p in padding):
        pairs = [wholes(helper.label, f"padding[{i}]", p, 2, 0) for i, p in enumerate(padding)]
        image = pairs[2:] if layout == "NCHW" else pairs[1:3]
        if sum(map(sum, pairs)) != sum(map(sum, image)):
            raise wrong(f"{helper.label}: the batch and channel axes cannot be padded, got padding={padding!r}")
        padding = [*image[0], *image[1]]
    if isinstance(padding, (list, tuple)) and len(padding) == 4:
        top, bottom, left, right = wholes(helper.label, "padding", padding, least=0)
        return {"paddings": (top, left) if top == bottom and left == right else (top, bottom, left, right)}
    return {"paddings": wholes(helper.label, "padding", padding, 2, 0)}


def _layout(helper: LayerHelper, layout: str, name: str = "data_format") -> str:
    return "NCHW" if layout == "AnyLayout" else one_of(helper.label, name, layout, ("NCHW", "NHWC"))


def _groups(helper: LayerHelper, groups: int | None, channels: int, num_filters: int) -> int:
    groups = 1 if groups is None else whole(helper.label, "groups", groups, 1)
    if channels % groups or num_filters % groups:
        raise wrong(f"{helper.label}: {channels} channels and {num_filters} filters do not both divide into {groups} groups")
    return groups


def conv2d(
    input: Variable,
    num_filters: int,
    filter_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: Any = 0,
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Variable:
    """A 2-D convolution (cross-correlation, as in every framework) of [n, c, h, w] with [num_filters, c / groups, kh, kw], plus a bias.

    `padding` is one size, (height, width), (top, bottom, left, right), fluid's list of pairs, "SAME" or "VALID". With as many groups
    as channels it is a depthwise convolution. Weights start as Normal(0, sqrt(2 / (kh * kw * c))). `use_cudnn` has no effect.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.conv2d(fx.data("x", [-1, 1, 28, 28], "float32"), 20, 5, act="relu")
    <Variable conv2d_0.tmp_2: f32[-1,20,24,24]>
    """
    helper = LayerHelper("conv2d", name)
    x = helper.variable(input, "input")
    layout = _layout(helper, data_format)
    helper.rank(x, "input", 4)
    channel_axis = 1 if layout == "NCHW" else 3
    channels = helper.known(x, "input", channel_axis)
    num_filters = whole(helper.label, "num_filters", num_filters, 1)
    kernel = wholes(helper.label, "filter_size", filter_size, 2, 1)
    strides = wholes(helper.label, "stride", stride, 2, 1)
    dilations = wholes(helper.label, "dilation", dilation, 2, 1)
    groups = _groups(helper, groups, channels, num_filters)
    padded = _paddings(helper, padding, layout)
    spread = (2.0 / (kernel[0] * kernel[1] * channels)) ** 0.5
    w = helper.parameter(param_attr, (num_filters, channels // groups, *kernel), x.dtype, default=Normal(0.0, spread))
    if w is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no filter")
    op_type = "depthwise_conv2d" if groups == channels and groups > 1 else "conv2d"
    y = helper.op(op_type, x, w, strides=strides, dilations=dilations, groups=groups, data_format=layout, **padded)
    return helper.activate(helper.add_bias(y, bias_attr, num_filters, axis=channel_axis), act)


def conv2d_transpose(
    input: Variable,
    num_filters: int,
    output_size: int | Sequence[int] | None = None,
    filter_size: int | Sequence[int] | None = None,
    padding: Any = 0,
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_cudnn: bool = True,
    act: str | None = None,
    name: str | None = None,
    data_format: str = "NCHW",
) -> Variable:
    """The transposed convolution (the gradient of conv2d with respect to its input): [n, c, h, w] becomes [n, num_filters, h', w'].

    h' is (h - 1) * stride - 2 * padding + dilation * (kh - 1) + 1, or `output_size`, which may be up to stride - 1 larger. Give
    `filter_size` or `output_size`; the filter's size follows from the output's. `use_cudnn` has no effect.
    """
    helper = LayerHelper("conv2d_transpose", name)
    x = helper.variable(input, "input")
    layout = _layout(helper, data_format)
    helper.rank(x, "input", 4)
    channel_axis = 1 if layout == "NCHW" else 3
    channels = helper.known(x, "input", channel_axis)
    num_filters = whole(helper.label, "num_filters", num_filters, 1)
    strides = wholes(helper.label, "stride", stride, 2, 1)
    dilations = wholes(helper.label, "dilation", dilation, 2, 1)
    out = None if output_size is None else wholes(helper.label, "output_size", output_size, 2, 1)
    padded = _paddings(helper, padding, layout)
    if filter_size is not None:
        kernel = wholes(helper.label, "filter_size", filter_size, 2, 1)
    elif out is not None:
        if padded.get("padding_algorithm") == "SAME":
            raise wrong(f"{helper.label}: padding='SAME' does not say the size of the filter; give filter_size")
        p = padded.get("paddings", (0, 0))
        sides = [2 * p[0], 2 * p[1]] if len(p) == 2 else [p[0] + p[1], p[2] + p[3]]
        sizes = [helper.known(x, "input (to find filter_size)", a) for a in ((2, 3) if layout == "NCHW" else (1, 2))]
        kernel = tuple((o - (h - 1) * s + p - 1) // d + 1 for o, h, s, p, d in zip(out, sizes, strides, sides, dilations))
        if min(kernel) < 1:
            raise wrong(f"{helper.label}: output_size {list(out)} is too small for an input of {sizes} with stride {list(strides)}")
    else:
        raise wrong(f"{helper.label}: give filter_size or output_size")
    groups = _groups(helper, groups, channels, num_filters)
    w = helper.parameter(param_attr, (channels, num_filters // groups, *kernel), x.dtype)
    if w is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no filter")
    attrs = {"strides": strides, "dilations": dilations, "groups": groups, "output_size": out or (), "data_format": layout, **padded}
    y = helper.op("conv2d_transpose", x, w, **attrs)
    return helper.activate(helper.add_bias(y, bias_attr, num_filters, axis=channel_axis), act)


# -- pooling -------------------------------------------------------------------------------------------------------------------


def pool2d(
    input: Variable,
    pool_size: int | Sequence[int] = -1,
    pool_type: str = "max",
    pool_stride: int | Sequence[int] = 1,
    pool_padding: Any = 0,
    global_pooling: bool = False,
    use_cudnn: bool = True,
    ceil_mode: bool = False,
    name: str | None = None,
    exclusive: bool = True,
    data_format: str = "NCHW",
) -> Variable:
    """The maximum ("max") or mean ("avg") of windows of [n, c, h, w].

    `global_pooling` takes one window over all of h and w. `ceil_mode` counts windows that hang over the end; `exclusive` leaves the
    padding out of the mean. `use_cudnn` has no effect.
    """
    helper = LayerHelper("pool2d", name)
    x = helper.variable(input, "input")
    one_of(helper.label, "pool_type", pool_type, ("max", "avg"))
    layout = _layout(helper, data_format)
    helper.rank(x, "input", 4)
    if not global_pooling and isinstance(pool_size, int) and pool_size == -1:
        raise wrong(f"{helper.label}: give pool_size, or global_pooling=True for one window over the whole image")
    size = (1, 1) if global_pooling else wholes(helper.label, "pool_size", pool_size, 2, 1)
    strides = wholes(helper.label, "pool_stride", pool_stride, 2, 1)
    return helper.op(
        "pool2d",
        x,
        pooling_type=pool_type,
        ksize=size,
        strides=strides,
        data_format=layout,
        **({} if global_pooling else _paddings(helper, pool_padding, layout)),
        global_pooling=bool(global_pooling),
        ceil_mode=bool(ceil_mode),
        exclusive=bool(exclusive),
    )


def adaptive_pool2d(
    input: Variable, pool_size: int | Sequence[int], pool_type: str = "max", require_index: bool = False, name: str | None = None
) -> Variable:
    """The maximum or mean of windows chosen so that [n, c, h, w] becomes [n, c, *pool_size]. `require_index` is refused."""
    helper = LayerHelper("adaptive_pool2d", name)
    x = helper.variable(input, "input")
    one_of(helper.label, "pool_type", pool_type, ("max", "avg"))
    unsupported(helper.label, require_index=require_index)
    helper.rank(x, "input", 4)
    size = wholes(helper.label, "pool_size", pool_size, 2, 1)
    return helper.op("pool2d", x, pooling_type=pool_type, ksize=size, adaptive=True)


# -- normalization ----------------------------------------------------------------------------------------------------------------


def _wide(dtype: str) -> str:
    """The dtype of statistics and scales: float32 for the half precisions."""
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

    While training, mean and variance are the batch's, and the moving ones become momentum * moving + (1 - momentum) * batch's. With
    is_test (set by `Program.clone(for_test=True)`) or use_global_stats they are the moving ones. Scale and bias are `w_0` and `b_0`,
    the moving mean and variance `w_1` and `w_2`, parameters that are not trained. `in_place` has no effect.

    `sub_batches=g` is ghost batch normalization: while training, the batch is cut into g runs of rows, of B rows k*B//g to (k+1)*B//g,
    and each is normalized by its own mean and variance. The moving ones then take the mean over the runs of their means and variances, each
    run counted alike; a run without rows (a batch of fewer than g) does not count. One device and ranks compute the same: ranks whose
    number divides g hold whole runs and exchange nothing but the moving statistics; other numbers of ranks gather the batch. Source:
    Hoffer, Hubara and Soudry 2017, "Train longer, generalize better".

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
    helper = LayerHelper("batch_norm", name)
    x = helper.variable(input, "input")
    runs = whole(helper.label, "sub_batches", sub_batches, 1)
    layout = _layout(helper, data_layout, "data_layout")
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

    >>> import fluidx as fx
    >>> main = fx.Program()
    >>> with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
    ...     y = fx.layers.layer_norm(fx.data("x", [-1, 8, 16], "float32"), begin_norm_axis=2)
    >>> y.shape, [p.shape for p in main.all_parameters()]
    ((-1, 8, 16), [(16,), (16,)])
    """
    helper = LayerHelper("layer_norm", name)
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

    Scale, and bias if there is a `shift`, are vectors over the normalized elements, whose sizes must be known. Raises ProgramError unless
    input has floats and an axis before `begin_norm_axis`.

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
    helper = LayerHelper("rms_norm", name)
    x, axis, sizes = _rows(helper, input, begin_norm_axis)
    w = helper.parameter(param_attr, (prod(sizes),), _wide(x.dtype), default=Constant(1.0)) if scale else None
    y, _ = helper.op("rms_norm", x, w, begin_norm_axis=axis, epsilon=number(helper.label, "epsilon", epsilon))
    b = helper.parameter(bias_attr, (prod(sizes),), x.dtype, is_bias=True) if shift else None
    if b is not None:
        y = helper.op("elementwise_add", y, helper.op("reshape", b, shape=sizes), axis=axis)
    return helper.activate(y, act)


def _rows(helper: LayerHelper, input: Any, begin_norm_axis: int) -> tuple[Variable, int, tuple[int, ...]]:
    """A layer's input, the first axis that it normalizes over, and the sizes from there on."""
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
    """Normalization of each sample over groups of channels; scale and bias are vectors over the channels (False leaves one out)."""
    helper = LayerHelper("group_norm", name)
    x = helper.variable(input, "input")
    layout = _layout(helper, data_layout, "data_layout")
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
    helper = LayerHelper("instance_norm", name)
    x = helper.variable(input, "input")
    channels = helper.known(x, "input", 1)
    w = helper.parameter(param_attr, (channels,), _wide(x.dtype), default=Constant(1.0))
    b = helper.parameter(bias_attr, (channels,), _wide(x.dtype), is_bias=True)
    y, *_ = helper.op("instance_norm", x, w, b, epsilon=number(helper.label, "epsilon", epsilon))
    return y


def l2_normalize(x: Variable, axis: int, epsilon: float = 1e-12, name: str | None = None) -> Variable:
    """x divided by its L2 norm along an axis: x / sqrt(sum(x * x) + epsilon)."""
    helper = LayerHelper("l2_normalize", name)
    x = helper.variable(x, "x")
    axis = helper.axis(x, 0 if x.ndim == 1 else axis)
    y, _ = helper.op("norm", x, axis=axis, epsilon=number(helper.label, "epsilon", epsilon))
    return y


def lrn(
    input: Variable, n: int = 5, k: float = 1.0, alpha: float = 1e-4, beta: float = 0.75, name: str | None = None, data_format: str = "NCHW"
) -> Variable:
    """Local response normalization over `n` neighbouring channels of [n, c, h, w]: x / (k + alpha * sum of squares) ** beta."""
    helper = LayerHelper("lrn", name)
    x = helper.variable(input, "input")
    helper.rank(x, "input", 4)
    if _layout(helper, data_format) == "NHWC":
        raise wrong(f"{helper.label}: data_format='NHWC' is not supported; transpose the input to NCHW")
    numbers: dict[str, Any] = {key: number(helper.label, key, v) for key, v in (("k", k), ("alpha", alpha), ("beta", beta))}
    y, _ = helper.op("lrn", x, n=whole(helper.label, "n", n, 1), **numbers)
    return y


# -- dropout, softmax and the rest ---------------------------------------------------------------------------------------------


def dropout(
    x: Variable,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Variable:
    """x with each element set to 0 with probability `dropout_prob`, anew in every run.

    "downgrade_in_infer" multiplies by 1 - dropout_prob in inference; "upscale_in_train" divides by it in training (ONNX's way).
    Without a seed one is derived from the program's random_seed and the variable's name. Ranks that hold slices of a batch draw
    the slices of what one device would draw.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.dropout(fx.data("x", [-1, 8], "float32"), 0.5)
    <Variable dropout_0.tmp_0: f32[-1,8]>
    """
    helper = LayerHelper("dropout", name)
    x = helper.variable(x, "x")
    p = number(helper.label, "dropout_prob", dropout_prob)
    if not 0.0 <= p <= 1.0:
        raise wrong(f"{helper.label}: dropout_prob must be from 0 to 1, got {dropout_prob}")
    one_of(helper.label, "dropout_implementation", dropout_implementation, ("downgrade_in_infer", "upscale_in_train"))
    result = helper.fresh()
    chosen = whole(helper.label, "seed", seed or 0, 0) or derive_seed(helper.main, result)
    attrs: dict[str, Any] = {"dropout_prob": p, "is_test": bool(is_test), "seed": chosen, "dropout_implementation": dropout_implementation}
    y, *_ = helper.op("dropout", x, out={"Out": result}, **attrs)
    return y


def softmax(input: Variable, use_cudnn: bool = False, name: str | None = None, axis: int = -1) -> Variable:
    """exp(x) / sum(exp(x)) along an axis; `use_cudnn` has no effect."""
    helper = LayerHelper("softmax", name)
    x = helper.variable(input, "input")
    helper.axis(x, axis)
    return helper.op("softmax", x, axis=axis)


def scaled_dot_product_attention(
    q: Variable,
    k: Variable,
    v: Variable,
    mask: Variable | None = None,
    causal: bool = False,
    scale: float | None = None,
    name: str | None = None,
) -> Variable:
    """softmax(q @ k' * scale + mask) @ v for each head, without keeping the scores; `scale` is 1 / sqrt(width of q) if left out.

    q is [..., heads, s, d], k [..., heads, t, d] and v [..., heads, t, e]; the result is [..., heads, s, e]. k and v may have fewer heads,
    each for as many neighbours of q (grouped queries). `mask` broadcasts to [..., heads, s, t]: numbers are added to the scores, and where
    a bool is False a row does not look. With `causal` row i looks at the first i + 1 rows of k, whatever s and t are, besides what the mask
    says. A row that may look nowhere gives zeros. Weights cannot be dropped at random here; `nets.scaled_dot_product_attention` can.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     q, k = fx.data("q", [-1, 8, 10, 64], "float32"), fx.data("k", [-1, 2, 20, 64], "float32")
    ...     fx.layers.scaled_dot_product_attention(q, k, k)
    <Variable scaled_dot_product_attention_0.tmp_0: f32[-1,8,10,64]>
    """
    helper = LayerHelper("scaled_dot_product_attention", name)
    operands = [helper.variable(x, what) for what, x in (("q", q), ("k", k), ("v", v))]
    if operands[0].ndim < 2:
        raise wrong(f"{helper.label}: q must have 2 axes or more; variable {operands[0].name!r} has shape {list(operands[0].shape)}")
    by = helper.known(operands[0], "q", -1) ** -0.5 if scale is None else number(helper.label, "scale", scale)
    masked = None if mask is None else helper.variable(mask, "mask")
    out, _ = helper.op("scaled_dot_product_attention", *operands, masked, scale=by, causal=bool(causal))
    return out


def log_softmax(input: Variable, axis: int = -1, dtype: Any = None, name: str | None = None) -> Variable:
    """log(softmax(x)) along an axis, computed without overflow; x is cast to `dtype` first when that is given."""
    helper = LayerHelper("log_softmax", name)
    x = helper.variable(input, "input")
    if dtype is not None and as_dtype(dtype) != x.dtype:
        x = helper.op("cast", x, dtype=as_dtype(dtype))
    helper.axis(x, axis)
    return helper.op("log_softmax", x, axis=axis)


def one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """Rows of zeros with a 1 at the index that the integers in `input` give, as float32.

    A last axis of size 1 is replaced by `depth`; other inputs get an axis of `depth` behind them. `allow_out_of_range` makes a row of
    zeros of an index outside [0, depth).
    """
    return _one_hot(LayerHelper("one_hot"), input, depth, allow_out_of_range, drop=True)


def fluid_one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """Rows of zeros with a 1 at the index that the integers in `input` give, along an axis behind those of input, as float32.

    This is `fluidx.one_hot`: [batch, 1] gives [batch, 1, depth], where `layers.one_hot` gives [batch, depth].

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.one_hot(fx.data("label", [-1, 1], "int64"), 10)
    <Variable one_hot_v2_0.tmp_0: f32[-1,1,10]>
    """
    return _one_hot(LayerHelper("one_hot_v2", label="one_hot"), input, depth, allow_out_of_range, drop=False)


def _one_hot(helper: LayerHelper, input: Variable, depth: int, allow_out_of_range: bool, drop: bool) -> Variable:
    x = helper.variable(input, "input")
    depth = whole(helper.label, "depth", depth, 1)
    op_type = "one_hot" if drop and _ends_in_one(x) else "one_hot_v2"
    return helper.op(op_type, x, depth=depth, allow_out_of_range=bool(allow_out_of_range))


def label_smooth(
    label: Variable, prior_dist: Variable | None = None, epsilon: float = 0.1, dtype: Any = "float32", name: str | None = None
) -> Variable:
    """(1 - epsilon) * label + epsilon * prior, where the prior is uniform over the last axis unless given. The labels are one-hot."""
    helper = LayerHelper("label_smooth", name)
    label = helper.variable(label, "label")
    epsilon = number(helper.label, "epsilon", epsilon)
    if not 0.0 <= epsilon <= 1.0:
        raise wrong(f"{helper.label}: epsilon must be from 0 to 1, got {epsilon}")
    return helper.op("label_smooth", label, prior_dist, epsilon=epsilon)


def pad(x: Variable, paddings: Sequence[int], pad_value: float = 0.0, name: str | None = None) -> Variable:
    """x with `pad_value` around it: paddings are (before, after) for axis 0, then for axis 1, ..."""
    helper = LayerHelper("pad", name)
    x = helper.variable(x, "x")
    sizes = wholes(helper.label, "paddings", paddings, least=0)
    if len(sizes) != 2 * x.ndim:
        raise wrong(f"{helper.label}: paddings must have {2 * x.ndim} entries for variable {x.name!r} with {x.ndim} axes, got {len(sizes)}")
    return helper.op("pad", x, paddings=sizes, pad_value=number(helper.label, "pad_value", pad_value))


def pad2d(
    input: Variable,
    paddings: Sequence[int] = (0, 0, 0, 0),
    mode: str = "constant",
    pad_value: float = 0.0,
    data_format: str = "NCHW",
    name: str | None = None,
) -> Variable:
    """[n, c, h, w] padded at (top, bottom, left, right) with a constant, its reflection ("reflect") or its edge ("edge")."""
    helper = LayerHelper("pad2d", name)
    x = helper.variable(input, "input")
    one_of(helper.label, "mode", mode, ("constant", "reflect", "edge"))
    layout = _layout(helper, data_format)
    helper.rank(x, "input", 4)
    sizes = wholes(helper.label, "paddings", paddings, 4, 0)
    return helper.op("pad2d", x, paddings=sizes, mode=mode, pad_value=number(helper.label, "pad_value", pad_value), data_format=layout)


__all__ = [
    "adaptive_pool2d", "batch_norm", "bmm", "conv2d", "conv2d_transpose", "dropout", "embedding", "fc", "group_norm", "instance_norm",
    "l2_normalize", "label_smooth", "layer_norm", "log_softmax", "lrn", "matmul", "mul", "one_hot", "pad", "pad2d", "pool2d", "rms_norm",
    "scaled_dot_product_attention", "softmax",
]  # fmt: skip
