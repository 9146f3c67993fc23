"""Tensor parallelism by annotation: what Megatron's ranks send and no more, and the answers of one device."""

from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Shard
from fluidx.testing.models import TestModel
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, same_answers
from tests.transpiler.tensor_models import as_operator, gpt, sent, transpiled, written_out

L = fx.layers
MESHES = [fx.Mesh(dp=1, tp=2), fx.Mesh(dp=2, tp=2), fx.Mesh(dp=1, tp=4)]


@pytest.mark.parametrize("attend", [as_operator, written_out])
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_a_gpt_sends_over_tp_what_megatron_sends(mesh, attend):
    for layers in (1, 2):
        t = transpiled(gpt(layers, attend), mesh)
        # a layer: 2 sums forward, 2 backward; the words looked up; the gradient of the last layer's input; of the loss, for which no logits
        # are gathered, the largest logit and the sum of exponentials; Megatron sums the label's logit too, here it stays a term of the loss
        assert sent(t) == Counter(all_reduce=4 * layers + 1 + 1 + 2)


def test_over_dp_each_gradient_is_reduced_once_and_over_tp_no_gradient_is():
    model = gpt()
    t = transpiled(model, fx.Mesh(dp=2, tp=2))
    assert sent(t, "dp") == Counter(all_reduce=len(model.gradients))
    assert [
        move for move in t.explain() if "tp" in move.split(" for ")[0] and "for update" in move and "partial(sum) over tp" in move
    ] == []


@swept(2, strategy=["data_parallel", "zero1", "zero2", "ring_optimizer"], attend=[as_operator, written_out])
def test_a_gpt_over_dp_and_tp_trains_as_one_device_does(strategy, attend):
    same_answers(gpt(attend=attend), STRATEGIES[strategy](), fx.Mesh(dp=2, tp=2), rows=(5, 3))


@pytest.mark.parametrize("mesh", [fx.Mesh(tp=3), fx.Mesh(dp=1, tp=4), fx.Mesh(tp=2, dp=2)], ids=repr)
def test_meshes_of_other_sizes_and_orders_train_as_one_device_does(mesh):
    """3 ranks cut no axis of the model evenly, heads included."""
    same_answers(gpt(1), "data_parallel", mesh, rows=(5, 3))


# -- classes ----------------------------------------------------------------------------------------------------------------------------


def classes(loss_of, words=7, axis=-1):
    """Logits whose classes are cut over tp, and a loss of them."""
    main, startup = fx.Program("classes"), fx.Program("classes_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 5], "float64"), fx.data("label", [-1, 1], "int64")
        soft = fx.data("soft", [-1, words], "float64")
        w = fx.ParamAttr(name="w", placement=Shard(1, "tp"), initializer=fx.initializer.Normal(0.0, 3.0))
        logits = L.fc(x, words, param_attr=w, bias_attr=False)
        each = loss_of(logits, label, soft)
        loss = L.mean(each)
        _, pairs = fx.optimizer.SGD(0.5).minimize(loss)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        label = rng.integers(0, words, (rows, 1))
        label[-1] = -100
        soft = rng.random((rows, words))
        return {"x": rng.standard_normal((rows, 5)), "label": label, "soft": soft / soft.sum(1, keepdims=True)}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs]), each


LOSSES = {
    "hard labels": (lambda x, label, soft: L.softmax_with_cross_entropy(x, label), 2),
    "soft labels": (lambda x, label, soft: L.softmax_with_cross_entropy(x, soft, soft_label=True), 2),
    "probabilities": (lambda x, label, soft: L.cross_entropy(L.softmax(x), label), 2),
    "logarithms": (lambda x, label, soft: L.reduce_sum(L.log_softmax(x) * soft, dim=[1], keep_dim=True), 2),
    "both": (lambda x, label, soft: L.softmax_with_cross_entropy(x, label) + L.reduce_sum(L.softmax(x) * soft, dim=[1], keep_dim=True), 4),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_no_logits_are_gathered_for_a_loss_whose_classes_are_cut(kind):
    loss_of, forward = LOSSES[kind]
    model, _ = classes(loss_of)
    t = transpiled(model, fx.Mesh(dp=2, tp=2))
    moved = [m for m in t.explain() if "over tp" in m and "nothing is sent" not in m]
    sizes = [int(m.split(" bytes")[0].split()[-1]) for m in moved]
    assert len(moved) >= forward and set(sent(t)) == {"all_reduce"}
    assert max(sizes) <= 1024 * 8  # one number a row, of which an open batch counts as 1024


@pytest.mark.parametrize("mesh", [fx.Mesh(dp=2, tp=2), fx.Mesh(dp=1, tp=3), fx.Mesh(dp=1, tp=9)], ids=repr)
@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_cut_classes_are_one_devices_with_ignored_labels_and_empty_parts(kind, mesh):
    """9 ranks cut 7 classes: two of them have none."""
    model, each = classes(LOSSES[kind][0])
    same_answers(model, "data_parallel", mesh, rows=(6, 5), fetch=(each, model.gradients[0][1]))


NORMS = {
    "layer_norm": lambda x, label, soft: L.layer_norm(x) * soft,
    "rms_norm": lambda x, label, soft: L.rms_norm(x) * soft,
    "norm": lambda x, label, soft: L.l2_normalize(x, axis=1) * soft,
}


@pytest.mark.parametrize("mesh", [fx.Mesh(dp=2, tp=2), fx.Mesh(dp=1, tp=3)], ids=repr)
@pytest.mark.parametrize("kind", NORMS)
def test_rows_whose_columns_are_cut_are_normalized_by_sums_and_not_gathered(kind, mesh):
    model, each = classes(NORMS[kind])
    moved = [m for m in transpiled(model, mesh).explain() if "over tp" in m and "nothing is sent" not in m]
    # sums of rows, of which an open batch counts as 1024, and gradients of whole weights
    assert moved and all(": partial(sum) over tp" in m or "for update" in m for m in moved)
    assert max(int(m.split(" bytes")[0].split()[-1]) for m in moved) <= 1024 * 8
    same_answers(model, "data_parallel", mesh, rows=(6, 5), fetch=(each, model.gradients[0][1]))


def test_a_label_that_is_no_class_is_named_whoever_would_have_it():
    model, _ = classes(LOSSES["hard labels"][0])
    feed = model.feed(4)
    feed["label"][1] = 9
    t = transpiled(model, fx.Mesh(dp=1, tp=2))
    with fx.ParallelExecutor(t, places=fx.cpu_places(2), timeout=20) as exe:
        exe.run_startup()
        with pytest.raises(fx.ExecutionError, match="label 9 is out of range for 7 classes"):
            exe.run(feed=feed, fetch_list=[model.loss])
