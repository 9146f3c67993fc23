"""Recognition of files that are not ONNX models by their first bytes, with advice on how to get a model from them."""

from __future__ import annotations

import zipfile
from io import BytesIO
from pathlib import Path

_EXPORT = "export it with torch.onnx.export(model, example, 'model.onnx')"
_BEGINS: tuple[tuple[int, bytes, str], ...] = (  # offset, bytes at that offset, kind of file and advice
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it: load it with Keras, then model.export('model.onnx', format='onnx')"),
    (4, b"TFL3", "a TensorFlow Lite model: convert it with python -m tf2onnx.convert --tflite model.tflite --output model.onnx"),
    (4, b"ORTM", "a model in ONNX Runtime's own format: read the .onnx file that it was made from"),
    (0, b"\x93NUMPY", "an array that np.save wrote: a model is a graph of operators; arrays are its inputs"),
    (0, b"GGUF", "a GGUF file, which holds weights and no graph: export the model that they belong to"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file itself: git lfs pull fetches it"),
    (0, b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (0, b"BZh", "compressed with bzip2: unpack it first"),
    (0, b"\xfd7zXZ\x00", "compressed with xz: unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"),
    (257, b"ustar", "a tar archive: unpack it first"),
    (0, b"program ", "a program of fluidx as text: fluidx.io.load_text reads it"),
)  # fmt: skip


def looks_like(data: bytes, size: int, path: Path | None = None) -> str:
    """The kind of a file that is not an ONNX model, with advice; "" if its first bytes do not tell.

    `size` is its number of bytes. An archive has its table at the end, which is read from `path` if that is given.
    """
    if not data:
        return "an empty file: write or download it again"
    if data[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _archive(path or BytesIO(data))
    for at, begin, what in _BEGINS:
        if data[at : at + len(begin)] == begin:
            return what
    if data[:1] == b"\x80" and data[1:2] in b"\2\3\4\5":
        return f"a pickle, as older torch.save wrote it: load it into its PyTorch model, then {_EXPORT}"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= size - 8:
        return f"a safetensors file, which holds weights and no graph: load it into its PyTorch model, then {_EXPORT}"
    return _text(data[:512])


def _archive(file: Path | BytesIO) -> str:
    try:
        names = zipfile.ZipFile(file).namelist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError):
        return "a zip archive that is damaged or truncated: download it again"
    last = {name.rsplit("/", 1)[-1] for name in names}
    if "data.pkl" in last:
        script = " (TorchScript)" if any("/code/" in name for name in names) else ""
        return f"a PyTorch archive{script}: load it with torch.load or torch.jit.load, then {_EXPORT}"
    if "config.json" in last and "metadata.json" in last:
        return "a Keras archive: load it with keras.models.load_model, then model.export('model.onnx', format='onnx')"
    if names and all(name.endswith(".npy") for name in names):
        return "arrays that np.savez wrote: a model is a graph of operators; arrays are its inputs"
    inside = [name for name in names if name.endswith(".onnx")]
    return f"a zip archive: unpack it and read {inside[0]!r:.80}" if inside else "a zip archive: unpack it, and read the .onnx file in it"


def _text(start: bytes) -> str:
    try:
        text = start.decode("utf-8", "strict" if len(start) < 512 else "ignore").lstrip()
    except UnicodeDecodeError:
        return ""
    if not text or not all(c.isprintable() or c.isspace() for c in text):
        return ""
    if text[:14].lower() == "<!doctype html" or text[:5].lower() == "<html":
        return "a web page instead of the downloaded file: download it again"
    if text.startswith("<"):
        return "text: onnx.parser.parse_model(text) reads a model in text form, and fx.onnx.load takes its result"
    return "text: an ONNX model is a binary file, which onnx.save or an exporter writes"
