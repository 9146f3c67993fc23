"""fluid's image and recurrent layers, written as ONNX models and loaded again, give what they gave."""

import numpy as np
import pytest

import fluidx as fx

pytest.importorskip("onnx")

L = fx.layers
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(2, 4, 6, 8)).astype("float32")
ROIS = np.float32([[0, 0, 5, 5], [1, 2, 7, 4], [2, 2, 3, 3]])
CASES = {
    "bilinear": (lambda x: L.resize_bilinear(x, [9, 5]), {"x": IMAGES}),
    "bilinear by half pixels": (lambda x: L.resize_bilinear(x, scale=1.5, align_corners=False, align_mode=0), {"x": IMAGES}),
    "nearest of channels last": (lambda x: L.resize_nearest(x, scale=2, data_format="NHWC"), {"x": IMAGES}),
    "bicubic": (lambda x: L.resize_bicubic(x, [9, 5], align_corners=False), {"x": IMAGES}),
    "affine_grid, grid_sampler": (
        lambda x, t: L.grid_sampler(x, L.affine_grid(t, [2, 4, 3, 5])), {"x": IMAGES, "t": RNG.normal(size=(2, 2, 3)).astype("float32")}
    ),
    "roi_align": (lambda x, r, n: L.roi_align(x, r, 2, 3, 0.5, rois_num=n), {"x": IMAGES, "r": ROIS, "n": np.int64([1, 2])}),
    "roi_pool": (lambda x, r, n: L.roi_pool(x, r, 2, 3, rois_num=n), {"x": IMAGES, "r": ROIS, "n": np.int64([1, 2])}),
    "pixel_shuffle": (lambda x: L.pixel_shuffle(x, 2), {"x": IMAGES}),
    "unfold": (lambda x: L.unfold(x, [2, 3], 2, 1), {"x": IMAGES}),
    "maxout": (lambda x: L.maxout(x, 2), {"x": IMAGES}),
    "rnn": (lambda x, n: L.rnn(L.LSTMCell(3), x, sequence_length=n)[0], {"x": IMAGES[:, 0], "n": np.int64([6, 3])}),
    "gru": (lambda x: L.rnn(L.GRUCell(3), x, is_reverse=True)[1], {"x": IMAGES[:, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_layer_comes_back(name, tmp_path):
    write, feed = CASES[name]
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        data = {n: fx.data(n, [f"rows_of_{n}", *a.shape[1:]], str(a.dtype)) for n, a in feed.items()}
        out = write(*data.values())
    exe, scope, back = fx.Executor(fx.CPUPlace()), fx.Scope(), fx.Scope()
    exe.run(startup, scope=scope)
    expected = exe.run(main, feed=feed, fetch_list=[out], scope=scope)[0]
    fx.onnx.save(main, tmp_path / "layer.onnx", list(data.values()), [out], scope=scope)
    model = fx.onnx.load(tmp_path / "layer.onnx")
    exe.run(model.startup, scope=back)
    found = exe.run(model.program, feed=feed, fetch_list=model.fetches, scope=back)[0]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # float32, scales of which an operator has 24 bits
