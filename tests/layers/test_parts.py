"""scatter_nd, einsum, maxout and unbind against NumPy."""

import numpy as np
import pytest

import fluidx as fx

L = fx.layers
RNG = np.random.default_rng(0)


def values_of(write, **feed):
    main = fx.Program()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        outs = write(**{n: fx.data(n, list(a.shape), str(a.dtype)) for n, a in feed.items()})
        outs = outs if isinstance(outs, list) else [outs]
    return fx.Executor(fx.CPUPlace()).run(main, feed=feed, fetch_list=outs)


def test_scatter_nd_adds_where_indices_repeat():
    ref, ids, updates = np.arange(12.0).reshape(3, 4), np.int64([[1], [0], [1]]), np.arange(12.0).reshape(3, 4) * 10
    expected = ref.copy()
    np.add.at(expected, ids[:, 0], updates)
    assert (values_of(L.scatter_nd_add, ref=ref, index=ids, updates=updates)[0] == expected).all()
    got = values_of(lambda index, updates: L.scatter_nd(index, updates, [3, 4]), index=ids, updates=updates)[0]
    assert (got == expected - ref).all()


def test_einsum_sums_over_what_the_result_lacks():
    a, b = RNG.integers(0, 9, (2, 3, 4)).astype("float64"), RNG.integers(0, 9, (2, 4, 5)).astype("float64")
    got = values_of(lambda a, b: L.einsum("bij, bjk -> kbi", a, b), a=a, b=b)[0]
    assert (got == np.einsum("bij,bjk->kbi", a, b)).all()


@pytest.mark.parametrize("axis", [1, -1])
def test_maxout_takes_the_largest_of_neighbours(axis):
    x = RNG.normal(size=(2, 6, 3, 4))
    x = np.moveaxis(x, 1, axis).copy()
    expected = np.stack([np.moveaxis(x, axis, 1)[:, 3 * i : 3 * i + 3].max(axis=1) for i in range(2)], axis=1)
    assert (values_of(lambda x: L.maxout(x, 3, axis=axis), x=x)[0] == np.moveaxis(expected, 1, axis)).all()


def test_unbind_gives_slices():
    x = RNG.normal(size=(2, 3))
    got = values_of(lambda x: L.unbind(x, 1), x=x)
    assert [g.tolist() for g in got] == x.T.tolist()
