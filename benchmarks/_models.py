"""Five models, each written once over the operations of a framework, for fluidx, PyTorch and JAX: the same mathematics by construction.

    mlp      784-512-512-10, batch 128, Adam
    lenet    LeNet-5 on 28x28, batch 64, SGD with momentum
    resnet   ResNet-18 for 32x32 images, batch 32, batch normalization, SGD with momentum
    resnet50 ResNet-50 for 224x224 images, batch 8, for inference: a step of it takes seconds
    gpt      4 layers, width 256, 4 heads, 128 tokens, batch 8, vocabulary 1,000, Adam
    heads    causal attention alone: 8 heads of 64 over 1,024 tokens, each with a place that is trained, batch 1, SGD with momentum

Attention is each framework's best: one operator in fluidx and PyTorch, written out in JAX, whose own function is no faster on CPUs.

`case(name)` gives the starting values and a batch as NumPy arrays. `fluidx_step`, `torch_step` and `jax_step` give a call without
arguments that does one step from there: it returns the loss of a training step, or the results of the network in inference. Every step
copies or takes the batch as its framework does by default: fluidx and JAX copy it in, PyTorch works on it where it lies.

Only the framework that is asked for is imported.
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


# -- PyTorch ------------------------------------------------------------------------------------------------------------------------


class _Torch:
    """The operations as PyTorch functions. `get(name)` is a tensor; dense weights are [out, in], as torch.nn.Linear has them."""

    def __init__(self, get: Callable[[str], Any], train: bool):
        import torch

        self.F, self.torch, self.get, self.train = torch.nn.functional, torch, get, train

    def dense(self, name: str, x: Any, act: str | None = None) -> Any:
        y = self.F.linear(x, self.get(f"{name}_w"), self.get(f"{name}_b"))
        return y if act is None else self.F.relu(y) if act == "relu" else self.F.gelu(y)

    def conv(self, name: str, x: Any, stride: int = 1, padding: int = 0) -> Any:
        return self.F.conv2d(x, self.get(f"{name}_w"), self.get(f"{name}_b"), stride, padding)

    def norm(self, name: str, x: Any) -> Any:
        if self.get(f"{name}_scale") is None:  # folded into the convolution
            return x
        mean, var, scale, shift = (self.get(f"{name}_{part}") for part in ("mean", "var", "scale", "shift"))
        return self.F.batch_norm(x, mean, var, scale, shift, self.train, 0.1, 1e-5)

    def relu(self, x: Any) -> Any:
        return self.F.relu(x)

    def pool(self, x: Any, size: int = 2, stride: int = 2, padding: int = 0) -> Any:
        return self.F.max_pool2d(x, size, stride, padding)

    def mean_of_image(self, x: Any) -> Any:
        return x.mean((2, 3))

    def flatten(self, x: Any) -> Any:
        return x.flatten(1)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def embed(self, words: str, places: str, ids: Any) -> Any:
        return self.shift(places, self.F.embedding(ids, self.get(words)))

    def shift(self, name: str, x: Any) -> Any:
        return x + self.get(name)

    def layer_norm(self, name: str, x: Any) -> Any:
        return self.F.layer_norm(x, (WIDTH,), self.get(f"{name}_scale"), self.get(f"{name}_shift"))

    def attention(self, qkv: Any, heads: int) -> Any:
        q, k, v = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, 2))
        return self.F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def torch_net(c: Case, train: bool, channels_last: bool = False, fold: bool = False) -> Any:
    """A torch.nn.Module. `fold` computes batch normalization into the filters before it, for inference."""
    import torch

    values = {**c.parameters, **c.moving}
    if fold:
        for name in [n.removesuffix("_scale") for n in values if n.endswith("_scale") and n.replace("_scale", "_mean") in values]:
            mean, var, scale, shift = (values.pop(f"{name}_{part}") for part in ("mean", "var", "scale", "shift"))
            rate = scale / np.sqrt(var + np.float32(1e-5))
            values[f"{name}_w"], values[f"{name}_b"] = values[f"{name}_w"] * rate[:, None, None, None], shift - mean * rate

    class Net(torch.nn.Module):
        def __init__(self, values: dict[str, np.ndarray], moving: set[str], forward: Callable[[Any, Any], Any]) -> None:
            super().__init__()
            for name, value in values.items():
                dense = value.ndim == 2 and name.endswith("_w")
                tensor = torch.from_numpy(np.array(value.T if dense else value, order="C"))
                if channels_last and tensor.ndim == 4:
                    tensor = tensor.contiguous(memory_format=torch.channels_last)
                if name in moving:
                    self.register_buffer(name, tensor)
                else:
                    self.register_parameter(name, torch.nn.Parameter(tensor))
            self.f, self.net = _Torch(lambda name: getattr(self, name, None), train), forward

        def forward(self, x: Any) -> Any:
            return self.net(self.f, x)

    net = Net(values, set(c.moving), NETS[c.name])
    return net.train() if train else net.eval()


def torch_step(
    c: Case, train: bool = True, best: bool = False, compiled: bool = False, ranks: int = 1, device: str = "cpu", half: bool = False
) -> Callable[[], Any]:
    """`best`: channels_last for ResNets (it slows LeNet down), the fused optimizer, and in inference folded batch normalization.
    `compiled`: the same under torch.compile. With `ranks` the caller has initialized torch.distributed. `half`: autocast in bfloat16."""
    import torch

    best = best or compiled
    last = best and c.name.startswith("resnet")
    net = torch_net(c, train, last, best and not train).to(device)
    x, label = torch.from_numpy(c.x).to(device), torch.from_numpy(c.label).to(device)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    if ranks > 1:
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    run = torch.compile(net) if compiled else net
    if not train:

        def infer() -> Any:
            with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=half):
                return run(x).float().cpu().numpy()

        return infer
    fused = {"fused": True} if best else {}
    if c.optimizer == "adam":
        optimizer: Any = torch.optim.Adam(net.parameters(), c.lr, **fused)
    else:
        optimizer = torch.optim.SGD(net.parameters(), c.lr, 0.9, **fused)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=half):
            y = run(x)
            loss = torch.nn.functional.cross_entropy(y.flatten(0, -2), label.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def onnx_step(c: Case, threads: int) -> Callable[[], Any]:
    """ONNX Runtime on what PyTorch exports; inference only."""
    import io
    import warnings

    import onnx  # noqa: F401  (the export needs it, and says so late)
    import onnxruntime
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(torch_net(c, False), (torch.from_numpy(c.x),), file, input_names=["x"], output_names=["y"], dynamo=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(["y"], {"x": c.x})[0]


# -- JAX ----------------------------------------------------------------------------------------------------------------------------


class _Jax:
    """The operations as JAX functions. Images are [n, h, w, c] and filters [h, w, in, out], the layout XLA computes with on CPUs."""

    def __init__(self, p: dict[str, Any], moving: dict[str, Any], train: bool):
        import jax

        self.jax, self.np, self.p, self.train = jax, jax.numpy, p, train
        self.moving = dict(moving)

    def dense(self, name: str, x: Any, act: str | None = None) -> Any:
        y = x @ self.p[f"{name}_w"] + self.p[f"{name}_b"]
        return y if act is None else self.relu(y) if act == "relu" else self.jax.nn.gelu(y, approximate=False)

    def conv(self, name: str, x: Any, stride: int = 1, padding: int = 0) -> Any:
        y = self.jax.lax.conv_general_dilated(
            x, self.p[f"{name}_w"], (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + self.p[f"{name}_b"] if f"{name}_b" in self.p else y

    def norm(self, name: str, x: Any) -> Any:
        mean, var = self.moving[f"{name}_mean"], self.moving[f"{name}_var"]
        if self.train:
            old = mean, var
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            self.moving[f"{name}_mean"], self.moving[f"{name}_var"] = 0.9 * old[0] + 0.1 * mean, 0.9 * old[1] + 0.1 * var
        return (x - mean) * (self.jax.lax.rsqrt(var + 1e-5) * self.p[f"{name}_scale"]) + self.p[f"{name}_shift"]

    def relu(self, x: Any) -> Any:
        return self.jax.nn.relu(x)

    def pool(self, x: Any, size: int = 2, stride: int = 2, padding: int = 0) -> Any:
        if size != stride or padding:
            window, steps, pads = (1, size, size, 1), (1, stride, stride, 1), ((0, 0), (padding, padding), (padding, padding), (0, 0))
            return self.jax.lax.reduce_window(x, -self.np.inf, self.jax.lax.max, window, steps, pads)
        # Not lax.reduce_window, whose gradient XLA computes several times slower; both agree but for ties, and relu has none above 0.
        n, h, w, c = x.shape
        return x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))

    def mean_of_image(self, x: Any) -> Any:
        return x.mean((1, 2))

    def flatten(self, x: Any) -> Any:
        return x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def embed(self, words: str, places: str, ids: Any) -> Any:
        return self.shift(places, self.p[words][ids])

    def shift(self, name: str, x: Any) -> Any:
        return x + self.p[name]

    def layer_norm(self, name: str, x: Any) -> Any:
        mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * self.jax.lax.rsqrt(var + 1e-5) * self.p[f"{name}_scale"] + self.p[f"{name}_shift"]

    def attention(self, qkv: Any, heads: int) -> Any:
        n, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = (part.reshape(n, tokens, heads, width // heads).transpose(0, 2, 1, 3) for part in self.np.split(qkv, 3, 2))
        scores = q @ k.transpose(0, 1, 3, 2) * (width // heads) ** -0.5
        scores = self.np.where(self.np.tril(self.np.ones((tokens, tokens), bool)), scores, -1e9)
        return (self.jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(n, tokens, width)


def jax_step(c: Case, train: bool = True) -> Callable[[], Any]:
    """One jitted function for the whole step, its state donated."""
    import jax

    jnp = jax.numpy
    p = {k: jnp.array(v.transpose(2, 3, 1, 0) if v.ndim == 4 else v) for k, v in c.parameters.items()}
    moving = {k: jnp.array(v) for k, v in c.moving.items()}
    x = np.ascontiguousarray(c.x.transpose(0, 2, 3, 1)) if c.x.ndim == 4 else c.x.astype("int32") if c.x.dtype == "int64" else c.x
    label = c.label.astype("int32")
    if not train:
        infer = jax.jit(lambda p, moving, x: NETS[c.name](_Jax(p, moving, False), x))
        return lambda: np.asarray(infer(p, moving, x))

    def loss_of(p: Any, moving: Any, x: Any, label: Any) -> Any:
        f = _Jax(p, moving, True)
        logs = jax.nn.log_softmax(NETS[c.name](f, x))
        return -jnp.take_along_axis(logs, label[..., None], -1).mean(), f.moving

    def whole(p: Any, moving: Any, state: Any, x: Any, label: Any) -> Any:
        (loss, moving), g = jax.value_and_grad(loss_of, has_aux=True)(p, moving, x, label)
        tree = jax.tree_util.tree_map
        if c.optimizer == "momentum":
            state = tree(lambda v, d: 0.9 * v + d, state, g)
            return loss, tree(lambda w, v: w - c.lr * v, p, state), moving, state
        t, m, v = state[0] + 1, *state[1:]
        m = tree(lambda m, d: 0.9 * m + 0.1 * d, m, g)
        v = tree(lambda v, d: 0.999 * v + 0.001 * d * d, v, g)
        # 1 - beta**t, where float32 would cancel
        rate = c.lr * jnp.sqrt(-jnp.expm1(t * math.log(0.999))) / -jnp.expm1(t * math.log(0.9))
        return loss, tree(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), p, m, v), moving, (t, m, v)

    def zeros() -> Any:
        return jax.tree_util.tree_map(jnp.zeros_like, p)

    state = (jnp.zeros(()), zeros(), zeros()) if c.optimizer == "adam" else zeros()
    jitted = jax.jit(whole, donate_argnums=(0, 1, 2))

    def step() -> Any:
        nonlocal p, moving, state
        loss, p, moving, state = jitted(p, moving, state, x, label)
        return float(loss)

    return step
