"""Time and peak memory of verify() for a deep MLP of 9,002 operators, by strategy and number of ranks.

Each case is a process of its own, with a time limit; "ring" is data_parallel(algorithm="ring"). Goals: verify() on 1,000 ranks takes at
most 2 times as long as on 4 and 500 MB; the full proof of ring on 64 ranks takes 1.5 s.

    --operators 9000   --ranks 4,64,256,1000   --strategies data_parallel,zero1,fsdp,ring   --timeout 120   --save
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from _common import Log, option, options

FULL = 64  # ranks of the full proofs

_CASE = """
import inspect, json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from transpile import deep_mlp
import fluidx as fx
name, ranks, every_rank, operators = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "full", int(sys.argv[5])
strategy = fx.strategies.data_parallel(algorithm="ring") if name == "ring" else fx.strategies.get(name)
main, startup = deep_mlp(operators)
begin = time.perf_counter()
t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)
made = time.perf_counter()
options = {"every_rank": True} if every_rank and "every_rank" in inspect.signature(t.verify).parameters else {}
report = t.verify(**options)
seconds = time.perf_counter() - made
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps({"operators": len(main.ops), "transpile": made - begin, "verify": seconds, "MB": peak}))
"""


def measure(name: str, ranks: int, kind: str, operators: str, timeout: float) -> dict[str, float] | str:
    """What a process measured, or why it did not."""
    command = [sys.executable, "-c", _CASE, str(Path(__file__).parent), name, str(ranks), kind, operators]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {timeout:.0f} s"
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    return json.loads(done.stdout)


def main() -> None:
    log = Log("verify")
    operators, timeout = option("operators", "9000"), float(option("timeout", "120"))
    names = options("strategies", "data_parallel,zero1,fsdp,ring")
    for kind, ranks in (("program", [int(r) for r in options("ranks", "4,64,256,1000")]), ("full", [4, FULL])):
        log("\nverify()" if kind == "program" else "\nverify(every_rank=True)")
        for name in names:
            base = 0.0
            for n in ranks:
                m = measure(name, n, kind, operators, timeout)
                if isinstance(m, str):
                    log(f"  {name:14} {n:5} ranks: {m}")
                    continue
                base = base or m["verify"]
                log(
                    f"  {name:14} {n:5} ranks: verify {m['verify']:.2f} s, {m['verify'] / base:.2f} times that on {ranks[0]}; "
                    f"transpile {m['transpile']:.2f} s; peak {m['MB']:.0f} MB"
                )
    log.close()


if __name__ == "__main__":
    main()
