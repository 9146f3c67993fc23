"""Five models, each written once over the operations of a framework, for fluidx, PyTorch and JAX: the same mathematics by construction.

    mlp      784-512-512-10, batch 128, Adam
    lenet    LeNet-5 on 28x28, batch 64, SGD with momentum
    resnet   ResNet-18 for 32x32 images, batch 32, batch normalization, SGD with momentum
    resnet50 ResNet-50 for 224x224 images, batch 8, for inference: a step of it takes seconds
    gpt      4 layers, width 256, 4 heads, 128 tokens, batch 8, vocabulary 1,000, Adam
    heads    causal attention alone: 8 heads of 64 over 1,024 tokens, each with a place that is trained, batch 1, SGD with momentum

Attention is each framework's best: one operator in fluidx and PyTorch, written out in JAX, whose own function is no faster on CPUs.

`case(name)` gives the starting values and a batch as NumPy arrays. `fluidx_step`, and `torch_step` and `jax_step` in `_peer_models.py`,
give a call without arguments that does one step from there: it returns the loss of a training step, or the results of the network in
inference. Every step copies or takes the batch as its framework does by default: fluidx and JAX copy it in, PyTorch works on it where it
lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

TRAINED = ("mlp", "lenet", "resnet", "gpt", "heads")
STAGES = (64, 128, 256, 512)  # of ResNet-18, two blocks each
BOTTLENECKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # of ResNet-50: width, which the results have four times, and number of blocks
LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY = 4, 256, 4, 128, 1000
LONG, LONG_WIDTH, LONG_HEADS = 1024, 512, 8  # of heads

# Relative difference of losses up to which two versions count as the same model. float32 sums in another order differ by 1e-6 or so. In
# ResNet batch normalization and 17 layers of relu amplify that from step to step: an activation next to 0 changes sign, and its gradient
# comes or goes.
TOLERANCE = {"mlp": 1e-4, "lenet": 1e-4, "resnet": 1e-3, "resnet50": 1e-3, "gpt": 1e-4, "heads": 1e-4}
HALF_TOLERANCE = 0.05  # of losses: a bfloat16 has 8 bits, and peers round in other places


class Case(NamedTuple):
    """A model's starting values and one batch. Dense weights are [in, out], filters [out, in, height, width]."""

    name: str
    parameters: dict[str, np.ndarray]
    moving: dict[str, np.ndarray]  # means and variances of batch normalization: state that is not trained
    x: np.ndarray
    label: np.ndarray
    optimizer: str  # "adam" or "momentum"
    lr: float


# -- the models ---------------------------------------------------------------------------------------------------------------------


def mlp(f: Any, x: Any) -> Any:
    return f.dense("c", f.dense("b", f.dense("a", x, "relu"), "relu"))


def lenet(f: Any, x: Any) -> Any:
    x = f.pool(f.relu(f.conv("c1", x, padding=2)))
    x = f.pool(f.relu(f.conv("c2", x)))
    return f.dense("out", f.dense("b", f.dense("a", f.flatten(x), "relu"), "relu"))


def resnet(f: Any, x: Any) -> Any:
    x = f.relu(f.norm("stem", f.conv("stem", x, padding=1)))
    for s, _ in enumerate(STAGES):
        for k in range(2):
            name, stride = f"s{s}b{k}", 2 if s and not k else 1
            y = f.relu(f.norm(f"{name}c1", f.conv(f"{name}c1", x, stride, 1)))
            y = f.norm(f"{name}c2", f.conv(f"{name}c2", y, 1, 1))
            if stride > 1:
                x = f.norm(f"{name}short", f.conv(f"{name}short", x, stride))
            x = f.relu(f.add(x, y))
    return f.dense("out", f.mean_of_image(x))


