"""append_backward and gradients: names, accumulation, what is left out, second derivatives, recompute, errors."""

import inspect

import numpy as np
import pytest

import fluidx as fx
from fluidx.backward import append_backward, calc_gradient, gradients
from fluidx.executor import Executor, Scope
from fluidx.ir import Builder, OpDef, Program, ProgramError, Role, program_guard, unique_name
from fluidx.testing import numeric_grad


class Net:
    """A main and a startup program, a builder on the first, and a way to run both."""

    def __init__(self, dtype="float32"):
        self.main, self.startup, self.dtype = Program("main"), Program("startup"), dtype
        self.b = Builder(self.main.global_block())
        self.values = {}

    def data(self, name, shape, stop_gradient=True):
        block = self.main.global_block()
        return block.create_var(name, shape, self.dtype, is_data=True, stop_gradient=stop_gradient)

    def param(self, name, value, **kwargs):
        value = np.asarray(value, self.dtype)
        self.values[name] = value
        return self.main.global_block().create_parameter(value.shape, self.dtype, name, **kwargs)

    def run(self, fetch, feed=None):
        scope, exe = Scope(), Executor()
        for name, value in self.values.items():
            self.startup.global_block().create_parameter(value.shape, self.dtype, name)
            Builder(self.startup.global_block()).assign_value(
                shape=value.shape, dtype=self.dtype, values=value.ravel().tolist(), out={"Out": name}
            )
        exe.run(self.startup, scope=scope)
        return exe.run(self.main, feed=feed or {}, fetch_list=fetch, scope=scope)

    def types(self, role=None):
        return [op.type for op in self.main.ops if role is None or op.role == role]


@pytest.fixture
def net():
    with unique_name.guard():
        net = Net()
        with program_guard(net.main, net.startup):
            yield net


def message(error):
    return str(error.value)


# -- names, roles and values --------------------------------------------------------------------------------------------------


def test_a_parameter_used_once_gets_its_gradient_under_its_name(net):
    x, w = net.data("x", (-1, 3)), net.param("w", np.ones((3, 2)))
    loss = net.b.mean(net.b.mul(x, w))
    [(p, g)] = append_backward(loss)
    assert (p.name, g.name, g.shape, g.dtype, g.stop_gradient) == ("w", "w@GRAD", (3, 2), "float32", True)
    (finisher,) = [op for op in net.main.ops if op.role_var]
    assert finisher.role_var == ("w", "w@GRAD") and finisher.output_arg_names == ("w@GRAD",)
    value = net.run([g], {"x": np.arange(6, dtype="float32").reshape(2, 3)})[0]
    assert np.array_equal(value, np.array([[3, 3], [5, 5], [7, 7]], "float32") / 4)


def test_a_parameter_used_three_times_gets_renamed_terms_and_one_sum(net):
    w = net.param("w", [1.0, 2.0])
    y = net.b.elementwise_add(net.b.scale(net.b.scale(w, scale=2.0), scale=3.0), net.b.square(w))
    loss = net.b.mean(net.b.elementwise_mul(y, w))
    [(_, g)] = append_backward(loss)
    (total,) = [op for op in net.main.ops if op.type == "sum"]
    assert sorted(total.input_arg_names) == [f"w@GRAD@RENAME@block0@{i}" for i in range(3)]
    assert total.output_arg_names == ("w@GRAD",) and total.role_var == ("w", "w@GRAD")
    w = np.array([1.0, 2.0])
    assert np.allclose(net.run([g])[0], (12 * w + 3 * w**2) / 2)  # of (6 w + w^2) w


def test_loss_and_its_gradient_carry_fluids_roles_and_names(net):
    w = net.param("w", [1.0])
    loss = net.b.mean(net.b.square(w))
    append_backward(loss)
    assert [op.role for op in net.main.ops[:2]] == [Role.FORWARD, Role.LOSS]
    seed = net.main.ops[2]
    assert (seed.type, seed.output_arg_names, seed.attrs["value"]) == ("fill_constant", (f"{loss.name}@GRAD",), 1.0)
    assert {op.role for op in net.main.ops[2:]} == {Role.BACKWARD}


