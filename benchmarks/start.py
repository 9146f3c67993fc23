"""How long it takes to start: to import, and from the start of a process to the end of its first training step (MLP).

Every figure is a new process, interleaved, with all files in the page cache and all modules compiled: a first uncounted round sees to
that. Importing is timed inside the process, so the interpreter's own start is not in it; the first step is timed from outside, from the
process's start to the answer that the step is done, and counts everything: interpreter, imports, building and planning or compiling.
torch.compile starts with an empty cache of compiled code (cold) and with the one that it left (warm).

    --rounds 5   --compile 0 (leaves torch.compile out)   --save
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import Log, option, ratio, show
from _peers import Peer, environment, mkl_line, versions

IMPORTS = {"numpy": "numpy", "fluidx": "fluidx", "torch": "torch_eager", "jax": "jax"}
TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def caching(folder: str) -> dict[str, str]:
    """Compiled modules go to a folder, whatever the environment says: a user's import does not compile."""
    return {"PYTHONPYCACHEPREFIX": os.fspath(Path(folder, "modules")), "PYTHONDONTWRITEBYTECODE": ""}


def importing(module: str, folder: str) -> float | None:
    """Seconds, or None where it is not installed."""
    env = environment(IMPORTS[module], 2) | caching(folder)
    done = subprocess.run([sys.executable, "-c", TIMED.format(module)], capture_output=True, text=True, env=env)
    return float(done.stdout) if done.returncode == 0 else None


def first_step(peer: str, folder: str) -> float | str:
    """Seconds, or why there is no figure."""
    start = time.perf_counter()
    with Peer(peer, "mlp", "first", 2, caching(folder) | {"TORCHINDUCTOR_CACHE_DIR": os.fspath(Path(folder, "inductor"))}) as p:
        try:
            told = p.receive()
        except RuntimeError as e:
            return str(e)
        return str(told["missing"]) if "missing" in told else time.perf_counter() - start


def main() -> None:
    log = Log("start")
    log(versions())
    log(mkl_line())
    rounds = int(option("rounds", "5"))
    with tempfile.TemporaryDirectory() as folder:
        measure(log, rounds, folder)
    log.close()


def measure(log: Log, rounds: int, folder: str) -> None:
    log("\nimport")
    imports: dict[str, list[float]] = {}
    for k in range(rounds + 1):
        for module in IMPORTS:
            seconds = importing(module, folder)
            if seconds is None:
                if not k:
                    log(f"  {module}: not installed")
            elif k:
                imports.setdefault(module, []).append(seconds)
    for module, times in imports.items():
        extra = f"; fluidx takes {ratio(imports['fluidx'], times)} of it" if module not in ("fluidx", "numpy") else ""
        log(f"  {module:15} {show(times, 1e3, 'ms', 0)}{extra}")

    log("\nprocess start to the end of the first step, 2 threads")
    steps: dict[str, list[float]] = {}
    refused: set[str] = set()
    for k in range(rounds + 1):
        for peer in ("fluidx", "fluidx_numpy", "torch_eager", "jax"):
            took = first_step(peer, folder) if peer not in refused else ""
            if isinstance(took, str):
                if took:
                    log(f"  {peer}: not measured: {took}")
                refused.add(peer)
            elif k:
                steps.setdefault(peer, []).append(took)
    if option("compile", "1") != "0" and "torch_eager" not in refused:
        for name, count in (("cold", 1), ("warm", min(3, rounds))):
            for _ in range(count):
                took = first_step("torch_compile", folder)
                if isinstance(took, str):
                    log(f"  torch_compile, {name}: not measured: {took}")
                    break
                steps.setdefault(f"compile {name}", []).append(took)
    for peer, times in steps.items():
        extra = f"; fluidx takes {ratio(steps['fluidx'], times)} of it" if not peer.startswith("fluidx") and "fluidx" in steps else ""
        log(f"  {peer:15} {show(times, 1e3, 'ms', 0)}{extra}")


if __name__ == "__main__":
    main()
