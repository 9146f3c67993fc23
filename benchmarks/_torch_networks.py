"""Small networks in PyTorch, of the kinds that people export: a case has the module, its inputs, and which of their axes are open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LONGEST = 50, 32, 4, 64


class Case(NamedTuple):
    """`inputs(batch, size)` draws the inputs; `axes` names the open axes of each input, in order; `classes` are those of the output."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    axes: dict[str, dict[int, str]]
    classes: int
    sizes: tuple[int, int] = (6, 9)  # the size of the second open axis in the example, and in training
    norms: bool = False  # it has batch normalization, which the default export folds
    freeze: tuple[str, ...] = ()  # buffers that nothing in the file distinguishes from parameters


class Attention(nn.Module):
    """`how`: "causal" asks PyTorch for the mask, "table" slices a stored one, "mask" gets one, None has none."""

    def __init__(self, how: str | None = None):
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        if how == "table":
            self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST))[None, None])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, steps, width = x.shape
        q, k, v = (t.view(batch, steps, HEADS, width // HEADS).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        if self.how == "table":
            scores = (q @ k.transpose(-2, -1)) * (width // HEADS) ** -0.5
            scores = scores.masked_fill(self.bias[:, :, :steps, :steps] == 0, float("-inf"))
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.how == "causal")
        return self.out(y.transpose(1, 2).contiguous().view(batch, steps, width))


class Block(nn.Module):
    def __init__(self, how: str | None = None):
        super().__init__()
        self.ln1, self.attention, self.ln2 = nn.LayerNorm(WIDTH), Attention(how), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.ln1(x), mask)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Positions by `arange`; the causal mask by one of the three usual ways ("made": ones of the sizes, their lower triangle)."""

    def __init__(self, how: str = "causal"):
        super().__init__()
        self.how, inner = how, "mask" if how == "made" else how
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(steps, device=tokens.device))
        mask = torch.tril(torch.ones(steps, steps, dtype=torch.bool)) if self.how == "made" else None
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Llama(nn.Module):
    """Rotary positions computed from `arange`, root mean square norms, gated products, a mask made by comparing positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)

    @staticmethod
    def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        batch, steps = tokens.shape
        x = self.tokens(tokens)
        at = torch.arange(steps, device=tokens.device)
        angles = at[None, :, None].float() * self.frequencies[None, None, :]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        seen = (at[None, :] <= at[:, None])[None, None] & (attention_mask[:, None, None, :] > 0)
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, steps, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self._turned(q, cos, sin), self._turned(k, cos, sin), v, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).reshape(batch, steps, WIDTH))
        h = self.norm2(x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


class BERT(nn.Module):
    """An attention mask that is fed, positions sliced from a table of numbers, types filled with zeros, and the mean over what is seen."""

    def __init__(self, pooled: bool = False):
        super().__init__()
        self.pooled = pooled
        self.tokens, self.positions, self.types = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH), nn.Embedding(2, WIDTH)
        self.register_buffer("ids", torch.arange(LONGEST)[None], persistent=False)
        self.norm, self.blocks, self.head = nn.LayerNorm(WIDTH), nn.ModuleList(Block("mask") for _ in range(2)), nn.Linear(WIDTH, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        batch, steps = input_ids.shape
        kinds = torch.zeros((batch, steps), dtype=torch.long, device=input_ids.device)
        x = self.norm(self.tokens(input_ids) + self.positions(self.ids[:, :steps]) + self.types(kinds))
        mask = attention_mask[:, None, None, :].expand(batch, 1, steps, steps).to(x.dtype)
        mask = (1.0 - mask).masked_fill((1.0 - mask).bool(), torch.finfo(x.dtype).min)
        for block in self.blocks:
            x = block(x, mask)
        if self.pooled:
            seen = attention_mask.unsqueeze(-1).expand(x.size()).float()
            x = F.normalize((x * seen).sum(1) / seen.sum(1).clamp(min=1e-9), p=2.0, dim=1)
        return self.head(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks, self.norm, self.head = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Whisper(nn.Module):
    """The encoder: two convolutions over time, one of stride 2, and a table of positions cut to the length."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(8, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.register_buffer("positions", torch.randn(LONGEST, WIDTH))
        self.blocks, self.norm, self.head = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7)

    def forward(self, mel: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).permute(0, 2, 1)
        x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _conv(inside: int, outside: int, size: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None) -> nn.Sequential:
    layers = [nn.Conv2d(inside, outside, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outside)]
    return nn.Sequential(*layers, *([act] if act is not None else []))


class UNet(nn.Module):
    """Pooling down, and up again by interpolation (to the size of what is joined) and by a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.bottom = (_conv(*c, act=nn.ReLU()) for c in ((3, 8), (8, 16), (16, 32)))
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 8, 1)
        self.join2, self.join1, self.head = _conv(32, 16, act=nn.ReLU()), _conv(16, 8, act=nn.ReLU()), nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.down1(image)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.bottom(F.max_pool2d(b, 2))
        b = self.join2(torch.cat((self.up2(c), b), 1))
        up = F.interpolate(self.up1(b), size=a.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.join1(torch.cat((up, a), 1))).permute(0, 2, 3, 1)


class Translator(nn.Module):
    """An LSTM of both directions reads, a GRU with attention writes."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.decoder, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, (h, _) = self.encoder(self.source(source))
        y, _ = self.decoder(self.target(target), torch.cat((h[0], h[1]), -1)[None].contiguous())
        seen = (y @ memory.transpose(1, 2)).softmax(-1) @ memory
        return self.head(torch.cat((y, seen), -1))


class Squeeze(nn.Module):
    def __init__(self, width: int, act: nn.Module, gate: nn.Module):
        super().__init__()
        self.down, self.act, self.up, self.gate = nn.Conv2d(width, 8, 1), act, nn.Conv2d(8, width, 1), gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.up(self.act(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    def __init__(self, width: int, wide: int, size: int, act: nn.Module, squeeze: nn.Module):
        super().__init__()
        inner = _conv(wide, wide, size, groups=wide, act=act)
        self.whole = nn.Sequential(_conv(width, wide, 1, act=act), inner, squeeze, _conv(wide, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.whole(x)


class Mobile(nn.Module):
    def __init__(self, act: type[nn.Module], gate: type[nn.Module], inner: type[nn.Module]):
        super().__init__()
        self.stem = _conv(3, 8, stride=2, act=act())
        self.blocks = nn.Sequential(*(Inverted(8, 24, size, act(), Squeeze(24, inner(), gate())) for size in (3, 5)))
        self.last, self.drop, self.head = _conv(8, 32, 1, act=act()), nn.Dropout(0.0), nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.last(self.blocks(self.stem(image)))
        return self.head(self.drop(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)))


def _tokens(batch: int, size: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, size))


def _mask(batch: int, size: int) -> Tensor:
    return (torch.arange(size)[None] < torch.randint(2, size + 1, (batch, 1))).long()


def _image(side: int) -> Callable[[int, int], dict[str, Tensor]]:
    return lambda batch, size: {"image": torch.randn(batch, 3, side or size, side or size)}


_TEXT = {0: "batch", 1: "sequence"}
_BERT = (lambda b, s: {"input_ids": _tokens(b, s), "attention_mask": _mask(b, s)}, {"input_ids": _TEXT, "attention_mask": _TEXT}, 5)
_GPT = (lambda b, s: {"tokens": _tokens(b, s)}, {"tokens": _TEXT}, VOCABULARY)
_BATCH = {"image": {0: "batch"}}

CASES = {
    "gpt": Case(GPT, *_GPT),
    "gpt_table": Case(lambda: GPT("table"), *_GPT),
    "gpt_made": Case(lambda: GPT("made"), *_GPT),
    "llama": Case(
        Llama,
        lambda b, s: {"tokens": _tokens(b, s), "attention_mask": _mask(b, s)},
        {"tokens": _TEXT, "attention_mask": _TEXT},
        VOCABULARY,
        freeze=("unsqueeze_3",),
    ),
    "bert": Case(BERT, *_BERT),
    "minilm": Case(lambda: BERT(pooled=True), *_BERT),
    "vit": Case(ViT, _image(16), _BATCH, 10),
    "whisper": Case(Whisper, lambda b, s: {"mel": torch.randn(b, 8, 2 * s)}, {"mel": {0: "batch", 2: "frames"}}, 7, freeze=("positions",)),
    "unet": Case(UNet, _image(16), _BATCH, 4, norms=True),
    "unet_any": Case(UNet, _image(0), {"image": {0: "batch", 2: "height", 3: "width"}}, 4, (16, 24), norms=True),
    "seq2seq": Case(
        Translator,
        lambda b, s: {"source": _tokens(b, s + 2), "target": _tokens(b, s)},
        {"source": {0: "batch", 1: "read"}, "target": {0: "batch", 1: "written"}},
        VOCABULARY,
    ),
    "mobilenet": Case(lambda: Mobile(nn.Hardswish, nn.Hardsigmoid, nn.ReLU), _image(16), _BATCH, 10, norms=True),
    "efficientnet": Case(lambda: Mobile(nn.SiLU, nn.Sigmoid, nn.SiLU), _image(16), _BATCH, 10, norms=True),
}


def exported(case: Case, module: nn.Module, path: str, dynamo: bool) -> None:
    """Write the file of a module, as the exporter does by default, except that batch normalization is not folded."""
    example = case.inputs(2, case.sizes[0])
    module.eval()
    if dynamo:
        dims = {name: torch.export.Dim(name) for axes in case.axes.values() for name in axes.values()}
        shapes = {n: {k: dims[d] for k, d in axes.items()} for n, axes in case.axes.items()}
        torch.onnx.export(module, (), path, kwargs=example, dynamo=True, dynamic_shapes=shapes, optimize=not case.norms, verbose=False)
        return
    more: dict[str, Any] = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False} if case.norms else {}
    torch.onnx.export(
        module, tuple(example.values()), path, dynamo=False, input_names=list(example), output_names=["y"],
        dynamic_axes={**case.axes, "y": {0: "batch"}}, **more,
    )  # fmt: skip
