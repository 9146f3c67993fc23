"""The engines, and how their cases are run side by side."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from . import files, kernels, programs
from .outcome import Outcome

ENGINES: dict[str, tuple[Callable[[int, int, Outcome], None], int, str]] = {
    "programs": (programs.attack, 400, "random programs on ranks, beside one device"),
    "kernels": (kernels.attack, 4000, "operators on random and special operands: C, NumPy, float64"),
    "files": (files.attack, 1500, "broken programs, checkpoints and ONNX models"),
}
BATCH = 50


def batch(engine: str, numbers: list[int], seed: int) -> Outcome:
    """Some cases of an engine; an error that is not fluidx's own is a finding."""
    outcome = Outcome()
    for k in numbers:
        try:
            ENGINES[engine][0](k, seed, outcome)
        except Exception as e:
            last = traceback.extract_tb(e.__traceback__)[-1]
            outcome.fail(k, f"{type(e).__name__}: {str(e)[:300]} ({last.filename.rpartition('/')[2]}:{last.lineno})")
    return outcome


def run(engine: str, count: int, seed: int, workers: int) -> Outcome:
    found = Outcome()
    batches = [list(range(k, min(k + BATCH, count))) for k in range(0, count, BATCH)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for one in pool.map(batch, [engine] * len(batches), batches, [seed] * len(batches)):
            found.verdicts += one.verdicts
            found.wrong += one.wrong
    return found
