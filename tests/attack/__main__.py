"""The command line: `python -m tests.attack`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from .engine import ENGINES, batch, run

MUTANTS = 3000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description="Attack fluidx with random input from a seed.")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"{', '.join(ENGINES)}, mutants; all of them without a name")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="how many cases, beside the number that each engine has (default 1)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case of one engine")
    args = parser.parse_args()
    chosen = args.engines or [*ENGINES, "mutants"]
    if unknown := [e for e in chosen if e not in (*ENGINES, "mutants")]:
        parser.error(f"no engine {unknown[0]!r}; there are: {', '.join(ENGINES)}, mutants")
    bad = 0
    for engine in chosen:
        begin = time.perf_counter()
        if engine == "mutants":
            count = str(max(1, int(MUTANTS * args.scale)))
            command = [sys.executable, "-m", "tests.mutants", "--count", count, "--seed", str(args.seed), "--workers", str(args.workers)]
            bad += subprocess.run(command).returncode != 0
            continue
        _, count, what = ENGINES[engine]
        one = args.only is not None
        found = batch(engine, [args.only], args.seed) if one else run(engine, int(count * args.scale), args.seed, args.workers)
        verdicts = ", ".join(f"{n:,} {v}" for v, n in found.verdicts.most_common())
        print(f"{engine} ({what}), seed {args.seed}: {verdicts}; {time.perf_counter() - begin:,.0f} s", flush=True)
        for line in found.wrong[:20]:
            print(f"  {engine} {line}")
        bad += bool(found.wrong)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
