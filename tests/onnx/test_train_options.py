"""`fluidx onnx train`: perplexity, weights of yes, and columns that are standardized in the model."""

import re
from contextlib import nullcontext

import numpy as np
import pytest

pytest.importorskip("onnx")

import fluidx as fx
from fluidx import finetune
from fluidx.training.standardize import Moments

from .test_train_command import examples, folder, table, train, trained, weights, written  # noqa: F401

LANGUAGE = """<ir_version: 9, opset_import: ["": 18]> g (int64[n, t] ids) => (float[n, t, 5] y) {
    e = Gather (table, ids)  y = MatMul (e, v) }"""


def test_perplexity_is_e_to_the_mean_loss_of_the_tokens_that_count(folder):  # noqa: F811
    """All scores are 0 and stay so at a rate of almost 0: each of 5 tokens has the probability 1/5, and the perplexity is 5."""
    written(folder / "words.onnx", LANGUAGE, table=np.zeros((5, 4)), v=np.zeros((4, 5)))
    table(folder / "words.csv", "ids,label", ["1 2 3,1 2 3", "4 0,4 -100", "2,2"])
    look, paths = ("--lr", 1e-9, "--epochs", 1, "--val", "words.csv"), {"model": "words.onnx", "data": "words.csv"}
    said = trained("--loss", "causal_language_model", *look, **paths)
    assert re.search(r"validation: loss 1.609, accuracy [0-9.]+%, perplexity 5$", said, re.MULTILINE)
    assert "validation: loss 1.609, perplexity 5" in trained("--loss", "token_classification", "--metric", "perplexity", *look, **paths)
    code, said = train("--loss", "causal_language_model", "--label-smoothing", 0.1, "--metric", "perplexity", *look, **paths)
    assert code == 1 and "follows from a loss without --class-weight and --label-smoothing" in said
    code, said = train("--metric", "perplexity", "--val", "data.npz")
    assert code == 1 and "--metric perplexity does not fit --loss softmax_with_cross_entropy: it is of tokens" in said


def questions(folder):  # noqa: F811
    """Two answers for each example: the first is yes in 3 of 4, the second in 1 of 4."""
    written(folder / "net.onnx", """<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] y) { y = MatMul (x, w) }""",
            w=np.eye(2))  # fmt: skip
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((4, 2), "float32"), label=np.float32([[1, 0], [1, 1], [0, 0], [1, 0]]))


def test_yes_and_no_weigh_the_same(folder):  # noqa: F811
    questions(folder)
    options = ("--loss", "sigmoid_cross_entropy_with_logits", "--epochs", 2, "--batch", 2)
    found = []
    for weight in ("balanced", f"{1 / 3},3", "1", None):
        trained(*options, *(("--pos-weight", weight) if weight else ()))
        found.append(weights()["w"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    np.testing.assert_allclose(found[2], found[3], rtol=1e-6)
    assert not np.allclose(found[0], found[2])


@pytest.mark.parametrize("options, expected", [
    (("--pos-weight", "2"), "pos_weight is for sigmoid_cross_entropy_with_logits, and the loss is softmax_with_cross_entropy"),
    (("--loss", "sigmoid_cross_entropy_with_logits", "--pos-weight", "1,2,3"), "pos_weight has 3 numbers, but the output"),
    (("--loss", "sigmoid_cross_entropy_with_logits", "--pos-weight", "0"), "pos_weight must be numbers above 0, got (0.0,)"),
    (("--loss", "sigmoid_cross_entropy_with_logits", "--class-weight", "1,2"), "has numbers; pos_weight weighs the label 1"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_named(folder, options, expected):  # noqa: F811
    questions(folder)
    code, said = train(*options)
    assert code == 1 and expected in said


# -- validation on ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("data_parallel",), ("zero3",), ("fsdp", "--backend", "processes"), ("zero1", "--accumulate", 2)])
def test_ranks_validate_as_one_device_does(folder, options, monkeypatch):  # noqa: F811
    """Seven examples to validate on, in batches of 4 and 3 on 2 ranks. Dropout drops nothing there."""
    strategy, *options = options
    judges, judge = [], finetune._judge
    monkeypatch.setattr(finetune, "_judge", lambda *args: judges.append(judge(*args)) or judges[-1])
    x, label = examples(7, seed=3)
    np.savez("val.npz", x=x, label=label)
    steps = ("--epochs", 2, "--batch", 4, "--val", "val.npz", "--metric", "f1")

    def scores(said):
        return [float(v) for v in re.findall(r"validation: loss ([0-9.]+), f1 ([0-9.]+)%", said) for v in v]

    said = trained(*steps, "--ranks", 2, "--strategy", strategy, *options)
    assert isinstance(judges[0], fx.ParallelExecutor)
    by_ranks = scores(said)
    monkeypatch.setattr(finetune, "_judge", lambda *args: nullcontext())
    alone = scores(trained(*steps, "--ranks", 2, "--strategy", strategy, *options))
    assert len(alone) == 6
    np.testing.assert_allclose(by_ranks, alone, rtol=2e-3)


# -- standardized columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--ranks", 2), ("--quantize",)])
def test_the_written_model_takes_columns_as_they_are(folder, options):  # noqa: F811
    """The training is that of columns standardized by hand, and the written model does it itself. Held-out examples do not count."""
    rng = np.random.default_rng(1)
    x = np.float32(rng.standard_normal((24, 2)) * [1000, 0.01] + [5000, -3])
    label = (x[:, 0] > 5000).astype("int64") + (x[:, 1] > -3)
    np.savez("raw.npz", x=x, label=label)
    np.savez("held.npz", x=x[:4] + 1, label=label[:4])
    mean, deviation = x.mean(0, dtype="float64"), x.std(0, dtype="float64")
    np.savez("by_hand.npz", x=np.float32((x - np.float32(mean)) / np.float32(deviation)), label=label)
    steps = ("--epochs", 3, "--batch", 8, *options)
    trained(*steps, data="by_hand.npz")
    expected, by_hand = weights(), fx.onnx.session("out.onnx").run([np.load("by_hand.npz")["x"]])[0]
    said = trained(*steps, "--val", "held.npz", "--metric", "f1", "--patience", 9, "--standardize", data="raw.npz")
    assert "columns are standardized in the model, by the training examples: 2 of x" in said
    if not options:
        trained(*steps, "--standardize", data="raw.npz")
        found = weights()
        assert all(np.allclose(found[n], a, rtol=1e-5, atol=1e-6) for n, a in expected.items() if n in ("w", "v"))
        np.testing.assert_allclose(fx.onnx.session("out.onnx").run([x])[0], by_hand, rtol=1e-4, atol=1e-5)


def test_moments_of_equal_and_missing_numbers(folder):  # noqa: F811
    assert Moments.of(np.float32([[1, 4], [1, 8]])) == ((1.0, 6.0), (1.0, 2.0))
    table(folder / "data.csv", "a,b,label", ["1,2,0", "1,,1"])
    code, said = train("--standardize", data="data.csv")
    assert code == 1 and "--standardize: column 1 of 'x' has no finite mean: fill in its empty cells" in said
    written(folder / "words.onnx", LANGUAGE, table=np.zeros((5, 4)), v=np.zeros((4, 5)))
    table(folder / "words.csv", "ids,label", ["1 2 3,1 2 3"])
    code, said = train("--standardize", "--loss", "causal_language_model", model="words.onnx", data="words.csv")
    assert code == 1 and "the model has no input of columns, float32[?,N], that could be standardized" in said
