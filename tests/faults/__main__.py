"""The command line: `python -m tests.faults --runs 200` has faults happen at random, and prints a table of failures and bodies."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fluidx.comm.mpi import mpirun

from . import engine

Found = dict[tuple[str, str], list[engine.Outcome]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Have ranks fail in every way, and look at how all end.")
    parser.add_argument("--runs", type=int, default=200, help="how many faults (default 200)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="how many at a time; the deadline is one of wall time")
    parser.add_argument("--show", metavar="FAILURE/BODY/SEED", help="print what becomes of one fault")
    args = parser.parse_args()
    if args.show:
        how, body, seed = args.show.split("/")
        fault = engine.drawn(how, body, int(seed))
        outcome = engine.run(fault)
        print(f"{fault}\n{outcome.printed}\n{outcome.seconds:.1f} s; {outcome.wrong or 'right'}")
        return bool(outcome.wrong)
    cases = [case for case in engine.CASES if not engine.why_not(case[1])]
    plan = [(*cases[k % len(cases)], args.seed + k // len(cases)) for k in range(args.runs)]
    found: Found = defaultdict(list)
    begin = time.monotonic()
    with ThreadPoolExecutor(args.workers) as pool:
        for (how, body, seed), outcome in zip(plan, pool.map(lambda case: engine.run(engine.drawn(*case)), plan), strict=True):
            found[how, body].append(outcome)
            if outcome.wrong:
                print(f"{how}/{body}/{seed}: {outcome.wrong}\n{outcome.printed}", file=sys.stderr, flush=True)
    print(table(found))
    right = sum(not o.wrong for outcomes in found.values() for o in outcomes)
    print(f"{right} of {len(plan)} right, seed {args.seed}, {time.monotonic() - begin:.0f} s; deadline {engine.DEADLINE:g} s")
    print(f"{machine()}, {mpirun.version()}")
    return right < len(plan)


def table(found: Found) -> str:
    """Right of all, and the longest that one took to end, in seconds from the fault on."""
    lines = ["".join(f"{word:>20}" for word in ("", *engine.BODIES))]
    for how in engine.FAILURES:
        cells = [_cell(found.get((how, body), [])) for body in engine.BODIES]
        lines.append("".join(f"{cell:>20}" for cell in (how, *cells)))
    return "\n".join(lines)


def _cell(outcomes: list[engine.Outcome]) -> str:
    if not outcomes:
        return "-"
    return f"{sum(not o.wrong for o in outcomes)}/{len(outcomes)}, {max(o.seconds for o in outcomes):.1f} s"


def machine() -> str:
    return f"{platform.system()} {platform.release()}, {os.cpu_count()} cores; Python {platform.python_version()}, NumPy {np.__version__}"


if __name__ == "__main__":
    sys.exit(main())
