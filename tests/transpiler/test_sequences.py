"""Collectives over hosts by sequences of collectives over smaller groups: what they compute, which are refused, and a user's own."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluidx as fx
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.transpiler.algorithms import ALGORITHMS, SEQUENCES, CollectiveSequence, Grid, PushPull, Refused, SequenceStage, Slicing
from fluidx.transpiler.algorithms.symbolic_check import check_sequence
from fluidx.transpiler.cluster import DATA, NODE, RAIL
from fluidx.verify.sequence import prove_sequence
from tests.sweep import swept


class ThroughFirst(CollectiveSequence):
    """The first device of each host speaks for it."""

    name = "through_first"

    def all_reduce(self, grid):
        return SequenceStage("reduce", NODE), SequenceStage("all_reduce", RAIL), SequenceStage("broadcast", NODE)

    def broadcast(self, grid):
        host, local = divmod(grid.root, grid.devices)
        return SequenceStage("broadcast", NODE, root=local), SequenceStage("broadcast", RAIL, root=host)


class RailsFirst(CollectiveSequence):
    """Between hosts first, by trees, then inside of them."""

    name = "rails_first"

    def all_reduce(self, grid):
        return SequenceStage("all_reduce", RAIL, "tree", word="hosts"), SequenceStage("all_reduce", NODE)


class Sliced(RailsFirst):
    name = "sliced"

    def slicing(self, hosts):
        return Slicing(nbytes=40, in_flight=3)


OWN = [ThroughFirst(), RailsFirst(), Sliced()]
FIRST = OWN[0]


@pytest.fixture(autouse=True)
def unregistered():
    before = dict(ALGORITHMS), dict(SEQUENCES)
    yield
    for known, old in zip((ALGORITHMS, SEQUENCES), before, strict=True):
        known.clear()
        known.update(old)


# -- what they compute --------------------------------------------------------------------------------------------------------------------


def group_sets(hosts, devices):
    ranks = np.arange(hosts * devices).reshape(hosts, devices)
    return {NODE: [tuple(map(int, r)) for r in ranks], RAIL: [tuple(map(int, r)) for r in ranks.T], DATA: [tuple(range(hosts * devices))]}


def cut(x, n):
    return [x[len(x) * k // n : len(x) * (k + 1) // n] for k in range(n)]


def carried_out(stages, groups, held):
    """What the ranks hold behind stages, worked out on numbers; None where a stage has no meaning."""
    held = list(held)
    for type_, group, root in stages:
        for members in groups[group]:
            mine = [held[r] for r in members]
            if all(x is None for x in mine):
                continue
            if root >= len(members):
                return None
            if type_ == "broadcast":
                made = [mine[root]] * len(members)
                if mine[root] is None:
                    return None
            elif any(x is None for x in mine):
                return None
            elif type_ == "all_gather":
                sizes = [len(x) for x in mine]
                if sizes != [len(x) for x in cut(range(sum(sizes)), len(members))]:
                    return None
                made = [np.concatenate(mine)] * len(members)
            elif len({len(x) for x in mine}) > 1:
                return None
            else:
                total = sum(mine)
                made = {
                    "all_reduce": [total] * len(members),
                    "reduce": [total if k == root else None for k in range(len(members))],
                    "reduce_scatter": cut(total, len(members)),
                }[type_]
            for r, x in zip(members, made, strict=True):
                held[r] = x
    return held


def before_and_after(collective, n, size, root):
    """Numbers, none of which is a sum of others, on ranks before a collective, and after it: {rank: what it must have}."""
    terms = [np.array([2.0 ** (k + n * (e % 4)) + 1000003.0**2 * e * (k + 1) for e in range(size)]) for k in range(n)]
    if collective == "broadcast":
        return [terms[k] if k == root else None for k in range(n)], dict.fromkeys(range(n), terms[root])
    if collective == "all_gather":
        return cut(terms[0], n), dict.fromkeys(range(n), terms[0])
    total = sum(terms)
    after = {"all_reduce": [total] * n, "reduce_scatter": cut(total, n)}.get(collective)
    return terms, {root: total} if after is None else dict(enumerate(after))


GRIDS = [(h, d) for h, d in product(range(1, 10), range(1, 10)) if h * d <= 9]


@pytest.mark.parametrize("recipe", [*SEQUENCES.values(), *OWN], ids=lambda r: r.name)
def test_a_sequence_computes_the_collective_on_every_grid(recipe):
    done = 0
    for (hosts, devices), collective in product(GRIDS, ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")):
        n = hosts * devices
        for root, rows in product(range(n) if collective in ("reduce", "broadcast") else (0,), (1, devices, 2 * n + 1)):
            try:
                stages = recipe.stages(collective, Grid(hosts, devices, root, rows))
            except Refused:
                continue
            before, after = before_and_after(collective, n, rows, root)
            found = carried_out([(s.collective, s.group, s.root) for s in stages], group_sets(hosts, devices), before)
            assert all(np.array_equal(found[r], x) for r, x in after.items()), (hosts, devices, collective, root, rows)
            done += 1
    assert done >= len(GRIDS)


TYPES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
one_stage = st.tuples(st.sampled_from(TYPES), st.sampled_from((NODE, RAIL, DATA)), st.integers(0, 1))


@settings(max_examples=400)
@given(st.sampled_from(TYPES), st.lists(one_stage, min_size=1, max_size=4), st.sampled_from(GRIDS), st.integers(1, 12), st.integers(0, 3))
def test_the_proof_accepts_what_computes_the_collective_and_nothing_else(collective, stages, shape, size, root):
    n = shape[0] * shape[1]
    root = root % n
    groups = group_sets(*shape)
    before, after = before_and_after(collective, n, size, root)
    found = carried_out(stages, groups, before)
    right = found is not None and all(found[r] is not None and np.array_equal(found[r], x) for r, x in after.items())
    assert (prove_sequence(collective, groups, stages, size, n, root) is None) == right


@pytest.mark.parametrize("servers", range(1, 10))
def test_servers_have_all_elements_once(servers):
    for trainers, size in product(range(1, 5), (1, servers, 2 * servers + 1)):
        sizes = PushPull(servers).sizes(trainers, size)
        assert list(sizes) == list(range(trainers, trainers + servers)) and sum(sizes.values()) == size
        assert max(sizes.values()) - min(sizes.values()) <= 1


# -- as algorithm= ------------------------------------------------------------------------------------------------------------------------


def bit_equal(strategy, cluster):
    model = integer_mlp()
    fetch, feeds = [model.loss, *[g for _, g in model.gradients]], [model.feed(24)]
    (one,), scope = train_single(model, feeds, fetch)
    (many,), state = train_ranks(model, strategy, cluster, feeds, fetch)
    assert all(np.array_equal(a, b) for a, b in zip(one, many, strict=True))
    assert all(np.array_equal(scope.get(p), state[p]) for p, _ in model.gradients)


CLUSTERS = [fx.Cluster(h, d) for h, d in ((2, 1), (2, 2), (3, 2), (2, 4), (3, 3), (5, 1))]


@swept(2, recipe={getattr(r, "name", r): r for r in ("hierarchical", "rails", *OWN)}, cluster=CLUSTERS)
def test_training_by_a_sequence_is_bit_equal(recipe, cluster):
    bit_equal(fx.strategies.data_parallel(algorithm=recipe, bucket_mb=0), cluster)


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "reduce_broadcast", "ring_optimizer"])
@pytest.mark.parametrize("recipe", ["hierarchical", "rails", ThroughFirst()], ids=str)
def test_what_a_sequence_does_not_carry_out_goes_as_without_it(strategy, recipe):
    bit_equal(fx.strategies.get(strategy, algorithm=recipe), fx.Cluster(2, 2))


def transpiled(algorithm, cluster, **options):
    model = integer_mlp()
    t = fx.DistributeTranspiler(fx.strategies.data_parallel(algorithm=algorithm, bucket_mb=0, **options))
    return t.transpile(program=model.main, startup_program=model.startup, trainers=cluster)


def collectives(t):
    return [(op.type, op.attrs["group"], op.attrs["algorithm"]) for op in t.main.ops if op.attrs.get("group") and "algorithm" in op.attrs]


THREE = [("reduce", NODE, ""), ("all_reduce", RAIL, "ring"), ("broadcast", NODE, "")]


@pytest.mark.parametrize(
    "given", [ThroughFirst(), f"{__name__}:ThroughFirst", f"{__name__}:FIRST", {"all_reduce": ThroughFirst()}], ids=str
)
def test_a_sequence_is_given_as_an_object_by_its_place_or_in_a_table(given):
    t = transpiled(given, fx.Cluster(2, 2))
    assert collectives(t)[:3] == THREE and SEQUENCES["through_first"].name == "through_first"
    t.verify()


def test_a_registered_sequence_has_a_name_and_a_table_may_take_it_by_size():
    fx.transpiler.register(ThroughFirst())
    assert collectives(transpiled("through_first", fx.Cluster(2, 2)))[:3] == THREE
    model_bytes = 4 * 6 * 5  # of the largest gradient
    table = {"all_reduce": [(model_bytes - 1, "through_first"), (float("inf"), "rails")]}
    found = collectives(transpiled(table, fx.Cluster(2, 2)))
    assert ("reduce", NODE, "") in found and ("reduce_scatter", RAIL, "direct") in found


def test_without_hierarchical_a_named_sequence_is_still_taken():
    fx.transpiler.register(ThroughFirst())
    assert collectives(transpiled("through_first", fx.Cluster(2, 2), hierarchical=False))[:3] == THREE


def test_where_hosts_have_one_device_stages_inside_are_left_out():
    assert set(collectives(transpiled(ThroughFirst(), fx.Cluster(3, 1)))) == {("all_reduce", DATA, "ring")}


def test_a_sequence_needs_several_hosts():
    for name in ("rails", "hierarchical"):
        with pytest.raises(fx.TranspileError, match=f"algorithm='{name}' needs several hosts: transpile"):
            transpiled(name, 4)
        with pytest.raises(fx.TranspileError, match=f"algorithm='{name}' goes over the hosts of a Cluster"):
            transpiled(name, fx.Mesh(dp=2, tp=2))


# -- what is refused ----------------------------------------------------------------------------------------------------------------------


def changed(collective, *stages):
    return type("Changed", (CollectiveSequence,), {"name": "changed", collective: lambda self, grid: stages})()


@pytest.mark.parametrize(
    "recipe, said",
    [
        (
            changed("all_reduce", SequenceStage("all_reduce", NODE)),
            "recipe changed, all_reduce of 1 row on 2 hosts with 1 device each: at the end, rank 0 has of element 0 the term of rank 0; "
            "rank 1's is missing",
        ),
        (
            changed("all_reduce", SequenceStage("all_reduce", NODE), SequenceStage("all_reduce", RAIL), SequenceStage("all_reduce", NODE)),
            "recipe changed, all_reduce of 1 row on 1 host with 2 devices each: stage 3, all_reduce over node: element 0 gets the term of "
            "rank 0 a second time, from rank 1",
        ),
        (
            changed("all_reduce", SequenceStage("reduce_scatter", NODE), SequenceStage("all_reduce", RAIL)),
            "all_reduce of 1 row on 1 host with 2 devices each: at the end, rank 0 has no elements, and must have elements 0 to 0",
        ),
        (
            changed("reduce", SequenceStage("reduce", NODE), SequenceStage("reduce", RAIL)),
            "recipe changed, reduce of 1 row from or to rank 1 on 2 hosts with 1 device each: at the end, rank 1 has nothing",
        ),
        (
            changed("broadcast", SequenceStage("broadcast", NODE), SequenceStage("broadcast", RAIL)),
            "stage 2, broadcast over rail: its root, rank 0, has nothing",
        ),
        (changed("all_reduce", SequenceStage("all_reduced", NODE)), "stage 1, all_reduced over node: there is no such collective"),
        (changed("all_reduce", SequenceStage("all_reduce", "hosts")), "stage 1, all_reduce over hosts: there is no such group"),
        (
            changed("all_reduce", SequenceStage("reduce", DATA), SequenceStage("broadcast", NODE)),
            "stages are over node and rail, or all over dp",
        ),
        (changed("reduce_scatter", SequenceStage("reduce_scatter", NODE)), "not parts of a host's part: give one stage, over dp"),
        (changed("all_reduce"), "returns a tuple of one or more SequenceStage, got ()"),
        (type("Changed", (CollectiveSequence,), {"name": "changed"})(), "recipe changed makes no collective: changed makes no all_reduce"),
        (
            type("Changed", (CollectiveSequence,), {"name": "changed", "all_reduce": lambda self, grid: [][0]})(),
            "recipe changed, all_reduce of 1 row on 1 host with 1 device each: the method ends in IndexError",
        ),
    ],
)
def test_a_wrong_sequence_is_refused_with_its_name_the_collective_the_ranks_and_the_fault(recipe, said):
    with pytest.raises(fx.TranspileError) as e:
        fx.transpiler.register(recipe)
    assert said in str(e.value) and "changed" not in SEQUENCES
    with pytest.raises(fx.TranspileError):
        fx.strategies.data_parallel(algorithm=recipe)


def test_names_of_fluidx_are_kept_and_the_own_ones_are_right():
    class Rival(ThroughFirst):
        name = "rails"

    with pytest.raises(fx.TranspileError, match="'rails' is one of fluidx's own algorithms"):
        fx.transpiler.register(Rival())
    for recipe in SEQUENCES.values():
        check_sequence(recipe)


@pytest.mark.parametrize(
    "stage", [SequenceStage("reduce", NODE, "", 0.0), SequenceStage("reduce", NODE, "", "0"), SequenceStage("reduce", NODE, FIRST)]
)
def test_a_stage_has_an_int_as_root_and_a_name_as_algorithm(stage):
    own = type("Odd", (CollectiveSequence,), {"name": "odd", "all_reduce": lambda self, grid: (stage, *FIRST.all_reduce(grid)[1:])})()
    with pytest.raises(fx.TranspileError, match="recipe odd, all_reduce of .*: the root of a stage is an int, and its algorithm the name"):
        fx.transpiler.register(own)


@pytest.mark.parametrize("name", ["no_such", "no_such/", "auto", "rails"])
def test_the_algorithm_of_a_stage_is_registered_before_the_sequence(name):
    stages = SequenceStage("reduce", NODE, name), *FIRST.all_reduce(Grid(2, 2))[1:]
    own = type("Odd", (CollectiveSequence,), {"name": "odd", "all_reduce": lambda self, grid: stages})()
    said = f"recipe odd, all_reduce of .*: a stage has the unknown algorithm '{name.rstrip('/')}'"
    with pytest.raises(fx.TranspileError, match=said):
        fx.transpiler.register(own)
    assert "odd" not in SEQUENCES


@pytest.mark.parametrize("slicing", [Slicing(0, 2), Slicing(-5, 1), Slicing(64.5, 2), Slicing(64, 0), (64, 2), "x"])
def test_slices_are_of_ints_above_0(slicing):
    own = type("Odd", (RailsFirst,), {"name": "odd", "slicing": lambda self, hosts: slicing})()
    with pytest.raises(fx.TranspileError, match="recipe odd, slicing among 1 host: give None, or Slicing"):
        fx.transpiler.register(own)
