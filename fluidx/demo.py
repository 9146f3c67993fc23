"""`fluidx demo`: handwritten digits from one device to four ranks, every step shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from .ir.errors import FluidxError


def build() -> tuple[Any, Any, Any, Any]:
    """The digits classifier: (main, startup, loss, accuracy)."""
    import fluidx as fx

    main, startup = fx.Program("digits"), fx.Program("digits_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        image = fx.data("image", [-1, 64], "float32")
        label = fx.data("label", [-1, 1], "int64")
        hidden = fx.layers.fc(image, 128, act="relu")
        logits = fx.layers.fc(hidden, 10)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, label))
        accuracy = fx.layers.accuracy(fx.layers.softmax(logits), label)
        fx.optimizer.Momentum(learning_rate=0.1, momentum=0.9).minimize(loss)
    return main, startup, loss, accuracy


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """scikit-learn's 1,797 handwritten digits: 1,500 to train, 297 to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FluidxError("the demo trains on scikit-learn's digits, which is not installed; pip install 'fluidx[demo]'") from None
    data = load_digits()
    x, y = (data.data / 16).astype("float32"), data.target.reshape(-1, 1).astype("int64")
    return {"image": x[:1500], "label": y[:1500]}, {"image": x[1500:], "label": y[1500:]}


def run(ranks: int = 4, epochs: int = 5, strategy: str = "ring_optimizer", svg: Path | None = None) -> None:
    """Build, transpile, verify, train on one device and on `ranks` ranks, and print what happened."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    import fluidx as fx

    say = Console(highlight=False, soft_wrap=True)
    train, test = digits()
    main, startup, loss, accuracy = build()

    say.rule("1. a program for one device")
    say.print(str(main), markup=False)

    t = fx.DistributeTranspiler(fx.strategies.get(strategy))
    t.transpile(program=main, startup_program=startup, trainers=ranks)
    say.rule(f"2. what {t.strategy!r} inserted for {ranks} ranks")
    say.print(str(t.diff()), markup=False)

    say.rule(f"3. the program of rank {ranks - 1}")
    say.print("\n".join(f"  {op}" for op in t.get_trainer_program(ranks - 1).ops if op.type not in {o.type for o in main.ops}), markup=False)

    say.rule("4. proved before it runs")
    say.print(str(t.verify()), markup=False)
    if svg is not None:
        from .ir.draw import draw_before_after

        svg.write_text(draw_before_after(main, [t.get_trainer_program(r) for r in range(ranks)]), encoding="utf-8")
        say.print(f"drawn before and after: {svg}")

    say.rule(f"5. one device and {ranks} ranks, the same batches")
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(startup, scope=scope)
    table = Table("epoch", "loss, 1 device", f"loss, {ranks} ranks", "largest difference", "1 device, s", f"{ranks} ranks, s")
    with fx.ParallelExecutor(t, places=fx.cpu_places(ranks)) as many:
        many.run_startup()
        for epoch in track(range(epochs), "training", console=say, transient=True):
            order = np.random.default_rng(epoch).permutation(len(train["image"]))
            batches = [{k: v[order[i : i + 60]] for k, v in train.items()} for i in range(0, len(order), 60)]
            t0 = time.perf_counter()
            one = [exe.run(main, feed=b, fetch_list=[loss], scope=scope)[0].item() for b in batches]
            t1 = time.perf_counter()
            all_ = [many.run(feed=b, fetch_list=[loss])[0].item() for b in batches]
            t2 = time.perf_counter()
            apart = max(abs(a - b) / abs(a) for a, b in zip(one, all_, strict=True))
            table.add_row(
                str(epoch), f"{np.mean(one):.6f}", f"{np.mean(all_):.6f}", f"{apart:.1e}", f"{t1 - t0:.2f}", f"{t2 - t1:.2f}"
            )
        say.print(table)
        judge = main.clone(for_test=True)
        (acc_one,) = exe.run(judge, feed=test, fetch_list=[accuracy], scope=scope)
        (acc_many,) = exe.run(judge, feed=test, fetch_list=[accuracy], scope=many.scopes[-1])
    say.print(f"accuracy on {len(test['image'])} digits never seen: {acc_one.item():.4f} on 1 device, {acc_many.item():.4f} on {ranks} ranks")