def test_intermediate_gradients_are_named_after_their_variables(net):
    w = net.param("w", [1.0, 2.0])
    h = net.b.square(w, name="h")
    append_backward(net.b.mean(net.b.tanh(h), name="loss"))
    assert {"h@GRAD", "w@GRAD", "loss@GRAD"} <= set(net.main.global_block().vars)


def test_every_gradient_operator_points_at_the_line_of_its_layer(net):
    w = net.param("w", [1.0, 2.0])
    line = inspect.currentframe().f_lineno + 1
    h = net.b.square(w)
    append_backward(net.b.mean(h))
    assert net.main.ops[-1].site.lineno == line and net.main.ops[-1].role_var == ("w", "w@GRAD")


def test_two_parameters_that_share_a_gradient_each_get_their_own(net):
    p, q = net.param("p", [1.0, 2.0]), net.param("q", [3.0, 4.0])
    pairs = append_backward(net.b.mean(net.b.elementwise_add(p, q)))
    assert [(a.name, g.name) for a, g in pairs] == [("p", "p@GRAD"), ("q", "q@GRAD")]
    assert {op.role_var for op in net.main.ops if op.role_var} == {("p", "p@GRAD"), ("q", "q@GRAD")}
    for value in net.run([g for _, g in pairs]):
        assert value.tolist() == [0.5, 0.5]


def test_a_parameter_added_to_itself(net):
    p = net.param("p", [1.0, 2.0])
    [(_, g)] = append_backward(net.b.mean(net.b.elementwise_add(p, p)))
    assert g.name == "p@GRAD" and net.run([g])[0].tolist() == [1.0, 1.0]


def test_a_parameter_that_is_only_passed_on_gets_an_assign(net):
    p = net.param("p", [3.0])
    loss = net.b.scale(p)
    [(_, g)] = append_backward(loss)
    assert net.types(Role.BACKWARD)[-1] == "assign" and net.run([g])[0].tolist() == [1.0]


def test_a_scalar_loss_without_axes(net):
    p = net.param("p", 3.0)
    loss = net.b.square(p)
    [(_, g)] = append_backward(loss)
    assert loss.shape == () and net.run([g])[0] == 6.0


# -- what is left out -------------------------------------------------------------------------------------------------------------


def test_gradients_of_data_are_not_computed(net):
    x, w = net.data("x", (-1, 3)), net.param("w", np.ones((3, 2)))
    append_backward(net.b.mean(net.b.mul(x, w)))
    assert sum(t in ("mul", "matmul") for t in net.types(Role.BACKWARD)) == 1
    assert "x@GRAD" not in net.main.global_block().vars


def test_data_with_stop_gradient_off_gets_its_gradient(net):
    x, w = net.data("x", (-1, 3), stop_gradient=False), net.param("w", np.ones((3, 2)))
    pairs = append_backward(net.b.mean(net.b.mul(x, w)))
    assert [p.name for p, _ in pairs] == ["w"]
    assert np.allclose(net.run(["x@GRAD"], {"x": np.ones((1, 3), "float32")})[0], 1.0)


def test_parameters_that_the_loss_does_not_use_are_left_out(net):
    p = net.param("p", [1.0])
    net.b.square(net.param("unused", [1.0]))
    pairs = append_backward(net.b.mean(net.b.square(p)))
    assert [p.name for p, _ in pairs] == ["p"] and "unused@GRAD" not in net.main.global_block().vars


def test_frozen_parameters_and_their_branches_cost_nothing(net):
    p, frozen = net.param("p", [1.0]), net.param("frozen", [1.0], trainable=False)
    pairs = append_backward(net.b.mean(net.b.elementwise_add(net.b.square(p), net.b.exp(frozen))))
    assert [p.name for p, _ in pairs] == ["p"]
    assert not any("frozen" in n or "exp" in n for op in net.main.ops if op.role == Role.BACKWARD for n in op.input_arg_names)


def test_parameter_list_limits_the_work(net):
    p, q = net.param("p", [1.0]), net.param("q", [1.0])
    loss = net.b.mean(net.b.elementwise_mul(net.b.exp(p), net.b.sin(q)))
    pairs = append_backward(loss, parameter_list=["q"])
    assert [a.name for a, _ in pairs] == ["q"] and "p@GRAD" not in net.main.global_block().vars


