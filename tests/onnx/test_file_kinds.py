"""Files that are no ONNX models: what they are, and the way to a model."""

import io
import pickle
import tarfile
import zipfile

import numpy as np
import pytest

import fluidx as fx
from fluidx.onnx import OnnxError

onnx = pytest.importorskip("onnx")
safetensors = pytest.importorskip("safetensors.numpy")


def archive(*names):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as z:
        for name in names:
            z.writestr(name, b"x" * 50)
    return stream.getvalue()


def tar():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as t:
        t.addfile(tarfile.TarInfo("model.onnx"))
    return stream.getvalue()


def array():
    stream = io.BytesIO()
    np.save(stream, np.ones(3))
    return stream.getvalue()


WEIGHTS = safetensors.save({"w": np.ones((4, 4), "float32")})
KINDS = {
    "torch": (archive("net/data.pkl", "net/data/0", "net/version"), "a PyTorch archive: load it with torch.load .*torch.onnx.export"),
    "script": (archive("net/data.pkl", "net/code/__torch__.py"), r"a PyTorch archive \(TorchScript\): .*torch.onnx.export\(model, example"),
    "pickle": (pickle.dumps({"w": 1}, protocol=2), "a pickle, as older torch.save wrote it: .*torch.onnx.export"),
    "keras": (archive("config.json", "metadata.json", "model.weights.h5"), "a Keras archive: .*format='onnx'"),
    "zip": (archive("a/model.onnx"), "a zip archive: unpack it and read 'a/model.onnx'"),
    "zip of others": (archive("readme.txt"), "a zip archive: unpack it, and read the .onnx file in it"),
    "npz": (archive("w.npy", "v.npy"), "arrays that np.savez wrote"),
    "cut archive": (archive("net/data.pkl")[:60], "a zip archive that is damaged or truncated"),
    "safetensors": (WEIGHTS, "a safetensors file, which holds weights and no graph: .*torch.onnx.export"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "an HDF5 file, as Keras writes it: .*format='onnx'"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(90), "a TensorFlow Lite model: convert it with python -m tf2onnx.convert --tflite"),
    "ort": (b"\x1c\0\0\0ORTM" + bytes(90), "a model in ONNX Runtime's own format"),
    "npy": (array(), "an array that np.save wrote"),
    "gzip": (b"\x1f\x8b\x08" + bytes(90), "compressed with gzip: unpack it first"),
    "tar": (tar(), "a tar archive: unpack it first"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer.*: git lfs pull fetches it"),
    "page": (b"<!DOCTYPE html><html><body>404</body></html>", "a web page .*download it again"),
    "text": ("Gewichte für das Modell\n".encode() * 30, "text: an ONNX model is a binary file"),
    "model as text": (b'<ir_version: 9, opset_import: ["" : 18]> g () => () { }', "text: onnx.parser.parse_model"),
    "empty": (b"", "an empty file: write or download it again"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [fx.onnx.load, fx.onnx.session])
def test_what_is_no_model_is_told_with_the_way_to_one(kind, read, tmp_path):
    content, message = KINDS[kind]
    (tmp_path / "net.bin").write_bytes(content)
    with pytest.raises(OnnxError, match=f"net.bin: not an ONNX model: it looks like {message}"):
        read(tmp_path / "net.bin")
    with pytest.raises(OnnxError, match=f"the bytes: not an ONNX model: it looks like {message}"):
        read(content)


def test_a_cut_model_is_told_as_such(tmp_path):
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 18]> g (float[n] x) => (float[n] y) { y = Relu (x) }')
    with pytest.raises(OnnxError, match="not an ONNX model: it is damaged, truncated or of another kind .*; download or export it again"):
        fx.onnx.load(model.SerializeToString()[:-9])


def test_a_folder_says_which_models_it_holds(tmp_path):
    with pytest.raises(OnnxError, match="is a folder, not a model file; it contains no .onnx file"):
        fx.onnx.load(tmp_path)
    (tmp_path / "net.onnx").touch()
    with pytest.raises(OnnxError, match="is a folder, not a model file; it contains net.onnx"):
        fx.onnx.load(tmp_path)


def test_a_file_that_is_larger_than_any_model_is_not_read(tmp_path):
    with open(tmp_path / "large.onnx", "wb") as stream:
        stream.truncate(2**42)  # takes no place on the disk
    with pytest.raises(OnnxError, match="which has at most 2 GB: its weights must be in files beside it"):
        fx.onnx.load(tmp_path / "large.onnx")
    (tmp_path / "large.pt").write_bytes(archive("net/data.pkl"))
    with open(tmp_path / "large.pt", "r+b") as stream:
        end = stream.read()
        stream.seek(2**32)
        stream.write(end[-200:])
    with pytest.raises(OnnxError, match="at most 2 GB: it looks like a"):
        fx.onnx.load(tmp_path / "large.pt")


def test_a_name_that_no_file_has_is_refused():
    with pytest.raises(OnnxError, match="cannot read a.0b: "):
        fx.onnx.load("a\0b")
