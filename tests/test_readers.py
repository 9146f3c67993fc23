"""Readers of samples, and loaders that read ahead."""

import threading
import time

import numpy as np
import pytest

import fluidx as fx
from fluidx import io


def numbers(n, start=0):
    return lambda: iter(range(start, start + n))


def test_batches_are_lists_and_the_last_may_be_short():
    assert list(io.batch(numbers(5), 2)()) == [[0, 1], [2, 3], [4]]
    assert list(io.batch(numbers(5), 2, drop_last=True)()) == [[0, 1], [2, 3]]


def test_a_reader_begins_anew_with_each_call():
    reader = io.batch(io.map_readers(lambda a, b: a * b, numbers(3), numbers(3, 1)), 2)
    assert list(reader()) == list(reader()) == [[0, 2], [6]]


def test_shuffling_keeps_all_samples_and_draws_from_pythons_random():
    import random

    reader = io.shuffle(numbers(50), 20)
    random.seed(3)
    first = list(reader())
    random.seed(3)
    assert list(reader()) == first != list(range(50)) and sorted(first) == list(range(50))
    assert set(first[:20]) == set(range(20))  # no further than the buffer


def test_composed_samples_are_flat_and_lengths_must_agree():
    assert list(io.compose(numbers(2), lambda: iter([(7, 8), (9, 10)]))()) == [(0, 7, 8), (1, 9, 10)]
    with pytest.raises(io.ComposeNotAligned, match="reader 1 has 2 samples, another has more"):
        list(io.compose(numbers(3), numbers(2))())
    assert list(io.compose(numbers(3), numbers(2), check_alignment=False)()) == [(0, 0), (1, 1)]


def test_a_cached_reader_reads_once():
    calls = []

    def reader():
        calls.append(1)
        return iter(range(3))

    cached = io.cache(reader)
    assert list(cached()) == list(cached()) == [0, 1, 2] and calls == [1]
    assert list(io.firstn(io.chain(numbers(2), numbers(2, 5)), 3)()) == [0, 1, 5]


@pytest.mark.parametrize("order", [True, False])
def test_threads_map_all_samples(order):
    found = list(io.xmap_readers(lambda x: x * x, numbers(40), 3, 4, order=order)())
    assert (found if order else sorted(found)) == [k * k for k in range(40)]


@pytest.mark.parametrize("make", [lambda r: io.buffered(r, 2), lambda r: io.xmap_readers(lambda x: x, r, 2, 2)])
def test_an_error_in_a_thread_is_raised_where_it_is_read(make):
    def broken():
        yield 1
        raise OSError("no more disk")

    with pytest.raises(OSError, match="no more disk"):
        list(make(broken)())


def test_threads_end_when_nobody_reads_any_more():
    reader = io.buffered(lambda: iter(int, 1), 2)()  # without end
    assert next(reader) == 0
    reader.close()
    deadline = time.monotonic() + 10
    while any(t.name == "fluidx-reader" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name == "fluidx-reader" for t in threading.enumerate())


def test_processes_read_and_say_what_went_wrong():
    assert sorted(io.multiprocess_reader([numbers(3), numbers(3, 10)])()) == [0, 1, 2, 10, 11, 12]

    def broken():
        raise ValueError("bad file")
        yield

    with pytest.raises(fx.FluidxError, match="a reader failed in its process: ValueError: bad file"):
        list(io.multiprocess_reader([broken])())


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: io.batch([1, 2], 2), "io.batch: a reader must be a function that gives an iterable, got list"),
        (lambda: io.batch(numbers(2), 0), "io.batch: batch_size must be 1 or more, got 0"),
        (lambda: io.multiprocess_reader([]), "readers must be a list of at least one reader"),
        (lambda: io.DataLoader(), "write io.DataLoader.from_generator(feed_list=...)"),
        (lambda: io.DataLoader.from_generator(feed_list=[], capacity=2), "feed_list must be a list of at least one data Variable"),
    ],
)
def test_what_is_no_reader_is_named(call, text):
    with pytest.raises(fx.ProgramError) as error:
        call()
    assert text in str(error.value)


# -- loaders -------------------------------------------------------------------------------------------------------------------------


def program():
    main = fx.Program()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        x, label = fx.data("x", [None, 2], "float32"), fx.data("label", [None, 1], "int64")
        y = fx.layers.reduce_sum(x) + fx.layers.cast(fx.layers.reduce_sum(label), "float32")
    return main, x, label, y


def samples():
    return iter([([k, k], k) for k in range(5)])


