"""One training step of an MLP 784-512-512-10, batch 128: fluidx against the step written by hand in NumPy, and PyTorch if installed.

fluidx copies the fed batch in on every step, as a training loop must; the two others work on one batch that is in place already.
"""

from __future__ import annotations

import importlib.metadata
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from _common import Log, interleaved, ratio, show

import fluidx as fx

SIZES, BATCH, LR = (784, 512, 512, 10), 128, 0.1


def fluidx_step(optimizer: str):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, SIZES[0]], "float32")
        label = fx.data("label", [-1, 1], "int64")
        h = x
        for n in SIZES[1:-1]:
            h = fx.layers.fc(h, n, act="relu")
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(fx.layers.fc(h, SIZES[-1]), label))
        (fx.optimizer.SGD(LR) if optimizer == "sgd" else fx.optimizer.Adam(1e-3)).minimize(loss)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(startup, scope=scope)
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((BATCH, SIZES[0]), "float32"), "label": rng.integers(0, 10, (BATCH, 1))}
    return lambda: exe.run(main, feed=feed, fetch_list=[loss], scope=scope)


def numpy_step(optimizer: str):
    """The step a careful NumPy user writes: everything in place, nothing allocated that need not be."""
    rng = np.random.default_rng(0)
    ws = [(rng.standard_normal((a, b), "float32") * 0.05) for a, b in zip(SIZES, SIZES[1:], strict=False)]
    bs = [np.zeros(b, "float32") for b in SIZES[1:]]
    params = ws + bs
    m, v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    x, label = rng.standard_normal((BATCH, SIZES[0]), "float32"), rng.integers(0, 10, BATCH)
    rows, t = np.arange(BATCH), 0

    def step():
        nonlocal t
        t += 1
        acts = [x]
        for w, b in zip(ws[:-1], bs[:-1], strict=True):
            h = acts[-1] @ w
            h += b
            np.maximum(h, 0, out=h)
            acts.append(h)
        z = acts[-1] @ ws[-1]
        z += bs[-1]
        z -= z.max(1, keepdims=True)
        np.exp(z, out=z)
        z /= z.sum(1, keepdims=True)
        loss = -np.log(z[rows, label]).mean()
        g = z
        g[rows, label] -= 1
        g /= BATCH
        gw, gb = [None] * len(ws), [None] * len(ws)
        for k in range(len(ws) - 1, -1, -1):
            gw[k] = acts[k].T @ g
            gb[k] = g.sum(0)
            if k:
                g = g @ ws[k].T
                g *= acts[k] > 0
        for i, (p, d) in enumerate(zip(params, gw + gb, strict=True)):
            if optimizer == "sgd":
                d *= LR
                p -= d
            else:
                m[i] *= 0.9
                m[i] += 0.1 * d
                v[i] *= 0.999
                np.multiply(d, d, out=d)
                d *= 0.001
                v[i] += d
                rate = 1e-3 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
                np.sqrt(v[i], out=d)
                d += 1e-8
                np.divide(m[i], d, out=d)
                d *= rate
                p -= d
        return loss

    return step


def torch_step(optimizer: str):
    import torch

    torch.set_num_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))
    layers = []
    for a, b in zip(SIZES, SIZES[1:], strict=False):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[:-1])
    opt = torch.optim.SGD(net.parameters(), LR) if optimizer == "sgd" else torch.optim.Adam(net.parameters(), 1e-3)
    x, label = torch.randn(BATCH, SIZES[0]), torch.randint(0, 10, (BATCH,))

    def step():
        opt.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(net(x), label)
        loss.backward()
        opt.step()
        return loss.item()

    return step


def main() -> None:
    log = Log("step")
    fx.set_num_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))  # as many as the others have
    for optimizer in ("sgd", "adam"):
        cases = {"fluidx": fluidx_step(optimizer), "NumPy by hand": numpy_step(optimizer)}
        try:
            cases["PyTorch eager"] = torch_step(optimizer)
            if optimizer == "sgd":
                log(f"PyTorch {importlib.metadata.version('torch')}")
        except ImportError:
            log("PyTorch is not installed: not measured")
        got = interleaved(cases, rounds=25, calls=10)
        log(f"\n{optimizer}, one step")
        for name, seconds in got.items():
            extra = "" if name == "fluidx" else f"; fluidx takes {ratio(got['fluidx'], seconds)} of it"
            log(f"  {name:14} {show(seconds, 1e3, 'ms')}{extra}")
    log.close()


if __name__ == "__main__":
    main()