def resnet50(f: Any, x: Any) -> Any:
    x = f.pool(f.relu(f.norm("stem", f.conv("stem", x, 2, 3))), 3, 2, 1)
    for s, (_, blocks) in enumerate(BOTTLENECKS):
        for k in range(blocks):
            name, stride = f"s{s}b{k}", 2 if s and not k else 1
            y = f.relu(f.norm(f"{name}c1", f.conv(f"{name}c1", x)))
            y = f.relu(f.norm(f"{name}c2", f.conv(f"{name}c2", y, stride, 1)))
            y = f.norm(f"{name}c3", f.conv(f"{name}c3", y))
            if not k:
                x = f.norm(f"{name}short", f.conv(f"{name}short", x, stride))
            x = f.relu(f.add(x, y))
    return f.dense("out", f.mean_of_image(x))


def gpt(f: Any, tokens: Any) -> Any:
    x = f.embed("words", "places", tokens)
    for k in range(LAYERS):
        h = f.attention(f.dense(f"l{k}qkv", f.layer_norm(f"l{k}n1", x)), HEADS)
        x = f.add(x, f.dense(f"l{k}proj", h))
        h = f.dense(f"l{k}up", f.layer_norm(f"l{k}n2", x), "gelu")
        x = f.add(x, f.dense(f"l{k}down", h))
    return f.dense("head", f.layer_norm("last", x))


def heads(f: Any, x: Any) -> Any:
    return f.attention(f.shift("places", x), LONG_HEADS)


NETS: dict[str, Callable[[Any, Any], Any]] = {
    "mlp": mlp, "lenet": lenet, "resnet": resnet, "resnet50": resnet50, "gpt": gpt, "heads": heads,
}  # fmt: skip


# -- starting values ----------------------------------------------------------------------------------------------------------------


def case(name: str, seed: int = 0) -> Case:
    """The starting values of a model and a batch, the same on every call."""
    rng = np.random.default_rng(seed)
    p: dict[str, np.ndarray] = {}
    moving: dict[str, np.ndarray] = {}

    def normal(spread: float, *shape: int) -> np.ndarray:
        return rng.standard_normal(shape, "float32") * np.float32(spread)

    def dense(name: str, n: int, m: int, gain: float = 1.0) -> None:
        p[f"{name}_w"], p[f"{name}_b"] = normal(gain / math.sqrt(n), n, m), normal(0.01, m)

    def conv(name: str, c: int, n: int, k: int, bias: bool) -> None:
        p[f"{name}_w"] = normal(math.sqrt(2 / (c * k * k)), n, c, k, k)
        if bias:
            p[f"{name}_b"] = normal(0.01, n)
        else:
            p[f"{name}_scale"], p[f"{name}_shift"] = 1 + normal(0.1, n), normal(0.1, n)
            moving[f"{name}_mean"], moving[f"{name}_var"] = normal(0.1, n), 1 + normal(0.1, n) ** 2

    if name == "mlp":
        for layer, n, m in (("a", 784, 512), ("b", 512, 512), ("c", 512, 10)):
            dense(layer, n, m)
        return Case(name, p, moving, normal(1, 128, 784), rng.integers(0, 10, 128), "adam", 1e-3)
    if name == "lenet":
        conv("c1", 1, 6, 5, True)
        conv("c2", 6, 16, 5, True)
        for layer, n, m in (("a", 400, 120), ("b", 120, 84), ("out", 84, 10)):
            dense(layer, n, m)
        return Case(name, p, moving, normal(1, 64, 1, 28, 28), rng.integers(0, 10, 64), "momentum", 0.01)
    if name == "resnet":
        conv("stem", 3, 64, 3, False)
        c = 64
        for s, n in enumerate(STAGES):
            for k in range(2):
                conv(f"s{s}b{k}c1", c, n, 3, False)
                conv(f"s{s}b{k}c2", n, n, 3, False)
                if s and not k:
                    conv(f"s{s}b{k}short", c, n, 1, False)
                c = n
        dense("out", 512, 10)
        return Case(name, p, moving, normal(1, 32, 3, 32, 32), rng.integers(0, 10, 32), "momentum", 0.01)
    if name == "resnet50":
        conv("stem", 3, 64, 7, False)
        c = 64
        for s, (width, blocks) in enumerate(BOTTLENECKS):
            for k in range(blocks):
                conv(f"s{s}b{k}c1", c, width, 1, False)
                conv(f"s{s}b{k}c2", width, width, 3, False)
                conv(f"s{s}b{k}c3", width, 4 * width, 1, False)
                if not k:
                    conv(f"s{s}b{k}short", c, 4 * width, 1, False)
                c = 4 * width
        dense("out", c, 1000)
        return Case(name, p, moving, normal(1, 8, 3, 224, 224), rng.integers(0, 1000, 8), "momentum", 0.01)
    if name == "gpt":
        p["words"], p["places"] = normal(0.02, VOCABULARY, WIDTH), normal(0.02, TOKENS, WIDTH)
        norms = [f"l{k}n{i}" for k in range(LAYERS) for i in (1, 2)] + ["last"]
        for layer in norms:
            p[f"{layer}_scale"], p[f"{layer}_shift"] = 1 + normal(0.1, WIDTH), normal(0.1, WIDTH)
        for k in range(LAYERS):
            for layer, n, m in (("qkv", WIDTH, 3 * WIDTH), ("proj", WIDTH, WIDTH), ("up", WIDTH, 4 * WIDTH), ("down", 4 * WIDTH, WIDTH)):
                dense(f"l{k}{layer}", n, m, 0.5)
        dense("head", WIDTH, VOCABULARY, 0.5)
        ids = rng.integers(0, VOCABULARY, (8, TOKENS + 1))
        return Case(name, p, moving, np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]), "adam", 3e-4)
    if name == "heads":
        p["places"] = normal(0.1, LONG, 3 * LONG_WIDTH)
        return Case(name, p, moving, normal(1, 1, LONG, 3 * LONG_WIDTH), rng.integers(0, LONG_WIDTH, (1, LONG)), "momentum", 0.01)
    raise SystemExit(f"there is no model {name!r}; there are {', '.join(NETS)}")


