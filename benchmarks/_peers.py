"""Peers in processes of their own; `_races.py` lets them race.

Two pools of threads that spin in one process slow each other tenfold and more, so every peer is a worker process, which takes a turn when
it is told over a pipe and sleeps otherwise. A turn is one step that is not counted, then a number of steps, each timed. Thread counts are
set on every side; the table shows how many cores each peer really used.

On AMD processors MKL, and with it PyTorch, takes a slow path unless a preloaded library answers for it. One is compiled at run time; where
that fails, no ratio to PyTorch is printed.

`python _peers.py PEER MODEL MODE THREADS` is the worker.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

DEADLINE = 900  # seconds that a peer has for its first answer (torch.compile is slow) and for a turn
REST = 0.05  # seconds between turns, for the pool of the last peer to go to sleep: OpenBLAS and OpenMP spin for up to 25 ms

Make = Callable[[str, str, bool, int], Callable[[], Any]]
TRAIN = ("fluidx", "fluidx_nhwc", "torch_eager", "torch_best", "torch_compile", "jax")
INFER = (*TRAIN, "onnxruntime")
HALF = "_bf16"  # behind the name of a peer: the same in bfloat16
TRAIN_HALF = ("fluidx_bf16", "fluidx", "torch_eager_bf16", "torch_best_bf16", "torch_compile_bf16", "torch_best")
LEGEND = {
    "fluidx": "fluidx as it comes; in inference InferenceTranspiler folded batch normalization into the filters",
    "fluidx_nhwc": "the same with data_format='NHWC'",
    "fluidx_numpy": "fluidx with FLUIDX_KERNELS=numpy",
    "torch_eager": "PyTorch as it comes",
    "torch_best": "PyTorch with channels_last for ResNets, the fused optimizer; in inference batch normalization folded into the filters",
    "torch_compile": "torch_best under torch.compile",
    "jax": "JAX, the step as one jitted function, images NHWC",
    "onnxruntime": "ONNX Runtime on what PyTorch exports",
    "fluidx_bf16": "fluidx in mixed precision, mixed_precision.decorate(dtype='bfloat16')",
    "torch_eager_bf16": "PyTorch as it comes, under autocast in bfloat16",
    "torch_best_bf16": "torch_best under autocast in bfloat16",
    "torch_compile_bf16": "torch_compile under autocast in bfloat16",
}


def has(peer: str, model: str) -> bool:
    """Whether there is such a case: only images have a layout, and LeNet's few channels make NHWC pointless."""
    return peer != "fluidx_nhwc" or model.startswith("resnet")


# -- the worker ---------------------------------------------------------------------------------------------------------------------


def _import_only(peer: str) -> None:
    if peer.startswith("fluidx"):
        import fluidx
        import fluidx.native  # noqa: F401
    elif peer.startswith("torch"):
        import torch  # noqa: F401
    elif peer == "jax":
        import jax  # noqa: F401


def _make(peer: str, model: str, train: bool, threads: int) -> Callable[[], Any]:
    """The step of a peer."""
    import _models
    import _peer_models

    c = _models.case(model)
    half, peer = peer.endswith(HALF), peer.removesuffix(HALF)
    if peer.startswith(("fluidx_threads:", "fluidx_team:", "fluidx_rank:")):
        return _ranks(peer, c)
    if peer.startswith("fluidx"):
        return _models.fluidx_step(c, train, "NHWC" if peer == "fluidx_nhwc" else "NCHW", half=half)
    if peer.startswith("torch") or peer == "onnxruntime":
        import torch

        torch.set_num_threads(threads)
        if peer == "onnxruntime":
            if train:
                raise ImportError("ONNX Runtime does not train")
            return _peer_models.onnx_step(c, threads)
        ranks = 1
        if peer.startswith("torch_ddp:"):
            ranks = _join_gloo(peer)
        return _peer_models.torch_step(c, train, peer != "torch_eager", peer == "torch_compile", ranks, half=half)
    if peer == "jax":
        return _peer_models.jax_step(c, train)
    raise SystemExit(f"there is no peer {peer!r}; there are {', '.join(LEGEND)}")


def _ranks(peer: str, c: Any) -> Callable[[], Any]:
    """The step of two ranks; `fluidx_rank:rank:job:...` is one of them, launched."""
    import _models

    import fluidx as fx

    body, *of, strategy, overlap = peer.split(":")
    os.environ["FLUIDX_OVERLAP"] = overlap
    if body == "fluidx_rank":
        os.environ |= {"FLUIDX_RANK": of[0], "FLUIDX_WORLD_SIZE": "2", "FLUIDX_JOB": of[1]}
        return _models.fluidx_ranks_step(c, strategy, 2, None)
    return _models.fluidx_ranks_step(c, strategy, 2, fx.cpu_places(2) if body == "fluidx_threads" else fx.process_places(2))


