"""The `fluidx` command: demo, run, trace, show, diff, verify, onnx, ops, doctor, env."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import click

from . import __version__
from .ir.errors import FluidxError, ProgramError

_DEMO = ("data_parallel", "zero1", "zero2", "zero3", "fsdp", "ring_optimizer", "reduce_broadcast")  # results as on one device
_LOSSES = ("softmax_with_cross_entropy", "square_error_cost", "sigmoid_cross_entropy_with_logits")
_SCHEDULES = ("cosine", "linear", "constant")
_STRATEGIES = (*_DEMO, "micro_batches", "pipeline", "rails", "parameter_server", "reduction_servers", "replicas")
_BACKENDS = ("threads", "processes", "mpi", "nccl")
_readable = click.Path(exists=True, dir_okay=False, path_type=Path)
_script = click.Path(exists=True, dir_okay=False)
_folder = click.Path(file_okay=False, path_type=Path)


class _RankCount(click.ParamType):
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
        return Mesh(**{name: int(size) for name, _, size in axes})


class _Shapes(click.ParamType):
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


class _OpenShapes(_Shapes):
    """Shapes of inputs, with ? for an open axis: image=?x3x224x224."""

    open_sizes = True


class _Rate(click.FloatRange):
    """A learning rate: a finite number above 0."""

    def __init__(self) -> None:
        super().__init__(0, math.inf, min_open=True, max_open=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        found = super().convert(value, param, ctx)
        return self.fail(f"{value!r} is not a learning rate", param, ctx) if math.isnan(found) else found


def _script_or_module(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return value if ctx.params["module"] else str(_script.convert(value, param, ctx))


_NAMED = "this strategy, package.module:function of your own, or a text with options and rewrites: zero1{bucket_mb=4},join_attention"


class _Strategies(click.Choice):
    """The name of a strategy, "package.module:function" of one that stands in the current folder or is installed, or a pipeline's text."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if set(":{,").isdisjoint(value):
            return super().convert(value, param, ctx)
        if "" not in sys.path:
            sys.path.insert(0, "")  # as with `python -m`
        return value


