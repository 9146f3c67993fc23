"""The programs of a benchmark: a ResNet-50 and a GPT, a program file, or an ONNX model with a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from .. import layers, optimizer
from ..ir import Program, ProgramPair, program_guard, unique_name
from ..ir.errors import FluidxError, nearest
from ..layers.declare import fluid_data as data
from ..param_attr import ParamAttr

BOTTLENECKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # width and blocks of the stages of ResNet-50
LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY = 4, 256, 4, 128, 1000  # of the GPT


def resnet50() -> ProgramPair:
    """ResNet-50 (He et al. 2015) on images of 3 x 224 x 224 in 1000 classes, trained by momentum.

    >>> sum(p.trainable for p in resnet50().main.all_parameters())
    161
    """

    def build() -> Any:
        x = layers.pool2d(_norm(_conv(data("image", [-1, 3, 224, 224], "float32"), 64, 7, 2), "relu"), 3, "max", 2, 1)
        for stage, (width, blocks) in enumerate(BOTTLENECKS):
            for k in range(blocks):
                x = _bottleneck(x, width, 2 if stage and not k else 1)
        logits = layers.fc(layers.flatten(layers.pool2d(x, pool_type="avg", global_pooling=True)), 1000)
        return layers.mean(layers.softmax_with_cross_entropy(logits, data("label", [-1, 1], "int64")))

    return _trained("resnet50", build, optimizer.Momentum(0.01, 0.9))


def _bottleneck(x: Any, width: int, stride: int) -> Any:
    y = _norm(_conv(x, width, 1), "relu")
    y = _norm(_conv(_norm(_conv(y, width, 3, stride), "relu"), 4 * width, 1))
    if x.shape[1] != 4 * width:
        x = _norm(_conv(x, 4 * width, 1, stride))
    return layers.relu(layers.elementwise_add(x, y))


def _conv(x: Any, filters: int, size: int, stride: int = 1) -> Any:
    return layers.conv2d(x, filters, size, stride, (size - 1) // 2, bias_attr=False)


def _norm(x: Any, act: str | None = None) -> Any:
    return layers.batch_norm(x, act=act)


def gpt() -> ProgramPair:
    """A GPT of 4 layers of width 256 on 128 tokens out of 1000, 3.7 million parameters, trained by Adam.

    >>> len(gpt().main.all_parameters())
    54
    """

    def build() -> Any:
        tokens, targets = data("tokens", [-1, TOKENS], "int64"), data("targets", [-1, TOKENS, 1], "int64")
        places = layers.create_parameter([TOKENS, WIDTH], "float32", name="places")
        x = layers.embedding(layers.unsqueeze(tokens, [2]), [VOCABULARY, WIDTH], param_attr=ParamAttr(name="words"))
        x = layers.elementwise_add(x, places)
        for _ in range(LAYERS):
            x = layers.elementwise_add(x, _attention(layers.layer_norm(x, begin_norm_axis=2)))
            wide = layers.fc(layers.layer_norm(x, begin_norm_axis=2), 4 * WIDTH, num_flatten_dims=2, act="gelu")
            x = layers.elementwise_add(x, layers.fc(wide, WIDTH, num_flatten_dims=2))
        logits = layers.fc(layers.layer_norm(x, begin_norm_axis=2), VOCABULARY, num_flatten_dims=2)
        return layers.mean(layers.softmax_with_cross_entropy(logits, targets))

    return _trained("gpt", build, optimizer.Adam(3e-4))


def _attention(x: Any) -> Any:
    qkv = layers.split(layers.fc(x, 3 * WIDTH, num_flatten_dims=2), 3, dim=2)
    q, k, v = (layers.transpose(layers.reshape(part, [0, 0, HEADS, WIDTH // HEADS]), [0, 2, 1, 3]) for part in qkv)
    mixed = layers.scaled_dot_product_attention(q, k, v, causal=True)
    return layers.fc(layers.reshape(layers.transpose(mixed, [0, 2, 1, 3]), [0, 0, WIDTH]), WIDTH, num_flatten_dims=2)


def _trained(name: str, build: Callable[[], Any], how: Any) -> ProgramPair:
    main, startup = Program(name), Program(f"{name}_startup")
    with unique_name.guard(), program_guard(main, startup):
        how.minimize(build())
    return ProgramPair(main, startup)


class KnownModel(NamedTuple):
    """A model that a benchmark knows by name, and the rows of a rank if none are said."""

    build: Callable[[], ProgramPair]
    rows: int


MODELS = {"resnet50": KnownModel(resnet50, 8), "gpt": KnownModel(gpt, 8)}


def from_onnx(path: str | Path) -> ProgramPair:
    """The model in an ONNX file, trained by momentum on the cross entropy of its one result."""
    from ..onnx.model import load
    from ..onnx.training import set_training

    model = load(str(path))
    with unique_name.guard("train_"):
        loss = set_training(model, loss="softmax_with_cross_entropy")
        with program_guard(model.program, model.startup):
            assert loss is not None
            optimizer.Momentum(0.01, 0.9).minimize(loss)
    return ProgramPair(model.program, model.startup)


def unknown(name: str) -> FluidxError:
    """The error for a name that is neither a model nor a file."""
    return FluidxError(f"there is no file {name!r}, and no model of this name; {nearest(name, MODELS, 'models are')}")
