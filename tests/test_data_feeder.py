"""DataFeeder: samples in, arrays of the declared dtypes and shapes out; what does not fit is named."""

import numpy as np
import pytest

import fluidx as fx


@pytest.fixture
def feeder():
    with fx.program_guard(fx.Program(), fx.Program()):
        image, label = fx.data("image", [-1, 1, 2, 2], "float32"), fx.data("label", [-1, 1], "int64")
        return fx.DataFeeder([image, label], fx.CPUPlace())


def test_samples_are_stacked_and_reshaped(feeder):
    feed = feeder.feed([(np.arange(4.0), 1), ([[[0, 1], [2, 3]]], [2])])
    assert feed["image"].dtype == np.float32 and feed["image"].tolist() == [[[[0, 1], [2, 3]]]] * 2
    assert feed["label"].dtype == np.int64 and feed["label"].tolist() == [[1], [2]]


def test_names_stand_for_variables_of_a_program():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()):
        fx.data("x", [-1], "int32")
    assert fx.DataFeeder(["x"], None, main).feed([(1,), (2,)])["x"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "samples, message",
    [
        ([(np.zeros(5), 1)], r"sample 0: variable 'image' needs shape \[1, 2, 2\], found \[5\]"),
        ([(np.zeros(4), 1), (np.zeros(4),)], r"sample 1 must have 2 values \(image, label\), found 1 values"),
        ([(np.zeros(4), 1.5)], "sample 0: variable 'label' is int64, found float64; convert it first"),
        ([([1, 2, [3], 4], 1)], r"sample 0: variable 'image' needs numbers of shape \[1, 2, 2\], found"),
        ([(np.zeros(4), "one")], "sample 0: variable 'label' is int64, found"),
        ([], "there are no samples to feed to image, label"),
        ([3], r"sample 0 must have 2 values \(image, label\), found int"),
    ],
)
def test_what_does_not_fit_is_named(feeder, samples, message):
    with pytest.raises(fx.FeedError, match=message):
        feeder.feed(samples)


def test_an_integer_out_of_range_is_refused():
    with fx.program_guard(fx.Program(), fx.Program()):
        feeder = fx.DataFeeder([fx.data("x", [-1], "int8")], None)
    with pytest.raises(fx.FeedError, match=r"variable 'x' is int8, the sample holds 300, which int8 cannot"):
        feeder.feed([(300,)])


def test_open_axes_must_agree_within_a_batch():
    with fx.program_guard(fx.Program(), fx.Program()):
        feeder = fx.DataFeeder([fx.data("x", [-1, -1], "float32")], None)
    assert feeder.feed([([1, 2],), ([3, 4],)])["x"].shape == (2, 2)
    with pytest.raises(fx.FeedError, match=r"sample 1: variable 'x' has shape \[3\], sample 0 has \[2\]; pad them to one shape"):
        feeder.feed([([1, 2],), ([3, 4, 5],)])


def test_a_fixed_batch_axis_counts_the_samples():
    with fx.program_guard(fx.Program(), fx.Program()):
        feeder = fx.DataFeeder([fx.data("rate", [1], "float32")], None)
    assert feeder.feed([(0.5,)])["rate"].tolist() == [0.5]
    with pytest.raises(fx.FeedError, match="it needs 1 samples, found 2"):
        feeder.feed([(0.5,), (0.5,)])


def test_batches_become_feeds(feeder):
    batch = [(np.zeros(4), 0)]
    assert len(list(feeder.feed_parallel([batch, batch], 2))) == 2
    with pytest.raises(fx.FeedError, match="3 places need as many batches, found 2"):
        list(feeder.feed_parallel([batch, batch], 3))
    assert [f["label"].shape for f in feeder.decorate_reader(lambda: [batch] * 3, False)()] == [(1, 1)] * 3
    assert [len(feeds) for feeds in feeder.decorate_reader(lambda: [batch] * 5, True, 2)()] == [2, 2]
    with pytest.raises(fx.FeedError, match="1 batches are left over for 2 places"):
        list(feeder.decorate_reader(lambda: [batch] * 5, True, 2, drop_last=False)())
