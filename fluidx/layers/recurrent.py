"""Recurrent layers over sequences of equal length, unrolled step by step: cells, `rnn`, and lstm.

Sequences are padded, and `sequence_length` has their lengths. There are no LoD tensors, and none of fluid's layers over them (dynamic_lstm,
dynamic_gru); write `rnn(LSTMCell(size), x, sequence_length=lengths)` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from .._checks import number, one_of, whole, wrong
from ..initializer import Initializer
from ..ir import Variable
from ..ir.constants import elements
from ..param_attr import ParamAttr
from .helper import ACTIVATIONS, LayerWriter
from .nn import dropout

_GRU_ACTIVATIONS = ("sigmoid", "tanh", "relu", "identity")


def _parts(helper: LayerWriter, x: Variable, count: int) -> list[Variable]:
    """`count` equal parts of the last axis."""
    return list(helper.op("split", x, axis=x.ndim - 1, num=count, n_out=count))


def _gated(helper: LayerWriter, gate: Variable, past: Variable, new: Variable) -> Variable:
    """gate * past + (1 - gate) * new."""
    return helper.op("elementwise_add", new, helper.op("elementwise_mul", gate, helper.op("elementwise_sub", past, new)))


def _weight(helper: LayerWriter, attr: Any, shape: tuple[int, ...], dtype: str) -> Variable:
    w = helper.parameter(attr, shape, dtype)
    if w is None:
        raise wrong(f"{helper.label}: param_attr=False leaves no weight")
    return w


# -- one step -------------------------------------------------------------------------------------------------------------------


def lstm_unit(
    x_t: Variable,
    hidden_t_prev: Variable,
    cell_t_prev: Variable,
    forget_bias: float = 0.0,
    param_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> tuple[Variable, Variable]:
    """One step of an LSTM: (hidden, cell), each [n, size], of x_t [n, width] and the hidden and cell before.

    The gates are columns of one product of [x_t, hidden_t_prev]: input, forget (plus `forget_bias`), output, candidate.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x, h, c = (fx.data(name, [-1, size], "float32") for name, size in (("x", 3), ("h", 5), ("c", 5)))
    ...     [v.shape for v in fx.layers.lstm_unit(x, h, c)]
    [(-1, 5), (-1, 5)]
    """
    helper = LayerWriter("lstm_unit", name)
    x, h, c = (helper.variable(v, n) for v, n in ((x_t, "x_t"), (hidden_t_prev, "hidden_t_prev"), (cell_t_prev, "cell_t_prev")))
    for v, what in ((x, "x_t"), (h, "hidden_t_prev"), (c, "cell_t_prev")):
        helper.rank(v, what, 2)
    size, width = helper.known(c, "cell_t_prev", 1), helper.known(x, "x_t", 1)
    if h.shape[1] != size:
        raise wrong(f"{helper.label}: hidden_t_prev has {h.shape[1]} columns and cell_t_prev {size}; they must be equal")
    w = _weight(helper, param_attr, (width + size, 4 * size), x.dtype)
    gates = helper.add_bias(helper.op("matmul", helper.op("concat", [x, h], axis=1), w), bias_attr, 4 * size, axis=1)
    i, f, o, j = _parts(helper, gates, 4)
    return _lstm_step(helper, i, j, f, o, c, number(helper.label, "forget_bias", forget_bias))


def _lstm_step(
    helper: LayerWriter, i: Variable, j: Variable, f: Variable, o: Variable, c: Variable, forget_bias: float, gate: str = "sigmoid",
    act: str = "tanh",
) -> tuple[Variable, Variable]:  # fmt: skip
    """(hidden, cell) from the inputs of the input gate, the candidate, the forget gate and the output gate."""
    f = helper.op("scale", f, bias=forget_bias) if forget_bias else f
    kept = helper.op("elementwise_mul", c, helper.op(gate, f))
    c = helper.op("elementwise_add", kept, helper.op("elementwise_mul", helper.op(gate, i), helper.op(act, j)))
    return helper.op("elementwise_mul", helper.op(gate, o), helper.op(act, c)), c


def gru_unit(
    input: Variable,
    hidden: Variable,
    size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    activation: str = "tanh",
    gate_activation: str = "sigmoid",
    origin_mode: bool = False,
) -> tuple[Variable, Variable, Variable]:
    """One step of a GRU: (hidden, reset hidden, gates) of input [n, size], size = 3 * d, and hidden [n, d].

    `input` is the data's contribution to the update gate u, the reset gate r and the candidate m, such as the result of fc. The weight [d,
    3 * d] has the columns of u and r, then of m. hidden is (1 - u) * hidden + u * m, or u * hidden + (1 - u) * m with `origin_mode`.
    """
    helper = LayerWriter("gru_unit")
    x, h = helper.variable(input, "input"), helper.variable(hidden, "hidden")
    helper.rank(x, "input", 2)
    helper.rank(h, "hidden", 2)
    size = whole(helper.label, "size", size, 3)
    if size % 3 or x.shape[1] != size or h.shape[1] != size // 3:
        found = f"size={size}, {x.shape[1]} and {h.shape[1]} columns"
        raise wrong(f"{helper.label}: size must be 3 times the columns of hidden, which input must have too, found {found}")
    act, gate = (
        one_of(helper.label, n, v, _GRU_ACTIVATIONS) for n, v in (("activation", activation), ("gate_activation", gate_activation))
    )
    act, gate = (f if f != "identity" else "assign" for f in (act, gate))
    d = size // 3
    w = _weight(helper, param_attr, (d, size), x.dtype)
    x = helper.add_bias(x, bias_attr, size, axis=1)
    to_gates, to_new, given, own = (
        helper.op("slice", v, axes=(1,), starts=(a,), ends=(b,)) for v in (w, x) for a, b in ((0, 2 * d), (2 * d, size))
    )
    gates = helper.op(gate, helper.op("elementwise_add", given, helper.op("matmul", h, to_gates)))
    u, r = _parts(helper, gates, 2)
    reset = helper.op("elementwise_mul", r, h)
    m = helper.op(act, helper.op("elementwise_add", own, helper.op("matmul", reset, to_new)))
    now = _gated(helper, u, h, m) if origin_mode else _gated(helper, u, m, h)
    return now, reset, helper.op("concat", [gates, m], axis=1)


# -- cells ----------------------------------------------------------------------------------------------------------------------


class RNNCell:
    """A step of a recurrent network: `call(inputs, states)` returns (outputs, new states), and `state_shape` has the sizes of the states.

    A cell of your own defines both. Parameters are created in the first call and shared by later calls.
    """

    def call(self, inputs: Variable, states: Any, **kwargs: Any) -> tuple[Any, Any]:
        """One step: (outputs, new states)."""
        raise NotImplementedError(f"{type(self).__name__} must define call(inputs, states)")

    def __call__(self, inputs: Variable, states: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.call(inputs, states, **kwargs)

    @property
    def state_shape(self) -> Any:
        """The sizes of the states, without the batch axis: a list for one state, a list of lists for several."""
        raise NotImplementedError(f"{type(self).__name__} must define state_shape, or be given initial_states")

    def get_initial_states(
        self, batch_ref: Variable, shape: Any = None, dtype: Any = "float32", init_value: float = 0.0, batch_dim_idx: int = 0
    ) -> Any:
        """States filled with `init_value`, with as many rows as axis `batch_dim_idx` of `batch_ref` has elements."""
        helper = LayerWriter("rnn_state")
        ref = helper.variable(batch_ref, "batch_ref")
        attrs = {"dtype": dtype, "value": float(init_value), "input_dim_idx": batch_dim_idx, "output_dim_idx": 0}

        def made(sizes: Any) -> Any:
            if sizes and not isinstance(sizes[0], int):
                return [made(s) for s in sizes]
            sizes = tuple(sizes) if sizes and sizes[0] == -1 else (-1, *sizes)
            return helper.op("fill_constant_batch_size_like", ref, shape=sizes, **attrs)

        return made(self.state_shape if shape is None else shape)


class _Gates:
    """The weight and bias of a product, created in the first call, when the width of its input is known."""

    def __init__(self, kind: str, param_attr: Any, bias_attr: Any):
        self.attrs = [self._named(kind, attr) for attr in (param_attr, bias_attr)]

    @staticmethod
    def _named(kind: str, attr: Any) -> Any:
        """The attributes with a name, so that all steps share the parameter."""
        attr = ParamAttr.of(attr)
        if attr is None or attr.name:
            return attr or False
        named = copy(attr)
        named.name = LayerWriter(kind).fresh("p")
        return named

    def product(self, helper: LayerWriter, x: Variable, size: int) -> Variable:
        w = _weight(helper, self.attrs[0], (helper.known(x, "inputs", 1), size), x.dtype)
        return helper.add_bias(helper.op("matmul", x, w), self.attrs[1], size, axis=1)


class LSTMCell(RNNCell):
    """The step of an LSTM of `hidden_size` units; its states are [hidden, cell].

    The gates are columns of one product of [inputs, hidden]: input, candidate, forget (plus `forget_bias`), output.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x = fx.data("x", [-1, 7, 3], "float32")
    ...     outputs, (hidden, cell) = fx.layers.rnn(fx.layers.LSTMCell(5), x)
    ...     outputs.shape, hidden.shape
    ((-1, 7, 5), (-1, 5))
    """

    def __init__(
        self,
        hidden_size: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        gate_activation: Any = None,
        activation: Any = None,
        forget_bias: float = 1.0,
        dtype: str = "float32",
        name: str = "LSTMCell",
    ):
        self.hidden_size = whole("layers.LSTMCell", "hidden_size", hidden_size, 1)
        self.name, self.forget_bias = name, number("layers.LSTMCell", "forget_bias", forget_bias)
        self.gate, self.act = _activations("layers.LSTMCell", gate_activation, activation)
        self.gates = _Gates(name, param_attr, bias_attr)

    def call(self, inputs: Variable, states: Sequence[Variable], **kwargs: Any) -> tuple[Variable, list[Variable]]:
        helper = LayerWriter("lstm_cell", label="layers.LSTMCell")
        h, c = (helper.variable(v, f"states[{k}]") for k, v in enumerate(states))
        both = helper.op("concat", [helper.variable(inputs, "inputs"), h], axis=1)
        i, j, f, o = _parts(helper, self.gates.product(helper, both, 4 * self.hidden_size), 4)
        h, c = _lstm_step(helper, i, j, f, o, c, self.forget_bias, self.gate, self.act)
        return h, [h, c]

    @property
    def state_shape(self) -> list[list[int]]:
        return [[self.hidden_size], [self.hidden_size]]


class GRUCell(RNNCell):
    """The step of a GRU of `hidden_size` units: u * hidden + (1 - u) * candidate, the candidate of [inputs, r * hidden].

    The gates r and u are columns of one product of [inputs, hidden].
    """

    def __init__(
        self,
        hidden_size: int,
        param_attr: Any = None,
        bias_attr: Any = None,
        gate_activation: Any = None,
        activation: Any = None,
        dtype: str = "float32",
        name: str = "GRUCell",
    ):
        self.hidden_size, self.name = whole("layers.GRUCell", "hidden_size", hidden_size, 1), name
        self.gate, self.act = _activations("layers.GRUCell", gate_activation, activation)
        for attr in (param_attr, bias_attr):
            named = ParamAttr.of(attr)
            if named is not None and named.name:
                raise wrong("layers.GRUCell: it has two weights and two biases, so they cannot have one name; leave the name out")
        self.gates, self.candidate = _Gates(name, param_attr, bias_attr), _Gates(name, param_attr, bias_attr)

    def call(self, inputs: Variable, states: Any, **kwargs: Any) -> tuple[Variable, Variable]:
        helper = LayerWriter("gru_cell", label="layers.GRUCell")
        x, h = helper.variable(inputs, "inputs"), helper.variable(states, "states")
        both = helper.op("concat", [x, h], axis=1)
        r, u = _parts(helper, helper.op(self.gate, self.gates.product(helper, both, 2 * self.hidden_size)), 2)
        reset = helper.op("concat", [x, helper.op("elementwise_mul", r, h)], axis=1)
        h = _gated(helper, u, h, helper.op(self.act, self.candidate.product(helper, reset, self.hidden_size)))
        return h, h

    @property
    def state_shape(self) -> list[int]:
        return [self.hidden_size]


def _activations(label: str, gate: Any, act: Any) -> tuple[str, str]:
    """Names of activations. fluid's functions are recognised by name."""
    given = (getattr(f, "__name__", f) or default for f, default in ((gate, "sigmoid"), (act, "tanh")))
    first, second = (one_of(label, what, f, ACTIVATIONS) for what, f in zip(("gate_activation", "activation"), given))
    return first, second


