"""RNN, GRU and LSTM, unrolled step by step, or as a loop if the number of steps is open. One product computes the contributions of the
input for all steps; each step has one product for all gates.

Each direction runs over the steps. A cell takes the input's contribution to the gates and the state, and returns the new state, whose first
part is the output. Steps after the end of a sequence keep the state and output zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

from ...ir import ANY, Builder, Variable
from ..node import Node
from ..table import imports
from .rounds import Rounds

Activation = Callable[[Variable], Variable]
State = list[Variable]
Product = Callable[[Builder, Variable], Variable]  # of a value with a weight
Products = Callable[[int, int], Product]  # the weights of operand 1 or 2, and of a direction


class _Activation(NamedTuple):
    """An activation function: how to write it, and defaults of its parameters, alpha before beta."""

    write: Callable[..., Variable]
    numbers: tuple[float, ...] = ()


_ACTIVATIONS: dict[str, _Activation] = {
    "relu": _Activation(lambda b, x: b.relu(x)),
    "tanh": _Activation(lambda b, x: b.tanh(x)),
    "sigmoid": _Activation(lambda b, x: b.sigmoid(x)),
    "softsign": _Activation(lambda b, x: b.softsign(x)),
    "softplus": _Activation(lambda b, x: b.softplus(x)),
    "affine": _Activation(lambda b, x, alpha, beta: b.scale(x, scale=alpha, bias=beta), (1.0, 0.0)),
    "leakyrelu": _Activation(lambda b, x, alpha: b.leaky_relu(x, alpha=alpha), (0.01,)),
    "thresholdedrelu": _Activation(lambda b, x, alpha: b.thresholded_relu(x, threshold=alpha), (1.0,)),
    "scaledtanh": _Activation(lambda b, x, alpha, beta: b.stanh(x, scale_a=beta, scale_b=alpha), (1.0, 1.0)),
    "hardsigmoid": _Activation(lambda b, x, alpha, beta: b.hard_sigmoid(x, slope=alpha, offset=beta), (0.2, 0.5)),
    "elu": _Activation(lambda b, x, alpha: b.elu(x, alpha=alpha), (1.0,)),
}


class _Direction(NamedTuple):
    """The weights of one direction (bias, peepholes), its activation functions, and the product with R [gates * hidden, hidden], of which
    GRU reads parts."""

    n: Node
    hidden: int
    bias: Variable | None
    peepholes: Sequence[Variable]
    functions: list[Activation]
    product: Product
    recurrent: Callable[[], Variable]

    def rows(self, v: Variable, first: int, last: int) -> Variable:
        """Rows of weights that belong to gates `first` up to `last`."""
        return self.n.b.slice(v, axes=(0,), starts=(first * self.hidden,), ends=(last * self.hidden,))

    def gates(self, v: Variable, first: int, last: int) -> Variable:
        """Columns of v that belong to gates `first` up to `last`."""
        return self.n.b.slice(v, axes=(1,), starts=(first * self.hidden,), ends=(last * self.hidden,))


# -- cells --------------------------------------------------------------------------------------------------------------------------


def _rnn(d: _Direction, given: Variable, state: State) -> State:
    b = d.n.b
    return [d.functions[0](b.elementwise_add(given, d.product(b, state[0])))]


def _gru(d: _Direction, given: Variable, state: State) -> State:
    """Gates: update, reset, hidden."""
    b, (f, g), (h,) = d.n.b, d.functions, state
    linear = bool(d.n.attr("linear_before_reset", 0))
    product = d.product(b, h) if linear else b.matmul(h, d.rows(d.recurrent(), 0, 2), transpose_y=True)
    both = f(b.elementwise_add(d.gates(given, 0, 2), d.gates(product, 0, 2) if linear else product))
    update, reset = d.gates(both, 0, 1), d.gates(both, 1, 2)
    if linear:
        inner = d.gates(product, 2, 3)
        inner = inner if d.bias is None else b.elementwise_add(inner, d.rows(d.bias, 2, 3))
        past = b.elementwise_mul(reset, inner)
    else:
        past = b.matmul(b.elementwise_mul(reset, h), d.rows(d.recurrent(), 2, 3), transpose_y=True)
    new = g(b.elementwise_add(d.gates(given, 2, 3), past))
    return [b.elementwise_add(new, b.elementwise_mul(update, b.elementwise_sub(h, new)))]


def _lstm(d: _Direction, given: Variable, state: State) -> State:
    """Gates: input, output, forget, cell."""
    b, (f, g, to_output), (h, c) = d.n.b, d.functions, state
    sums = b.elementwise_add(given, d.product(b, h))
    coupled = bool(d.n.attr("input_forget", 0))
    if d.peepholes:
        at_in, at_out, at_forget = (lambda v, c, p=p: f(b.elementwise_add(v, b.elementwise_mul(p, c))) for p in d.peepholes)
        enter = at_in(d.gates(sums, 0, 1), c)
        keep = None if coupled else at_forget(d.gates(sums, 2, 3), c)
    else:
        three = f(d.gates(sums, 0, 3))
        enter, leave = d.gates(three, 0, 1), d.gates(three, 1, 2)
        keep = None if coupled else d.gates(three, 2, 3)
    if keep is None:
        keep = b.scale(enter, scale=-1.0, bias=1.0)
    c = b.elementwise_add(b.elementwise_mul(keep, c), b.elementwise_mul(enter, g(d.gates(sums, 3, 4))))
    if d.peepholes:
        leave = at_out(d.gates(sums, 1, 2), c)
    return [b.elementwise_mul(leave, to_output(c)), c]


class _Net(NamedTuple):
    """A kind of network: its cell, its number of gates, its default functions, and which operands are the initial states."""

    cell: Callable[[_Direction, Variable, State], State]
    gates: int
    functions: tuple[str, ...]
    initial: tuple[int, ...]


_NETS = {
    "RNN": _Net(_rnn, 1, ("Tanh",), (5,)),
    "GRU": _Net(_gru, 3, ("Sigmoid", "Tanh"), (5,)),
    "LSTM": _Net(_lstm, 4, ("Sigmoid", "Tanh", "Tanh"), (5, 6)),
}


# -- steps and directions ---------------------------------------------------------------------------------------------------------


@imports(*_NETS)
def recurrent(n: Node) -> object:
    return unrolled(n, lambda k, direction: of_floats(n, k, direction))


def of_floats(n: Node, k: int, direction: int, rounded: Activation = lambda v: v) -> Product:
    """The product of a value, rounded, with the weights of a direction."""
    weight = _of(n, k, direction)
    return lambda b, v: b.matmul(rounded(v), weight, transpose_y=True)


def _of(n: Node, k: int, direction: int) -> Variable:
    return n.b.slice(n.x(k), axes=(0,), starts=(direction,), ends=(direction + 1,), decrease_axis=(0,))


def unrolled(n: Node, products: Products) -> tuple[Variable, ...]:
    """The outputs of a network."""
    net, b = _NETS[n.op_type], n.b
    batch_first = bool(n.attr("layout", 0))
    x = n.x()
    if batch_first:
        x = b.transpose(x, axis=(1, 0, 2))
    direction = n.attr("direction", "forward")
    backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(direction)
    if backward is None or n.shape(1)[0] != len(backward):
        raise n.wrong(f"direction {direction!r} does not fit weights of {n.shape(1)[0]} directions")
    functions = _functions(n, net, len(backward))
    parts = []
    for k, backwards in enumerate(backward):
        d, given = _direction(n, net, x, k, functions[k * len(net.functions) :][: len(net.functions)], products)
        state = [_initial(n, at, k, x, d.hidden, batch_first) for at in net.initial]
        write = _in_a_loop if x.shape[0] == ANY else _one_direction
        parts.append(write(d, net, given, state, k, backwards))
    ys = b.stack([y for y, _ in parts], axis=1)
    if batch_first:
        ys = b.transpose(ys, axis=(2, 0, 1, 3))
    ends = [b.stack(list(last), axis=1 if batch_first else 0) for last in zip(*(s for _, s in parts))]
    return (ys, *ends)


def _in_a_loop(d: _Direction, net: _Net, given: Variable, state: State, k: int, back: bool) -> tuple[Variable, State]:
    """The outputs of all steps, and the state after the last one, for any number of steps."""
    n, b, importer = d.n, d.n.b, d.n.importer
    steps, lengths = b.axis_size(given), b.unsqueeze(n.x(4), axes=(1,)) if n.has(4) else None
    last = b.elementwise_sub(steps, b.fill_constant(shape=[], dtype="int64", value=1.0))

    def make(step: Variable, held: list[Variable]) -> tuple[None, list[Variable]]:
        inside = Node(importer, n.proto, n.operands)
        inside.b = inner = Builder(importer.main.current_block(), role=b.role)
        functions = _functions(inside, net, n.shape(1)[0])[k * len(net.functions) :][: len(net.functions)]
        at = inner.reshape(inner.elementwise_sub(last, step) if back else step, shape=[1])
        new = net.cell(d._replace(n=inside, functions=functions), inner.stash_read(given, at), held)
        y = new[0]
        if lengths is not None:
            active = inner.greater_than(lengths, inner.cast(at, dtype=lengths.dtype))
            y = inner.where(active, y, inner.fill_zeros_like(y))
            new = [inner.where(active, now, was) for now, was in zip(new, held)]
        return None, [*new, y]

    names = [SimpleNamespace(name=name) for name in ("state", "cell")[: len(state)]]
    state, (ys,) = Rounds(n, names, [*names, SimpleNamespace(name="Y")], steps, like=given).write(state, None, make)
    return b.reverse(ys, axis=(0,)) if back else ys, state


def _one_direction(d: _Direction, net: _Net, given: Variable, state: State, k: int, back: bool) -> tuple[Variable, State]:
    """The outputs of all steps, and the state after the last one."""
    b, active = d.n.b, _active(d.n, given.shape[0])
    taken = b.unstack(given, axis=0, n_out=given.shape[0])
    ys: list[Variable | None] = [None] * len(taken)
    for t in reversed(range(len(taken))) if back else range(len(taken)):
        new = net.cell(d, taken[t], state)
        ys[t] = new[0]
        if active:
            ys[t] = b.where(active[t], new[0], b.fill_zeros_like(new[0]))
            new = [b.where(active[t], now, was) for now, was in zip(new, state)]
        state = new
    return b.stack(ys, axis=0), state


def _direction(n: Node, net: _Net, x: Variable, k: int, functions: list[Activation], products: Products) -> tuple[_Direction, Variable]:
    """The weights of one direction, and the input's contribution to its gates at all steps."""
    b, hidden = n.b, n.shape(2)[-1]
    given = products(1, k)(b, x)
    d = _Direction(n, hidden, None, (), functions, products(2, k), lambda: _of(n, 2, k))
    if n.has(3):
        bias = _of(n, 3, k)
        own, bias = d.rows(bias, 0, net.gates), d.rows(bias, net.gates, 2 * net.gates)
        d = d._replace(bias=bias)
        apart = n.op_type == "GRU" and n.attr("linear_before_reset", 0)  # the reset gate multiplies the hidden gate's second bias
        whole = b.concat([d.rows(bias, 0, 2), b.fill_constant(shape=(hidden,), dtype=x.dtype, value=0.0)], axis=0) if apart else bias
        given = b.elementwise_add(given, b.elementwise_add(own, whole))
    if n.has(7):
        peepholes = _of(n, 7, k)
        d = d._replace(peepholes=[d.rows(peepholes, g, g + 1) for g in range(3)])
    return d, given