# -- fluidx -------------------------------------------------------------------------------------------------------------------------


class _Fluidx:
    """The operations as fluidx layers."""

    def __init__(self, c: Case, layout: str):
        import fluidx as fx

        self.fx, self.c, self.layout = fx, c, layout

    def dense(self, name: str, x: Any, act: str | None = None) -> Any:
        size = self.c.parameters[f"{name}_w"].shape[1]
        return self.fx.layers.fc(x, size, num_flatten_dims=len(x.shape) - 1, param_attr=f"{name}_w", bias_attr=f"{name}_b", act=act)

    def conv(self, name: str, x: Any, stride: int = 1, padding: int = 0) -> Any:
        w, bias = self.c.parameters[f"{name}_w"], f"{name}_b" if f"{name}_b" in self.c.parameters else False
        return self.fx.layers.conv2d(
            x, w.shape[0], w.shape[2], stride, padding, param_attr=f"{name}_w", bias_attr=bias, data_format=self.layout
        )

    def norm(self, name: str, x: Any) -> Any:
        return self.fx.layers.batch_norm(
            x, param_attr=f"{name}_scale", bias_attr=f"{name}_shift", moving_mean_name=f"{name}_mean", moving_variance_name=f"{name}_var",
            data_layout=self.layout,
        )  # fmt: skip

    def relu(self, x: Any) -> Any:
        return self.fx.layers.relu(x)

    def pool(self, x: Any, size: int = 2, stride: int = 2, padding: int = 0) -> Any:
        return self.fx.layers.pool2d(x, size, "max", stride, padding, data_format=self.layout)

    def mean_of_image(self, x: Any) -> Any:
        x = self.fx.layers.pool2d(x, pool_type="avg", global_pooling=True, data_format=self.layout)
        return self.fx.layers.flatten(x)

    def flatten(self, x: Any) -> Any:
        return self.fx.layers.flatten(x)

    def add(self, x: Any, y: Any) -> Any:
        return self.fx.layers.elementwise_add(x, y)

    def embed(self, words: str, places: str, ids: Any) -> Any:
        return self.shift(places, self.fx.embedding(ids, [VOCABULARY, WIDTH], param_attr=words, dtype=self.c.parameters[words].dtype.name))

    def shift(self, name: str, x: Any) -> Any:
        return self.add(x, self.fx.layers.create_parameter(self.c.parameters[name].shape, x.dtype, name=name))

    def layer_norm(self, name: str, x: Any) -> Any:
        return self.fx.layers.layer_norm(x, begin_norm_axis=2, param_attr=f"{name}_scale", bias_attr=f"{name}_shift")

    def attention(self, qkv: Any, heads: int) -> Any:
        ly, width = self.fx.layers, qkv.shape[2] // 3
        q, k, v = (ly.transpose(ly.reshape(part, [0, 0, heads, width // heads]), [0, 2, 1, 3]) for part in ly.split(qkv, 3, dim=2))
        return ly.reshape(ly.transpose(ly.scaled_dot_product_attention(q, k, v, causal=True), [0, 2, 1, 3]), [0, 0, width])


class FluidxModel(NamedTuple):
    """What a fluidx version is made of; `feed` is that of one rank."""

    main: Any
    startup: Any
    result: Any  # the loss, or the results of the network
    feed: dict[str, np.ndarray]


def fluidx_model(c: Case, train: bool = True, layout: str = "NCHW", half: bool = False) -> FluidxModel:
    """The programs. Inference gets the forward part that `clone(for_test=True)` leaves. `half`: mixed precision in bfloat16."""
    import fluidx as fx

    f = _Fluidx(c, layout)
    feed = {"x": c.x if layout == "NCHW" or c.x.ndim < 4 else np.ascontiguousarray(c.x.transpose(0, 2, 3, 1)), "label": c.label[..., None]}
    main, startup = fx.Program(c.name), fx.Program(f"{c.name}_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, *feed["x"].shape[1:]], c.x.dtype.name)
        label = fx.data("label", [-1, *feed["label"].shape[1:]], "int64")
        result = NETS[c.name](f, x)
        if train:
            result = fx.layers.mean(fx.layers.softmax_with_cross_entropy(result, label))
            optimizer: Any = fx.optimizer.Adam(c.lr) if c.optimizer == "adam" else fx.optimizer.Momentum(c.lr, 0.9)
            if half:
                plain = {"init_loss_scaling": 1.0, "use_dynamic_loss_scaling": False}
                optimizer = fx.mixed_precision.decorate(optimizer, dtype="bfloat16", **plain)
            optimizer.minimize(result)
    if not train:
        main, feed = main.clone(for_test=True), {"x": feed["x"]}
        main = fx.rewrite.Amp().run(main) if half else main
    return FluidxModel(main, startup, result, feed)


def fluidx_step(c: Case, train: bool = True, layout: str = "NCHW", gpu: bool = False, half: bool = False) -> Callable[[], Any]:
    import fluidx as fx

    m = fluidx_model(c, train, layout, half)
    exe, scope = fx.Executor(fx.CUDAPlace(0) if gpu else fx.CPUPlace()), fx.executor.Scope()
    exe.run(m.startup, scope=scope)
    start(scope, c)
    if not train:  # batch normalization into the filters before it, as torch_best and ONNX Runtime do
        fx.InferenceTranspiler().transpile(m.main, scope=scope)

    def step() -> Any:
        (value,) = exe.run(m.main, feed=m.feed, fetch_list=[m.result], scope=scope)
        return value.item() if train else value.astype(np.float32, copy=False)

    return step


def start(scope: Any, c: Case) -> None:
    """Put the starting values into a scope of fluidx."""
    for name, value in {**c.parameters, **c.moving}.items():
        scope.set(name, value)


def fluidx_ranks_step(c: Case, strategy: str, ranks: int, places: Any) -> Callable[[], Any]:
    """A step of ranks. Every one gets a batch, the same one, so the loss is that of one device."""
    import fluidx as fx

    m = fluidx_model(c)
    t = fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=ranks)
    exe = fx.ParallelExecutor(t, places=places)
    exe.run_startup()
    for name, value in {**c.parameters, **c.moving}.items():
        exe.set_state(name, value)
    feed = {name: np.concatenate([value] * ranks) for name, value in m.feed.items()}
    return lambda: exe.run([m.result], feed)[0].item()
