"""Models as PyTorch's exporters write them, with open axes: loaded without `shapes`, trained, on ranks, saved, and run by ONNX Runtime.

    python benchmarks/onnx_exported.py [--only gpt] [--old] [--trace]

needs torch, onnx, onnxscript and onnxruntime. A row is a model, a column a stage: `ok`, a largest difference, or what went wrong.

    load      fx.onnx.load without `shapes`
    torch     5 steps of SGD beside PyTorch with the same weights: the largest relative difference of a loss (1e-5 is allowed)
    data_parallel, zero1, fsdp: the same 5 steps on 4 ranks beside one device: the largest relative difference of a loss (1e-5 is allowed)
    save      the trained model is written, onnx.checker takes it, and its inputs have the open axes of the file that was read
    runtime   ONNX Runtime runs the written file at other sizes: the largest difference from PyTorch's trained model, relative to the
              largest output (1e-4 is allowed, and 1e-3 with batch normalization: its running variance is that of the batch in ONNX, and
              in PyTorch that of the batch times n / (n - 1))
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from _common import machine
from _torch_networks import CASES, Case, exported

import fluidx as fx
from fluidx.testing.models import TestModel, train_ranks, train_single

STRATEGIES = {"data_parallel": fx.strategies.data_parallel, "zero1": fx.strategies.zero1, "fsdp": fx.strategies.fsdp}
RANKS, STEPS, BATCH, RATE = 4, 5, 8, 0.05
LOSS, OUTPUT = 1e-5, 1e-4  # differences that are allowed


class Wrong(Exception):
    """A difference that is too large."""


class Trial:
    """A module, its file, and batches for it."""

    def __init__(self, case: Case, folder: Path, dynamo: bool):
        torch.manual_seed(0)
        self.case, self.path = case, folder / "model.onnx"
        self.module = case.make()
        exported(case, self.module, str(self.path), dynamo)
        self.batches = [self._batch(seed) for seed in range(STEPS)]
        self.model: Any = None

    def _batch(self, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(100 + seed)
        inputs = self.case.inputs(BATCH, self.case.sizes[1])
        with torch.no_grad():
            shape = self.module.eval()(*inputs.values()).shape[:-1]
        return inputs, torch.randint(0, self.case.classes, shape)

    def load(self) -> str:
        self._built()
        return "ok"

    def _built(self) -> tuple[Any, Any]:
        """The model and its loss, with SGD."""
        model = fx.onnx.load(str(self.path), untie=True)
        loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy", freeze=self.case.freeze)
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.SGD(RATE).minimize(loss)
        return model, loss

    def _feeds(self, model: Any) -> list[dict[str, np.ndarray]]:
        feeds = []
        for inputs, label in self.batches:
            fed = {v.name: a.numpy() for v, a in zip(model.feeds, inputs.values(), strict=True)}
            feeds.append({**fed, "label": label.numpy()[..., None]})
        return feeds

    def torch(self) -> str:
        self.module.train()
        optimizer, want = torch.optim.SGD(self.module.parameters(), RATE), []
        for inputs, label in self.batches:
            loss = torch.nn.functional.cross_entropy(self.module(*inputs.values()).flatten(0, -2), label.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            want.append(loss.item())
        model, loss = self._built()
        self.model = model
        values, self.scope = train_single(self._test(model, loss), self._feeds(model), [loss])
        self.losses = [v[0].item() for v in values]
        return _within(max(abs(a - b) / abs(b) for a, b in zip(self.losses, want, strict=True)), LOSS)

    @staticmethod
    def _test(model: Any, loss: Any) -> TestModel:
        return TestModel(model.program, model.startup, loss, lambda rows: {}, [])

    def ranks(self, strategy: str) -> str:
        model, loss = self._built()
        found, _ = train_ranks(self._test(model, loss), STRATEGIES[strategy](), RANKS, self._feeds(model), [loss])
        return _within(max(abs(v[0].item() - b) / abs(b) for v, b in zip(found, self.losses, strict=True)), LOSS)

    def save(self) -> str:
        self.saved = self.path.with_name("trained.onnx")
        fx.onnx.save(self.model.program, str(self.saved), fetches=self.model.fetches, scope=self.scope)
        onnx.checker.check_model(str(self.saved), full_check=True)
        before, after = (_axes(onnx.load(str(p)).graph.input) for p in (self.path, self.saved))
        if before != after:
            raise Wrong(f"the axes of the inputs were {before} and are {after}")
        return "ok"

    def runtime(self) -> str:
        session = onnxruntime.InferenceSession(str(self.saved), providers=["CPUExecutionProvider"])
        torch.manual_seed(7)
        inputs = self.case.inputs(3, self.case.sizes[0] + 4)
        names = [i.name for i in session.get_inputs()]
        (got,) = session.run(None, {n: a.numpy() for n, a in zip(names, inputs.values(), strict=True)})
        with torch.no_grad():
            want = self.module.eval()(*inputs.values()).numpy()
        return _within(float(np.abs(got - want).max() / np.abs(want).max()), OUTPUT * (10 if self.case.norms else 1))


def _axes(inputs: Any) -> list[list[int | str]]:
    return [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in inputs]


def _within(found: float, allowed: float) -> str:
    if not found <= allowed:
        raise Wrong(f"off by {found:.1e}")
    return f"{found:.0e}" if found else "0"


def row(case: Case, dynamo: bool, trace: bool) -> tuple[list[str], list[str]]:
    """The cells of a model, and what went wrong."""
    cells, wrong = [], []
    stages: dict[str, Callable[[], str]]
    with tempfile.TemporaryDirectory() as folder:
        try:
            t = Trial(case, Path(folder), dynamo)
        except Exception as e:
            return ["-"], [f"the exporter: {type(e).__name__}: {str(e).splitlines()[0]}"]
        stages = {"load": t.load, "torch": t.torch, **{s: partial(t.ranks, s) for s in STRATEGIES}, "save": t.save, "runtime": t.runtime}
        for name, stage in stages.items():
            try:
                cells.append(stage())
            except Exception as e:
                if trace:
                    traceback.print_exc()
                cells.append("no")
                wrong.append(f"{name}: {type(e).__name__}: {re.sub(r'  +', ' ', str(e))[:600]}")
                if name == "load":
                    break
    return cells, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--old", action="store_true", help="the exporter of torch.jit (dynamo=False)")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    lines = [f"python benchmarks/onnx_exported.py{' --old' if args.old else ''}", machine()]
    lines.append(", ".join(f"{p} {version(p)}" for p in ("torch", "onnx", "onnxscript", "onnxruntime")))
    lines.append(f"{STEPS} steps of SGD, batch {BATCH}, {RANKS} ranks; files by dynamo={not args.old}\n")
    columns = ["model", "load", "torch", *STRATEGIES, "save", "runtime"]
    lines.append("  ".join(f"{c:13s}" for c in columns))
    print("\n".join(lines), flush=True)
    failed = 0
    for name, case in CASES.items():
        if args.only and name not in args.only.split(","):
            continue
        cells, wrong = row(case, not args.old, args.trace)
        failed += bool(wrong)
        found = ["  ".join(f"{c:13s}" for c in [name, *cells]), *(f"    {w}" for w in wrong)]
        print("\n".join(found), flush=True)
        lines += found
    sys.exit(failed)


if __name__ == "__main__":
    main()
