"""What the benchmarks share: interleaved timing, medians with spread, the machine, and where results are written."""

from __future__ import annotations

import math
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


def option(name: str, default: str) -> str:
    """The value behind `--name` on the command line."""
    if f"--{name}" not in sys.argv:
        return default
    at = sys.argv.index(f"--{name}") + 1
    if at == len(sys.argv) or sys.argv[at].startswith("--"):
        raise SystemExit(f"--{name} takes a value; the default is {default}")
    return sys.argv[at]


def choice(name: str, *known: str) -> str:
    """The value behind `--name`, one of `known`; the first one is the default."""
    if (found := option(name, known[0])) not in known:
        raise SystemExit(f"--{name} {found}: expected one of {', '.join(known)}")
    return found


def options(name: str, default: str) -> list[str]:
    """The values behind `--name`, separated by commas."""
    return [part for part in option(name, default).split(",") if part]


class Watch:
    """Notices a busy machine: what others use of it, from /proc/stat, and a calibration loop that takes longer than at its best.

    The loop is 2 ms of additions within the cache, on one core. Call `look(own)` behind each round, `own` being the CPU seconds that the
    measured processes used in it. A round is disturbed if the loop took 20 % longer than the best one of all, or others used more than 0.2
    cores.
    """

    SLOWER, OTHERS = 1.2, 0.2

    def __init__(self) -> None:
        self._a, self._b = np.zeros(1 << 16, "float32"), np.ones(1 << 16, "float32")
        self.loops: list[float] = [self._loop()]
        self.others: list[float] = []
        self._seen = self._busy()

    def _loop(self) -> float:
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(200):
                np.add(self._a, self._b, out=self._a)
            best = min(best, time.perf_counter() - start)
        return best

    def _busy(self) -> tuple[float, float, float]:
        """Seconds that all cores were busy or stolen, those of them that this process was, and the time."""
        try:
            with open("/proc/stat") as f:
                user, nice, system, _, _, irq, softirq, steal = map(int, f.readline().split()[1:9])
            return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()
        except (OSError, ValueError):
            return 0.0, 0.0, time.perf_counter()

    def look(self, own: float) -> None:
        busy, mine, now = self._busy()
        self.others.append(max(0.0, busy - self._seen[0] - (mine - self._seen[1]) - own) / (now - self._seen[2]))
        self.loops.append(self._loop())
        self._seen = self._busy()

    def quiet(self) -> list[int]:
        """The numbers of the rounds that were not disturbed."""
        limit = self.SLOWER * min(self.loops)
        return [k for k, cores in enumerate(self.others) if cores <= self.OTHERS and self.loops[k + 1] <= limit]

    def is_quiet(self) -> bool:
        return len(self.quiet()) >= 0.8 * len(self.others)

    def __str__(self) -> str:
        rounds, quiet = len(self.others), len(self.quiet())
        slow = sum(seconds > self.SLOWER * min(self.loops) for seconds in self.loops[1:])
        busy = "" if self.is_quiet() else "BUSY MACHINE: "
        return (
            f"{busy}{quiet} of {rounds} rounds undisturbed; others used {statistics.median(self.others):.2f} cores (median; most "
            f"{max(self.others):.2f}), calibration loop > 20 % over its best in {slow}"
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
