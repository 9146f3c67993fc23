"""`fluidx demo`: train on handwritten digits, on one device and on ranks, and show each step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from .config import show_progress
from .ir.errors import FluidxError, install


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
        raise FluidxError(f"the demo needs the digits of scikit-learn, which is not installed; {install('demo')}") from None
    data = load_digits()
    x, y = (data.data / 16).astype("float32"), data.target.reshape(-1, 1).astype("int64")
    return {"image": x[:1500], "label": y[:1500]}, {"image": x[1500:], "label": y[1500:]}


def run(
    ranks: int = 4,
    epochs: int = 5,
    strategy: str = "ring_optimizer",
    svg: Path | None = None,
    backend: str = "threads",
    save: Path | None = None,
) -> None:
    """Build, transpile, verify, train on one device and on `ranks` ranks, and print what happened."""
    from rich.console import Console

    import fluidx as fx

    say = Console(highlight=False)
    train, test = digits()
    main, startup, loss, accuracy = build()
    t = fx.DistributeTranspiler(fx.strategies.get(strategy))
    t.transpile(program=main, startup_program=startup, trainers=ranks)

    say.rule("1. a program for one device")
    _show(say, _without_declarations(str(main)))
    if save is not None:
        fx.io.save_text(fx.ProgramPair(main, startup), save)
        say.print(f"saved as text: {save}", soft_wrap=True)

    say.rule(f"2. what {t.strategy!r} changed for {ranks} rank{'s' * (ranks > 1)}")
    weight = main.all_parameters()[-2].name
    difference = t.diff()
    say.print(f"operators on one parameter, {weight}:", style="italic")
    _show(say, _about(str(difference), weight))
    say.print("all inserted communication:", style="italic")
    _show(say, [f"  {line}" for line in difference.census().communication.lines()])

    say.rule(f"3. the new operators in the program of rank {ranks - 1}")
    old = {o.type for o in main.ops}
    _show(say, _at_most([f"  {op}" for op in t.get_trainer_program(ranks - 1).ops if op.type not in old], 12))

    say.rule("4. proved before it runs")
    say.print(str(t.verify()), markup=False, soft_wrap=True)
    if svg is not None:
        from .view import draw_before_after

        svg.write_text(draw_before_after(main, [t.get_trainer_program(r) for r in range(ranks)]), encoding="utf-8")
        say.print(f"drawn before and after: {svg}", soft_wrap=True)

    say.rule(f"5. one device and {ranks} rank{'s' * (ranks > 1)} as {backend}, the same batches")
    say.print(fx.native.describe(), soft_wrap=True)
    places = fx.process_places(ranks) if backend == "processes" else fx.cpu_places(ranks)
    _train(say, t, (main, startup, loss, accuracy), (train, test), epochs, places)


def _train(say: Any, t: Any, model: tuple[Any, Any, Any, Any], data: tuple[dict, dict], epochs: int, places: list[Any]) -> None:
    """Train both ways on the same batches, and print the losses and the accuracy side by side."""
    from rich.progress import track
    from rich.table import Table

    import fluidx as fx

    (main, startup, loss, accuracy), (train, test), ranks = model, data, t.world_size
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(startup, scope=scope)
    table = Table("epoch", "loss, 1 device", f"loss, {ranks} ranks", "largest difference", "1 device, ms", f"{ranks} ranks, ms")
    for column in table.columns:
        column.justify = "right"
    with fx.ParallelExecutor(t, places=places) as many:
        many.run_startup()
        for epoch in range(epochs):
            order = np.random.default_rng(epoch).permutation(len(train["image"]))
            batches = [{k: v[order[i : i + 60]] for k, v in train.items()} for i in range(0, len(order), 60)]
            seconds, apart, losses = [0.0, 0.0], 0.0, []
            quiet = not show_progress(say.file)
            for batch in track(batches, f"epoch {epoch + 1} of {epochs}", console=say, transient=True, disable=quiet):
                start = time.perf_counter()
                (one,) = exe.run(main, feed=batch, fetch_list=[loss], scope=scope)
                middle = time.perf_counter()
                (all_,) = many.run(feed=batch, fetch_list=[loss])
                seconds[0] += middle - start
                seconds[1] += time.perf_counter() - middle
                losses.append((one.item(), all_.item()))
                apart = max(apart, abs(one.item() - all_.item()) / abs(one.item()))
            means = np.mean(losses, axis=0)
            table.add_row(str(epoch), f"{means[0]:.6f}", f"{means[1]:.6f}", f"{apart:.1e}", *(f"{s * 1e3:.0f}" for s in seconds))
        say.print(table)
        judge = main.clone(for_test=True)
        (acc_one,) = exe.run(judge, feed=test, fetch_list=[accuracy], scope=scope)
        whole = fx.executor.Scope()  # the joined values of the ranks
        for p in main.all_parameters():
            whole.set(p.name, many.state(p.name))
        (acc_many,) = exe.run(judge, feed=test, fetch_list=[accuracy], scope=whole)
    say.print(
        f"accuracy on {len(test['image'])} digits never seen: {acc_one.item():.4f} on 1 device, "
        f"{acc_many.item():.4f} with the parameters of {ranks} rank{'s' * (ranks > 1)}",
        soft_wrap=True,
    )


# -- program text, shortened for reading -----------------------------------------------------------------------------------------


def _show(say: Any, lines: list[str]) -> None:
    """Print lines cut to the width of the terminal, added ones green, removed ones red."""
    from rich.text import Text

    styles = {"+": "green", "-": "red"}
    for line in lines:
        line = line.replace(" stop_gradient", "")
        say.print(Text(line, style=styles.get(line[:1], "")), no_wrap=True, overflow="ellipsis", crop=True)


def _without_declarations(text: str) -> list[str]:
    """The program without state variables, and with the backward part as a count: the part that a person writes."""
    lines: list[str] = []
    hidden = 0
    section = ""
    for line in text.splitlines():
        if not line.startswith("  "):
            if hidden:
                lines.append(f"  ... {hidden} operators")
            hidden, section = 0, line
        elif section == "backward:":
            hidden += 1
            continue
        elif line.startswith("  var "):
            continue
        lines.append(line)
    return lines


def _about(difference: str, name: str) -> list[str]:
    """The lines of a diff about one parameter; each section is named once."""
    lines: list[str] = []
    section = ""
    for line in difference.splitlines():
        if line.endswith(":") and line[:1] not in "+- ":
            section = line
        elif line[:2] in ("+ ", "- ") and f"%{name}" in line and not line[2:].startswith(("var ", "param ")):
            if section:
                lines.append(section)
                section = ""
            lines.append(line)
    return lines


def _at_most(lines: list[str], count: int) -> list[str]:
    return lines if len(lines) <= count else [*lines[:count], f"  ... and {len(lines) - count} more"]
