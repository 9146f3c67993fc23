"""Layers of neural networks other than convolutions and normalizations: fc, embedding, matrix products, dropout, softmax, attention,
padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import number, one_of, whole, wholes, wrong
from ..initializer import derive_seed
from ..ir import Variable, as_dtype
from .helper import LayerWriter
from .layer_from_signature import among, at_least, axis_as_given, layout_of, ranked, row, sized

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

    The axes of input before `num_flatten_dims` stay. The others are flattened into one axis, which is multiplied by w of shape [their
    product, size]. Several inputs have one weight each, and their products are added up; `param_attr` may be a list then.

    Shapes: input [n, ...] gives [n, size]; with num_flatten_dims=2 input [n, t, ...] gives [n, t, size].

    Types: input is of floats, and so are w, the bias and the result.

    Raises ProgramError if a flattened axis is open, or if `num_flatten_dims` leaves no axis on one side.

    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     fx.layers.fc(fx.data("x", [-1, 64], "float32"), 128, act="relu")
    <Variable fc_0.tmp_2: f32[-1,128]>
    >>> main.all_parameters()
    [<Parameter fc_0.w_0: f32[64,128], persistable>, <Parameter fc_0.b_0: f32[128], persistable>]
    """
    helper = LayerWriter("fc", name)
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
    """The rows of a trained [vocabulary, width] table at the integer ids in `input`.

    A last axis of size 1 is replaced by the width ([batch, 1] gives [batch, width]); otherwise a width axis is appended ([batch, length]
    gives [batch, length, width]). The row `padding_idx` is read as zeros and is not trained. `is_sparse` and `is_distributed` have no
    effect: gradients are dense.

    Types: ids are int64 or int32; the table and the result are of `dtype`.

    Raises ProgramError for ids of another dtype, and if `padding_idx` is not a row of the table.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.embedding(fx.data("ids", [-1, 7, 1], "int64"), [1000, 16])
    <Variable embedding_0.tmp_0: f32[-1,7,16]>
    """
    return _embedding(LayerWriter("embedding"), input, size, padding_idx, param_attr, dtype, drop=True)


def fluid_embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Variable:
    """The rows of a trained [vocabulary, width] table at the integer ids in `input`, along an appended axis.

    This is `fluidx.embedding`: [batch, 1] gives [batch, 1, width], where `layers.embedding` gives [batch, width].

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.embedding(fx.data("ids", [-1, 1], "int64"), [1000, 16])
    <Variable embedding_0.tmp_0: f32[-1,1,16]>
    """
    return _embedding(LayerWriter("embedding", label="embedding"), input, size, padding_idx, param_attr, dtype, drop=False)


def _embedding(
    helper: LayerWriter, input: Variable, size: Sequence[int], padding_idx: int | None, param_attr: Any, dtype: Any, drop: bool
) -> Variable:
    ids = helper.variable(input, "input")
    if ids.dtype not in ("int32", "int64"):
        raise wrong(f"{helper.label}: input must hold int64 or int32 ids; variable {ids.name!r} is {ids.dtype}")
    if isinstance(size, int):
        raise wrong(f"{helper.label}: size must be two integers, [vocabulary, width], got {size}")
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
    """Does `x` have a last axis of size 1, which fluid.layers drops?"""
    return x.ndim >= 2 and x.shape[-1] == 1


# -- dropout, softmax and the rest ---------------------------------------------------------------------------------------------


