"""The convolutions and poolings of ResNet-50, forward, float32, one thread: fluidx in both layouts, and PyTorch's if it is installed.

GFLOP/s of convolutions taken directly (Winograd's need fewer operations) and GB/s of poolings, at the best of the rounds, in which they
take turns; `share` is the time of all places in the network that have this shape, by the time of all shapes. PyTorch computes the layout
that it likes best, channels last. On an AMD processor it is left out, whose MKL needs a library preloaded there.

    --rounds 10   --batch 8   --dtype float32   --save
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from _common import Log, interleaved, option
from _models import BOTTLENECKS
from _peers import torch_here, versions

import fluidx as fx
from fluidx import native
from fluidx.ir import TensorType, opdef

torch = torch_here()


class Layer(NamedTuple):
    """Channels and outputs, height and width of the image, side of the window, stride; what it is."""

    channels: int
    outputs: int
    side: int
    kernel: int
    stride: int
    kind: str = "conv2d"


def resnet50() -> Counter[Layer]:
    """The layers, each with the number of places that have it."""
    found = Counter([Layer(3, 64, 224, 7, 2), Layer(64, 64, 112, 3, 2, "max")])
    channels, side = 64, 56
    for stage, (width, blocks) in enumerate(BOTTLENECKS):
        for k in range(blocks):
            stride, wide = 2 if stage and not k else 1, 4 * width
            found += Counter([Layer(channels, width, side, 1, 1), Layer(width, width, side, 3, stride)])
            if not k:
                found[Layer(channels, wide, side, 1, stride)] += 1
            side, channels = side // stride, wide
            found[Layer(width, wide, side, 1, 1)] += 1
    found[Layer(channels, channels, side, side, side, "avg")] += 1
    return found


def by_fluidx(kind: str, ins: Sequence[np.ndarray], attrs: dict[str, Any], fmt: str) -> tuple[Callable[[], Any], np.ndarray]:
    op = opdef(kind if kind == "conv2d" else "pool2d")
    attrs = op.complete_attrs({**attrs, "data_format": fmt})
    ins = [to(fmt, ins[0]), *ins[1:]]
    types = [TensorType(a.dtype.name, a.shape) for a in ins]
    made = op.infer(*types, **attrs)
    out = np.empty(made.shape, made.dtype)
    asked = op.native.scratch(types, [made], attrs) if op.native.memory_per_thread else []
    rooms = {"scratch": [np.empty(t.shape, t.dtype) for t in asked]} if op.native.memory_per_thread else {}
    calls = op.native.calls(ins, [out], attrs, **rooms)
    if calls is None:
        raise SystemExit(f"there is no native {op.name} of {ins[0].dtype}")
    return native.compile(calls), out


def to(fmt: str, x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if fmt == "NHWC" else x


def by_torch(layer: Layer, ins: Sequence[np.ndarray], pad: int) -> tuple[Callable[[], Any], np.ndarray]:
    x, *w = (torch.from_numpy(a).to(memory_format=torch.channels_last) for a in ins)
    functions = torch.nn.functional
    with torch.inference_mode():
        if layer.kind == "conv2d":
            return (call := lambda: functions.conv2d(x, w[0], None, layer.stride, pad)), call().numpy()
        pool = functions.max_pool2d if layer.kind == "max" else functions.avg_pool2d
        return (call := lambda: pool(x, layer.kernel, layer.stride, pad)), call().numpy()


def contestants(layer: Layer, batch: int, dtype: str) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    pad = 0 if layer.kind == "avg" else layer.kernel // 2
    x = rng.standard_normal((batch, layer.channels, layer.side, layer.side)).astype(dtype)
    ins, attrs = [x], {"strides": (layer.stride, layer.stride), "paddings": (pad, pad)}
    if layer.kind == "conv2d":
        ins.append(rng.standard_normal((layer.outputs, layer.channels, layer.kernel, layer.kernel)).astype(dtype))
    else:
        attrs = {**attrs, "ksize": (layer.kernel, layer.kernel), "pooling_type": layer.kind}
    found, outs = {}, {}
    for fmt in ("NCHW", "NHWC"):
        found[fmt], outs[fmt] = by_fluidx(layer.kind, ins, attrs, fmt)
        found[fmt]()
    if torch is not None:
        found["torch"], outs["torch"] = by_torch(layer, ins, pad)
    terms = layer.channels * layer.kernel**2  # sums of so many, in different orders and by Winograd's transforms
    for peer, y in outs.items():
        y = y.transpose(0, 3, 1, 2) if peer == "NHWC" else y
        if not np.allclose(y, outs["NCHW"], rtol=0, atol=1e-5 * terms):
            raise SystemExit(f"the results of {layer} differ")
    return found


def main() -> None:
    log, rounds, batch, dtype = Log("convolutions"), int(option("rounds", "10")), int(option("batch", "8")), option("dtype", "float32")
    log(versions())
    if torch is not None:
        torch.set_num_threads(1)
    fx.set_num_threads(1)
    log(f"{native.describe()}; batch {batch}, {dtype}; at the best of {rounds} rounds\n")
    log(f"{'layer':52} {'NCHW share':>12}    NHWC   torch   NCHW by torch")
    layers, reached = resnet50(), {}
    for layer in layers:
        cases = contestants(layer, batch, dtype)
        reached[layer] = {peer: min(seconds) for peer, seconds in interleaved(cases, rounds).items()}
    whole = {peer: sum(reached[layer][peer] * n for layer, n in layers.items()) for peer in next(iter(reached.values()))}
    for layer, n in layers.items():
        pixels = batch * (layer.side // layer.stride) ** 2
        work = 2 * layer.channels * layer.outputs * layer.kernel**2 * pixels
        if layer.kind != "conv2d":
            work = np.dtype(dtype).itemsize * layer.channels * (batch * layer.side**2 + pixels)
        times = reached[layer]
        shown = [f"{work / times[peer] / 1e9:7.1f}" if peer in times else "      -" for peer in ("NCHW", "NHWC", "torch")]
        k, side = layer.kernel, layer.side
        name = f"{n} x {layer.kind} {layer.channels} -> {layer.outputs}, {k}x{k} / {layer.stride}, {side}x{side}"
        by = f"{times['NCHW'] / times['torch']:7.2f}" if "torch" in times else ""
        log(f"{name:52} {shown[0]} {times['NCHW'] * n / whole['NCHW']:4.0%} {shown[1]} {shown[2]} {by}")
    log("\nms of all: " + ", ".join(f"{peer} {seconds * 1e3:.1f}" for peer, seconds in whole.items()))
    log.close()


if __name__ == "__main__":
    main()
