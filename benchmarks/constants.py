"""Weights as a constant of a program, named by digest, against the same as numbers in its text: to make, write, read and run it.

`--mb 4` is how large they are, `--forms digest` leaves the numbers away, which take gigabytes for weights of a hundred megabytes. Times are
CPU seconds of the process; the digest is computed for the first text.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _common import Log, option, options, show

import fluidx as fx

FORMS: dict[str, Callable[[np.ndarray], Any]] = {"numbers": lambda w: tuple(w.ravel().tolist()), "digest": lambda w: w}


def once(weights: np.ndarray, form: Callable[[np.ndarray], Any], folder: str) -> tuple[dict[str, float], int]:
    """Seconds of each step, and bytes of the text."""
    startup, path, seconds = fx.Program("startup"), str(Path(folder) / "startup.txt"), {}
    block = startup.global_block()
    block.create_parameter(weights.shape, name="w")
    start = time.process_time()

    def done(step: str) -> None:
        nonlocal start
        seconds[step] = time.process_time() - start
        start = time.process_time()

    block.append_op("assign_value", outputs={"Out": "w"}, attrs={"shape": weights.shape, "values": form(weights)})
    done("make the operator")
    fx.Executor().run(startup, scope=fx.Scope())
    done("run it, planning included")
    text = str(startup)
    done("write the text")
    again = fx.Program.parse_from_string(text, startup.constants())
    done("parse it")
    assert again == startup
    start = time.process_time()
    fx.io.save_text(startup, path)
    done("save it with its constants")
    fx.io.load_text(path)
    done("load it, digests checked")
    return seconds, len(text)


def main() -> None:
    log = Log("constants")
    mb, forms = int(option("mb", "4")), options("forms", "numbers,digest")
    weights = np.random.default_rng(0).standard_normal((mb * 256, 1024), dtype="float32")
    found: dict[str, dict[str, list[float]]] = {form: {} for form in forms}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(int(option("rounds", "5")) + 1):  # the first one warms up
            for form in forms:
                seconds, size = once(weights, FORMS[form], folder)
                if not k:
                    log(f"{mb} MB of float32 as {form}: {size} bytes of text")
                for step, took in seconds.items() if k else ():
                    found[form].setdefault(step, []).append(took)
    for form, steps in found.items():
        for step, times in steps.items():
            log(f"{form:8}  {step:28}  {show(times, 1e3, 'ms')}")
    log.close()


if __name__ == "__main__":
    main()
