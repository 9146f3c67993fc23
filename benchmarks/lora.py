"""LoRA on an ONNX file beside PEFT's arithmetic written out in PyTorch, and the bytes of a training step. Needs torch and onnxscript.

A small GPT and a small BERT are written by torch's exporter with open axes, adapted with rank 8 at q and v, and trained for five steps of
SGD with momentum on the same batch, from the same A and B. The table has the largest relative difference of the losses, and of each
adapter relative to its largest element, after the last step. Then bytes as a plan has them: base weights, what the step keeps beside them
(adapters, the optimizer's state), and its arena (activations and gradients), beside those of training all weights.

    --models gpt,bert   --rank 8   --width 128   --steps 5   --save
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from _common import Log, option, options

import fluidx as fx

ALPHA, RATE, MOMENTUM, VOCABULARY, BATCH, LENGTH = 16.0, 0.5, 0.9, 512, 4, 32


def torch_model(kind: str, width: int) -> Any:
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            q, k, v = (layer(x).view(b, t, 4, width // 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=kind == "gpt")
            return self.o(mixed.transpose(1, 2).reshape(b, t, width))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.ln1, self.ln2 = Attention(), nn.LayerNorm(width), nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            if kind == "gpt":
                x = x + self.attn(self.ln1(x))
                return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))
            x = self.ln1(x + self.attn(x))
            return self.ln2(x + self.down(nn.functional.gelu(self.up(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
            self.h = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            for block in self.h:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Net().eval()


def exported(net: Any) -> bytes:
    import torch

    axes = {"ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("time", max=LENGTH)}}
    program = torch.onnx.export(net, (torch.zeros(2, LENGTH, dtype=torch.long),), dynamo=True, dynamic_shapes=axes, verbose=False)
    stream = io.BytesIO()
    program.save(stream)
    return stream.getvalue()


def adapted(net: Any, start: dict[str, np.ndarray], scale: float) -> dict[str, Any]:
    """PEFT's arithmetic: y = base(x) + B(A(x)) * scale. Returns A and B by the names that fluidx gives them."""
    import torch

    class LoraLinear(torch.nn.Module):
        def __init__(self, base: Any, a: np.ndarray, b: np.ndarray) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = (torch.nn.Parameter(torch.from_numpy(v.copy())) for v in (a, b))

        def forward(self, x: Any) -> Any:
            linear = torch.nn.functional.linear
            return self.base(x) + linear(linear(x, self.a), self.b) * scale

    for p in net.parameters():
        p.requires_grad_(False)
    found = {}
    for module in sorted({n.partition(".lora_")[0] for n in start}):
        parent, _, last = module.rpartition(".")
        a, b = (f"{module}.lora_{x}.weight" for x in "AB")
        layer = LoraLinear(net.get_submodule(module), start[a], start[b])
        setattr(net.get_submodule(parent), last, layer)
        found[a], found[b] = layer.a, layer.b
    return found


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, VOCABULARY, (BATCH, LENGTH)), rng.integers(0, VOCABULARY, (BATCH, LENGTH, 1))


def by_torch(net: Any, start: dict[str, np.ndarray], scale: float, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    import torch

    adapters = adapted(net, start, scale)
    optimizer = torch.optim.SGD(list(adapters.values()), RATE, MOMENTUM)
    ids, label = map(torch.from_numpy, batch())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), label.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().numpy() for n, p in adapters.items()}


def prepared(source: bytes, rank: int, shapes: dict[str, list[int]] | None = None, base: str | None = None) -> tuple[Any, Any]:
    """The model and its loss, for `rank` 0 with all weights trained."""
    with fx.unique_name.guard():
        model = fx.onnx.load(source, shapes)
        lora = fx.onnx.Lora(rank, ALPHA, ["q", "v"], base=base) if rank else None
        loss = fx.onnx.set_training(model, loss="softmax_with_cross_entropy", lora=lora)
        with fx.program_guard(model.program, model.startup):
            fx.optimizer.Momentum(RATE, MOMENTUM).minimize(loss)
    model.startup.random_seed = 1
    return model, loss


def by_fluidx(source: bytes, rank: int, steps: int) -> tuple[dict[str, np.ndarray], list[float], dict[str, np.ndarray]]:
    """A and B before, the losses, A and B after."""
    model, loss = prepared(source, rank)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(model.startup, scope=scope)
    names = [p.name for p in model.parameters if p.trainable]
    start = {n: np.array(scope.get(n)) for n in names}
    ids, label = batch()
    feed = {model.feeds[0].name: ids, "label": label}
    losses = [exe.run(model.program, feed=feed, fetch_list=[loss], scope=scope)[0].item() for _ in range(steps)]
    return start, losses, {n: np.array(scope.get(n)) for n in names}


def step_bytes(source: bytes, rank: int, base: str | None = None) -> tuple[int, int]:
    """Bytes of a step on one device: parameters and the optimizer's state; and the rest of the plan, activations and gradients."""
    model, _ = prepared(source, rank, {"ids": [-1, LENGTH]}, base)
    t = fx.DistributeTranspiler(fx.strategies.data_parallel())
    t.transpile(program=model.program, startup_program=model.startup, trainers=1)
    state = sum(v.desc.type.nbytes for v in model.program.list_vars() if v.persistable)
    found = fx.simulate(t, cluster="dgx-a100", batch=BATCH)
    return state, found.memory().device - state


def main() -> None:
    log, rank, steps = Log("lora"), int(option("rank", "8")), int(option("steps", "5"))
    for kind in options("models", "gpt,bert"):
        net = torch_model(kind, int(option("width", "128")))
        source = exported(net)
        start, losses, after = by_fluidx(source, rank, steps)
        wanted, theirs = by_torch(net, start, ALPHA / rank, steps)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        worst = max(np.abs(after[n] - theirs[n]).max() / np.abs(theirs[n]).max() for n in theirs)
        log(f"{kind}: loss {losses[0]:.6f} -> {losses[-1]:.6f}, losses differ by {apart:.1e}, {len(start)} adapters by {worst:.1e}")
        base = sum(4 * int(np.prod(p.shape)) for p in fx.onnx.load(source).parameters)
        (state, rest), (all_state, all_rest) = step_bytes(source, rank), step_bytes(source, 0)
        small, small_rest = step_bytes(source, rank, "int8")
        log(f"  base {base} bytes; LoRA keeps {state} ({state / base - 1:+.1%}), the arena is {rest}; all weights: {all_state}, {all_rest}")
        log(f"  with base='int8' (embeddings stay float32) LoRA keeps {small}, the arena is {small_rest}")
    log.close()


if __name__ == "__main__":
    main()
