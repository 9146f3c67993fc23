"""The command `fluidx onnx`: inspect, check, run and train ONNX models."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from .cli_options import (
    BACKENDS,
    SAME_AS_ONE_DEVICE,
    ClassWeights,
    ExampleSource,
    LearningRate,
    LossName,
    OpenShapes,
    RankCount,
    Shapes,
    check_output,
    folder,
    program_file,
)

_METRICS = ("accuracy", "f1", "precision", "recall", "auc", "perplexity", "mae", "mse", "rmse", "r2")
_OBSERVERS = ("min_max", "moving_average", "percentile")
_SCHEDULES = ("cosine", "linear", "constant")


@click.group()
@click.pass_context
def onnx(ctx: click.Context) -> None:
    """Inspect, check, run and train ONNX models (needs fluidx[onnx])."""
    from .ir.source_location import by_command

    ctx.with_resource(by_command())


@onnx.command(name="info")
@program_file
@click.option("--all", "whole", is_flag=True, help="List all weights, even if there are many.")
def onnx_info(file: str, whole: bool) -> None:
    """List inputs, outputs, operators and weights of the model in FILE, and which weights are trained."""
    from .onnx import report

    click.echo(report.info(file, whole))


@onnx.command(name="check")
@program_file
@click.option("--shapes", type=Shapes(), help="Shapes of inputs, image=8x3x224x224, if the program must know them.")
def onnx_check(file: str, shapes: Any) -> None:
    """Report whether fluidx can run and train the model in FILE, and list every node that it does not support."""
    from .onnx import report

    click.echo(report.check(file, shapes))


@onnx.command(name="ops")
@click.option("--domain", help="Only this domain: ai.onnx, ai.onnx.ml, com.microsoft, ...")
def onnx_ops(domain: str | None) -> None:
    """List the ONNX operators that fluidx supports: domain, name, how each is implemented, versions."""
    from .onnx import report

    click.echo(report.operators(domain))


@onnx.command(name="run")
@program_file
@click.option("-i", "--input", "inputs", multiple=True, help="NAME=FILE.npy, once for each input; an .npz file for a sequence.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write all outputs to this .npz file.")
def onnx_run(file: str, inputs: tuple[str, ...], output: Path | None) -> None:
    """Run the model in FILE on arrays from files, and print the outputs or write them to a file."""
    from .onnx import report
    from .onnx.arrays import write_arrays

    given = [part.partition("=") for part in inputs]
    if wrong := next((part for part, (name, sign, path) in zip(inputs, given) if not (name and sign and path)), None):
        raise click.UsageError(f"{wrong!r} is not an input; give NAME=FILE.npy")
    names = [name for name, _, _ in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise click.UsageError(f"input {twice!r} is given twice")
    files = {name: Path(path) for name, _, path in given}
    check_output(output, file, *files.values())
    found = report.run(file, files)
    for name, value in found.items():
        click.echo(report.shown(name, value))
    if output is not None:
        write_arrays(output, found)
        click.echo(f"wrote {output}")


@onnx.command(name="train")
@program_file
@click.option("--data", type=ExampleSource(), required=True, help="Examples: .npz, folder of .npy, .csv, .parquet or module:function.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File for the trained model; with --lora, see below.")
@click.option("--label", default="label", show_default=True, help="The name of the array or column of labels.")
@click.option("--columns", multiple=True, help="Columns of a table for an input: x=width,height or x='pixel*'. Can be repeated.")
@click.option("--pad", multiple=True, help="Number that pads shorter examples of an input: ids=50256. Can be repeated.  [default: 0]")
@click.option("--pad-to-multiple-of", type=click.IntRange(1), default=1, help="Pad to a length that is a multiple of this number.")
@click.option("--standardize", is_flag=True, help="Let the model subtract means of columns and divide by their deviations.")
@click.option("--scores", help="The output that the loss takes, if the model has several.  [default: the only one of floats]")
@click.option("--loss", type=LossName(), default="softmax_with_cross_entropy", show_default=True, help="The loss function.")
@click.option("--class-weight", type=ClassWeights(), help="How much each class counts: 1,2,0.5, or balanced.")
@click.option("--pos-weight", type=ClassWeights(), help="Weight of the label 1: 3, a number for each output, or balanced.")
@click.option("--label-smoothing", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="Share of a label that all classes get.")
@click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam"]), default="adam", show_default=True, help="The optimizer.")
@click.option("--lr", type=LearningRate(), help="The learning rate, at its highest.  [default: 0.003 for adam, 0.01 for the others]")
@click.option("--schedule", type=click.Choice(_SCHEDULES), default=_SCHEDULES[0], show_default=True, help="How the rate falls to 0.")
@click.option("--warmup", type=click.IntRange(0), default=0, help="Steps in which the rate rises first.")
@click.option("--weight-decay", type=click.FloatRange(0, 1), default=0.0, help="Of weights with two axes and more; AdamW with adam.")
@click.option("-n", "--ranks", type=RankCount(), default=1, show_default=True, help="How many CPU ranks train.")
@click.option("--backend", type=click.Choice(BACKENDS[:3]), default="threads", show_default=True, help="How ranks run.")
@click.option("--strategy", type=click.Choice(SAME_AS_ONE_DEVICE), default="data_parallel", show_default=True, help="How to distribute.")
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes over the data.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples in each step, over all ranks.")
@click.option("--steps", type=click.IntRange(1), help="Batches in an epoch, if --data is a function whose result has no len().")
@click.option("--accumulate", type=click.IntRange(1), default=1, help="Compute each batch in so many parts and add their gradients.")
@click.option("--precision", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of matrix products.  [default: the file's]")
@click.option("--val", type=ExampleSource(), help="Examples as in --data, for validation after each epoch; not trained on.")
@click.option("--val-split", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="The share of --data to hold back for that.")
@click.option("--metric", type=click.Choice(_METRICS), help="What is measured on them and decides which epoch is written.  [default: loss]")
@click.option("--patience", type=click.IntRange(1), help="Stop after so many epochs in a row that are no better than the best one.")
@click.option("--checkpoints", type=folder, help="Write a checkpoint into this folder after each epoch; the newest 3 are kept.")
@click.option("--resume", is_flag=True, help="Continue from the newest checkpoint in --checkpoints.")
@click.option("--curve", type=click.Path(dir_okay=False, path_type=Path), help="Draw losses and scores: curve.png (needs matplotlib).")
@click.option("--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Write the loss of each step as a line of JSON.")
@click.option("--tensorboard", type=folder, help="Write the losses into this folder, for TensorBoard.")
@click.option("--freeze", multiple=True, help="Do not train these parameters (name or pattern: 'layer1.*'). Can be repeated.")
@click.option("--also-train", multiple=True, help="Train these constants too (name or pattern); see fluidx onnx info. Can be repeated.")
@click.option("--untie", multiple=True, help="Give each node its own copy of these shared weights (name or pattern). Can be repeated.")
@click.option("--lora", type=click.IntRange(1), help="Train only adapters of this rank, beside the products with weights (LoRA).")
@click.option("--target", multiple=True, help="Modules to adapt: q,v, or a pattern. Can be repeated.  [default: all-linear]")
@click.option("--lora-alpha", type=click.FloatRange(0, min_open=True), default=16.0, show_default=True, help="Adapters count alpha/rank.")
@click.option("--lora-dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="The rate of dropout before adapters.")
@click.option("--lora-base", type=click.Choice(["int8", "int4"]), help="Store frozen weights as integers while adapters are trained.")
@click.option("--quantize", is_flag=True, help="Train for 8-bit integers, and write QuantizeLinear and int8 weights.")
@click.option("--head", type=click.IntRange(1), help="Replace the last layer by one for this many classes.")
@click.option("--shapes", type=OpenShapes(), help="Shapes of inputs that replace those of the file: image=?x3x224x224, ? is an open axis.")
@click.option("--seed", type=click.IntRange(0), envvar="FLUIDX_SEED", default=0, show_default=True, help="Of the order and new layers.")
def onnx_train(
    file: str, data: str, output: Path, shapes: Any, columns: tuple[str, ...], pad: tuple[str, ...], **options: Any
) -> None:  # fmt: skip
    """Train the model in FILE on several ranks, with proved rank programs, and write the trained ONNX model.

    DATA is an .npz file, or a folder of .npy files, with an array for each input, under the input's name, and an array called label. Rows
    are examples. In a table (.csv, .tsv, .parquet) an input is the columns of its name, x or x.0, x.1, ...; the columns that are left are
    the one input without any. MODULE:FUNCTION returns batches, dicts of such arrays.

    With validation examples (--val, --val-split) the best epoch is written, else the last one.

    With --lora, an output that ends in .onnx is the model with the adapters added to its weights, or beside them as nodes if these are
    quantized (MatMulNBits); any other is a folder for the adapters alone, as PEFT writes them, which `fluidx onnx merge` adds to a model.
    """
    from .finetune import Training, train

    options["target"] = tuple(t for given in options["target"] for t in given.split(","))
    if output.is_dir() and (options["lora"] is None or output.suffix == ".onnx"):
        raise click.UsageError(f"cannot write {output}: it is a folder")
    check_output(output, file, data, options["val"], options["curve"], options["metrics"])
    check_output(options["curve"], file, data)
    _check_together(options, output)
    if options["backend"] == "mpi" and (status := _launched_by_mpi(options["ranks"])) is not None:
        raise SystemExit(status)
    os.environ["FLUIDX_SEED"] = str(options["seed"])
    how = Training(shapes=shapes or {}, columns=_columns(columns), pad=_pads(pad), **options)
    train(file, data, how, output, click.echo)


def _check_together(options: dict[str, Any], output: Path) -> None:
    """Refuse options that exclude or need each other."""
    is_validated = options["val"] or options["val_split"]
    if options["val"] and options["val_split"]:
        raise click.UsageError("--val and --val-split both choose validation examples; give only one of them")
    if isinstance(options["ranks"], int) and options["ranks"] > options["batch"]:
        raise click.UsageError(f"--ranks {options['ranks']} are more than the {options['batch']} examples of --batch")
    if options["accumulate"] > options["batch"]:
        raise click.UsageError(f"--accumulate {options['accumulate']} are more parts than the {options['batch']} examples of --batch")
    for name in ("metric", "patience"):
        if options[name] is not None and not is_validated:
            raise click.UsageError(f"--{name} needs validation examples; give --val-split 0.1, or --val FILE")
    if options["lora"] is None and options["target"]:
        raise click.UsageError("--target chooses what --lora adapts; give --lora RANK, such as --lora 8")
    if options["lora"] is None and options["lora_base"]:
        raise click.UsageError("--lora-base is for training adapters; give --lora RANK too, such as --lora 8")
    if options["lora_base"] and output.suffix == ".onnx":
        raise click.UsageError("--lora-base has no float weights to merge with; give -o FOLDER, and then run fluidx onnx merge")
    if options["lora"] is not None and options["quantize"]:
        raise click.UsageError("--lora keeps the weights that --quantize would train; give one, merge, and then train with the other")
    if options["resume"] and options["checkpoints"] is None:
        raise click.UsageError("--resume needs --checkpoints FOLDER, from which it continues")


def _columns(given: tuple[str, ...]) -> dict[str, list[str]]:
    """Columns by the input that they make."""
    found: dict[str, list[str]] = {}
    for text in given:
        name, sign, columns = text.partition("=")
        if not (name and sign and columns):
            raise click.UsageError(f"--columns {text!r} does not say which columns make which input; write --columns x=width,height")
        found.setdefault(name, []).extend(c.strip() for c in columns.split(","))
    return found


def _pads(given: tuple[str, ...]) -> dict[str, float]:
    """The number that pads each input."""
    found: dict[str, float] = {}
    for text in given:
        name, sign, number = text.partition("=")
        if name in found:
            raise click.UsageError(f"--pad gives input {name!r} two numbers, {found[name]} and {number}; give one")
        try:
            found[name] = int(number) if number.lstrip("+-").isdigit() else float(number)
        except ValueError:
            name = ""
        if not (name and sign):
            raise click.UsageError(f"--pad {text!r} must be INPUT=NUMBER; write --pad ids=0")
    return found


def _launched_by_mpi(ranks: int) -> int | None:
    """Run this command on ranks that mpirun starts, and return the exit status; None in a process of such a rank."""
    import sys

    from .executor.launched_alone import launched_as
    from .launch.command import run

    if launched_as() is not None:
        return None
    arguments = sys.argv[1:] if sys.argv[1:2] == ["onnx"] else ["onnx", *sys.argv[2:]]
    say = partial(click.echo, err=True)
    return run("fluidx", arguments, ranks, "mpi", None, 0, None, False, None, say, module=True)


@onnx.command(name="quantize")
@program_file
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Examples to observe: .npz, or a folder of .npy.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File for the quantized model.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Examples in a batch.")
@click.option("--batches", type=click.IntRange(1), default=10, show_default=True, help="How many batches are observed, at most.")
@click.option("--observer", type=click.Choice(_OBSERVERS), default="min_max", show_default=True, help="How the range of a value is found.")
@click.option("--skip", multiple=True, help="Weights or values that stay as they are (name or pattern). Can be repeated.")
def onnx_quantize(file: str, data: Path, output: Path, **options: Any) -> None:
    """Quantize the trained model in FILE to 8-bit integers, in the ranges that its values have on DATA: an array for each input."""
    from .finetune import quantize_file

    check_output(output, file, str(data))
    count, batches = quantize_file(file, data, output, **options)
    click.echo(f"{output}: {count} weights and values are rounded to 8 bits, in the ranges of {batches} batch{'es' * (batches != 1)}")


@onnx.command(name="merge")
@program_file
@click.argument("adapters", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File for the merged model.")
@click.option("--untie", multiple=True, help="Give each node its own copy of these shared weights, as when the adapters were trained.")
def onnx_merge(file: str, adapters: Path, output: Path, untie: tuple[str, ...]) -> None:
    """Add the ADAPTERS in a folder, as `fluidx onnx train --lora` or PEFT writes them, to the weights of the model in FILE."""
    from .onnx import merge

    check_output(output, file)
    count = merge(file, adapters, output, untie)
    click.echo(f"wrote {output}: {count} weight{'s' * (count != 1)} changed")
