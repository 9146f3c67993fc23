"""The models of `_models.py` in PyTorch, ONNX Runtime and JAX. Only the framework that is asked for is imported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from _models import NETS, WIDTH, Case

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
