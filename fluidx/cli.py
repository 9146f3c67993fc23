"""The `fluidx` command: demo, run, trace, show, diff, verify, onnx, clusters, calibrate, simulate, plan, bench, ops, doctor, env."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import click

from . import __version__
from .cli_onnx import onnx
from .cli_options import (
    BACKENDS,
    SAME_AS_ONE_DEVICE,
    STRATEGIES,
    STRATEGY_HELP,
    RankCount,
    Shapes,
    StrategyChoice,
    check_overwrites,
    folder,
    program_file,
    readable,
    script_file,
)  # fmt: skip
from .cli_predict import bench, calibrate, clusters, plan, simulate
from .cli_programs import main_of, read, transpiled, write
from .ir.errors import FluidxError


def _script_or_module(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return value if ctx.params["module"] else str(script_file.convert(value, param, ctx))


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
    """Transpile, prove, predict, run: turn a program for one device into one program for each rank."""


@main.command()
@click.option("-n", "--ranks", type=click.IntRange(1, 64), default=4, show_default=True, help="How many CPU ranks train.")
@click.option("--epochs", type=click.IntRange(1), default=5, show_default=True, help="Passes over the data.")
@click.option("--strategy", type=click.Choice(SAME_AS_ONE_DEVICE), default="ring_optimizer", show_default=True, help="How to distribute.")
@click.option("--backend", type=click.Choice(BACKENDS[:2]), default="threads", show_default=True, help="How ranks run.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the program for one device to this file, as text.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a drawing of the program before and after.")
def demo(ranks: int, epochs: int, strategy: str, backend: str, save: Path | None, svg: Path | None) -> None:
    """Train a digits classifier on one device and on several ranks, and show what each step does."""
    from .demo import run

    os.environ.setdefault("FLUIDX_SEED", "0")  # the same picture each time
    run(ranks, epochs, strategy, svg, backend, save)


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(1), help="How many ranks [PET_NPROC_PER_NODE, which Kubernetes sets].")
@click.option("--backend", type=click.Choice(BACKENDS), default="threads", show_default=True, help="How ranks run.")
@click.option("--hosts", type=readable, help="With --backend processes, mpi or nccl: a file that lists the hosts, as mpirun reads it.")
@click.option("--restarts", type=click.IntRange(0), default=0, show_default=True, help="Restart all ranks after a failure, this often.")
@click.option("--elastic", is_flag=True, help="Restart without the ranks that failed; the global batch stays the same.")
@click.option("--min-ranks", type=click.IntRange(1), help="Like --elastic, while at least this many ranks are left.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="A rank fails after waiting so many seconds [FLUIDX_TIMEOUT].")
@click.option("--output", type=click.Choice(["rank0", "all"]), default="rank0", show_default=True, help="Show what rank 0 prints, or all.")
@click.option("--metrics", type=click.Path(dir_okay=False, path_type=Path), help="Write the fetched numbers of each run as a line of JSON.")
@click.option("--tensorboard", type=folder, help="Write the fetched numbers into this folder, for TensorBoard.")
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
@click.option("--backend", type=click.Choice(BACKENDS[:3]), default="threads", show_default=True, help="How ranks run.")
@click.option("--by", type=click.Choice(["op", "operator"]), default="op", show_default=True, help="Lines: operator types, or operators.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of lines in the table.")
@click.argument("script", type=script_file)
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


@main.command()
@program_file
@click.option("--json", "as_json", is_flag=True, help="Print the JSON form.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a drawing to this file instead.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page to browse the program; any size.")
@click.option("--fluid-names", is_flag=True, help="Print collectives with fluid's names.")
@click.option("--strategy", type=StrategyChoice(STRATEGIES), help=f"Transpile first, with {STRATEGY_HELP} (FILE needs main and startup).")
@click.option("-n", "--ranks", type=RankCount(), default=4, show_default=True, help="Ranks for --strategy: a number, or a mesh: dp=2,tp=2.")
@click.option("--rank", type=click.IntRange(0), help="With --strategy: print the program of this rank.")
@click.option("--plan", "as_plan", is_flag=True, help="Print the plan of a run: steps, kernels, memory, bytes, operations.")
@click.option("--feed", type=Shapes(), help="With --plan: shapes of feeds, image=60x64,label=60x1.")
@click.option("--batch", type=click.IntRange(0), help="With --plan: the size of axis 0 of all other feeds.")
@click.option("--fetch", help="With --plan: the fetched variables, a,b. Default: all that no operator reads.")
def show(
    file: str, as_json: bool, svg: Path | None, html: Path | None, fluid_names: bool, strategy: str | None, ranks: Any, rank: int | None,
    as_plan: bool, feed: Any, batch: int | None, fetch: str | None,
) -> None:  # fmt: skip
    """Print the program in FILE: as it is, transpiled with a strategy, or as the plan of a run."""
    from .ir import ProgramPair

    check_overwrites(svg, file)
    check_overwrites(html, file)
    (program,) = read(file)
    page = program
    if strategy is not None:
        t = page = transpiled(program, file, strategy, ranks)
        program = t.pair if rank is None else ProgramPair(t.get_trainer_program(rank), t.get_startup_program(rank))
    elif rank is not None:
        raise click.UsageError("--rank selects one of the programs that --strategy makes; give --strategy too")
    if not as_plan and (feed is not None or batch is not None or fetch is not None):
        raise click.UsageError("--feed, --batch and --fetch are options of --plan; give --plan too")
    if as_plan:
        click.echo(_plan(main_of(program), feed, batch, fetch))
    elif as_json:
        from .ir.jsonform import to_json

        click.echo(json.dumps(to_json(main_of(program)), indent=1))
    elif svg is not None:
        from .view import draw

        write(svg, draw(program))
    elif html is not None:
        from .view import html as written

        write(html, written(program if rank is not None else page))
    else:
        click.echo((main_of(program).to_string(fluid_names=True) if fluid_names else str(program)).rstrip("\n"))


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


@main.command()
@click.argument("before", type=click.Path(exists=True, dir_okay=False))
@click.argument("after", type=click.Path(exists=True, dir_okay=False))
def diff(before: str, after: str) -> None:
    """Show what changed between two program files."""
    from .view import diff as difference

    old, new = read(before, after)
    click.echo(str(difference(old, new, names=(before, after))))


@main.command()
@program_file
@click.argument("rank_files", type=click.Path(exists=True, dir_okay=False), nargs=-1)
@click.option("--strategy", type=StrategyChoice(STRATEGIES), help=f"Transpile with {STRATEGY_HELP}, and verify all rank programs.")
@click.option("-n", "--ranks", type=RankCount(), default=4, show_default=True, help="Ranks for --strategy: a number, or a mesh: dp=2,tp=2.")
def verify(file: str, rank_files: tuple[str, ...], strategy: str | None, ranks: Any) -> None:
    """Check the program in FILE: definitions, types, placements.

    With --strategy, transpile FILE and prove that all rank programs together compute the same as FILE. With RANK_FILES, the programs of all
    ranks in order, prove this for them.
    """
    from .verify import check_program, verify_ranks

    program, *ranked = read(file, *rank_files)
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
        click.echo(str(transpiled(program, file, strategy, ranks).verify()))
        return
    parts = [program.main, program.startup] if hasattr(program, "startup") else [program]
    count = sum(check_program(p) for p in parts)
    click.echo(f"{count} operators: all inputs are defined, types and placements follow the rules of the operators")


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


main.add_command(onnx)
main.add_command(calibrate)
main.add_command(clusters)
main.add_command(plan)
main.add_command(simulate)
main.add_command(bench)

if __name__ == "__main__":
    main(prog_name="fluidx")