@pytest.mark.parametrize("form", ["name", "variable"])
def test_no_grad_set_makes_a_variable_constant(net, form):
    p, q = net.param("p", [2.0]), net.param("q", [3.0])
    h = net.b.square(p)
    loss = net.b.mean(net.b.elementwise_mul(h, net.b.elementwise_mul(p, q)))
    pairs = append_backward(loss, no_grad_set=[h.name] if form == "name" else {h})
    assert [v.item() for v in net.run([g for _, g in pairs])] == [12.0, 8.0]  # h q and h p, with h = p^2 held


def test_a_stop_gradient_that_the_user_sets_cuts_the_path(net):
    p = net.param("p", [2.0])
    h = net.b.square(p)
    h.stop_gradient = True
    [(_, g)] = append_backward(net.b.mean(net.b.elementwise_mul(h, p)))
    assert net.run([g])[0].item() == 4.0


def test_integer_paths_carry_no_gradient(net):
    p = net.param("p", [2.5])
    whole = net.b.cast(net.b.cast(p, dtype="int64"), dtype="float32")
    [(_, g)] = append_backward(net.b.mean(net.b.elementwise_mul(whole, p)))
    assert net.run([g])[0].item() == 2.0


# -- gradients of anything ----------------------------------------------------------------------------------------------------------


def test_gradients_of_an_input_that_is_data(net):
    x = net.data("x", (2,))
    y = net.b.square(x)
    (g,) = gradients(y, x)
    assert g.name == "x@GRAD" and net.run([g], {"x": np.array([1, 5], "float32")})[0].tolist() == [2.0, 10.0]
    assert calc_gradient is gradients


def test_gradients_with_an_open_axis_start_from_ones(net):
    x = net.data("x", (-1, 2))
    (g,) = gradients([net.b.square(x)], [x])
    assert g.shape == (-1, 2) and net.run([g], {"x": np.ones((3, 2), "float32")})[0].tolist() == [[2, 2]] * 3


def test_target_gradients_weigh_the_elements(net):
    x, v = net.data("x", (2,)), net.data("v", (2,))
    (g,) = gradients(net.b.square(x), x, target_gradients=v)
    feed = {"x": np.array([1, 5], "float32"), "v": np.array([10, 100], "float32")}
    assert net.run([g], feed)[0].tolist() == [20.0, 1000.0]


def test_gradients_of_several_targets_add_up_even_when_one_feeds_another(net):
    x = net.data("x", (1,))
    y = net.b.square(x)
    z = net.b.scale(y, scale=3.0)
    (g,) = gradients([y, z], [x])
    assert net.run([g], {"x": np.array([2], "float32")})[0].tolist() == [16.0]


def test_gradients_reach_an_intermediate_and_what_it_comes_from(net):
    x = net.data("x", (1,))
    h = net.b.square(x)
    dh, dx = gradients(net.b.square(h), [h, x])
    assert [v.item() for v in net.run([dh, dx], {"x": np.array([3], "float32")})] == [18.0, 108.0]


def test_inputs_that_do_not_matter_give_none(net):
    x, other = net.data("x", (1,)), net.data("other", (1,))
    assert gradients(net.b.square(x), [other, x])[0] is None


def test_the_gradient_of_a_target_for_itself_is_one(net):
    x = net.data("x", (2,))
    (g,) = gradients(x, x)
    assert net.run([g], {"x": np.zeros(2, "float32")})[0].tolist() == [1.0, 1.0]


def test_second_and_third_derivatives(net):
    x = net.data("x", (1,))
    y = net.b.elementwise_mul(net.b.elementwise_mul(x, x), net.b.elementwise_mul(x, x))
    (first,) = gradients(y, x)
    (second,) = gradients(first, x)
    (third,) = gradients(second, x)
    values = net.run([first, second, third], {"x": np.array([2.0], "float32")})
    assert [v.item() for v in values] == [32.0, 48.0, 48.0]


