"""DFT and STFT by their definitions, with numpy.fft as the judge."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from tests.onnx.one_node import check_gradient, ran  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # float32, sums of at most 12 terms near 1


def pairs(z: np.ndarray) -> np.ndarray:
    return np.stack([z.real, z.imag], -1)


def signal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


def number(k: int) -> np.ndarray:
    return np.array(k, np.int64)


@pytest.mark.parametrize("length", [None, 4, 12])
@pytest.mark.parametrize("axis", [1, 2, -2])
def test_real_signals_cut_or_filled(axis, length):
    x = signal(2, 7, 6, 1)
    y = ran("DFT", [x, length and number(length), number(axis)], known=(1, 2))
    np.testing.assert_allclose(y, pairs(np.fft.fft(x[..., 0], length, axis if axis > 0 else -1)), **CLOSE)


def test_one_side_and_back():
    for n in (6, 7):
        x = signal(3, n, 1)
        half = ran("DFT", [x], onesided=1)
        np.testing.assert_allclose(half, pairs(np.fft.rfft(x[..., 0])), **CLOSE)
        np.testing.assert_allclose(ran("DFT", [half, number(n)], known=(1,), onesided=1, inverse=1), x, **CLOSE)


def test_inverse_of_complex_signals():
    z = signal(3, 5, 2)
    np.testing.assert_allclose(ran("DFT", [z], inverse=1), pairs(np.fft.ifft(z[..., 0] + 1j * z[..., 1])), **CLOSE)


@pytest.mark.parametrize("onesided", [0, 1])
def test_windows_of_a_signal(onesided):
    x, window = signal(2, 11, 1), np.hanning(4).astype(np.float32)
    frames = np.stack([x[:, k : k + 4, 0] * window for k in (0, 3, 6)], 1)
    want = np.fft.rfft(frames) if onesided else np.fft.fft(frames)
    np.testing.assert_allclose(ran("STFT", [x, number(3), window], known=(1,), onesided=onesided), pairs(want), **CLOSE)


@pytest.mark.parametrize("attrs", [{}, {"onesided": 1}, {"inverse": 1}])
def test_transforms_have_gradients(attrs):
    check_gradient("DFT", [signal(2, 5, 3, 1, dtype="float64"), None, number(1)], known=(2,), **attrs)


def test_windows_have_gradients():
    check_gradient("STFT", [signal(2, 7, 1, dtype="float64"), number(2), signal(4, dtype="float64")], wrt=(0, 2), known=(1,))


def test_frames_longer_than_the_signal_are_refused():
    with pytest.raises(Exception, match="frames of 1 to 5 samples"):
        ran("STFT", [signal(1, 5, 1), number(1), None, number(6)], known=(1, 3))
