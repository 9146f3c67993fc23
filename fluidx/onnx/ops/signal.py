"""DFT, STFT and MelWeightMatrix."""

from __future__ import annotations

import numpy as np

from ...ir import Variable
from ..limits import checked_shape
from ..node import Node
from ..table import imports, on_numpy
from ..values import numpy_dtype


@on_numpy("MelWeightMatrix")
def mel_weight_matrix(n: Node) -> object:
    """Column k is a triangle over the bins: it rises from edge k to weight 1 at edge k + 1, and falls to edge k + 2."""
    bins, length, rate, low, high = (np.asarray(v).item() for v in n.values())
    checked_shape([length // 2 + 1, bins + 2])
    low_mel, high_mel = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    mels = low_mel + np.arange(bins + 2) * (high_mel - low_mel) / (bins + 2)
    edges = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) // rate).astype(np.int64)
    left, top, right = (edges[k : k + bins] for k in range(3))
    at = np.arange(length // 2 + 1)[:, None]
    up = np.where((at >= left) & (at <= top), (at - left) / np.maximum(top - left, 1), 0)
    up = np.where((top == left) & (at == top), 1, up)
    down = np.where((at > top) & (at < right), (right - at) / np.maximum(right - top, 1), 0)
    return (up + down).astype(numpy_dtype(n.attr("output_datatype", 1)))


@imports("DFT")
def dft(n: Node) -> object:
    """The transform along an axis of a signal, cut or padded with zeros to `dft_length`."""
    inverse, onesided = bool(n.attr("inverse", 0)), bool(n.attr("onesided", 0))
    axis = (n.ints(2) or [-2])[0] % n.rank()
    has = n.shape()[axis]
    length = (n.ints(1) or [2 * (has - 1) if inverse and onesided else has])[0]
    if length < 1:
        raise n.wrong(f"expected a length of at least 1, found {length}; give dft_length, or a signal of known size")
    checked_shape([length])
    x = n.x()
    if inverse and onesided:
        return _real_signal(n, x, axis, length)
    y = n.b.fft(_resized(n, x, axis, length), axis=axis, inverse=inverse)
    return _resized(n, y, axis, length // 2 + 1) if onesided else y


@imports("STFT")
def stft(n: Node) -> object:
    """The transforms of windows of a signal [batch, length, 1 or 2]."""
    b, (_, total, parts) = n.b, n.shape()
    step = (n.ints(1) or [0])[0]
    length = (n.ints(3) or [n.shape(2)[0] if n.has(2) else total])[0]
    if not 0 < length <= total or step < 1:
        raise n.wrong(f"expected frames of 1 to {total} samples, the length of the signal, and a step above 0; found {length} and {step}")
    frames = (total - length) // step + 1
    places = (step * np.arange(frames)[:, None] + np.arange(length)).ravel()
    x = b.reshape(b.index_select(n.x(), n.const(places, np.int64), dim=1), shape=(0, frames, length, parts))
    if n.has(2):
        x = b.elementwise_mul(x, b.reshape(n.x(2), shape=(length, 1)))
    y = b.fft(x, axis=2)
    return _resized(n, y, 2, length // 2 + 1) if n.attr("onesided", 1) else y


def _resized(n: Node, x: Variable, axis: int, length: int) -> Variable:
    """The first `length` elements along an axis, padded with zeros."""
    has = x.shape[axis]
    if has >= length:
        return x if has == length else n.b.slice(x, axes=(axis,), starts=(0,), ends=(length,))
    paddings = [0] * (2 * len(x.shape))
    paddings[2 * axis + 1] = length - has
    return n.b.pad(x, paddings=tuple(paddings))


def _real_signal(n: Node, x: Variable, axis: int, length: int) -> Variable:
    """The real signal whose spectrum begins with x. All elements except the first, and the middle one of an even length, count twice."""
    weight = np.full(length // 2 + 1, 2.0)
    weight[0] = 1
    if length % 2 == 0:
        weight[-1] = 1
    half = _resized(n, x, axis, len(weight))
    half = n.b.elementwise_mul(half, n.const(weight.reshape(-1, *[1] * (n.rank() - 1 - axis)), x.dtype))
    y = n.b.fft(_resized(n, half, axis, length), axis=axis, inverse=True)
    return n.b.slice(y, axes=(n.rank() - 1,), starts=(0,), ends=(1,))
