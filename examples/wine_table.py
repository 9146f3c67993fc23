"""From a model file and a table to a trained model file: a small classifier learns scikit-learn's wines from a CSV, on two ranks.

The script writes wine.onnx and wine.csv, runs `fluidx onnx train` on them, and counts what the trained file gets right.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

import fluidx as fx

OPTIONS = "--label kind --val-split 0.2 --metric f1 --patience 10 --epochs 60 --batch 16 --lr 0.01 --ranks 2"


def write_table(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The wines as a table: 13 measurements in a row, and the name of the kind."""
    from sklearn.datasets import load_wine

    data = load_wine()
    kinds = np.array(["barolo", "grignolino", "barbera"])[data.target]
    with path.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow([*data.feature_names, "kind"])
        rows.writerows([*x, kind] for x, kind in zip(data.data.tolist(), kinds))
    return data.data.astype("float32"), kinds


def write_model(path: Path) -> None:
    """An untrained network with 13 inputs and three classes. It stands for a model of any exporter."""
    main, startup = fx.Program("wine"), fx.Program("wine_startup")
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup), fx.unique_name.guard():
        measured = fx.data("measured", [-1, 13], "float32")
        hidden = fx.layers.fc(fx.layers.batch_norm(measured), 32, act="relu")
        kind = fx.layers.softmax(fx.layers.fc(hidden, 3))
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    fx.onnx.save(main, path, fetches=[kind], scope=scope)


def train(folder: Path) -> float:
    """Write the files, train, and return the share of all wines that the trained file gets right."""
    x, kinds = write_table(folder / "wine.csv")
    write_model(folder / "wine.onnx")
    command = f"fluidx onnx train wine.onnx --data wine.csv {OPTIONS} -o trained.onnx"
    print(f"$ {command}", flush=True)
    subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=folder, check=True)
    (found,) = fx.onnx.session(folder / "trained.onnx").run({"measured": x})
    return float((np.unique(kinds)[found.argmax(axis=1)] == kinds).mean())  # classes are numbered in the order of the alphabet


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("."), help="where the files are written")
    right = train(parser.parse_args().into)
    print(f"{right:.1%} of all wines are right")
