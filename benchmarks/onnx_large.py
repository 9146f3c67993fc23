"""Memory of a large ONNX model of random weights, as a multiple of its size: load, one training step, save.

The model is a chain of matrix products and Relu with its weights in a file beside it, written to a folder of /tmp and removed afterwards.
A process loads it, trains one step with SGD and saves it; this process samples the memory of it and of its ranks. Memory is PSS, in which a
page that several processes share counts once; "own" is the part that is no page of a file, which the system could drop and read again.

    --gb 1   --layers 24   --ranks 2 (processes, fsdp; 1: one device)   --batch 8   --save
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from _common import Log, option

PHASES = ("import", "load", "program", "startup", "step", "save")
_FOLDER = Path("/tmp/fluidx_onnx_large")


def write_model(folder: Path, gb: float, layers: int) -> int:
    """Write model.onnx and model.data, a layer at a time. Returns the bytes of the weights."""
    from onnx import TensorProto, helper, save

    n = int((gb * 1e9 / 4 / layers) ** 0.5) // 64 * 64
    rng, tensors, nodes, value = np.random.default_rng(0), [], [], "x"
    with (folder / "model.data").open("wb") as data:
        for k in range(layers):
            weight = rng.standard_normal((n, n), np.float32)
            weight *= (2 / n) ** 0.5
            tensor = TensorProto(name=f"w{k}", data_type=TensorProto.FLOAT, dims=[n, n], data_location=TensorProto.EXTERNAL)
            place = {"location": "model.data", "offset": str(data.tell()), "length": str(weight.nbytes)}
            for key, said in place.items():
                tensor.external_data.add(key=key, value=said)
            tensors.append(tensor)
            data.write(weight)
            out = "y" if k == layers - 1 else f"h{k}"
            nodes += [helper.make_node("MatMul", [value, f"w{k}"], [f"p{k}"]), helper.make_node("Relu", [f"p{k}"], [out])]
            value = out
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", n]) for name in "xy")
    graph = helper.make_graph(nodes, "large", [x], [y], tensors)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), folder / "model.onnx")
    return n * n * 4 * layers


def work(folder: Path, ranks: int, batch: int) -> None:
    """What is measured. Prints a line when a phase begins."""
    import fluidx as fx

    def begin(phase: str) -> None:
        print(phase, flush=True)

    begin("load")
    model = fx.onnx.load(folder / "model.onnx")
    begin("program")
    loss = fx.onnx.set_training(model, loss="square_error_cost")
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.SGD(1e-3).minimize(loss)
    n = model.feeds[0].shape[1]
    feed = {"x": np.ones((batch, n), np.float32), "label": np.zeros((batch, n), np.float32)}
    if ranks == 1:
        model.program.become(fx.rewrite.RaiseUpdates().run(model.program))
        begin("startup")
        exe = fx.Executor(fx.CPUPlace())
        exe.run(model.startup)
        begin("step")
        found = exe.run(model.program, feed=feed, fetch_list=[loss])[0]
    else:
        strategy = fx.strategies.fsdp(prefetch=0).with_rewrites(fx.rewrite.RaiseUpdates())
        t = fx.DistributeTranspiler(strategy).transpile(program=model.program, startup_program=model.startup, trainers=ranks)
        exe = fx.ParallelExecutor(t, places=fx.process_places(ranks))
        begin("startup")
        exe.run_startup()
        begin("step")
        found = exe.run([loss], feed=feed)[0]
    begin("save")
    fx.onnx.save(model.program, folder / "saved.onnx", fetches=model.fetches, executor=exe)
    begin(f"end {float(found.reshape(-1)[0]):.6g}")


class Watch(threading.Thread):
    """Samples the memory of a process and its children, and keeps the peak of each phase: (all, own) in bytes."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.phase, self.on = pid, PHASES[0], True
        self.peaks: dict[str, tuple[int, int]] = dict.fromkeys(PHASES, (0, 0))

    def run(self) -> None:
        while self.on:
            found = [memory_of(pid) for pid in family(self.pid)]
            now, old = tuple(map(sum, zip((0, 0), *found))), self.peaks[self.phase]
            self.peaks[self.phase] = max(old[0], now[0]), max(old[1], now[1])
            time.sleep(0.02)


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            pass
    return found


def memory_of(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kb["Pss"] * 1024, (kb["Pss_Anon"] + kb["Pss_Shmem"]) * 1024


def measure(folder: Path, ranks: int, batch: int) -> tuple[dict[str, tuple[int, int]], dict[str, float], str]:
    """Peaks and seconds of the phases, and the loss."""
    command = [sys.executable, __file__, "--work", json.dumps([str(folder), ranks, batch])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watch, seconds, began, loss = Watch(process.pid), {}, time.perf_counter(), ""
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            word, _, loss = line.strip().partition(" ")
            seconds[watch.phase], began = time.perf_counter() - began, time.perf_counter()
            if word in PHASES:
                watch.phase = word
        watch.on = False
        watch.join()
    if process.returncode:
        raise RuntimeError(f"the process ended with status {process.returncode}")
    return watch.peaks, seconds, loss


def main() -> None:
    if "--work" in sys.argv:
        folder, ranks, batch = json.loads(option("work", ""))
        return work(Path(folder), ranks, batch)
    log = Log("onnx_large")
    ranks, batch = int(option("ranks", "2")), int(option("batch", "8"))
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir()
    try:
        size = write_model(_FOLDER, float(option("gb", "1")), int(option("layers", "24")))
        peaks, seconds, loss = measure(_FOLDER, ranks, batch)
        saved = sum(p.stat().st_size for p in _FOLDER.glob("saved*"))
    finally:
        shutil.rmtree(_FOLDER)
    how = f"{ranks} process ranks, fsdp" if ranks > 1 else "one device"
    log(f"\n{size / 1e9:.2f} GB of weights, {how}, batch {batch}; loss {loss}, {saved / 1e9:.2f} GB saved")
    for phase in PHASES:
        whole, own = peaks[phase]
        mb = f"({whole / 1e6:.0f} MB, {own / 1e6:.0f} MB)"
        log(f"  {phase:8} {seconds[phase]:6.1f} s   peak {whole / size:5.2f} of the size, own {own / size:5.2f}  {mb}")


if __name__ == "__main__":
    main()
