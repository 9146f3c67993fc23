"""Learning rate schedules against their formulas over the steps, and gradient clipping against NumPy."""

import math

import numpy as np
import pytest

from fluidx import clip, lr_scheduler, optimizer
from fluidx.backward import append_backward
from fluidx.executor import Executor, Scope
from fluidx.ir import Builder, Program, ProgramError, Role, program_guard, unique_name
from fluidx.regularizer import L1Decay, L2Decay

# -- schedules ---------------------------------------------------------------------------------------------------------------------------


def rates(make, steps):
    """The values of a schedule in the first `steps` runs, and the program that makes them."""
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        rate = make()
    assert rate.shape == (1,) and rate.dtype == "float32" and rate.stop_gradient
    assert {op.role for op in main.ops} == {Role.LR_SCHED}
    scope, exe = Scope(), Executor()
    exe.run(startup, scope=scope)
    return [exe.run(main, fetch_list=[rate], scope=scope)[0].item() for _ in range(steps)], main


def _polynomial(t, cycle, power=2.0, lr=0.1, steps=4, end=0.01):
    whole = steps * max(1, math.ceil(t / steps)) if cycle else steps
    return (lr - end) * (1 - min(t, whole) / whole) ** power + end


def _piece(t):
    return 1.0 if t < 3 else 0.5 if t < 5 else 0.1


