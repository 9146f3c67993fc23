"""Weights of quantized products, packed once for all runs as the C kernels read them."""

from __future__ import annotations

import numpy as np

PANEL, GROUP, DEPTH = 16, 4, 64  # outputs of a panel, inputs of a group, and inputs up to whose multiple a panel is filled with zeros


def as_int8(q: np.ndarray, zero: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Integers of 8 bits minus their zero points as int8, and None; or, where that does not fit, integers as int8 and what is still to be
    subtracted from them, for each output, along `axis`.

    >>> as_int8(np.uint8([[128, 255]]), np.uint8([[128]]), 1)
    (array([[  0, 127]], dtype=int8), None)
    >>> as_int8(np.uint8([[0, 255]]), np.uint8([[7]]), 1)
    (array([[-128,  127]], dtype=int8), array([-121, -121], dtype=int32))
    """
    w = q.astype(np.int32) - zero.astype(np.int32)
    if not w.size or -128 <= w.min() and w.max() <= 127:
        return w.astype(np.int8), None
    shift = 128 if q.dtype == np.uint8 else 0
    left = np.broadcast_to(zero.astype(np.int32) - shift, q.shape)
    return (q.astype(np.int32) - shift).astype(np.int8), np.ascontiguousarray(np.moveaxis(left, axis, 0).reshape(q.shape[axis], -1)[:, 0])


def packed_shape(groups: int, outputs: int, inputs: int) -> tuple[int, int, int, int]:
    """The shape of packed weights.

    >>> packed_shape(1, 20, 70)
    (1, 2, 33, 64)
    """
    return groups, -(-outputs // PANEL), -(-inputs // DEPTH) * (DEPTH // GROUP) + 1, PANEL * GROUP


def packed(w: np.ndarray) -> np.ndarray:
    """Weights [groups, outputs, inputs] of int8 as panels of 16 outputs: for each 4 inputs the 4 weights of each output. The last 64 bytes
    of a panel are the sums of the weights of its outputs, in int32.

    >>> w = np.arange(-6, 6, dtype="int8").reshape(1, 2, 6)
    >>> p = packed(w)
    >>> p.shape, p[0, 0, 1, :8].tolist(), p[0, 0, -1].view("int32")[:3].tolist()
    ((1, 1, 17, 64), [-2, -1, 0, 0, 4, 5, 0, 0], [-21, 15, 0])
    """
    g, o, k = w.shape
    shape = packed_shape(g, o, k)
    full = np.zeros((g, shape[1] * PANEL, (shape[2] - 1) * GROUP), np.int8)
    full[:, :o, :k] = w
    panels = full.reshape(g, shape[1], PANEL, shape[2] - 1, GROUP).transpose(0, 1, 3, 2, 4)
    sums = full.astype(np.int32).sum(2).astype(np.int32).reshape(g, shape[1], 1, PANEL)
    return np.concatenate([panels.reshape(g, shape[1], shape[2] - 1, PANEL * GROUP), sums.view(np.int8)], 2)


def unpacked(p: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
    """The weights [groups, outputs, inputs] that are packed in `p`.

    >>> w = np.arange(-6, 6, dtype="int8").reshape(1, 2, 6)
    >>> unpacked(packed(w), 2, 6).tolist() == w.tolist()
    True
    """
    g, panels, steps, _ = p.shape
    dense = p[:, :, :-1].reshape(g, panels, steps - 1, PANEL, GROUP).transpose(0, 1, 3, 2, 4)
    return dense.reshape(g, panels * PANEL, (steps - 1) * GROUP)[:, :outputs, :inputs]
