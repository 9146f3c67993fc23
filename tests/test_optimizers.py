"""Every optimizer against its formula in plain NumPy, float64, over three steps; then names, options and errors."""

import numpy as np
import pytest

from fluidx import optimizer
from fluidx.executor import Executor, Scope
from fluidx.ir import OPS, Builder, Program, ProgramError, Role, TensorType, program_guard, unique_name
from fluidx.ops.update.base import BLOCK, Update
from fluidx.param_attr import ParamAttr
from fluidx.regularizer import L1Decay, L2Decay


class Training:
    """Parameters whose gradients are fed: the loss is the mean of parameter * feed * size, so its gradient is the feed exactly."""

    def __init__(self, dtype="float64", **params):
        self.main, self.startup = Program("main"), Program("startup")
        self.scope, self.exe, self.dtype = Scope(), Executor(), dtype
        terms = []
        self.start = {}
        with self.guard():
            b = Builder(self.main.global_block())
            for name, (value, attr) in params.items():
                self.start[name] = np.asarray(value, dtype)
                p = self.parameter(name, ParamAttr() if attr is None else attr)
                g = self.main.global_block().create_var(f"{name}_feed", p.shape, dtype, is_data=True, stop_gradient=True)
                terms.append(b.scale(b.mean(b.elementwise_mul(p, g)), scale=float(self.start[name].size)))
            self.loss = b.emit("sum", terms)

    def guard(self):
        return program_guard(self.main, self.startup)

    def parameter(self, name, attr):
        value, block = self.start[name], self.startup.global_block()
        block.create_parameter(value.shape, self.dtype, name)
        Builder(block).assign_value(shape=value.shape, dtype=self.dtype, values=value.ravel().tolist(), out={"Out": name})
        return self.main.global_block().create_parameter(value.shape, self.dtype, name, attr.trainable, **attr.record())

    def minimize(self, opt, **kwargs):
        with self.guard(), unique_name.guard():
            return opt.minimize(self.loss, **kwargs)

    def run(self, grads, fetch=()):
        """One list of values of the parameters per step."""
        self.exe.run(self.startup, scope=self.scope)
        out = []
        for step in grads:
            feed = {f"{n}_feed": np.asarray(g, self.dtype) for n, g in step.items()}
            out.append(self.exe.run(self.main, feed=feed, fetch_list=[*self.start, *fetch], scope=self.scope))
        return out


RNG = np.random.default_rng(7)
START = RNG.standard_normal((2, 4))
GRADS = [RNG.standard_normal((2, 4)) for _ in range(3)]


# -- the formulas, each as a generator of parameters --------------------------------------------------------------------------------


def sgd(p, grads, lr):
    for g in grads:
        p = p - lr * g
        yield p


def momentum(p, grads, lr, mu, nesterov=False):  # Sutskever et al. 2013, in fluid's form
    v = 0
    for g in grads:
        v = mu * v + g
        p = p - lr * (g + mu * v if nesterov else v)
        yield p


def lars(p, grads, lr, mu, coeff, decay, epsilon=0.0):  # You et al. 2017, algorithm 1
    v = 0
    for g in grads:
        pn, gn = np.linalg.norm(p), np.linalg.norm(g)
        local = lr * coeff * pn / (gn + decay * pn + epsilon) if pn > 0 and gn > 0 else lr
        v = mu * v + local * (g + decay * p)
        p = p - v
        yield p


def adagrad(p, grads, lr, epsilon, start=0.0):  # Duchi et al. 2011
    m = start
    for g in grads:
        m = m + g * g
        p = p - lr * g / (np.sqrt(m) + epsilon)
        yield p


def decayed_adagrad(p, grads, lr, decay, epsilon):
    m = 0
    for g in grads:
        m = decay * m + (1 - decay) * g * g
        p = p - lr * g / (np.sqrt(m) + epsilon)
        yield p


def adam(p, grads, lr, b1, b2, epsilon, coeff=0.0):  # Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2
    m = v = 0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        p = p * (1 - lr * coeff) - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + epsilon)
        yield p


def adamax(p, grads, lr, b1, b2, epsilon):  # Kingma & Ba 2015, algorithm 2
    m = n = 0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        n = np.maximum(b2 * n + epsilon, np.abs(g))
        p = p - lr / (1 - b1**t) * m / n
        yield p


def lamb(p, grads, lr, b1, b2, epsilon, decay, correct=False):  # You et al. 2020, algorithm 2
    m = v = 0
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        mh, vh = (m / (1 - b1**t), v / (1 - b2**t)) if correct else (m, v)
        u = mh / (np.sqrt(vh) + epsilon) + decay * p
        p = p - lr * np.linalg.norm(p) / np.linalg.norm(u) * u
        yield p


