"""Recurrent layers against their equations in NumPy, float64, and on two ranks."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers
RNG = np.random.default_rng(0)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # the same sums of at most a dozen products, in another order


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def run(write, weights=(), **feed):
    """(values, parameters) of layers whose parameters, in the order in which they are made, have these values."""
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        outs = write(**{n: fx.data(n, list(a.shape), str(a.dtype)) for n, a in feed.items()})
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    params = main.all_parameters()
    assert [p.shape for p in params] == [w.shape for w in weights]
    for p, w in zip(params, weights):
        scope.set(p.name, w)
    return exe.run(main, feed=feed, fetch_list=list(outs), scope=scope)


def lstm_step(x, h, c, w, b, order, forget_bias):
    gates = dict(zip(order, np.split(np.concatenate([x, h], 1) @ w + b, 4, axis=1)))
    c = c * sigmoid(gates["f"] + forget_bias) + sigmoid(gates["i"]) * np.tanh(gates["j"])
    return sigmoid(gates["o"]) * np.tanh(c), c


def test_lstm_unit():
    x, h, c, w, b = (RNG.normal(size=s) for s in ((2, 3), (2, 4), (2, 4), (7, 16), (16,)))
    got = run(lambda x, h, c: L.lstm_unit(x, h, c, forget_bias=0.5), (w, b), x=x, h=h, c=c)
    np.testing.assert_allclose(got, lstm_step(x, h, c, w, b, "ifoj", 0.5), **CLOSE)


@pytest.mark.parametrize("origin", [False, True])
def test_gru_unit(origin):
    x, h, w, b = (RNG.normal(size=s) for s in ((2, 12), (2, 4), (4, 12), (12,)))
    hidden, reset, gates = run(lambda x, h: L.gru_unit(x, h, 12, origin_mode=origin), (w, b), x=x, h=h)
    given = x + b
    u, r = np.split(sigmoid(given[:, :8] + h @ w[:, :8]), 2, axis=1)
    m = np.tanh(given[:, 8:] + (r * h) @ w[:, 8:])
    np.testing.assert_allclose(hidden, u * h + (1 - u) * m if origin else (1 - u) * h + u * m, **CLOSE)
    np.testing.assert_allclose(reset, r * h, **CLOSE)
    np.testing.assert_allclose(gates, np.concatenate([u, r, m], axis=1), **CLOSE)


@pytest.mark.parametrize("backwards", [False, True])
def test_rnn_of_lstm_cells_stops_where_sequences_end(backwards):
    x, lengths = RNG.normal(size=(3, 4, 2)), np.int64([4, 2, 0])
    w, b = RNG.normal(size=(7, 20)), RNG.normal(size=20)

    def write(x, n):
        outs, (h, c) = L.rnn(L.LSTMCell(5), x, sequence_length=n, is_reverse=backwards)
        return outs, h, c

    outs, last_h, last_c = run(write, (w, b), x=x, n=lengths)
    h = c = np.zeros((3, 5))
    for t in reversed(range(4)) if backwards else range(4):
        new_h, new_c = lstm_step(x[:, t], h, c, w, b, "ijfo", 1.0)
        np.testing.assert_allclose(outs[:, t], new_h, **CLOSE)
        on = (t < lengths)[:, None]
        h, c = np.where(on, new_h, h), np.where(on, new_c, c)
    np.testing.assert_allclose(last_h, h, **CLOSE)
    np.testing.assert_allclose(last_c, c, **CLOSE)


def test_rnn_of_gru_cells_with_time_in_front():
    x, h = RNG.normal(size=(3, 2, 4)), RNG.normal(size=(2, 5))
    weights = [RNG.normal(size=s) for s in ((9, 10), (10,), (9, 5), (5,))]
    outs, last = run(lambda x, h: L.rnn(L.GRUCell(5), x, h, time_major=True), weights, x=x, h=h)
    for t in range(3):
        r, u = np.split(sigmoid(np.concatenate([x[t], h], 1) @ weights[0] + weights[1]), 2, axis=1)
        h = u * h + (1 - u) * np.tanh(np.concatenate([x[t], r * h], 1) @ weights[2] + weights[3])
        np.testing.assert_allclose(outs[t], h, **CLOSE)
    np.testing.assert_allclose(last, h, **CLOSE)


def test_lstm_of_two_layers_both_ways():
    x, h, c = RNG.normal(size=(3, 2, 4)), RNG.normal(size=(4, 2, 5)), RNG.normal(size=(4, 2, 5))
    weights = [RNG.normal(size=s) for width in (4, 10) for _ in range(2) for s in ((width + 5, 20), (20,))]
    got, last_h, last_c = run(lambda x, h, c: L.lstm(x, h, c, 3, 5, 2, is_bidirec=True), weights, x=x, h=h, c=c)
    ys = x
    for layer in range(2):
        sides = []
        for way in range(2):
            k = 2 * layer + way
            state, side = (h[k], c[k]), [None] * 3
            for t in reversed(range(3)) if way else range(3):
                state = lstm_step(ys[t], *state, weights[2 * k], weights[2 * k + 1], "ijfo", 0.0)
                side[t] = state[0]
            np.testing.assert_allclose(last_h[k], state[0], **CLOSE)
            np.testing.assert_allclose(last_c[k], state[1], **CLOSE)
            sides.append(np.stack(side))
        ys = np.concatenate(sides, axis=2)
    np.testing.assert_allclose(got, ys, **CLOSE)


def test_what_cannot_be_says_why():
    with fx.program_guard(fx.Program(), fx.Program()):
        x = fx.data("x", [-1, -1, 3], "float32")
        with pytest.raises(fx.FluidxError, match=r"axis 1 of inputs \(the number of steps\) must be known"):
            L.rnn(L.LSTMCell(4), x)
        with pytest.raises(fx.FluidxError, match="two weights and two biases"):
            L.GRUCell(4, param_attr="w")
        with pytest.raises(fx.FluidxError, match="input has 6 steps, and max_len is 5"):
            L.lstm(fx.data("y", [6, -1, 3], "float32"), *(fx.data(n, [1, -1, 4], "float32") for n in "hc"), 5, 4, 1)


def test_training_on_two_ranks_is_training_on_one_device():
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x, n = fx.data("x", [-1, 4, 3], "float64"), fx.data("n", [-1], "int64")
        cell = L.LSTMCell(5, param_attr=fx.ParamAttr(initializer=fx.initializer.Normal(seed=3)))
        _, (h, _) = L.rnn(cell, x, sequence_length=n)
        loss = L.mean(L.square(h))
        fx.optimizer.SGD(0.5).minimize(loss)
    feed = {"x": RNG.normal(size=(5, 4, 3)), "n": np.int64([4, 1, 0, 2, 3])}
    one = fx.Executor(fx.CPUPlace())
    one.run(startup)
    expected = [one.run(main, feed=feed, fetch_list=[loss])[0] for _ in range(3)]
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        got = [ranks.run(feed=feed, fetch_list=[loss])[0] for _ in range(3)]
    np.testing.assert_allclose(got, expected, **CLOSE)  # sums of ranks are in another order
