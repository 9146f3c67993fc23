"""How far predictions are from published measurements, each beside the trivial predictor of its family.

    python benchmarks/predict_published.py                    all parts on the points in benchmarks/data
    python benchmarks/predict_published.py --parts gpt,memory some of them
    python benchmarks/predict_published.py --points FOLDER    on the files of another folder: more points of the same form
    python benchmarks/predict_published.py --fit              fit the constants of benchmarks/data/a100_megatron.json again on the
                                                              committed points; with --save, write that file
    python benchmarks/predict_published.py --save             write benchmarks/results/predict_published.txt

gpt         iterations of Megatron's GPT on A100. The host's time to issue an operator, the time of a call, and the share of memory
            bandwidth are fitted on the 24 given iterations of one host with 2 devices, and for 80 % of the peak of products. That share, 4
            network cards a host, and gradients in float32 were chosen with the 8 given iterations on 64 to 512 devices in sight; all else
            is from sheets. Trivial: operations over one rate, the median of the same 24.
all_reduce  inside a host, from sheets whose ring bandwidths are from the given sizes. Trivial: a ring over links of one bandwidth.
curves      all_reduce by size over one host or several, and many small ones in a row, from sheets alone. Trivial: the bytes a second of
            the largest size.
scaling     throughput by devices, from the smallest point of each series and a sheet: one factor on compute makes that point exact.
            Trivial: linear scaling.
absolute    the smallest point of each series, from a sheet alone. Trivial: operations over the peak of products.
rails       micro-benchmarks 2 and 3 of Fairring, 64 buckets of 25 MiB, from what 100 KiB and 25 MiB took on 8 hosts (v100_fairring.json).
            Trivial: the bus bandwidth of one host.
fairring    end to end: C + k x (time of micro-benchmark 3), C and k from the two given points of NCCL. Trivial: linear from 8 devices.
memory      of FSDP on more devices, from the smallest point and the plans of both: PyTorch's allocator keeps what activations had, so that
            gradients count beside the peak; and ZeRO's figure 1. Trivial: as on 8 devices.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _published_programs as programs
from _common import Log, option, options

import fluidx as fx
from fluidx.hardware import load
from fluidx.hardware.records import Figure, Hardware
from fluidx.ir.operator import Role
from fluidx.simulator.collective_times import CollectiveTimes

DATA = Path(__file__).resolve().parent / "data"
MEGATRON, FAIRRING = DATA / "a100_megatron.json", DATA / "v100_fairring.json"
DEVICES_DIFFER = 0.02  # relative spread: 6 H100 of one batch differ by 5 % (stas00/ml-engineering, compute/accelerator)
Row = Mapping[str, str]


class Case(NamedTuple):
    """A prediction, what was published, and what the trivial predictor says, all in one unit."""

    family: str
    name: str
    published: float
    predicted: float
    trivial: float


def points(name: str) -> list[dict[str, str]]:
    path = Path(option("points", str(DATA))) / name
    with path.open(encoding="utf-8") as f:
        return list(csv.DictReader(f))


# -- GPT ----------------------------------------------------------------------------------------------------------------------------------


def gpt_iteration(row: Row, machine: Hardware) -> Any:
    """The simulated iteration of a row. Up to three micro-batches are planned; the second stands for those between."""
    tp, dp, pp, rows = (int(row[k]) for k in ("tp", "dp", "pp", "micro_batch"))
    count = int(row["global_batch"]) // dp // rows
    main, startup = programs.gpt(*(int(row[k]) for k in ("hidden", "heads", "layers", "sequence")), tp, pp)
    # Megatron adds gradients up after backward: one bucket of all of them, which is full when the last is ready
    of, given = fx.strategies.data_parallel(bucket_mb=1e6, first_bucket_mb=1e6), min(count, 3)
    strategy = fx.strategies.pipeline(given, of=of) if pp > 1 else fx.strategies.micro_batches(given, of=of)
    mesh = fx.Mesh(**({k: n for k, n in (("pp", pp), ("dp", dp), ("tp", tp)) if n > 1} or {"dp": 1}))
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=mesh)
    many = count if count > given else None
    return fx.simulate(t, cluster=machine, batch=rows * count * dp, micro_batches=many, verify=False, exact=1)


def operations(row: Row) -> float:
    """Operations of an iteration a device, with full recomputation (Narayanan et al. 2021, equation 3)."""
    h, layers, s, batch = (int(row[k]) for k in ("hidden", "layers", "sequence", "global_batch"))
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + 51200 / (16 * layers * h)) / int(row["gpus"])


def gpt(machine: Hardware | None = None) -> Iterator[Case]:
    rows = points("gpt_a100.csv")
    known = [r for r in _given() if r["set"] == "single"]
    rate = statistics.median(operations(r) / float(r["iteration_s"]) for r in known)
    machine = machine or load(MEGATRON)
    for row in rows:
        name = " ".join(f"{k}={row[k]}" for k in ("gpus", "global_batch", "micro_batch", "hidden", "layers", "tp", "dp", "pp"))
        family = "GPT, one host" if row["set"] == "single" else "GPT, 64 to 512 devices"
        family += ", fitted" if row in known else ""
        yield Case(family, name, float(row["iteration_s"]), gpt_iteration(row, machine).seconds, operations(row) / rate)


def _given() -> list[dict[str, str]]:
    with (DATA / "gpt_a100.csv").open(encoding="utf-8") as f:
        return list(csv.DictReader(f))


def planned(cases: Sequence[Case], log: Log) -> None:
    """The same as a planner: pairs of one job more than 5 % apart that are in the right order, and the regret of the choice."""
    jobs: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        given = dict(part.split("=") for part in case.name.split())
        jobs[tuple(given[k] for k in ("gpus", "global_batch", "hidden", "layers"))].append(case)
    both = [(a, b) for some in jobs.values() for k, a in enumerate(some) for b in some[:k]]
    pairs = [(a, b) for a, b in both if abs(math.log(a.published / b.published)) > 0.05]
    right = sum((a.predicted - b.predicted) * (a.published - b.published) > 0 for a, b in pairs)
    chosen = [min(some, key=lambda c: c.predicted).published / min(c.published for c in some) for some in jobs.values() if len(some) > 1]
    if pairs:
        good = sum(c <= 1.05 for c in chosen)
        log(f"  as a planner: {right} of {len(pairs)} pairs in order; choice within 5 % of the best in {good} of {len(chosen)} jobs")


def fitted(log: Log) -> Hardware:
    """Fit the constants on the given iterations of one host, by steps along each of them from those of the file. The fitted machine."""
    sheet = load(MEGATRON)
    rows = [r for r in _given() if r["set"] == "single"]
    runs = [gpt_iteration(r, sheet) for r in rows]

    def machine(x: Sequence[float]) -> Hardware:
        source = "fitted on 24 GPT iterations of 2 A100 (VIA-Research/vTrain, data), the given points of one host"
        figures = dict(zip(("dispatch", "call", "bandwidth_share"), (Figure(v, source, 0.1) for v in x), strict=True))
        return replace(sheet, device=replace(sheet.device, **figures))

    def loss(x: Sequence[float]) -> float:
        on = machine(x)
        times = [r.again.func(r.again.args[0], on, *r.again.args[2:]).seconds for r in runs]
        errors = [math.log(t / float(row["iteration_s"])) for t, row in zip(times, rows, strict=True)]
        return statistics.mean(map(abs, errors)) + 0.5 * statistics.mean(e * e for e in errors) ** 0.5

    x = [f.value for f in (sheet.device.dispatch, sheet.device.call, sheet.device.bandwidth_share) if f is not None]
    steps, most = [0.1, 0.1, 0.05], (1.0, 1.0, 0.95)
    best = loss(x)
    while max(steps) > 0.03:
        moved = False
        for k in range(len(x)):
            for sign in (1, -1):
                tried = [v * math.exp(sign * steps[k]) if j == k else v for j, v in enumerate(x)]
                if tried[k] <= most[k] and (found := loss(tried)) < best - 1e-5:
                    best, x, moved = found, tried, True
                    break
        steps = steps if moved else [s / 2 for s in steps]
        log(f"  loss {best:.4f}: dispatch {1e6 * x[0]:.2f} us, call {1e6 * x[1]:.2f} us, share of memory bandwidth {x[2]:.3f}")
    if "--save" in sys.argv:
        fx.hardware.files.save(machine(x), MEGATRON)
    return machine(x)


# -- collectives --------------------------------------------------------------------------------------------------------------------------


def all_reduce() -> Iterator[Case]:
    sheets = {"a100": load("dgx-a100"), "v100": load("dgx-v100")}
    times = {device: CollectiveTimes(sheet) for device, sheet in sheets.items()}
    for row in points("all_reduce.csv"):
        device, n, nbytes = row["device"], int(row["ranks"]), int(row["size_bytes"])
        ring = 2 * (n - 1) / n * nbytes / {"a100": 300e9, "v100": 150e9}[device]
        seconds = times[device].seconds("all_reduce", range(n), nbytes)
        yield Case(f"all_reduce, {n} {device}", f"{nbytes}", float(row["time_us"]), seconds * 1e6, ring * 1e6)


CURVES = {
    "8xA100 NVLink3": "dgx-a100", "8xH200 NVLink4": "dgx-h200", "8xB200 NVLink5": "dgx-b200", "8xA100 p4de": "p4d", "8xH100 p5": "p5",
    "8xB200 EFAv4": "dgx-b200 over p5",
}  # fmt: skip


def curve_sheet(name: str) -> Hardware:
    """A sheet, or the hosts of one with the network of another."""
    hosts, _, network = name.partition(" over ")
    return replace(load(hosts), between=load(network).between) if network else load(hosts)


def curves() -> Iterator[Case]:
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in points("published.csv"):
        if row["family"] == "collective-curve" and (sheet := next((s for text, s in CURVES.items() if text in row["config"]), "")):
            nbytes, n = int(row["config"].split("size_bytes=")[1].split(";")[0]), int(row["gpus"])
            if row["metric"] == "time_us" or (row["metric"] == "busbw_GBps" and float(row["value"]) >= 1):
                bus = 2 * (n - 1) / n * nbytes / 1e3 / float(row["value"])
                series[f"{row['series']} {n} on {sheet}"].append((nbytes, float(row["value"]) if row["metric"] == "time_us" else bus))
    for name, some in series.items():
        *others, (high, last) = sorted(some)
        n, times = int(name.split()[1]), CollectiveTimes(curve_sheet(name.partition(" on ")[2]))
        for nbytes, published in others:
            seconds = times.seconds("all_reduce", range(n), nbytes)
            yield Case("all_reduce by size", f"{name}, {nbytes}", published, seconds * 1e6, last * nbytes / high)
    yield from in_a_row()


def in_a_row() -> Iterator[Case]:
    """Gigabytes in one all_reduce and in many small ones, as bus bandwidth in Gb/s."""
    rows = [r for r in points("published.csv") if r["family"] == "collective-other"]
    most = max((float(r["value"]) for r in rows), default=0.0)
    for row in rows:
        n, each = int(row["gpus"]), float(row["config"].split(" x ")[1].split("GB")[0]) * 1e9
        seconds = CollectiveTimes(sheet_of(row)).seconds("all_reduce", range(n), each)
        bus = 2 * (n - 1) / n * each / seconds * 8 / 1e9
        yield Case("all_reduces in a row", row["config"].split(";")[0], float(row["value"]), bus, most)


# -- scaling ------------------------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A published training job: its program, the rows of a micro-batch on a device, micro-batches in a step of the smallest point, and
    whether a step of all devices has a fixed batch."""

    family: str
    build: Callable[[bool], Any]
    rows: int
    micro_batches: int = 1
    strong: bool = False
    strategy: str = "data_parallel"


