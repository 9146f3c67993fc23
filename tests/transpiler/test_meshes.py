"""Data parallel and tensor parallel together: annotated parameters stay cut, and everything is one device's."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import Shard
from fluidx.ir.opdef import OPS, Effect
from fluidx.testing.models import TestModel, train_ranks, train_single
from fluidx.transpiler.lowering import write_algorithm
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, same_answers

L = fx.layers
MESHES = [fx.Mesh(dp=2, tp=2), fx.Mesh(tp=2, dp=2), fx.Mesh(dp=1, tp=2), fx.Mesh(dp=3, tp=2), fx.Mesh(dp=2, tp=1)]
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=repr)


def integers(*shape, seed=5, **options):
    value = np.random.default_rng(seed).integers(-2, 3, shape).astype("float32")
    return fx.ParamAttr(initializer=fx.initializer.NumpyArrayInitializer(value), **options)


def integer_layers():
    """A column-parallel layer and then a row-parallel one, in small integers: a step of SGD is exact in float32."""
    main, startup = fx.Program("two_layers"), fx.Program("two_layers_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 6])
        columns, bias = integers(6, 8, placement=Shard(1, "tp")), integers(8, placement=Shard(0, "tp"))
        h = L.fc(x, 8, act="relu", param_attr=columns, bias_attr=bias)
        y = L.fc(h, 4, param_attr=integers(8, 4, placement=Shard(0, "tp")), bias_attr=integers(4))
        loss = L.reduce_sum(L.square(y))
        _, pairs = fx.optimizer.SGD(0.5).minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).integers(-3, 4, (rows, 6)).astype("float32")}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@swept(2, strategy=list(STRATEGIES), mesh=MESHES)
def test_gradients_and_parameters_are_bit_equal_where_sums_are_exact(strategy, mesh):
    model = integer_layers()
    fetch = [model.loss, *[g for _, g in model.gradients]]
    feeds = [model.feed(12)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, STRATEGIES[strategy](), mesh, feeds, fetch)
    for name, a, b in zip(fetch, one, many, strict=True):
        assert np.array_equal(a, b), name
    for p, _ in model.gradients:
        assert np.array_equal(scope.get(p), state[p]), p


def transformer(optimizer, attend=None):
    """Attention whose heads are cut over tp, and a cut layer behind it; `attend` makes one value of queries, keys and values."""
    main, startup = fx.Program("heads"), fx.Program("heads_startup")
    length, width, heads, words = 5, 8, 4, 9

    def columns(name):
        return {
            "param_attr": fx.ParamAttr(name=f"{name}.w", placement=Shard(1, "tp")),
            "bias_attr": fx.ParamAttr(name=f"{name}.b", placement=Shard(0, "tp")),
        }

    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x, label = fx.data("x", [-1, length, width], "float64"), fx.data("label", [-1, length, 1], "int64")
        n = L.layer_norm(x, begin_norm_axis=2)
        q, k, v = (
            L.transpose(L.reshape(L.fc(n, width, num_flatten_dims=2, **columns(name)), [0, 0, heads, width // heads]), [0, 2, 1, 3])
            for name in "qkv"
        )
        mixed = attend(q, k, v) if attend else L.matmul(L.softmax(L.matmul(q, k, transpose_y=True, alpha=0.7)), v)
        mixed = L.reshape(L.transpose(mixed, [0, 2, 1, 3]), [0, 0, width])
        h = x + L.fc(mixed, width, num_flatten_dims=2, param_attr=fx.ParamAttr(placement=Shard(0, "tp")))
        h = L.dropout(L.fc(h, 12, num_flatten_dims=2, act="gelu", **columns("up")), 0.2, dropout_implementation="upscale_in_train")
        h = L.fc(h, width, num_flatten_dims=2, param_attr=fx.ParamAttr(placement=Shard(0, "tp")))
        loss = L.mean(L.softmax_with_cross_entropy(L.fc(h, words, num_flatten_dims=2), label))
        _, pairs = optimizer.minimize(loss)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, length, width)), "label": rng.integers(0, words, (rows, length, 1))}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs])


@swept(2, strategy=["data_parallel", "zero1", "ring_optimizer"], mesh=[fx.Mesh(dp=2, tp=2), fx.Mesh(dp=1, tp=3)])
def test_heads_cut_over_the_ranks_and_an_uneven_batch(strategy, mesh):
    clip = fx.clip.GradientClipByGlobalNorm(0.1)
    same_answers(transformer(fx.optimizer.Adam(0.01, grad_clip=clip)), STRATEGIES[strategy](), mesh, rows=(7, 2))


def causal(q, k, v):
    return L.scaled_dot_product_attention(q, k, v, causal=True)


@swept(2, strategy=["data_parallel", "zero1", "ring_optimizer"], mesh=[fx.Mesh(dp=2, tp=2), fx.Mesh(dp=1, tp=3)])
def test_heads_of_the_attention_operator_are_cut_too(strategy, mesh):
    same_answers(transformer(fx.optimizer.Adam(0.01), causal), STRATEGIES[strategy](), mesh, rows=(7, 2))


def test_attention_as_an_operator_communicates_as_it_does_written_out():
    sent = []
    for attend in (None, causal):
        model, mesh = transformer(fx.optimizer.Adam(0.01), attend), fx.Mesh(dp=2, tp=2)
        t = fx.DistributeTranspiler("data_parallel").transpile(program=model.main, startup_program=model.startup, trainers=mesh)
        sent.append([(op.type, op.attrs["group"]) for op in t.main.ops if OPS[op.type].effect is Effect.COLLECTIVE])
    assert sorted(sent[0]) == sorted(sent[1])
    descs = t.main.global_block().descs
    made = [n for op in t.main.ops if op.type.startswith("scaled_dot_product_attention") for n in op.output_arg_names]
    assert len(made) == 5 and all(set(descs[n].placement) == {Shard(0, "dp"), Shard(1, "tp")} for n in made)


@pytest.mark.parametrize("strategy", ["ring_optimizer", "reduce_broadcast"])
def test_what_tp_cuts_travels_round_the_ring_in_several_messages(strategy, monkeypatch):
    monkeypatch.setattr(write_algorithm, "_LARGEST", 48)
    ring = fx.strategies.ring_optimizer(chunk_mb=64 / 2**20)
    by_ring = ring if strategy == "ring_optimizer" else fx.strategies.reduce_broadcast(algorithm="ring")
    same_answers(transformer(fx.optimizer.Adam(0.01)), by_ring, fx.Mesh(dp=3, tp=2), rows=(7, 2))


def test_column_then_row_parallel_reduces_once_forward_and_parameters_stay_cut():
    model = integer_layers()
    t = fx.DistributeTranspiler("data_parallel").transpile(program=model.main, startup_program=model.startup, trainers=fx.Mesh(dp=2, tp=2))
    forward = t.main.ops[: next(k for k, op in enumerate(t.main.ops) if op.type == "fill_constant")]
    assert [(op.type, op.attrs["group"]) for op in forward if OPS[op.type].effect is Effect.COLLECTIVE] == [("all_reduce", "tp")]
    descs = t.main.global_block().descs
    assert {n: descs[n].placement for n, _ in model.gradients if descs[n].placement} == {
        "fc_0.w_0": (Shard(1, "tp"),), "fc_0.b_0": (Shard(0, "tp"),), "fc_1.w_0": (Shard(0, "tp"),),
    }  # fmt: skip
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        assert [s.arrays["fc_0.w_0"].shape for s in exe.scopes] == [(6, 4)] * 4
        assert exe.state("fc_0.w_0").shape == (6, 8)


def test_zero1_cuts_again_what_tp_has_cut():
    model = transformer(fx.optimizer.Adam(0.01))
    t = fx.DistributeTranspiler("zero1").transpile(program=model.main, startup_program=model.startup, trainers=fx.Mesh(dp=2, tp=2))
    with fx.ParallelExecutor(t, places=fx.cpu_places(4)) as exe:
        exe.run_startup()
        moments = [{n: a.shape for n, a in s.arrays.items() if "moment1" in n} for s in exe.scopes]
    assert {m["q.w_moment1_0"] for m in moments} == {(4, 4)}  # of [8, 8]


def test_groups_of_meshes_and_clusters():
    assert fx.Mesh(dp=2, tp=3).groups() == {"dp": ((0, 3), (1, 4), (2, 5)), "tp": ((0, 1, 2), (3, 4, 5))}
    assert fx.Mesh(tp=2, dp=2).groups() == {"tp": ((0, 2), (1, 3)), "dp": ((0, 1), (2, 3))}
    assert list(fx.Mesh(dp=2, tp=3, pp=2).axes.items()) == [("tp", 3), ("pp", 2), ("dp", 2)]
    assert fx.Mesh(dp=2, tp=3, pp=2).world_size == 12 and fx.Mesh(dp=2) == fx.Mesh(dp=2) != fx.Mesh(tp=2)
    assert fx.Mesh(dp=2, tp=2) != fx.Mesh(tp=2, dp=2) and len({fx.Mesh(dp=2), fx.Mesh(dp=2)}) == 1
    for mesh in (fx.Mesh(dp=2, tp=3, pp=2), fx.Cluster(3, 2), fx.Cluster(2, 1), fx.Cluster(1, 4)):
        for name, sets in mesh.groups().items():
            assert sorted(r for s in sets for r in s) == list(range(mesh.world_size)), name
    assert fx.Cluster(1, 4).groups() == {"dp": ((0, 1, 2, 3),)}
    cluster = fx.Cluster(2, 3)
    assert all(len(set(n) & set(r)) == 1 for n in cluster.groups()["node"] for r in cluster.groups()["rail"])
    assert sorted(d["kind"] for _, _, d in cluster.topology().edges(data=True)) == ["device"] * 6 + ["network"] * 2


def test_a_rank_without_channels_folds_and_unfolds_nothing():
    """Two channels over three ranks: a reshape to [rows, channels, 1, 1] must keep the axis of size 0, which says "copy" elsewhere."""
    main, startup = fx.Program("channels"), fx.Program("channels_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 3], "float32")
        h = L.fc(x, 2, param_attr=integers(3, 2, placement=Shard(1, "tp")), bias_attr=integers(2, placement=Shard(0, "tp")))
        y = L.reshape(L.reshape(h, [0, 1, 2, 1]), [-1, 2])
        loss = L.reduce_sum(L.square(y))
        _, pairs = fx.optimizer.SGD(0.5).minimize(loss)
    model = TestModel(main, startup, loss, lambda rows, seed=0: {"x": np.ones((rows, 3), "float32")}, [(p.name, g.name) for p, g in pairs])
    feeds = [model.feed(5)] * 2
    one, _ = train_single(model, feeds, [loss, y])
    many, _ = train_ranks(model, "data_parallel", fx.Mesh(dp=1, tp=3), feeds, [loss, y])
    for got, want in zip(many, one, strict=True):
        np.testing.assert_array_equal(np.ravel(got[0]), np.ravel(want[0]))
        np.testing.assert_array_equal(got[1], want[1])
