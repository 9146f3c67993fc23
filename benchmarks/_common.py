"""What the benchmarks share: interleaved timing, medians with spread, the machine, and where results are written."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results"


def interleaved(cases: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, list[float]]:
    """Seconds per call of each case, A B C A B C, one figure a round; the first round warms up and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for k in range(rounds + 1):
        for name, call in cases.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if k:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def show(seconds: list[float], scale: float, unit: str, digits: int = 2) -> str:
    """`median unit (min .. quartile)`."""
    q = sorted(seconds)
    return f"{statistics.median(q) * scale:.{digits}f} {unit} (min {q[0] * scale:.{digits}f}, p75 {q[len(q) * 3 // 4] * scale:.{digits}f})"


def ratio(a: list[float], b: list[float]) -> str:
    """a / b, on medians and on minima."""
    return f"{statistics.median(a) / statistics.median(b):.2f} (on minima {min(a) / min(b):.2f})"


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, NumPy {np.__version__}, "
        f"OPENBLAS_NUM_THREADS={os.environ.get('OPENBLAS_NUM_THREADS', 'unset')}; load {os.getloadavg()[0]:.1f}"
    )


class Log:
    """Prints lines and, with --save, writes them to results/<name>.txt."""

    def __init__(self, name: str):
        self.name, self.lines = name, []
        self(f"benchmarks/{name}.py on {machine()}")

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self.lines.append(line)

    def close(self) -> None:
        if "--save" in sys.argv:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{self.name}.txt").write_text("\n".join(self.lines) + "\n", encoding="utf-8")