def _bert(length: int) -> Callable[[bool], Any]:
    return lambda half: programs.transformer(24, 1024, 16, 30528, length, half)


def _rows(config: str, otherwise: int) -> int:
    return int(config.split("bs")[1].split(";")[0].split("/")[0].split(" ")[0]) if "bs" in config else otherwise


def job_of(row: Row) -> Job | None:
    """The program of a series; None if there is none of its shape."""
    model, config = row["model"], row["config"]
    half = "fp16" in config or "amp" in config or "bf16" in config
    if model.startswith("BERT-large pretrain"):
        length = int(model.split("seq")[1])
        rows = (256 if length == 128 else 32) // (1 if half else 2)
        steps = (65536 if length == 128 else 32768) // 8 // rows
        return Job("BERT-large", _bert(length), rows, steps, "strong" in config)
    if model.startswith("BERT-large SQuAD"):
        return Job("BERT-large", _bert(384), 32 if "A100" in config else 10)
    if model == "Transformer-XL base":
        rows = _rows(config, 16)
        return Job("Transformer-XL", lambda h: programs.transformer(16, 512, 8, 267735, 192, h, ffn=2048, head_rows=20000), rows)
    if model == "Transformer-XL large":
        rows = _rows(config, 4)
        return Job("Transformer-XL", lambda h: programs.transformer(18, 1024, 16, 33000, 384, h, ffn=4096, head_rows=20000), rows)
    if model == "ResNet-50 v1.5":
        return Job("ResNet-50", lambda h: programs.resnet(half=h), _rows(config, 256 if half else 128))
    if model.startswith("BART-large"):
        length = int(model.split("seq")[1])
        return Job("BART-large", lambda h: programs.transformer(28, 1024, 16, 50265, length, h), 4096 // length)
    if model == "Llama3.1-8B":
        return Job("Llama-3.1-8B", lambda h: _llama(), 2, strategy="fsdp")
    return None


def _llama() -> Any:
    """32 layers of 4,096: 8.0 billion parameters."""
    return programs.transformer(32, 4096, 32, 128256, 8192, True, ffn=18432, tied=False)


def sheet_of(row: Row) -> Hardware:
    """The machine of a row. With TF32, its products of float32 are such."""
    config = row["config"]
    sheet = load("dgx-h200" if "H200" in config else "dgx-h100" if "H100" in config else "dgx-a100" if "A100" in config else "dgx-v100")
    flops = sheet.device.flops
    products = {"float32": flops["tf32"]} if "tf32" in config else {}
    return replace(sheet, device=replace(sheet.device, flops={**flops, **products}))


def _half(row: Row) -> bool:
    return any(word in row["config"] for word in ("fp16", "amp", "bf16", "sel AC", "H200"))


def simulated(job: Job, row: Row, n: int, smallest: int) -> tuple[Any, int]:
    """A step of the job on n devices, and its rows."""
    main, startup = job.build(_half(row))
    count = max(1, job.micro_batches * smallest // n if job.strong else job.micro_batches)
    runtime = "static"
    if job.strategy != "data_parallel":
        strategy = fx.strategies.get(job.strategy)
    elif count > 1:
        strategy = fx.strategies.micro_batches(min(count, 3))
    else:
        strategy = fx.strategies.data_parallel(bucket_mb=0)
        runtime = "horovod" if "Horovod" in row["system"] else "ddp" if "DDP" in row["system"] else "static"
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=n)
    many = count if count > 3 else None
    rows = job.rows * n * count
    return fx.simulate(t, cluster=sheet_of(row), batch=rows, micro_batches=many, runtime=runtime, verify=False, exact=0), rows


def last_of(n: int) -> float:
    """How much longer the slowest of n devices takes than the mean: the largest of n draws of a normal distribution (Blom 1958)."""
    return 1 + DEVICES_DIFFER * statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def scaling() -> Iterator[Case]:
    series: dict[str, list[Row]] = defaultdict(list)
    for row in points("published.csv"):
        if row["family"] == "program-scaling":
            series[row["series"]].append(row)
    for some in series.values():
        some.sort(key=lambda r: int(r["gpus"]))
        first, job = some[0], job_of(some[0])
        if job is None or len(some) < 2 or first["role"] != "smallest":
            continue
        yield from scaled(job, first, some[1:])


def scaled(job: Job, first: Row, others: Sequence[Row]) -> Iterator[Case]:
    """Predictions of a series: a factor on compute makes the smallest point exact."""
    n0, value0 = int(first["gpus"]), float(first["value"])
    each = "per_gpu" in first["metric"]
    start, rows0 = simulated(job, first, n0, n0)
    length = _per_row(job, first)
    target = rows0 * length / (value0 * (n0 if each else 1))  # the seconds that make the published value of all devices
    compute, tries = 1.0, 12
    while (tries := tries - 1) and abs((ratio := start.what_if(compute=compute).seconds / target) - 1) > 1e-4:
        compute *= ratio**0.9
    for row in others:
        n = int(row["gpus"])
        found, rows = simulated(job, row, n, n0)
        seconds = found.what_if(compute=compute).seconds * last_of(n) / last_of(n0)
        made = rows * length / seconds / (n if each else 1)
        name = f"{row['system']}, {row['model']}, {row['config'].split(';')[0]}, {n}"
        yield Case(job.family, name, float(row["value"]), made, value0 * (1 if each else n / n0))


def absolute() -> Iterator[Case]:
    """The smallest point of each series from a sheet alone."""
    for row in points("published.csv"):
        job = job_of(row) if row["family"] == "program-scaling" and row["role"] == "smallest" else None
        if job is None:
            continue
        n = int(row["gpus"])
        found, rows = simulated(job, row, n, n)
        plan, peak = found.plans[0], found.hardware.device.flops["float16" if _half(row) else "float32"].value
        least = sum(plan.cost(step).flops for step in plan.steps) / peak
        unit = rows * _per_row(job, row) / (n if "per_gpu" in row["metric"] else 1)
        count = job.micro_batches / min(job.micro_batches, 3)  # the plan has up to 3 micro-batches of those in a step
        name = f"{row['system']}, {row['model']}, {row['config'].split(';')[0]}, {n}"
        yield Case(f"{job.family}, a sheet alone", name, float(row["value"]), unit / found.seconds, unit / (least * count))


def _per_row(job: Job, row: Row) -> float:
    """What is published of each row: a sequence, an image, or its tokens."""
    tokens = 8192.0 if job.strategy == "fsdp" else 192.0 if "base" in row["model"] else 384.0
    return tokens if "tok" in row["metric"] else 1.0


def rails() -> Iterator[Case]:
    """64 buckets of 25 MiB in milliseconds: a quarter of them is simulated."""
    rows = [r for r in points("published.csv") if r["source"].partition(":")[2] in ("microbenchmark_2", "microbenchmark_3")]
    one = next(float(r["value"]) for r in rows if r["system"] == "NCCL" and r["gpus"] == "8")
    for row in rows:
        n, config = int(row["gpus"]), dict(part.split("=") for part in row["config"].split(";") if "=" in part)
        if n < 16 and row["system"] != "NCCL":
            continue  # one host, where the strategy is refused
        mib = 25.0 * (int(config["machines"]) / 8 if "autoscaled" in row["system"] else 1)
        in_flight = int(config.get("parallel_buckets", 32 * 25 / mib))
        took, name = 1e3 * buckets_of(row["system"] == "NCCL", n, mib, max(1, in_flight)), f"{row['system']}, {n}, {in_flight} in flight"
        yield Case("64 buckets of 25 MiB", name, float(row["value"]), took, one * (n - 1) / n * 8 / 7)


def buckets_of(nccl: bool, n: int, mib: float, in_flight: int) -> float:
    """The seconds in which n devices add up 1,600 MiB in buckets of `mib`."""
    if nccl:
        return 1600 / mib * CollectiveTimes(load(FAIRRING)).seconds("all_reduce", range(n), mib * 2**20)
    made = fx.strategies.rails(bucket_mb=0, slice_mb=mib, parallelism=in_flight, staging_mb=in_flight * mib)
    main, startup = programs.gradients(400)
    t = fx.DistributeTranspiler(made).transpile(program=main, startup_program=startup, trainers=fx.Cluster.load(FAIRRING, hosts=n // 8))
    return 4 * fx.simulate(t, cluster=FAIRRING, batch=n, verify=False, fetch=[]).of_rank(0).communication


def fairring() -> Iterator[Case]:
    rows = points("published.csv")
    bench = {(r["system"], int(r["gpus"])): float(r["value"]) for r in rows if "microbenchmark_3" in r["source"]}
    ends = {(r["system"], int(r["gpus"])): float(r["value"]) for r in rows if "end_to_end" in r["source"]}
    step = {key: key[1] / value for key, value in ends.items()}
    low, high = ("NCCL", 8), ("NCCL", 64)
    k = (step[high] - step[low]) / (bench[high] - bench[low])
    rest = step[low] - k * bench[low]
    for (system, n), value in sorted(ends.items()):
        if (system, n) in (low, high) or (system, n) not in bench:
            continue
        yield Case("Fairring, end to end", f"{system}, {n}", value, n / (rest + k * bench[system, n]), ends[low] * n / 8)
    for n in sorted({n for _, n in ends}):
        if ("NCCL", n) in bench and ("Fairring", n) in bench and ("NCCL", n) in ends and ("Fairring", n) in ends:
            gain = (rest + k * bench["NCCL", n]) / (rest + k * bench["Fairring", n])
            yield Case("Fairring over NCCL", f"{n}", ends["Fairring", n] / ends["NCCL", n], gain, 1.0)


# -- memory -------------------------------------------------------------------------------------------------------------------------------


def memory() -> Iterator[Case]:
    yield from zero()
    series: dict[str, list[Row]] = defaultdict(list)
    for row in points("published.csv"):
        if row["family"] == "memory":
            series[row["series"]].append(row)
    for some in series.values():
        some.sort(key=lambda r: int(r["gpus"]))
        first = some[0]
        for row in some[1:]:
            n, n0 = int(row["gpus"]), int(first["gpus"])
            predicted = float(first["value"]) - (kept_by_fsdp(n0) - kept_by_fsdp(n)) / 2**30
            yield Case("FSDP memory", f"{row['system']}, {n}", float(row["value"]), predicted, float(first["value"]))


@cache
def kept_by_fsdp(n: int) -> int:
    """The bytes of a device of n that trains Llama: those of its plan, and the parts of gradients that its updates read."""
    main, startup = _llama()
    t = fx.DistributeTranspiler("fsdp").transpile(program=main, startup_program=startup, trainers=n)
    plan = fx.simulate(t, cluster="dgx-h100", batch=2 * n, verify=False, exact=0).plans[0]
    reads = {n for step in plan.steps for op in step.ops if op.role is Role.OPTIMIZE for n in op.input_arg_names}
    buffers = {plan.values[n].buffer for n in reads if n in plan.values}
    return plan.peak_bytes + sum(b.nbytes for k, b in enumerate(plan.buffers) if k in buffers and b.kind == "arena")


def zero() -> Iterator[Case]:
    """Model state of 7.5 billion parameters on 64 devices: what each strategy cuts is asked of the transpiled program, and the bytes are
    the paper's: 2 for a parameter, 2 for its gradient, 12 for the optimizer."""
    published = {"data_parallel": 120.0, "zero1": 31.4, "zero2": 16.6, "fsdp": 1.9}
    for name, gigabytes in published.items():
        cut = kept_in_parts(name, 64)
        bytes_each = sum(b / (64 if part in cut else 1) for part, b in (("parameter", 2), ("gradient", 2), ("optimizer", 12)))
        yield Case("ZeRO, figure 1", name, gigabytes, round(7.5 * bytes_each, 1), 120.0)


def kept_in_parts(strategy: str, n: int) -> set[str]:
    """Which of parameter, gradient and optimizer state every rank keeps a part of. zero1 keeps whole gradients until they are added up."""
    main, startup = fx.Program("cut"), fx.Program("cut_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        fx.optimizer.Adam(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 256], "float32"), 256, bias_attr=False)))
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=n)
    update = next(op for op in t.main.global_block().oplist if op.type == "adam")
    descs = t.main.global_block().descs
    names = {"optimizer": update.input("Moment1")[0], "parameter": main.all_parameters()[0].name}
    cut = {part for part, name in names.items() if descs[name].placement}
    return cut | ({"gradient"} if strategy in ("zero2", "fsdp") else set())


# -- tables -------------------------------------------------------------------------------------------------------------------------------


def table(cases: Sequence[Case], log: Log, details: bool) -> None:
    families: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        families[case.family].append(case)
    for family, some in families.items():
        ours = sorted(abs(c.predicted / c.published - 1) for c in some)
        theirs = sorted(abs(c.trivial / c.published - 1) for c in some)
        skill = 1 - sum(ours) / sum(theirs) if sum(theirs) else 0.0
        worst = ours[min(len(ours) - 1, int(0.9 * len(ours)))], theirs[min(len(theirs) - 1, int(0.9 * len(theirs)))]
        log(
            f"  {family:<26} {len(some):>4}   median {statistics.median(ours):6.1%}  p90 {worst[0]:6.1%}   "
            f"trivial {statistics.median(theirs):6.1%}  p90 {worst[1]:6.1%}   skill {skill:+.2f}"
        )
        if details:
            for c in some:
                log(f"    {c.predicted / c.published - 1:+7.1%} (trivial {c.trivial / c.published - 1:+7.1%})  {c.published:g}  {c.name}")


PARTS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "gpt": gpt, "all_reduce": all_reduce, "curves": curves, "scaling": scaling, "absolute": absolute, "rails": rails, "fairring": fairring,
    "memory": memory,
}  # fmt: skip


def main() -> None:
    out = Log("predict_published")
    parts = dict(PARTS)
    if "--fit" in sys.argv:
        out("\nfit on the committed iterations of one host")
        parts["gpt"] = partial(gpt, fitted(out))
    for name in options("parts", ",".join(parts)):
        out(f"\n{name}")
        start = time.perf_counter()
        cases = list(parts[name]())
        table(cases, out, "--details" in sys.argv or name not in ("gpt", "all_reduce", "curves"))
        out(f"  {time.perf_counter() - start:.0f} s")
        if name == "gpt":
            planned(cases, out)
    out.close()


if __name__ == "__main__":
    main()
