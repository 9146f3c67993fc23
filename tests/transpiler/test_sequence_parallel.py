"""Sequences cut over ranks by `layers.shard`: between tensor parallel layers, as Megatron has it, and around attention, as Ulysses."""

from collections import Counter

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Shard
from fluidx.testing.models import TestModel, train_ranks, train_single
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, same_answers
from tests.transpiler.tensor_models import HEADS, LENGTH, WIDTH, as_operator, gpt, sent, transpiled, written_out

L, D = fx.layers, "float64"


def along_tp(x):
    return L.shard(x, Shard(1, "tp"))


def test_a_sum_becomes_a_reduce_scatter_and_an_all_gather_around_what_is_cut():
    census = [sent(transpiled(gpt(layers, region=along_tp), fx.Mesh(dp=2, tp=2))) for layers in (1, 2)]
    # a layer: 2 all_gathers before the column cuts and 2 reduce_scatters behind the row cuts, and as many backward; the parameters of
    # 2 layer_norms and the 2 biases of row cuts have terms of their gradients on every rank, 6 in all
    assert census[1] - census[0] == Counter(all_gather=4, reduce_scatter=4, all_reduce=6)


@swept(2, strategy=["data_parallel", "zero1", "ring_optimizer"], attend=[as_operator, written_out])
def test_the_regions_train_as_one_device_does(strategy, attend):
    same_answers(gpt(attend=attend, region=along_tp), STRATEGIES[strategy](), fx.Mesh(dp=2, tp=2), rows=(5, 3))


def test_lengths_that_ranks_cut_unevenly():
    same_answers(gpt(1, region=along_tp), "data_parallel", fx.Mesh(tp=4), rows=(3,))


# -- Ulysses ---------------------------------------------------------------------------------------------------------------------------


def ulysses(layers=2, outside=True):
    """Transformer layers whose parameters are whole everywhere: tokens are cut outside of attention, heads inside."""
    main, startup = fx.Program("ulysses"), fx.Program("ulysses_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, LENGTH, WIDTH], D)
        h = L.shard(x, Shard(1, "sp"))
        for _ in range(layers):
            qkv = L.fc(L.layer_norm(h, begin_norm_axis=2), 3 * WIDTH, num_flatten_dims=2)
            qkv = L.transpose(L.reshape(qkv, [0, 0, 3, HEADS, WIDTH // HEADS]), [2, 0, 3, 1, 4])
            mixed = L.scaled_dot_product_attention(*L.unstack(L.shard(qkv, Shard(2, "sp"))), causal=True)
            mixed = L.shard(mixed, Shard(2, "sp")) if outside else mixed
            h = h + L.fc(L.reshape(L.transpose(mixed, [0, 2, 1, 3]), [0, 0, WIDTH]), WIDTH, num_flatten_dims=2)
            h = h + L.dropout(L.fc(L.fc(h, 12, num_flatten_dims=2, act="gelu"), WIDTH, num_flatten_dims=2), 0.1)
        loss = L.mean(L.square(h))
        _, pairs = fx.optimizer.Adam(0.01).minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, LENGTH, WIDTH))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("layers", [1, 2])
def test_two_all_to_alls_stand_around_attention_forward_and_two_backward(layers):
    model = ulysses(layers)
    t = transpiled(model, fx.Mesh(dp=2, sp=2))
    assert sent(t, "sp") == Counter(all_to_all=4 * layers, all_reduce=len(model.gradients))
    descs = t.main.global_block().descs
    made = [n for op in t.main.ops if op.type.startswith("scaled_dot_product_attention") for n in op.output_arg_names]
    assert {descs[n].placement for n in made} == {(Shard(1, "sp"), Shard(0, "dp"))}


@pytest.mark.parametrize("mesh", [fx.Mesh(dp=2, sp=2), fx.Mesh(sp=4), fx.Mesh(dp=1, sp=3)], ids=repr)
def test_tokens_cut_outside_of_attention_and_heads_inside_train_as_one_device(mesh):
    """3 ranks cut neither 6 tokens in 4 heads evenly."""
    same_answers(ulysses(1), "data_parallel", mesh, rows=(5, 3))


# -- the layer -------------------------------------------------------------------------------------------------------------------------


def placed(mesh, *placement, before=(), **options):
    """Where a value that is cut over dp alone, and its gradient, lie behind layers.shard."""
    main, startup = fx.Program(), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4, 6], "float32")
        x.stop_gradient = False
        x = L.shard(x, list(before)) if before else x
        y = L.shard(x, *placement, **options)
        fx.append_backward(L.mean(L.square(y)))
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(bucket_mb=0)).transpile(program=main, startup_program=startup, trainers=mesh)
    t.verify()
    descs = t.main.global_block().descs
    return descs[y.name].placement, descs[f"{x.name}@GRAD"].placement, [op.type for op in t.main.ops if op.type in MOVES]


MOVES = ("part", "all_gather", "all_to_all", "all_reduce", "reduce_scatter")
ROWS = Shard(0, "dp")


