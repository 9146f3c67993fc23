"""A rank of a calibration under mpirun: `fluidx run -n 2 --backend mpi mpi_rank.py curves.json 0.5`. Rank 0 writes what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from fluidx.comm.launch_environment import rank
from fluidx.executor.places import mpi_places
from fluidx.ir.errors import FluidxError
from fluidx.simulator.calibration.links import curves
from fluidx.simulator.calibration.records import CurvePoint, Curves


def curves_of_mpi(n: int, seconds: float) -> tuple[Curves, CurvePoint]:
    """The times of collectives and messages among n ranks that mpirun starts, and of an empty run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "curves.json")
        command = [sys.executable, "-m", "fluidx", "run", "-n", str(n), "--backend", "mpi", __file__, str(path), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise FluidxError(f"calibrate: {n} ranks under mpirun failed; `fluidx doctor` tells what is missing\n{done.stderr[-2000:]}")
        data = json.loads(path.read_text(encoding="utf-8"))
    return {op: tuple(CurvePoint(*p) for p in points) for op, points in data["curves"].items()}, CurvePoint(*data["run"])


def _main(path: str, seconds: str) -> None:
    found, run = curves(mpi_places(), float(seconds))
    if rank() == 0:
        Path(path).write_text(json.dumps({"curves": found, "run": run}), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
