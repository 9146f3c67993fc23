"""fluid's everyday optimizers and averages, worked out by hand."""

import numpy as np
import pytest

import fluidx as fx


def linear(optimizer, rows=4, do_model_average=True, after=None):
    """loss = sum(x @ w) with w of ones: the gradient of w is the sum of x's rows."""
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        attr = fx.ParamAttr("w", initializer=fx.initializer.Constant(1.0), do_model_average=do_model_average)
        loss = fx.layers.reduce_sum(fx.layers.fc(fx.data("x", [None, 3], "float32"), 2, param_attr=attr, bias_attr=False))
        optimizer.minimize(loss)
        made = after and after()
    exe, scope = fx.Executor(), fx.Scope()
    exe.run(startup, scope=scope)
    x = np.arange(3 * rows, dtype="float32").reshape(rows, 3) - 4
    step = x.sum(0)[:, None] * np.ones((3, 2))
    return made, lambda: exe.run(main, feed={"x": x}, fetch_list=[loss], scope=scope), scope, step, exe


def test_lookahead_goes_a_share_of_the_way_every_k_steps():
    _, run, scope, g, _ = linear(fx.optimizer.LookaheadOptimizer(fx.optimizer.SGD(0.5), alpha=0.25, k=3))
    slow = fast = np.ones((3, 2))
    for step in range(1, 8):
        run()
        fast = fast - 0.5 * g
        if step % 3 == 0:
            slow = fast = slow + 0.25 * (fast - slow)
        np.testing.assert_allclose(scope.get("w"), fast, rtol=1e-6)  # float32
        np.testing.assert_allclose(scope.get("w_slow_0"), slow, rtol=1e-6)


@pytest.mark.parametrize("least, most, rate", [(2, 3, 0.5), (1, 2, 1.0), (100, 200, 0.15)])
def test_a_model_average_is_over_the_last_full_window_and_the_one_that_grows(least, most, rate):
    average, run, scope, _, exe = linear(fx.optimizer.SGD(0.5), after=lambda: fx.optimizer.ModelAverage(rate, least, most))
    now, old = [], []
    for updates in range(1, 9):
        run()
        now.append(scope.get("w"))
        if len(now) >= least and len(now) >= min(most, updates * rate):
            now, old = [], now
        with fx.scope_guard(scope):
            with average.apply(exe):
                np.testing.assert_allclose(scope.get("w"), np.mean([*old, *now], axis=0), rtol=1e-6)  # float32
            kept = scope.get("w")
            with average.apply(exe, need_restore=False):
                pass
            average.restore(exe)
            assert np.array_equal(scope.get("w"), kept)


def test_a_parameter_may_stay_out_of_the_model_average():
    with pytest.raises(fx.ProgramError, match="has no trainable parameters to average"):
        linear(fx.optimizer.SGD(0.5), do_model_average=False, after=lambda: fx.optimizer.ModelAverage(0.5))


def test_dpsgd_clips_and_adds_noise_that_differs_from_element_to_element_and_run_to_run():
    _, run, scope, g, _ = linear(fx.optimizer.Dpsgd(0.5, clip=1.0, batch_size=2.0, sigma=0.0))
    run()
    np.testing.assert_allclose(scope.get("w"), 1 - 0.5 * g / np.linalg.norm(g), rtol=1e-6)
    _, run, scope, g, _ = linear(fx.optimizer.Dpsgd(1.0, clip=1e6, batch_size=4.0, sigma=8.0))
    noise = []
    for _ in range(200):
        before = scope.get("w")
        run()
        noise.append(before - scope.get("w") - g)
    drawn = np.array(noise)
    assert len(np.unique(drawn.round(4))) > 1000  # of 1200
    assert abs(drawn.std() - 2.0) < 0.2 and abs(drawn.mean()) < 0.3  # sigma / batch_size; five standard errors


def test_a_pipelines_optimizer_is_its_inner_one_and_says_that_it_cuts_nothing():
    with pytest.warns(UserWarning, match='write the layers of stage k under device_guard\\("gpu:k"\\)'):
        piped = fx.optimizer.PipelineOptimizer(fx.optimizer.SGD(0.5), cut_list=[["x"]], place_list=[fx.CPUPlace()])
    _, run, scope, g, _ = linear(piped)
    run()
    np.testing.assert_allclose(scope.get("w"), 1 - 0.5 * g, rtol=1e-6)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: fx.optimizer.LookaheadOptimizer(fx.optimizer.SGD(0.1), alpha=1.5), "alpha must be from 0 to 1, got 1.5"),
        (lambda: fx.optimizer.LookaheadOptimizer("sgd"), "optimizer must be an optimizer, got str"),
        (lambda: fx.optimizer.Dpsgd(clip=0.0), "clip and batch_size must be above 0"),
        (lambda: fx.WeightNormParamAttr(dim="rows"), "WeightNormParamAttr: dim must be an integer"),
    ],
)
def test_what_makes_no_optimizer_is_named(make, text):
    with pytest.raises(fx.ProgramError) as error:
        make()
    assert text in str(error.value)
