"""Inference of one batch: fluidx against PyTorch, JAX and ONNX Runtime, on 1 and on 2 threads.

As `train.py`, with the forward part alone (`clone(for_test=True)`; PyTorch in inference_mode) and its results given back as an array. ONNX
Runtime runs what PyTorch exports, which needs the package onnx.

    --models lenet,resnet,gpt   --threads 1,2   --rounds 20   --seconds 0.3 (a turn)   --peers fluidx,torch_best,...   --save
"""

from __future__ import annotations

from _common import Log, option, options
from _peers import INFER, LEGEND, compare, mkl_line, versions


def main() -> None:
    log = Log("infer")
    peers = options("peers", ",".join(INFER))
    log(versions())
    log(mkl_line())
    for name in peers:
        if name in LEGEND:
            log(f"{name}: {LEGEND[name]}")
    threads = [int(n) for n in options("threads", "1,2")]
    models, rounds, seconds = options("models", "lenet,resnet,gpt"), int(option("rounds", "20")), float(option("seconds", "0.3"))
    compare(log, "infer", models, threads, peers, rounds, seconds)
    log.close()


if __name__ == "__main__":
    main()
