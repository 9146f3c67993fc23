"""`fluidx onnx train`: where examples come from, validation, early stopping, checkpoints, parts of batches, precision."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import fluidx as fx
from fluidx.cli import main
from fluidx.comm.mpi import mpirun

onnx = pytest.importorskip("onnx")


def written(path, text, **weights):
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a, "float32"), n) for n, a in weights.items())
    onnx.save(model, path)
    return path


def classifier(path):
    rng = np.random.default_rng(0)
    return written(path, """<ir_version: 9, opset_import: ["": 18]> net (float[n, 2] x) => (float[n, 3] p) {
        h = MatMul (x, w)  r = Tanh (h)  d = Dropout (r, half)  l = MatMul (d, v)  p = Softmax <axis = 1> (l)
    }""", w=rng.standard_normal((2, 8)), v=rng.standard_normal((8, 3)), half=0.25)  # fmt: skip


def examples(rows=24, seed=0):
    """Points, and the third of the circle in which they are."""
    x = np.random.default_rng(seed).standard_normal((rows, 2), "float32")
    return x, (np.arctan2(x[:, 1], x[:, 0]) * 3 / (2 * np.pi) + 1.5).astype("int64").clip(0, 2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    classifier(tmp_path / "net.onnx")
    x, label = examples()
    np.savez("data.npz", x=x, label=label)
    return tmp_path


def train(*args, model="net.onnx", data="data.npz", output="out.onnx"):
    result = CliRunner().invoke(main, ["onnx", "train", model, "--data", data, "-o", output, *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def trained(*args, **paths):
    code, said = train(*args, **paths)
    assert code == 0, said
    return said


def weights(path="out.onnx"):
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def table(path, header, rows):
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")


# -- where examples come from ----------------------------------------------------------------------------------------------------


def test_all_kinds_of_data_train_alike(folder):
    x, label = examples()
    (folder / "arrays").mkdir()
    np.save("arrays/x.npy", x)
    np.save("arrays/label.npy", label)
    table(folder / "data.csv", "width,height,label", [f"{a!r},{b!r},{c}" for (a, b), c in zip(x.tolist(), label)])
    names = np.array(["left", "right", "up"])[label]  # in the order of the alphabet
    table(folder / "names.csv", "kind;x.0;x.1", [f"{c};{a!r};{b!r}" for (a, b), c in zip(x.tolist(), names)])
    (folder / "feeder.py").write_text("""import numpy as np
def batches(epoch):
    data = np.load("data.npz")
    order = np.random.default_rng((0, epoch)).permutation(24)
    return [{"x": data["x"][rows], "label": data["label"][rows]} for rows in (order[:16], order[16:])]
