"""Inference of one batch: fluidx against PyTorch, JAX and ONNX Runtime, on 1 and on 2 threads.

As `train.py`, with the forward part alone (`clone(for_test=True)`; PyTorch in inference_mode) and its results given back as an array. ONNX
Runtime runs what PyTorch exports, which needs the package onnx.

    --models lenet,resnet,resnet50,gpt   --threads 1,2   --rounds 20   --seconds 0.3 (a turn)   --peers fluidx,torch_best,...   --save
"""

from __future__ import annotations

from _common import Log
from _peers import INFER, report


def main() -> None:
    log = Log("infer")
    report(log, "infer", "lenet,resnet,resnet50,gpt", ",".join(INFER))
    log.close()


if __name__ == "__main__":
    main()