def test_a_penalty_on_a_gradient_can_be_trained(net):
    x, w = net.data("x", (1,)), net.param("w", [3.0])
    y = net.b.elementwise_mul(net.b.elementwise_mul(x, x), w)
    (slope,) = gradients(y, x)  # 2 x w
    [(_, g)] = append_backward(net.b.mean(net.b.square(slope)))
    assert net.run([g], {"x": np.array([2.0], "float32")})[0].item() == 96.0  # 8 x^2 w


def test_two_losses_in_one_program_get_different_gradients(net):
    w = net.param("w", [2.0])
    a, b = net.b.mean(net.b.square(w)), net.b.mean(net.b.exp(w))
    [(_, first)], [(_, second)] = append_backward(a), append_backward(b)
    assert (first.name, second.name) == ("w@GRAD", "w@GRAD_0")
    assert np.allclose(np.ravel(net.run([first, second])), [4.0, np.exp(2.0)])


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_agree_with_central_differences(seed):
    rng = np.random.default_rng(seed)
    net = Net("float64")
    names = [f"p{i}" for i in range(3)]
    with unique_name.guard(), program_guard(net.main, net.startup):
        start = {n: rng.uniform(0.3, 1.0, (2, 3)) for n in names}
        pool = [net.param(n, v) for n, v in start.items()]
        for _ in range(10):
            x, y = (pool[k] for k in rng.integers(0, len(pool), 2))
            one = ("tanh", "sigmoid", "square", "scale", "exp")[rng.integers(5)]
            two = ("elementwise_add", "elementwise_mul", "elementwise_sub")[rng.integers(3)]
            pool.append(net.b.emit(two, x, y) if rng.random() < 0.6 else net.b.tanh(net.b.emit(one, x)))
        used = [net.b.scale(v, scale=0.5) for v in pool[-3:]]
        loss = net.b.mean(net.b.emit("sum", used))
        pairs = append_backward(loss)
        found = dict(zip([p.name for p, _ in pairs], net.run([g for _, g in pairs]), strict=True))
        for n in found:
            k = tuple(rng.integers(0, s) for s in (2, 3))
            ends = []
            for h in (1e-5, -1e-5):
                net.values = {m: v.copy() for m, v in start.items()}
                net.values[n][k] += h
                ends.append(net.run([loss])[0].item())
            assert found[n][k] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-7)


# -- recompute ------------------------------------------------------------------------------------------------------------------------


def _deep(net, layers=6):
    x = net.data("x", (-1, 4))
    rng = np.random.default_rng(0)
    h, marks = x, []
    for i in range(layers):
        w = net.param(f"w{i}", rng.standard_normal((4, 4)) * 0.5)
        h = net.b.tanh(net.b.mul(h, w))
        if i % 2:
            marks.append(h)
    return net.b.mean(h), marks


def test_recompute_gives_the_same_gradients_from_second_copies():
    feed = {"x": np.random.default_rng(1).standard_normal((5, 4)).astype("float32")}
    results = []
    for recompute in (False, True):
        net = Net()
        with unique_name.guard(), program_guard(net.main, net.startup):
            loss, marks = _deep(net)
            pairs = append_backward(loss, checkpoints=marks[:-1] if recompute else None)
        results.append(net.run([g for _, g in pairs], feed))
        copies = [n for n in net.main.global_block().vars if "@RECOMPUTE" in n]
        assert bool(copies) == recompute
        if recompute:
            # beside checkpoints, the backward part reads no forward value of the segments before the last checkpoint
            produced = {n for op in net.main.ops if op.role == Role.FORWARD for n in op.output_arg_names}
            last = max(i for i, op in enumerate(net.main.ops) if marks[-2].name in op.output_arg_names)
            early = {n for op in net.main.ops[: last + 1] for n in op.output_arg_names} - {m.name for m in marks}
            read = {n for op in net.main.ops if op.role == Role.BACKWARD for n in op.input_arg_names}
            assert not read & early & produced
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


