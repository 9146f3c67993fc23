"""`fluidx onnx train`: validation tables beside training tables, names of classes, and trainings that continue with other options."""

import re

import numpy as np
import pytest

pytest.importorskip("onnx")

import fluidx as fx
from fluidx.training.data_files import arrays_of_columns, claimed_columns

from .test_train_command import folder, table, train, trained, weights, written  # noqa: F401

LOOK = ("--epochs", 1, "--schedule", "constant")


def net(path):
    """The class is the larger one of x0, 10 x1 and 0."""
    return written(path, """<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 3] y) { y = MatMul (x, w) }""",
                   w=[[1, 0, 0], [0, 10, 0]])  # fmt: skip


@pytest.fixture
def rows(folder):  # noqa: F811
    net(folder / "net.onnx")
    return [(1, 2), (5, 0.25), (-1, -2), (3, 0.125)], [1, 0, 2, 0]


def columns(rows, header, order, names=None):
    """Lines of a table with the numbers of each row in that order, and the label."""
    x, label = rows
    return header, [",".join(str(pair[k]) for k in order) + f",{names[c] if names else c}" for pair, c in zip(x, label)]


def losses(said):
    return re.search(r"loss ([0-9.e-]+).*; validation: loss ([0-9.e-]+), accuracy ([0-9.]+)%", said).groups()


# -- tables ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_as, val_as", [
    (("x.0,x.1,label", (0, 1)), ("x.1,x.0,label", (1, 0))),
    (("x.1,x.0,label", (1, 0)), ("x_0,x_1,label", (0, 1))),
    (("w,h,label", (0, 1)), ("h,w,label", (1, 0))),
])  # fmt: skip
def test_columns_are_told_by_their_numbers_and_names(rows, folder, train_as, val_as):  # noqa: F811
    """At a rate of almost 0 the weights stay those that classify all rows."""
    table_of = {"data.csv": train_as, "val.csv": val_as}
    for name, (header, order) in table_of.items():
        table(folder / name, *columns(rows, header, order))
    found, held, right = losses(trained("--val", "val.csv", "--lr", 1e-9, *LOOK, data="data.csv"))
    assert held == found and right == "100.0"


def test_ten_columns_are_in_the_order_of_their_numbers(folder):  # noqa: F811
    x = fx.data("x", [-1, 11], "int64")
    wanted = {"x": x, "label": x}
    held = {f"x{k}": np.array([k]) for k in (10, 2, 0, 1, 9, 8, 7, 3, 4, 6, 5)} | {"label": np.array([0])}
    claimed = claimed_columns(folder / "t.csv", held, wanted, "label", {})
    assert arrays_of_columns(folder / "t.csv", held, wanted, "label", claimed)["x"].tolist() == [[*range(11)]]


@pytest.mark.parametrize("header, order, found", [
    ("w,d,label", (0, 1), "no 'h' and 'd' in addition"),
    ("w,label", (0,), "no 'h'"),
    ("w,h,id,label", (0, 1, 1), "'id' in addition"),
])  # fmt: skip
def test_columns_that_are_missing_or_additional_are_named(rows, folder, header, order, found):  # noqa: F811
    table(folder / "data.csv", *columns(rows, "w,h,label", (0, 1)))
    table(folder / "val.csv", *columns(rows, header, order))
    code, said = train("--val", "val.csv", data="data.csv")
    expected = (
        f"val.csv must have the columns of the examples to train on, which for input 'x' are w, h; it has {found}; rename its columns"
    )
    assert code == 1 and expected in said


def test_delimiters_inside_quotes_do_not_count(rows, folder):  # noqa: F811
    header, lines = columns(rows, '"x, first";"x, second";label', (0, 1))
    table(folder / "data.csv", header, [line.replace(",", ";") for line in lines])
    assert "4 examples" in trained(*LOOK, data="data.csv")


def test_integers_of_more_than_64_bits_are_floats(rows, folder):  # noqa: F811
    table(folder / "data.csv", "a,b,label", [f"{2**70},1,0", "1,2,1"])
    assert "2 examples" in trained(*LOOK, "--lr", 1e-30, data="data.csv")


# -- labels ----------------------------------------------------------------------------------------------------------------------