def test_an_iterable_loader_gives_a_feed_for_each_place():
    _, x, label, _ = program()
    loader = io.DataLoader.from_generator(feed_list=[x, label], capacity=2)
    loader.set_sample_generator(samples, batch_size=2, drop_last=False)
    assert [feeds[0]["label"].tolist() for feeds in loader()] == [[[0], [1]], [[2], [3]], [[4]]]
    loader.set_sample_generator(samples, batch_size=2, drop_last=False, places=fx.cpu_places(2))
    assert [[len(f["x"]) for f in feeds] for feeds in loader] == [[2, 2]]  # one batch is left over
    assert [[len(a) for a in arrays] for ((*arrays,),) in io.PyReader([x, label], 2, return_list=True).decorate_batch_generator(
        lambda: iter([(np.ones((3, 2), "float32"), np.ones((3, 1), "int64"))])
    )] == [[3, 3]]  # fmt: skip


def test_a_program_reads_its_loader_until_there_is_no_more():
    main, x, label, y = program()
    with fx.program_guard(main):
        loader = io.PyReader(feed_list=[x, label], capacity=2, iterable=False)
    loader.decorate_sample_list_generator(io.batch(samples, 2))
    exe = fx.Executor()
    with pytest.raises(fx.FeedError, match="x, label are read by the program; call start\\(\\) before run\\(\\)"):
        exe.run(main, fetch_list=[y])
    for _ in range(2):
        loader.start()
        assert [float(exe.run(main, fetch_list=[y])[0][0]) for _ in range(3)] == [3.0, 15.0, 12.0]
        with pytest.raises(fx.core.EOFException, match="there are no batches left; call reset\\(\\), then start\\(\\)"):
            exe.run(main, fetch_list=[y])
        loader.reset()
    given = {"x": np.ones((1, 2), "float32"), "label": np.ones((1, 1), "int64")}
    assert exe.run(main, feed=given, fetch_list=[y])[0].tolist() == [3.0]  # what is fed is not read
    assert exe.run(main.clone(for_test=True), feed=given, fetch_list=[y])[0].tolist() == [3.0]


def test_ranks_read_a_batch_each():
    main, x, label, y = program()
    with fx.program_guard(main):
        loader = io.DataLoader.from_generator(feed_list=[x, label], capacity=2, iterable=False)
    loader.set_sample_list_generator(io.batch(samples, 1))
    t = fx.DistributeTranspiler().transpile(program=main, startup_program=fx.Program(), trainers=2)
    with fx.ParallelExecutor(t) as exe:
        loader.start()
        assert [exe.run(fetch_list=[y])[0].tolist() for _ in range(2)] == [[3.0], [15.0]]
        with pytest.raises(fx.core.EOFException):
            exe.run(fetch_list=[y])


def test_a_loader_without_data_or_used_the_other_way_says_so():
    _, x, label, _ = program()
    with fx.program_guard(fx.Program()):
        iterable, other = (io.DataLoader.from_generator(feed_list=[x, label], iterable=k) for k in (True, False))
        for call, text in [
            (lambda: list(iterable()), "it has no data yet; call set_sample_generator"),
            (iterable.start, "write `for feed in loader(): exe.run(main, feed=feed)`"),
            (lambda: list(other), "call start(), and run the program without a feed"),
        ]:
            with pytest.raises(fx.ProgramError) as error:
                call()
            assert text in str(error.value)
    iterable.set_batch_generator(lambda: iter([(np.ones(2),)]))
    with pytest.raises(fx.FeedError, match=r"a batch must have 2 arrays \(x, label\), the generator gave 1"):
        list(iterable())


def test_one_device_takes_a_list_of_one_feed_and_ranks_a_list_of_several():
    main, _, _, y = program()
    one = {"x": np.ones((2, 2), "float32"), "label": np.ones((2, 1), "int64")}
    assert fx.Executor().run(main, feed=[one], fetch_list=[y])[0].tolist() == [6.0]
    with pytest.raises(fx.FeedError, match="feed has 2 batches, and one device takes one"):
        fx.Executor().run(main, feed=[one, one], fetch_list=[y])
    t = fx.DistributeTranspiler().transpile(program=main, startup_program=fx.Program(), trainers=2)
    with fx.ParallelExecutor(t) as exe:
        assert exe.run(feed=[one, one], fetch_list=[y])[0].tolist() == [12.0]
        with pytest.raises(fx.FeedError, match="batch 1 has 'x', batch 0 has 'x', 'label'"):
            exe.run(feed=[one, {"x": one["x"]}], fetch_list=[y])