def _join_gloo(peer: str) -> int:
    """Join the group of `name:rank:file`; the number of its ranks."""
    import torch

    _, rank, store = peer.split(":")
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
    return 2


def memory() -> dict[str, float]:
    """Resident bytes of this process, now and at most since the last `forget_peak`, in MB. ru_maxrss would also count what forked it."""
    with open("/proc/self/status") as f:
        kb = {line.split(":")[0]: int(line.split()[1]) for line in f if line.startswith(("VmRSS", "VmHWM"))}
    return {"now": kb["VmRSS"] * 1024 / 1e6, "peak": kb["VmHWM"] * 1024 / 1e6}


def forget_peak() -> None:
    with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def beside_plan(model: str, layout: str) -> dict[str, Any]:
    """MB that the plan of a training program announces, by kind, and by how much the process grew when it was started and ran three steps.

    Both begin with the programs and the plan made, and the libraries loaded, which are the interpreter's objects.
    """
    import gc

    import _models

    import fluidx as fx
    from fluidx import native
    from fluidx.executor.plan.dry_run import dry_plan

    m = _models.fluidx_model(_models.case(model), True, layout)
    plan = dry_plan(m.main, {name: a.shape for name, a in m.feed.items()}, fetch=[m.result.name])
    announced = {kind: plan.nbytes(kind) / 1e6 for kind in ("arena", "feed", "state")}
    if native.enabled():
        announced["threads"] = plan.thread_bytes * native.num_threads() / 1e6
    gc.collect()
    forget_peak()
    before = memory()["now"]
    scope, exe = fx.Scope(), fx.Executor(fx.CPUPlace())
    exe.run(m.startup, scope=scope)
    for _ in range(3):
        exe.run(m.main, feed=m.feed, fetch_list=[m.result], scope=scope)
    return {"announced": announced, "taken": memory()["peak"] - before}


def _serve(peer: str, model: str, mode: str, threads: int, answer: Callable[[Any], None], make: Make) -> None:
    """Answer one line on the pipe with one line, until the pipe is closed."""
    import gc

    begin = memory()["now"]
    try:
        _import_only(peer)
        imported = memory()["now"]
        if mode == "plan":
            return answer(beside_plan(model, "NHWC" if peer == "fluidx_nhwc" else "NCHW"))
        step = make(peer, model, mode != "infer", threads)
    except ImportError as e:
        return answer({"missing": str(e)})
    gc.collect()
    ready = memory()["now"]
    if mode == "first":
        step()
    answer({"ready": True, "mb": {"begin": begin, "imported": imported, "ready": ready}})
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "values":
            answer([_values(step()) for _ in range(order["steps"])])
        elif order["do"] == "memory":
            forget_peak()
            for _ in range(order["steps"]):
                step()
            answer(memory()["peak"])
        elif order["do"] == "turn":
            step()
            cpu, whole = _processor_time(), time.perf_counter()
            seconds = step.many(order["steps"]) if hasattr(step, "many") else _timed(step, order["steps"])
            took, now = time.perf_counter() - whole, _processor_time()
            answer({"seconds": seconds, "cores": (now - cpu) / took, "cpu": (now - cpu) / order["steps"], "until": now})


def _processor_time() -> float:
    """Seconds that this process has used, and the processes that it has started and those have started."""
    return time.process_time() + sum(map(_seconds_of, _below(os.getpid())))


def _below(pid: int) -> Iterator[int]:
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            yield int(child)
            yield from _below(int(child))


