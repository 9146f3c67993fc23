"""Peak resident memory of three training steps, and in fluidx how much of it the plan announces. MB are 10**6 bytes.

Each case is a process of its own, at 1 thread. "library" is what importing adds to Python and NumPy; "model and steps" is the peak of
three steps less what was there behind the import: programs or modules, parameters, optimizer state, activations, scratch. (The starting
values as NumPy arrays are there too until the first step, and freed before it; the peak counts from there.)

What the plan announces is compared in a process of its own, which has the programs, the plan and the libraries before it begins to count:
then it starts the program and runs it three times. The plan's bytes are arena, scratch included, feeds, state, and what each thread keeps
for C kernels. The rest of "model and steps" is what the interpreter keeps: modules, programs, the plan, and room that its heap does not
give back.

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
                with Peer(peer, model, "plan", 1) as p:
                    told = p.receive()
                total, kinds = sum(told["announced"].values()), ", ".join(f"{kind} {mb:.1f}" for kind, mb in told["announced"].items())
                beyond = f"{told['taken']:.1f} MB taken, {(told['taken'] / total - 1) * 100:+.1f} % (reach: within 5 %)"
                rest = f"{m['steps'] - told['taken']:.0f} MB are the interpreter's"
                log(f"  {'':12} the plan announces {total:.1f} MB ({kinds}); {beyond}; {rest}")
        if "torch_eager" in got:
            for peer in (p for p in got if p.startswith("fluidx")):
                a, b = got[peer], got["torch_eager"]
                parts = f"{a['peak'] / b['peak']:.2f} of torch_eager's peak, {a['steps'] / b['steps']:.2f} of its model and steps"
                log(f"  -> {peer} takes {parts}")
    log.close()


if __name__ == "__main__":
    main()