# -- sequences --------------------------------------------------------------------------------------------------------------------


def rnn(
    cell: RNNCell,
    inputs: Variable,
    initial_states: Any = None,
    sequence_length: Variable | None = None,
    time_major: bool = False,
    is_reverse: bool = False,
    **kwargs: Any,
) -> tuple[Variable, Any]:
    """(outputs of all steps, last states) of a cell run over inputs [n, steps, ...], or [steps, n, ...] with `time_major`.

    The steps are unrolled, so their number must be known. After the end of a sequence, given by `sequence_length` [n], states do not
    change, and outputs are those of the cell. `is_reverse` starts at the last step. `kwargs` are passed to the cell.
    """
    helper = LayerWriter("rnn")
    x = helper.variable(inputs, "inputs")
    axis = 0 if time_major else 1
    if x.ndim < 2:
        raise wrong(f"{helper.label}: inputs must have 2 axes or more; variable {x.name!r} has shape {list(x.shape)}")
    steps = helper.known(x, "inputs (the number of steps)", axis)
    taken = helper.op("unstack", x, axis=axis, n_out=steps)
    states = cell.get_initial_states(x, dtype=x.dtype, batch_dim_idx=1 - axis) if initial_states is None else initial_states
    lengths = None if sequence_length is None else helper.op(
        "cast", helper.op("reshape", helper.variable(sequence_length, "sequence_length"), shape=(-1, 1)), dtype="int64")  # fmt: skip
    outs: list[Variable] = [x] * steps
    for t in reversed(range(steps)) if is_reverse else range(steps):
        outs[t], new = cell(taken[t], states, **kwargs)
        if not isinstance(outs[t], Variable):
            raise wrong(f"{helper.label}: a cell's outputs must be one Variable, got {type(outs[t]).__name__}")
        if lengths is not None:
            at = helper.op("assign_value", shape=(1,), dtype="int64", values=elements(np.array([t])))
            new = _where_active(helper, helper.op("greater_than", lengths, at), new, states)
        states = new
    return helper.op("stack", outs, axis=axis), states