def test_recompute_repeats_dropout_and_advances_batch_norm_once():
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((6, 1, 8, 8)).astype("float32"), "y": rng.integers(0, 10, (6, 1))}
    results = []
    for recompute in (False, True):
        main, startup = fx.Program(), fx.Program()
        with fx.program_guard(main, startup), fx.unique_name.guard():
            x, y = fx.data("x", [-1, 1, 8, 8], "float32"), fx.data("y", [-1, 1], "int64")
            first = fx.layers.batch_norm(fx.layers.conv2d(x, 4, 3, padding=1, act="relu"))
            h = fx.layers.dropout(fx.layers.pool2d(first, 2, "max", 2), 0.3, seed=5)
            second = fx.layers.fc(h, 16, act="tanh")
            loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(second, 10), y))
            pairs = append_backward(loss, checkpoints=[first, second] if recompute else None)
            fx.optimizer.Adam(1e-2).apply_gradients(pairs)
        assert [op.type for op in main.ops].count("dropout") == 1 + recompute
        scope, exe = Scope(), Executor()
        exe.run(startup, scope=scope)
        for _ in range(3):
            values = exe.run(main, feed=feed, fetch_list=[loss, "batch_norm_0.w_1"], scope=scope)
        results.append(values)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def _conv_and_norms(x, y):
    """Behind each checkpoint an op that is asked for the gradient of a value that is computed again."""
    h = fx.layers.conv2d(fx.layers.tanh(fx.layers.conv2d(x, 4, 3, padding=1)), 4, 3, padding=1)
    h = fx.layers.group_norm(fx.layers.relu(fx.layers.batch_norm(fx.layers.sigmoid(h))), groups=2)
    h = fx.layers.layer_norm(fx.layers.tanh(fx.layers.pool2d(h, 2, "max", 2)), begin_norm_axis=1)
    return fx.layers.mean(fx.layers.square_error_cost(y, fx.layers.tanh(fx.layers.fc(h, 1))))


def test_gradients_flow_on_through_values_that_are_computed_again():
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((6, 1, 8, 8)).astype("float32"), "y": rng.standard_normal((6, 1)).astype("float32")}
    results = []
    for recompute in (False, True):
        main, startup = fx.Program(), fx.Program()
        with fx.program_guard(main, startup), fx.unique_name.guard():
            loss = _conv_and_norms(fx.data("x", [-1, 1, 8, 8], "float32"), fx.data("y", [-1, 1], "float32"))
            pairs = append_backward(loss, checkpoints=[main.ops[-1].input_arg_names[0]] if recompute else None)
        scope, exe = Scope(), Executor()
        exe.run(startup, scope=scope)
        results.append({p.name: v for (p, _), v in zip(pairs, exe.run(main, feed=feed, fetch_list=[g for _, g in pairs], scope=scope))})
    assert results[0].keys() == results[1].keys() and len(results[0]) == 12
    assert all(np.array_equal(results[0][n], results[1][n]) for n in results[0])


def test_the_gradient_of_data_flows_through_a_convolution(net):
    x = net.data("x", (-1, 1, 4, 4))
    x.stop_gradient = True
    y = net.b.conv2d(x, net.param("w", np.ones((1, 1, 2, 2))))
    (g,) = gradients(net.b.reduce_sum(y), [x])
    (found,) = net.run([g], {"x": np.zeros((1, 1, 4, 4), "float32")})
    assert np.array_equal(found[0, 0], np.outer([1, 2, 2, 1], [1, 2, 2, 1]))  # in how many windows an element is


def test_a_checkpoint_must_be_computed(net):
    w = net.param("w", [1.0])
    with pytest.raises(ProgramError, match="the checkpoint 'w' is not computed by any operator"):
        append_backward(net.b.mean(net.b.square(w)), checkpoints=[w])


# -- errors ---------------------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_one_number_is_refused_with_its_shape(net):
    y = net.b.square(net.param("w", [1.0, 2.0]))
    with pytest.raises(ProgramError, match=r"must be one number, of shape \[1\] or \[\]; .* has shape \[2\]"):
        append_backward(y)


def test_a_loss_that_no_operator_computes_is_refused(net):
    with pytest.raises(ProgramError, match="no operator of program main computes the loss 'x'"):
        append_backward(net.data("x", (1,)))
    with pytest.raises(ProgramError, match="loss must be a Variable, got float"):
        append_backward(1.0)