def _initial(n: Node, at: int, k: int, x: Variable, hidden: int, batch_first: bool) -> Variable:
    """The state of direction k before the first step; zeros for each sequence of X if none is given."""
    if not n.has(at):
        return n.b.fill_constant_batch_size_like(x, shape=(-1, hidden), dtype=x.dtype, value=0.0, input_dim_idx=1, output_dim_idx=0)
    axis = 1 if batch_first else 0
    return n.b.slice(n.x(at), axes=(axis,), starts=(k,), ends=(k + 1,), decrease_axis=(axis,))


def _active(n: Node, steps: int) -> list[Variable]:
    """[batch, 1] for each step: is it inside of the sequence? An empty list if all sequences have full length."""
    if not n.has(4):
        return []
    lengths = n.b.unsqueeze(n.x(4), axes=(1,))
    return [n.b.greater_than(lengths, n.const([t], lengths.dtype)) for t in range(steps)]


def _functions(n: Node, net: _Net, directions: int) -> list[Activation]:
    """The activation functions of all directions. `clip` applies to the inputs of gates, and not to the cell, the input of the third
    function, as in ONNX Runtime."""
    names = n.attr("activations") or list(net.functions) * directions
    if len(names) != len(net.functions) * directions:
        raise n.wrong(f"expected {len(net.functions) * directions} activations, found {len(names)}")
    given = [iter(n.attr(name) or ()) for name in ("activation_alpha", "activation_beta")]
    limit = n.attr("clip", 0.0)
    return [_function(n, name, given, limit if k % len(net.functions) < 2 else 0.0) for k, name in enumerate(names)]


def _function(n: Node, name: str, given: list, limit: float) -> Activation:
    kind = _ACTIVATIONS.get(name.lower())
    if kind is None:
        raise n.wrong(f"unknown activation {name!r}; there are: {', '.join(_ACTIVATIONS)}")
    numbers = [next(source, default) for source, default in zip(given, kind.numbers)]
    b: Builder = n.b
    if not limit:
        return lambda x: kind.write(b, x, *numbers)
    return lambda x: kind.write(b, b.clip(x, min=-limit, max=limit), *numbers)