def test_a_value_lies_as_it_is_told_and_its_gradient_too_which_goes_back_where_that_was_cut():
    mesh, columns = fx.Mesh(dp=2, tp=2), (Shard(1, "tp"), ROWS)
    assert placed(mesh, Shard(1, "tp")) == (columns, columns, ["part"])
    assert placed(mesh, Shard(-1, "tp")) == (*[(Shard(2, "tp"), ROWS)] * 2, ["part"])
    assert placed(mesh, Shard(1, "tp", 4)) == (*[(Shard(1, "tp", 4), ROWS)] * 2, ["part"])
    assert placed(mesh, Shard(2, "tp"), before=[Shard(1, "tp")]) == ((Shard(2, "tp"), ROWS), columns, ["part", "all_to_all", "all_to_all"])
    assert placed(mesh, whole="tp", before=[Shard(1, "tp")]) == ((ROWS,), columns, ["part", "all_gather", "part"])
    assert placed(mesh, whole=["tp", "dp"]) == ((), (ROWS,), ["all_gather", "part"])


def test_over_an_axis_of_one_rank_and_on_one_device_nothing_changes():
    assert placed(fx.Mesh(dp=2, tp=1), Shard(1, "tp")) == ((ROWS,), (ROWS,), [])
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        y = L.shard(x, Shard(1, "tp"))
    value = np.arange(6, dtype="float32").reshape(2, 3)
    (found,) = fx.Executor(fx.CPUPlace()).run(main, feed={"x": value}, fetch_list=[y])
    assert np.array_equal(found, value)


def test_strict_takes_an_annotation_for_a_wish():
    model = gpt(1, region=along_tp)
    with pytest.raises(fx.TranspileError, match="strict: .* for layer_norm"):  # sums that nobody asked for
        transpiled(gpt(1), fx.Mesh(dp=2, tp=2), fx.strategies.data_parallel(strict=True))
    with pytest.raises(fx.TranspileError, match="strict: .* for mul"):  # the sums are asked for now, the all_gather is not
        transpiled(model, fx.Mesh(dp=2, tp=2), fx.strategies.data_parallel(strict=True))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: L.shard(x), r"layers.shard: give a placement such as Shard\(1, 'tp'\), or whole='tp'"),
        (lambda x: L.shard(x, "tp"), "layers.shard: placement must be a Shard such as"),
        (lambda x: L.shard(x, Shard(2, "tp")), r"the axis of a cut is 2; variable 'x' with shape \[-1, 4\] allows -2 to 1"),
        (lambda x: L.shard(x, Shard(1, "tp"), whole="tp"), "layers.shard: tp, tp names a mesh axis twice"),
        (lambda x: L.shard(np.ones(3), Shard(0, "tp")), "layers.shard: x must be a Variable"),
    ],
)
def test_what_cannot_be_said_is_refused_where_it_is_written(call, message):
    with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ProgramError, match=message):
        call(fx.data("x", [-1, 4], "float32"))


def test_an_axis_that_the_ranks_do_not_have_is_named_with_the_line():
    main, startup = fx.Program(), fx.Program()
    with fx.program_guard(main, startup):
        L.shard(fx.data("x", [-1, 4], "float32"), Shard(1, "tp"))
    said = r"op shard: the ranks have no axis 'tp'; they have: dp; .*\n.*shard\(%x, _\)(.|\n)*written at"
    with pytest.raises(fx.TranspileError, match=said):
        fx.DistributeTranspiler().transpile(program=main, startup_program=startup, trainers=2)


# -- three axes, in small integers ---------------------------------------------------------------------------------------------------------


def integer_layers():
    """Two pairs of a column and a row cut over tp, tokens cut between them and then rows over sp: every sum is exact in float32."""
    main, startup = fx.Program("tokens"), fx.Program("tokens_startup")
    rng = np.random.default_rng(5)

    def integers(shape, *placement):
        value = rng.integers(-1, 2, shape).astype("float32")
        return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(value), placement=list(placement))

    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3, 4], "float32")
        h = L.shard(x, Shard(1, "sp"))
        for _ in range(2):
            up = L.fc(h, 6, 2, integers((4, 6), Shard(1, "tp")), integers((6,), Shard(0, "tp")), act="relu")
            h = h + L.shard(L.fc(up, 4, 2, integers((6, 4), Shard(0, "tp")), integers((4,))), Shard(2, "tp"))
        loss = L.reduce_sum(L.square(h))
        _, pairs = fx.optimizer.SGD(0.5).minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).integers(-2, 3, (rows, 3, 4)).astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_axes_are_bit_equal_to_one_device_where_sums_are_exact(strategy):
    model = integer_layers()
    fetch, feeds = [model.loss, *[g for _, g in model.gradients]], [model.feed(5)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, STRATEGIES[strategy](), fx.Mesh(dp=2, tp=2, sp=2), feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.abs(a).max() < 2**23 and np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p
