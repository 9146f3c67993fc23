"""Models that ONNX Runtime quantized: ResNet-50 static, as QuantizeLinear and DequantizeLinear (QDQ), and an encoder of the shape of
MiniLM-L6, dynamic. Weights are drawn at random."""

from __future__ import annotations

import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"resnet50": (1, 3, 224, 224), "minilm": (1, 128)}
VOCABULARY, WIDTH, HEADS, WIDE, LAYERS = 1000, 384, 12, 1536, 6


def feed(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """What a model is fed."""
    rng = np.random.default_rng(seed)
    if name == "minilm":
        return {"x": rng.integers(0, VOCABULARY, SIZES[name])}
    return {"x": rng.standard_normal(SIZES[name], dtype="float32")}


def _minilm() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

        def forward(self, x: Any) -> Any:
            n, s, _ = x.shape
            q, k, v = (f(x).reshape(n, s, HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
            scores = torch.softmax(q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5, -1)
            x = self.one(x + self.o((scores @ v).transpose(1, 2).reshape(n, s, WIDTH)))
            return self.two(x + self.down(nn.functional.gelu(self.up(x))))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(SIZES["minilm"][1], WIDTH))
            self.norm, self.blocks = nn.LayerNorm(WIDTH), nn.Sequential(*(Block() for _ in range(LAYERS)))

        def forward(self, x: Any) -> Any:
            return self.blocks(self.norm(self.tokens(x) + self.places))

    torch.manual_seed(0)
    return Encoder().eval()


def float_model(name: str) -> bytes:
    """The model in float32."""
    import torch

    if name == "minilm":
        net = _minilm()
    else:
        from _models import case, torch_net

        torch.manual_seed(0)
        net = torch_net(case(name), False).eval()
    file, x = io.BytesIO(), torch.from_numpy(feed(name)["x"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), file, input_names=["x"], output_names=["y"], dynamo=False, opset_version=17)
    return file.getvalue()


class _Batches:
    """Batches for the calibration."""

    def __init__(self, name: str):
        self.left = iter([feed(name, seed) for seed in range(4)])

    def get_next(self) -> Any:
        return next(self.left, None)


def quantized_model(name: str, model: bytes) -> bytes:
    """The model as ONNX Runtime quantizes it: images statically, with weights by channel, and texts dynamically."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        source, ready, made = (Path(folder) / f"{n}.onnx" for n in ("float", "ready", "int8"))
        source.write_bytes(model)
        quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
        if name == "minilm":
            quantize_dynamic(ready, made, weight_type=QuantType.QInt8)
        else:
            reader = type("Reader", (_Batches, CalibrationDataReader), {})(name)
            quantize_static(ready, made, reader, quant_format=QuantFormat.QDQ, per_channel=True,
                            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
        return made.read_bytes()