def adadelta(p, grads, lr, rho, epsilon):  # Zeiler 2012, algorithm 1
    a = d = 0
    for g in grads:
        a = rho * a + (1 - rho) * g * g
        u = -np.sqrt((d + epsilon) / (a + epsilon)) * g
        d = rho * d + (1 - rho) * u * u
        p = p + lr * u
        yield p


def rmsprop(p, grads, lr, rho, epsilon, mu, centered):  # Hinton, lecture 6e; Graves 2013, equations 38 to 45
    s = a = m = 0
    for g in grads:
        s = rho * s + (1 - rho) * g * g
        a = rho * a + (1 - rho) * g
        m = mu * m + lr * g / np.sqrt(s - (a * a if centered else 0) + epsilon)
        p = p - m
        yield p


def ftrl(p, grads, lr, l1, l2, power):  # McMahan et al. 2013, algorithm 1, with a general power as in fluid
    n = np.zeros_like(p)
    z = np.zeros_like(p)
    for g in grads:
        new = n + g * g
        z = z + g - (new**-power - n**-power) / lr * p
        n = new
        p = np.where(np.abs(z) > l1, (l1 * np.sign(z) - z) / (n**-power / lr + 2 * l2), 0.0)
        yield p


CASES = {
    "sgd": (optimizer.SGD(0.1), sgd(START, GRADS, 0.1)),
    "momentum": (optimizer.Momentum(0.1, 0.9), momentum(START, GRADS, 0.1, 0.9)),
    "nesterov": (optimizer.Momentum(0.1, 0.8, use_nesterov=True), momentum(START, GRADS, 0.1, 0.8, True)),
    "lars": (optimizer.LarsMomentum(0.1, 0.9), lars(START, GRADS, 0.1, 0.9, 0.001, 0.0005)),
    "lars epsilon": (optimizer.LarsMomentum(0.1, 0.9, 0.02, 0.1, epsilon=0.5), lars(START, GRADS, 0.1, 0.9, 0.02, 0.1, 0.5)),
    "adagrad": (optimizer.Adagrad(0.1, initial_accumulator_value=0.1), adagrad(START, GRADS, 0.1, 1e-6, 0.1)),
    "decayed adagrad": (optimizer.DecayedAdagrad(0.1, 0.9, 1e-3), decayed_adagrad(START, GRADS, 0.1, 0.9, 1e-3)),
    "adam": (optimizer.Adam(0.01), adam(START, GRADS, 0.01, 0.9, 0.999, 1e-8)),
    "adam epsilon": (optimizer.Adam(0.01, 0.5, 0.6, 0.1), adam(START, GRADS, 0.01, 0.5, 0.6, 0.1)),
    "adamw": (optimizer.AdamW(0.01, weight_decay=0.2), adam(START, GRADS, 0.01, 0.9, 0.999, 1e-8, 0.2)),
    "adamw spared": (optimizer.AdamW(0.01, apply_decay_param_fun=lambda n: n != "w"), adam(START, GRADS, 0.01, 0.9, 0.999, 1e-8)),
    "adamax": (optimizer.Adamax(0.01, 0.8, 0.9), adamax(START, GRADS, 0.01, 0.8, 0.9, 1e-8)),
    "lamb": (optimizer.Lamb(0.01), lamb(START, GRADS, 0.01, 0.9, 0.999, 1e-6, 0.01)),
    "lamb corrected": (optimizer.Lamb(0.01, 0.3, bias_correction=True), lamb(START, GRADS, 0.01, 0.9, 0.999, 1e-6, 0.3, True)),
    "lamb spared": (optimizer.Lamb(0.01, exclude_from_weight_decay_fn=lambda p: True), lamb(START, GRADS, 0.01, 0.9, 0.999, 1e-6, 0.0)),
    "adadelta": (optimizer.Adadelta(0.5, 1e-3, 0.8), adadelta(START, GRADS, 0.5, 0.8, 1e-3)),
    "rmsprop": (optimizer.RMSProp(0.01, 0.9, 1e-3), rmsprop(START, GRADS, 0.01, 0.9, 1e-3, 0.0, False)),
    "rmsprop centered": (optimizer.RMSProp(0.01, 0.9, 1e-3, 0.7, True), rmsprop(START, GRADS, 0.01, 0.9, 1e-3, 0.7, True)),
    "ftrl": (optimizer.Ftrl(0.1, 0.1, 0.2), ftrl(START, GRADS, 0.1, 0.1, 0.2, -0.5)),
    "ftrl power": (optimizer.Ftrl(0.1, 0.0, 0.2, -0.7), ftrl(START, GRADS, 0.1, 0.0, 0.2, -0.7)),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_follow_the_formula(case):
    opt, expected = CASES[case]
    training = Training(w=(START, None))
    training.minimize(opt)
    for (found,), wanted in zip(training.run([{"w": g} for g in GRADS]), expected, strict=True):
        assert np.allclose(found, wanted, rtol=1e-12, atol=1e-14)


# -- names, roles and state ----------------------------------------------------------------------------------------------------------


def test_adam_writes_fluids_names_and_links_its_state():
    training = Training("float32", w=(START, None))
    ops, pairs = training.minimize(optimizer.Adam(0.01))
    assert [(p.name, g.name) for p, g in pairs] == [("w", "w@GRAD")]
    assert [op.type for op in ops] == ["adam", "scale", "scale"] and {op.role for op in ops} == {Role.OPTIMIZE}
    state = {n: v for n, v in training.main.global_block().vars.items() if v.persistable and n != "w"}
    assert set(state) == {"learning_rate_0", "w_moment1_0", "w_moment2_0", "w_beta1_pow_acc_0", "w_beta2_pow_acc_0"}
    assert all(v.desc.attrs.get("state_of") == "w" for n, v in state.items() if n != "learning_rate_0")
    assert all(training.startup.global_block().var(n).persistable and v.stop_gradient for n, v in state.items())
    assert {op.output_arg_names[0] for op in training.startup.ops if op.type == "fill_constant"} == set(state)


def test_update_operators_write_in_place():
    training = Training(w=(START, None))
    ops, _ = training.minimize(optimizer.Momentum(0.1, 0.9))
    assert ops[0].input("Param") == ops[0].output("ParamOut") == ("w",)
    assert ops[0].input("Velocity") == ops[0].output("VelocityOut") == ("w_velocity_0",)


def test_norms_of_lamb_and_lars_are_operators_of_their_own():
    for opt, types in (
        (optimizer.Lamb(), ["lamb_update", "squared_l2_norm", "squared_l2_norm", "lamb_apply"]),
        (optimizer.LarsMomentum(0.1, 0.9), ["squared_l2_norm", "squared_l2_norm", "lars_momentum"]),
    ):
        ops, _ = Training(w=(START, None)).minimize(opt)
        assert [op.type for op in ops] == types


def test_a_parameters_own_rate_scales_the_learning_rate_once_per_factor():
    half = ParamAttr(learning_rate=0.5)
    training = Training(a=([1.0], half), b=([1.0], half), c=([1.0], None))
    ops, _ = training.minimize(optimizer.SGD(0.1))
    assert [op.type for op in ops].count("scale") == 1
    (values,) = training.run([{"a": [1.0], "b": [1.0], "c": [1.0]}])
    assert np.allclose(np.ravel(values), [0.95, 0.95, 0.9])


def test_a_learning_rate_can_be_a_variable_that_is_fed():
    training = Training(w=([1.0], None))
    with training.guard():
        rate = training.main.global_block().create_var("rate", (1,), "float64", is_data=True, stop_gradient=True)
    training.minimize(optimizer.SGD(rate))
    training.exe.run(training.startup, scope=training.scope)
    feed = {"w_feed": np.ones(1), "rate": np.array([0.25])}
    assert training.exe.run(training.main, feed=feed, fetch_list=["w"], scope=training.scope)[0].tolist() == [0.75]


def test_parameter_list_and_no_grad_set_limit_what_is_trained():
    for kwargs in ({"parameter_list": ["a"]}, {"no_grad_set": {"b"}}):
        training = Training(a=([1.0], None), b=([1.0], None))
        _, pairs = training.minimize(optimizer.SGD(0.1), **kwargs)
        assert [p.name for p, _ in pairs] == ["a"]


def test_sixteen_bit_parameters_keep_their_state_in_float32():
    training = Training("float16", w=(START, None))
    training.minimize(optimizer.Adam(0.01))
    assert training.main.global_block().var("w_moment2_0").dtype == "float32"
    values = training.run([{"w": g} for g in GRADS])
    for (found,), wanted in zip(values, adam(START.astype("float16"), GRADS, 0.01, 0.9, 0.999, 1e-8), strict=True):
        assert found.dtype == np.float16 and np.allclose(found, wanted, atol=4e-3)  # half a unit of float16 near 2, per step


def test_an_optimizer_with_a_name_puts_it_into_its_state():
    training = Training(w=(START, None))
    training.minimize(optimizer.Momentum(0.1, 0.9, name="slow"))
    assert training.main.global_block().has_var("w_slow_velocity_0")


def test_two_optimizers_may_train_two_losses_of_one_program():
    training = Training(a=([1.0], None), b=([2.0], None))
    with training.guard():
        second = Builder(training.main.global_block()).mean(training.main.global_block().var("a"))
        one, two = optimizer.SGD(0.1), optimizer.Momentum(0.5, 0.9)
        one.apply_optimize(training.loss, training.startup, one.backward(training.loss, parameter_list=["b"]))
        two.minimize(second, training.startup)
    (values,) = training.run([{"a": [1.0], "b": [1.0]}])
    assert np.allclose(np.ravel(values), [0.5, 1.9])


# -- decay -----------------------------------------------------------------------------------------------------------------------------


def test_weight_decay_joins_the_gradient_and_a_parameters_own_comes_first():
    training = Training(a=([2.0], None), b=([-2.0], ParamAttr(regularizer=L1Decay(0.5))), c=([2.0], ParamAttr(regularizer=L2Decay(0.0))))
    training.minimize(optimizer.SGD(1.0, regularization=L2Decay(0.25)))
    (values,) = training.run([{"a": [0.0], "b": [0.0], "c": [0.0]}])
    assert np.ravel(values).tolist() == [1.5, -1.5, 2.0]


# -- averages --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thres", [False, True])
def test_exponential_moving_average(thres):
    training = Training("float32", w=([4.0, -2.0], None))
    training.minimize(optimizer.SGD(0.5))
    with training.guard(), unique_name.guard():
        steps = training.main.global_block().create_var("steps", (1,), "int64", is_data=True, stop_gradient=True) if thres else None
        ema = optimizer.ExponentialMovingAverage(0.9, thres_steps=steps)
        ema.update()
    exe, scope = training.exe, training.scope
    exe.run(training.startup, scope=scope)

    class Run:  # an executor bound to this test's scope
        @staticmethod
        def run(program):
            exe.run(program, scope=scope)

    def value():
        return scope.get("w").copy()

    with ema.apply(Run):
        assert value().tolist() == [4.0, -2.0]  # no update yet: the parameters themselves
    average, left, w = np.zeros(2), 1.0, np.array([4.0, -2.0])
    for k in range(3):
        feed = {"w_feed": np.array([1.0, 2.0], "float32")}
        if thres:
            feed["steps"] = np.array([k])
        exe.run(training.main, feed=feed, scope=scope)
        w = w - 0.5 * np.array([1.0, 2.0])
        decay = min(0.9, (1 + k) / (10 + k)) if thres else 0.9
        average, left = decay * average + (1 - decay) * w, left * decay
    with ema.apply(Run):
        assert np.allclose(value(), average / (1 - left), rtol=1e-5)
    assert value().tolist() == w.tolist()
    with ema.apply(Run, need_restore=False):
        pass
    assert np.allclose(value(), average / (1 - left), rtol=1e-5)
    ema.restore(Run)
    assert value().tolist() == w.tolist()


# -- the update operators: any cut gives the same values -----------------------------------------------------------------------------


UPDATES = sorted(name for name, op in OPS.items() if issubclass(op, Update))


def _arguments(op, size):
    rng = np.random.default_rng(size)
    arrays = []
    for slot in op.in_slots:
        if slot.name in ("LearningRate", "Beta1Pow", "Beta2Pow", "ParamNormSq", "GradNormSq", "UpdateNormSq", "Decay"):
            arrays.append(np.array([0.3], "float32"))
        else:
            arrays.append(np.square(rng.standard_normal(size)).astype("float32") + np.float32(0.01))
    return arrays


def _outputs(op, arrays):
    places = {out: k for k, s in enumerate(op.in_slots) for i, out in op.storage.inplace if i == s.name}
    big = max(arrays, key=lambda a: a.size)
    return [arrays[places[s.name]] if s.name in places else np.empty_like(big) for s in op.out_slots]


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_in_blocks_in_chunks_or_as_a_whole_gives_the_same_bits(name):
    op, size = OPS[name], 2 * BLOCK + 37
    attrs = op.complete_attrs({"centered": True, "epsilon": 1e3} if name == "rmsprop" else {})
    whole = _arguments(op, size)
    expected = [np.empty(size, "float32") for _ in op.out_slots]
    op.kernel(np, *whole, out=tuple(expected) if len(expected) > 1 else expected[0], **attrs)
    bound = [a.copy() for a in whole]
    outs = _outputs(op, bound)
    op.native.bind(bound, outs, attrs, None)()
    pieces = []
    for part in (slice(0, 5), slice(5, BLOCK + 9), slice(BLOCK + 9, None)):
        arrays = [a.copy() if a.size == 1 else a[part].copy() for a in whole]
        pieces.append(_outputs(op, arrays))
        op.native.bind(arrays, pieces[-1], attrs, None)()
    for k, wanted in enumerate(expected):
        assert np.array_equal(outs[k], wanted)
        assert np.array_equal(np.concatenate([p[k] for p in pieces]), wanted)


@pytest.mark.parametrize("name", UPDATES)
def test_a_strided_parameter_is_updated_where_it_lies(name):
    op = OPS[name]
    attrs = op.complete_attrs({})
    arrays = [a if a.size == 1 else np.repeat(a, 2)[::2] for a in _arguments(op, 10)]
    expected = [np.empty(10, "float32") for _ in op.out_slots]
    op.kernel(np, *(a.copy() for a in arrays), out=tuple(expected) if len(expected) > 1 else expected[0], **attrs)
    outs = _outputs(op, arrays)
    op.native.bind(arrays, outs, attrs, None)()
    for found, wanted in zip(outs, expected, strict=True):
        assert np.array_equal(found, wanted)


# -- errors ----------------------------------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused():
    f32 = lambda *s: TensorType("float32", s)  # noqa: E731
    with pytest.raises(ProgramError, match=r"op sgd: Param is f32\[2\], Grad is f32\[3\]; they must have the same shape"):
        OPS["sgd"].infer(f32(2), f32(3), f32(1))
    with pytest.raises(ProgramError, match=r"LearningRate must have one element, found f32\[2\]"):
        OPS["sgd"].infer(f32(2), f32(2), f32(2))
    with pytest.raises(ProgramError, match="they must have the same dtype"):
        OPS["sgd"].infer(f32(2), TensorType("float16", (2,)), f32(1))
    with pytest.raises(ProgramError, match="needs input 'MeanGrad'"):
        OPS["rmsprop"].infer(f32(2), f32(2), None, f32(2), f32(2), f32(1), centered=True)


def test_minimize_without_anything_to_train():
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup):
        x = main.global_block().create_var("x", (1,), is_data=True, stop_gradient=True)
        loss = Builder(main.global_block()).mean(x)
        with pytest.raises(ProgramError, match="no trainable parameter influences the loss"):
            optimizer.SGD(0.1).minimize(loss)
        with pytest.raises(ProgramError, match="there are no gradients to apply"):
            optimizer.SGD(0.1).apply_gradients([])


