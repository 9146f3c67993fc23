"""fluid's questions and switches: versions, flags, places, what a program is pruned to; and metrics in Python."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import config


def test_versions_are_compared_with_the_fluid_whose_names_these_are():
    fx.require_version("1.8")
    fx.require_version("1.6.0", "1.8.5")
    for low, high, text in [("2.0", None, "at least version 2.0"), ("1.0", "1.7.9", "at most version 1.7.9"), ("new", None, "got 'new'")]:
        with pytest.raises(fx.ProgramError, match=text):
            fx.require_version(low, high)


def test_flags_are_kept_and_those_that_mean_something_are_set(monkeypatch):
    monkeypatch.setenv("FLUIDX_CHECK_NAN", "0")
    fx.set_flags({"FLAGS_check_nan_inf": 1, "FLAGS_cudnn_deterministic": True})
    assert config.check_nan() and fx.get_flags(["FLAGS_cudnn_deterministic", "FLAGS_unheard_of"]) == {
        "FLAGS_cudnn_deterministic": True, "FLAGS_unheard_of": None,
    }  # fmt: skip
    for call in (lambda: fx.set_flags({"check_nan_inf": 1}), lambda: fx.set_flags(["FLAGS_check_nan_inf"])):
        with pytest.raises(fx.ProgramError, match="set_flags"):
            call()


def test_places_that_fluid_has_are_places():
    assert [str(p) for p in fx.cuda_pinned_places(2)] == ["CUDAPinnedPlace", "CUDAPinnedPlace"]
    assert fx.Executor(fx.CUDAPinnedPlace()).place == fx.CUDAPinnedPlace()
    assert fx.is_compiled_with_cuda() == (fx.core.get_cuda_device_count() > 0)


def test_a_pruned_program_computes_its_targets_and_no_more():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [None, 2], "float32")
        y = fx.layers.relu(fx.layers.scale(x, 2.0))
        fx.layers.exp(y)
    pruned = main._prune(y)
    assert [op.type for op in pruned.ops] == ["scale", "relu"] and [op.type for op in main.ops][-1] == "exp"
    assert [op.type for op in main._prune_with_input([pruned.ops[0].output("Out")[0]], [y]).ops] == ["relu"]
    assert fx.Executor().run(pruned, feed={"x": np.ones((1, 2), "float32")}, fetch_list=[y])[0].tolist() == [[2, 2]]


@pytest.mark.parametrize("guard, role", [("_lr_schedule_guard", "lr_sched"), ("_backward_role_guard", "backward")])
def test_guards_give_operators_their_section(guard, role):
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        x = fx.data("x", [None, 2], "float32")
        with getattr(main, guard)():
            fx.layers.relu(x)
        with main._optimized_guard([x]):
            fx.layers.exp(x)
    assert [op.role.value for op in main.ops] == [role, "optimize"]


def test_metrics_say_what_they_cannot_count():
    for call, text in [
        (lambda: fx.metrics.Accuracy().eval(), "there is nothing to average yet"),
        (lambda: fx.metrics.Accuracy().update("high", 1), "value must be a number"),
        (lambda: fx.metrics.Accuracy().update(0.5, -1), "weight must be 0 or more"),
        (lambda: fx.metrics.Precision().update(np.ones(3), np.ones(2)), "preds have 3 elements and labels 2"),
        (lambda: fx.metrics.Auc(curve="PR"), "there is 'ROC'"),
        (lambda: fx.metrics.Auc().update(np.ones((3, 2)), np.ones(2)), "preds must be [n, 2] and labels [n, 1]"),
        (lambda: fx.metrics.EditDistance().eval(), "there are no sequences yet"),
        (lambda: fx.metrics.CompositeMetric().add_metric("auc"), "a metric must be one of fluidx.metrics"),
        (lambda: fx.average.WeightedAverage().eval(), "there is nothing to average yet"),
    ]:
        with pytest.raises(fx.ProgramError) as error:
            call()
        assert text in str(error.value)


def test_metrics_of_several_batches_and_after_a_reset():
    metric = fx.metrics.CompositeMetric()
    metric.add_metric(fx.metrics.Precision())
    metric.add_metric(fx.metrics.Recall())
    for preds, labels in (([1, 1, 0], [1, 0, 1]), ([0, 1, 1], [0, 1, 1])):
        metric.update(np.float32(preds), np.int64(labels))
    assert metric.eval() == [3 / 4, 3 / 4]
    metric.reset()
    assert metric.eval() == [0.0, 0.0]
    auc = fx.metrics.Auc(num_thresholds=10)
    auc.update(np.float32([[0.5, 0.5], [0.5, 0.5]]), np.int64([[1], [0]]))
    assert auc.eval() == 0.5  # equal scores


def test_datasets_of_fluid_say_what_to_write():
    with pytest.raises(fx.ExecutionError, match="io.DataLoader.from_generator"):
        fx.Executor().train_from_dataset(program=fx.Program(), dataset=None)
