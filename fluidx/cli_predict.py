"""The commands that predict and measure: `fluidx clusters`, `calibrate`, `simulate`, `plan` and `bench`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from .cli_options import STRATEGIES, STRATEGY_HELP, RankCount, RankCounts, Shapes, StrategyChoice, check_output, program_file, readable
from .cli_programs import read, transpiled
from .config import show_progress


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="The figures in the form of a file, to begin a file of your own.")
def clusters(name: str | None, as_json: bool) -> None:
    """List the machines whose figures are known, or the figures of NAME (a machine, or a JSON file) with their sources."""
    import json

    from . import hardware

    if as_json:
        found = [hardware.load(n) for n in ([name] if name else hardware.names())]
        forms = [hardware.as_json(h) for h in found]
        click.echo(json.dumps(forms[0] if name else forms, indent=2))
        return
    for line in hardware.describe(hardware.load(name)) if name else hardware.overview():
        click.echo(line)


class NamedNumbers(click.ParamType):
    """Numbers by name: 3=1.2,5=2 or network=0.5,hosts=16."""

    name = "numbers"

    def __init__(self, example: str, key: type = str):
        self.example, self.key = example, key

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, dict):
            return value
        found: dict[Any, float] = {}
        for part in value.split(","):
            name, equals, number = part.partition("=")
            try:
                key, given = self.key(name.strip()), float(number) if equals else nan
            except ValueError:
                self.fail(f"{part!r} is not a name and a number; write {self.example}", param, ctx)
            if not isfinite(given):
                self.fail(f"{part!r} has no number; write {self.example}", param, ctx)
            if key in found:
                self.fail(f"{value!r} gives two numbers for {key!r}; give one", param, ctx)
            found[key] = given
        return found


@click.command()
@program_file
@click.option("--strategy", type=StrategyChoice(STRATEGIES), default="data_parallel", help=f"Default: data_parallel. {STRATEGY_HELP}.")
@click.option("-n", "--ranks", type=RankCount(), help="A number of ranks, or a mesh: dp=8,tp=4. Default: all devices of the cluster.")
@click.option("--cluster", required=True, help="A machine that fluidx clusters lists, or the file that fluidx calibrate wrote.")
@click.option("--hosts", type=click.IntRange(1), help="Hosts of the cluster. Default: as many as its file says, or the ranks need.")
@click.option("--batch", type=click.IntRange(1), help="The rows of a step, of all ranks together.")
@click.option("--feed", type=Shapes(), help="Shapes of feeds instead, image=60x64,label=60x1.")
@click.option("--slow", type=NamedNumbers("3=1.2", int), help="Ranks that compute longer: 3=1.2 is rank 3, by a fifth.")
@click.option("--iterations", type=click.IntRange(1), help="How often a loop runs that does not say it.")
@click.option("--micro-batches", type=click.IntRange(2), help="So many micro-batches, of a strategy that writes 2 or more.")
@click.option("--runtime", type=click.Choice(["static", "ddp", "horovod"]), default="static", show_default=True, help="Whose schedule.")
@click.option("--what-if", type=NamedNumbers("network=0.5,chunk_mb=4"), help="Also with another network, compute, latency, hosts, option.")
@click.option("--against", type=readable, help="A timeline that fluidx trace wrote: list the operators that differ most.")
@click.option("--table", is_flag=True, help="Print the operators as fluidx trace does.")
@click.option("--perfetto", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline, for https://ui.perfetto.dev.")
def simulate(
    file: str, strategy: str, ranks: Any, cluster: str, hosts: int | None, batch: int | None, feed: Any, slow: Any, iterations: int | None,
    micro_batches: int | None, runtime: str, what_if: Any, against: Path | None, table: bool, perfetto: Path | None,
) -> None:  # fmt: skip
    """Predict a step of the program in FILE: time, what is exposed, memory, what binds it, and why. Nothing runs."""
    from .simulator.questions import Question

    check_output(perfetto, file, against)
    (program,) = read(file)
    asked = Question(
        partial(transpiled, program, file), strategy, ranks, cluster, hosts, batch, feed, slow, iterations, micro_batches, runtime
    )  # fmt: skip
    found = asked.answer()
    click.echo(str(found))
    if what_if:
        other = asked.changed(what_if).answer() if asked.needs_transpile(what_if) else found.what_if(**what_if)
        click.echo(f"what if {', '.join(f'{k}={v:g}' for k, v in what_if.items())}: {other.compared_with(found)}")
    if table:
        click.echo(found.table())
    if against is not None:
        click.echo(str(found.against(against)))
    if perfetto is not None:
        found.save(perfetto)
        click.echo(f"wrote {perfetto}")


@click.command()
@click.option("-n", "ranks", type=RankCounts(), default="2", show_default=True, help="Numbers of ranks, 2,4.")
@click.option("--backend", type=click.Choice(["processes", "threads", "mpi"]), default="processes", show_default=True)
@click.option("--from", "profiles", multiple=True, type=readable, help="A timeline of fluidx trace, kept beside what is measured.")
@click.option("--check", type=readable, help="A calibration of this machine: measure in a second how fast the machine is now.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file to write; may be left out with --check.")
@click.option("--anyway", is_flag=True, help="Measure also while others use this machine.")
def calibrate(ranks: Any, backend: str, profiles: tuple[Path, ...], check: Path | None, output: Path | None, anyway: bool) -> None:
    """Measure what steps, collectives and messages take on this machine, in about a minute, for fluidx simulate and plan.

    With --from and a calibration in the output file, the profiles are merged into it and nothing is measured. With --check and an output,
    the figures of that calibration are written as they are at the speed that the machine has now.
    """
    from .hardware import load, save
    from .simulator.calibration.calibrate import calibrate as measure
    from .simulator.calibration.calibrate import merge, summary

    if check is not None:
        _check(check, output, profiles)
        return
    if output is None:
        raise click.UsageError("calibrate writes a file: give its name, -o machine.json")
    check_output(output)
    if profiles and output.exists():
        found = merge(load(str(output)), profiles)
        save(found, output)
    else:
        found = measure(ranks, backend, output, profiles, anyway)
    for line in summary(found):
        click.echo(line)
    click.echo(f"wrote {output}")


def _check(file: Path, output: Path | None, profiles: tuple[Path, ...]) -> None:
    """Say how fast this machine is now, and write the figures at this speed."""
    from .hardware import load, save
    from .simulator.calibration.probe import at_speed, check_speed

    if profiles:
        raise click.UsageError("--from adds profiles to a calibration, --check measures the speed only: give one of them")
    source = click.get_current_context().get_parameter_source
    options = {"ranks": "-n", "backend": "--backend", "anyway": "--anyway"}
    if said := [option for name, option in options.items() if source(name) is not ParameterSource.DEFAULT]:
        raise click.UsageError(f"--check measures the speed only, without {', '.join(said)}: leave out one or the other")
    check_output(output, file)  # the calibration stays as it was measured
    machine = load(str(file))
    found = check_speed(machine)
    click.echo(str(found))
    if output is not None:
        save(at_speed(machine, found.now), output)
        click.echo(f"wrote {output}")


@click.command()
@click.argument("what")
@click.option("--strategy", type=StrategyChoice(STRATEGIES), default="data_parallel", help=f"Default: data_parallel. {STRATEGY_HELP}.")
@click.option("-n", "--ranks", type=RankCounts(1), default="1,2,4", show_default=True, help="Numbers of ranks, one after the other.")
@click.option("--backend", type=click.Choice(["threads", "processes"]), default="threads", show_default=True, help="How ranks run.")
@click.option("--batch", type=click.IntRange(1), help="Examples of each rank in a step.  [default: 8 for resnet50 and gpt]")
@click.option("--feed", type=Shapes(), help="Shapes of feeds on a rank, if other axes are open too: ids=8x128.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps that are measured.")
@click.option("--warm-up", type=click.IntRange(0), default=3, show_default=True, help="Steps before them.")
@click.option("--cluster", help="Predict too: the file that fluidx calibrate wrote for this machine, or a machine of fluidx clusters.")
def bench(
    what: str, strategy: str, ranks: Any, backend: str, batch: int | None, feed: Any, steps: int, warm_up: int, cluster: str | None
) -> None:
    """Measure examples a second on random data, for some numbers of ranks.

    WHAT is resnet50, gpt, an ONNX model, or a program file with main and startup. Each rank has the same number of examples on any number
    of ranks. Efficiency is that of a rank, relative to the first number of ranks.
    """
    from .bench.throughput import HEAD, PREDICTED, RankResult, SyntheticBenchmark, notes, row

    os.environ.setdefault("FLUIDX_SEED", "0")
    pair, rows = _benchmarked(what)
    counts = sorted(set(ranks))
    made = SyntheticBenchmark(
        pair, partial(transpiled, pair, what, strategy), counts, batch or rows, feed or {}, backend, steps, warm_up, cluster
    )  # fmt: skip
    first: RankResult | None = None
    with _bar(len(counts) * (steps + warm_up)) as advance:
        for result in made.run(advance):
            if first is None:
                first = result
                click.echo(f"{pair.main.name}: {strategy}, ranks as {backend}, {steps} steps each\n\n{HEAD}{PREDICTED if cluster else ''}")
            click.echo(row(result, first))
    for line in notes(made):
        click.echo(line)


def _benchmarked(what: str) -> tuple[Any, int | None]:
    """The programs of a benchmark, and the examples of a rank if none are said."""
    from .bench.models import MODELS, from_onnx, unknown
    from .ir.source_location import by_command

    with by_command():
        if what in MODELS:
            return MODELS[what].build(), MODELS[what].rows
        if not Path(what).is_file():
            raise unknown(what)
        if what.endswith(".onnx"):
            return from_onnx(what), None
    (program,) = read(what)
    return program, None


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not show_progress()) as bars:
        task = bars.add_task("", total=total)
        yield lambda ranks, step: bars.update(task, advance=1, description=f"{ranks} rank{'s' * (ranks > 1)}, step {step}")


@click.command()
@program_file
@click.option("--cluster", required=True, help="A machine that fluidx clusters lists, or the file that fluidx calibrate wrote.")
@click.option("--hosts", type=click.IntRange(1), help="Hosts of the cluster. Default: as many as its file says, or the ranks need.")
@click.option("-n", "--ranks", type=RankCount(), help="A number of ranks, or a mesh: dp=8,tp=4. Default: all devices of the cluster.")
@click.option("--batch", type=click.IntRange(1), help="The rows of a step, of all ranks together.")
@click.option("--memory", help="Of a device: 40GB or 40GiB. Default: what the cluster's file says.")
@click.option("--strategies", help="The strategies to try, by name: zero1,fsdp. Default: all.")
@click.option("--wire", help="Also gradients that travel in this dtype: bfloat16. They are rounded.")
@click.option("--try", "best", type=click.IntRange(1), help="Run the best of them on the devices of this machine, and take the fastest.")
@click.option("--on", "places", type=click.Choice(["cpu", "processes", "cuda"]), default="cpu", show_default=True, help="Where --try runs.")
@click.option("--no-recompute", is_flag=True, help="Do not try what does not fit with activations that are computed again.")
@click.option("--refused", is_flag=True, help="List the candidates that were refused, with reasons.")
def plan(
    file: str, cluster: str, hosts: int | None, ranks: Any, batch: int | None, memory: str | None, strategies: str | None,
    wire: str | None, best: int | None, places: str, no_recompute: bool, refused: bool,
) -> None:  # fmt: skip
    """Choose the fastest strategy for the program in FILE that fits into memory. Nothing runs, unless with --try."""
    from .simulator.planner import plan as planned
    from .transpiler import Cluster, Mesh

    (program,) = read(file)
    if not hasattr(program, "startup"):
        raise click.ClickException(f"{file} has no startup section; write both with fx.io.save_text(fx.ProgramPair(main, startup), FILE)")
    where: Any = Cluster.load(cluster, hosts)
    if isinstance(ranks, Mesh):
        where, ranks = ranks.on(where), None
    elif hosts is None and ranks is not None:
        where = cluster  # as many hosts as the ranks need
    found = planned(
        program.main, program.startup, where, batch, memory, ranks=ranks,
        strategies=strategies.split(",") if strategies else None, wire=wire or (), recompute=not no_recompute,
    )  # fmt: skip
    click.echo(str(found))
    if refused:
        for one in found.refused:
            click.echo(f"refused: {one.candidate}: {one.refused}")
    if best is not None:
        _try(found, best, places)


def _try(planned: Any, best: int, where: str) -> None:
    """Run the best strategies of a plan on this machine, with random data."""
    from .bench.feeds import synthetic_feed
    from .executor import cpu_places, cuda_places, process_places
    from .tuning import tune

    n = planned.trainers.world_size
    _check_devices(n, where)
    made: Any = cuda_places(list(range(n))) if where == "cuda" else process_places(n) if where == "processes" else cpu_places(n)
    feed = synthetic_feed(planned.program, planned.batch)
    found = tune(planned, best, planned.program, planned.startup, feed, made)
    for one in found.tried:
        took = f"{1e3 * one.median:.3g} ms" if one.seconds else one.why.partition("\n")[0]
        click.echo(f"tried: {one.options['strategy'].call}: {took}")
    click.echo(f"fastest: {found.strategy.call}")


def _check_devices(n: int, where: str) -> None:
    """Refuse to run n ranks on fewer devices."""
    from .executor.places import cuda_device_count

    has, what = (cuda_device_count(), "GPUs that CuPy sees") if where == "cuda" else (os.cpu_count() or 1, "cores")
    if n > has:
        other = f"plan for -n {has}" if has else "install CuPy for its driver, or try on the CPU: --on cpu"
        raise click.ClickException(f"--try: the plan is for {n} ranks, and this machine has {has} {what}; {other}")