def test_a_loss_without_trainable_parameters_says_why(net):
    x = net.data("x", (1,))
    with pytest.raises(ProgramError, match="program main has no parameters"):
        append_backward(net.b.square(x))
    w = net.param("w", [1.0])
    with pytest.raises(ProgramError, match="no operator connects them"):
        append_backward(net.b.square(x))
    h = net.b.square(w, name="h")
    h.stop_gradient = True
    with pytest.raises(ProgramError, match="the path is cut at 'h', where stop_gradient is set"):
        append_backward(net.b.square(h))


def test_asked_parameters_that_do_not_matter_are_listed(net):
    p, other = net.param("p", [1.0]), net.param("other", [1.0])
    frozen = net.param("frozen", [1.0], trainable=False)
    loss = net.b.mean(net.b.square(p))
    before = net.main.copy()
    with pytest.raises(ProgramError, match="does not depend on 'other'"):
        append_backward(loss, parameter_list=[p, other])
    with pytest.raises(ProgramError, match="'frozen' is in parameter_list, but it is not trainable"):
        append_backward(loss, parameter_list=[frozen])
    with pytest.raises(ProgramError, match="does not depend on 'p'; it is in no_grad_set"):
        append_backward(loss, parameter_list=[p], no_grad_set=["p"])
    with pytest.raises(ProgramError, match="no variable 'q'"):
        append_backward(loss, no_grad_set=["q"])
    assert net.main == before


class _Opaque(OpDef):
    """X, through an op that declares no gradient."""

    name = "test_backward_opaque"
    inputs = ("X",)

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def kernel(xp, x, *, out):
        xp.copyto(out, x)


def test_an_op_without_a_gradient_is_named_with_its_line_only_when_one_is_needed(net):
    w, x = net.param("w", [1.0]), net.data("x", (1,))
    append_backward(net.b.mean(net.b.elementwise_mul(w, net.b.test_backward_opaque(x))))
    line = inspect.currentframe().f_lineno + 1
    y = net.b.test_backward_opaque(w)
    loss = net.b.mean(y)
    before = net.main.copy()
    with pytest.raises(ProgramError) as error:
        append_backward(loss)
    assert "op test_backward_opaque has no gradient" in message(error) and "'w'" in message(error)
    assert f"line {line}" in message(error) and __file__ in message(error)
    assert net.main == before  # nothing half-written is left


def test_a_value_that_is_overwritten_before_its_gradient_is_refused(net):
    w = net.param("w", [1.0])
    h = net.b.scale(w, scale=2.0)
    loss = net.b.mean(net.b.square(h))
    net.b.fill_constant(shape=(1,), value=0.0, out={"Out": h})
    with pytest.raises(ProgramError, match="the gradient of square needs .* which fill_constant overwrites"):
        append_backward(loss)


def test_a_name_that_is_written_twice_has_two_values(net):
    w = net.param("w", [3.0])
    h = net.b.scale(w, scale=2.0)
    first = net.b.scale(h, scale=5.0)
    net.b.scale(w, scale=7.0, out={"Out": h})
    second = net.b.scale(h, scale=100.0)
    net.b.fill_constant(shape=(1,), value=0.0, out={"Out": h})
    third = net.b.scale(h, scale=1000.0)
    [(_, g)] = append_backward(net.b.mean(net.b.emit("sum", [first, second, third])))
    assert net.run([g])[0].item() == 710.0


def test_gradients_checks_its_arguments(net):
    x, other = net.data("x", (2,)), Net().data("x", (2,))
    y = net.b.square(x)
    with pytest.raises(ProgramError, match="1 targets need 1 target_gradients, got 2"):
        gradients(y, x, target_gradients=[None, None])
    with pytest.raises(ProgramError, match="must be f32"):
        gradients(y, x, target_gradients=net.data("v", (3,)))
    with pytest.raises(ProgramError, match="belongs to another program"):
        gradients(y, other)
    with pytest.raises(ProgramError, match="inputs must be a Variable, got str"):
        gradients(y, "x")


def test_callbacks_see_every_differentiated_operator(net):
    w = net.param("w", [1.0])
    seen = []
    loss = net.b.mean(net.b.square(w))
    append_backward(loss, callbacks=[lambda block, context: seen.append(context["op"].type)])
    assert seen == ["mean", "square"]


