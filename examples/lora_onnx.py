"""Adapters for an ONNX file: a network that reads digits learns to read them upside down, by rank-4 adapters trained on 4 ranks.

The base model is written first and does not change. The adapters are a small folder, and are merged into a second model file at the end.
With --base int4 the ranks hold the weights of the base in 4 bits meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import fluidx as fx


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return (data.images / 16).astype("float32"), data.target.reshape(-1, 1).astype("int64")


def write_base(path: Path, x: np.ndarray, y: np.ndarray, epochs: int) -> None:
    """Train a small network with three layers on upright digits and write it."""
    main, startup = fx.Program("digits"), fx.Program()
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup), fx.unique_name.guard():
        value, label = fx.data("image", [-1, 8, 8], "float32"), fx.data("label", [-1, 1], "int64")
        value = fx.layers.flatten(value)
        for name in ("encoder.0", "encoder.1"):
            value = fx.layers.fc(value, 64, act="relu", param_attr=f"{name}.weight", bias_attr=f"{name}.bias")
        scores = fx.layers.fc(value, 10, param_attr="head.weight", bias_attr="head.bias")
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(scores, label))
        fx.optimizer.Adam(3e-3).minimize(loss)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    for fed in batches(x, y, epochs):
        exe.run(main, feed=fed, scope=scope)
    fx.onnx.save(main, path, fetches=[scores], scope=scope)


def batches(x: np.ndarray, y: np.ndarray, epochs: int) -> Any:
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(x))
        for k in range(0, len(x) - 63, 64):
            yield {"image": x[order[k : k + 64]], "label": y[order[k : k + 64]]}


def train_adapters(base: Path, folder: Path, x: np.ndarray, y: np.ndarray, how: argparse.Namespace) -> None:
    """Train adapters on several ranks, each of which holds a part of the base weights, and write them."""
    model = fx.onnx.load(base)
    model.startup.random_seed = 1
    lora = fx.onnx.Lora(rank=how.rank, alpha=2 * how.rank, targets="encoder.*", base=how.base)
    loss = fx.onnx.set_training(model, lora=lora, loss="softmax_with_cross_entropy")
    with fx.program_guard(model.program, model.startup):
        fx.optimizer.Adam(1e-2).minimize(loss)
    t = fx.DistributeTranspiler(fx.strategies.get(how.strategy))
    t.transpile(program=model.program, startup_program=model.startup, trainers=how.ranks)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(how.ranks)) as ranks:
        ranks.run_startup()
        for fed in batches(x, y, how.epochs):
            ranks.run(feed=fed)
        fx.onnx.save_adapters(model.program, folder, executor=ranks, base=base.name)


def accuracy(path: Path, x: np.ndarray, y: np.ndarray) -> float:
    (scores,) = fx.onnx.load(path).run([x])
    return float((scores.argmax(axis=1) == y[:, 0]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=4, help="rank of the adapters")
    parser.add_argument("--base", choices=["int8", "int4"], help="store the weights that are not trained as integers")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--into", type=Path, default=Path("."), help="where the models are written")
    how = parser.parse_args()
    base, folder, merged = (how.into / name for name in ("digits.onnx", "upside_down", "upside_down.onnx"))
    x, y = digits()
    turned = np.ascontiguousarray(x[:, ::-1, ::-1])
    write_base(base, x[:1500], y[:1500], how.epochs)
    train_adapters(base, folder, turned[:1500], y[:1500], how)
    changed = fx.onnx.merge(base, folder, merged)
    size = (folder / "adapter_model.safetensors").stat().st_size
    print(f"{base.name} has {base.stat().st_size} bytes, its adapters {size}; {changed} weights changed in {merged.name}")
    for path in (base, merged):
        right, other = (accuracy(path, images[1500:], y[1500:]) for images in (x, turned))
        print(f"{path.name}: {right:.1%} of upright digits, {other:.1%} turned")


if __name__ == "__main__":
    main()
