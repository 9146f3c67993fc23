"""Training for 8-bit integers: the accuracy of a small MobileNet on digits in float32, rounded without training, and trained rounded.

The network has depthwise and pointwise convolutions with relu6, and is trained in float32 for `--epochs`. Then batch normalization is
folded and the network is written as ONNX. From there weights and inputs of convolutions are rounded to 8 bits, as observed in ten batches;
once as it is, and once with `--tune` more epochs of training, on one device and by data_parallel on two ranks. Accuracies are those of ONNX
Runtime on 497 digits that were not trained on, in percent, for each seed, and their means. Integers of the file are counted.

    --epochs 30   --tune 6   --seeds 3   --save
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import Log, option

import fluidx as fx

TRAINED, BATCH = 1300, 64


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.images[order, None] / 16).astype("float32"), data.target[order, None].astype("int64")


def batches(x: np.ndarray, y: np.ndarray, epochs: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(TRAINED)
        for k in range(0, TRAINED - BATCH + 1, BATCH):
            yield {"image": x[order[k : k + BATCH]], "label": y[order[k : k + BATCH]]}


def mobilenet(image: Any) -> Any:
    """Blocks of a depthwise and a pointwise convolution, as in MobileNet."""

    def conv(value: Any, filters: int, size: int, stride: int = 1, groups: int = 1) -> Any:
        value = fx.layers.conv2d(value, filters, size, stride, size // 2, groups=groups, bias_attr=False)
        return fx.layers.relu6(fx.layers.batch_norm(value))

    value = conv(image, 16, 3)
    for filters, stride in ((24, 2), (32, 1), (48, 2), (48, 1)):
        value = conv(conv(value, value.shape[1], 3, stride, value.shape[1]), filters, 1)
    return fx.layers.fc(fx.layers.flatten(fx.layers.pool2d(value, pool_type="avg", global_pooling=True)), 10)


def write_float(path: Path, x: np.ndarray, y: np.ndarray, epochs: int, seed: int) -> None:
    main, startup = fx.Program("mobilenet"), fx.Program()
    main.random_seed = startup.random_seed = seed + 1
    with fx.program_guard(main, startup), fx.unique_name.guard():
        image, label = fx.data("image", [-1, 1, 8, 8], "float32"), fx.data("label", [-1, 1], "int64")
        scores = mobilenet(image)
        test = main.clone(for_test=True)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(scores, label))
        fx.optimizer.Adam(fx.layers.cosine_decay(5e-3, TRAINED // BATCH, epochs)).minimize(loss)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    for fed in batches(x, y, epochs, seed):
        exe.run(main, feed=fed, scope=scope)
    fx.InferenceTranspiler().transpile(test, scope=scope)
    fx.onnx.save(test, path, fetches=[scores], scope=scope)


def write_rounded(source: Path, path: Path, x: np.ndarray, y: np.ndarray, epochs: int, ranks: int, seed: int) -> None:
    """Round the network and train it so for some epochs; write it with integers."""
    with fx.unique_name.guard():
        model = fx.onnx.load(source)
        loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy")
        fx.quantize(model, [fed for _, fed in zip(range(10), batches(x, y, 1, seed), strict=False)])
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.Adam(fx.layers.cosine_decay(1e-3, TRAINED // BATCH, max(epochs, 1))).minimize(loss)
    t = fx.DistributeTranspiler(fx.strategies.data_parallel())
    t.transpile(program=model.program, startup_program=model.startup, trainers=ranks)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as exe:
        exe.run_startup()
        for fed in batches(x, y, epochs, seed + 100):
            exe.run(feed=fed)
        fx.onnx.save(model.program, path, fetches=model.fetches, executor=exe)


def accuracy(path: Path, x: np.ndarray, y: np.ndarray) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"image": x[TRAINED:]})
    return float((scores.argmax(axis=1) == y[TRAINED:, 0]).mean() * 100)


def integers(path: Path) -> str:
    """How many elements of the weights are int8, of all."""
    import onnx

    tensors = onnx.load(path).graph.initializer
    sizes = [(t.data_type == onnx.TensorProto.INT8, int(np.prod(t.dims))) for t in tensors]
    return f"{sum(n for is_int8, n in sizes if is_int8)} of {sum(n for _, n in sizes)}"


def main() -> None:
    log, (x, y) = Log("quantize"), digits()
    epochs, tune, seeds = (int(option(name, default)) for name, default in (("epochs", "30"), ("tune", "6"), ("seeds", "3")))
    found: list[tuple[float, ...]] = []
    log("seed  float32  rounded  trained rounded  on 2 ranks")
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / f"{name}.onnx" for name in ("float", "rounded", "trained", "ranks")]
        for seed in range(seeds):
            write_float(names[0], x, y, epochs, seed)
            for path, more, ranks in ((names[1], 0, 1), (names[2], tune, 1), (names[3], tune, 2)):
                write_rounded(names[0], path, x, y, more, ranks, seed)
            found.append(tuple(accuracy(path, x, y) for path in names))
            log(f"{seed:4}  " + "  ".join(f"{v:{w}.2f}" for v, w in zip(found[-1], (7, 7, 15, 10), strict=True)))
        log("mean  " + "  ".join(f"{np.mean(v):{w}.2f}" for v, w in zip(zip(*found, strict=True), (7, 7, 15, 10), strict=True)))
        log(f"elements of the weights that are int8: {integers(names[2])}; bytes: {names[0].stat().st_size} and {names[2].stat().st_size}")
    log.close()


if __name__ == "__main__":
    main()