def _seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def _values(result: Any) -> list[float]:
    """A loss, or 16 of the results and the largest magnitude of all, which says what a difference is compared with."""
    if isinstance(result, float):
        return [result]
    flat = result.ravel()
    return [*(float(v) for v in flat[:: max(1, len(flat) // 16)][:16]), max(float(flat.max()), -float(flat.min()))]


def main(make: Make = _make) -> None:
    """The worker; `make` gives a step of a peer on a model."""
    peer, model, mode, threads = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get into the pipe

    def answer(what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    with redirect_stdout(sys.stderr):
        _serve(peer, model, mode, int(threads), answer, make)
    out.close()
    os._exit(0)  # pools and process groups have nothing to say at the end


# -- starting workers ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def mkl_fast_path() -> tuple[str, str]:
    """(A library to preload for PyTorch, "") where it is needed, ("", "") where it is not, ("", why not) where it cannot be had."""
    try:
        with open("/proc/cpuinfo") as f:
            if "AuthenticAMD" not in f.read():
                return "", ""
        folder = tempfile.mkdtemp(prefix="mkl_fast_path")
        source, library = Path(folder, "mkl.c"), Path(folder, "mkl.so")
        source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\nint mkl_serv_intel_cpu(void) { return 1; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
        return str(library), ""
    except (OSError, subprocess.CalledProcessError) as e:
        return "", f"the library for MKL's fast path could not be built ({e})"


def torch_here() -> Any:
    """PyTorch in this process; None where it is not installed, or its MKL would need a library preloaded."""
    if any(mkl_fast_path()):
        return None
    try:
        return import_module("torch")
    except ImportError:
        return None


def mkl_line() -> str:
    library, problem = mkl_fast_path()
    if problem:
        return f"PyTorch's MKL takes its slow path on this AMD processor, {problem}: no ratios to PyTorch"
    if library:
        return "PyTorch's MKL takes its fast path: a preloaded library tells it that this AMD processor is an Intel one"
    return "PyTorch's MKL needs no help on this processor"


def versions() -> str:
    import fluidx
    from fluidx import native

    kernels = f"on, level {native.level()}" if native.enabled() else f"off: {native.why_not()}"
    found = [f"fluidx {fluidx.__version__} (native kernels {kernels})"]
    for name in ("torch", "jax", "onnxruntime"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def environment(peer: str, threads: int) -> dict[str, str]:
    n = str(threads)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FLUIDX_", "OMP_", "KMP_", "GOMP_", "XLA_"))}
    env |= {"OPENBLAS_NUM_THREADS": n, "OMP_NUM_THREADS": n, "MKL_NUM_THREADS": n, "FLUIDX_THREADS": n, "PYTHONWARNINGS": "ignore"}
    # The size of XLA's pool; the flag alone does not hold it to one thread.
    env |= {"NPROC": n, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'}"}
    if "FLUIDX_NATIVE_LEVEL" in os.environ:
        env["FLUIDX_NATIVE_LEVEL"] = os.environ["FLUIDX_NATIVE_LEVEL"]
    if peer == "fluidx_numpy":
        env["FLUIDX_KERNELS"] = "numpy"
    if peer.startswith("torch") and (library := mkl_fast_path()[0]):
        env["LD_PRELOAD"] = library
    if peer.startswith("torch_ddp"):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


class Peer:
    """A worker process."""

    def __init__(self, name: str, model: str, mode: str, threads: int, env: dict[str, str] | None = None, script: str = __file__):
        self.name, self.cpu = name, 0.0
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, script, name, model, mode, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment(name, threads) | (env or {}),
        )  # fmt: skip

    def send(self, do: str, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            self._errors.seek(0)
            told = self._errors.read().decode(errors="replace").strip().splitlines()[-12:]
            raise RuntimeError(f"{self.name} {'ended' if ready else f'gave no answer for {DEADLINE} s'}:\n  " + "\n  ".join(told))
        return json.loads(line)

    def ask(self, do: str, **what: Any) -> Any:
        self.send(do, **what)
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Entrant:
    """One or more workers that take their turns at the same time."""

    def __init__(self, name: str, peers: list[Peer]):
        self.name, self.peers = name, peers
        self.seconds: list[list[float]] = []  # of each step, by round
        self.slowest: list[float] = []  # of each step the seconds that the worker took that took longest
        self.cores: list[float] = []
        self.cpu: list[float] = []  # seconds of processor time of a step, one figure a round
        self.steps = 1

    def first_answers(self) -> str:
        """Why this one does not take part, or nothing."""
        try:
            return next((told["missing"] for told in [p.receive() for p in self.peers] if "missing" in told), "")
        except RuntimeError as e:
            return str(e)

    def values(self, steps: int) -> list[list[float]]:
        for p in self.peers:
            p.send("values", steps=steps)
        return [p.receive() for p in self.peers][0]

    def turn(self) -> float:
        """A turn; the CPU seconds it took, warming up included."""
        for p in self.peers:
            p.send("turn", steps=self.steps)
        told = [p.receive() for p in self.peers]
        self.seconds.append([s for t in told for s in t["seconds"]])
        self.slowest += map(max, zip(*(t["seconds"] for t in told), strict=True))
        self.cores.append(sum(t["cores"] for t in told))
        self.cpu.append(sum(t["cpu"] for t in told))
        used = sum(t["until"] - p.cpu for t, p in zip(told, self.peers, strict=True))
        for t, p in zip(told, self.peers, strict=True):
            p.cpu = t["until"]
        return used

    def times(self, rounds: Iterable[int] | None = None) -> list[float]:
        chosen = self.seconds if rounds is None else [self.seconds[k] for k in rounds]
        return [s for some in chosen for s in some]


if __name__ == "__main__":
    main()
