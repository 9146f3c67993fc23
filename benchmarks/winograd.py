"""3x3 convolutions at stride 1 by each setting of FLUIDX_WINOGRAD: speed, and how far the result is from float64. One thread, batch 32.

GFLOP/s as a convolution taken directly would count them, at the best of the rounds, in which the settings take turns. The error is a root
mean square, by that of the result, of standard normals in float32.

    --rounds 10   --save
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable
from typing import Any

import numpy as np
from _common import Log, interleaved, option

import fluidx as fx
from fluidx import native
from fluidx.ir import TensorType, opdef

SETTINGS = {"0": "sums taken directly", "2": "tiles of 2x2 outputs", "4": "tiles of 4x4 outputs"}
SHAPES = [(64, 32), (128, 16), (256, 8)]  # channels, side of the image
PRODUCTS = {"outputs": 0, "gradient of the image": 1, "gradient of the filter": 2}


def product(which: int, x: np.ndarray, w: np.ndarray, y: np.ndarray, setting: str) -> tuple[Callable[[], Any], np.ndarray]:
    """A call that computes the outputs from image and filter, or the gradient of one of those from that of the outputs."""
    os.environ["FLUIDX_WINOGRAD"] = setting
    op = opdef("conv2d_grad" if which else "conv2d")
    attrs = op.complete_attrs({"paddings": (1, 1)})
    made = np.empty_like((y, x, w)[which])
    ins, outs = ([x, w, y], [made if which == k else None for k in (1, 2)]) if which else ([x, w], [made])
    types = [[None if a is None else TensorType(a.dtype.name, a.shape) for a in some] for some in (ins, outs)]
    rooms = [np.empty(t.shape, t.dtype) for t in op.native.scratch(*types, attrs)]
    calls = op.native.calls(ins, outs, attrs, scratch=rooms)
    assert calls is not None
    return native.compile(calls), made


def main() -> None:
    log, rounds = Log("winograd"), int(option("rounds", "10"))
    fx.set_num_threads(1)
    log(f"{native.describe()}\n")
    for channels, side in SHAPES:
        rng = np.random.default_rng(0)
        x, y = (rng.standard_normal((32, channels, side, side)).astype("float32") for _ in range(2))
        w = rng.standard_normal((channels, channels, 3, 3)).astype("float32")
        work = 2 * channels**2 * 9 * 32 * side**2
        for name, which in PRODUCTS.items():
            run, right = product(which, *(a.astype("float64") for a in (x, w, y)), "0")
            run()
            cases = {text: product(which, x, w, y, setting) for setting, text in SETTINGS.items()}
            seconds = interleaved({text: run for text, (run, _) in cases.items()}, rounds)
            log(f"{channels} channels, {side}x{side}, {name}")
            for text, (_, made) in cases.items():
                error = float(np.sqrt(np.mean((made - right) ** 2) / np.mean(right**2)))
                log(f"  {text:22} {work / min(seconds[text]) / 1e9:6.1f} GFLOP/s, error {error:.1e}")
    log.close()


if __name__ == "__main__":
    main()