def test_classes_that_look_like_numbers_are_looked_up_by_name(rows, folder):  # noqa: F811
    """The validation table has only the classes "1" and "2", the first and the second one, not the second and the third."""
    x, label = rows
    table(folder / "data.csv", *columns(rows, "x.0,x.1,label", (0, 1), ["1", "2", "n/a"]))
    some = [r for r, c in zip(x, label) if c < 2], [c for c in label if c < 2]
    table(folder / "val.csv", *columns(some, "x.0,x.1,label", (0, 1), ["1", "2"]))
    assert losses(trained("--val", "val.csv", "--lr", 1e-9, *LOOK, data="data.csv"))[2] == "100.0"
    np.savez("val.npz", x=np.float32(x), label=[1, 2, 3, 1])
    code, said = train("--val", "val.npz", data="data.csv")
    assert code == 1 and "class '3' of val.npz is not in the examples to train on, which have 1, 2, n/a" in said


def test_names_of_classes_do_not_fit_numbers_to_train_on(rows, folder):  # noqa: F811
    table(folder / "data.csv", *columns(rows, "x.0,x.1,label", (0, 1)))
    table(folder / "val.csv", *columns(rows, "x.0,x.1,label", (0, 1), ["a", "b", "c"]))
    code, said = train("--val", "val.csv", data="data.csv")
    assert code == 1 and "the labels of val.csv are text, such as 'b', and those of data.csv are numbers; write both as numbers" in said


def test_a_label_that_is_nan_is_named(rows, folder):  # noqa: F811
    np.savez("data.npz", x=np.zeros((3, 2), "float32"), label=[0, np.nan, 1])
    code, said = train()
    assert code == 1 and "example 2 has nan: write an integer there, or leave the example out" in said and "astype" not in said


def test_parquet_cells_without_a_label_are_named(rows, folder):  # noqa: F811
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"a": [1.0, 2], "b": [3.0, 4], "label": ["cat", None]}), "data.parquet")
    code, said = train(data="data.parquet")
    assert code == 1 and "example 2 of data.parquet has no label: its cell in column 'label' is empty" in said


@pytest.mark.parametrize("given, made, inner", [("label", "y", "m"), ("x", "label", "m"), ("x", "y", "label")])
def test_a_model_may_have_a_value_called_label(folder, given, made, inner):  # noqa: F811
    """The name of the labels in files is that of --label; an input `label` is an input."""
    w = np.random.default_rng(0).standard_normal((2, 3))
    written(folder / "net.onnx", f"""<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] {given}) => (float[n, 3] {made}) {{
        {inner} = MatMul ({given}, w)  {made} = Add ({inner}, b) }}""", w=w, b=np.zeros(3))  # fmt: skip
    x, label = np.float32([[1, 2], [3, 4], [-1, 0]]), np.array([0, 1, 2])
    options, name = (("--label", "kind"), "kind") if given == "label" else ((), "label")
    np.savez("data.npz", **{given: x, name: label})
    said = trained(*LOOK, *options, "--lr", 1e-9)
    y = x @ np.float32(w)
    expected = np.mean(np.log(np.exp(y).sum(1)) - y[np.arange(3), label])
    assert float(re.search(r"epoch 1 of 1: loss ([0-9.]+)", said)[1]) == pytest.approx(expected, rel=1e-3)
    if given == "label":
        code, said = train()
        assert code == 1 and "the model has an input 'label', so the labels must have another name: give it with --label NAME" in said


# -- trainings that continue ---------------------------------------------------------------------------------------------------


def steps(at):
    return sorted(int(p.name[5:]) for p in at.glob("step-*"))


def test_a_training_that_continues_with_larger_batches_keeps_its_new_checkpoints(folder):  # noqa: F811
    """24 examples: 6 batches of 4, then 2 of 12. The checkpoints have the numbers of the epochs."""
    trained("--epochs", 3, "--batch", 4, "--checkpoints", "ck")
    assert steps(folder / "ck") == [1, 2, 3]
    said = trained("--epochs", 5, "--batch", 12, "--checkpoints", "ck", "--resume")
    assert "--batch 4, now 12" in said and "continues after epoch 3" in said and steps(folder / "ck") == [3, 4, 5]
    assert "continues after epoch 5" in trained("--epochs", 6, "--batch", 12, "--checkpoints", "ck", "--resume")


