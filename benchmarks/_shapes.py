"""Parameters of well-known models, as (name, number of elements), from their published architectures."""

from __future__ import annotations

Params = list[tuple[str, int]]


def resnet50() -> Params:
    """He et al. 2015: bottleneck blocks 3, 4, 6, 3; 25.6 million parameters."""
    out: Params = [("conv1.w", 64 * 3 * 49), ("bn1.scale", 64), ("bn1.bias", 64)]
    channels = 64
    for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True)):
        for block in range(blocks):
            p = f"s{stage}b{block}"
            shapes = [("a", channels * width, width), ("b", width * width * 9, width), ("c", width * width * 4, width * 4)]
            if block == 0:
                shapes.append(("down", channels * width * 4, width * 4))
            for name, n, c in shapes:
                out += [(f"{p}.{name}.w", n), (f"{p}.{name}.scale", c), (f"{p}.{name}.bias", c)]
            channels = width * 4
    return [*out, ("fc.w", 2048 * 1000), ("fc.b", 1000)]


def vgg16() -> Params:
    """Simonyan and Zisserman 2014, configuration D: 138 million parameters."""
    out: Params = []
    channels = 3
    for k, width in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        out += [(f"conv{k}.w", channels * width * 9), (f"conv{k}.b", width)]
        channels = width
    for k, (a, b) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000))):
        out += [(f"fc{k}.w", a * b), (f"fc{k}.b", b)]
    return out


def transformer(layers: int, width: int, vocabulary: int, positions: int, extra: Params) -> Params:
    out: Params = [("tokens", vocabulary * width), ("positions", positions * width), *extra]
    for k in range(layers):
        square = width * width
        for name, n in (("q", square), ("k", square), ("v", square), ("o", square), ("up", 4 * square), ("down", 4 * square)):
            out += [(f"l{k}.{name}.w", n), (f"l{k}.{name}.b", 4 * width if name == "up" else width)]
        out += [(f"l{k}.{norm}.{part}", width) for norm in ("n1", "n2") for part in ("scale", "bias")]
    return out


def bert_large() -> Params:
    """Devlin et al. 2018: 24 layers, width 1024."""
    extra = [("types", 2 * 1024), ("pool.w", 1024 * 1024), ("pool.b", 1024), ("n.scale", 1024), ("n.bias", 1024)]
    return transformer(24, 1024, 30522, 512, extra)


def gpt2_xl() -> Params:
    """Radford et al. 2019: 48 layers, width 1600."""
    return transformer(48, 1600, 50257, 1024, [("n.scale", 1600), ("n.bias", 1600)])


MODELS = {"ResNet-50": resnet50(), "VGG-16": vgg16(), "BERT-large": bert_large(), "GPT-2 XL": gpt2_xl()}
