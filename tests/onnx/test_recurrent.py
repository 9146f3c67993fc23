"""RNN, GRU and LSTM against ONNX Runtime, and their gradients."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import fluidx as fx  # noqa: E402
from fluidx.onnx.importer import Importer  # noqa: E402
from fluidx.onnx.read import NEWEST  # noqa: E402
from tests.onnx.one_node import by_runtime, check_gradient, model, ran  # noqa: E402

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STEPS, BATCH, SIZE, HIDDEN = 4, 3, 2, 5


def operands(op: str, directions: int = 1, lengths: bool = False, state: bool = True, dtype: str = "float32") -> list:
    random, rows = np.random.default_rng(0), GATES[op] * HIDDEN
    shapes = [(STEPS, BATCH, SIZE), (directions, rows, SIZE), (directions, rows, HIDDEN), (directions, 2 * rows)]
    given = [random.normal(size=s).astype(dtype) for s in shapes]
    given.append(np.array([4, 1, 3], np.int32) if lengths else None)
    states = [random.normal(size=(directions, BATCH, HIDDEN)).astype(dtype) if state else None for _ in range(2 if op == "LSTM" else 1)]
    return [*given, *states, *([random.normal(size=(directions, 3 * HIDDEN)).astype(dtype)] if op == "LSTM" else [])]


def check(op: str, inputs: list, **attrs) -> None:
    outputs = 3 if op == "LSTM" else 2
    found, wanted = (f(op, inputs, outputs, hidden_size=HIDDEN, **attrs) for f in (ran, by_runtime))
    for got, want in zip(found, wanted):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # exp of ONNX Runtime is an approximation


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", GATES)
def test_directions_and_lengths(op, direction, lengths):
    check(op, operands(op, 2 if direction == "bidirectional" else 1, lengths), direction=direction)


def test_gru_resets_after_the_product():
    check("GRU", operands("GRU"), linear_before_reset=1)


def test_lstm_with_one_gate_for_input_and_forget():
    check("LSTM", operands("LSTM"), input_forget=1)


@pytest.mark.parametrize("op", GATES)
def test_gates_are_given_no_more_than_clip(op):
    check(op, operands(op), clip=0.4)


def test_functions_with_numbers_take_them_in_order():
    names = ["HardSigmoid", "Affine", "Elu"]
    check("LSTM", operands("LSTM"), activations=names, activation_alpha=[0.3, 0.7, 0.9], activation_beta=[0.4, 0.1])


@pytest.mark.parametrize("op", GATES)
def test_batch_first_is_the_same_turned(op):
    inputs = operands(op, 2)
    outputs = 3 if op == "LSTM" else 2
    y, *ends = ran(op, inputs, outputs, hidden_size=HIDDEN, direction="bidirectional")
    inputs[0] = inputs[0].transpose(1, 0, 2)
    states = range(5, 4 + outputs)
    for k in states:
        inputs[k] = inputs[k].transpose(1, 0, 2)
    turned, *turned_ends = ran(op, inputs, outputs, hidden_size=HIDDEN, direction="bidirectional", layout=1)
    np.testing.assert_array_equal(turned, y.transpose(2, 0, 1, 3))
    for a, b in zip(turned_ends, ends):
        np.testing.assert_array_equal(a, b.transpose(1, 0, 2))


@pytest.mark.parametrize("op, attrs", [("RNN", {}), ("GRU", {"linear_before_reset": 1}), ("GRU", {}), ("LSTM", {})])
def test_gradients_to_input_weights_and_state(op, attrs):
    inputs = operands(op, 2, lengths=True, dtype="float64")
    wrt = (0, 2, 3, 5, 7) if op == "LSTM" else (0, 2, 3, 5)
    check_gradient(op, inputs, 3 if op == "LSTM" else 2, wrt, direction="bidirectional", hidden_size=HIDDEN, **attrs)


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1"])
def test_an_open_batch_is_trained_on_two_ranks_as_on_one(strategy):
    inputs = operands("LSTM", 2, state=False)
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        importer = Importer(main, startup, {"": NEWEST})
        net = model("LSTM", inputs[:4], 1, (1, 2, 3), direction="bidirectional", hidden_size=HIDDEN, layout=1).graph
        importer.take_weights(net)
        importer.data("x0", [-1, STEPS, SIZE], "float32")
        importer.run_nodes(net.node)
        loss = fx.layers.mean(fx.layers.square(importer.lookup("y0")))
        fx.optimizer.SGD(learning_rate=0.1).minimize(loss)
    transpiler = fx.DistributeTranspiler(getattr(fx.strategies, strategy)())
    transpiler.transpile(program=main, startup_program=startup, trainers=2)
    transpiler.verify()
    feed = {"x0": inputs[0].transpose(1, 0, 2)}  # three sequences: two on one rank, one on the other
    one = fx.Executor(fx.CPUPlace())
    one.run(startup)
    want = [one.run(main, feed=feed, fetch_list=[loss])[0] for _ in range(3)]
    with fx.ParallelExecutor(transpiler, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        found = [ranks.run(feed=feed, fetch_list=[loss])[0] for _ in range(3)]
    np.testing.assert_allclose(found, want, rtol=1e-5)  # float32, sums in another order
    assert want[2] < want[0]


def test_an_unknown_function_is_refused():
    with pytest.raises(Exception, match="unknown activation 'Swish'; there are: relu, tanh"):
        ran("RNN", operands("RNN"), activations=["Swish"], hidden_size=HIDDEN)
