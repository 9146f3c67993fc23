"""What new users type after `fluidx onnx`, and that each error ends with what to do next."""

import numpy as np
import pytest
from click.testing import CliRunner

from fluidx.cli import main
from fluidx.finetune import quantize_file

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[n, 3] x) => (float[n, 3] y) { h = MatMul (x, w)  y = Softmax <axis = 1> (h) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype="float32"), "w"))
    onnx.save(model, folder / "m.onnx")
    image = '<ir_version: 9, opset_import: ["": 18]> g (float[n, 3, 4, 5] x) => (float[n, 60] y) { h = Flatten (x)  y = Mul (h, v) }'
    model = onnx.parser.parse_model(image)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(60, "float32"), "v"))
    onnx.save(model, folder / "image.onnx")
    x = np.random.default_rng(0).standard_normal((24, 3)).astype("float32")
    label = x.argmax(axis=1)
    np.save(folder / "x.npy", x)
    np.save(folder / "flat.npy", x[0])
    (folder / "x.csv").write_text("1,2,3\n")
    arrays = {
        "good": {"x": x, "label": label}, "nolabel": {"x": x}, "labels": {"x": x, "labels": label},
        "onehot": {"x": x, "label": np.eye(3)[label]},
        "floats": {"x": x, "label": label.astype("float64")}, "one": {"x": x, "label": label + 1}, "many": {"x": x, "label": label * 2},
        "empty": {"x": x[:0]}, "scalar": {"x": np.float32(1)}, "wide": {"x": np.ones((24, 4), "float32")},
        "last": {"x": np.ones((2, 4, 5, 3)), "label": [0, 1]}, "flat": {"x": np.ones((2, 60)), "label": [0, 1]},
    }  # fmt: skip
    for name, held in arrays.items():
        np.savez(folder / f"{name}.npz", **held)
    np.savez(folder / "unnamed.npz", x, label)
    quantize_file(folder / "m.onnx", folder / "nolabel.npz", folder / "int8.onnx")
    call = ["onnx", "train", folder / "m.onnx", "--data", folder / "good.npz", "--lora", 1, "--epochs", 1, "-o", folder / "adapters"]
    assert CliRunner().invoke(main, [*map(str, call)]).exit_code == 0
    return folder


CALLS = [
    ("inf m.onnx", "Did you mean 'info'?"),
    ("info", "Try 'fluidx onnx info --help' for help."),
    ("info x.npy", "it looks like an array that np.save wrote"),
    ("check x.csv", "it looks like text: an ONNX model is a binary file, which onnx.save or an exporter writes"),
    ("check m.onnx --shapes x=2", "shapes gives input 'x' 1 axes, [2]; the model has 2, [n, 3]"),
    ("run m.onnx", "input 'x' is not fed; the model takes x: float32[n,3]: give each as -i NAME=FILE.npy"),
    ("run m.onnx -i X=x.npy", "'X' is not an input; did you mean 'x'?"),
    ("run m.onnx -i x.npy", "give NAME=FILE.npy"),
    ("run m.onnx -i x=flat.npy", "input 'x' has 2 axes, [n, 3]; found [3]; a batch of one is x[None]"),
    ("run m.onnx -i x=x.csv", "np.save(path, np.loadtxt(...)) makes an array of text"),
    ("run m.onnx -i x=good.npz", "it holds several, x, label; save only one"),
    ("train m.onnx -o t.onnx --data x.npy", "np.savez(path, NAME=array, ...) writes arrays with their names"),
    ("train m.onnx -o t.onnx --data nolabel.npz", "np.savez(path, x=..., label=...) writes such a file"),
    ("train m.onnx -o t.onnx --data unnamed.npz", "np.savez(path, x=..., label=...) writes such a file"),
    ("train m.onnx -o t.onnx --data labels.npz", "is it 'labels'? then save it as 'label'"),
    ("train m.onnx -o t.onnx --data onehot.npz", "of one-hot labels save label.argmax(axis=-1)"),
    ("train m.onnx -o t.onnx --data floats.npz", "save label.astype('int64')"),
    ("train m.onnx -o t.onnx --data one.npz", "labels count from 0: save label - 1, or --head 4 gives it a last layer"),
    ("train m.onnx -o t.onnx --data many.npz", "0 to 2; --head 5 gives it a last layer for all classes"),
    ("quantize m.onnx -o t.onnx --data unnamed.npz", "unnamed.npz has no array 'x'; it has: arr_0, arr_1"),
    ("quantize m.onnx -o t.onnx --data empty.npz", "the arrays of empty.npz must have equally many rows (not 0): x has 0"),
    ("quantize m.onnx -o t.onnx --data scalar.npz", "the arrays of scalar.npz must have equally many rows (not 0): x has 0"),
    ("quantize m.onnx -o t.onnx --data wide.npz", "wide.npz: variable 'x' is declared f32[n,3], the feed has shape [8, 4]"),
    ("quantize m.onnx -o t.onnx --data good.npz --observer minmax", "not one of 'min_max', 'moving_average', 'percentile'"),
    ("quantize m.onnx -o m.onnx --data good.npz", "m.onnx would overwrite m.onnx, which is read; give the output another name"),
    ("quantize int8.onnx -o t.onnx --data good.npz", "is quantized already"),
    ("train int8.onnx -o t.onnx --data good.npz --lora 1", "are rounded to 8 bits, and adapters add to float weights; train those"),
    ("merge int8.onnx adapters -o t.onnx", "it multiplies by no float weight, as a quantized model; give the float model"),
    ("train m.onnx -o t.onnx --data good.npz --epoch 3", "Did you mean '--epochs'?"),
    ("train m.onnx -o t.onnx --data good.npz --freeze *", "none of the 1 parameters of "),
    ("train m.onnx -o t.onnx --data good.npz --also-train nope", "no float of the model has that name; they are: w"),
    ("train image.onnx -o t.onnx --data last.npz", "its channels stand last: save np.moveaxis(x, -1, 1)"),
    ("train image.onnx -o t.onnx --data flat.npz", "save x.reshape([-1, 3, 4, 5])"),
    ("ops --domain foo", "there are: ai.onnx, "),
]  # fmt: skip


@pytest.mark.parametrize(("call", "ending"), CALLS, ids=[call for call, _ in CALLS])
def test_a_wrong_call_ends_with_the_next_step(folder, call, ending, monkeypatch):
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["onnx", *call.split()])
    said = " ".join(result.output.split())
    assert result.exit_code in (1, 2) and ending in said and "Traceback" not in said
    assert not (folder / "t.onnx").exists()