""")
    trained("--batch", 16, "--epochs", 2)
    expected = weights()
    for data, options in (("arrays", ()), ("data.csv", ()), ("names.csv", ("--label", "kind")), ("feeder:batches", ())):
        trained("--batch", 16, "--epochs", 2, *options, data=data)
        found = weights()
        assert all(np.array_equal(found[n], a) for n, a in expected.items()), data


def test_columns_of_classes_with_names_say_which_number_each_has(folder):
    table(folder / "data.csv", "a,b,kind", ["1,2,cat", "3,4,dog", "5,6,ant"])
    model = onnx.load("net.onnx")
    model.metadata_props.add(key="author", value="someone")
    onnx.save(model, "net.onnx")
    assert "classes: 0 ant, 1 cat, 2 dog" in trained("--label", "kind", "--epochs", 1, data="data.csv")
    assert {p.key: p.value for p in onnx.load("out.onnx").metadata_props} == {"author": "someone", "classes": '["ant", "cat", "dog"]'}
    assert '  classes ["ant", "cat", "dog"]' in CliRunner().invoke(main, ["onnx", "info", "out.onnx"]).output


def test_columns_of_several_inputs_and_pictures(folder):
    written(folder / "two.onnx", """<ir_version: 9, opset_import: ["": 18]>
        g (float[n, 1, 2, 2] image, float[n, 1] age) => (float[n, 1] y) {
        f = Flatten (image)  a = MatMul (f, w)  b = Mul (age, v)  y = Add (a, b) }""", w=np.zeros((4, 1)), v=[0])  # fmt: skip
    table(folder / "data.csv", "id,p0,p1,p2,p3,age,price", ["7,1,2,3,4,30,0.5", "8,1,1,1,1,20,1"])
    said = trained("--columns", "image=p*", "--label", "price", "--loss", "square_error_cost", model="two.onnx", data="data.csv")
    assert "2 examples, 1 batches an epoch" in said
    code, said = train("--label", "price", "--loss", "square_error_cost", model="two.onnx", data="data.csv")
    assert code == 1 and "data.csv has 5 numbers for input 'image', which takes 4: float32[?,1,2,2]. They are id, p0, p1, p2, p3" in said


def test_a_cell_may_hold_the_tokens_of_a_sequence(folder):
    rng = np.random.default_rng(0)
    written(folder / "words.onnx", """<ir_version: 9, opset_import: ["": 18]> g (int64[n, t] ids) => (float[n, t, 5] y) {
        e = Gather (table, ids)  y = MatMul (e, v) }""", table=rng.standard_normal((5, 4)), v=rng.standard_normal((4, 5)))  # fmt: skip
    table(folder / "words.csv", "ids,label", ["1 2 3,1 2 3", "4 0 1,4 0 -100"])
    options, paths = ("--loss", "causal_language_model", "--epochs", 3, "--val", "words.csv"), {"model": "words.onnx", "data": "words.csv"}
    assert re.search(r"epoch 3 of 3: loss [0-9.]+; validation: loss [0-9.]+, accuracy", trained(*options, **paths))
    table(folder / "words.csv", "ids,label", ["1 2 3,1 2 3", "4 0,4 0", "4,4"])
    assert "3 examples" in trained(*options, **paths)


def test_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    x, label = examples()
    names = pyarrow.array(np.array(["left", "right", "up"])[label]).dictionary_encode()
    parquet.write_table(pyarrow.table({"x": pyarrow.array(x.tolist(), pyarrow.list_(pyarrow.float32())), "label": names}), "data.parquet")
    trained("--epochs", 2)
    expected = weights()
    trained("--epochs", 2, data="data.parquet")
    assert all(np.array_equal(weights()[n], a) for n, a in expected.items())


def test_parquet_without_its_package_says_what_is_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (folder / "data.parquet").write_bytes(b"PAR1")
    code, said = train(data="data.parquet")
    assert code == 1 and "Parquet files need the package pyarrow" in said and "pip install -e '.[parquet]'" in said


@pytest.mark.parametrize("lines, options, message", [
    (["a,b,kind", "1,2,0"], (), "has no column 'label' with the labels; its columns are: a, b, kind; --label NAME names the column"),
    (["a,label", "1,0"], (), "data.csv has 1 numbers for input 'x', which takes 2: float32[?,2]. They are a"),
    (["a,b,label", "1,red,0"], (), "column 'b' of data.csv has text, 'red' in its first row, and input 'x' takes float32"),
    (["a,b,label", "1,2,0", "1,2"], (), "row 3 of data.csv has 2 cells, but the first line names 3 columns"),
    (["a,a,label", "1,2,0"], (), "data.csv has two columns 'a'"),
    (["a,b,label"], (), "data.csv has no rows"),
    ([""], (), "data.csv is empty; its first line names the columns"),
    (["1,2,0", "1,2,1"], (), "the first line of data.csv has numbers, 1, 2, 0; it must name the columns"),
    (["a,b,label", "1,2,0", "1,2,3"], (), "labels go from 0 to 3, but the model has 3 classes: 0 to 2; --head 4"),
    (["a,b,label", *(f"1,2,{c}" for c in "wxyz")], (),
     "the labels are 4 classes, w, x, y, z, but the model has 3 classes: 0 to 2; --head 4"),
    (["a,b,label", "1,2,0", "1,2,"], (), "row 3 of data.csv has no label: its cell in column 'label' is empty; fill it in, or remove"),
    (["a,b,label", "1,2,cat", "1,2, ", "1,2,dog"], (), "row 3 of data.csv has no label: its cell in column 'label' is empty"),
    (["a,b,label", "1,2,0.5"], (), "array 'label' is float64[1, 1], and int64[?,1] is expected"),
    (["x.0,x0,label", "1,2,0"], (), "data.csv has two columns number 0 for 'x': 'x.0' and 'x0'; rename one of them"),
    (["a,b,label", ",2,0", "1,2,0"], (),
     "the loss is nan in epoch 1, so nothing was written; array 'x' of the data holds NaN, first in example 1"),
    (["a,b,label", "1,2,0"], ("--columns", "y=a"), "--columns y=...: the model has no input 'y'; it has: label, x"),
    (["a,b,label", "1,2,0"], ("--columns", "x=c*"), "--columns x=c*: data.csv has no such column; it has: a, b"),
    (["a,b,label", "1,2,no"], ("--loss", "square_error_cost"),
     "the labels of data.csv are text, such as 'no', and --loss square_error_cost"),
])  # fmt: skip
def test_messages_about_tables(folder, lines, options, message):
    table(folder / "data.csv", lines[0], lines[1:])
    code, said = train(*options, data="data.csv")
    assert code == 1 and message in said and not (folder / "out.onnx").exists()


def test_classes_of_validation_examples_are_those_of_training_examples(folder):
    table(folder / "data.csv", "a,b,label", ["1,2,cat", "3,4,dog", "5,6,ant"])
    table(folder / "val.csv", "a,b,label", ["1,2,cow"])
    code, said = train("--val", "val.csv", data="data.csv")
    assert code == 1 and "class 'cow' of val.csv is not in the examples to train on, which have ant, cat, dog" in said


@pytest.mark.parametrize("body, options, message", [
    ("def make(): return iter([])", (), "own:make returns list_iterator, which has no len(); --steps says how many batches an epoch has"),
    ("def make(): yield {'x': [[1., 2.]], 'label': [0]}", ("--steps", 2), "own:make gave 1 batches in epoch 1, and an epoch has 2"),
    ("def make(): return [[1]]", (), "batch 1 of own:make is a list; give dicts of arrays"),
    ("def make(): return [{'x': [[1., 2.]]}]", (), "batch 1 of own:make has no array 'label', which is int64[?,1]"),
    ("def make(): return 3", (), "own:make returns int; it must return an iterable of batches"),
    ("def other(): pass", (), "--data own:make: module 'own' has no function 'make'"),
    ("def make(): return [{'x': [[1., 2.]], 'label': [0]}]", ("--val-split", 0.5), "--val-split needs arrays to choose from"),
])  # fmt: skip
def test_messages_about_functions(folder, monkeypatch, body, options, message):
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (folder / "own.py").write_text("import numpy as np\n" + body + "\n")
    code, said = train(*options, data="own:make")
    assert code == 1 and message in said


@pytest.mark.parametrize("args, message", [
    (("--data", "none.csv"), "none.csv: there is no such file or folder"),
    (("--metric", "accuracy"), "--metric needs validation examples; give --val-split 0.1"),
    (("--patience", "3"), "--patience needs validation examples"),
    (("--resume",), "--resume needs --checkpoints FOLDER"),
    (("--metric", "f2", "--val-split", "0.5"), "'f2' is not one of 'accuracy', 'f1'"),
    (("--loss", "cross_entropy_loss"), "there is no loss 'cross_entropy_loss'; did you mean 'softmax_with_cross_entropy'?"),
    (("--class-weight", "1,a,2"), "'1,a,2' is neither a number for each class"),
    (("--accumulate", "64"), "--accumulate 64 are more parts than the 32 examples of --batch"),
    (("--columns", "x"), "--columns 'x' does not say which columns make which input"),
])  # fmt: skip
def test_options_that_do_not_fit(folder, args, message):
    code, said = train(*args)
    assert code == 2 and message in " ".join(said.split())


def test_a_metric_must_fit_the_loss(folder):
    code, said = train("--metric", "mae", "--val-split", 0.5)
    assert code == 1 and "mae does not fit --loss softmax_with_cross_entropy, whose labels are classes; there are: accuracy, f1" in said
    assert "class_weight has 2 numbers, but the output has 3 classes" in train("--class-weight", "1,2")[1]


def test_a_folder_without_arrays(folder):
    (folder / "empty").mkdir()
    code, said = train(data="empty")
    assert code == 1 and "empty has no .npy files; np.save('empty/NAME.npy', array) writes one for each input" in said


# -- exactness ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole_numbers(folder):
    """A product whose loss, gradients and steps are whole numbers or have few binary digits, so that sums are exact in any order."""
    written(folder / "net.onnx", """<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 1] y) { y = MatMul (x, w) }""",
            w=[[1], [-2]])  # fmt: skip
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.integers(-4, 5, (16, 2)), label=rng.integers(-8, 9, (16, 1)))
    return folder


EXACT = ("--loss", "square_error_cost", "--optimizer", "sgd", "--lr", 2**-6, "--schedule", "constant", "--batch", 8, "--epochs", 1)


@pytest.mark.parametrize("parts", [("--accumulate", 2), ("--accumulate", 8), ("--accumulate", 2, "--ranks", 4, "--strategy", "zero1")])
def test_a_batch_in_parts_gives_the_step_of_the_whole_batch(whole_numbers, parts):
    trained(*EXACT)
    expected = weights()["w"]
    assert not np.array_equal(expected, [[1], [-2]])
    trained(*EXACT, *parts)
    assert np.array_equal(weights()["w"], expected)


FEEDER = """import os
import numpy as np
def batches(epoch):
    if os.path.exists("stop") and epoch == 2:
        raise RuntimeError("the power went off")
    data = np.load("data.npz")
    order = np.random.default_rng(epoch).permutation(24)
    return [{n: a[order[k:k + 8]] for n, a in data.items()} for k in (0, 8, 16)]
