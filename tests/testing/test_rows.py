"""The execute_rows of access patterns: right lines pass, and each of the ways in which a line can be wrong is seen."""

import numpy as np
import pytest

import fluidx.ops  # noqa: F401 - fills OPS
from fluidx.ir import OPS, Comm, OpDef, ProgramError, Sample, TensorType
from fluidx.ir.rows import rows
from fluidx.testing import check_rows, missing_rows
from fluidx.testing.rows import execute_rows
from tests.small_factors import small_factors


def f64(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def with_line(op, line, *samples):
    """The op with another pattern, and other samples where a line speaks of one number of axes only."""
    base = OPS[op] if isinstance(op, str) else op
    changes = {"pattern": staticmethod(line) if callable(line) else line}
    if samples:
        changes["samples"] = staticmethod(lambda: iter(samples))
    return type(f"_{base.name}", (base,), changes)


X, Y, W = f64(4, 6, seed=1), f64(6, 5, seed=2), f64(4, 6, seed=3)
IMAGE, FILTER = f64(5, 4, 6, 6, seed=1), f64(6, 2, 3, 3, seed=2)
ADAM = [f64(4, 6, seed=k) ** (2 if k == 3 else 1) for k in range(4)] + [np.array([0.1]), np.array([0.9]), np.array([0.99])]
TABLE, IDS = f64(7, 4), np.array([[3, 0, 6], [6, 1, 3], [2, 5, 4], [1, 1, 0]])

# op, samples, a right line, and wrong ones
LINES = [
    ("gelu", [], "* -> *", ["* -> * | L(0)", "* -> * | U(0)", "* -> * | D(0)", "* -> * | U(0>max)"]),
    ("relu", [], "* -> * | U(0)", ["* -> * | L(0)", "* -> * | D(0)"]),
    ("floor", [], "* -> * | U(0)", ["* -> * | L(0)"]),
    ("square", [], "* -> *", ["* -> * | U(0)", "* -> * | L(0)"]),
    ("pack", [Sample.of([X, W, f64(5)])], ". ., . ., . -> . | L(0,1,2) F", [". ., . ., . -> . | L(0) F"]),
    ("transpose", [Sample.of(X, axis=(1, 0))], "e0 e1 -> e1 e0 | L(0)", ["e0 e1 -> e1 e0 | F"]),  # all elements, and not in order
    ("sqrt", [], "* -> *", ["* -> * | U(0)"]),  # parts leave the domain
    ("abs", [], "* -> *", ["* -> * | L(0)", "* -> * | U(0>max)"]),
    ("elementwise_mul", [Sample.of(X, W)], "*, * -> * | L(0) L(1)", ["*, * -> * | L(0,1)", "*, . . -> *", "i j, j i -> i j"]),
    ("elementwise_div", [Sample.of(X, W)], "*, * -> * | L(0)", ["*, * -> * | L(0) L(1)", "*, ~* -> *"]),
    ("elementwise_add", [Sample.of(X, W)], "*, * -> * | L(0,1)", ["*, * -> * | L(0)", "*, * -> * | L(0) L(1)"]),
    (
        "where",
        [Sample.of(X > 0, X, W)],
        "*, *, * -> * | L(1,2)",
        ["*, *, * -> * | L(1)", "*, *, * -> * | L(0)", "*, *, ~* -> * | L(1,2)"],
    ),
    (
        "softmax",
        [Sample.of(X)],
        "e c -> e c | c!",
        ["e c -> e c", "* -> *", "e c -> e c | c! L(0)", "e c -> c e | c!"],
    ),
    (
        "matmul",
        [Sample.of(X, Y)],
        "i k, k j -> i j | k:+ L(0) L(1)",
        [
            "i k, k j -> i j | k:= L(0)",
            "i k, k j -> i j | k:max",
            "i k, k j -> i j | k:+ L(0,1)",
            "k i, k j -> i j | k:+",
            "i k, k j -> j i | k:+",
            "i k, ~k j -> i j | k!",
        ],
    ),
    (
        "conv2d",
        [Sample.of(IMAGE, FILTER, groups=2)],
        ("n (g c) . ., (g o) c . . -> n (g o) . . | g! c! L(0) L(1)", {"g": 2, "c": 2, "o": 3}),
        [
            ("n (g c) . ., (g o) c . . -> n (g o) . . | c!", {"g": 2, "c": 2, "o": 2}),
            "n c . ., o k . . -> n o . . | c! k!",
        ],
    ),
    (
        "pool2d",
        [Sample.of(IMAGE, ksize=(2, 2), pooling_type="max", strides=(2, 2))],
        "n c . . -> n c . . | U(0>max)",
        ["n c h w -> n c h w", "n c . . -> n c . . | U(0)", "c n . . -> n c . ."],
    ),
    (
        "squared_l2_norm",
        [Sample.of(X)],
        "* -> . | *:+",
        ["* -> . | *:+ L(0)", "* -> . | *:max", "* -> . | *:=", "* -> . | *:min"],
    ),
    ("reduce_sum", [Sample.of(X, dim=(1,))], "a b -> a | b:+ L(0)", ["a b -> a | b:max", "b a -> a | b:+", "a b -> a | b:+ U(0)"]),
    (
        "reduce_max",
        [Sample.of(X, dim=(1,))],
        "a b -> a | b:max U(0>max)",
        ["a b -> a | b:+", "a b -> a | b:min", "a b -> a | b:max U(0)"],
    ),
    ("transpose", [Sample.of(X, axis=(1, 0))], "a b -> b a | L(0) U(0)", ["a b -> a b", "a b -> b a | D(0)"]),
    ("adam", [Sample.of(*ADAM)], "*, *, *, *, ., ., . -> *, *, *", ["*, *, *, *, ., ., . -> *, *, * | L(1)"]),
    (
        "sgd",
        [Sample.of(X, W, np.array([0.1]))],
        "*, *, . -> * | L(0,1)",
        ["*, *, . -> * | L(1)", "*, *, . -> * | L(0,1,2)", "~*, *, . -> *"],
    ),
    (
        "momentum",
        [Sample.of(X, W, W + 1, np.array([0.1]))],
        "*, *, *, . -> *, * | L(0,1,2)",
        ["*, *, *, . -> *, * | L(0,1)", "*, *, *, . -> *, * | L(0,1,2) L(1,2>1)"],
    ),
    ("top_k", [Sample.of(X, k=2)], "e c -> e ., e . | c!", ["e c -> e ., e . | c:=", "e c -> e ., e . | c:max"]),
    (
        "ghost_batch_norm_grad",
        [Sample.of(f64(7, 3, 2), f64(3), f64(4, 3), f64(4, 3, seed=1) ** 2, f64(7, 3, 2, seed=2), sub_batches=4)],
        "n c *, c, n/4 c, n/4 c, n c * -> n c *, c, c | n/4@ #n n:+ *! L(4)",
        [
            "n c *, c, . c, . c, n c * -> n c *, c, c | #n n:+ *! L(4)",
            "n c *, c, n/4 c, n/4 c, n c * -> n c *, c, c | #n n:+ *! L(4)",
            "n c *, c, n/4 c, n/4 c, n c * -> n c *, c, c | n/4@ n:+ *! L(4)",
            "n c *, c, n/4 c, n/4 c, n c * -> n c *, c, c | n/4@ #n n:= *! L(4)",
            "n c *, c, n/4 c, n/4 c, n c * -> n c *, c, c | n/4@ #n n:+ *:+ L(4)",
            "n c *, c, n/4 c, n/4 c, n c * -> n c *, c, c | n/4@ #n n:+ *! L(2)",
            "n c *, c, m c, m c, n c * -> n c *, c, c | m@ #n n:+ m:+ *! L(4)",
        ],
    ),
    (
        "lookup_table_v2",
        [Sample.of(TABLE, IDS)],
        "v d, a b -> a b d | v! L(0)",
        [
            "v d, a b -> a b d | v:+",
            "v d, a b -> b a d | v!",
            "v d, a b -> a b d | v! L(1)",
            "~v d, a b -> a b d | v!",
        ],
    ),
]


@pytest.mark.parametrize("op, samples, right", [(op, samples, right) for op, samples, right, _ in LINES])
def test_right_lines_hold(op, samples, right):
    assert execute_rows(with_line(op, right, *samples)).wrong == []


@pytest.mark.parametrize("op, samples, line", [(op, samples, line) for op, samples, _, wrong in LINES for line in wrong])
def test_wrong_lines_are_refuted(op, samples, line):
    assert execute_rows(with_line(op, line, *samples)).wrong


# -- what kernels are told --------------------------------------------------------------------------------------------------------------


class _Base(OpDef):
    """Something."""

    inputs = ("X",)


class _Mean(_Base):
    """The mean of each row: what a rank has of it, by the global number of columns."""

    pattern = "a b -> a | b:+ #b L(0)"

    @staticmethod
    def infer(x):
        return x.with_shape(x.shape[:1])

    @staticmethod
    def kernel(xp, x, *, part):
        return x.sum(1) / (part.count if part is not None else x.shape[1])

    @staticmethod
    def samples():
        yield Sample.of(X)


class _Ramp(_Base):
    """X plus the global number of its row."""

    pattern = "v d -> v d | v@0"

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def kernel(xp, x, *, part):
        start, size = (part.start, part.size) if part is not None else (0, x.shape[0])
        return x + (np.arange(start, start + x.shape[0]) / size)[:, None]

    @staticmethod
    def samples():
        yield Sample.of(X)


class _Noise(_Base):
    """X plus a number that depends on where an element lies in the whole."""

    pattern = "* -> * | K"

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def kernel(xp, x, *, part):
        shape = part.shape if part is not None else x.shape
        noise = np.random.default_rng(7).standard_normal(shape)
        return x + (noise[tuple(slice(a, b) for a, b in part.box)] if part is not None else noise)

    @staticmethod
    def samples():
        yield Sample.of(X)


class _Tile(_Base):
    """X, written as often as it takes to fill `size` columns: an attribute that speaks of a size."""

    pattern = staticmethod(lambda ins, outs, attrs: ("a b -> a (t b)", {"t": outs[0].shape[1] // ins[0].shape[1]}))
    attrs = {"size": 0}

    @staticmethod
    def infer(x, *, size):
        return x.with_shape((x.shape[0], size))

    @staticmethod
    def kernel(xp, x, *, size):
        return np.tile(x, (1, size // x.shape[1]))

    @staticmethod
    def _local_attrs(attrs, ins, outs):
        return {**attrs, "size": outs[0][1]}

    comm = Comm(local_attrs=_local_attrs)

    @staticmethod
    def samples():
        yield Sample.of(X, size=24)


# these have no name, so that they do not stand among the ops
for _op in (_Mean, _Ramp, _Noise, _Tile):
    _op.__init_subclass__ = classmethod(lambda cls, **kwargs: None)
    _op.in_slots, _op.out_slots = OPS["relu"].in_slots, OPS["relu"].out_slots
    _op.takes_part = _op is not _Tile


@pytest.mark.parametrize("op", [_Mean, _Ramp, _Noise, _Tile])
def test_kernels_are_told_what_their_pattern_asks_for(op):
    assert execute_rows(op).wrong == [] and execute_rows(op).executions > 4


@pytest.mark.parametrize(
    "op, line",
    [
        (_Mean, "a b -> a | b:+ L(0)"),
        (_Mean, "a b -> a | b:+ #a L(0)"),
        (_Mean, "a b -> a | b! #a"),
        (_Ramp, "v d -> v d"),
        (_Ramp, "v d -> v d | d@0"),
        (_Ramp, "v d -> v d | v@0 L(0)"),
        (_Ramp, "v d -> v d | v@0 d@0"),
        (_Noise, "* -> *"),
        (_Noise, "* -> * | K L(0)"),
        (_Tile, lambda ins, outs, attrs: ("a b -> a (b t)", {"t": 4})),
        (_Tile, lambda ins, outs, attrs: ("a b -> a (t b)", {"t": 3})),
    ],
)
def test_kernels_that_are_told_something_else_are_refuted(op, line):
    assert execute_rows(with_line(op, line)).wrong


def test_an_attribute_that_speaks_of_a_size_must_be_made_local():
    assert execute_rows(type("_Frozen", (_Tile,), {"comm": Comm(local_attrs=None)})).wrong
    groups = with_line(
        "conv2d", ("n (g c) . ., (g o) c . . -> n (g o) . . | c!", {"g": 2, "c": 2, "o": 3}), Sample.of(IMAGE, FILTER, groups=2)
    )
    groups.comm = Comm(local_attrs=None)
    assert execute_rows(groups).wrong


def test_a_pattern_that_tells_a_kernel_what_it_does_not_take_is_refused():
    with pytest.raises(AssertionError, match="the kernel has no parameter `part`"):
        check_rows(with_line("gelu", "* -> * | #*"))


def test_the_message_shows_op_sample_row_and_values():
    with pytest.raises(
        AssertionError, match=r"op abs, sample 0 \(f64\[3,5\]\): row 'linear in 0: partial\(sum\) -> partial\(sum\)', 3 ranks, terms"
    ):
        check_rows(with_line("abs", "* -> * | L(0)"))


# -- what is missing --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, samples, line, says",
    [
        ("gelu", [], "* -> *", []),
        ("scale", [Sample.of(X, scale=2.0)], "* -> *", ["partial(sum) -> partial(sum)"]),
        ("softmax", [Sample.of(X)], "e c -> e c | c! e!", ["shard(0) -> shard(0)"]),
        ("matmul", [Sample.of(X, Y)], "i k, k j -> i j | k:+ L(0) L(1)", []),
        ("matmul", [Sample.of(X, Y)], "i k, k j -> i j | k! j! L(0) L(1)",
         ["whole, shard(1) -> shard(1)", "shard(1), shard(0) -> partial(sum)"]),
        ("matmul", [Sample.of(X, Y)], "i k, k j -> i j | L(0) L(1)", ["shard(1), shard(0) -> partial(sum)"]),
        ("matmul", [Sample.of(X, Y)], "i k, k j -> i j | k:+ L(1)", ["partial(sum), whole -> partial(sum)"]),
        ("reduce_max", [Sample.of(X, dim=(1,))], "a b -> a | b!", ["shard(1) -> partial(max)"]),
    ],
)  # fmt: skip
def test_what_no_row_allows_is_tried(op, samples, line, says):
    assert [m.says for m in missing_rows(with_line(op, line, *samples))] == says


def test_factors_that_no_sample_exercises_are_named():
    op = with_line("matmul", "i k, k j -> i j | k:+", Sample.of(X[:1], Y))
    assert small_factors(op) == ["i"]
    assert sorted(small_factors(op, 6)) == ["i", "j"]


class Centred(OpDef):
    """Each of 3 runs of rows minus its first row: no axis has an entry for each run."""

    name = "_centred"
    inputs = ("X",)
    pattern = "n c -> n c | n@ n/3"

    @staticmethod
    def infer(x):
        return x

    @staticmethod
    def kernel(xp, x, *, out, part):
        start, size = (0, len(x)) if part is None else (part.start, part.size)
        for k in range(3):
            a, b = (min(max(j * size // 3 - start, 0), len(x)) for j in (k, k + 1))
            if a < b:
                out[a:b] = x[a:b] - x[a]

    @staticmethod
    def samples():
        yield Sample.of(f64(8, 3))
        yield Sample.of(f64(2, 3))


@pytest.mark.parametrize("line, right", [("n c -> n c | n@ n/3", True), ("n c -> n c | n@", False), ("n c -> n c | n/3", False)])
def test_a_factor_is_cut_between_runs(line, right):
    assert (execute_rows(with_line(Centred, line)).wrong == []) is right


@pytest.mark.parametrize(
    "line, message",
    [
        ("n c -> n c | n/3 n/2", "n is in 2 runs and in 3"),
        ("n c -> n c | n/0", "n is in 0 runs"),
        ("n n/2 -> n n/2", "an axis n/2 has size 3"),
    ],
)
def test_runs_that_cannot_be_are_refused(line, message):
    with pytest.raises(ProgramError, match=message):
        with_line(Centred, line).pattern_of([TensorType("float64", (8, 3))], [TensorType("float64", (8, 3))], {})


def test_what_has_size_1_is_in_no_runs():
    types = [TensorType("float64", (1, 3)), TensorType("float64", (4, 3))]
    table = rows(with_line(Centred, "n c, n/4 c -> n c | n@").pattern_of(types, types[:1], {}))
    assert [row.why for row in table] == ["cut c", "at a root", "whole", "each rank its own"]
