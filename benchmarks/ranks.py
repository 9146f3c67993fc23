"""What working together costs two ranks of one thread each, in fluidx (threads of one process) and PyTorch (DDP, gloo, two processes).

Every rank has a batch of the model's own size, the same one, so all losses must be those of one device. "alone" is one process with one
rank's step, "independent" two processes that do that step at the same time and never talk: the most that two ranks can reach on this
machine, whose cores share memory. "+beside" is a strategy whose ranks have a second thread each, which communicates (FLUIDX_OVERLAP=1);
without it FLUIDX_OVERLAP is auto, by which ranks that have no second core do without one. Efficiency is the time of one of these over that
of the ranks. As in `train.py` everything is interleaved, in processes of their own, and a figure is one step; of two processes the steps
of both count.

Then all_reduce alone, float32 in place, between two ranks.

    --models mlp,lenet,resnet,gpt   --rounds 20   --seconds 0.3 (a turn)   --strategies data_parallel,...   --beside data_parallel,...
    --sizes 4096,...   --save
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from _common import Log, option, options, ratio, show
from _models import TOLERANCE, TRAINED
from _peers import Entrant, Peer, mkl_line, race, versions

SIZES = "4096,65536,1048576,26214400,104857600"


@contextmanager
def entrants(model: str, names: dict[str, list[str]]) -> Iterator[list[Entrant]]:
    """Workers by the names of their entrants. FILE in a peer's name becomes a file that its ranks meet at."""
    with ExitStack() as stack:
        found = []
        for name, peers in names.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            told = [peer.replace("FILE", str(folder / "store")) for peer in peers]
            found.append(Entrant(name, [stack.enter_context(Peer(peer, model, "train", 1)) for peer in told]))
        yield found


def efficiency(one: list[float], ranks: list[float]) -> str:
    return f"{statistics.median(one) / statistics.median(ranks):.2f} (on minima {min(one) / min(ranks):.2f})"


def steps(log: Log, model: str, rounds: int, seconds: float) -> None:
    strategies = options("strategies", "data_parallel,reduce_broadcast,ring_optimizer")
    names = {
        "fluidx alone": ["fluidx"],
        "fluidx independent": ["fluidx", "fluidx"],
        **{f"fluidx {s}": [f"fluidx_ranks:{s}"] for s in strategies},
        **{f"fluidx {s}+beside": [f"fluidx_ranks:{s}:1"] for s in options("beside", "data_parallel")},
        "torch alone": ["torch_best"],
        "torch independent": ["torch_best", "torch_best"],
        "torch DDP": ["torch_ddp:0:FILE", "torch_ddp:1:FILE"],
    }
    log(f"\n{model}, one step of 2 ranks, 1 thread each")
    with entrants(model, names) as found:
        running, watch = race(log, found, rounds, seconds, TOLERANCE[model])
        if not running:
            return
        times = {e.name: e.times() for e in running}
        for e in running:
            line = f"  {e.name:28} {show(times[e.name], 1e3, 'ms')}, {statistics.median(e.cores):.1f} cores"
            kind, what = e.name.split()
            if what not in ("alone", "independent"):
                for other in ("alone", "independent"):
                    if f"{kind} {other}" in times:
                        line += f"; efficiency to {other} {efficiency(times[f'{kind} {other}'], times[e.name])}"
                if kind == "fluidx" and "torch DDP" in times:
                    line += f"; {ratio(times[e.name], times['torch DDP'])} of torch DDP"
            log(line)
        log(f"  {watch}")


def reductions(log: Log, rounds: int, seconds: float) -> None:
    log("\nall_reduce of 2 ranks, float32, in place")
    for nbytes in options("sizes", SIZES):
        names = {"fluidx threads": ["reduce_threads"], "gloo": ["reduce_gloo:0:FILE", "reduce_gloo:1:FILE"]}
        with entrants(nbytes, names) as found:
            running, watch = race(log, found, rounds, seconds, 0.0)
            for e in running:
                rate = int(nbytes) / statistics.median(e.times()) / 1e9
                extra = f"; fluidx takes {ratio(running[0].times(), e.times())} of it" if e is not running[0] else ""
                log(f"  {int(nbytes) / 2**10:8.0f} KiB  {e.name:15} {show(e.times(), 1e6, 'us', 1)}, {rate:.2f} GB/s{extra}")
            if running:
                log(f"  {'':13} {watch}")


def main() -> None:
    log = Log("ranks")
    log(versions())
    log(mkl_line())
    log("fluidx ranks are threads of one process; torch is torch_best, the fused optimizer and channels_last for ResNet")
    rounds, seconds = int(option("rounds", "20")), float(option("seconds", "0.3"))
    for model in options("models", ",".join(TRAINED)):
        steps(log, model, rounds, seconds)
    reductions(log, rounds, seconds)
    log.close()


if __name__ == "__main__":
    main()
