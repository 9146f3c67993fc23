"""Softmax and cross entropy, forward and backward, as one operator."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.rewrite import JoinCrossEntropy, rewritten
from fluidx.testing import check_rewrite
from fluidx.testing.models import TestModel, train_single

L = fx.layers
HEAD = "data %x: f32[-1,4]; data %label: i64[-1,1]; data %g: f32[-1,1]"
FORWARD = """
  %p: f32[-1,4] = softmax(%x)
  %loss: f32[-1,1] = cross_entropy(%p, %label)
"""
BACKWARD = """
backward:
  %p@GRAD: f32[-1,4] = cross_entropy_grad(%p, %label, %g)
  %x@GRAD: f32[-1,4] = softmax_grad(%p, %p@GRAD)
"""


def test_the_two_and_their_gradients_are_one_each():
    joined = "%p: f32[-1,4], %loss: f32[-1,1] = softmax_with_cross_entropy(%x, %label)"
    check_rewrite(JoinCrossEntropy(), given=HEAD, before=FORWARD, after=joined, fetch=["p"])
    check_rewrite(JoinCrossEntropy(), given=HEAD, before=f"forward:{FORWARD}{BACKWARD}", fetch=["loss", "x@GRAD"],
        after=f"forward:\n{joined}\nbackward:\n  %x@GRAD: f32[-1,4] = softmax_with_cross_entropy_grad(%p, %label, %g)")  # fmt: skip


def test_attributes_of_the_loss_stay():
    log = check_rewrite(JoinCrossEntropy(), given=HEAD.replace("i64[-1,1]", "f32[-1,4]"),
        before=FORWARD.replace("%label)", "%label) {ignore_index=3, soft_label=true}"),
        after="%p: f32[-1,4], %loss: f32[-1,1] = softmax_with_cross_entropy(%x, %label) {ignore_index=3, soft_label=true}")  # fmt: skip
    assert log == []


@pytest.mark.parametrize(
    "text, reason",
    [
        (FORWARD.replace("softmax(%x)", "sigmoid(%x)"), "%p is not the result of a softmax that only this operator reads"),
        (FORWARD.replace("softmax(%x)", "softmax(%x) {axis=0}"), "the softmax is along axis 0, cross entropy along the last one"),
        (
            FORWARD.replace("%loss", "%label = assign(%label)\n  %loss"),
            "%x, %label or %loss is written more than once, or after the softmax",
        ),
        (
            f"forward:{FORWARD}  %more: f32[-1,4] = exp(%p)\n"
            + BACKWARD.replace("%x@GRAD", "%sum: f32[-1,4] = sum([%p@GRAD, %more])\n  %x@GRAD").replace("%p, %p@GRAD)", "%p, %sum)"),
            "%p has gradients from other operators too",
        ),
    ],
)  # fmt: skip
def test_others_are_left_with_a_reason(text, reason):
    fetch = ["loss", "x@GRAD"]
    (said,) = check_rewrite(JoinCrossEntropy(), given=HEAD, before=text, after=text, fetch=fetch)
    assert said.startswith("JoinCrossEntropy kept %loss = cross_entropy(%p, %label)") and said.endswith(reason)


def classifier():
    main, startup = fx.Program("classes"), fx.Program("classes_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 6], "float64"), fx.data("label", [-1, 1], "int64")
        p = L.fc(L.fc(x, 8, act="tanh"), 5, act="softmax")
        loss = L.mean(L.cross_entropy(p, label))
        fx.optimizer.Adam(0.05).minimize(loss)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 6)), "label": rng.integers(0, 5, (rows, 1))}

    return TestModel(main, startup, loss, feed, []), p


def test_training_goes_the_same_way():
    model, p = classifier()
    feeds = [model.feed(7, k) for k in range(5)]
    before, scope = train_single(model, feeds, [model.loss, p])
    joined = rewritten(model.main, [JoinCrossEntropy()], fetch=[model.loss, p])
    types = [op.type for op in joined.ops]
    assert "softmax" not in types and types.count("softmax_with_cross_entropy_grad") == 1
    model.main = joined
    after, other = train_single(model, feeds, [model.loss.name, p.name])
    for a, b in zip(before, after, strict=True):
        for u, v in zip(a, b, strict=True):
            np.testing.assert_allclose(v, u, 1e-9)  # Adam divides by the root of small moments, which magnifies rounding
    for n in scope.arrays:
        np.testing.assert_allclose(other.arrays[n], scope.arrays[n], 1e-6, 1e-9)


def test_a_probability_that_rounds_to_zero_has_its_loss():
    x, label = fx.data("x", [-1, 2], "float64"), fx.data("label", [-1, 1], "int64")
    loss = L.cross_entropy(L.softmax(x), label)
    main = fx.default_main_program()
    feed = {"x": np.array([[0.0, 2000.0]]), "label": np.array([[0]])}
    assert fx.Executor().run(main, feed=feed, fetch_list=[loss])[0] == 1e20
    assert fx.Executor().run(rewritten(main, [JoinCrossEntropy()]), feed=feed, fetch_list=[loss.name])[0] == 2000
