"""Layers of images against their definitions in NumPy, and on two ranks."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers
RNG = np.random.default_rng(0)


def value_of(write, **feed):
    """What a layer gives for arrays that are fed with an open first axis."""
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        out = write(**{n: fx.data(n, [-1, *a.shape[1:]], str(a.dtype)) for n, a in feed.items()})
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(startup, scope=scope)
    return exe.run(main, feed=feed, fetch_list=[out], scope=scope)[0]


def interpolated(x, out, corners, mode):
    """x [..., size] at `out` places, linear between two, as fluid's page of image_resize says, one element at a time."""
    size, found = x.shape[-1], []
    ratio = ((size - 1) / (out - 1) if corners else size / out) if out > 1 else 0.0
    for i in range(out):
        at = max((i + 0.5) * ratio - 0.5, 0.0) if mode == 0 and not corners else i * ratio
        low = int(at)
        high = min(low + 1, size - 1)
        found.append(x[..., low] * (1 - (at - low)) + x[..., high] * (at - low))
    return np.stack(found, axis=-1)


# float64 throughout: two orders of the same few products differ by some units in the last place
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("corners, mode", [(True, 1), (True, 0), (False, 1), (False, 0)])
@pytest.mark.parametrize("out", [(7, 3), (1, 9), (4, 5)])
def test_resize_bilinear_is_linear_along_both_axes(corners, mode, out):
    x = RNG.normal(size=(2, 3, 4, 5))
    along = interpolated(x, out[1], corners, mode)
    expected = interpolated(along.swapaxes(2, 3), out[0], corners, mode).swapaxes(2, 3)
    got = value_of(lambda x: L.resize_bilinear(x, out, align_corners=corners, align_mode=mode), x=x)
    np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("corners", [True, False])
def test_resize_nearest_rounds_halves_up_between_corners_and_down_without(corners):
    x, out = np.arange(12.0).reshape(1, 1, 3, 4), (5, 6)
    ratios = [(s - 1) / (o - 1) if corners else s / o for s, o in zip((3, 4), out)]
    rows, columns = ([int(i * r + 0.5 * corners) for i in range(o)] for r, o in zip(ratios, out))
    assert (value_of(lambda x: L.resize_nearest(x, out, align_corners=corners), x=x) == x[:, :, rows][..., columns]).all()


def test_scale_and_the_formats_agree():
    x = RNG.normal(size=(2, 3, 4, 6))
    expected = value_of(lambda x: L.resize_bilinear(x, [6, 9]), x=x)
    assert (value_of(lambda x: L.image_resize(x, scale=1.5), x=x) == expected).all()
    assert (value_of(lambda x: L.image_resize_short(x, 6), x=x) == expected).all()
    last = value_of(lambda x: L.resize_bilinear(x, [6, 9], data_format="NHWC"), x=x.transpose(0, 2, 3, 1).copy())
    np.testing.assert_allclose(last.transpose(0, 3, 1, 2), expected, **CLOSE)


def test_an_image_of_open_size_takes_a_whole_scale():
    with fx.program_guard(fx.Program(), fx.Program()):
        x = fx.data("x", [-1, 3, -1, -1], "float32")
        assert L.resize_nearest(x, scale=2, align_corners=False).shape == (-1, 3, -1, -1)
        with pytest.raises(fx.FluidxError, match="needs an integer scale, got 1.5"):
            L.resize_nearest(x, scale=1.5)
        with pytest.raises(fx.FluidxError, match="give out_shape or scale"):
            L.resize_bilinear(x)


def test_linear_and_trilinear_and_cubic_of_what_is_linear_give_it_back():
    line = np.arange(5.0).reshape(1, 1, 5)
    assert np.allclose(value_of(lambda x: L.resize_linear(x, [9]), x=line), np.arange(9).reshape(1, 1, 9) / 2, **CLOSE)
    cube = np.add.outer(np.add.outer(np.arange(3.0), np.arange(4.0)), np.arange(3.0))[None, None]
    fine = np.add.outer(np.add.outer(np.arange(5) / 2, np.arange(7) / 2), np.arange(5) / 2)[None, None]
    assert np.allclose(value_of(lambda x: L.resize_trilinear(x, [5, 7, 5]), x=cube), fine, **CLOSE)
    plane = cube[:, :, :, :, 0].repeat(3, axis=2)
    assert np.allclose(value_of(lambda x: L.resize_bicubic(x, plane.shape[2:]), x=plane), plane, **CLOSE)


def test_affine_grid_and_grid_sampler_turn_and_shift():
    x = RNG.normal(size=(2, 3, 4, 5))
    theta = np.float64([[[1, 0, 0], [0, 1, 0]], [[-1, 0, 0], [0, 1, 0]]])  # the second image from right to left

    def turned(x, theta):
        return L.grid_sampler(x, L.affine_grid(theta, [2, 3, 4, 5]))

    np.testing.assert_allclose(value_of(turned, x=x, theta=theta), np.stack([x[0], x[1][..., ::-1]]), **CLOSE)
    theta[:, 0, 2] = 2 / 4  # one pixel of the four between corners
    theta[1, 0, 0] = 1
    shifted = value_of(turned, x=x, theta=theta)
    np.testing.assert_allclose(shifted[..., :4], x[..., 1:], **CLOSE)
    assert (np.abs(shifted[..., 4]) < 1e-12).all()


