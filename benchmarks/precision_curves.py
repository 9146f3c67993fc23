"""The loss while a model trains, in float32, in mixed precision, and with optimizer state in bfloat16, too: the numbers of a picture.

The character GPT of examples/char_gpt.py (Adam), and a small ResNet with batch normalization on scikit-learn's handwritten digits
(Momentum). Each is trained from the starting values of several seeds, on the same batches. A line of the results is a mean over 10
steps; the last column of the table is the loss of the test data. `docs/make_pictures.py` draws docs/img/precision_curves.svg from them.

    --models gpt,resnet   --seeds 3   --epochs 12   --save
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _common import RESULTS, option, options

import fluidx as fx

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import char_gpt
from common import Model, minibatches

PRECISIONS = {"float32": (False, "float32"), "bfloat16": (True, "float32"), "bfloat16, state too": (True, "bfloat16")}
EVERY = 10  # steps in a line of the results


def block(x: Any, channels: int, stride: int) -> Any:
    """Two convolutions beside a shortcut."""
    L = fx.layers

    def conv(x: Any, size: int, stride: int, act: str | None = None) -> Any:
        return L.batch_norm(L.conv2d(x, channels, size, stride=stride, padding=size // 2, bias_attr=False), act=act)

    short = x if stride == 1 and x.shape[1] == channels else conv(x, 1, stride)
    return L.relu(conv(conv(x, 3, stride, "relu"), 3, 1) + short)


def resnet(seed: int = 1, state_dtype: str = "float32") -> Model:
    """A ResNet of three blocks for images of 8 x 8."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = (data.images / 16).astype("float32").reshape(-1, 1, 8, 8), data.target.reshape(-1, 1).astype("int64")
    main, startup = fx.Program("digits_resnet"), fx.Program("digits_resnet_startup")
    main.random_seed = startup.random_seed = seed
    with fx.program_guard(main, startup):
        h = fx.data("image", [-1, 1, 8, 8], "float32")
        label = fx.data("label", [-1, 1], "int64")
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            h = block(h, channels, stride)
        logits = fx.layers.fc(fx.layers.pool2d(h, pool_type="avg", global_pooling=True), 10)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, label))
        fx.optimizer.Momentum(0.01, 0.9, state_dtype=state_dtype).minimize(loss)
    train, test = {"image": x[:1500], "label": y[:1500]}, {"image": x[1500:], "label": y[1500:]}
    return Model(main, startup, loss, {"test loss": loss}, lambda epoch: minibatches(train, 64, epoch), test)


MODELS: dict[str, Callable[..., Model]] = {"gpt": char_gpt.build, "resnet": resnet}


def trained(model: Model, mixed: bool, epochs: int) -> tuple[list[float], float]:
    """Means of the loss over `EVERY` steps each, and the loss of the test data at the end."""
    test = model.main.clone(for_test=True)
    main = fx.rewrite.Amp(dtype="bfloat16").run(model.main) if mixed else model.main
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    losses = [exe.run(main, f, [model.loss], scope=scope)[0].item() for epoch in range(epochs) for f in model.batches(epoch)]
    (end,) = exe.run(test, model.test, [model.loss], scope=scope)
    return [float(np.mean(losses[k : k + EVERY])) for k in range(0, len(losses) - EVERY + 1, EVERY)], end.item()


def main() -> None:
    epochs = int(option("epochs", "12"))
    for name in options("models", "gpt,resnet"):
        lines = ["model,precision,seed,step,loss"]
        for precision, (mixed, state) in PRECISIONS.items():
            ends, tests = [], []
            for seed in range(1, 1 + int(option("seeds", "3"))):
                with fx.unique_name.guard():
                    losses, test = trained(MODELS[name](seed, state), mixed, epochs)
                lines += [f'{name},"{precision}",{seed},{EVERY * (k + 1)},{loss:.5f}' for k, loss in enumerate(losses)]
                ends.append(float(np.mean(losses[-5:])))
                tests.append(test)
            last, of_test = (" ".join(f"{v:.4f}" for v in values) for values in (ends, tests))
            print(f"{name:7} {precision:20} last {5 * EVERY} steps: {last}   test: {of_test}", flush=True)
        if "--save" in sys.argv:
            (RESULTS / f"precision_curves_{name}.csv").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
