"""Open axes that meet: of one size in a run, or of two names, and then a gradient is summed where its value was broadcast."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir.errors import FeedError

L = fx.layers
OPS = {
    "elementwise_add": lambda x, y: (1 + 0 * x + 0 * y, 1 + 0 * x + 0 * y),
    "elementwise_sub": lambda x, y: (1 + 0 * x + 0 * y, -1 + 0 * x + 0 * y),
    "elementwise_mul": lambda x, y: (y + 0 * x, x + 0 * y),
    "elementwise_div": lambda x, y: (1 / y + 0 * x, -x / y**2),
    "elementwise_max": lambda x, y: (1.0 * (x > y), 1.0 * (x <= y)),
    "elementwise_min": lambda x, y: (1.0 * (x < y), 1.0 * (x >= y)),
    "elementwise_pow": lambda x, y: (y * x ** (y - 1), np.log(x) * x**y),
}
X = np.float32([[1, 2, 3], [4, 2, 1], [2, 2, 2], [1, 5, 4], [3, 1, 2]])
Y = np.float32([[2, 1.5, 3]])


def gradients(op, rows):
    """A program that fetches the gradients of both operands, whose axis 0 is declared as `rows` say."""
    main = fx.Program("meet")
    with fx.program_guard(main, fx.Program()):
        x, y = fx.data("x", [rows[0], 3]), fx.data("y", [rows[1], 3])
        x.stop_gradient = y.stop_gradient = False
        made = fx.gradients([L.reduce_sum(getattr(L, op)(x, y))], [x, y])
    return main, made


@pytest.fixture(params=["auto", "numpy"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FLUIDX_KERNELS", request.param)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [(-1, -1), ("n", "n")])
def test_open_axes_of_one_size_do_not_broadcast(op, rows, kernels):
    main, made = gradients(op, rows)
    for feed in ({"x": X, "y": Y}, {"x": Y, "y": X}):
        with pytest.raises(FeedError, match="axis|axes"):
            fx.Executor().run(main, feed=feed, fetch_list=made)
    dx, dy = fx.Executor().run(main, feed={"x": Y, "y": Y}, fetch_list=made)
    assert dx.shape == dy.shape == (1, 3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [(-1, "m"), ("n", "m"), (-1, 1)])
def test_a_gradient_is_summed_over_an_axis_of_another_name(op, rows, kernels):
    main, made = gradients(op, rows)
    dx, dy = fx.Executor().run(main, feed={"x": X, "y": Y}, fetch_list=made)
    want_x, want_y = OPS[op](X.astype("float64"), Y.astype("float64"))
    np.testing.assert_allclose(dx, want_x, 1e-5)
    np.testing.assert_allclose(dy, want_y.sum(0, keepdims=True), 1e-5)


def trained(rows):
    """A weight whose gradient passes softmax, beside a value of the batch."""
    main, startup = fx.Program("net"), fx.Program("net_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, y = fx.data("x", [-1, 3]), fx.data("y", [rows, 3])
        h = L.softmax(L.fc(y, 3, bias_attr=False))
        loss = L.mean(L.square(L.elementwise_mul(x, h)))
        fx.optimizer.SGD(0.5).minimize(loss)
    return main, startup, loss


MESSAGE = """\
op elementwise_mul: axis 0 of 'x' is 5 and axis 0 of 'softmax_0.tmp_0' is 1; the program gives these open axes one size
  feed one size, or declare the axes of the data with two names, as in fx.data(name, ["rows", ...])
  in %elementwise_mul_0.tmp_0 = elementwise_mul(%x, %softmax_0.tmp_0)
  written at """


def test_the_refusal_names_both_values_and_the_line():
    main, startup, loss = trained(-1)
    exe = fx.Executor()
    exe.run(startup)
    with pytest.raises(FeedError) as e:
        exe.run(main, feed={"x": X, "y": Y}, fetch_list=[loss])
    assert str(e.value).startswith(MESSAGE) and "test_open_axes.py" in str(e.value)


def ranks_run(rows, feed):
    main, startup, loss = trained(rows)
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        return [ranks.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(3)]


@pytest.mark.parametrize("rows, why", [(-1, "the program gives these open axes one size"), ("one", "ranks hold slices of them")])
def test_ranks_refuse_to_broadcast_what_they_hold_slices_of(rows, why):
    with pytest.raises(FeedError, match=f"axis 0 of 'x' is 5 and axis 0 of 'softmax_0.tmp_0' is 1; {why}"):
        ranks_run(rows, {"x": X, "y": Y})


def test_ranks_broadcast_an_axis_that_is_declared_1():
    np.testing.assert_allclose(ranks_run(1, {"x": X, "y": Y}), ranks_run(-1, {"x": X, "y": np.repeat(Y, 5, 0)}), 1e-5)


def test_a_weight_beyond_a_broadcast_row_has_its_whole_gradient():
    """Against the same training with the row repeated by the user."""
    losses = []
    for rows, y in ((-1, np.repeat(Y, 5, 0)), ("one", Y)):
        main, startup, loss = trained(rows)
        exe = fx.Executor()
        exe.run(startup)
        losses.append([exe.run(main, feed={"x": X, "y": y}, fetch_list=[loss])[0].item() for _ in range(3)])
    np.testing.assert_allclose(losses[0], losses[1], 1e-5)


def test_a_slice_of_the_batch_may_have_one_row():
    """Of a slice the program knows no more than that it may have another size."""
    main = fx.Program("sliced")
    with fx.program_guard(main, fx.Program()):
        x = fx.data("x", [-1, 3])
        x.stop_gradient = False
        first = L.slice(x, axes=[0], starts=[0], ends=[1])
        made = fx.gradients([L.reduce_sum(x * first)], [x])
    (dx,) = fx.Executor().run(main, feed={"x": X}, fetch_list=made)
    want = np.repeat(X[:1], 5, 0)
    want[0] += X.sum(0)
    np.testing.assert_allclose(dx, want, 1e-6)
