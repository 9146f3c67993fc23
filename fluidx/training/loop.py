"""The loop of `fluidx onnx train`: epochs with validation, early stopping, checkpoints, and the best model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint import CheckpointManager
from ..config import show_progress
from ..executor import Executor, scope_guard
from ..executor.places import CPUPlace
from ..executor.scope import Scope
from ..files.state import from_first
from ..ir import Program, Variable
from ..launch.metrics import Log
from ..onnx.errors import OnnxError
from ..onnx.losses import Loss
from ..onnx.model import OnnxModel
from .examples import Examples, Feeds, rows_of
from .scores import LOWER_IS_BETTER, Score, shown


class OneDeviceTrainer:
    """What the loop uses of a ParallelExecutor, on one device: for models with sizes that depend on values, which ranks do not run."""

    def __init__(self, model: OnnxModel):
        self.model, self.scope, self._executor = model, Scope(), Executor(CPUPlace())

    def __enter__(self) -> OneDeviceTrainer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run_startup(self) -> None:
        self._executor.run(self.model.startup, scope=self.scope)

    def run(self, feed: Mapping[str, np.ndarray], fetch_list: list[Variable]) -> list[np.ndarray]:
        found: list[np.ndarray] = self._executor.run(self.model.program, feed=feed, fetch_list=fetch_list, scope=self.scope)
        return found

    def state(self, name: str) -> np.ndarray:
        return np.asarray(self.scope.get(name))


@dataclass(frozen=True)
class LoopOptions:
    """When the loop stops, and what it keeps. `options` are those of the command that a checkpoint notes; they decide the results."""

    output: Path
    epochs: int
    batch: int
    seed: int = 0
    metric: str | None = None  # decides which epoch is the best; None: the validation loss
    patience: int | None = None
    checkpoints: Path | None = None
    resume: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Trainee(NamedTuple):
    """A program that trains, and the same program before it had gradients, in inference form, which is validated and written."""

    program: Program
    plain: Program
    loss: Variable
    accuracy: Variable | None  # on the examples of the batch, if labels are classes
    output: Variable
    label: Variable
    kind: Loss

    @property
    def measures(self) -> list[Variable]:
        return [v for v in (self.loss, self.accuracy) if v is not None]


class Epoch(NamedTuple):
    """Means over an epoch: the loss and the accuracy on the training examples, the loss and the scores on the validation examples."""

    loss: float
    accuracy: float | None = None
    val_loss: float | None = None
    val_scores: Mapping[str, float] = {}

    def __str__(self) -> str:
        held = "" if self.val_loss is None else f"; validation: {_text(self.val_loss, self.val_scores)}"
        return _text(self.loss, {} if self.accuracy is None else {"accuracy": self.accuracy}) + held

    def value(self, metric: str) -> float:
        """What decides which epoch is the best: a higher one is better."""
        found = self.val_loss if metric == "loss" else self.val_scores[metric]
        assert found is not None
        return -found if metric in LOWER_IS_BETTER else found


def _option(value: Any) -> str:
    """The value of an option, as in a list of options that differ."""
    if isinstance(value, Mapping):
        return ",".join(f"{n}={_option(v)}" for n, v in value.items()) or "none"
    return ("none" if value is None else str(value)) if not isinstance(value, list) else ",".join(map(str, value)) or "none"


def _text(loss: float, scores: Mapping[str, float]) -> str:
    return ", ".join([f"loss {loss:.4g}", *(shown(n, v) for n, v in scores.items())])


class TrainingLoop:
    """Trains on examples, validates on others after each epoch, and calls `write` for the best epoch, or for the last one without them."""

    def __init__(
        self, exe: Any, trainee: Trainee, examples: Examples, held: Examples | None, scores: Sequence[Score], how: LoopOptions,
        write: Callable[[], None], say: Callable[[str], None], log: Log | None = None, judge: Any = None,
    ):  # fmt: skip
        """`judge` is a ParallelExecutor of the program without gradients, on the variables of the ranks that train."""
        self.exe, self.trainee, self.examples, self.held, self.scores, self.how = exe, trainee, examples, held, scores, how
        self.write, self.say, self.log = write, say, log
        self.epochs: list[Epoch] = []
        self._first = 0  # the first epoch that may be the best: those before a lost file are not
        self._ahead = 0  # how far the numbers of checkpoints are ahead of those of epochs, in folders of older versions
        self.steps = examples.steps(how.batch)
        self._checkpoints = None if how.checkpoints is None else CheckpointManager(how.checkpoints)
        self._judge, self._alone, self._scope = judge, Executor(CPUPlace()), Scope()

    @property
    def monitored(self) -> str:
        return self.how.metric or "loss"

    @property
    def best(self) -> int:
        """The index of the best epoch; the last one without validation examples."""
        if not self._has_best():
            return len(self.epochs) - 1
        values = [e.value(self.monitored) for e in self.epochs[self._first :]]
        return self._first + int(np.argmax([v if np.isfinite(v) else -np.inf for v in values]))

    def _has_best(self) -> bool:
        return self.held is not None and len(self.epochs) > self._first

    def run(self) -> list[Epoch]:
        """Train until the last epoch, or until `patience` epochs were no better. A terminal shows a bar with loss, speed and time left."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        if self.how.resume:
            self._resume()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"), TimeRemainingColumn())
        bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not show_progress())
        with bars:
            task = bars.add_task("", total=self.steps * self.how.epochs, completed=self.steps * len(self.epochs), now="")
            while len(self.epochs) < self.how.epochs and not self._is_over():
                epoch = len(self.epochs)
                done = self._train(epoch, partial(bars.update, task, advance=1, description=self._named(epoch)))
                self.say(f"{self._named(epoch)}: {done}")
                self.epochs.append(done)
                if self.held is not None and self.best == epoch:
                    self.write()
                self._save()
        if not self._has_best():
            self.write()
        elif self._is_over() and len(self.epochs) < self.how.epochs:
            better = f"no better validation {self.monitored} than epoch {self.best + 1}"
            self.say(f"stopped early: the last {self.how.patience} epochs had {better}")
        return self.epochs

    def _named(self, epoch: int) -> str:
        return f"epoch {epoch + 1} of {self.how.epochs}"

    def _is_over(self) -> bool:
        return self.how.patience is not None and self._has_best() and len(self.epochs) - 1 - self.best >= self.how.patience

    def _train(self, epoch: int, tell: Callable[..., None]) -> Epoch:
        totals, count, begun = np.zeros(len(self.trainee.measures)), 0, time.monotonic()
        examples = 0
        for k, fed in enumerate(self.examples.batches(self.how.batch, self.how.seed, epoch)):
            found = [v.item() for v in self.exe.run(feed=fed, fetch_list=self.trainee.measures)]
            weight = self._weight(fed)
            totals, count, examples = totals + np.multiply(found, weight), count + weight, examples + rows_of(fed)
            rate = examples / max(time.monotonic() - begun, 1e-9)
            tell(now=f"loss {found[0]:.4g}, {rate:.0f} examples/s")
            self._record(self.trainee.program.name, epoch * self.steps + k, dict(zip(("loss", "accuracy"), found)), rate)
        means = [float(v) for v in totals / max(count, 1)]
        self._check_finite("the loss", means[0], epoch, self.examples)
        loss, scores = self._validated()
        if loss is not None and self.held is not None:
            self._check_finite("the validation loss", loss, epoch, self.held)
            self._record("validation", (epoch + 1) * self.steps - 1, {"loss": loss, **scores})
        return Epoch(means[0], means[1] if len(means) > 1 else None, loss, scores)

    def _check_finite(self, what: str, loss: float, epoch: int, examples: Examples) -> None:
        if not np.isfinite(loss):
            written = f"; epoch {self.best + 1} was written" if self._has_best() else ", so nothing was written"
            raise OnnxError(f"{what} is {loss} in epoch {epoch + 1}{written}; {examples.with_nan() or 'a smaller --lr may help'}")

    def _weight(self, fed: Feeds) -> int:
        """How much of the mean a batch is: its labels that count, or its rows."""
        kind = self.trainee.kind
        if not kind.head.counts_labels:
            return rows_of(fed)
        label = fed[self.trainee.label.name]
        label = label[:, 1:] if kind.head.predicts_next else label
        return int(np.sum(label != kind.ignore_index))

    def _validated(self) -> tuple[float | None, dict[str, float]]:
        """The loss and the scores on the validation examples, computed by the inference form of the program with the ranks' values."""
        if self.held is None:
            return None, {}
        for v in self.trainee.plain.list_vars() if self._judge is None else ():
            if v.persistable:
                self._scope.set(v.name, self.exe.state(v.name))
        for score in self.scores:
            score.reset()
        fetches = [self.trainee.loss.name, *([self.trainee.output.name] if self.scores else [])]
        total, count = 0.0, 0
        for fed in self.held.batches(self.how.batch):
            loss, *outputs = self._judged(fed, fetches)
            weight = self._weight(fed)
            total, count = total + loss.item() * weight, count + weight
            for score in self.scores:
                score.update(outputs[0], fed[self.trainee.label.name])
        mean = total / max(count, 1)
        return mean, {score.name: score.eval(mean) for score in self.scores}

    def _judged(self, fed: Feeds, fetches: list[str]) -> list[np.ndarray]:
        if self._judge is not None:
            return list(self._judge.run(feed=fed, fetch_list=fetches))
        return self._alone.run(self.trainee.plain, feed=fed, fetch_list=fetches, scope=self._scope)

    def _record(self, program: str, step: int, numbers: Mapping[str, float], rate: float | None = None) -> None:
        if self.log is not None:
            finite = {n: v if np.isfinite(v) else None for n, v in numbers.items()}
            self.log.take({**finite, "program": program, "step": step, "time": time.time(), "rate": rate})

    # -- checkpoints --------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self._checkpoints is None:
            return
        extra: dict[str, Any] = {"epochs": [[e.loss, e.accuracy, e.val_loss, dict(e.val_scores)] for e in self.epochs]}
        extra |= {"options": dict(self.how.options), "first": self._first, "monitored": self.monitored if self.held is not None else None}
        with self._state() as executor:
            self._checkpoints.save(len(self.epochs) + self._ahead, self.trainee.program, executor, extra)

    def _resume(self) -> None:
        assert self._checkpoints is not None
        with self._state() as executor:
            extra = self._checkpoints.restore(self.trainee.program, executor)
        if extra is None:
            self.say(f"{self._checkpoints.folder} has no checkpoint yet: training begins at epoch 1")
            return
        self.epochs = [Epoch(*e) for e in extra.get("epochs", ())]
        with self._state() as executor:
            there = from_first(executor, "look for the model", self.how.output.exists)
            self._ahead = (from_first(executor, "look for checkpoints", self._checkpoints.latest) or 0) - len(self.epochs)
        self._first, why_not = self._comparable(extra, there)
        before: Mapping[str, Any] = extra.get("options", {})
        other = [
            f"--{n.replace('_', '-')} {_option(before[n])}, now {_option(v)}" for n, v in self.how.options.items() if before.get(n, v) != v
        ]
        if other:
            self.say(f"these options differ from those of the checkpoint, so the results will: {'; '.join(other)}")
        lost = f"; {why_not}, so the best epoch is chosen from the others" if why_not and self.held else ""
        self.say(f"continues after epoch {len(self.epochs)}, from {self._checkpoints.folder}{lost}")

    def _comparable(self, extra: Mapping[str, Any], there: bool) -> tuple[int, str]:
        """The first epoch that may be the best, and why none of the checkpoint's may be, or ""."""
        if not there:
            return len(self.epochs), f"{self.how.output} is not there"
        first = max([extra.get("first", 0), *(k for k, e in enumerate(self.epochs, 1) if e.val_loss is None)])
        if first == len(self.epochs):
            return first, "its last epoch was not validated"
        if self.held is not None:
            self._check_metric(extra, self.epochs[first:])
        return first, ""

    def _check_metric(self, extra: Mapping[str, Any], epochs: Sequence[Epoch]) -> None:
        """Raise OnnxError if the file has the best epoch by another metric: the next one would replace it."""
        lacking = any(self.monitored != "loss" and self.monitored not in e.val_scores for e in epochs)
        before = extra.get("monitored") or ("another metric" if lacking else self.monitored)
        if before == self.monitored:
            return
        assert self._checkpoints is not None
        again = "without --metric" if before == "loss" else f"with --metric {'NAME' if before == 'another metric' else before}"
        raise OnnxError(
            f"{self.how.output} has the best epoch by {before}, as the training in {self._checkpoints.folder} chose it, and now "
            f"{self.monitored} is to choose; continue {again}, or give another -o FILE for the best of the epochs that come"
        )

    def _state(self) -> _StateHolder:
        return _StateHolder(self.exe)


class _StateHolder(ExitStack):
    """A context that gives the executor whose state a checkpoint has: None, for the global scope, on one device."""

    def __init__(self, exe: Any):
        super().__init__()
        self.exe = exe

    def __enter__(self) -> Any:
        super().__enter__()
        if not isinstance(self.exe, OneDeviceTrainer):
            return self.exe
        self.enter_context(scope_guard(self.exe.scope))
        return None