def test_an_optimizer_is_used_once_per_parameter():
    training = Training(w=([1.0], None))
    opt = optimizer.Adam(0.1)
    training.minimize(opt)
    with training.guard(), pytest.raises(ProgramError, match="already updates parameter 'w' in program main"):
        opt.apply_gradients([(training.main.global_block().var("w"), training.main.global_block().var("w@GRAD"))])


def test_state_under_a_name_that_exists_is_refused():
    training = Training(w=([1.0], None))
    training.minimize(optimizer.Adam(0.1))
    again = optimizer.Adam(0.1)
    says = "'w_moment1_0', the moment1 of parameter 'w', is already declared"
    with training.guard(), unique_name.guard(), pytest.raises(ProgramError, match=says):
        again.apply_gradients([(training.main.global_block().var("w"), training.main.global_block().var("w@GRAD"))])


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: optimizer.SGD("fast"), "optimizer.SGD: learning_rate must be a number, got str: 'fast'"),
        (lambda: optimizer.SGD(0.1, regularization=0.1), "regularization must be L1Decay, L2Decay or None, got 0.1"),
        (lambda: optimizer.SGD(0.1, grad_clip=5.0), "grad_clip must be a GradientClipBy... or None, got 5.0"),
        (lambda: optimizer.Adam(0.1, beta1=1.0), "beta1 must be at least 0 and below 1; got 1.0"),
        (lambda: optimizer.Momentum(0.1, None), "momentum must be a number, got NoneType"),
    ],
)
def test_options_that_make_no_sense(make, says):
    with pytest.raises(ProgramError) as error:
        make()
    assert says in str(error.value) and __file__ in str(error.value)


def test_main_as_its_own_startup_program_is_refused():
    training = Training(w=([1.0], None))
    with training.guard(), pytest.raises(ProgramError, match="the startup program must differ from the main program"):
        optimizer.SGD(0.1).minimize(training.loss, training.main)
