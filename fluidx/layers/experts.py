"""The layer `moe`, a mixture of experts: each token passes through one or two of many experts."""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from .._checks import number, whole, wrong
from ..initializer import Xavier
from ..ir import Parameter, Variable
from ..param_attr import ParamAttr
from . import math, nn, tensor
from .helper import LayerWriter


def moe(
    x: Variable,
    num_experts: int,
    hidden_size: int,
    top_k: int = 1,
    capacity_factor: float = 1.25,
    capacity: int | None = None,
    act: str | None = "relu",
    gate_attr: Any = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> tuple[Variable, Variable]:
    """A mixture of experts: each token of x passes through the `top_k` (1 or 2) of `num_experts` experts with the highest gate probability.

    An expert is act(token @ w1 + b1) @ w2 + b2 with `hidden_size` hidden columns. The gate weights its results: for top_k=1 by the softmax
    over the experts (Switch), for 2 by the two probabilities divided by their sum (GShard). Returns the result, of x's type, and the [1]
    load-balancing loss: num_experts * the sum over experts of (share of first choices * mean probability). Add it to the training loss with
    a small factor.

    x [batch, tokens, d] is routed sequence by sequence: each expert takes up to `capacity` tokens of a sequence, by default capacity_factor
    * top_k * tokens / num_experts, rounded up. x [tokens, d] has one queue for all tokens. An expert adds nothing to a token beyond its
    capacity. Queues do not depend on the ranks, so neither do the results: sequences sharded over ranks are routed on their rank.

    The weights are [num_experts, d, hidden_size] and [num_experts, hidden_size, d]; `param_attr` is for both, or a list of two. With
    `placement=Shard(0, "ep")` each rank of mesh axis `ep` has some experts and their biases. If sequences are sharded over `ep` too
    (`Shard(0, "dp")`, or `layers.shard`), one all_to_all moves tokens to the experts and one moves them back; if all ranks of `ep` have the
    tokens, an all_reduce adds up the results. A single queue of sharded tokens gathers the choices, [tokens, top_k] integers, and a
    reduce_scatter adds up the slots of all ranks.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     fx.layers.moe(fx.data("x", [-1, 16, 8], "float32"), num_experts=4, hidden_size=32)
    (<Variable moe_0.tmp_11: f32[-1,16,8]>, <Variable scale_0.tmp_0: f32[1]>)
    """
    helper = LayerWriter("moe", name)
    x = helper.variable(x, "x")
    helper.rank(x, "x", 2, 3)
    experts, hidden = whole(helper.label, "num_experts", num_experts, 1), whole(helper.label, "hidden_size", hidden_size, 1)
    width, k = helper.known(x, "x", -1), whole(helper.label, "top_k", top_k, 1)
    if k > min(2, experts):
        raise wrong(f"{helper.label}: top_k must be 1 or 2 and at most the {experts} experts, got {k}")
    slots = _capacity(helper, x, experts, k, capacity_factor, capacity)

    gate = helper.parameter(gate_attr, (width, experts), x.dtype)
    if gate is None:
        raise wrong(f"{helper.label}: gate_attr=False leaves no gate")
    probabilities = helper.op("softmax", helper.op("mul", x, gate, x_num_col_dims=x.ndim - 1))
    weight, ids = helper.op("top_k", probabilities, k=k)
    if k > 1:
        weight = helper.op("elementwise_div", weight, math.reduce_sum(weight, dim=-1, keep_dim=True))
    balance = _balance(probabilities, ids, experts)
    position = helper.op("expert_queue", ids)

    attrs = list(param_attr) if isinstance(param_attr, (list, tuple)) else [param_attr] * 2
    if len(attrs) != 2:
        raise wrong(f"{helper.label}: param_attr must be one for both weights or a list of two, got {len(attrs)}")
    w1 = _weights(helper, attrs[0], (experts, width, hidden), x.dtype)
    w2 = _weights(helper, attrs[1], (experts, hidden, width), x.dtype)
    over = [e for e in w1.desc.placement if e.axis == 0]
    cut: dict[str, Any] = {"groups": tuple([e.group for e in over]), "axes": (0,) * len(over), "units": tuple([e.unit for e in over])}

    routed = helper.op("expert_dispatch", x, ids, position, None, w1, capacity=slots)
    h = helper.op("shard", routed, None, **cut) if over else routed
    h = tensor.reshape(h, [experts, -1, width])
    h = _linear(helper, helper.activate(_linear(helper, h, w1, bias_attr), act), w2, bias_attr)
    h = tensor.reshape(h, [experts, *([-1] if x.ndim == 3 else []), slots, width])
    h = helper.op("shard", h, routed, **cut) if over else h  # back to the ranks of the tokens
    return helper.op("expert_combine", h, ids, position, weight), balance


def _capacity(helper: LayerWriter, x: Variable, experts: int, k: int, factor: Any, capacity: Any) -> int:
    """The capacity of an expert for each queue of tokens."""
    if capacity is not None:
        return whole(helper.label, "capacity", capacity, 1)
    factor = number(helper.label, "capacity_factor", factor)
    if not 0 < factor < inf:
        raise wrong(f"{helper.label}: capacity_factor must be a finite number above 0, got {factor}")
    if x.shape[-2] < 0:
        raise wrong(
            f"{helper.label}: x {list(x.shape)} has one queue of an open number of tokens, so capacity_factor determines no size; "
            "pass capacity=, or x as [batch, tokens, d], whose sequences have queues of their own"
        )
    return max(1, ceil(factor * k * x.shape[-2] / experts))


def _balance(probabilities: Variable, ids: Variable, experts: int) -> Variable:
    """The load-balancing loss: experts * the sum of (share of first choices * mean probability) over all tokens."""
    axes = list(range(probabilities.ndim - 1))
    first = nn.one_hot(tensor.slice(ids, [ids.ndim - 1], [0], [1]), experts)
    share = math.reduce_mean(tensor.cast(first, probabilities.dtype), dim=axes)
    share.stop_gradient = True
    return math.scale(math.reduce_sum(math.elementwise_mul(math.reduce_mean(probabilities, dim=axes), share)), scale=float(experts))


def _weights(helper: LayerWriter, attr: Any, shape: tuple[int, int, int], dtype: str) -> Parameter:
    """A weight matrix for each expert, initialized like a single matrix."""
    w = helper.parameter(attr, shape, dtype, default=Xavier(fan_in=shape[1], fan_out=shape[2]))
    if w is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no weights")
    return w


def _linear(helper: LayerWriter, h: Variable, w: Parameter, bias_attr: Any) -> Variable:
    """h [experts, tokens, in] times a matrix for each expert, plus a bias row that is sharded like the columns of the matrices."""
    y, attr = helper.op("matmul", h, w), ParamAttr.of(bias_attr)
    if attr is None:
        return y
    if not attr.placement:
        attr = attr.cut(tuple([e for e in w.desc.placement if e.axis not in (None, 1)]))
    bias = helper.parameter(attr, (w.shape[0], 1, w.shape[2]), w.dtype, is_bias=True)
    return helper.op("elementwise_add", y, bias)


__all__ = ["moe"]
