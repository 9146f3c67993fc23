"""If, Scan and Loop. At import, a known condition selects its branch, and rounds are unrolled.

If the program computes a condition or a count, and nothing can run it meanwhile, the program gets `cond` and `while` operators. In a
session, a Loop whose condition is computed in each round runs on the host: its body is a model of its own, and the program of the body is
written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ...ir import ANY, Builder, Variable, flow, program_guard
from ...layers import control_flow
from .. import limits
from ..errors import OnnxError
from ..export_graph import Op
from ..node import Node
from ..read import OPSET_8
from ..table import exports, on_numpy
from ..values import ABSENT, Outputs, Weight, leaves
from .rounds import Rounds, is_long
from .sequence import empty_stack, joined, slices


@on_numpy("If")
def if_(n: Node) -> object:
    if _is_computed(n, n.operands[0]):
        return _branches(n)
    return Outputs(n.inline(n.attr("then_branch" if _truth(n, n.operands[0]) else "else_branch"), []))


def _is_computed(n: Node, value: Any) -> bool:
    """Is a value known only when the program runs?"""
    return isinstance(value, Variable) and n.importer.evaluate is None


def _branches(n: Node) -> Outputs:
    importer = n.importer
    then, otherwise = (partial(importer.inline_in_block, n.attr(f"{which}_branch"), [], n) for which in ("then", "else"))
    decides = _one_bool(n, n.x(), n.b)
    start = len(n.b.block.oplist)
    with program_guard(importer.main, importer.startup):
        made = control_flow.cond(decides, then, otherwise)
    return Outputs(importer.with_model_names(n.outputs, made, start))


def _one_bool(n: Node, condition: Variable, b: Builder) -> Variable:
    t = condition.desc.type
    if t.dtype != "bool" or t.numel not in (1, -1) and ANY not in t.shape:
        raise n.wrong(f"the condition must be one bool, found {t}")
    return condition if t.numel == 1 else b.reshape(condition, shape=[1])


def _truth(n: Node, condition: Any) -> bool:
    found = np.asarray(n.importer.value(condition, n))
    if found.size != 1:
        raise n.wrong(f"the condition must be one bool, found an array of shape {found.shape}")
    return bool(found.item())


@on_numpy("Scan")
def scan(n: Node) -> object:
    body = n.attr("body")
    count = n.attr("num_scan_inputs")
    states, scanned = n.operands[: len(n.operands) - count], n.operands[len(n.operands) - count :]
    axes, backward = n.attr("scan_input_axes") or [0] * count, n.attr("scan_input_directions") or [0] * count
    infos = body.output[len(states) :]
    out_axes = n.attr("scan_output_axes") or [0] * len(infos)
    out_backward = n.attr("scan_output_directions") or [0] * len(infos)
    start = len(n.b.block.oplist)
    if (made := _scanned_in_loop(n, states, list(zip(scanned, axes, backward)))) is not None:
        states, rows = made
        rows = [_rows_at(n, v, a, back) for v, a, back in zip(rows, out_axes, out_backward)]
        return Outputs(n.importer.with_model_names(n.outputs, [*states, *rows], start))
    elements = [slices(n, v, axis)[:: -1 if back else 1] for v, axis, back in zip(scanned, axes, backward)]
    states, outputs = _scanned(n, n.importer.weights(body), states, elements)
    return Outputs([*states, *(_stacked(n, o[:: -1 if b else 1], i, a) for o, b, i, a in zip(outputs, out_backward, infos, out_axes))])


def _scanned_in_loop(n: Node, states: list[Any], scanned: list[tuple[Any, int, int]]) -> tuple[list[Any], list[Any]] | None:
    """Scan as a `while` of the program, if there are many rounds or if their number is fed. None if the rounds are to be unrolled."""
    body, importer, b = n.attr("body"), n.importer, n.b
    if importer.evaluate is not None or not any(isinstance(v, (Variable, Weight)) for v in leaves([states, [v for v, _, _ in scanned]])):
        return None
    (value, axis, _), *_ = scanned
    rounds = importer.array(value).shape[axis]
    if rounds != ANY and not is_long(n, body, rounds):
        return None
    xs = [_axis_first(n, importer.variable(v), axis) for v, axis, _ in scanned]
    if any(x.shape[0] != rounds for x in xs):
        return None
    limit = rounds if rounds != ANY else b.axis_size(xs[0])
    own = n.importer.weights(body)

    def make(k: Variable, held: list[Variable]) -> tuple[Variable | None, list[Variable]]:
        inner = Builder(importer.main.current_block(), role=b.role)
        last = inner.fill_constant(shape=[], dtype="int64", value=rounds - 1.0) if rounds != ANY else _less_one(inner, limit)
        at = [inner.reshape(inner.elementwise_sub(last, k) if back else k, shape=[1]) for _, _, back in scanned]
        parts = [inner.stash_read(x, position) for x, position in zip(xs, at)]
        return None, importer.inline_in_block(body, [*held, *parts], n, own)

    try:
        return Rounds(n, body.input, body.output, limit, like=xs[0]).write(states, None, make)
    except OnnxError:
        if rounds == ANY:
            raise
        return None  # a round needs values that must be known


def _less_one(b: Builder, v: Variable) -> Variable:
    return b.elementwise_sub(v, b.fill_constant(shape=[], dtype="int64", value=1.0))


def _axis_first(n: Node, x: Variable, axis: int) -> Variable:
    """A tensor with an axis moved to the front."""
    axis %= len(x.shape)
    return n.b.transpose(x, axis=(axis, *(k for k in range(len(x.shape)) if k != axis))) if axis else x


def _rows_at(n: Node, rows: Variable, axis: int, back: int) -> Variable:
    """Rows of the rounds moved to an axis, in reverse order if `back`."""
    axis %= len(rows.shape)
    rows = n.b.reverse(rows, axis=(0,)) if back else rows
    return n.b.transpose(rows, axis=(*range(1, axis + 1), 0, *range(axis + 1, len(rows.shape)))) if axis else rows


def _scanned(n: Node, own: dict[str, Any], states: list[Any], elements: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """The states after the last round, and for each other output the list of values of the rounds."""
    if len({len(e) for e in elements}) != 1:
        raise n.wrong(f"its scanned inputs have different lengths: {', '.join(str(len(e)) for e in elements)}")
    body, rounds = n.attr("body"), []
    for parts in zip(*elements):
        made = n.inline(body, [*states, *parts], own)
        states = made[: len(states)]
        rounds.append(made[len(states) :])
    return states, [[r[k] for r in rounds] for k in range(len(body.output) - len(states))]


@on_numpy("Scan", domain=OPSET_8)
def scan_of_batches(n: Node) -> object:
    """Scan of opset 8: the first input has lengths, axis 0 is the batch, and axis 1 is time."""
    body, count = n.attr("body"), n.attr("num_scan_inputs")
    lengths, given = n.ints(0), [slices(n, v, 0) for v in n.operands[1:]]
    backward, own, rows = n.attr("directions") or [0] * count, n.importer.weights(body), []
    for row, values in enumerate(zip(*given)):
        states, scanned = list(values[: len(values) - count]), values[len(values) - count :]
        elements = [slices(n, v, 0) for v in scanned]
        full = len(elements[0])
        length = full if lengths is None else lengths[row]
        elements = [e[:length][:: -1 if back else 1] for e, back in zip(elements, backward)]
        states, outputs = _scanned(n, own, states, elements)
        padded = [o + [n.b.fill_zeros_like(n.importer.variable(o[0]))] * (full - length) if o else o for o in outputs]
        infos = body.output[len(states) :]
        rows.append([*states, *(_stacked(n, o, info, 0) for o, info in zip(padded, infos))])
    return Outputs(joined(n, made, 0, new=True) for made in zip(*rows))


def _stacked(n: Node, values: list[Any], info: Any, axis: int) -> Any:
    if not values:
        return empty_stack(info, axis)
    return joined(n, values, axis % (len(n.importer.array(values[0]).shape) + 1), new=True)


# -- Loop -------------------------------------------------------------------------------------------------------------------------------


@on_numpy("Loop")
def loop(n: Node) -> object:
    """A loop ends at the trip count, or when the condition that its body computes is false. Either may be left out."""
    body, states = n.attr("body"), list(n.operands[2:])
    if any(_is_computed(n, n.operands[k]) for k in (0, 1) if n.has(k)):
        return _while_after(n, states, [], n.operands[1] if n.has(1) else np.array(True))
    limit = int(np.asarray(n.value(0)).item()) if n.has(0) else None
    if is_long(n, body, limit) and not _is_known(n, body, states) and (made := _as_while(n, states)) is not None:
        return made
    goes = _truth(n, n.operands[1]) if n.has(1) else True
    rounds: list[list[Any]] = []
    write = _on_host(n, body) if _is_known(n, body, states) else _inline(n, body)
    while goes and (limit is None or len(rounds) < limit):
        if len(rounds) >= limits.ROUNDS:
            raise n.wrong(f"it has not ended after {limits.ROUNDS} rounds; the limit is fluidx.onnx.limits.ROUNDS")
        condition, *made = write(len(rounds), states)
        states = made[: len(states)]
        rounds.append(made[len(states) :])
        if _is_computed(n, condition):
            return _while_after(n, states, rounds, condition)
        if isinstance(condition, Variable):
            states, condition = n.importer.value([states, condition], n)
            write = _on_host(n, body)
        goes = _truth(n, condition)
    return Outputs([*states, *_stacked_rounds(n, rounds, body.output[1 + len(states) :])])


def _as_while(n: Node, states: list[Any]) -> Outputs | None:
    """Many rounds as a `while` of the program. None if they must be unrolled, because a round needs values that must be known."""
    try:
        return _while_after(n, states, [], n.operands[1] if n.has(1) else np.array(True))
    except OnnxError:
        return None


def _while_after(n: Node, states: list[Any], rounds: list[Any], condition: Any) -> Outputs:
    """The rounds after the unrolled ones as a `while` of the program. `condition` says whether there is another round."""
    importer, body = n.importer, n.attr("body")
    known = not n.has(0) or not isinstance(n.operands[0], Variable)
    limit = None if not n.has(0) else int(np.asarray(n.value(0)).item()) if known else n.b.reshape(n.x(0), shape=[])
    infos, own, start = body.output[1:], n.importer.weights(body), len(n.b.block.oplist)
    if known and limit is not None and limit <= len(rounds):
        return Outputs([*states, *_stacked_rounds(n, rounds, infos[len(states) :])])

    def make(k: Variable, held: list[Variable]) -> tuple[Variable | None, list[Variable]]:
        again, *made = importer.inline_in_block(body, [k, _true(n), *held], n, own, plain=1)
        inner = Builder(importer.main.current_block(), role=n.b.role)
        if not isinstance(again, Variable):
            return None if holds(again) else inner.fill_constant(shape=[1], dtype="bool", value=float(_truth(n, again))), made
        return _one_bool(n, again, inner), made

    def holds(value: Any) -> bool:
        """Is it known that there is another round, so that only the trip count ends the loop?"""
        return limit is not None and not isinstance(value, Variable) and _truth(n, value)

    first = None if holds(condition) else _one_bool(n, importer.variable(condition), n.b)
    states, rows = Rounds(n, body.input[2:], infos, limit, len(rounds)).write(states, first, make)
    if rounds:
        rows = [joined(n, [before, v], 0, new=False) for before, v in zip(_stacked_rounds(n, rounds, infos[len(states) :]), rows)]
    return Outputs(importer.with_model_names(n.outputs, [*states, *rows], start))


def _stacked_rounds(n: Node, rounds: list[list[Any]], infos: Any) -> list[Any]:
    return [_stacked(n, [r[k] for r in rounds], info, 0) for k, info in enumerate(infos)]


def _is_known(n: Node, body: Any, states: list[Any]) -> bool:
    """Are the states of a loop, and the outer values that it reads, all on the host?"""
    read = [n.importer.env[name] for name in _outer_names(body) if name in n.importer.env]
    return not any(isinstance(v, (Variable, Weight)) for v in leaves([states, read]))


def _inline(n: Node, body: Any) -> Any:
    own = n.importer.weights(body)
    return lambda k, states: n.inline(body, [np.array(k, np.int64), _true(n), *states], own)


def _true(n: Node) -> np.ndarray:
    """The condition that a round gets: one element, with as many axes as the first condition."""
    return np.ones((1,) * n.rank(1) if n.has(1) else (), bool)


def _on_host(n: Node, body: Any) -> Any:
    """A round of a loop computed by a session of the body, whose feeds include the outer values that it reads."""
    from onnx import GraphProto, helper

    from ..sessions import Session

    names = [name for name in dict.fromkeys(_outer_names(body)) if n.importer.env.get(name) is not None]
    read = n.importer.value([n.importer.env[name] for name in names], n)
    graph = GraphProto()
    graph.CopyFrom(body)
    for name in names:
        graph.input.add().name = name
    opsets = [helper.make_opsetid(domain, version) for domain, version in n.importer.opsets.items()]
    session = Session(helper.make_model(graph, opset_imports=opsets))
    own = [i.name for i in body.input]

    def write(k: int, states: list[Any]) -> list[Any]:
        feed = {**dict(zip(own, [np.array(k, np.int64), _true(n), *states])), **dict(zip(names, read))}
        return [ABSENT if v is None else v for v in session.run(feed)]

    return write


def _outer_names(graph: Any) -> Iterator[str]:
    """The names that a graph reads from the graphs around it."""
    made = {i.name for i in graph.input} | {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
    for node in graph.node:
        inner = [g for a in node.attribute for g in ([a.g] if a.HasField("g") else a.graphs)]
        for name in [*node.input, *(name for g in inner for name in _outer_names(g))]:
            if name and name not in made:
                yield name
        made.update(node.output)
    yield from (o.name for o in graph.output if o.name not in made)


# -- export -------------------------------------------------------------------------------------------------------------------------


@exports("cond")
def cond(op: Op) -> Any:
    graphs = {
        f"{then}_branch": op.graph.sub_graph(op.attrs[f"{which}_block"].idx, [], op.attrs[f"{which}_out"])
        for then, which in (("then", "true"), ("else", "false"))
    }
    return {"Out": op.emit_many("If", len(op.op.output("Out")), op["Cond"], **graphs)}


@exports("while")
def while_(op: Op) -> Any:
    """All variables that the loop writes are carried, also its condition: later operators may read it."""
    from onnx import TensorProto, helper

    if op.op.input("Left") and flow.draws(op.graph.program, op.op):
        raise op.wrong("its gradient repeats random draws, and a Loop would draw other numbers")
    carried, (condition,) = op.op.output("Out"), op.op.input("Condition")
    counters = [
        helper.make_tensor_value_info(op.graph.fresh(f"{carried[0]}.round"), TensorProto.INT64, []),
        helper.make_tensor_value_info(op.graph.fresh(f"{carried[0]}.more"), TensorProto.BOOL, None),  # of any rank with one element
    ]
    most = op.attrs["max_rounds"]
    limit = op.const(np.array(most, np.int64)) if most else ""
    body = op.graph.sub_graph(op.attrs["sub_block"].idx, carried, [condition, *carried], counters)
    start = [op.graph.current[n] for n in (condition, *carried)]
    return {"Out": op.emit_many("Loop", len(carried), limit, *start, body=body)}