def _where_active(helper: LayerWriter, active: Variable, new: Any, old: Any) -> Any:
    """`new` where a sequence continues, `old` where it has ended."""
    if isinstance(new, Variable):
        return helper.op("where", active, new, old)
    return [_where_active(helper, active, a, b) for a, b in zip(new, old, strict=True)]


def lstm(
    input: Variable,
    init_h: Variable,
    init_c: Variable,
    max_len: int,
    hidden_size: int,
    num_layers: int,
    dropout_prob: float = 0.0,
    is_bidirec: bool = False,
    is_test: bool = False,
    name: str | None = None,
    default_initializer: Initializer | None = None,
    seed: int = -1,
) -> tuple[Variable, Variable, Variable]:
    """LSTM layers over input [steps, n, width]: (outputs [steps, n, hidden], last hidden, last cell), as the states [layers, n, hidden].

    With `is_bidirec` each layer runs in both directions, their outputs are concatenated, and each layer has two states. Dropout with
    `dropout_prob` is between layers. Steps are unrolled: their number must be known and at most `max_len`. Each direction has a weight
    [width + hidden, 4 * hidden] and a bias; fluid has all of them in one flat parameter.

    >>> import fluidx as fx
    >>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
    ...     x = fx.data("x", [6, -1, 3], "float32")
    ...     h, c = (fx.data(name, [2, -1, 4], "float32") for name in "hc")
    ...     [v.shape for v in fx.layers.lstm(x, h, c, 6, 4, num_layers=1, is_bidirec=True)]
    [(6, -1, 8), (2, -1, 4), (2, -1, 4)]
    """
    helper = LayerWriter("lstm", name)
    x, h, c = (helper.variable(v, what) for v, what in ((input, "input"), (init_h, "init_h"), (init_c, "init_c")))
    for v, what in ((x, "input"), (h, "init_h"), (c, "init_c")):
        helper.rank(v, what, 3)
    ways, layers = 2 if is_bidirec else 1, whole(helper.label, "num_layers", num_layers, 1)
    if helper.known(x, "input (the number of steps)", 0) > whole(helper.label, "max_len", max_len, 1):
        raise wrong(f"{helper.label}: input has {x.shape[0]} steps, and max_len is {max_len}")
    if h.shape[0] != layers * ways or c.shape[0] != layers * ways:
        raise wrong(f"{helper.label}: init_h and init_c need {layers * ways} states in axis 0, found {h.shape[0]} and {c.shape[0]}")
    starts = list(zip(*(helper.op("unstack", v, axis=0, n_out=layers * ways) for v in (h, c))))
    attr = None if default_initializer is None else ParamAttr(initializer=default_initializer)
    ends = []
    for layer in range(layers):
        if layer and dropout_prob:
            x = dropout(x, dropout_prob, is_test=is_test, seed=None if seed == -1 else seed, dropout_implementation="upscale_in_train")
        outs = []
        for way in range(ways):
            cell = LSTMCell(hidden_size, attr, forget_bias=0.0, name=helper.name)
            y, last = rnn(cell, x, list(starts[layer * ways + way]), time_major=True, is_reverse=bool(way))
            outs.append(y)
            ends.append(last)
        x = outs[0] if ways == 1 else helper.op("concat", outs, axis=2)
    last_h, last_c = (helper.op("stack", list(states), axis=0) for states in zip(*ends))
    return x, last_h, last_c


__all__ = ["GRUCell", "LSTMCell", "RNNCell", "gru_unit", "lstm", "lstm_unit", "rnn"]
