"""Adaptive sums written out as sends, receives, products and pairs: against the formula in float64, by bytes, by proof, and broken."""

from itertools import accumulate, pairwise
from math import log2, prod

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Builder, ProgramPair, parse_pair
from fluidx.transpiler.lowering import write_algorithm
from fluidx.verify import verify_ranks

D = "float64"
SHAPES = ((3, 5), (1,), (7,), (4, 2))  # four layers of 31 elements, whose borders are no borders of blocks
BY = ("halving_doubling", "recursive_doubling")
every_algorithm = pytest.mark.parametrize("name", BY)
every_count = pytest.mark.parametrize("n", [2, 4, 8])


def pair(a, b):
    """The formula of the paper, of two vectors in float64."""
    dot = float(np.sum(a * b))
    return (1 - dot / (2 * np.sum(a * a))) * a + (1 - dot / (2 * np.sum(b * b))) * b


def tree(values):
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return pair(tree(values[:half]), tree(values[half:]))


def model(shapes, dtype):
    """A program whose ranks each have a row of each input, and meet in its adaptive sum."""
    main, startup = fx.Program("meet"), fx.Program("meet_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        xs = [fx.data(f"x{k}", [-1, *shape], dtype) for k, shape in enumerate(shapes)]
        b = Builder(main.global_block())
        own = [fx.layers.reduce_sum(x, dim=0) for x in xs]
        outs = [b.replica_adasum(x) for x in own]
    return main, startup, outs


def transpiled(shapes, name, n, dtype=D):
    main, startup, outs = model(shapes, dtype)
    t = fx.DistributeTranspiler(fx.strategies.replicas(algorithm=name)).transpile(program=main, startup_program=startup, trainers=n)
    return t, outs


def together(values, name):
    """What n ranks make of a value of each layer; by rank. The programs are proved and have no collective."""
    n = len(values[0])
    t, outs = transpiled([v.shape[1:] for v in values], name, n, str(values[0].dtype))
    t.verify()
    assert all(op.type != "adasum_reduce" for r in range(n) for op in t.get_trainer_program(r).ops)
    with fx.ParallelExecutor(t, places=fx.cpu_places(n), timeout=20) as exe:
        exe.run_startup()
        found = exe.run(feed={f"x{k}": v for k, v in enumerate(values)}, fetch_list=outs, return_merged=False)
    return [[by_rank[r] for by_rank in found] for r in range(n)]


def drawn(n, shapes=SHAPES, dtype=D):
    rng = np.random.default_rng(n)
    return [(rng.standard_normal((n, *shape)) + 0.5).astype(dtype) for shape in shapes]


@every_count
@every_algorithm
def test_layers_that_travel_together_are_summed_by_themselves(name, n):
    values = drawn(n)
    found = together(values, name)
    for got, rows in zip(found[0], values, strict=True):
        np.testing.assert_allclose(got, tree(list(rows)), rtol=1e-12)  # float64, products in another order
    assert all(np.array_equal(a, b) for mine in found[1:] for a, b in zip(mine, found[0], strict=True))  # bit by bit
    as_one = tree([np.concatenate([v[r].ravel() for v in values]) for r in range(n)])
    assert not np.allclose(np.concatenate([g.ravel() for g in found[0]]), as_one, rtol=1e-3), "one direction for all layers is another sum"


@every_count
@every_algorithm
def test_the_same_bits_come_out_of_every_run(name, n):
    values = drawn(n, dtype="float32")
    first, again = together(values, name), together(values, name)
    assert all(a.tobytes() == b.tobytes() for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    for got, rows in zip(first[0], values, strict=True):
        np.testing.assert_allclose(got, tree(list(rows.astype(D))), rtol=2e-5, atol=1e-6)  # float32: 24 bits, and cancelling terms


@every_count
@every_algorithm
def test_what_is_orthogonal_is_added_up_and_what_agrees_is_averaged(name, n):
    apart, same = np.eye(n, 9), np.tile([[3.0, -4.0, 0.0, 1.0, 2.0, 0.0, 0.0, 1.0]], (n, 1))
    found = together([apart, same], name)
    for mine in found:
        np.testing.assert_array_equal(mine[0], apart.sum(axis=0))
        np.testing.assert_array_equal(mine[1], same[0])


@every_algorithm
def test_nothing_is_added_as_it_is(name):
    rows = np.zeros((4, 6))
    rows[2] = [1, -2, 3, 0, 5, 1]
    assert all(np.array_equal(mine[0], rows[2]) for mine in together([rows], name))


@every_algorithm
def test_halves_are_reckoned_in_single_precision(name):
    rows = np.array([[200.0, 200.0, 0.0], [300.0, -100.0, 7.0]], "float16")  # whose squares are beyond float16
    got = together([rows], name)[0][0]
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, tree(list(rows.astype(D))), rtol=2e-3)  # a float16 has 11 bits


@every_algorithm
def test_large_values_travel_in_several_messages(name, monkeypatch):
    monkeypatch.setattr(write_algorithm, "_LARGEST", 5 * 8)
    values = drawn(4)
    found = together(values, name)
    for got, rows in zip(found[0], values, strict=True):
        np.testing.assert_allclose(got, tree(list(rows)), rtol=1e-12)
    t, _ = transpiled(SHAPES, name, 4)
    block = t.get_trainer_program(1).global_block()
    sizes = [block.desc(op.input_arg_names[0]).type.numel for op in block.ops if op.type == "send"]
    assert max(s for s in sizes if s != 3 * len(SHAPES)) == 5


# -- what is sent -------------------------------------------------------------------------------------------------------------------------


@every_count
def test_bytes_are_the_closed_form(n):
    shapes = [(8, 3), (16,)]  # 40 elements, which divide by the ranks
    size, layers, meetings = sum(map(prod, shapes)), len(shapes), int(log2(n))
    products = 3 * layers * meetings * (meetings + 1) // 2  # in the k-th meeting k rounds
    halving, _ = transpiled(shapes, "halving_doubling", n)
    doubling, _ = transpiled(shapes, "recursive_doubling", n)
    for r in range(n):
        assert halving.traffic(r).total == 8 * (2 * (n - 1) / n * size + products)
        assert doubling.traffic(r).total == 8 * meetings * size


@every_count
def test_rounds_are_the_closed_form(n):
    for name, rounds in (("halving_doubling", lambda k: 2 * k + k * (k + 1) // 2), ("recursive_doubling", lambda k: k)):
        t, _ = transpiled([(16,)], name, n)
        batches = {op.attrs["batch"] for r in range(n) for op in t.get_trainer_program(r).ops if op.type == "send"}
        assert len(batches) == rounds(int(log2(n)))


# -- where it cannot be -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5, 6, 7])
@every_algorithm
def test_ranks_that_are_no_power_of_two_are_refused(name, n):
    with pytest.raises(fx.TranspileError, match=f"{name} makes adaptive sums in pairs, so it needs a power of two of ranks, not {n};"):
        transpiled(SHAPES, name, n)


def test_other_algorithms_are_refused_and_auto_takes_the_cheaper_one():
    with pytest.raises(fx.TranspileError, match="ring makes no adaptive sum; halving_doubling does"):
        transpiled(SHAPES, "ring", 4)
    for n, chosen in ((fx.Cluster(4, 1), "recursive_doubling"), (fx.Cluster(3, 1), "communicator")):
        t, _ = transpiled(SHAPES, "auto", n)
        t.verify()
        assert any(f" bytes: {chosen}" in line for line in t.explain())


def test_fewer_elements_than_ranks_stay_whole():
    t, _ = transpiled([(3,)], "halving_doubling", 4)
    t.verify()
    said = "is left to the communicator: f64[3] cannot be cut into a block for each of 4 ranks"
    assert any(said in line for line in t.explain()), t.explain()


def test_hosts_are_crossed_by_halves():
    t, _ = transpiled(SHAPES, "", fx.Cluster(4, 1))
    assert t.verify().messages == 4 * 7  # two halves, three rounds of products, and two halves back


# -- wrong programs -----------------------------------------------------------------------------------------------------------------------


def changed(n, edit):
    """The rank programs of one value of 12 elements with each line edited: (rank, line) -> line, or None to leave it out."""
    t, _ = transpiled([(4, 3), (4,)], "halving_doubling", n)
    pairs = []
    for r in range(n):
        text = str(ProgramPair(t.get_trainer_program(r), t.get_startup_program(r)))
        pairs.append("\n".join(new for line in text.splitlines() if (new := edit(r, line)) is not None))
    read = [parse_pair(text) for text in pairs]
    return verify_ranks(t.source, [p.main for p in read], [p.startup for p in read])


def on(word, old, new, ranks=range(4)):
    """An edit of the lines with a word, on some ranks; there must be one."""

    def edit(rank, line):
        return line.replace(old, new) if word in line and rank in ranks else line

    return edit


OUT = "%replica_adasum.tmp_0.packed"


def as_one_layer(rank, line):
    return line.replace("[0, 12, 16]", "[0, 16]").replace("f64[6] local", "f64[3] local").replace("shape=[6]", "shape=[3]")


def added_up(rank, line):
    return line.replace("adasum_pair(", "sum([").split(f", {OUT}.products")[0] + "])" if "adasum_pair(" in line else line


WRONG = {
    "products begin elsewhere": on("adasum_products", "start=8", "start=7", [1]),
    "a pair begins elsewhere": on("adasum_pair", "start=8", "start=7", [1]),
    "layers are one on all ranks": as_one_layer,
    "layers have another border": on("adasum_", "[0, 12, 16]", "[0, 11, 16]"),
    "one rank knows other layers": on("adasum_", "[0, 12, 16]", "[0, 11, 16]", [2]),
    "products are not added up": on("= sum(", f"sum([{OUT}.products.part,", f"sum([{OUT}.products.in,", [0]),
    "products of the first meeting in the second": on("adasum_pair", "products.part5", "products.part2", [3]),
    "products with itself": on("adasum_products", f", {OUT}.from0.in", f", {OUT}.from0.term", [0]),
    "a pair with itself": on("adasum_pair", f", {OUT}.from0.in,", f", {OUT}.from0.term,", [0]),
    "a pair the other way round": on("adasum_pair", f"{OUT}.from0.term, {OUT}.from0.in,", f"{OUT}.from0.in, {OUT}.from0.term,", [0]),
    "halves are added up": added_up,
    "the wrong half is kept": on(f"chunk({OUT}.from0.pair)", "start=0, stop=4", "start=4, stop=8", [0]),
}


@pytest.mark.parametrize("edit", WRONG.values(), ids=WRONG.keys())
def test_wrong_rank_programs_are_refused(edit):
    touched = []

    def counted(rank, line):
        new = edit(rank, line)
        touched.append(new != line)
        return new

    with pytest.raises(fx.VerifyError):
        changed(4, counted)
    assert any(touched)


def test_right_rank_programs_are_proved():
    assert changed(4, lambda r, line: line).messages == 28


def test_a_proof_of_layers_says_whose_they_are():
    with pytest.raises(fx.VerifyError, match="products of elements 0 to 8 of the part of .* are not the products of all elements of"):
        changed(4, on("adasum_pair", "products.part2", "products.part", [0]))


# -- the operators by themselves ----------------------------------------------------------------------------------------------------------


def run(op, *values, **attrs):
    main = fx.Program("by_itself")
    with fx.unique_name.guard(), fx.program_guard(main, fx.Program()):
        ins = [fx.data(f"v{k}", list(v.shape), str(v.dtype)) for k, v in enumerate(values)]
        out = getattr(Builder(main.global_block()), op)(*ins, **attrs)
    (got,) = fx.Executor().run(main, feed={f"v{k}": v for k, v in enumerate(values)}, fetch_list=[out])
    return got


def test_products_of_slices_add_up_to_those_of_layers():
    x, y = np.random.default_rng(1).integers(-9, 10, (2, 13)).astype(D)
    layers = (0, 4, 4, 9, 13)  # one of them is empty
    expected = [float((u[a:b] * v[a:b]).sum()) for a, b in pairwise(layers) for u, v in ((x, y), (x, x), (y, y))]
    for marks in ([0, 13], [0, 4, 13], [0, 1, 6, 7, 13]):
        found = sum(run("adasum_products", x[a:b], y[a:b], layers=layers, start=a) for a, b in pairwise(marks))
        np.testing.assert_array_equal(found, expected)  # whole numbers are exact


def test_a_pair_is_the_formula_in_each_layer():
    x, y = np.random.default_rng(2).standard_normal((2, 13))
    layers = (0, *accumulate([4, 5, 4]))
    products = run("adasum_products", x, y, layers=layers)
    expected = np.concatenate([pair(x[a:b], y[a:b]) for a, b in pairwise(layers)])
    np.testing.assert_allclose(run("adasum_pair", x, y, products, layers=layers), expected, rtol=1e-13)
    np.testing.assert_allclose(run("adasum_pair", x[3:10], y[3:10], products, layers=layers, start=3), expected[3:10], rtol=1e-13)


@pytest.mark.parametrize(
    "attrs, said",
    [
        ({"layers": (0, 5)}, "is not within"),
        ({"layers": (0, 8, 6, 13)}, "are not increasing bounds"),
        ({"layers": (1, 13)}, "are not increasing bounds"),
        ({"layers": (0, 13), "start": 1}, "is not within"),
    ],
)
def test_layers_are_marks_around_the_elements(attrs, said):
    with pytest.raises(fx.ProgramError, match=said):
        run("adasum_products", np.ones(13), np.ones(13), **attrs)