def test_checkpoints_with_the_numbers_of_steps_are_continued(folder):  # noqa: F811
    """As folders of older versions have them: epoch 3 is step 18."""
    trained("--epochs", 3, "--batch", 4, "--checkpoints", "ck")
    for k in (3, 2, 1):
        (folder / "ck" / f"step-{k:010d}").rename(folder / "ck" / f"step-{6 * k:010d}")
    trained("--epochs", 4, "--batch", 12, "--checkpoints", "ck", "--resume")
    assert max(steps(folder / "ck")) == 19
    assert "continues after epoch 4" in trained("--epochs", 5, "--batch", 12, "--checkpoints", "ck", "--resume")


CK = ("--checkpoints", "ck")


@pytest.mark.parametrize("before, now, by, again", [
    (("--metric", "f1"), (), "f1", "with --metric f1"),
    ((), ("--metric", "f1"), "loss", "without --metric"),
    (("--metric", "accuracy"), ("--metric", "f1"), "accuracy", "with --metric accuracy"),
])  # fmt: skip
def test_another_metric_does_not_replace_the_best_epoch(folder, before, now, by, again):  # noqa: F811
    trained("--epochs", 2, "--val", "data.npz", *before, *CK)
    kept = weights()
    code, said = train("--epochs", 3, "--val", "data.npz", *now, *CK, "--resume")
    assert code == 1 and f"out.onnx has the best epoch by {by}, as the training in ck chose it" in said
    assert f"continue {again}, or give another -o FILE" in said and all(np.array_equal(weights()[n], a) for n, a in kept.items())
    said = trained("--epochs", 3, "--val", "data.npz", *now, *CK, "--resume", output="other.onnx")
    assert "other.onnx is not there, so the best epoch is chosen from the others" in said and (folder / "other.onnx").exists()


def test_validation_may_begin_when_a_training_continues(folder):  # noqa: F811
    trained("--epochs", 2, *CK)
    said = trained("--epochs", 3, "--val", "data.npz", *CK, "--resume")
    assert "continues after epoch 2, from ck; its last epoch was not validated, so the best epoch is chosen from the others" in said
    assert "--val none, now data.npz" in said and "epoch 3 of 3" in said
    said = trained("--epochs", 4, "--val", "data.npz", "--patience", 1, *CK, "--resume")
    assert "chosen from the others" not in said and re.search("wrote out.onnx(?! of epoch [12]);", said)


def test_options_that_decide_the_results_are_listed(folder):  # noqa: F811
    np.savez("other.npz", **np.load("data.npz"))
    trained("--epochs", 1, "--columns", "x=a,b", *CK)
    now = ("--class-weight", "1,2,3", "--columns", "x=a,c", "--freeze", "v", "--freeze", "v*", "--schedule", "linear")
    said = trained("--epochs", 2, *now, *CK, "--resume", data="other.npz")
    for text in ("--data data.npz, now other.npz", "--class-weight none, now 1.0,2.0,3.0", "--freeze none, now v,v*",
                 "--columns x=a,b, now x=a,c", "--schedule cosine, now linear"):  # fmt: skip
        assert text in said
    assert "--label " not in said and "--lora" not in said


def test_options_of_adapters_that_differ_are_listed(folder):  # noqa: F811
    trained("--epochs", 1, "--lora", 2, *CK)
    said = trained("--epochs", 2, "--lora", 2, "--lora-alpha", 4, "--lora-dropout", 0.5, *CK, "--resume")
    assert "--lora-alpha 16.0, now 4.0" in said and "--lora-dropout 0.0, now 0.5" in said
    assert "differ" not in trained("--epochs", 2, "--lora", 2, "--lora-alpha", 4, "--lora-dropout", 0.5, *CK, "--resume")


def test_a_validation_loss_that_is_nan_is_an_error(folder):  # noqa: F811
    x = np.load("data.npz")["x"]
    x[4, 1] = np.nan
    np.savez("val.npz", x=x, label=np.load("data.npz")["label"])
    code, said = train("--val", "val.npz")
    expected = "the validation loss is nan in epoch 1, so nothing was written; array 'x' of the data holds NaN, first in example 5"
    assert code == 1 and expected in said and not (folder / "out.onnx").exists()
