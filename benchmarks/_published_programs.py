"""Programs of the shapes of published measurements: transformers, GPT with tensor and pipeline parallelism, convolutional networks."""

from __future__ import annotations

from typing import Any

import fluidx as fx
from fluidx.ir import Shard
from fluidx.mixed_precision import AutoMixedPrecisionLists

L = fx.layers
HALF = ("softmax", "layer_norm", "dropout", "gelu", "elementwise_add")  # what the fused kernels of training frameworks compute in 16 bits


def _cut(name: str, axis: int, tp: int) -> dict[str, Any]:
    """Options of a layer whose weight is cut by columns (1) or by rows (0) over tp. It has no bias: products add it as they write."""
    weight = fx.ParamAttr(f"{name}.w", placement=Shard(axis, "tp")) if tp > 1 else fx.ParamAttr(f"{name}.w")
    return {"num_flatten_dims": 2, "param_attr": weight, "bias_attr": False}


def block(h: Any, name: str, heads: int, tp: int = 1, dropout: float = 0.1, ffn: int = 0) -> Any:
    """A transformer block with attention written out, as frameworks computed it before flash attention."""
    width = h.shape[-1]
    x = L.layer_norm(h, begin_norm_axis=2)
    parts = [L.fc(x, width, **_cut(f"{name}.{part}", 1, tp)) for part in "qkv"]
    q, k, v = (L.transpose(L.reshape(part, [0, 0, heads, width // heads]), [0, 2, 1, 3]) for part in parts)
    weights = L.dropout(L.softmax(L.matmul(q, k, transpose_y=True, alpha=(width // heads) ** -0.5)), dropout)
    mixed = L.reshape(L.transpose(L.matmul(weights, v), [0, 2, 1, 3]), [0, 0, width])
    h = h + L.dropout(L.fc(mixed, width, **_cut(f"{name}.out", 0, tp)), dropout)
    up = L.fc(L.layer_norm(h, begin_norm_axis=2), ffn or 4 * width, act="gelu", **_cut(f"{name}.up", 1, tp))
    return h + L.dropout(L.fc(up, width, **_cut(f"{name}.down", 0, tp)), dropout)


def halved(optimizer: Any, reduce_dtype: str = "float16") -> Any:
    """The optimizer in mixed precision, without a scale of the loss: its checks are a few small operators."""
    lists = AutoMixedPrecisionLists(custom_white_list=list(HALF))
    return fx.mixed_precision.decorate(
        optimizer, lists, init_loss_scaling=1.0, use_dynamic_loss_scaling=False, dtype="float16", reduce_dtype=reduce_dtype
    )


def gpt(width: int, heads: int, layers: int, length: int, tp: int, pp: int, vocabulary: int = 51200) -> tuple[Any, Any]:
    """Megatron's GPT with full recomputation: layers cut over tp by heads and columns, and over pp in stages."""
    main, startup = fx.Program("gpt"), fx.Program("gpt_startup")
    main.random_seed = startup.random_seed = 1
    table = fx.ParamAttr("table", placement=Shard(0, "tp")) if tp > 1 else fx.ParamAttr("table")
    head = fx.ParamAttr("head.w", placement=Shard(1, "tp")) if tp > 1 else fx.ParamAttr("head.w")
    kept = []

    def stage(k: int) -> Any:
        return fx.device_guard(f"stage:{k}" if pp > 1 else None)

    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, length], "int64"), fx.data("label", [-1, length, 1], "int64")
        with stage(0):
            h = fx.embedding(ids, [vocabulary, width], param_attr=table)
        for k in range(layers):
            with stage(k * pp // layers):
                kept.append(h)
                h = block(h, f"layer{k}", heads, tp)
        with stage(pp - 1):
            logits = L.fc(L.layer_norm(h, begin_norm_axis=2), vocabulary, num_flatten_dims=2, param_attr=head, bias_attr=False)
            loss = L.mean(L.softmax_with_cross_entropy(logits, label))
            optimizer = fx.optimizer.RecomputeOptimizer(halved(fx.optimizer.Adam(1e-4), "float32"))
            optimizer._set_checkpoints(kept)
            optimizer.minimize(loss)
    return main, startup


def transformer(layers: int, width: int, heads: int, vocabulary: int, length: int, half: bool, *, ffn: int = 0, head_rows: int = 0,
                tied: bool = True, reduce_dtype: str = "float32") -> tuple[Any, Any]:  # fmt: skip
    """A transformer whose head is the table of its words, so that the gradient of the table is ready last. `head_rows`: rows of the table
    that an adaptive softmax computes for every token."""
    main, startup = fx.Program("transformer"), fx.Program("transformer_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, length], "int64"), fx.data("label", [-1, length, 1], "int64")
        h = fx.embedding(ids, [vocabulary, width], param_attr=fx.ParamAttr("table"))
        for k in range(layers):
            h = block(h, f"layer{k}", heads, ffn=ffn)
        h = L.layer_norm(h, begin_norm_axis=2)
        if tied:
            table = main.global_block().var("table")
            rows = L.slice(table, axes=[0], starts=[0], ends=[head_rows]) if head_rows else table
            logits = L.matmul(h, rows, transpose_y=True)
        else:
            logits = L.fc(h, vocabulary, num_flatten_dims=2, bias_attr=False)
        loss = L.mean(L.softmax_with_cross_entropy(logits, label))
        (halved(fx.optimizer.Adam(1e-4), reduce_dtype) if half else fx.optimizer.Adam(1e-4)).minimize(loss)
    return main, startup


def gradients(mib: float, count: int = 1) -> tuple[Any, Any]:
    """A program with `count` gradients of `mib` MiB, which are ready together, and hardly any compute."""
    main, startup = fx.Program("gradients"), fx.Program("gradients_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 64], "float32")
        made = [L.mean(L.fc(x, round(mib * 2**20 / 256), bias_attr=False)) for _ in range(count)]
        fx.optimizer.SGD(0.1).minimize(L.sums(made) if count > 1 else made[0])
    return main, startup


def _conv(x: Any, filters: int, size: int, stride: int = 1, act: str | None = "relu", norm: bool = True) -> Any:
    y = L.conv2d(x, filters, size, stride=stride, padding=size // 2, bias_attr=not norm and None, act=None if norm else act)
    return L.batch_norm(y, act=act, use_global_stats=True) if norm else y  # no rank asks others for statistics, as in DDP and Horovod


def resnet(depths: tuple[int, ...] = (3, 4, 6, 3), half: bool = False) -> tuple[Any, Any]:
    """A ResNet of bottlenecks for images of 224 x 224: (3, 4, 6, 3) is ResNet-50, (3, 4, 23, 3) ResNet-101."""

    def net(x: Any) -> Any:
        h = L.pool2d(_conv(x, 64, 7, 2), 3, "max", 2, 1)
        for stage, count in enumerate(depths):
            for k in range(count):
                width, stride = 64 << stage, 2 if stage and not k else 1
                short = h if k else _conv(h, 4 * width, 1, stride, None)
                h = L.relu(short + _conv(_conv(_conv(h, width, 1), width, 3, stride), 4 * width, 1, act=None))
        return L.fc(L.reduce_mean(h, dim=[2, 3]), 1000)

    return _images("resnet", net, half)


def vgg16(half: bool = False) -> tuple[Any, Any]:
    """VGG-16 for images of 224 x 224."""

    def net(h: Any) -> Any:
        for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                h = _conv(h, filters, 3, norm=False)
            h = L.pool2d(h, 2, "max", 2)
        return L.fc(L.fc(L.fc(h, 4096, act="relu"), 4096, act="relu"), 1000)

    return _images("vgg16", net, half)


def _images(name: str, net: Any, half: bool) -> tuple[Any, Any]:
    main, startup = fx.Program(name), fx.Program(f"{name}_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, 3, 224, 224], "float32"), fx.data("label", [-1, 1], "int64")
        loss = L.mean(L.softmax_with_cross_entropy(net(x), label))
        optimizer = fx.optimizer.Momentum(0.1, 0.9)
        (halved(optimizer, "float32") if half else optimizer).minimize(loss)
    return main, startup
