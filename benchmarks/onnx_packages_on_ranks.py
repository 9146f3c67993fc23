"""Models out of packages, as their files come (no `shapes=`), trained on 4 ranks and on one device.

    PYTHONPATH=. python benchmarks/onnx_packages_on_ranks.py [--only minilm] [--into FOLDER]

A row is a model: the loss of 2 steps of SGD on one device, and for each strategy the largest relative difference of a loss, or the error.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _common import machine

import fluidx as fx
from fluidx.testing.models import TestModel, train_ranks, train_single
from tests.onnx.wheels import FOLDER, MODELS

STRATEGIES = ("data_parallel", "zero1", "fsdp")
RANKS, ROWS, STEPS, ALLOWED = 4, 4, 2, 1e-5


class Case(NamedTuple):
    """A model of tests/onnx/wheels.py: sizes of its inputs after the batch, the value that the squared error is of, and frozen weights."""

    name: str
    sizes: dict[str, tuple[int, ...]]
    output: str = ""
    rate: float = 1e-4
    freeze: tuple[str, ...] = ()


CASES = [
    Case("minilm_l3", {"input_ids": (9,), "attention_mask": (9,)}, "461", 1e-2),
    Case("minilm_int8", {"input_ids": (9,), "attention_mask": (9,), "token_type_ids": (9,)}, rate=1e-6),
    Case("ppocr_det", {"x": (3, 64, 64)}, "p2o.Add.281", 1e-7),
    Case("ppocr_rec", {"x": (3, 48, 64)}, rate=1e-1),
    Case("ppocr_cls", {"x": (3, 48, 96)}),
    Case("basic_pitch", {"serving_default_input_2:0": (43844, 1)}, "StatefulPartitionedCall:1", 1e-2,
         freeze=("const_fold_opt__655", "const_fold_opt__664", "*_734", "*cq_t2010v2*")),
    Case("magika", {"bytes": (2048,)}, "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Dense_1/AddV2:0"),
    Case("open_nsfw", {"input:0": (224, 224, 3)}),
    Case("mtcnn_pnet", {"input_1": (40, 60, 3)}, "conv2d_4", 1e-2),
    Case("mtcnn_onet", {"input_3": (48, 48, 3)}, "dense_6"),
]  # fmt: skip


class Trial:
    """A case with its file, its inputs, and labels near its outputs."""

    def __init__(self, case: Case, folder: Path):
        real = next(m for m in MODELS if m.name == case.name)
        self.case, self.data, rng = case, real.model(folder), np.random.default_rng(5)
        self.inputs = {n: real.inputs[n]._replace(shape=(ROWS, *s)).drawn(rng) for n, s in case.sizes.items()}
        model = fx.onnx.load(self.data)
        self.output = case.output or model.fetches[0].name
        exe, scope = fx.Executor(), fx.Scope()
        exe.run(model.startup, scope=scope)
        y = model[self.output] if case.output else model.fetches[0]
        (made,) = exe.run(model.program, feed=self._feed(model), fetch_list=[y], scope=scope)
        self.label = (made + 0.3 * rng.standard_normal(made.shape)).astype("float32")

    def _feed(self, model: Any) -> dict[str, np.ndarray]:
        return {v.name: a for v, a in zip(model.feeds, self.inputs.values(), strict=True)}

    def built(self) -> tuple[TestModel, list[dict[str, np.ndarray]], Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights that several nodes read
            model = fx.onnx.load(self.data)
            head = (lambda m: m[self.case.output]) if self.case.output else (lambda m: m.fetches[0])
            loss = fx.onnx.set_training(model, head=head, loss="square_error_cost", freeze=self.case.freeze, dropout=False)
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.SGD(self.case.rate).minimize(loss)
        feed = {**self._feed(model), "label": self.label}
        return TestModel(model.program, model.startup, loss, lambda rows: {}, []), [feed] * STEPS, loss


def row(case: Case, folder: Path) -> tuple[list[str], list[str]]:
    """The cells of a model, and what went wrong."""
    cells, wrong = [], []
    try:
        t = Trial(case, folder)
        test, feeds, loss = t.built()
        one = [v[0].item() for v in train_single(test, feeds, [loss])[0]]
        cells.append(" -> ".join(f"{v:.4g}" for v in one))
    except Exception as e:
        return ["no"], [f"{type(e).__name__}: {str(e)[:500]}"]
    for strategy in STRATEGIES:
        try:
            test, feeds, loss = t.built()
            found, _ = train_ranks(test, getattr(fx.strategies, strategy)(), RANKS, feeds, [loss])
            off = max(abs(v[0].item() - b) / abs(b) for v, b in zip(found, one, strict=True))
            cells.append(f"{off:.0e}" if off else "0")
            if not off <= ALLOWED:
                wrong.append(f"{strategy}: off by {off:.1e}")
        except Exception as e:
            cells.append("no")
            wrong.append(f"{strategy}: {type(e).__name__}: {str(e)[:500]}")
    return cells, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--into", type=Path, default=FOLDER, help="where packages are kept")
    args = parser.parse_args()
    print(f"{machine()}\n{STEPS} steps of SGD, batch {ROWS}, {RANKS} ranks, no shapes=\n")
    print("  ".join(f"{c:{w}s}" for c, w in zip(("model", "loss", *STRATEGIES), (14, 24, 13, 13, 13), strict=True)), flush=True)
    chosen, failed = [c for c in CASES if args.only in c.name], 0
    for case in chosen:
        cells, wrong = row(case, args.into)
        failed += bool(wrong)
        print("  ".join(f"{c:{w}s}" for c, w in zip((case.name, *cells), (14, 24, 13, 13, 13))), *(f"\n    {w}" for w in wrong), flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
