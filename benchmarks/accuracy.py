"""How far the gradients of all parameters are from a run in float64: fluidx and PyTorch, both in float32, on the models of `train.py`.

Parameters and batch are those of float32, as numbers of float64 in the reference. The reference is PyTorch's, and fluidx's own run in
float64 stands beside it, so that both frameworks are known to compute the same function. The error of a parameter is the norm of the
difference over the norm of the reference; the table has its median and its maximum over the parameters. Where fluidx is worse than PyTorch
in a parameter by more than the factor of `--report`, that parameter is named.

A value next to 0 that changes sign under relu adds or removes a gradient: one such value among thousands is an error of 1e-3, and which run
has one is chance. `resnet_tanh` is ResNet-18 with tanh for relu, whose errors are those of the arithmetic.

`--winograd` is FLUIDX_WINOGRAD: 0 computes convolutions without Winograd's transforms, 4 with larger tiles.

    --models mlp,lenet,resnet,resnet_tanh,gpt   --report 1.5   --seeds 3   --winograd 2   --save
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
from _common import Log, option, options
from _models import NETS, Case, case, fluidx_model, resnet, start
from _peer_models import torch_net
from _peers import versions

import fluidx as fx

Gradients = dict[str, np.ndarray]


class _Smooth:
    """The operations of a framework, with tanh for relu."""

    def __init__(self, f: Any):
        self.f = f

    def relu(self, x: Any) -> Any:
        return (self.f.torch if hasattr(self.f, "torch") else fx.layers).tanh(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.f, name)


NETS["resnet_tanh"] = lambda f, x: resnet(_Smooth(f), x)


def by_fluidx(c: Case) -> Gradients:
    """Gradients in the dtype of the case, fetched from one training step."""
    m, exe, scope = fluidx_model(c), fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(m.startup, scope=scope)
    start(scope, c)
    return dict(zip(c.parameters, exe.run(m.main, m.feed, [f"{n}@GRAD" for n in c.parameters], scope=scope), strict=True))


def wide(c: Case) -> Case:
    """The same numbers as float64."""
    float64 = {k: {n: a.astype("float64") for n, a in getattr(c, k).items()} for k in ("parameters", "moving")}
    return c._replace(**float64, x=c.x.astype("float64") if c.x.dtype.kind == "f" else c.x)


def by_torch(c: Case) -> Gradients:
    """Gradients in the dtype of the case."""
    import torch

    net = torch_net(c, True)
    loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(c.x)).flatten(0, -2), torch.from_numpy(c.label).flatten())
    loss.backward()
    found = {n: p.grad.numpy() for n, p in net.named_parameters()}
    return {n: g.T if g.ndim == 2 and n.endswith("_w") else g for n, g in found.items()}


def errors(got: Gradients, want: Gradients) -> dict[str, float]:
    return {n: float(np.linalg.norm(got[n].astype("float64") - want[n]) / np.linalg.norm(want[n])) for n in want}


def spread(e: Mapping[str, float]) -> str:
    return f"median {statistics.median(e.values()):.2e}, max {max(e.values()):.2e} ({max(e, key=lambda n: e[n])})"


def main() -> None:
    log = Log("accuracy")
    log(versions())
    if find_spec("torch") is None:
        log("PyTorch is not installed: there is nothing to compare with")
        return log.close()
    os.environ["FLUIDX_WINOGRAD"] = option("winograd", "2")
    log(fx.native.describe())
    for name in options("models", "mlp,lenet,resnet,resnet_tanh,gpt"):
        for seed in range(int(option("seeds", "3"))):
            compare(log, name, seed)
    log.close()


def compare(log: Log, name: str, seed: int) -> None:
    c = case(name.removesuffix("_tanh"), seed)._replace(name=name)
    want = by_torch(wide(c))
    log(f"\n{name}, seed {seed}: {len(want)} parameters")
    log(f"  fluidx float64   {spread(errors(by_fluidx(wide(c)), want))}")
    ours, theirs = errors(by_fluidx(c), want), errors(by_torch(c), want)
    log(f"  fluidx float32   {spread(ours)}")
    log(f"  PyTorch float32  {spread(theirs)}")
    ratios = {n: ours[n] / theirs[n] for n in want}
    worst = sorted((n for n in want if ratios[n] > float(option("report", "1.5"))), key=lambda n: -ratios[n])
    named = ", ".join(f"{n} {ratios[n]:.1f}" for n in worst[:8]) + (f" and {len(worst) - 8} more" if len(worst) > 8 else "")
    medians = statistics.median(ours.values()) / statistics.median(theirs.values())
    log(f"  fluidx / PyTorch {medians:.2f} of medians, {max(ours.values()) / max(theirs.values()):.2f} of maxima; worse: {named or 'none'}")


if __name__ == "__main__":
    main()
