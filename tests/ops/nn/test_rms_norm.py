"""layers.rms_norm against the formula in float64, its gradients, and ranks against one device."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing import numeric_grad

X = np.random.default_rng(0).normal(size=(4, 2, 3))
SCALE, BIAS = np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)


def formula(x, scale, bias, axis):
    axes = tuple(range(axis, x.ndim))
    y = x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + 1e-2)
    return y * scale.reshape(x.shape[axis:]) + bias.reshape(x.shape[axis:])


@pytest.mark.parametrize("axis", [1, 2])
def test_the_layer_and_its_gradients_are_those_of_the_formula(axis):
    values = {"x": X, "scale": SCALE[: X[0].size if axis == 1 else 3], "bias": BIAS[: X[0].size if axis == 1 else 3]}
    with fx.program_guard(fx.Program(), fx.Program()), fx.scope_guard(fx.Scope()):
        x = fx.data("x", [-1, 2, 3], "float64")
        attrs = [fx.ParamAttr(n, fx.initializer.NumpyArrayInitializer(values[n])) for n in ("scale", "bias")]
        y = fx.layers.rms_norm(x, shift=True, begin_norm_axis=axis, epsilon=1e-2, param_attr=attrs[0], bias_attr=attrs[1])
        main, exe = fx.default_main_program(), fx.Executor()
        grads = fx.gradients([fx.layers.reduce_sum(fx.layers.sin(y))], [x, *(main.global_block().var(n) for n in ("scale", "bias"))])
        exe.run(fx.default_startup_program())
        found, *made = exe.run(main, feed={"x": X}, fetch_list=[y, *grads])
    np.testing.assert_allclose(found, formula(**values, axis=axis), rtol=1e-12)
    for name, g in zip(values, made, strict=True):
        want = numeric_grad(lambda v: np.sin(formula(**{**values, name: v}, axis=axis)).sum(), values[name])  # noqa: B023
        np.testing.assert_allclose(g, want, rtol=1e-6, atol=1e-8, err_msg=name)  # central differences of float64


def test_ranks_train_it_as_one_device_does():
    def steps(trainers):
        with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard(), fx.scope_guard(fx.Scope()):
            y = fx.layers.rms_norm(fx.data("x", [-1, 2, 3], "float64"), shift=True, param_attr="w", bias_attr="b")
            loss = fx.layers.mean(fx.layers.square(y - 1.0))
            fx.optimizer.SGD(0.1).minimize(loss)
            t = fx.DistributeTranspiler(fx.strategies.data_parallel()).transpile(
                program=fx.default_main_program(), startup_program=fx.default_startup_program(), trainers=trainers
            )
            assert t.verify()
            with fx.ParallelExecutor(t, places=fx.cpu_places(trainers)) as exe:
                exe.run_startup()
                return [exe.run(feed={"x": X}, fetch_list=[loss.name, "w", "b"]) for _ in range(2)]

    for one, many in zip(steps(1), steps(2), strict=True):
        for a, b in zip(one, many, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)  # sums over the batch in another order


def test_it_works_without_weights_and_refuses_wrong_operands():
    with fx.program_guard(fx.Program(), fx.Program()):
        y = fx.layers.rms_norm(fx.data("x", [-1, 3], "float32"), scale=False)
        assert not fx.default_main_program().all_parameters() and y.shape == (-1, 3)
        with pytest.raises(fx.ProgramError, match="layers.rms_norm: axis 1 of input must be known"):
            fx.layers.rms_norm(fx.data("open", [-1, -1], "float32"))
        with pytest.raises(fx.ProgramError, match="begin_norm_axis must be between 1 and 1"):
            fx.layers.rms_norm(fx.data("flat", [4, 3], "float32"), begin_norm_axis=0)
