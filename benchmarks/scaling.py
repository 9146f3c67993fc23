"""What working together costs two ranks of one thread each, in fluidx and in PyTorch (DDP, gloo, two processes).

Every rank has a batch of the model's own size, the same one, so all losses must be those of one device. "alone" is one process with one
rank's step, "independent" two processes that do that step at the same time and never talk: the most that two ranks can reach on this
machine, whose cores share memory. Ranks that meet in each step wait for the slower one: the line behind it takes the longer of the two
processes' steps, one by one, which is the most that ranks can reach that do the same work and meet.

Ranks of fluidx are "threads" of one process, "processes" of which each runs the script, as `fluidx run --backend processes` and DDP have
it, or a "team" of processes that one script drives, as `fx.process_places` gives it.
"+beside" is a strategy whose ranks have a second thread each, which communicates (FLUIDX_OVERLAP=1); without it FLUIDX_OVERLAP is auto, by
which ranks that have no second core do without one. Efficiency is the time of one of these over that of the ranks. As in `train.py`
everything is interleaved, in processes of their own, and a figure is one step; of two processes the steps of both count.

    --models mlp,lenet,resnet,gpt   --rounds 20   --seconds 0.3 (a turn)   --bodies threads,processes,team
    --strategies data_parallel,...   --beside data_parallel,...   --save
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from _common import Log, option, options, ratio, show
from _models import TOLERANCE, TRAINED
from _peers import Entrant, Peer, mkl_line, versions
from _races import race


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


def ranks(body: str, strategy: str, overlap: str) -> list[str]:
    """The workers of two ranks of fluidx: their names say what `_peers.py` makes of them."""
    if body == "processes":
        return [f"fluidx_rank:{rank}:FILE:{strategy}:{overlap}" for rank in range(2)]
    return [f"fluidx_{body}:{strategy}:{overlap}"]


def efficiency(one: list[float], ranks: list[float]) -> str:
    return f"{statistics.median(one) / statistics.median(ranks):.2f} (on minima {min(one) / min(ranks):.2f})"


def steps(log: Log, model: str, rounds: int, seconds: float) -> None:
    bodies, strategies = options("bodies", "threads,processes,team"), options("strategies", "data_parallel,ring_optimizer")
    names = {
        "fluidx alone": ["fluidx"],
        "fluidx independent": ["fluidx", "fluidx"],
        **{f"{body} {s}": ranks(body, s, "auto") for body in bodies for s in strategies},
        **{f"{body} {s}+beside": ranks(body, s, "1") for body in bodies for s in options("beside", "")},
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
                by = "torch" if kind == "torch" else "fluidx"
                for other in ("alone", "independent"):
                    if f"{by} {other}" in times:
                        line += f"; efficiency to {other} {efficiency(times[f'{by} {other}'], times[e.name])}"
                if by == "fluidx" and "torch DDP" in times:
                    line += f"; {ratio(times[e.name], times['torch DDP'])} of torch DDP"
            log(line)
            if what == "independent":
                log(f"    the slower of the two {show(e.slowest, 1e3, 'ms')}; efficiency {efficiency(times[e.name], e.slowest)}")
        log(f"  {watch}")


def main() -> None:
    log = Log("scaling")
    log(versions())
    log(mkl_line())
    log("torch is torch_best, the fused optimizer and channels_last for ResNet")
    rounds, seconds = int(option("rounds", "20")), float(option("seconds", "0.3"))
    for model in options("models", ",".join(TRAINED)):
        steps(log, model, rounds, seconds)
    log.close()


if __name__ == "__main__":
    main()
