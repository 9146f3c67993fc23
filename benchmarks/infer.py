"""Inference of one batch: fluidx against PyTorch, JAX and ONNX Runtime, on 1 and on 2 threads.

As `train.py`, with the forward part alone (`clone(for_test=True)`; PyTorch in inference_mode) and its results given back as an array. ONNX
Runtime runs what PyTorch exports, which needs the package onnx. `--precision bfloat16` is mixed precision against
PyTorch's autocast, and both in float32; `--precision int8` runs `infer_int8.py` instead.

    --models lenet,resnet,resnet50,gpt   --threads 1,2   --rounds 20   --seconds 0.3 (a turn)   --peers fluidx,torch_best,...   --save
"""

from __future__ import annotations

import infer_int8
from _common import Log, choice
from _peers import INFER, TRAIN_HALF
from _races import report


def main() -> None:
    precision = choice("precision", "float32", "bfloat16", "int8")
    if precision == "int8":
        return infer_int8.main()
    half = precision == "bfloat16"
    log = Log("infer_bfloat16" if half else "infer")
    report(log, "infer", "lenet,resnet,resnet50,gpt", ",".join(TRAIN_HALF if half else INFER))
    log.close()


if __name__ == "__main__":
    main()
