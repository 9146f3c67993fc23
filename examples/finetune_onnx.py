"""A real ONNX model learns another task: a net that told which way up a line of text is learns to read handwritten digits, on 4 ranks.

The model comes out of the package rapidocr-onnxruntime (15 MB), which pip fetches into build/wheels; the digits are scikit-learn's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from packages import file_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fluidx as fx
from fluidx.config import show_progress

FOLDER = Path(__file__).resolve().parents[1] / "build" / "wheels"
MODEL = ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx")
FEATURES = "reshape2_0.tmp_0"  # what its last layer reads
STRATEGIES = ("data_parallel", "ring_optimizer", "fsdp")


def digits(count: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """So many digits to train on and 297 to test, as the model has images: three channels of 48 x 48 between -1 and 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    small = (data.images / 8 - 1).astype("float32")
    x = np.repeat(np.kron(small, np.ones((1, 6, 6), "float32"))[:, None], 3, axis=1)
    y = data.target.reshape(-1, 1).astype("int64")
    return {"x": x[:count], "label": y[:count]}, {"x": x[1500:], "label": y[1500:]}


def prepared(source: bytes, features: str) -> tuple[Any, Any, Any]:
    """The model with a head for ten digits, the loss with an optimizer behind it, and the program that judges."""
    with fx.unique_name.guard():
        model = fx.onnx.load(source, shapes={"x": [-1, 3, 48, 48]})
        loss = fx.onnx.set_training(model, head=lambda m: fx.layers.fc(m[features], 10), loss="softmax_with_cross_entropy")
        test = model.program.clone(for_test=True)
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.Adam(2e-3).minimize(loss)
    return model, loss, test


def accuracy(scores: np.ndarray, label: np.ndarray) -> float:
    return float((scores.argmax(axis=1) == label[:, 0]).mean())


def finetune(source: bytes, features: str, strategy: str, data: Any, ranks: int, epochs: int, output: Path) -> tuple[float, float, float]:
    """Train under a strategy and write the model: the accuracy before, the loss of the last step, the accuracy after."""
    (train, held), (model, loss, test) = data, prepared(source, features)
    (scores,) = model.fetches
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    (before,) = exe.run(test, feed=held, fetch_list=[scores], scope=scope)
    t = fx.DistributeTranspiler(fx.strategies.get(strategy))
    t.transpile(program=model.program, startup_program=model.startup, trainers=ranks)
    t.verify()
    last = float("nan")
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as many:
        many.run_startup()
        for epoch in track(range(epochs), strategy, transient=True, disable=not show_progress()):
            order = np.random.default_rng(epoch).permutation(len(train["x"]))
            for k in range(0, len(order), 50):
                fed = {n: a[order[k : k + 50]] for n, a in train.items()}
                last = many.run(feed=fed, fetch_list=[loss])[0].item()
        fx.onnx.save(model.program, output, fetches=[scores], executor=many)
    (after,) = fx.onnx.load(output).run({"x": held["x"]})
    return accuracy(before, held["label"]), last, accuracy(after, held["label"])


def on_runtime(path: Path, held: dict[str, np.ndarray]) -> str:
    try:
        import onnxruntime
    except ImportError:
        return "not installed"
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return f"{accuracy(session.run(None, {'x': held['x']})[0], held['label']):.4f}"


def compare(source: bytes, features: str, count: int, ranks: int, epochs: int, folder: Path) -> None:
    data = digits(count)
    table = Table(title=f"{count} digits, {epochs} epochs on {ranks} ranks")
    for column in ("strategy", "accuracy before", "last loss", "accuracy after", "in ONNX Runtime"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for strategy in STRATEGIES:
        output = folder / f"digits_{strategy}.onnx"
        before, last, after = finetune(source, features, strategy, data, ranks, epochs, output)
        table.add_row(strategy, f"{before:.4f}", f"{last:.6f}", f"{after:.4f}", on_runtime(output, data[1]))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--count", type=int, default=600, help="digits to train on, 1500 at most")
    parser.add_argument("--into", type=Path, default=Path("."), help="where the trained models are written")
    args = parser.parse_args()
    try:
        source = file_of(*MODEL, FOLDER)
    except OSError as e:
        sys.exit(f"the model is not here: {e}")
    compare(source, FEATURES, args.count, args.ranks, args.epochs, args.into)


if __name__ == "__main__":
    main()
