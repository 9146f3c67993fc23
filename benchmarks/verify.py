"""Time and peak memory of verify() for a deep MLP of 9,002 operators, by strategy and number of ranks.

Each case is a process of its own, with a time limit; seconds are of CPU. Goals: verify() on 1,000 ranks takes at most 2 times as long as on
4 and 500 MB; the full proof of ring on 64 ranks takes 1.5 s.

    --operators 10000   --ranks 4,1000   --strategies data_parallel,ring   --full ring,ring_optimizer   --timeout 120   --save
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from _common import Log, option, options
from _strategies import STRATEGIES, against

FULL = 64  # ranks of the full proofs

_CASE = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from transpile import deep_mlp
import fluidx as fx
from _strategies import STRATEGIES
name, ranks, every_rank, operators = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "full", int(sys.argv[5])
make, ranks_of = STRATEGIES[name]
main, startup = deep_mlp(operators)
begin = time.process_time()
t = fx.DistributeTranspiler(make()).transpile(program=main, startup_program=startup, trainers=ranks_of(ranks))
made = time.process_time()
t.verify(every_rank=every_rank)
seconds = time.process_time() - made
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
    operators, timeout = option("operators", "10000"), float(option("timeout", "120"))
    every, ranks = options("strategies", ",".join(STRATEGIES)), [int(r) for r in options("ranks", "4,1000")]
    log("\nverify()")
    for name in every:
        base = 0.0
        for n in ranks:
            m = measure(name, n, "program", operators, timeout)
            if isinstance(m, str):
                log(f"  {name:18} {n:5} ranks: {m}")
                continue
            base = base or m["verify"]
            times = m["verify"] / base
            in_time, in_memory = ("", "") if n == ranks[0] else (f" ({against(2, times)})", f" ({against(500, m['MB'])})")
            log(
                f"  {name:18} {n:5} ranks: verify {m['verify']:.2f} s, {times:.2f} times that on {ranks[0]}{in_time}; "
                f"transpile {m['transpile']:.2f} s; peak {m['MB']:.0f} MB{in_memory}"
            )
    log("\nverify(every_rank=True)")
    for name in options("full", "data_parallel,zero1,ring_optimizer,ring"):
        for n in (4, FULL):
            m = measure(name, n, "full", operators, timeout)
            if isinstance(m, str):
                log(f"  {name:18} {n:5} ranks: {m}")
                continue
            goal = f" ({against(1.5, m['verify'])})" if (name, n) == ("ring", FULL) else ""
            log(f"  {name:18} {n:5} ranks: verify {m['verify']:.2f} s{goal}; peak {m['MB']:.0f} MB")
    log.close()


if __name__ == "__main__":
    main()
