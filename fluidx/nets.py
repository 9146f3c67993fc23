"""Small networks that fluid offers ready-made: convolution with pooling, gated linear units, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import layers
from ._checks import number, whole, wrong
from .fluid_names import module_getattr
from .ir import Variable
from .layers.helper import LayerWriter

__all__ = ["glu", "img_conv_group", "scaled_dot_product_attention", "simple_img_conv_pool"]
__getattr__ = module_getattr("nets", __all__)


def simple_img_conv_pool(
    input: Variable,
    num_filters: int,
    filter_size: int | Sequence[int],
    pool_size: int | Sequence[int],
    pool_stride: int | Sequence[int],
    pool_padding: Any = 0,
    pool_type: str = "max",
    global_pooling: bool = False,
    conv_stride: int | Sequence[int] = 1,
    conv_padding: Any = 0,
    conv_dilation: int | Sequence[int] = 1,
    conv_groups: int | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    act: str | None = None,
    use_cudnn: bool = True,
) -> Variable:
    """conv2d and pool2d of [n, c, h, w].

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     fx.nets.simple_img_conv_pool(fx.data("x", [-1, 1, 28, 28], "float32"), 20, 5, 2, 2, act="relu").shape
    (-1, 20, 12, 12)
    """
    x = layers.conv2d(
        input, num_filters, filter_size, conv_stride, conv_padding, conv_dilation, conv_groups, param_attr, bias_attr, act=act
    )
    return layers.pool2d(x, pool_size, pool_type, pool_stride, pool_padding, global_pooling)


def img_conv_group(
    input: Variable,
    conv_num_filter: Sequence[int],
    pool_size: int | Sequence[int],
    conv_padding: Any = 1,
    conv_filter_size: Any = 3,
    conv_act: str | None = None,
    param_attr: Any = None,
    conv_with_batchnorm: Any = False,
    conv_batchnorm_drop_rate: Any = 0.0,
    pool_stride: int | Sequence[int] = 1,
    pool_type: str = "max",
    use_cudnn: bool = True,
) -> Variable:
    """Several convolutions, each with batch_norm and dropout if asked for, then one pool2d: a stage of VGG.

    The arguments of the convolutions are one value for all, or a list with one for each number in `conv_num_filter`.
    """
    if not isinstance(conv_num_filter, (list, tuple)) or not conv_num_filter:
        raise wrong(f"nets.img_conv_group: conv_num_filter must be a list of filter counts, got {conv_num_filter!r}")
    n = len(conv_num_filter)

    def each(name: str, value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)):
            return [value] * n
        if len(value) != n:
            raise wrong(f"nets.img_conv_group: {name} has {len(value)} entries for {n} convolutions")
        return list(value)

    paddings, sizes = each("conv_padding", conv_padding), each("conv_filter_size", conv_filter_size)
    attrs, norms = each("param_attr", param_attr), each("conv_with_batchnorm", conv_with_batchnorm)
    drops = each("conv_batchnorm_drop_rate", conv_batchnorm_drop_rate)
    x = input
    for i, filters in enumerate(conv_num_filter):
        x = layers.conv2d(x, filters, sizes[i], padding=paddings[i], param_attr=attrs[i], act=None if norms[i] else conv_act)
        if norms[i]:
            x = layers.batch_norm(x, act=conv_act)
            if drops[i] > 1e-8:
                x = layers.dropout(x, dropout_prob=drops[i])
    return layers.pool2d(x, pool_size, pool_type, pool_stride)


def glu(input: Variable, dim: int = -1) -> Variable:
    """A gated linear unit (Dauphin et al., 2016): the first half along an axis times the sigmoid of the second."""
    a, b = layers.split(input, 2, dim)
    return layers.elementwise_mul(a, layers.sigmoid(b))


def scaled_dot_product_attention(
    queries: Variable, keys: Variable, values: Variable, num_heads: int = 1, dropout_rate: float = 0.0
) -> Variable:
    """softmax(q @ k' / sqrt(d)) @ v for each head (Vaswani et al., 2017), without projections of a single head.

    queries are [n, lq, d], keys [n, lk, d], values [n, lk, dv]; the result is [n, lq, dv]. With more than one head each of the three is
    projected by an fc without bias first, as in fluid, and d and dv divide by the number of heads. With a `dropout_rate` the weights are
    kept, to be dropped at random; without, `layers.scaled_dot_product_attention` does the work.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()):
    ...     q = fx.data("q", [-1, 10, 64], "float32")
    ...     fx.nets.scaled_dot_product_attention(q, q, q, num_heads=8).shape
    (-1, 10, 64)
    """
    owner = "nets.scaled_dot_product_attention"
    helper = LayerWriter("scaled_dot_product_attention")
    heads = whole(owner, "num_heads", num_heads, 1)
    rate = number(owner, "dropout_rate", dropout_rate)
    for what, x in (("queries", queries), ("keys", keys), ("values", values)):
        helper.rank(helper.variable(x, what), what, 3)
    width, v_width = helper.known(queries, "queries", 2), helper.known(values, "values", 2)
    if keys.shape[2] != width:
        raise wrong(f"{owner}: queries and keys must have one width, got {width} and {keys.shape[2]}")
    if keys.shape[1] != values.shape[1]:
        raise wrong(f"{owner}: keys and values must have one length, got {keys.shape[1]} and {values.shape[1]}")
    if width % heads or v_width % heads:
        raise wrong(f"{owner}: widths {width} and {v_width} do not both divide into {heads} heads")

    def split(x: Variable) -> Variable:
        if heads == 1:
            return x
        x = layers.fc(x, x.shape[2], num_flatten_dims=2, bias_attr=False)
        return layers.transpose(layers.reshape(x, [0, 0, heads, x.shape[2] // heads]), [0, 2, 1, 3])

    q, k, v = split(queries), split(keys), split(values)
    if rate:
        weights = layers.softmax(layers.matmul(q, k, transpose_y=True, alpha=float((width // heads) ** -0.5)))
        context = layers.matmul(layers.dropout(weights, dropout_prob=rate), v)
    else:
        context = layers.scaled_dot_product_attention(q, k, v)
    if heads == 1:
        return context
    return layers.reshape(layers.transpose(context, [0, 2, 1, 3]), [0, 0, v_width])