def dropout(
    x: Variable,
    dropout_prob: float,
    is_test: bool = False,
    seed: int | None = None,
    name: str | None = None,
    dropout_implementation: str = "downgrade_in_infer",
) -> Variable:
    """x with each element set to 0 with probability `dropout_prob`, drawn again in each run.

    "downgrade_in_infer" multiplies by 1 - dropout_prob in inference; "upscale_in_train" divides by it in training (ONNX's way). Without a
    seed, one is derived from the program's random_seed and the variable's name. Ranks with slices of a batch draw the slices of one
    device's random numbers.

    Shapes: the result has x's shape.

    Types: x is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError when `dropout_prob` is not from 0 to 1.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.dropout(fx.data("x", [-1, 8], "float32"), 0.5)
    <Variable dropout_0.tmp_0: f32[-1,8]>
    """
    helper = LayerWriter("dropout", name)
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
    each shared by neighbouring heads of q (grouped queries). `mask` broadcasts to [..., heads, s, t]: a float mask is added to the scores,
    and False in a bool mask hides the position. With `causal`, row i also sees only the first i + 1 rows of k, whatever s and t are. A row
    that sees no position gives zeros. There is no dropout of weights; `nets.scaled_dot_product_attention` has it.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     q, k = fx.data("q", [-1, 8, 10, 64], "float32"), fx.data("k", [-1, 2, 20, 64], "float32")
    ...     fx.layers.scaled_dot_product_attention(q, k, k)
    <Variable scaled_dot_product_attention_0.tmp_0: f32[-1,8,10,64]>
    """
    helper = LayerWriter("scaled_dot_product_attention", name)
    operands = [helper.variable(x, what) for what, x in (("q", q), ("k", k), ("v", v))]
    if operands[0].ndim < 2:
        raise wrong(f"{helper.label}: q must have 2 axes or more; variable {operands[0].name!r} has shape {list(operands[0].shape)}")
    by = helper.known(operands[0], "q", -1) ** -0.5 if scale is None else number(helper.label, "scale", scale)
    masked = None if mask is None else helper.variable(mask, "mask")
    out, _ = helper.op("scaled_dot_product_attention", *operands, masked, scale=by, causal=bool(causal))
    return out


def log_softmax(input: Variable, axis: int = -1, dtype: Any = None, name: str | None = None) -> Variable:
    """log(softmax(x)) along an axis, computed without overflow; x is cast to `dtype` first when that is given.

    Shapes: the result has input's shape.

    Types: input is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError when input has no axis `axis`.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.log_softmax(fx.data("x", [-1, 10], "float32"))
    <Variable log_softmax_0.tmp_0: f32[-1,10]>
    """
    helper = LayerWriter("log_softmax", name)
    x = helper.variable(input, "input")
    if dtype is not None and as_dtype(dtype) != x.dtype:
        x = helper.op("cast", x, dtype=as_dtype(dtype))
    helper.axis(x, axis)
    return helper.op("log_softmax", x, axis=axis)


def one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """Rows of zeros with a 1 at the index given by the integers in `input`, as float32.

    A last axis of size 1 is replaced by `depth`; otherwise an axis of size `depth` is appended. With `allow_out_of_range`, an index outside
    [0, depth) gives a row of zeros.

    Shapes: [n, 1] gives [n, depth], and [n, t] gives [n, t, depth].

    Types: input is int64 or int32, the result float32.

    Raises ProgramError for input of another dtype, and ExecutionError in a run with an index out of range, unless `allow_out_of_range`.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.one_hot(fx.data("label", [-1, 1], "int64"), 10)
    <Variable one_hot_0.tmp_0: f32[-1,10]>
    """
    return _one_hot(LayerWriter("one_hot"), input, depth, allow_out_of_range, drop=True)


def fluid_one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """Rows of zeros with a 1 at the index given by the integers in `input`, along an appended axis, as float32.

    This is `fluidx.one_hot`: [batch, 1] gives [batch, 1, depth], where `layers.one_hot` gives [batch, depth].

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.one_hot(fx.data("label", [-1, 1], "int64"), 10)
    <Variable one_hot_v2_0.tmp_0: f32[-1,1,10]>
    """
    return _one_hot(LayerWriter("one_hot_v2", label="one_hot"), input, depth, allow_out_of_range, drop=False)


def _one_hot(helper: LayerWriter, input: Variable, depth: int, allow_out_of_range: bool, drop: bool) -> Variable:
    x = helper.variable(input, "input")
    depth = whole(helper.label, "depth", depth, 1)
    op_type = "one_hot" if drop and _ends_in_one(x) else "one_hot_v2"
    return helper.op(op_type, x, depth=depth, allow_out_of_range=bool(allow_out_of_range))


def label_smooth(
    label: Variable, prior_dist: Variable | None = None, epsilon: float = 0.1, dtype: Any = "float32", name: str | None = None
) -> Variable:
    """(1 - epsilon) * label + epsilon * prior, where the prior is uniform over the last axis unless given. The labels are one-hot."""
    helper = LayerWriter("label_smooth", name)
    label = helper.variable(label, "label")
    epsilon = number(helper.label, "epsilon", epsilon)
    if not 0.0 <= epsilon <= 1.0:
        raise wrong(f"{helper.label}: epsilon must be from 0 to 1, got {epsilon}")
    return helper.op("label_smooth", label, prior_dist, epsilon=epsilon)


def pad(x: Variable, paddings: Sequence[int], pad_value: float = 0.0, name: str | None = None) -> Variable:
    """x padded with `pad_value`: paddings are (before, after) for axis 0, then for axis 1, ...

    Shapes: axis i of size s becomes before + s + after.

    Types: x is of any dtype; the result has the same.

    Raises ProgramError if `paddings` does not have two entries for each axis.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.pad(fx.data("x", [2, 3], "float32"), [0, 1, 2, 2])
    <Variable pad_0.tmp_0: f32[3,7]>
    """
    helper = LayerWriter("pad", name)
    x = helper.variable(x, "x")
    sizes = wholes(helper.label, "paddings", paddings, least=0)
    if len(sizes) != 2 * x.ndim:
        raise wrong(f"{helper.label}: paddings must have {2 * x.ndim} entries for variable {x.name!r} with {x.ndim} axes, got {len(sizes)}")
    return helper.op("pad", x, paddings=sizes, pad_value=number(helper.label, "pad_value", pad_value))


# fmt: off
pad2d = row(
    "pad2d(input, paddings: Sequence[int] = (0, 0, 0, 0), mode='constant', pad_value=0.0, data_format='NCHW', name=None)",
    '[n, c, h, w] padded at (top, bottom, left, right) with a constant, its reflection ("reflect") or its edge ("edge").',
    input=ranked(4), paddings=sized(4), mode=among("constant", "reflect", "edge"), data_format=layout_of,
)

mul = row("mul(x, y, x_num_col_dims=1, y_num_col_dims=1, name=None)", """
    The matrix product of x and y, each flattened to a matrix at its `num_col_dims`; the result has the axes that remain.

    Shapes: x [n, k] and y [k, m] give [n, m]; with x_num_col_dims=2 x [n, t, k] gives [n, t, m].

    Types: x, y and the result have one dtype.

    Raises ProgramError if the number of columns of x differs from the number of rows of y.

    >>> fx.layers.mul(fx.data("x", [-1, 7, 4], "float32"), fx.data("y", [4, 2], "float32"), x_num_col_dims=2)
    <Variable mul_0.tmp_0: f32[-1,7,2]>
    """, x_num_col_dims=at_least(1), y_num_col_dims=at_least(1))

matmul = row("matmul(x, y, transpose_x=False, transpose_y=False, alpha=1.0, name=None)", """
    alpha * x @ y over the last two axes, the others broadcast; `transpose_x` and `transpose_y` swap those two axes first.

    Shapes: x [..., n, k] and y [..., k, m] give [..., n, m].

    Types: x, y and the result have one dtype.

    Raises ProgramError when the k of both differ, or the other axes do not broadcast.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     q = fx.data("q", [-1, 8, 16], "float32")
    ...     fx.layers.matmul(q, q, transpose_y=True, alpha=0.25)
    <Variable matmul_0.tmp_0: f32[-1,8,8]>
    """)

bmm = row("bmm(x, y, name=None)", """
    The matrix products of two batches: [b, n, k] and [b, k, m] give [b, n, m].

    Raises ProgramError if x or y does not have three axes, or if their sizes do not fit.
    """, "matmul", x=ranked(3), y=ranked(3))

softmax = row("softmax(input, use_cudnn=False, name=None, axis=-1)", """
    exp(x) / sum(exp(x)) along an axis; `use_cudnn` has no effect.

    Shapes: the result has input's shape.

    Types: input is float16, bfloat16, float32 or float64, and so is the result.

    Raises ProgramError when input has no axis `axis`.

    >>> fx.layers.softmax(fx.data("x", [-1, 10], "float32"))
    <Variable softmax_0.tmp_0: f32[-1,10]>
    """, unused=["use_cudnn"], axis=axis_as_given)
# fmt: on

__all__ = [
    "bmm", "dropout", "embedding", "fc", "label_smooth", "log_softmax", "matmul", "mul", "one_hot", "pad", "pad2d",
    "scaled_dot_product_attention", "softmax",
]  # fmt: skip
