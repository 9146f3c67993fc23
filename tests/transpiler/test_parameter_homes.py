"""Where parameters are updated: balanced roots, pieces, cuts."""

import sys
from pathlib import Path

import pytest

import fluidx as fx
from fluidx.ir import At, Pieces, Shard, TensorType, Var
from fluidx.testing.models import classifier
from fluidx.transpiler.placement.parameter_homes import AtRoots, Everywhere, InPieces, Sharded
from fluidx.transpiler.placement.roots import balance

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from _shapes import MODELS

sys.path.pop(0)


def params(*shapes, **placed):
    return {f"p{k}": Var(f"p{k}", TensorType("float32", s), placed.get(f"p{k}", ())) for k, s in enumerate(shapes)}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("model", MODELS)
def test_pieces_balance_known_models_within_a_twentieth(model, ranks):
    named = {n: Var(n, TensorType("float32", (size,))) for n, size in MODELS[model]}
    entries = InPieces().entries(named, "dp", ranks)
    loads = [0] * ranks
    for n, e in entries.items():
        size = named[n].type.numel
        ends = e.bounds if isinstance(e, Pieces) else [0] * (e.root + 1) + [size] * (ranks - e.root)
        assert ends[0] == 0 and ends[-1] == size and len(ends) == ranks + 1
        for r in range(ranks):
            loads[r] += ends[r + 1] - ends[r]
    assert max(loads) * ranks / sum(loads) <= 1.05
    assert balance(InPieces().chunks(named, ranks), ranks) <= 1.05


def test_everywhere_says_nothing():
    assert Everywhere().entries(params((4, 3), (2,)), "dp", 4) == {"p0": None, "p1": None}


def test_roots_are_balanced_by_bytes_or_by_a_hash():
    p = params((10,), (6,), (4,), (3,))
    assert AtRoots().entries(p, "dp", 2) == {"p0": At(0), "p1": At(1), "p2": At(1), "p3": At(0)}
    assert AtRoots("hash").entries(p, "dp", 2) == AtRoots("hash").entries(dict(reversed(p.items())), "dp", 2)


def test_small_parameters_stay_whole_and_what_another_axis_cuts_does_too():
    whole = InPieces().entries(params((100, 100), (7,)), "dp", 2)
    assert isinstance(whole["p0"], Pieces) and isinstance(whole["p1"], At)
    cut_by_tp = InPieces().entries(params((300, 300), (100, 100), p1=(Shard(0, "tp"),)), "dp", 2)
    assert isinstance(cut_by_tp["p0"], Pieces) and isinstance(cut_by_tp["p1"], At)


def test_cuts_take_the_first_even_axis_or_the_longest_and_leave_scalars():
    p = params((4, 6), (3, 6), (5, 7), (1,), (6, 6), (1, 1), p4=(Shard(0, "tp"),))
    assert Sharded().entries(p, "dp", 2) == {
        "p0": Shard(0), "p1": Shard(1), "p2": Shard(1), "p3": None, "p4": Shard(1), "p5": None,
    }  # fmt: skip


@pytest.mark.parametrize("servers, heaviest", [(1, 768 + 64 + 320 + 5), (2, 384 + 32 + 160 + 5), (3, 256 + 22 + 107 + 5)])
def test_the_balance_of_servers_is_among_them(servers, heaviest):
    """Parameters of 768, 64, 320 and 5 elements: a slice of each for every server, the first one the largest, and the last one whole."""
    m = classifier(width=64)
    t = fx.DistributeTranspiler(fx.strategies.parameter_server(servers, min_block=4))
    t.transpile(program=m.main, startup_program=m.startup, trainers=4)
    assert t.balance() == pytest.approx(heaviest * servers / (768 + 64 + 320 + 5))  # a quotient of small whole numbers


@pytest.mark.parametrize("trainers", [4, fx.Cluster(2, 2)], ids=str)
def test_the_balance_that_a_transpiler_reports(trainers):
    def reported(strategy):
        m = classifier(width=64)
        return fx.DistributeTranspiler(strategy).transpile(program=m.main, startup_program=m.startup, trainers=trainers).balance()

    assert reported("data_parallel") == 1.0
    assert 1.0 <= reported(fx.strategies.ring_optimizer(chunk_mb=256 / 2**20)) <= 1.25
    assert reported("zero1") <= 1.1  # cuts of an axis, nearly even
    # parameters of 768, 320, 64 and 5 elements: one of four ranks has the largest
    assert reported("reduce_broadcast") == pytest.approx(768 * 4 / (768 + 320 + 64 + 5))


def test_a_choice_for_a_parameter_that_is_not_there_is_refused():
    class Named:
        def __init__(self, **places):
            self.places = places

        def entries(self, params, group, ranks):
            return {n.replace("__", "."): e for n, e in self.places.items()}

        def __repr__(self):
            return "Named()"

    def transpile(**places):
        model = classifier()
        strategy = fx.transpiler.strategy("named", Named(**places))
        return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=2)

    transpile(fc_0__w_0=At(1, "dp")).verify()
    with pytest.raises(fx.TranspileError, match=r"Named\(\) places 'fc_0.w', and there is no such parameter; did you mean 'fc_0.w_0'\?"):
        transpile(fc_0__w=At(1, "dp"))
    with pytest.raises(fx.TranspileError, match=r"there are: fc_0.b_0, fc_0.w_0, fc_1.b_0, fc_1.w_0"):
        transpile(table=At(1, "dp"))
