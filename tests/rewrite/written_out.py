"""Layer normalization and attention as users write them out of small layers, and programs with them."""

import numpy as np

import fluidx as fx
from fluidx.testing.models import TestModel

L = fx.layers


def squared(d, how="square"):
    return {"square": lambda: L.square(d), "product": lambda: L.elementwise_mul(d, d), "power": lambda: L.pow(d, 2.0)}[how]()


def with_epsilon(v, eps=1e-5, how="bias"):
    if how == "bias":
        return L.scale(v, bias=eps)
    if how == "operator":
        return v + eps
    number = L.fill_constant([1], v.dtype, eps)
    return L.elementwise_add(v, number)


def divided(d, u, how="sqrt"):
    return {
        "sqrt": lambda: L.elementwise_div(d, L.sqrt(u)),
        "rsqrt": lambda: L.elementwise_mul(d, L.rsqrt(u)),
        "rsqrt first": lambda: L.elementwise_mul(L.rsqrt(u), d),
        "power": lambda: L.elementwise_div(d, L.pow(u, 0.5)),
        "inverse power": lambda: L.elementwise_mul(d, L.pow(u, -0.5)),
        "reciprocal": lambda: L.elementwise_mul(d, L.reciprocal(L.sqrt(u))),
    }[how]()


def weight(shape, dtype, seed):
    values = np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(dtype)
    return L.create_parameter(list(shape), dtype, default_initializer=fx.initializer.NumpyArrayInitializer(values))


def layer_norm(x, axes=1, square="square", epsilon="bias", root="sqrt", scale=True, shift=True, flip=False, eps=1e-5):
    """The last `axes` axes normalized; with `flip` operands of products and sums the other way round."""
    dims = list(range(x.ndim - axes, x.ndim))
    d = x - L.reduce_mean(x, dims, keep_dim=True)
    y = divided(d, with_epsilon(L.reduce_mean(squared(d, square), dims, keep_dim=True), eps, epsilon), root)
    shape = x.shape[x.ndim - axes :]
    if scale:
        w = weight(shape, x.dtype, 1)
        y = L.elementwise_mul(w, y) if flip else L.elementwise_mul(y, w)
    if shift:
        b = weight(shape, x.dtype, 2)
        y = L.elementwise_add(b, y) if flip else L.elementwise_add(y, b)
    return y


def attention(q, k, v, mask=None, scaled="alpha", flip=False):
    """Weights by softmax of q @ k' / sqrt(width) + mask."""
    factor = float(q.shape[-1]) ** -0.5
    if scaled == "queries":
        q = L.scale(q, factor)
    elif scaled == "keys":
        k = L.elementwise_div(k, L.fill_constant([1], k.dtype, 1 / factor))
    s = L.matmul(q, k, transpose_y=True, alpha=factor if scaled == "alpha" else 1.0)
    if scaled == "scores":
        s = s * factor
    if mask is not None:
        s = L.elementwise_add(mask, s) if flip else L.elementwise_add(s, mask)
    return L.matmul(L.softmax(s), v)


def block(x, heads, norm, attend):
    """A block of a transformer, normalized before each half."""
    width = x.shape[2]

    def split(h):
        return L.transpose(L.reshape(L.fc(h, width, num_flatten_dims=2), [0, 0, heads, width // heads]), [0, 2, 1, 3])

    h = norm(x)
    context = attend(split(h), split(h), split(h))
    x = x + L.fc(L.reshape(L.transpose(context, [0, 2, 1, 3]), [0, 0, width]), width, num_flatten_dims=2)
    return x + L.fc(L.fc(norm(x), 2 * width, num_flatten_dims=2, act="relu"), width, num_flatten_dims=2)


def transformer(norm=layer_norm, attend=attention, blocks=2, rows=5, width=8, heads=2, dtype="float64", optimizer=None):
    """A stack of blocks with a loss over their last normalization, trained unless `optimizer` is False."""
    main, startup = fx.Program("blocks"), fx.Program("blocks_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        h = L.fc(fx.data("x", [-1, rows, width], dtype), width, num_flatten_dims=2)
        for _ in range(blocks):
            h = block(h, heads, norm, attend)
        loss = L.mean(L.square(norm(h) - fx.data("y", [-1, rows, width], dtype)))
        if optimizer is not False:
            (optimizer or fx.optimizer.Momentum(0.05, 0.9)).minimize(loss)

    def feed(n, seed=0):
        rng = np.random.default_rng(seed)
        return {name: rng.standard_normal((n, rows, width)).astype(dtype) for name in ("x", "y")}

    return TestModel(main, startup, loss, feed, [])
