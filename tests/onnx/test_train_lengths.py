"""`fluidx onnx train` with examples of several lengths: batches are padded to the longest example in them."""

import io
import os

import numpy as np
import pytest

pytest.importorskip("onnx")

from fluidx.onnx import OnnxError
from fluidx.onnx.object_arrays import read_object_array
from fluidx.training.ragged import Ragged, examples_of

from .test_train_command import table, train, trained, weights, written

IDS = [[1, 2, 3], [4], [0, 3], [2, 2, 2], [1, 4]]
LABELS = [[1, 0, 2], [2], [0, 1], [2, 1, 2], [0, 0]]
BASIC = ("--loss", "token_classification", "--epochs", 2, "--batch", 2, "--optimizer", "sgd", "--lr", 0.5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model that mixes all positions of a sequence that the mask has, so that padding matters where there is none."""
    rng = np.random.default_rng(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, inputs, seen in (
        ("net.onnx", "int64[n, t] ids, float[n, t] mask", "m = Unsqueeze (mask, last)  s = Mul (e, m)"),
        ("bare.onnx", "int64[n, t] ids", "s = Identity (e)"),
    ):
        written(tmp_path / name, f"""<ir_version: 9, opset_import: ["": 18]> g ({inputs}) => (float[n, t, 3] y) {{
            last = Constant <value_ints = [-1]> ()  axis = Constant <value_ints = [1]> ()  e = Gather (table, ids)  {seen}
            a = ReduceMean <keepdims = 1> (s, axis)  h = Add (e, a)  y = MatMul (h, v) }}""",
            table=rng.standard_normal((5, 4)), v=rng.standard_normal((4, 3)))  # fmt: skip
    return tmp_path


def padded(rows, pad, length=None):
    size = max(map(len, rows)) if length is None else length
    return np.array([[*row, *[pad] * (size - len(row))] for row in rows])


def objects(rows, dtype="int64"):
    made = np.empty(len(rows), object)
    made[:] = [np.array(row, dtype) for row in rows]
    return made


def all_kinds(folder):
    """The same examples in each kind of file."""
    mask = [[1.0] * len(row) for row in IDS]
    arrays = {"ids": objects(IDS), "mask": objects(mask, "float32"), "label": objects(LABELS)}
    np.savez(folder / "data.npz", **arrays)
    (folder / "arrays").mkdir()
    for name, a in arrays.items():
        np.save(folder / "arrays" / f"{name}.npy", a)
    cells = [" ".join(map(str, row)) + f",{' '.join(map(str, m))},{' '.join(map(str, row_))}" for row, m, row_ in zip(IDS, mask, LABELS)]
    table(folder / "data.csv", "ids,mask,label", cells)
    return ["data.npz", "arrays", "data.csv"]


def test_all_kinds_of_data_are_padded_alike(folder):
    """With a mask, the steps are those of examples that were padded by hand."""
    kinds = all_kinds(folder)
    try:
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table({"ids": IDS, "mask": [[1.0] * len(r) for r in IDS], "label": LABELS}), folder / "data.parquet")
        kinds.append("data.parquet")
    except ImportError:
        pass
    (folder / "uneven.py").write_text(f"""import numpy as np
ids, labels = {IDS}, {LABELS}
def batches(epoch):
    order = np.random.default_rng((0, epoch)).permutation(5)
    rows = [order[:2], order[2:4], order[4:]]
    return [dict(ids=[ids[k] for k in r], mask=[np.ones(len(ids[k])) for k in r], label=[labels[k] for k in r]) for r in rows]
""")
    np.savez(folder / "whole.npz", ids=padded(IDS, 0), mask=np.float32(padded([[1] * len(r) for r in IDS], 0)), label=padded(LABELS, -100))
    options = (*BASIC, "--pad-to-multiple-of", 3)  # those by hand have 3 positions in all batches
    trained(*options, data="whole.npz")
    expected = weights()
    for kind in [*kinds, "uneven:batches"]:
        said = trained(*options, data=kind)
        assert all(np.array_equal(weights()[n], a) for n, a in expected.items()), kind
        assert "batches an epoch" in said
    trained(*options, "--ranks", 2, "--val-split", 0.2, data="data.npz")


def test_a_batch_is_as_long_as_its_longest_example(folder):
    """Each batch of one example has no padding at all: the pad value does not matter. In one batch of all it does."""
    np.savez(folder / "data.npz", ids=objects(IDS), label=objects(LABELS))
    found = []
    for batch, pad in ((1, 0), (1, 4), (5, 0), (5, 4)):
        trained(*BASIC[:4], "--batch", batch, "--pad", f"ids={pad}", model="bare.onnx")
        found.append(weights()["table"])
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[2], found[3])
    np.savez(folder / "whole.npz", ids=padded(IDS, 4), label=padded(LABELS, -100))
    trained(*BASIC[:4], "--batch", 5, model="bare.onnx", data="whole.npz")
    assert np.array_equal(weights()["table"], found[3])


def test_classes_of_tokens_may_have_names(folder):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = [[["in", "out", "to"][k] for k in row] for row in LABELS]
    parquet.write_table(pa.table({"ids": IDS, "label": names}), folder / "data.parquet")
    assert "classes: 0 in, 1 out, 2 to" in trained(*BASIC, model="bare.onnx", data="data.parquet")
    named = weights()
    np.savez(folder / "data.npz", ids=objects(IDS), label=objects(LABELS))
    trained(*BASIC, model="bare.onnx")
    assert all(np.array_equal(weights()[n], a) for n, a in named.items())


def test_words_in_a_cell_are_classes_of_positions(folder):
    names = [" ".join(["in", "out", "to"][k] for k in row) for row in LABELS]
    cells = [f"{' '.join(map(str, row))},{label}" for row, label in zip(IDS, names)]
    table(folder / "data.csv", "ids,label", cells)
    table(folder / "val.csv", "ids,label", ["4 4,out to", "1,in"])
    assert "classes: 0 in, 1 out, 2 to" in trained(*BASIC, "--val", "val.csv", model="bare.onnx", data="data.csv")
    table(folder / "val.csv", "ids,label", ["4 4,out off"])
    code, said = train(*BASIC, "--val", "val.csv", model="bare.onnx", data="data.csv")
    assert code == 1 and "class 'off' of val.csv is not in the examples to train on, which have in, out, to" in said


@pytest.mark.parametrize("options, arrays, expected", [
    (("--pad", "idz=1"), {}, "--pad idz=1: the model has no input 'idz'; did you mean 'ids'?"),
    (("--pad", "label=1"), {}, "labels get the ignored one, -100"),
    (("--pad", "ids=0.5"), {}, "--pad ids=0.5: int64[?,?] cannot be padded with it"),
    (("--pad", "ids"), {}, "--pad 'ids' must be INPUT=NUMBER; write --pad ids=0"),
    (("--pad", "ids=3", "--pad", "ids=4"), {}, "--pad gives input 'ids' two numbers, 3 and 4; give one"),
    (("--shapes", "ids=?x3", "--pad", "ids=1"), {}, "--pad ids=1: int64[?,3] has no open length to fill up; leave it out; if the"),
    (("--shapes", "ids=?x3", "--pad-to-multiple-of", "4"), {}, "has no input of several lengths, but ids int64[?,3]; leave it out"),
    (("--shapes", "ids=?x3"), {}, "array 'ids' of data.npz has 1 to 3 elements in an example, and int64[?,3] is expected; if the model "
     "takes several lengths, --shapes ids=?x? opens the axis"),
    (("--loss", "square_error_cost"), {}, "labels of --loss square_error_cost must have equally many"),
    ((), {"label": objects([[1, 0, 7], [2], [0, 1], [2, 1, 2], [0, 0]])}, "labels go from 0 to 7, but the model has 3 classes"),
])  # fmt: skip
def test_what_cannot_be_padded_is_named(folder, options, arrays, expected):
    np.savez(folder / "data.npz", **{"ids": objects(IDS), "label": objects(LABELS), **arrays})
    code, said = train(*BASIC, *options, model="bare.onnx")
    assert code and expected in " ".join(said.split()), said


# -- rows of several lengths, and files of them --------------------------------------------------------------------------------------


def test_rows_are_padded_at_the_end():
    rows = Ragged.of([[[1, 2]], [], [[3, 4], [5, 6]]]).with_values(np.array([[1, 2], [3, 4], [5, 6]]), -1, 2)
    assert rows.shape == (3, 2, 2) and rows.lengths.tolist() == [1, 0, 2]
    assert rows[np.array([0, 1])].tolist() == [[[1, 2], [-1, -1]], [[-1, -1], [-1, -1]]]
    assert [rows.where(k) for k in range(3)] == [0, 2, 2]
    with pytest.raises(OnnxError, match=r"^x has shape \[1, 3\] in example 2, and \[1, 2\] in others"):
        examples_of([np.zeros((1, 2)), np.zeros((1, 3)), np.zeros((2, 2))], "x")


def test_arrays_of_arrays_are_read_without_running_their_pickles(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    for value in (np.array([Harmful(), 1], object), np.array([[Harmful()], [1, 2]], object)):
        stream = io.BytesIO()
        np.save(stream, value)
        stream.seek(0)
        with pytest.raises(Exception, match=r"names \w+.mkdir; only arrays of numbers and text, and lists of them, are read"):
            read_object_array(stream)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("rows", [
    [np.arange(3), np.arange(2)], [[1, 2], [3]], [np.ones((2, 2), ">f4"), np.zeros((1, 2), ">f4")], [["a"], ["b", "c"]],
    [np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(3).reshape(1, 3)], [np.array(["x", "yy"]), np.array(["q"])],
])  # fmt: skip
def test_arrays_of_arrays_and_lists_are_those_that_were_saved(rows):
    value, stream = np.empty(len(rows), object), io.BytesIO()
    for k, row in enumerate(rows):
        value[k] = row
    np.save(stream, value)
    stream.seek(0)
    for a, b in zip(read_object_array(stream), rows, strict=True):
        assert type(a) is type(b) and np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
