"""Inference in 8 bits: sessions of fluidx against ONNX Runtime, on models that ONNX Runtime quantized, and both on the float32 models.

ResNet-50, one image, static (QDQ), and an encoder of the shape of MiniLM-L6, 128 tokens, dynamic. Every answer is also compared with that
of ONNX Runtime in float32. `infer.py --precision int8` runs it.

    --models resnet50,minilm   --threads 1,2   --rounds 10   --seconds 0.3 (a turn)   --save
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import Log, option, options
from _int8_models import feed, float_model, quantized_model
from _peers import Entrant, Peer, versions
from _peers import main as serve
from _races import race, table

PEERS = ("fluidx_int8", "fluidx_float32", "onnxruntime_int8", "onnxruntime_float32")
TOLERANCE = 0.25  # of the largest output: the rounding to 8 bits of fifty layers with random weights


def make(peer: str, name: str, train: bool, threads: int) -> Callable[[], Any]:
    """A run of a model, from the folder that the name begins with; the output given back."""
    folder, model = name.rsplit(":", 1)
    who, precision = peer.split("_")
    data, fed = Path(folder, f"{model}.{precision}.onnx").read_bytes(), feed(model, 7)
    if who == "fluidx":
        import fluidx as fx

        run = fx.onnx.session(data).run
        return lambda: run(fed)[0]
    import onnxruntime

    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads, how.inter_op_num_threads, how.log_severity_level = threads, 1, 3
    session = onnxruntime.InferenceSession(data, how, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, fed)[0]


def write(folder: Path, model: str) -> None:
    data = float_model(model)
    (folder / f"{model}.float32.onnx").write_bytes(data)
    (folder / f"{model}.int8.onnx").write_bytes(quantized_model(model, data))


def accuracy(log: Log, folder: Path, model: str) -> None:
    """How far each is from the float32 model in ONNX Runtime, relative to its largest output."""
    want = make("onnxruntime_float32", f"{folder}:{model}", False, 1)()
    for peer in PEERS[:3]:
        got = make(peer, f"{folder}:{model}", False, 1)()
        log(f"  {peer}: mean error {np.abs(got - want).mean() / np.abs(want).max():.2e} of the largest output")


def main() -> None:
    log = Log("infer_int8")
    log(versions())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in options("models", "resnet50,minilm"):
            write(folder, model)
            for threads in map(int, options("threads", "1,2")):
                log(f"\n{model}, {threads} threads")
                with ExitStack() as stack:
                    peers = [stack.enter_context(Peer(p, f"{folder}:{model}", "infer", threads, script=__file__)) for p in PEERS]
                    made = [Entrant(p.name, [p]) for p in peers]
                    running, watch = race(log, made, int(option("rounds", "10")), float(option("seconds", "0.3")), TOLERANCE)
                    if running:
                        table(log, running, watch, threads)
                        times = {e.name: e.times() for e in running}
                        for other in PEERS[1:]:
                            if {other, PEERS[0]} <= times.keys():
                                ratio = [f(times[PEERS[0]]) / f(times[other]) for f in (median, min)]
                                log(f"  -> fluidx_int8 by {other}: {ratio[0]:.2f} on medians, {ratio[1]:.2f} on minima")
            accuracy(log, folder, model)
    log.close()


if __name__ == "__main__":
    serve(make) if len(sys.argv) == 5 and sys.argv[1] in PEERS else main()