class _Group(click.Group):
    """FluidxErrors are printed as one message, with exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FluidxError as e:
            if ctx.invoked_subcommand in ("run", "trace"):
                raise  # an error of the user's script: its traceback shows the line
            raise click.ClickException(str(e)) from None


@click.group(name="fluidx", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fluidx")
def main() -> None:
    """Transpile, prove, run: turn a program for one device into one program for each rank."""


@main.command()
@click.option("-n", "--ranks", type=click.IntRange(1, 64), default=4, show_default=True, help="How many CPU ranks train.")
@click.option("--epochs", type=click.IntRange(1), default=5, show_default=True, help="Passes over the data.")
@click.option("--strategy", type=click.Choice(_DEMO), default="ring_optimizer", show_default=True, help="How to distribute.")
@click.option("--backend", type=click.Choice(_BACKENDS[:2]), default="threads", show_default=True, help="How ranks run.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the program for one device to this file, as text.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a drawing of the program before and after.")
def demo(ranks: int, epochs: int, strategy: str, backend: str, save: Path | None, svg: Path | None) -> None:
    """Train a digits classifier on one device and on several ranks, and show what each step does."""
    from .demo import run

    os.environ.setdefault("FLUIDX_SEED", "0")  # the same picture each time
    run(ranks, epochs, strategy, svg, backend, save)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(1), help="How many ranks [PET_NPROC_PER_NODE, which Kubernetes sets].")
@click.option("--backend", type=click.Choice(_BACKENDS), default="threads", show_default=True, help="How ranks run.")
@click.option("--hosts", type=_readable, help="With --backend mpi or nccl: a file of mpirun that lists the hosts, one on each line.")
@click.option("--restarts", type=click.IntRange(0), default=0, show_default=True, help="Restart all ranks after a failure, this often.")
@click.option("--elastic", is_flag=True, help="Restart without the ranks that failed; the global batch stays the same.")
@click.option("--min-ranks", type=click.IntRange(1), help="Like --elastic, while at least this many ranks are left.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="A rank fails after waiting so many seconds [FLUIDX_TIMEOUT].")
@click.option("--output", type=click.Choice(["rank0", "all"]), default="rank0", show_default=True, help="Show what rank 0 prints, or all.")
@click.option("--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Write the fetched numbers of each run as a line of JSON.")
@click.option("--tensorboard", type=_folder, help="Write the fetched numbers into this folder, for TensorBoard.")
@click.option("--steps", type=click.IntRange(1), help="The total number of steps; the terminal then shows the remaining time.")
@click.option("-m", "--module", is_flag=True, is_eager=True, help="SCRIPT is the name of a module, as for python -m.")
@click.argument("script", callback=_script_or_module)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None, backend: str, hosts: Path | None, restarts: int, elastic: bool, min_ranks: int | None, timeout: float | None,
    output: str, metrics: Path | None, tensorboard: Path | None, steps: int | None, module: bool, script: str, args: tuple[str, ...],
) -> None:  # fmt: skip
    """Run SCRIPT on several ranks. A ParallelExecutor without places uses these ranks.

    With threads the script runs once, and ranks are threads of its process. With processes, mpi and nccl every rank is a process that runs
    the whole script; with nccl each has a GPU. Options come before SCRIPT; everything after it is passed to the script.
    """
    from .launch import command

    ranks = ranks or command.ranks_here()
    if ranks is None:
        raise click.UsageError("give the number of ranks with -n, before SCRIPT")
    say, least, everything = partial(click.echo, err=True), min_ranks or (1 if elastic else None), output == "all"
    try:
        status = command.run(
            script, args, ranks, backend, hosts, restarts, timeout, everything, metrics, say, least, steps, tensorboard, module
        )  # fmt: skip
    except command.OptionError as e:
        raise click.UsageError(str(e)) from None
    except KeyboardInterrupt:  # if ranks are threads, or are not started yet
        say("fluidx run: interrupted by SIGINT")
        status = 128 + signal.SIGINT
    raise SystemExit(status)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), default="trace.json", help="Timeline file [trace.json].")
@click.option("--steps", type=click.IntRange(1), help="Measure only this many runs of each program, the first ones.")
@click.option("-n", "--ranks", type=click.IntRange(1), help="How many ranks; with threads, the default of fx.cpu_places().")
@click.option("--backend", type=click.Choice(_BACKENDS[:3]), default="threads", show_default=True, help="How ranks run.")
@click.option("--by", type=click.Choice(["op", "operator"]), default="op", show_default=True, help="Lines: operator types, or operators.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of lines in the table.")
@click.argument("script", type=_script)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def trace(
    output: Path, steps: int | None, ranks: int | None, backend: str, by: str, limit: int, script: str, args: tuple[str, ...]
) -> None:
    """Run SCRIPT with the profiler: print the operators that take most time, and write a timeline for https://ui.perfetto.dev.

    Options come before SCRIPT; everything after it is passed to the script.
    """
    from .launch import command, trace

    if not output.resolve().parent.is_dir():
        raise click.UsageError(f"cannot write {output}: the folder {output.resolve().parent} does not exist")
    try:
        status = trace.trace(script, args, ranks, backend, partial(click.echo, err=True), str(output), steps, by, limit)
    except command.OptionError as e:
        raise click.UsageError(str(e)) from None
    except trace.TraceError as e:
        raise click.ClickException(str(e)) from None
    raise SystemExit(status)


def _read(*paths: str) -> list[Any]:
    """A program, or a pair with startup, from each text or JSON file. Constants stored next to one file serve all."""
    from .files.program_text import constants_beside

    constants = {digest: a for path in paths for digest, a in constants_beside(path).items()}
    return [_parsed(path, constants) for path in paths]


def _parsed(path: str, constants: Any) -> Any:
    from . import ops  # noqa: F401  (fills the op registry)
    from .ir.jsonform import from_json
    from .ir.parser import parse_any

    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            return from_json(json.loads(text), constants)
        return parse_any(text, constants)
    except UnicodeDecodeError as e:
        raise click.ClickException(f"{path} is not a program: byte {e.start} is not UTF-8 text") from None
    except (json.JSONDecodeError, ProgramError) as e:
        raise click.ClickException(f"{path} is not a program: {e}") from None
    except OSError as e:
        raise click.ClickException(f"cannot read {path}: {e.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise click.ClickException(f"cannot write {path}: {e.strerror}") from None
    click.echo(f"wrote {path}")


def _main_of(program: Any) -> Any:
    return getattr(program, "main", program)


_file = click.argument("file", type=click.Path(exists=True, dir_okay=False))


@main.command()
@_file
@click.option("--json", "as_json", is_flag=True, help="Print the JSON form.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a drawing to this file instead.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page to browse the program; any size.")
@click.option("--fluid-names", is_flag=True, help="Print collectives with fluid's names.")
@click.option("--strategy", type=_Strategies(_STRATEGIES), help=f"Transpile first, with {_NAMED} (FILE needs main and startup).")
@click.option(
    "-n", "--ranks", type=_RankCount(), default=4, show_default=True, help="Ranks for --strategy: a number, or a mesh: dp=2,tp=2."
)
@click.option("--rank", type=click.IntRange(0), help="With --strategy: print the program of this rank.")
@click.option("--plan", "as_plan", is_flag=True, help="Print the plan of a run: steps, kernels, memory, bytes, operations.")
@click.option("--feed", type=_Shapes(), help="With --plan: shapes of feeds, image=60x64,label=60x1.")
@click.option("--batch", type=click.IntRange(0), help="With --plan: the size of axis 0 of all other feeds.")
@click.option("--fetch", help="With --plan: the fetched variables, a,b. Default: all that no operator reads.")
def show(
    file: str, as_json: bool, svg: Path | None, html: Path | None, fluid_names: bool, strategy: str | None, ranks: Any, rank: int | None,
    as_plan: bool, feed: Any, batch: int | None, fetch: str | None,
) -> None:  # fmt: skip
    """Print the program in FILE: as it is, transpiled with a strategy, or as the plan of a run."""
    from .ir import ProgramPair

    _check_overwrites(svg, file)
    _check_overwrites(html, file)
    (program,) = _read(file)
    page = program
    if strategy is not None:
        t = page = _transpiled(program, file, strategy, ranks)
        program = t.pair if rank is None else ProgramPair(t.get_trainer_program(rank), t.get_startup_program(rank))
    elif rank is not None:
        raise click.UsageError("--rank selects one of the programs that --strategy makes; give --strategy too")
    if not as_plan and (feed is not None or batch is not None or fetch is not None):
        raise click.UsageError("--feed, --batch and --fetch are options of --plan; give --plan too")
    if as_plan:
        click.echo(_plan(_main_of(program), feed, batch, fetch))
    elif as_json:
        from .ir.jsonform import to_json

        click.echo(json.dumps(to_json(_main_of(program)), indent=1))
    elif svg is not None:
        from .view import draw

        _write(svg, draw(program))
    elif html is not None:
        from .view import html as written

        _write(html, written(program if rank is not None else page))
    else:
        click.echo((_main_of(program).to_string(fluid_names=True) if fluid_names else str(program)).rstrip("\n"))


def _plan(program: Any, feed: Any, batch: int | None, fetch: str | None) -> str:
    """The plan as text, with its cost below."""
    from .executor.plan.cost import total
    from .executor.plan.dry_run import dry_plan
    from .ir.errors import FeedError

    if program.rank is None and program.world_size > 1:
        raise click.ClickException("this is a program for all ranks, and a plan is for one rank; give --rank")
    try:
        planned = dry_plan(program, feed, batch, fetch.split(",") if fetch else None)
    except FeedError as e:
        raise click.ClickException(f"{e}\n  give shapes with --feed NAME=8x12,NAME=8x1, and other batch sizes with --batch 8") from None
    cost = total([planned.cost(step) for step in planned.all_steps()])
    more = "; each sub-block counted once" if planned.bodies else ""
    return f"{planned}\ncost: {cost.flops} operations, {cost.read} bytes read, {cost.written} written{more}"


def _transpiled(program: Any, file: str, strategy: str, ranks: Any) -> Any:
    from .transpiler import DistributeTranspiler, strategies

    if not hasattr(program, "startup"):
        raise click.ClickException(f"{file} has no startup section; write both with fx.io.save_text(fx.ProgramPair(main, startup), FILE)")
    t = DistributeTranspiler(strategies.get(strategy))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        t.transpile(program=program.main, startup_program=program.startup, trainers=ranks)
    for w in found:
        click.echo(f"Warning: {w.message}", err=True)
    return t


@main.command()
@click.argument("before", type=click.Path(exists=True, dir_okay=False))
@click.argument("after", type=click.Path(exists=True, dir_okay=False))
def diff(before: str, after: str) -> None:
    """Show what changed between two program files."""
    from .view import diff as difference

    old, new = _read(before, after)
    click.echo(str(difference(old, new, names=(before, after))))


@main.command()
@_file
@click.argument("rank_files", type=click.Path(exists=True, dir_okay=False), nargs=-1)
@click.option("--strategy", type=_Strategies(_STRATEGIES), help=f"Transpile with {_NAMED}, and verify all rank programs.")
@click.option(
    "-n", "--ranks", type=_RankCount(), default=4, show_default=True, help="Ranks for --strategy: a number, or a mesh: dp=2,tp=2."
)
def verify(file: str, rank_files: tuple[str, ...], strategy: str | None, ranks: Any) -> None:
    """Check the program in FILE: definitions, types, placements.

    With --strategy, transpile FILE and prove that all rank programs together compute the same as FILE. With RANK_FILES, the programs of all
    ranks in order, prove this for them.
    """
    from .verify import check_program, verify_ranks

    program, *ranked = _read(file, *rank_files)
    if rank_files:
        if strategy is not None:
            raise click.UsageError("--strategy makes rank programs, and RANK_FILES are rank programs; give only one of them")
        pairs = list(zip((file, *rank_files), (program, *ranked), strict=True))
        for path, pair in pairs:
            if not hasattr(pair, "startup"):
                raise click.ClickException(f"{path} has no startup section; fluidx show FILE --strategy ... --rank 0 prints one")
        mains, startups = [p.main for _, p in pairs[1:]], [p.startup for _, p in pairs[1:]]
        click.echo(str(verify_ranks(program, mains, startups)))
        return
    if strategy is not None:
        click.echo(str(_transpiled(program, file, strategy, ranks).verify()))
        return
    parts = [program.main, program.startup] if hasattr(program, "startup") else [program]
    count = sum(check_program(p) for p in parts)
    click.echo(f"{count} operators: all inputs are defined, types and placements follow the rules of the operators")


def _check_overwrites(output: Path | None, *read: str | Path | None) -> None:
    """Refuse an output file that is one of the files that are read."""
    for path in read:
        if output is not None and path is not None and output.exists() and Path(path).exists() and output.samefile(path):
            raise click.UsageError(f"{output} would overwrite {path}, which is read; give the output another name")


def _check_output(output: Path | None, *read: str | Path | None) -> None:
    """Refuse an output file that cannot be written, or that is one of the files that are read, before the work starts."""
    _check_overwrites(output, *read)
    if output is not None and not output.resolve().parent.is_dir():
        raise click.UsageError(f"cannot write {output}: the folder {output.resolve().parent} does not exist")


@main.group()
@click.pass_context
def onnx(ctx: click.Context) -> None:
    """Inspect, check, run and train ONNX models (needs fluidx[onnx])."""
    from .ir.source_location import by_command

    ctx.with_resource(by_command())


@onnx.command(name="info")
@_file
@click.option("--all", "whole", is_flag=True, help="List all weights, even if there are many.")
def onnx_info(file: str, whole: bool) -> None:
    """List inputs, outputs, operators and weights of the model in FILE, and which weights are trained."""
    from .onnx import report

    click.echo(report.info(file, whole))


@onnx.command(name="check")
@_file
@click.option("--shapes", type=_Shapes(), help="Shapes of inputs, image=8x3x224x224, if the program must know them.")
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
@_file
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
    _check_output(output, file, *files.values())
    found = report.run(file, files)
    for name, value in found.items():
        click.echo(report.shown(name, value))
    if output is not None:
        write_arrays(output, found)
        click.echo(f"wrote {output}")


@onnx.command(name="train")
@_file
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="An .npz of inputs and label.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="File for the trained model.")
@click.option("--loss", type=click.Choice(_LOSSES), default=_LOSSES[0], show_default=True, help="The loss function.")
@click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam"]), default="adam", show_default=True, help="The optimizer.")
@click.option("--lr", type=_Rate(), help="The learning rate, at its highest.  [default: 0.003 for adam, 0.01 for the others]")
@click.option("--schedule", type=click.Choice(_SCHEDULES), default=_SCHEDULES[0], show_default=True, help="How the rate falls to 0.")
@click.option("--warmup", type=click.IntRange(0), default=0, help="Steps in which the rate rises first.")
@click.option("--weight-decay", type=click.FloatRange(0, 1), default=0.0, help="Of weights with two axes and more; AdamW with adam.")
@click.option("-n", "--ranks", type=_RankCount(), default=1, show_default=True, help="How many CPU ranks train.")
@click.option("--backend", type=click.Choice(_BACKENDS[:2]), default="threads", show_default=True, help="How ranks run.")
@click.option("--strategy", type=click.Choice(_DEMO), default="data_parallel", show_default=True, help="How to distribute.")
@click.option("--epochs", type=click.IntRange(1), default=10, show_default=True, help="Passes over the data.")
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Examples in each step, over all ranks.")
@click.option("--val", type=_readable, help="Arrays as in --data, which are not trained on: their loss and accuracy are said.")
@click.option("--val-split", type=click.FloatRange(0, 1, max_open=True), default=0.0, help="The share of --data to hold back for that.")
@click.option("--freeze", multiple=True, help="Do not train these parameters (name or pattern: 'layer1.*'). Can be repeated.")
@click.option("--also-train", multiple=True, help="Train these constants too (name or pattern); see fluidx onnx info. Can be repeated.")
@click.option("--head", type=click.IntRange(1), help="Replace the last layer by one for this many classes.")
@click.option("--shapes", type=_OpenShapes(), help="Shapes of inputs that replace those of the file: image=?x3x224x224, ? is an open axis.")
@click.option("--seed", type=click.IntRange(0), envvar="FLUIDX_SEED", default=0, show_default=True, help="Of the order and new layers.")
def onnx_train(file: str, data: Path, output: Path, shapes: Any, **options: Any) -> None:
    """Train the model in FILE on several ranks, with proved rank programs, and write the trained ONNX model.

    DATA is an .npz file with an array for each input, under the input's name, and an array called label. Rows are examples.
    """
    from .finetune import Training, train

    _check_output(output, file, data, options["val"])
    if options["val"] and options["val_split"]:
        raise click.UsageError("--val and --val-split are two ways to say the same; give one of them")
    if isinstance(options["ranks"], int) and options["ranks"] > options["batch"]:
        raise click.UsageError(f"--ranks {options['ranks']} are more than the {options['batch']} examples of --batch")
    os.environ["FLUIDX_SEED"] = str(options["seed"])
    train(file, data, Training(shapes=shapes or {}, **options), output, click.echo)


@main.command()
@click.argument("name", required=False)
def ops(name: str | None) -> None:
    """List the operators, or describe the operator NAME."""
    import inspect

    from . import ops as _ops  # noqa: F401
    from .ir.opdef import OPS, opdef
    from .view import patterns

    if name is None:
        width = max(map(len, OPS))
        for key in sorted(OPS):
            click.echo(f"{key:{width}}  {OPS[key].summary()}")
        return
    d = opdef(name)
    click.echo(f"{d.name}({', '.join(d.inputs)}) -> {', '.join(d.outputs) or 'nothing'}")
    for attr, default in d.attrs.items():
        click.echo(f"  {attr} = {default!r}")
    click.echo()
    click.echo(inspect.getdoc(d))
    if lines := patterns(d):
        click.echo("\nWhat it reads and writes (docs/placements.md):")
        for line in lines:
            click.echo(f"  {line}")


@main.command()
def env() -> None:
    """List the environment variables that fluidx reads."""
    from .config import describe

    for row in describe():
        click.echo(f"{row.name} ({row.accepts}; default {row.default or 'unset'})\n    {row.doc}")


@main.command()
@click.option("--measure", is_flag=True, help="Also measure the speed limits of this machine, with a matrix product and a copy.")
def doctor(measure: bool) -> None:
    """Report what this machine has: Python, NumPy, C kernels, GPUs, MPI, and the FLUIDX variables that are set."""
    from .doctor import report

    for line in report(measure=measure):
        click.echo(line)


if __name__ == "__main__":
    main(prog_name="fluidx")
