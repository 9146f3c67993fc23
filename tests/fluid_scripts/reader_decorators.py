import fluidx as fluid


def reader_a():
    for i in range(5):
        yield i


def reader_b():
    for i in range(5, 10):
        yield i, -i


def collect(reader):
    return list(reader())


assert collect(fluid.io.chain(reader_a, reader_a)) == [*range(5), *range(5)]
assert collect(fluid.io.compose(reader_a, reader_b))[0] == (0, 5, -5)
assert collect(fluid.io.firstn(reader_a, 3)) == [0, 1, 2]
assert collect(fluid.io.buffered(reader_a, 2)) == [0, 1, 2, 3, 4]
assert collect(fluid.io.cache(reader_a)) == [0, 1, 2, 3, 4]
assert collect(fluid.io.map_readers(lambda a, b: a + b[0], reader_a, reader_b)) == [5, 7, 9, 11, 13]
assert sorted(collect(fluid.io.shuffle(reader_a, 10))) == [0, 1, 2, 3, 4]
assert collect(fluid.io.xmap_readers(lambda x: x * x, reader_a, 2, 4, order=True)) == [0, 1, 4, 9, 16]
assert collect(fluid.io.batch(reader_a, batch_size=2, drop_last=True)) == [[0, 1], [2, 3]]
try:
    collect(fluid.io.compose(reader_a, fluid.io.firstn(reader_a, 2)))
except fluid.io.ComposeNotAligned:
    pass
else:
    raise AssertionError("readers of different lengths were composed")