def test_roi_pool_takes_the_largest_pixel_of_each_cell():
    x = np.arange(2 * 36.0).reshape(2, 1, 6, 6)
    rois = np.float64([[0, 0, 5, 5], [1, 1, 2, 4], [2, 2, 3, 3]])
    counts = np.int32([1, 2])
    got = value_of(lambda x, rois, n: L.roi_pool(x, rois, 2, 2, 1.0, rois_num=n), x=x, rois=rois, n=counts)
    assert got[0, 0].tolist() == [[14, 17], [32, 35]]
    assert got[1, 0].tolist() == [[36 + 13, 36 + 14], [36 + 25, 36 + 26]]
    assert got[2, 0].tolist() == [[36 + 14, 36 + 15], [36 + 20, 36 + 21]]


def test_roi_align_of_a_linear_image_reads_the_middle_of_each_cell():
    y, x = np.mgrid[0:8, 0:9].astype("float64")
    image = np.stack([3 * x + y, x - 2 * y])[None].repeat(2, axis=0) * np.reshape([1.0, 10.0], (2, 1, 1, 1))
    rois, counts = np.float64([[2, 2, 10, 8], [4, 4, 12, 12]]), np.int64([0, 2])
    got = value_of(lambda x, rois, n: L.roi_align(x, rois, 3, 2, 0.5, 2, rois_num=n), x=image, rois=rois, n=counts)
    for r, (x1, y1, x2, y2) in enumerate(rois * 0.5):
        cx, cy = x1 + (np.arange(2) + 0.5) * (x2 - x1) / 2, y1 + (np.arange(3) + 0.5) * (y2 - y1) / 3
        np.testing.assert_allclose(got[r, 0], 10 * (3 * cx + cy[:, None]), **CLOSE)
        np.testing.assert_allclose(got[r, 1], 10 * (cx - 2 * cy[:, None]), **CLOSE)


def test_regions_of_several_images_need_their_numbers():
    with fx.program_guard(fx.Program(), fx.Program()):
        with pytest.raises(fx.FluidxError, match="give rois_num"):
            L.roi_pool(fx.data("x", [-1, 3, 8, 8], "float32"), fx.data("rois", [-1, 4], "float32"))


def test_pixel_shuffle_and_shuffle_channel_deal_channels():
    x = np.arange(2 * 8 * 2 * 3.0).reshape(2, 8, 2, 3)
    got = value_of(lambda x: L.pixel_shuffle(x, 2), x=x)
    for c, i, j, h, w in np.ndindex(2, 2, 2, 2, 3):
        assert (got[:, c, 2 * h + i, 2 * w + j] == x[:, 4 * c + 2 * i + j, h, w]).all()
    assert (value_of(lambda x: L.shuffle_channel(x, 4), x=x) == x[:, [0, 2, 4, 6, 1, 3, 5, 7]]).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_unfold_lays_windows_out_as_columns(channels):
    x = RNG.normal(size=(2, channels, 5, 6))
    got = value_of(lambda x: L.unfold(x, [2, 3], [2, 1], [1, 0, 0, 2], [1, 2]), x=x)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 0), (0, 2)))
    columns = [padded[:, :, 2 * i : 2 * i + 2, j : j + 5 : 2].reshape(2, -1) for i in range(3) for j in range(4)]
    assert (got == np.stack(columns, axis=2)).all()


def net():
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x, rois, n = fx.data("x", [-1, 4, 4, 4]), fx.data("rois", [-1, 4]), fx.data("n", [-1], "int32")
        w = fx.ParamAttr(initializer=fx.initializer.Constant(1.0))
        y = L.conv2d(L.pixel_shuffle(x, 2), 2, 1, param_attr=w, bias_attr=False)
        y = L.resize_nearest(y, scale=2, align_corners=False)
        regions = L.roi_pool(y, rois, 2, 2, rois_num=n)
        loss = L.reduce_sum(regions)
        fx.optimizer.SGD(0.125).minimize(loss)
    return main, startup, loss


def test_training_on_two_ranks_is_training_on_one_device():
    """Small whole numbers add up exactly in any order."""
    main, startup, loss = net()
    rng = np.random.default_rng(1)
    feed = {"x": rng.integers(0, 8, (4, 4, 4, 4)).astype("float32"), "n": np.int32([1, 0, 2, 1])}
    feed["rois"] = np.float32([[0, 0, 5, 5], [2, 3, 9, 9], [8, 8, 15, 15], [1, 1, 1, 1]])
    one = fx.Executor(fx.CPUPlace())
    one.run(startup)
    expected = [one.run(main, feed=feed, fetch_list=[loss])[0] for _ in range(3)]
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    t.verify()
    with fx.ParallelExecutor(t, places=fx.cpu_places(2)) as ranks:
        ranks.run_startup()
        assert [ranks.run(feed=feed, fetch_list=[loss])[0].tolist() for _ in range(3)] == [e.tolist() for e in expected]
