"""Steps of MPI ranks that share nothing, over a link whose rate is set: a private loopback with a token bucket.

`measure(plan)` starts the ranks in a network namespace of their own, in which only they send: `tc` sets the rate of its loopback, which
both directions share. Open MPI sends by TCP there, and fluidx's ranks are told to share no memory. It takes root.

The file is also what each rank runs: it measures the collectives and messages without a limit, as `fluidx calibrate` does, and then steps,
round by round at every rate.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
NO_LIMIT = 0.0  # Gb/s
MTU, BURST = 9000, 16384  # bytes: of a packet, and that may pass at once after a pause, at least
_PAUSE = 1e-4  # seconds that the timer of the bucket may be late before it loses bytes
_PROBE = 1 << 24  # bytes of a message that shows which rate is reached
_TCP = {
    "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo",
    "PRTE_MCA_oob_tcp_if_include": "lo", "PMIX_MCA_ptl_tcp_if_include": "lo",
}  # fmt: skip
_DEADLINE = 900.0  # seconds of a job


class LinkPlan(NamedTuple):
    """What to measure: steps of models under strategies on so many ranks, at these rates in Gb/s, for `seconds` in each of `rounds`."""

    ranks: int
    models: tuple[str, ...]
    strategies: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    seconds: float
    curve_seconds: float = 2.0


def why_not() -> str:
    """Why this cannot run here; "" if it can."""
    from fluidx.testing.mpi import why_not as no_mpi

    missing = next((tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None), None)
    if missing is not None:
        return f"there is no {missing}"
    return no_mpi() or ("" if os.geteuid() == 0 else "it takes root")


def measure(plan: LinkPlan) -> dict[str, Any]:
    """`curves` and `run` of the ranks without a limit, and `times`: by "model strategy rate", the seconds of steps, one figure a round.
    `reached` is the rate in Gb/s of large messages at each rate that was set, `watch` says how busy others were."""
    from fluidx.comm.mpi import mpirun

    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "plan.json"), Path(folder, "found.json")
        given.write_text(json.dumps(plan._asdict()))
        words, environ = mpirun.command(plan.ranks, [sys.executable, str(HERE), str(given), str(out)])
        environ |= {**_TCP, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE.parent)]), "FLUIDX_TIMEOUT": "300"}
        script = f'ip link set lo mtu {MTU} && ip link set lo up && exec "$@"'
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", script, "sh", *words], env=environ, capture_output=True, text=True, timeout=_DEADLINE
        )
        if done.returncode or not out.exists():
            said = (done.stdout + done.stderr)[-3000:]
            raise SystemExit(f"{plan.ranks} ranks over a limited link failed with {done.returncode}:\n{said}")
        return json.loads(out.read_text())


# -- a rank -------------------------------------------------------------------------------------------------------------------------------


def _set_rate(gbps: float) -> None:
    """Set the rate of the loopback of this namespace. The queue is long enough that nothing is lost."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
    if gbps != NO_LIMIT:
        burst = max(BURST, round(gbps * 1e9 / 8 * _PAUSE))
        limit = ["rate", f"{round(gbps * 1000)}mbit", "burst", str(burst), "limit", "256mb"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limit], check=True)


class _Rank:
    """This rank among all, with an executor for each case."""

    def __init__(self, plan: LinkPlan):
        from mpi4py import MPI

        import fluidx as fx
        from fluidx.comm.mpi import start

        start.connect = partial(start.connect, share=False)  # type: ignore[assignment]
        self.plan, self.everyone = plan, MPI.COMM_WORLD
        self.places = fx.mpi_places()
        self.first = self.everyone.rank == 0

    def curves(self) -> tuple[Any, Any]:
        from fluidx.simulator.calibration.links import curves

        return curves(self.places, self.plan.curve_seconds)

    def steps(self) -> dict[str, Any]:
        import _models

        cases = [(m, s) for m in self.plan.models for s in self.plan.strategies]
        return {f"{m} {s}": _models.fluidx_ranks_step(_models.case(m), s, self.plan.ranks, self.places) for m, s in cases}

    def at(self, rate: float) -> None:
        self.everyone.Barrier()
        if self.first:
            _set_rate(rate)
        self.everyone.Barrier()

    def reached(self) -> float:
        """The rate of large messages of rank 0 to rank 1, in Gb/s."""
        data = bytearray(_PROBE)
        times = []
        for _ in range(3):
            self.everyone.Barrier()
            start = time.perf_counter()
            if self.first:
                self.everyone.Send(data, 1)
                self.everyone.Recv(bytearray(1), 1)
            elif self.everyone.rank == 1:
                self.everyone.Recv(data, 0)
                self.everyone.Send(b"x", 0)
            times.append(time.perf_counter() - start)
        return 8e-9 * _PROBE / statistics.median(times)

    def turn(self, step: Any) -> list[float]:
        """Seconds of steps: one that is not counted, then for the seconds of a turn, at least three. All ranks take equally many."""
        start = time.perf_counter()
        step()
        count = max(3, int(self.plan.seconds / (time.perf_counter() - start)))
        count = self.everyone.bcast(count)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return times

    def measure(self) -> dict[str, Any]:
        from _common import Watch

        found, run = self.curves()
        steps = self.steps()
        times: dict[str, list[float]] = {f"{name} {rate:g}": [] for name in steps for rate in self.plan.rates}
        rates: dict[str, float] = {}
        for rate in self.plan.rates:
            self.at(rate)
            rates[f"{rate:g}"] = self.reached()
        watch = Watch()
        for _ in range(self.plan.rounds):
            own = os.times()
            for rate in self.plan.rates:
                self.at(rate)
                for name, step in steps.items():
                    times[f"{name} {rate:g}"].append(statistics.median(self.turn(step)))
            used = self.everyone.allreduce(sum(os.times()[:2]) - sum(own[:2]) if not self.first else 0.0)
            watch.look(used)
        self.at(NO_LIMIT)
        return {"curves": found, "run": run, "times": times, "reached": rates, "watch": str(watch)}


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    plan = LinkPlan(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    rank = _Rank(plan)
    found = rank.measure()
    if rank.first:
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
