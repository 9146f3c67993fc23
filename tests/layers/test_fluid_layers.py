"""fluid's everyday layers: by hand on one device, and alike on ranks."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers


def build(write):
    """A program from a function that gives (loss or None, fetches)."""
    main, startup = fx.Program("main"), fx.Program("startup")
    main.random_seed = startup.random_seed = 3
    with fx.program_guard(main, startup), fx.unique_name.guard():
        fetches = write()
    return main, startup, fetches


def one_device(model, feeds):
    main, startup, fetches = model
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(startup, scope=scope)
    return [exe.run(main, feed=f, fetch_list=fetches, scope=scope) for f in feeds], scope


def on_ranks(model, feeds, strategy="data_parallel", ranks=2):
    main, startup, fetches = model
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        found = [exe.run(feed=f, fetch_list=fetches) for f in feeds]
        return found, {d.name: exe.state(d.name) for d in main.global_block().vars.values() if d.persistable}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, "float32")


# -- StaticRNN -------------------------------------------------------------------------------------------------------------------


def recurrent(minimize=True):
    x = fx.data("x", [4, None, 3], "float32")
    rnn = L.StaticRNN()
    with rnn.step():
        now = rnn.step_input(x)
        before = rnn.memory(shape=[-1, 5], batch_ref=now, init_value=0.5)
        hidden = L.fc([now, before], 5, act="tanh", param_attr=[fx.ParamAttr("wx"), fx.ParamAttr("wh")], bias_attr="b")
        rnn.update_memory(before, hidden)
        rnn.output(hidden, now)
    hiddens, same = rnn()
    loss = L.mean(L.square(hiddens))
    if minimize:
        fx.optimizer.SGD(0.1).minimize(loss)
    return [loss, hiddens, same]


def test_steps_of_a_static_rnn_are_those_of_a_loop_by_hand():
    x = normal(4, 2, 3)
    (found,), scope = one_device(build(lambda: recurrent(minimize=False)), [{"x": x}])
    h, wanted = np.full((2, 5), 0.5, "float32"), []
    for t in range(4):
        h = np.tanh(x[t] @ scope.get("wx") + h @ scope.get("wh") + scope.get("b"))
        wanted.append(h)
    np.testing.assert_allclose(found[1], wanted, rtol=1e-5, atol=1e-6)
    assert np.array_equal(found[2], x)


def test_a_static_rnns_gradient_is_that_of_the_layer_rnn():
    class Cell(L.RNNCell):
        def call(self, inputs, states):
            h = L.fc([inputs, states], 5, act="tanh", param_attr=[fx.ParamAttr("wx"), fx.ParamAttr("wh")], bias_attr="b")
            return h, h

    def by_cell():
        x = fx.data("x", [4, None, 3], "float32")
        init = L.fill_constant_batch_size_like(x, [-1, 5], "float32", 0.5, input_dim_idx=1)
        loss = L.mean(L.square(L.rnn(Cell(), x, initial_states=init, time_major=True)[0]))
        fx.optimizer.SGD(0.1).minimize(loss)
        return [loss]

    feeds = [{"x": normal(4, 2, 3, seed=k)} for k in range(3)]
    (mine, scope), (wanted, other) = one_device(build(recurrent), feeds), one_device(build(by_cell), feeds)
    np.testing.assert_allclose([m[0] for m in mine], [w[0] for w in wanted], rtol=1e-5)  # the order of additions
    for name in ("wx", "wh", "b"):
        np.testing.assert_allclose(scope.get(name), other.get(name), rtol=1e-5, atol=1e-6)


def test_a_branch_in_a_step_is_written_out_with_it():
    def write():
        x, nothing = fx.data("x", [3, 2], "float32"), L.zeros([2], "float32")
        rnn = L.StaticRNN()
        with rnn.step():
            now = rnn.step_input(x)
            total = rnn.memory(init=nothing)
            now = L.cond(L.reduce_sum(now) > 0.0, lambda: now * 10.0, lambda: now)
            rnn.update_memory(total, total + now)
            rnn.step_output(total + now)
        return [rnn()]

    (found,), _ = one_device(build(write), [{"x": np.float32([[1, 2], [-3, 1], [2, 2]])}])
    assert found[0].tolist() == [[10, 20], [7, 21], [27, 41]]


@pytest.mark.parametrize(
    "write, text",
    [
        (lambda rnn, x: rnn.step_input(x), "step_input must be called in `with rnn.step():`"),
        (lambda rnn, x: rnn(), "write the step first"),
    ],
)
def test_a_static_rnn_that_is_used_wrongly_says_what_to_write(write, text):
    with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ProgramError) as error:
        write(L.StaticRNN(), fx.data("x", [3, None, 2], "float32"))
    assert text in str(error.value)


def test_a_step_without_update_or_number_says_so():
    with fx.program_guard(fx.Program(), fx.Program()):
        x, open_ = fx.data("x", [3, None, 2], "float32"), fx.data("y", [None, 2], "float32")
        rnn = L.StaticRNN()
        with pytest.raises(fx.ProgramError, match="is never updated; call update_memory in the step"), rnn.step():
            rnn.memory(init=x)
            rnn.step_input(x)
        rnn = L.StaticRNN()
        with pytest.raises(fx.ProgramError, match="init must come from outside of the step"), rnn.step():
            rnn.memory(init=L.zeros([2], "float32"))
        rnn = L.StaticRNN()
        with pytest.raises(fx.ProgramError, match="the number of steps"), rnn.step():
            rnn.step_input(open_)


# -- IfElse and arrays --------------------------------------------------------------------------------------------------------------


def test_gradients_of_if_else_go_to_the_rows_of_each_way():
    def write():
        x = fx.data("x", [None, 2], "float32")
        x.stop_gradient = False
        ie = L.IfElse(L.slice(x, [1], [0], [1]) > 0.0)
        with ie.true_block():
            ie.output(L.log(ie.input(x)))  # of the other rows it would be NaN
        with ie.false_block():
            ie.output(ie.input(x) * 3.0)
        (y,) = ie()
        fx.append_backward(L.reduce_sum(y))
        return [y, "x@GRAD"]

    x = np.float32([[1, 2], [-1, 5], [4, 1]])
    (found,), _ = one_device(build(write), [{"x": x}])
    np.testing.assert_allclose(found[0], [[0, np.log(2)], [-3, 15], [np.log(4), 0]], rtol=1e-6)
    np.testing.assert_allclose(found[1], [[1, 0.5], [3, 3], [0.25, 1]], rtol=1e-6)
    (all_one_way,), _ = one_device(build(write), [{"x": np.float32([[1, 1]])}])
    assert all_one_way[0].tolist() == [[0, 0]]


def test_arrays_have_gradients():
    def write():
        x = fx.data("x", [2], "float32")
        x.stop_gradient = False
        first, second = L.zeros([1], "int64"), L.fill_constant([1], "int64", 1)
        array = L.array_write(x * 2.0, first)
        L.array_write(x * 3.0, second, array=array)
        L.array_write(x * x, first, array=array)  # over the one that was there
        fx.append_backward(L.reduce_sum(L.array_read(array, first)) + 5.0 * L.reduce_sum(L.array_read(array, second)))
        return ["x@GRAD"]

    (found,), _ = one_device(build(write), [{"x": np.float32([1, 2])}])
    assert found[0].tolist() == [17, 19]


def test_a_loop_fills_an_array_and_the_gradient_says_what_to_carry():
    def write(train=False):
        x = fx.data("x", [2], "float32")
        x.stop_gradient = False
        i, n = L.zeros([1], "int64"), L.fill_constant([1], "int64", 3)
        array = L.array_write(x * 1.0, i)
        more = L.less_than(i, n)
        loop = L.While(more)
        with loop.block():
            now = L.array_read(array, i)
            i = L.increment(i)
            L.array_write(now * 2.0, i, array=array)
            L.less_than(i, n, cond=more)
        last = L.array_read(array, n)
        if train:
            fx.append_backward(L.reduce_sum(last))
        return [last, L.array_length(array)]

    (found,), _ = one_device(build(write), [{"x": np.float32([1, 2])}])
    assert [v.tolist() for v in found] == [[8, 16], [4]]
    with pytest.raises(fx.ProgramError, match="the gradient of a loop goes through tensors, and .* is seq<f32\\[2\\]>; carry tensors"):
        build(lambda: write(train=True))


def test_an_array_is_written_one_element_after_the_other():
    def write():
        array = L.array_write(L.ones([2], "float32"), L.fill_constant([1], "int64", 2))
        return [L.array_length(array)]

    with pytest.raises(fx.ExecutionError, match="Position is 2, but the sequence has 0 elements"):
        one_device(build(write), [{}])
    with fx.program_guard(fx.Program(), fx.Program()):
        array = L.array_write(L.ones([2], "float32"), L.zeros([1], "int64"))
        with pytest.raises(fx.ProgramError, match="holds f32\\[2\\]; variable .* is i64\\[1\\]"):
            L.array_write(L.zeros([1], "int64"), L.zeros([1], "int64"), array=array)


# -- similarity, masks, losses ---------------------------------------------------------------------------------------------------------


def test_dice_loss_by_hand():
    def write():
        return [L.dice_loss(fx.data("x", [None, 2, 2], "float32"), fx.data("y", [None, 2, 1], "int64"))]

    x = np.float32([[[0.5, 0.5], [0.25, 0.75]], [[1, 0], [0, 1]]])
    (found,), _ = one_device(build(write), [{"x": x, "y": np.array([[[0], [1]], [[0], [1]]])}])
    # overlaps 1.25 and 2, sums 2 + 2 of both samples
    np.testing.assert_allclose(found[0], [(1 - 2.5 / 4.00001 + 1 - 4 / 4.00001) / 2], rtol=1e-5)


def test_a_mask_may_be_as_long_as_the_longest_sequence():
    def write():
        lengths = fx.data("n", [None, 2], "int64")
        return [L.sequence_mask(lengths, dtype="float32"), L.sequence_mask(lengths, maxlen=L.fill_constant([1], "int64", 2))]

    (found,), _ = one_device(build(write), [{"n": np.array([[1, 3], [0, 2]])}])
    assert found[0].tolist() == [[[1, 0, 0], [1, 1, 1]], [[0, 0, 0], [1, 1, 0]]]
    assert found[1].tolist() == [[[1, 0], [1, 1]], [[0, 0], [1, 1]]]


@pytest.mark.parametrize("slide", [0, 1, 2])
def test_auc_counts_all_batches_and_the_last_ones(slide):
    def write():
        score, label = fx.data("x", [None, 2], "float32"), fx.data("y", [None, 1], "int64")
        of_all, last, states = L.auc(score, label, num_thresholds=50, slide_steps=slide)
        assert len(states) == 4
        return [of_all, last]

    rng = np.random.default_rng(1)
    feeds = [{"x": rng.random((9, 2), "float32"), "y": rng.integers(0, 2, (9, 1))} for _ in range(4)]

    def by_metric(some):
        metric = fx.metrics.Auc(num_thresholds=50)
        for f in some:
            metric.update(f["x"], f["y"])
        return metric.eval()

    model = build(write)
    found, _ = one_device(model, feeds)
    for k, (of_all, last) in enumerate(found):
        assert of_all[0] == pytest.approx(by_metric(feeds[: k + 1]))
        assert last[0] == pytest.approx(by_metric(feeds[: k + 1][-slide:] if slide else feeds[: k + 1]))
    many, _ = on_ranks(model, feeds)
    assert np.array_equal(many, found)  # counts are whole numbers


# -- functions in Python ---------------------------------------------------------------------------------------------------------------


def with_function():
    x = fx.data("x", [None, 3], "float32")
    h = L.fc(x, 4, param_attr=fx.ParamAttr("w"))
    block = fx.default_main_program().current_block()
    cubed = block.create_var(name="cubed", dtype="float32", shape=[-1, 4])
    total = block.create_var(name="total", dtype="float32", shape=[1])
    L.py_func(lambda a: (a**3, a.sum(keepdims=True).reshape(1)), h, [cubed, total], lambda a, y, s, gy, gs: 3 * a**2 * gy + gs)
    loss = L.reduce_sum(cubed) + total
    fx.optimizer.SGD(0.01).minimize(loss)
    return [loss, cubed]


def test_a_function_in_python_has_the_gradient_that_it_is_given_and_sees_the_whole_batch_on_ranks():
    model = build(with_function)
    feeds = [{"x": normal(rows, 3, seed=rows)} for rows in (4, 5)]
    found, scope = one_device(model, feeds)
    first = feeds[0]["x"] @ fx_weights(model)
    np.testing.assert_allclose(found[0][1], first**3, rtol=1e-4, atol=1e-6)
    many, state = on_ranks(model, feeds)
    for a, b in zip(found, many):
        np.testing.assert_allclose(b[0], a[0], rtol=1e-4)  # the order of additions, cubed
    np.testing.assert_allclose(state["w"], scope.get("w"), rtol=1e-4, atol=1e-6)


def fx_weights(model):
    scope = fx.Scope()
    fx.Executor().run(model[1], scope=scope)
    return scope.get("w")


def test_a_function_that_gives_something_else_is_named():
    def write(made):
        def inner():
            x = fx.data("x", [None, 2], "float32")
            y = fx.default_main_program().current_block().create_var(name="y", dtype="float32", shape=[-1, 2])
            return [L.py_func(lambda a: made, x, y)]

        return inner

    for made, text in [
        (np.ones((1, 3), "float32"), r"result 0 should be float32\[2, 2\], the function returned float32\[1, 3\]"),
        (None, "the function returned 0 values for 1 results"),
    ]:
        with pytest.raises(fx.ExecutionError, match=text):
            one_device(build(write(made)), [{"x": np.ones((2, 2), "float32")}])


# -- parameters ------------------------------------------------------------------------------------------------------------------------


def normed(dim):
    def write():
        x = fx.data("x", [None, 3], "float32")
        y = L.fc(x, 4, param_attr=fx.WeightNormParamAttr(dim=dim, name="w"), bias_attr=False)
        loss = L.mean(L.square(y))
        fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
        return [loss, y]

    return write


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_normed_weight_begins_as_its_direction_and_keeps_its_length_apart(dim):
    model = build(normed(dim))
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(model[1], scope=scope)
    v, x = scope.get("w_v"), normal(2, 3)
    assert scope.get("w_g").shape == {None: (1, 1), 0: (3, 1), 1: (1, 4)}[dim]
    (_, y) = exe.run(model[0], feed={"x": x}, fetch_list=model[2], scope=scope)
    np.testing.assert_allclose(y, x @ v, rtol=1e-5, atol=1e-6)
    v, g = scope.get("w_v"), scope.get("w_g")
    axes = tuple(k for k in range(2) if k != dim)
    (_, y) = exe.run(model[0], feed={"x": x}, fetch_list=model[2], scope=scope)
    np.testing.assert_allclose(y, x @ (g * v / np.sqrt((v**2).sum(axes, keepdims=True))), rtol=1e-5, atol=1e-6)


# -- on ranks ----------------------------------------------------------------------------------------------------------------------------


def similar():
    x, y = fx.data("x", [None, 3], "float32"), fx.data("y", [None, 3], "float32")
    loss = L.mean(L.square(L.cos_sim(L.fc(x, 4), L.fc(y, 4))))
    fx.optimizer.Adam(0.01).minimize(loss)
    return [loss]


def drawn():
    x = fx.data("x", [None, 3], "float32")
    noise = L.gaussian_random_batch_size_like(x, [-1, 3], std=0.1) + L.uniform_random_batch_size_like(x, [-1, 3])
    loss = L.mean(L.fc(x + noise, 2, act="tanh"))
    fx.optimizer.Adam(0.01).minimize(loss)
    return [loss, noise]


def masked():
    x, n = fx.data("x", [None, 3], "float32"), fx.data("n", [None], "int64")
    mask = L.sequence_mask(n, maxlen=3, dtype="float32")
    loss = L.reduce_sum(L.fc(x, 3) * mask) / L.reduce_sum(mask)
    fx.optimizer.Adam(0.01).minimize(loss)
    return [loss, mask]


def averaged():
    x = fx.data("x", [None, 3], "float32")
    loss = L.mean(L.square(L.fc(x, 2)))
    fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    fx.optimizer.ModelAverage(0.5, min_average_window=2, max_average_window=3)
    return [loss]


def feed_of(model, rows, seed):
    rng = np.random.default_rng(seed)
    shapes = {d.name: d for d in model[0].global_block().vars.values() if d.is_data}
    made = {}
    for name, d in shapes.items():
        shape = [rows if s < 0 else s for s in d.shape]
        made[name] = rng.integers(1, 4, shape) if d.dtype == "int64" else rng.standard_normal(shape, "float32")
    return made


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "zero1"])
@pytest.mark.parametrize("write", [similar, drawn, masked, averaged, normed(1)], ids=lambda w: w.__name__)
def test_ranks_have_one_devices_answers(write, strategy):
    model = build(write)
    feeds = [feed_of(model, rows, rows) for rows in (4, 5, 3)]
    found, scope = one_device(model, feeds)
    many, state = on_ranks(model, feeds, strategy)
    for a, b in zip(found, many):
        for one, other in zip(a, b):
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)  # the order of additions
    for name, value in state.items():
        np.testing.assert_allclose(value, scope.get(name), rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_static_rnn_over_a_batch_that_ranks_share():
    def write():
        steps = L.transpose(fx.data("x", [None, 4, 3], "float32"), [1, 0, 2])
        rnn = L.StaticRNN()
        with rnn.step():
            now = rnn.step_input(steps)
            before = rnn.memory(shape=[-1, 5], batch_ref=now)
            hidden = L.fc([now, before], 5, act="tanh")
            rnn.update_memory(before, hidden)
            rnn.step_output(hidden)
        loss = L.mean(L.square(rnn()))
        fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
        return [loss]

    model = build(write)
    feeds = [{"x": normal(rows, 4, 3, seed=rows)} for rows in (4, 3)]
    (found, scope), (many, state) = one_device(model, feeds), on_ranks(model, feeds)
    np.testing.assert_allclose(many, found, rtol=1e-5)  # the order of additions
    for name, value in state.items():
        np.testing.assert_allclose(value, scope.get(name), rtol=1e-4, atol=1e-6)


def test_ranks_say_what_to_write_for_what_values_size():
    def write():
        x = fx.data("x", [None, 1], "float32")
        ie = L.IfElse(x > 0.0)
        with ie.true_block():
            ie.output(ie.input(x))
        with ie.false_block():
            ie.output(ie.input(x))
        return ie()

    with pytest.raises(fx.TranspileError, match="layers.where"):
        on_ranks(build(write), [])


# -- misuse ------------------------------------------------------------------------------------------------------------------------------


def test_an_activation_of_another_case_is_found():
    with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ProgramError, match="unknown act 'Relu'; did you mean 'relu'?"):
        L.fc(fx.data("x", [None, 2], "float32"), 2, act="Relu")


def test_a_variable_is_true_and_a_comparison_is_not_asked():
    with fx.program_guard(fx.Program(), fx.Program()):
        x = fx.data("x", [None, 2], "float32")
        assert x and [v for v in (x, None) if v] == [x]
        with pytest.raises(fx.ProgramError, match="use layers.cond or layers.While"):
            bool(x > 0.0)


def test_error_clip_is_set_and_taken_away():
    with fx.program_guard(fx.Program(), fx.Program()):
        x = fx.data("x", [None, 2], "float32")
        x.error_clip = fx.clip.ErrorClipByValue(max=2.0)
        assert x.error_clip == (-2.0, 2.0)
        x.error_clip = None
        assert x.error_clip is None
        with pytest.raises(fx.ProgramError, match="error_clip must be a clip.ErrorClipByValue or None"):
            x.error_clip = 2.0
