"""Peak resident memory of three training steps, and in fluidx how much of it the plan announces. MB are 10**6 bytes.

Each case is a process of its own, at 1 thread. "library" is what importing adds to Python and NumPy; "model and steps" is the peak of
three steps less what was there behind the import: programs or modules, parameters, optimizer state, activations, scratch. (The starting
values as NumPy arrays are there too until the first step, and freed before it; the peak counts from there.) The plan's bytes are arena,
scratch included, feeds and state; what is measured beyond them is the programs, the plan, the calls, and what kernels allocate.

    --models resnet,gpt   --peers fluidx,fluidx_nhwc,torch_eager,torch_best   --repeats 3 (the median counts)   --save
"""

from __future__ import annotations

import statistics

from _common import Log, option, options
from _peers import Peer, has, mkl_line, versions


def measure(peer: str, model: str, repeats: int) -> dict[str, float] | str:
    """The medians over processes, in MB, or why there are none."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        with Peer(peer, model, "train", 1) as p:
            try:
                told = p.receive()
                if "missing" in told:
                    return str(told["missing"])
                peak = p.ask("memory", steps=3)
            except RuntimeError as e:
                return str(e)
            mb = told["mb"]
            for name, value in (("library", mb["imported"] - mb["begin"]), ("steps", peak - mb["imported"]), ("peak", peak)):
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()} | {"spread": max(found["peak"]) - min(found["peak"])}


def main() -> None:
    log = Log("memory")
    log(versions())
    log(mkl_line())
    repeats = int(option("repeats", "3"))
    for model in options("models", "resnet,gpt"):
        log(f"\n{model}, three training steps")
        got: dict[str, dict[str, float]] = {}
        for peer in options("peers", "fluidx,fluidx_nhwc,torch_eager,torch_best"):
            if not has(peer, model):
                continue
            m = measure(peer, model, repeats)
            if isinstance(m, str):
                log(f"  {peer:12} not measured: {m}")
                continue
            got[peer] = m
            parts = f"library {m['library']:.0f}, model and steps {m['steps']:.0f}"
            log(f"  {peer:12} peak {m['peak']:.0f} MB (spread {m['spread']:.0f}); {parts}")
            if peer.startswith("fluidx"):
                with Peer(peer, model, "train", 1) as p:
                    p.receive()
                    plan = p.ask("planned")
                total = sum(plan.values())
                kinds = ", ".join(f"{kind} {mb:.1f}" for kind, mb in plan.items())
                log(f"  {'':12} the plan announces {total:.0f} MB ({kinds}); measured beyond it {m['steps'] - total:.0f} MB")
        if "torch_eager" in got:
            for peer in (p for p in got if p.startswith("fluidx")):
                a, b = got[peer], got["torch_eager"]
                parts = f"{a['peak'] / b['peak']:.2f} of torch_eager's peak, {a['steps'] / b['steps']:.2f} of its model and steps"
                log(f"  -> {peer} takes {parts}")
    log.close()


if __name__ == "__main__":
    main()
