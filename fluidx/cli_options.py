"""Option types of the `fluidx` command: rank counts, shapes, strategies and files; and checks of output files."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click

SAME_AS_ONE_DEVICE = ("data_parallel", "zero1", "zero2", "zero3", "fsdp", "ring_optimizer", "reduce_broadcast")  # results as on one device
STRATEGIES = (*SAME_AS_ONE_DEVICE, "micro_batches", "pipeline", "rails", "parameter_server", "reduction_servers", "replicas")
BACKENDS = ("threads", "processes", "mpi", "nccl")
readable = click.Path(exists=True, dir_okay=False, path_type=Path)
script_file = click.Path(exists=True, dir_okay=False)
folder = click.Path(file_okay=False, path_type=Path)
program_file = click.argument("file", type=click.Path(exists=True, dir_okay=False))


class RankCount(click.ParamType):
    """A number of ranks, or the axes of a mesh: 4, or dp=2,tp=2."""

    name = "ranks"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from .transpiler import Mesh

        if isinstance(value, int):
            return value
        if value.isdigit() and int(value) > 0:
            return int(value)
        axes = [part.partition("=") for part in value.split(",")]
        if not all(name.isidentifier() and size.isdigit() and int(size) > 0 for name, _, size in axes):
            self.fail(f"{value!r} is neither a number of ranks (1 or more) nor the axes of a mesh (dp=2,tp=2)", param, ctx)
        if len({name for name, _, _ in axes}) < len(axes):
            self.fail(f"{value!r} has an axis twice; give each axis once", param, ctx)
        return Mesh(**{name: int(size) for name, _, size in axes})


class RankCounts(click.ParamType):
    """Numbers of ranks, `least` or more: 2,4."""

    name = "ranks"

    def __init__(self, least: int = 2):
        self.least = least

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        parts = value.split(",")
        if not all(part.isdigit() and int(part) >= self.least for part in parts):
            self.fail(f"{value!r} is not a list of numbers of ranks (2,4), each {self.least} or more", param, ctx)
        return tuple(map(int, parts))


class Shapes(click.ParamType):
    """Shapes of feeds: image=60x64,label=60x1."""

    name = "shapes"
    open_sizes = False  # is "?" allowed as a size?

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, dict):
            return value
        found = {}
        for part in value.split(","):
            name, _, shape = part.strip().rpartition("=")
            sizes = shape.split("x") if shape else []
            if not name or not all(s.isdigit() or self.open_sizes and s == "?" for s in sizes):
                self.fail(f"{part!r} is not the shape of a feed; write image=60x64, or several: image=60x64,label=60x1", param, ctx)
            found[name] = tuple(-1 if s == "?" else int(s) for s in sizes)
        return found


class OpenShapes(Shapes):
    """Shapes of inputs, with ? for an open axis: image=?x3x224x224."""

    open_sizes = True


class LearningRate(click.FloatRange):
    """A learning rate: a finite number above 0."""

    def __init__(self) -> None:
        super().__init__(0, math.inf, min_open=True, max_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        found = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is not a learning rate", param, ctx) if math.isnan(found) else found


class LossName(click.Choice):
    """The name of a loss. A name of another framework is refused with ours."""

    NAMES = (
        "softmax_with_cross_entropy", "token_classification", "causal_language_model", "segmentation",
        "sigmoid_cross_entropy_with_logits", "square_error_cost", "absolute_error", "huber_loss",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__(self.NAMES)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from .onnx.losses import OTHER_NAMES

        if value in OTHER_NAMES:
            self.fail(f"there is no loss {value!r}; did you mean {OTHER_NAMES[value]!r}?", param, ctx)
        return super().convert(value, param, ctx)


class ClassWeights(click.ParamType):
    """Numbers for the classes, 1,2,0.5, or the word balanced."""

    name = "weights"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "balanced" or not isinstance(value, str):
            return value
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            return self.fail(f"{value!r} is neither a number for each class, such as 1,2,0.5, nor balanced", param, ctx)


class ExampleSource(click.ParamType):
    """A file or folder of examples, or package.module:function."""

    name = "data"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = Path(value)
        module, sign, function = value.partition(":")
        if path.exists() or (sign and function.isidentifier() and all(map(str.isidentifier, module.split(".")))):
            return value
        return self.fail(f"{value}: there is no such file or folder; a function is written package.module:function", param, ctx)


STRATEGY_HELP = "this strategy, package.module:function of your own, or a text with options and rewrites: zero1{bucket_mb=4},join_attention"


class StrategyChoice(click.Choice):
    """The name of a strategy, "package.module:function" of one that stands in the current folder or is installed, or a pipeline's text."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if set(":{,").isdisjoint(value):
            return super().convert(value, param, ctx)
        if "" not in sys.path:
            sys.path.insert(0, "")  # as with `python -m`
        return value


def check_overwrites(output: Path | None, *read: str | Path | None) -> None:
    """Refuse an output file that is one of the files that are read."""
    for path in read:
        if output is not None and path is not None and output.exists() and Path(path).exists() and output.samefile(path):
            raise click.UsageError(f"{output} would overwrite {path}, which is read; give the output another name")


def check_output(output: Path | None, *read: str | Path | None) -> None:
    """Refuse an output file that cannot be written, or that is one of the files that are read, before the work starts."""
    check_overwrites(output, *read)
    if output is not None and not output.resolve().parent.is_dir():
        raise click.UsageError(f"cannot write {output}: the folder {output.resolve().parent} does not exist")
