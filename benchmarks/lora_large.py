"""Peak memory of fine-tuning a GPT of about 1 B parameters with LoRA, its weights frozen as float32, 8-bit or 4-bit integers.

The model, of random weights, is written with its weights in a file beside it to a folder of /tmp and removed afterwards. For each base a
process of its own loads it, adds adapters, and trains some steps of Adam on one batch; its peak is what the system counted (ru_maxrss), and
the phases are sampled as in onnx_large.py. "nodes" is a file of the same weights in 4 bits, in nodes MatMulNBits. Losses are compared with
those of the first of the bases.

    --layers 18   --width 2048   --vocabulary 32000   --length 128   --rank 8   --steps 3   --bases float,int8,int4,nodes   --save
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from _common import Log, option, options
from onnx_large import Watch

from fluidx.onnx.quantized_base import quantized

_FOLDER = Path("/tmp/fluidx_lora_large")
_HEAD = 128  # the width of an attention head


class _Gpt:
    """Writes a GPT layer by layer, with products named as PEFT knows them: h.0.attn.q, h.0.attn.k, ..., h.0.mlp.up, head."""

    def __init__(self, data: BinaryIO, bits: int, width: int, layers: int, vocabulary: int, length: int):
        self.data, self.bits, self.width, self.length = data, bits, width, length
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.rng, self.count = np.random.default_rng(0), 0
        x = self.add("Add", self.add("Gather", self.weight("tokens.weight", vocabulary, width), "ids"),
                     self.weight("places.weight", length, width))  # fmt: skip
        mask = self.held("mask", np.triu(np.full((length, length), -1e9, np.float32), 1))
        for k in range(layers):
            x = self.add("Add", x, self.attention(f"h.{k}.attn", self.norm(f"h.{k}.ln1", x), mask))
            up = self.add("Gelu", self.dense(f"h.{k}.mlp.up", self.norm(f"h.{k}.ln2", x), 4 * width), approximate="tanh")
            x = self.add("Add", x, self.dense(f"h.{k}.mlp.down", up, width, 4 * width))
        self.dense("head", self.norm("ln", x), vocabulary, named="scores")

    def add(self, op: str, *inputs: str, named: str = "", **attrs: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(op, inputs, [named or f"v{len(self.nodes)}"], **attrs))
        return str(self.nodes[-1].output[0])

    def held(self, name: str, value: np.ndarray) -> str:
        from onnx import TensorProto, helper

        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=value.shape, data_location=TensorProto.EXTERNAL)
        self.data.seek(-(-self.data.tell() // 4096) * 4096)
        place = {"location": "model.data", "offset": str(self.data.tell()), "length": str(value.nbytes)}
        for key, said in place.items():
            tensor.external_data.add(key=key, value=said)
        self.data.write(value.data)
        self.tensors.append(tensor)
        self.count += value.size
        return name

    def drawn(self, *shape: int) -> np.ndarray:
        value = self.rng.standard_normal(shape, np.float32)
        value *= 0.02
        return value

    def weight(self, name: str, *shape: int) -> str:
        return self.held(name, self.drawn(*shape))

    def dense(self, module: str, x: str, columns: int, rows: int = 0, named: str = "") -> str:
        name, rows = f"{module}.weight", rows or self.width
        if not self.bits:
            return self.add("MatMul", x, self.weight(name, rows, columns), named=named)
        y, scale = quantized(self.drawn(rows, columns).T, self.bits, 32)
        parts = self.held(f"{name}_Q{self.bits}", y), self.held(f"{name}_scales", scale)
        how = {"K": rows, "N": columns, "bits": self.bits, "block_size": 32, "domain": "com.microsoft"}
        return self.add("MatMulNBits", x, *parts, named=named, **how)

    def norm(self, module: str, x: str) -> str:
        ones = self.held(f"{module}.weight", np.ones(self.width, np.float32))
        return self.add("LayerNormalization", x, ones, self.held(f"{module}.bias", np.zeros(self.width, np.float32)), axis=-1)

    def attention(self, module: str, x: str, mask: str) -> str:
        heads = self.held(f"{module}.heads", np.array([0, self.length, self.width // _HEAD, _HEAD], np.int64))
        whole = self.held(f"{module}.whole", np.array([0, self.length, self.width], np.int64))
        q, k, v = (self.add("Reshape", self.dense(f"{module}.{n}", x, self.width), heads) for n in "qkv")
        q, k, v = (self.add("Transpose", y, perm=perm) for y, perm in ((q, [0, 2, 1, 3]), (k, [0, 2, 3, 1]), (v, [0, 2, 1, 3])))
        scale = self.held(f"{module}.scale", np.float32([_HEAD**-0.5]))
        scores = self.add("Add", self.add("Mul", self.add("MatMul", q, k), scale), mask)
        mixed = self.add("Transpose", self.add("MatMul", self.add("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return self.dense(f"{module}.o", self.add("Reshape", mixed, whole), self.width)


def write_model(folder: Path, bits: int, width: int, layers: int, vocabulary: int, length: int) -> int:
    """Write model.onnx and model.data. Returns the number of elements of what it holds."""
    from onnx import TensorProto, helper, save

    with (folder / "model.data").open("wb") as data:
        net = _Gpt(data, bits, width, layers, vocabulary, length)
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", length])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", length, vocabulary])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(net.nodes, "gpt", [ids], [scores], net.tensors)
    save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    return net.count


def work(folder: Path, base: str, rank: int, steps: int, length: int, vocabulary: int) -> None:
    """What is measured. Prints a line when a phase begins, and at the end losses, seconds of a step, and the peak in bytes."""
    import fluidx as fx

    print("load", flush=True)
    model = fx.onnx.load(folder / "model.onnx")
    print("program", flush=True)
    model.startup.random_seed = model.program.random_seed = 1
    lora = fx.onnx.Lora(rank, 16.0, base=base if base.startswith("int") else None)
    loss = fx.onnx.set_training(model, loss="token_classification", lora=lora)
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.Adam(1e-3).minimize(loss)

    print("startup", flush=True)
    exe = fx.Executor(fx.CPUPlace())
    exe.run(model.startup)
    print("step", flush=True)
    rng = np.random.default_rng(1)
    feed = {"ids": rng.integers(0, vocabulary, (1, length)), "label": rng.integers(0, vocabulary, (1, length))}
    losses, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(float(exe.run(model.program, feed=feed, fetch_list=[loss])[0].item()))
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("end", json.dumps([losses, min(seconds), peak]), flush=True)


def measure(folder: Path, base: str, *how: Any) -> tuple[dict[str, tuple[int, int]], list[float], float, int]:
    """Peaks of the phases; losses, the seconds of the fastest step, and the peak of all."""
    command = [sys.executable, __file__, "--work", json.dumps([str(folder), base, *how])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watch, found = Watch(process.pid), ""
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            word, _, found = line.strip().partition(" ")
            watch.phase = word if word in watch.peaks else watch.phase
        watch.on = False
        watch.join()
    if process.returncode:
        raise RuntimeError(f"the process ended with status {process.returncode}")
    return watch.peaks, *json.loads(found)


def main() -> None:
    if "--work" in sys.argv:
        folder, *how = json.loads(option("work", ""))
        return work(Path(folder), *how)
    log = Log("lora_large")
    width, layers, vocabulary = (int(option(n, d)) for n, d in (("width", "2048"), ("layers", "18"), ("vocabulary", "32000")))
    length, rank, steps = (int(option(n, d)) for n, d in (("length", "128"), ("rank", "8"), ("steps", "3")))
    bases, first = options("bases", "float,int8,int4,nodes"), list[float]()
    try:
        for base in bases:
            if base == "nodes" or base == bases[0]:
                shutil.rmtree(_FOLDER, ignore_errors=True)
                _FOLDER.mkdir()
                count = write_model(_FOLDER, 4 * (base == "nodes"), width, layers, vocabulary, length)
            if base == bases[0]:
                shape = f"{layers} layers of width {width}, {vocabulary} tokens"
                log(f"\n{count / 1e9:.3f} B parameters ({shape}), batch 1, length {length}, rank {rank}")
            peaks, losses, seconds, peak = measure(_FOLDER, base, rank, steps, length, vocabulary)
            first = losses if base == bases[0] else first
            apart = max(abs(a - b) / b for a, b in zip(losses, first, strict=True))
            said = "losses " + ", ".join(f"{v:.5f}" for v in losses) + f" (from {bases[0]} {apart:.1e})" * (base != bases[0])
            phases = ", ".join(f"{p} {peaks[p][0] / 1e6:.0f}" for p in ("load", "program", "startup", "step"))
            log(f"  {base:5} peak {peak / 1e9:.2f} GB; MB by phase: {phases}; {seconds:.1f} s a step; {said}")
    finally:
        shutil.rmtree(_FOLDER, ignore_errors=True)
    log.close()


if __name__ == "__main__":
    main()
