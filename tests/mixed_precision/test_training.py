"""`decorate` on one device, against NumPy: a step of mixed precision, the scale of the loss, and steps that are skipped."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import ProgramError, np_dtype
from fluidx.mixed_precision import decorate

L = fx.layers


class Trained:
    """One product, loss mean(square(x @ w)), and its optimizer."""

    def __init__(self, optimizer, start=0.5):
        self.main, self.startup = fx.Program("main"), fx.Program("startup")
        with fx.unique_name.guard(), fx.program_guard(self.main, self.startup):
            x = fx.data("x", [-1, 3], "float32")
            w = fx.ParamAttr(name="w", initializer=fx.initializer.Constant(start))
            self.loss = L.mean(L.square(L.fc(x, 2, param_attr=w, bias_attr=False)))
            self.ops, self.pairs = optimizer.minimize(self.loss)
        self.scope, self.exe = fx.executor.Scope(), fx.Executor()
        self.exe.run(self.startup, scope=self.scope)

    def step(self, x, fetch=()):
        return self.exe.run(self.main, feed={"x": np.asarray(x, "float32")}, fetch_list=[self.loss, *fetch], scope=self.scope)

    def get(self, name):
        return self.scope.get(name).copy()

    def state(self):
        return {d.name: self.get(d.name) for d in self.main.global_block().descs.values() if d.persistable}


def reference(x, w, scale, lr, dtype):
    """A step of mixed precision by its definition: each value in the precision that it has, products summed in float32."""
    half = np_dtype(dtype)

    def rounded(a):
        return np.asarray(a, "float32").astype(half).astype("float32")

    y = rounded(rounded(x) @ rounded(w))
    loss = np.square(y).mean(dtype="float32")
    dy = rounded(2 * y * np.float32(scale / y.size))
    dw = rounded(rounded(x).T @ dy) / np.float32(scale)
    return loss, w - np.float32(lr) * dw


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_is_that_of_the_definition(dtype):
    net = Trained(decorate(fx.optimizer.SGD(0.5), dtype=dtype, init_loss_scaling=64.0))
    x = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
    loss, w = reference(x, np.full((3, 2), 0.5, "float32"), 64.0, 0.5, dtype)
    (found,) = net.step(x)
    # float32 sums of 3 and 8 terms may be taken in another order: a few units in the last place
    np.testing.assert_allclose(found, [loss], rtol=1e-6)
    np.testing.assert_allclose(net.get("w"), w, rtol=1e-6)
    assert net.get("w").dtype == np.float32


def test_a_scale_saves_gradients_that_vanish_in_float16():
    x = np.full((4, 3), 2.0**-13, "float32")  # y is 1.5 * 2^-13, its gradient y/4, that of w 1.5 * 2^-26: float16 ends at 2^-24
    moved = {}
    for scale in (1.0, 2.0**12):
        net = Trained(decorate(fx.optimizer.SGD(2.0**24), init_loss_scaling=scale))
        net.step(x)
        moved[scale] = 0.5 - net.get("w")
    assert np.array_equal(moved[1.0], np.zeros((3, 2)))
    assert np.array_equal(moved[2.0**12], np.full((3, 2), 1.5 / 4))


OVERFLOW, FINE = np.full((2, 3), 1e30), np.ones((2, 3))


def test_the_scale_follows_its_rule():
    """Up after 2 good steps in a row, down after 2 bad ones, never below 1; the counts start anew."""
    net = Trained(decorate(fx.optimizer.SGD(0.0), init_loss_scaling=2.0, incr_every_n_steps=2, incr_ratio=4.0, decr_ratio=0.25))
    scale, good, bad, seen = 2.0, 0, 0, []
    for fine in (1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1):
        net.step(FINE if fine else OVERFLOW)
        good, bad = (good + 1, 0) if fine else (0, bad + 1)
        if good == 2:
            scale, good = scale * 4.0, 0
        if bad == 2:
            scale, bad = max(scale * 0.25, 1.0), 0
        assert [net.get(n).item() for n in ("loss_scaling_0", "num_good_steps_0", "num_bad_steps_0")] == [scale, good, bad]
        seen.append(scale)
    assert seen[1] == 8.0 and 1.0 in seen


def test_the_scale_stays_where_it_would_become_infinite():
    net = Trained(decorate(fx.optimizer.SGD(0.0), init_loss_scaling=2.0**127, incr_every_n_steps=1, decr_every_n_nan_or_inf=1000))
    net.step(np.zeros((2, 3)))  # 0 times any scale is fine
    assert net.get("loss_scaling_0") == 2.0**127 and net.get("num_good_steps_0") == 0


OPTIMIZERS = {
    "SGD": lambda: fx.optimizer.SGD(0.1),
    "Momentum": lambda: fx.optimizer.Momentum(0.1, 0.9),
    "Adam": lambda: fx.optimizer.Adam(0.1),
    "AdamW": lambda: fx.optimizer.AdamW(0.1),
    "Adamax": lambda: fx.optimizer.Adamax(0.1),
    "Lamb": lambda: fx.optimizer.Lamb(0.1),
    "LarsMomentum": lambda: fx.optimizer.LarsMomentum(0.1, 0.9),
    "RMSProp": lambda: fx.optimizer.RMSProp(0.1, centered=True, momentum=0.5),
    "decay and clip": lambda: fx.optimizer.Momentum(
        0.1, 0.9, regularization=fx.regularizer.L2Decay(0.1), grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_skipped_step_changes_neither_parameters_nor_state(optimizer):
    """Velocities do not roll on and powers of beta do not advance, as they would if only the gradient were set to 0."""
    net = Trained(decorate(optimizer()))
    net.step(FINE)
    before = net.state()
    net.step(OVERFLOW)
    after = net.state()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"num_good_steps_0", "num_bad_steps_0"}
    net.step(FINE)
    assert not np.array_equal(net.get("w"), before["w"])


def test_gradients_are_clipped_after_they_are_divided_by_the_scale():
    x = np.ones((2, 3), "float32")
    ends = []
    for wrap in (lambda o: o, lambda o: decorate(o, init_loss_scaling=2.0**10)):
        net = Trained(wrap(fx.optimizer.SGD(1.0, grad_clip=fx.clip.GradientClipByGlobalNorm(1.0))))
        net.step(x)
        ends.append(net.get("w"))
    np.testing.assert_allclose(np.linalg.norm(ends[0] - 0.5), 1.0, rtol=1e-6)
    assert np.array_equal(*ends)  # 1.5 and its multiples by powers of two are exact in float16


def test_a_constant_scale_of_1_adds_no_operator_beside_casts():
    plain = Trained(fx.optimizer.SGD(0.1))
    half = Trained(decorate(fx.optimizer.SGD(0.1), dtype="bfloat16", init_loss_scaling=1.0, use_dynamic_loss_scaling=False))
    assert [op.type for op in half.main.ops if op.type != "cast"] == [op.type for op in plain.main.ops]


def test_a_constant_scale_divides_and_skips_nothing():
    net = Trained(decorate(fx.optimizer.SGD(0.5), init_loss_scaling=8.0, use_dynamic_loss_scaling=False))
    kinds = {op.type for op in net.main.ops}
    assert "check_finite_and_unscale" in kinds and not kinds & {"update_loss_scaling", "where"}
    net.step(OVERFLOW)
    assert not np.isfinite(net.get("w")).any()


def test_the_scale_and_the_scaled_loss_can_be_fetched():
    scaled = decorate(fx.optimizer.SGD(0.1), init_loss_scaling=16.0)
    net = Trained(scaled)
    loss, scale, product = net.step(FINE, [scaled.get_loss_scaling(), scaled.get_scaled_loss()])
    assert scale == 16.0 and product == 16.0 * loss


def test_backward_and_apply_gradients_are_minimize():
    one = Trained(decorate(fx.optimizer.Momentum(0.1, 0.9)))

    class InTwo:
        def minimize(self, loss):
            o = decorate(fx.optimizer.Momentum(0.1, 0.9))
            pairs = o.backward(loss)
            return o.apply_gradients(pairs), pairs

    two = Trained(InTwo())
    assert str(one.main) == str(two.main) and [str(op) for op in one.ops] == [str(op) for op in two.ops]


def test_two_losses_with_an_optimizer_each():
    """The second one's forward operators stand behind the first one's updates, and both share a layer."""
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        h = L.fc(x, 4, act="relu")
        one, two = L.mean(L.square(L.fc(h, 2))), L.mean(L.square(L.fc(h, 3)))
        first, second = (decorate(fx.optimizer.SGD(0.1), init_loss_scaling=s) for s in (4.0, 8.0))
        pairs = first.backward(one), second.backward(two)
        first.apply_gradients(pairs[0]), second.apply_gradients(pairs[1])
    assert fx.Program.parse_from_string(str(main)) == main
    exe, scope = fx.Executor(), fx.executor.Scope()
    exe.run(startup, scope=scope)
    feed = {"x": np.random.default_rng(0).standard_normal((4, 3)).astype("float32")}
    losses = [exe.run(main, feed=feed, fetch_list=[one, two], scope=scope) for _ in range(20)]
    assert losses[-1][0] < losses[0][0] and losses[-1][1] < losses[0][1]


def test_an_error_of_the_backward_pass_leaves_the_program_as_it_was():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        loss = L.mean(L.matmul(fx.data("x", [-1, 3], "float32"), L.fill_constant([3, 3], "float32", 1.0)))
        before = str(main)
        scaled = decorate(fx.optimizer.SGD(0.1))
        with pytest.raises(ProgramError, match="has no parameters"):
            scaled.minimize(loss)
        assert str(main) == before
        scaled.minimize(loss + L.mean(L.create_parameter([3], "float32")))  # it can be tried again


def test_the_name_that_fluid_gives_it():
    assert fx.contrib.mixed_precision.decorate is decorate


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float8"}, "unknown dtype 'float8'; it is 'float16' or 'bfloat16'"),
        ({"dtype": "float32"}, "unknown dtype 'float32'; it is 'float16' or 'bfloat16'; without decorate all is computed in float32"),
        ({"reduce_dtype": "bfloat16"}, "unknown reduce_dtype 'bfloat16'; it is 'float16' or 'float32'"),
        ({"init_loss_scaling": 0}, "init_loss_scaling must be a finite number above 0 that float32 has, got 0"),
        ({"init_loss_scaling": 2.0**128}, "init_loss_scaling must be a finite number above 0 that float32 has, got 3.4"),
        ({"incr_ratio": 0.5}, "incr_ratio must be a finite number of 1 or more, got 0.5"),
        ({"decr_ratio": 1.5}, "decr_ratio must be a finite number above 0 and at most 1, got 1.5"),
        ({"incr_every_n_steps": 0}, "incr_every_n_steps must be 1 or more"),
        ({"amp_lists": ["matmul"]}, "amp_lists must be AutoMixedPrecisionLists"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ProgramError, match=message):
        decorate(fx.optimizer.SGD(0.1), **options)


def test_what_cannot_be_is_refused():
    with pytest.raises(ProgramError, match="optimizer must be an optimizer, got int: 3"):
        decorate(3)
    with pytest.raises(ProgramError, match="loss must be a Variable, got str: 'loss'"):
        decorate(fx.optimizer.SGD(0.1)).minimize("loss")
    with pytest.raises(ProgramError, match=r"\(SGD\(learning_rate=0.1\)\)\) trains in mixed precision already; decorate it once"):
        decorate(fx.optimizer.RecomputeOptimizer(decorate(fx.optimizer.SGD(0.1))), dtype="bfloat16")
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtyp'; did you mean 'dtype'"):
        decorate(fx.optimizer.SGD(0.1), dtyp="bfloat16")
    with pytest.raises(ProgramError, match="there is no scaled loss yet; call minimize or backward first"):
        decorate(fx.optimizer.SGD(0.1)).get_loss_scaling()
    net = Trained(fx.optimizer.SGD(0.1))
    with pytest.raises(ProgramError, match=r"there are no scaled gradients to apply; call backward\(loss\) first"):
        decorate(fx.optimizer.SGD(0.1)).apply_gradients(net.pairs)


def test_a_clip_of_gradients_on_their_way_is_refused():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        h = L.fc(fx.data("x", [-1, 3], "float32"), 2)
        fx.clip.ErrorClipByValue(0.1).attach(h)
        with pytest.raises(ProgramError, match="has an ErrorClipByValue, which would limit scaled gradients"):
            decorate(fx.optimizer.SGD(0.1)).minimize(L.mean(h))