@pytest.mark.parametrize(
    "like",
    [
        lambda h: fx.layers.fill_constant_batch_size_like(h, [-1, 2], "float32", 3.0),
        lambda h: fx.layers.zeros_like(h),
        lambda h: fx.layers.ones_like(h),
        lambda h: Builder(h.block).uniform_random_batch_size_like(h, shape=(-1, 2), seed=3),
    ],
)
def test_what_reads_only_the_size_of_a_value_is_a_constant(net, like):
    w = net.param("w", [[1.0, 2.0]])
    h = net.b.mul(net.data("x", (-1, 1)), w)
    constant = like(h)
    loss = net.b.reduce_sum(net.b.elementwise_mul(net.b.elementwise_add(h, constant), constant))
    _, [(_, g)] = fx.optimizer.SGD(0.1).minimize(loss)
    assert constant.stop_gradient and not h.stop_gradient
    got, c = net.run([g, constant], {"x": np.float32([[2], [3]])})
    assert np.allclose(got, [[2, 3] @ c])


def test_the_second_derivative_of_where(net):
    x = net.data("x", (3,))
    y = net.b.where(net.b.greater_than(x, net.b.fill_constant(shape=(1,), value=0.0)), net.b.elementwise_mul(x, x), x)
    (first,) = gradients(net.b.elementwise_mul(y, y), x)
    (second,) = gradients(first, x)
    assert net.run([second], {"x": np.float32([-1, 1, 2])})[0].tolist() == [2.0, 12.0, 48.0]


# -- broadcasting over open axes ------------------------------------------------------------------------------------------------

FIRST = {"axes": [0], "starts": [0], "ends": [1]}
BROADCASTS = {
    "sub": lambda b, h: b.elementwise_sub(h, b.slice(h, **FIRST)),
    "add": lambda b, h: b.elementwise_add(b.slice(h, **FIRST), b.square(h)),
    "mul": lambda b, h: b.elementwise_mul(b.slice(h, **FIRST), h),
    "div": lambda b, h: b.elementwise_div(h, b.slice(h, **FIRST)),
    "where": lambda b, h: b.where(b.greater_than(h, b.fill_constant(shape=(1,), dtype="float64", value=1.0)), h, b.slice(h, **FIRST)),
    "batched matmul": lambda b, h: b.matmul(b.unsqueeze(h, axes=[1]), b.unsqueeze(b.slice(b.exp(h), **FIRST), axes=[2])),
    "the last row": lambda b, h: b.elementwise_add(b.square(h), b.slice(h, axes=[0], starts=[-1], ends=[2**31 - 1])),
}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", BROADCASTS)
def test_what_was_broadcast_over_an_open_axis_is_summed(name, rows):
    net = Net("float64")
    with unique_name.guard(), program_guard(net.main, net.startup):
        x = net.data("x", (-1, 3), stop_gradient=False)
        loss = net.b.reduce_sum(net.b.square(BROADCASTS[name](net.b, net.b.scale(x, scale=2.0))))
        (g,) = gradients(loss, x)
        value = np.random.default_rng(0).uniform(0.6, 2.0, (rows, 3))
        want = numeric_grad(lambda v: net.run([loss], {"x": v})[0].item(), value)
        np.testing.assert_allclose(net.run([g], {"x": value})[0], want, rtol=1e-6)


def test_operands_of_one_batch_are_not_summed(net):
    """Where both operands come from the batch, however deep, the gradient needs no reduce_to."""
    x, y, w = net.data("x", (-1, 6)), net.data("y", (-1, 1)), net.param("w", np.ones((6, 6)))
    h = net.b.mul(x, w)
    h = net.b.elementwise_add(h, net.b.relu(h))
    h = net.b.transpose(net.b.reshape(h, shape=(-1, 2, 3)), axis=(0, 2, 1))
    h = net.b.elementwise_mul(h, net.b.softmax(h))
    append_backward(net.b.mean(net.b.elementwise_sub(net.b.reduce_sum(h, dim=(1, 2), keep_dim=False), net.b.squeeze(y, axes=[1]))))
    assert "reduce_to" not in net.types()
