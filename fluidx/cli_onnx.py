"""The command `fluidx onnx`: inspect, check, run and train ONNX models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from .cli_options import BACKENDS, SAME_AS_ONE_DEVICE, LearningRate, OpenShapes, RankCount, Shapes, check_output, program_file, readable

_LOSSES = ("softmax_with_cross_entropy", "square_error_cost", "sigmoid_cross_entropy_with_logits")
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
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="An .npz of inputs and label.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File for the trained model; with --lora, see below.")
@click.option("--loss", type=click.Choice(_LOSSES), default=_LOSSES[0], show_default=True, help="The loss function.")
@click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam"]), default="adam", show_default=True, help="The optimizer.")
@click.option("--lr", type=LearningRate(), help="The learning rate, at its highest.  [default: 0.003 for adam, 0.01 for the others]")
@click.option("--schedule", type=click.Choice(_SCHEDULES), default=_SCHEDULES[0], show_default=True, help="How the rate falls to 0.")
@click.option("--warmup", type=click.IntRange(0), default=0, help="Steps in which the rate rises first.")
@click.option("--weight-decay", type=click.FloatRange(0, 1), default=0.0, help="Of weights with two axes and more; AdamW with adam.")
@click.option("-n", "--ranks", type=RankCount(), default=1, show_default=True, help="How many CPU ranks train.")
@click.option("--backend", type=click.Choice(BACKENDS[:2]), default="threads", show_default=True, help="How ranks run.")
@click.option("--strategy", type=click.Choice(SAME_AS_ONE_DEVICE), default="data_parallel", show_default=True, help="How to distribute.")
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes over the data.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples in each step, over all ranks.")
@click.option("--val", type=readable, help="Arrays as in --data, for validation: not trained on, their loss and accuracy are printed.")
@click.option("--val-split", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="The share of --data to hold back for that.")
@click.option("--freeze", multiple=True, help="Do not train these parameters (name or pattern: 'layer1.*'). Can be repeated.")
@click.option("--also-train", multiple=True, help="Train these constants too (name or pattern); see fluidx onnx info. Can be repeated.")
@click.option("--untie", multiple=True, help="Give each node its own copy of these shared weights (name or pattern). Can be repeated.")
@click.option("--lora", type=click.IntRange(1), help="Train only adapters of this rank, beside the products with weights (LoRA).")
@click.option("--target", multiple=True, help="Modules to adapt: q,v, or a pattern. Can be repeated.  [default: all-linear]")
@click.option("--lora-alpha", type=click.FloatRange(0, min_open=True), default=16.0, show_default=True, help="Adapters count alpha/rank.")
@click.option("--lora-dropout", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="The rate of dropout before adapters.")
@click.option("--head", type=click.IntRange(1), help="Replace the last layer by one for this many classes.")
@click.option("--shapes", type=OpenShapes(), help="Shapes of inputs that replace those of the file: image=?x3x224x224, ? is an open axis.")
@click.option("--seed", type=click.IntRange(0), envvar="FLUIDX_SEED", default=0, show_default=True, help="Of the order and new layers.")
def onnx_train(file: str, data: Path, output: Path, shapes: Any, **options: Any) -> None:
    """Train the model in FILE on several ranks, with proved rank programs, and write the trained ONNX model.

    DATA is an .npz file with an array for each input, under the input's name, and an array called label. Rows are examples.

    With --lora, an output that ends in .onnx is the model with the adapters added to its weights; any other is a folder for the adapters
    alone, as PEFT writes them, which `fluidx onnx merge` adds to a model.
    """
    from .finetune import Training, train

    options["target"] = tuple(t for given in options["target"] for t in given.split(","))
    if options["lora"] is None and options["target"]:
        raise click.UsageError("--target chooses what --lora adapts; give --lora RANK, such as --lora 8")
    if output.is_dir() and (options["lora"] is None or output.suffix == ".onnx"):
        raise click.UsageError(f"cannot write {output}: it is a folder")
    check_output(output, file, data, options["val"])
    if options["val"] and options["val_split"]:
        raise click.UsageError("--val and --val-split both choose validation examples; give only one of them")
    if isinstance(options["ranks"], int) and options["ranks"] > options["batch"]:
        raise click.UsageError(f"--ranks {options['ranks']} are more than the {options['batch']} examples of --batch")
    os.environ["FLUIDX_SEED"] = str(options["seed"])
    train(file, data, Training(shapes=shapes or {}, **options), output, click.echo)


@onnx.command(name="merge")
@program_file
@click.argument("adapters", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File for the merged model.")
def onnx_merge(file: str, adapters: Path, output: Path) -> None:
    """Add the ADAPTERS in a folder, as `fluidx onnx train --lora` or PEFT writes them, to the weights of the model in FILE."""
    from .onnx import merge

    check_output(output, file)
    count = merge(file, adapters, output)
    click.echo(f"wrote {output}: {count} weights changed")