"""


@pytest.mark.parametrize("options", [
    (), ("--ranks", 2, "--strategy", "fsdp", "--optimizer", "momentum"), ("--precision", "float16"),
    ("--val", "data.npz", "--metric", "f1"),
])  # fmt: skip
def test_resuming_gives_the_file_of_a_training_without_interruption(folder, options):
    (folder / "stopped.py").write_text(FEEDER)
    common = ("--epochs", 4, "--warmup", 2, *options)
    whole = trained(*common, data="stopped:batches", output="whole.onnx")
    (folder / "stop").touch()
    with pytest.raises(RuntimeError, match="the power went off"):
        train(*common, "--checkpoints", "ck", data="stopped:batches")
    (folder / "stop").unlink()
    said = trained(*common, "--checkpoints", "ck", "--resume", data="stopped:batches")
    assert "continues after epoch 2, from ck" in said and "epoch 2 of 4" not in said
    assert (folder / "out.onnx").read_bytes() == (folder / "whole.onnx").read_bytes()
    assert said.splitlines()[-1] == whole.splitlines()[-1].replace("whole", "out")


def test_resuming_on_one_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written("net.onnx", """<ir_version: 9, opset_import: ["": 18]> g (float[n, 3] x) => (float[n, 3] y) {
        h = MatMul (x, w)  some = Greater (x, zero)  places = NonZero (some)  k = ReduceMax <keepdims = 0> (places)
        f = Cast <to = 1> (k)  one = Sub (f, f)  y = Add (h, one) }""", w=np.eye(3), zero=0)  # fmt: skip
    x = np.random.default_rng(0).standard_normal((24, 3), "float32")
    np.savez("data.npz", x=x, label=x.argmax(axis=1))
    options = ("--schedule", "constant", "--checkpoints")
    trained("--epochs", 4, *options, "a", output="whole.onnx")
    trained("--epochs", 2, *options, "b")
    said = trained("--epochs", 4, *options, "b", "--resume")
    assert "these options differ from those of the checkpoint, so the results will: --epochs 2, now 4" in said
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    assert "no checkpoint yet: training begins at epoch 1" in trained("--epochs", 1, *options, "c", "--resume")
    code, said = train("--accumulate", 2)
    assert code == 1 and "so its batch cannot be cut into parts: leave --accumulate out" in said


# -- what is kept -------------------------------------------------------------------------------------------------------------------


def test_the_best_epoch_is_written_and_training_stops_when_none_is_better(whole_numbers):
    """A rate so large that the loss grows from epoch to epoch: the first one is the best."""
    options = [*EXACT[:-1], 9, "--val", "data.npz", "--patience", 3]
    options[options.index("--lr") + 1] = 0.25
    said = trained(*options)
    losses = [float(v) for v in re.findall(r"validation: loss ([0-9.e+]+)", said)]
    assert losses[:4] == sorted(losses[:4]) and "epoch 5 of 9" not in said
    assert "stopped early: the last 3 epochs had no better validation loss than epoch 1" in said and "wrote out.onnx of epoch 1;" in said
    w, data = weights()["w"], np.load("data.npz")
    assert np.isclose(np.mean((data["x"] @ w - data["label"]) ** 2), losses[0], rtol=1e-3)  # as far as the digits go


def test_the_inference_form_in_float32_is_written_after_training_in_16_bits(folder):
    before = [n.op_type for n in onnx.load("net.onnx").graph.node]
    for precision in ("bfloat16", "float16"):
        said = trained("--precision", precision, "--epochs", 30, "--lr", 0.05, "--val", "data.npz")
        model = onnx.load("out.onnx")
        assert [n.op_type for n in model.graph.node if n.op_type != "Constant"] == before
        assert {t.data_type for t in model.graph.initializer} == {onnx.TensorProto.FLOAT}
        assert float(re.search(r"([0-9.]+)% of the validation examples are right", said)[1]) > 90


def test_metrics_curve_and_tensorboard(folder, monkeypatch):
    trained("--epochs", 2, "--batch", 8, "--val", "data.npz", "--metrics", "log.jsonl")
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["program"] == "net"] == [0, 1, 2, 3, 4, 5]
    assert [(r["step"], sorted(r)) for r in records if r["program"] == "validation"] == [
        (2, ["accuracy", "loss", "program", "rate", "step", "time"]), (5, ["accuracy", "loss", "program", "rate", "step", "time"]),
    ]  # fmt: skip
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = train("--curve", "curve.png")
    assert code == 1 and "--curve needs the package matplotlib" in said and "pip install -e '.[plot]'" in said


def test_a_curve_is_drawn(folder):
    pytest.importorskip("matplotlib")
    trained("--epochs", 2, "--val", "data.npz", "--curve", "curve.svg")
    assert "validation accuracy" in (folder / "curve.svg").read_text() or (folder / "curve.svg").stat().st_size > 1000


def test_tensorboard_has_training_and_validation_as_two_runs(folder):
    pytest.importorskip("tensorboard")
    trained("--epochs", 1, "--val", "data.npz", "--tensorboard", "tb")
    assert list((folder / "tb").glob("events*")) and list((folder / "tb" / "validation").glob("events*"))


def test_balanced_weights_count_the_classes(folder):
    x, label = examples()
    counts = np.bincount(label)
    trained("--class-weight", "balanced", "--epochs", 2)
    expected = weights()
    trained("--class-weight", ",".join(str(24 / (3 * c)) for c in counts), "--epochs", 2)
    assert all(np.array_equal(weights()[n], a) for n, a in expected.items())


CLASSIFIER = """<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]>
g (float[n, 2] x) => (int64[n] output_label, seq(map(int64, float)) output_probability) {
    h = MatMul (x, w)  p = Softmax (h)  label = ArgMax <axis = 1, keepdims = 0> (h)  output_label = Identity (label)
    output_probability = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2]> (p) }"""


def test_a_classifier_of_scikit_learn_trains_on_ranks_and_keeps_its_outputs(folder):
    """Ranks cannot make its maps, which its loss does not need."""
    written(folder / "net.onnx", CLASSIFIER, w=np.zeros((2, 3)))
    said = trained("--ranks", 2, "--epochs", 20, "--lr", 0.1)
    assert "data_parallel on 2 ranks" in said
    label, maps = fx.onnx.session("out.onnx").run({"x": examples()[0]})
    assert [o.name for o in onnx.load("out.onnx").graph.output] == ["output_label", "output_probability"]
    assert [max(m, key=m.get) for m in maps] == label.tolist() and np.mean(label == examples()[1]) > 0.8


def test_outputs_keep_their_names_and_the_scores_may_be_chosen(folder):
    written(folder / "net.onnx", """<ir_version: 9, opset_import: ["": 18]> g (float[n, 2] x) => (float[n, 2] features, float[n, 3] p) {
        h = Mul (x, u)  features = Identity (h)  p = MatMul (h, w) }""", u=[1, 1], w=np.zeros((2, 3)))  # fmt: skip
    code, said = train()
    assert code == 1 and "loss takes one output, but the model has features, p; name one, scores='features' (--scores on" in said
    trained("--scores", "p")
    assert [o.name for o in onnx.load("out.onnx").graph.output] == ["features", "p"]


@pytest.mark.mpi
@pytest.mark.skipif(bool(mpirun.why_not()), reason="needs mpirun")
def test_mpi_gives_what_threads_give(folder):
    options = ["onnx", "train", "net.onnx", "--data", "data.npz", "-n", "2", "--epochs", "2", "--val", "data.npz", "--metrics", "log.jsonl"]
    trained(*options[5:])
    found = subprocess.run([sys.executable, "-m", "fluidx", *options, "--backend", "mpi", "-o", "mpi.onnx"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("epoch 2 of 2") == 1 and len((folder / "log.jsonl").read_text().splitlines()) == 4
    assert (folder / "mpi.onnx").read_bytes() == (folder / "out.onnx").read_bytes()


def test_the_command_has_all_losses_and_metrics():
    """It lists them itself, so that its help needs no numpy."""
    from fluidx import cli_onnx, cli_options
    from fluidx.onnx.losses import HEADS
    from fluidx.training.scores import METRICS

    assert list(HEADS) == list(cli_options.LossName.NAMES) and list(METRICS) == list(cli_onnx._METRICS)