SCHEDULES = {
    "noam": (lambda: lr_scheduler.noam_decay(64, 4), lambda t: 64**-0.5 * min((t + 1) ** -0.5, (t + 1) * 4**-1.5)),
    "noam scaled": (lambda: lr_scheduler.noam_decay(64, 4, 3.0), lambda t: 3 * 64**-0.5 * min((t + 1) ** -0.5, (t + 1) * 4**-1.5)),
    "exponential": (lambda: lr_scheduler.exponential_decay(0.1, 3, 0.5), lambda t: 0.1 * 0.5 ** (t / 3)),
    "exponential stairs": (lambda: lr_scheduler.exponential_decay(0.1, 3, 0.5, staircase=True), lambda t: 0.1 * 0.5 ** (t // 3)),
    "natural": (lambda: lr_scheduler.natural_exp_decay(0.1, 3, 0.5), lambda t: 0.1 * math.exp(-0.5 * t / 3)),
    "natural stairs": (lambda: lr_scheduler.natural_exp_decay(0.1, 3, 0.5, True), lambda t: 0.1 * math.exp(-0.5 * (t // 3))),
    "inverse": (lambda: lr_scheduler.inverse_time_decay(0.1, 3, 0.5), lambda t: 0.1 / (1 + 0.5 * t / 3)),
    "inverse stairs": (lambda: lr_scheduler.inverse_time_decay(0.1, 3, 0.5, True), lambda t: 0.1 / (1 + 0.5 * (t // 3))),
    "polynomial": (lambda: lr_scheduler.polynomial_decay(0.1, 4, 0.01, 2.0), lambda t: _polynomial(t, False)),
    "polynomial cycle": (lambda: lr_scheduler.polynomial_decay(0.1, 4, 0.01, 2.0, cycle=True), lambda t: _polynomial(t, True)),
    "piecewise": (lambda: lr_scheduler.piecewise_decay([3, 5], [1.0, 0.5, 0.1]), _piece),
    "piecewise constant": (lambda: lr_scheduler.piecewise_decay([], [0.5]), lambda t: 0.5),
    "cosine": (lambda: lr_scheduler.cosine_decay(0.1, 2, 5), lambda t: 0.05 * (math.cos((t // 2) * math.pi / 5) + 1)),
    "warmup": (lambda: lr_scheduler.linear_lr_warmup(0.7, 4, 0.1, 0.5), lambda t: 0.1 + 0.4 * t / 4 if t < 4 else 0.7),
    "warmup of a schedule": (
        lambda: lr_scheduler.linear_lr_warmup(lr_scheduler.exponential_decay(0.7, 2, 0.5), 4, 0.1, 0.5),
        lambda t: 0.1 + 0.4 * t / 4 if t < 4 else 0.7 * 0.5 ** (t / 2),
    ),
    "a schedule of a schedule": (
        lambda: lr_scheduler.polynomial_decay(lr_scheduler.piecewise_decay([3, 5], [1.0, 0.5, 0.1]), 4, 0.01, 2.0),
        lambda t: _polynomial(t, False, lr=_piece(t)),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_follows_its_formula(name):
    make, formula = SCHEDULES[name]
    values, main = rates(make, 10)
    assert values == pytest.approx([formula(t) for t in range(10)], rel=2e-6, abs=1e-8)  # float32 powers
    counters = [op for op in main.ops if op.type == "increment"]
    assert len(counters) == 1


def test_piecewise_values_are_exact():
    values, _ = rates(lambda: lr_scheduler.piecewise_decay([1, 2], [0.3, 0.1, 0.7]), 3)
    assert values == [float(np.float32(v)) for v in (0.3, 0.1, 0.7)]


def test_stairs_fall_exactly_on_their_step():
    values, _ = rates(lambda: lr_scheduler.exponential_decay(1.0, 49, 0.5, staircase=True), 99)
    assert [values[t] for t in (48, 49, 97, 98)] == [1.0, 0.5, 0.5, 0.25]


def test_all_schedules_of_a_program_share_one_counter():
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup):
        lr_scheduler.cosine_decay(0.1, 2, 5)
        lr_scheduler.noam_decay(8, 2)
    assert [op.output_arg_names for op in main.ops if op.type == "increment"] == [("@LR_DECAY_COUNTER@",)]
    counter = main.global_block().var("@LR_DECAY_COUNTER@")
    assert (counter.dtype, counter.shape, counter.persistable) == ("int64", (1,), True)
    (init,) = startup.ops
    assert init.output_arg_names == ("@LR_DECAY_COUNTER@",) and init.attrs["value"] == -1.0


def test_autoincreased_step_counter():
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup):
        counter = lr_scheduler.autoincreased_step_counter(begin=5, step=2)
        assert lr_scheduler.autoincreased_step_counter(begin=5, step=2).name == counter.name
    scope, exe = Scope(), Executor()
    exe.run(startup, scope=scope)
    assert [exe.run(main, fetch_list=[counter], scope=scope)[0].item() for _ in range(3)] == [5, 7, 9]


def test_an_optimizer_follows_a_schedule():
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup):
        w = _parameter(main, startup, "w", [1.0])
        optimizer.SGD(lr_scheduler.piecewise_decay([1], [0.5, 0.25])).minimize(Builder(main.global_block()).mean(w))
    scope, exe = Scope(), Executor()
    exe.run(startup, scope=scope)
    assert [exe.run(main, fetch_list=["w"], scope=scope)[0].item() for _ in range(3)] == [0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: lr_scheduler.piecewise_decay([3, 5], [1.0, 0.5]), "2 boundaries need 3 values, got 2"),
        (lambda: lr_scheduler.piecewise_decay([5, 3], [1.0, 0.5, 0.1]), "boundaries must grow, got [5, 3]"),
        (lambda: lr_scheduler.exponential_decay(0.1, 0, 0.5), "decay_steps must be 1 or more, got 0"),
        (lambda: lr_scheduler.noam_decay(64, 0.5), "warmup_steps must be an integer, got float"),
        (lambda: lr_scheduler.cosine_decay("fast", 1, 1), "learning_rate must be a number, got str"),
    ],
)
def test_schedules_refuse_what_makes_no_sense(make, says):
    with program_guard(Program(), Program()), pytest.raises(ProgramError) as error:
        make()
    assert says in str(error.value) and __file__ in str(error.value)


# -- clipping ----------------------------------------------------------------------------------------------------------------------------

GRADS = {"a": np.array([3.0, -4.0, 0.5], "float32"), "b": np.array([[12.0, 0.0]], "float32"), "c": np.array([0.1], "float32")}


def _parameter(main, startup, name, value, dtype="float32", **attrs):
    value = np.asarray(value)
    startup.global_block().create_parameter(value.shape, dtype, name)
    Builder(startup.global_block()).assign_value(shape=value.shape, dtype=dtype, values=value.ravel().tolist(), out={"Out": name})
    return main.global_block().create_parameter(value.shape, dtype, name, **attrs)


def clipped(how, dtype="float32", setting=False, regularization=None, **attrs):
    """What remains of GRADS: parameters start at 0 and move by minus their gradient once."""
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup), unique_name.guard():
        b = Builder(main.global_block())
        terms = []
        for name, g in GRADS.items():
            p = _parameter(main, startup, name, np.zeros_like(g), dtype, **attrs.get(name, {}))
            fed = main.global_block().create_var(f"{name}_feed", g.shape, dtype, is_data=True, stop_gradient=True)
            terms.append(b.scale(b.mean(b.elementwise_mul(p, fed)), scale=float(g.size)))
        if setting:
            how(main)
        opt = optimizer.SGD(1.0, grad_clip=None if setting else how, regularization=regularization)
        ops, _ = opt.minimize(b.emit("sum", terms))
    scope, exe = Scope(), Executor()
    exe.run(startup, scope=scope)
    values = exe.run(main, feed={f"{n}_feed": g.astype(dtype) for n, g in GRADS.items()}, fetch_list=list(GRADS), scope=scope)
    return {n: -v for n, v in zip(GRADS, values, strict=True)}, ops


def close(found, wanted, **kwargs):
    return all(np.allclose(found[n], wanted[n], **kwargs) for n in GRADS)


def test_clip_by_value():
    found, _ = clipped(clip.GradientClipByValue(1.0))
    assert close(found, {n: np.clip(g, -1, 1) for n, g in GRADS.items()}, rtol=1e-6)
    found, _ = clipped(clip.GradientClipByValue(max=2.0, min=-0.5))
    assert close(found, {n: np.clip(g, -0.5, 2) for n, g in GRADS.items()}, rtol=1e-6)


def test_clip_by_norm_leaves_small_gradients():
    found, _ = clipped(clip.GradientClipByNorm(2.0))
    assert close(found, {n: g * min(1, 2 / np.linalg.norm(g)) for n, g in GRADS.items()}, rtol=1e-6)


@pytest.mark.parametrize("limit", [1.0, 100.0])
def test_clip_by_global_norm(limit):
    found, ops = clipped(clip.GradientClipByGlobalNorm(limit))
    norm = math.sqrt(sum(np.sum(np.square(g)) for g in GRADS.values()))
    assert close(found, {n: g * min(1, limit / norm) for n, g in GRADS.items()}, rtol=1e-6)
    types = [op.type for op in ops]
    assert (types.count("squared_l2_norm"), types.count("sum"), types.count("sqrt"), types.count("elementwise_mul")) == (3, 1, 1, 3)
    assert {op.role for op in ops} == {Role.OPTIMIZE}


def test_the_global_norm_of_sixteen_bit_gradients_is_taken_in_float32():
    found, ops = clipped(clip.GradientClipByGlobalNorm(1.0), dtype="float16")
    norm = math.sqrt(sum(np.sum(np.square(g)) for g in GRADS.values()))
    assert close(found, {n: g / norm for n, g in GRADS.items()}, rtol=2e-3) and found["a"].dtype == np.float16


def test_need_clip_spares_parameters():
    found, _ = clipped(clip.GradientClipByValue(1.0, need_clip=lambda p: p.name != "a"), b={"need_clip": False})
    assert close(found, GRADS, rtol=1e-6)


def test_set_gradient_clip_serves_optimizers_without_a_clip():
    def setting(main):
        clip.set_gradient_clip(clip.GradientClipByValue(1.0), program=main)
        clip.set_gradient_clip(clip.GradientClipByNorm(6.0), param_list=["b"], program=main)

    found, _ = clipped(setting, setting=True)
    assert close(found, {"a": np.clip(GRADS["a"], -1, 1), "b": GRADS["b"] / 2, "c": GRADS["c"]}, rtol=1e-6)


def test_gradients_are_clipped_before_they_are_decayed():
    _, ops = clipped(clip.GradientClipByValue(1.0), regularization=L2Decay(0.1))
    types = [op.type for op in ops]
    assert max(i for i, t in enumerate(types) if t == "clip") < types.index("scale") < types.index("sgd")


def test_clip_of_an_intermediate_gradient():
    main, startup = Program("main"), Program("startup")
    with program_guard(main, startup):
        b = Builder(main.global_block())
        w = _parameter(main, startup, "w", [1.0, 1.0])
        h = b.scale(w, scale=3.0)
        clip.ErrorClipByValue(0.5).attach(h)
        [(_, g)] = append_backward(b.mean(b.scale(h, scale=10.0)))
    scope, exe = Scope(), Executor()
    exe.run(startup, scope=scope)
    assert exe.run(main, fetch_list=[g], scope=scope)[0].tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: clip.GradientClipByNorm(0.0), "GradientClipByNorm: clip_norm must be above 0, got 0.0"),
        (lambda: clip.GradientClipByGlobalNorm(-1.0), "clip_norm must be above 0, got -1.0"),
        (lambda: clip.GradientClipByValue(1.0, 2.0), "min is 2.0, above max, which is 1.0"),
        (lambda: clip.GradientClipByValue(1.0, need_clip=["w"]), "need_clip must be a function"),
        (lambda: clip.set_gradient_clip(1.0), "set_gradient_clip takes a GradientClipBy..., got float"),
        (lambda: L1Decay("a lot"), "L1Decay: regularization_coeff must be a number, got str"),
    ],
)
def test_clips_refuse_what_makes_no_sense(make, says):
    with pytest.raises(ProgramError) as error:
        make()
    assert says in str(error.value)


def test_regularizers_say_what_they_are():
    assert (repr(L2Decay(0.5)), L1Decay(0.25).record()) == ("L2Decay(0.5)", ("l1", 0.25))
