"""Clusters with figures, and meshes that lie on hosts: what they hold, what is refused, and the programs that are made for them."""

import pickle
from dataclasses import replace

import pytest

import fluidx as fx
from fluidx.hardware import load, save
from fluidx.testing.models import integer_mlp, train_ranks, train_single
from fluidx.transpiler.cluster import Link, Links, Served
from tests.transpiler.staged import layers


def message(call, error=fx.TranspileError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def without_network(tmp_path):
    path = tmp_path / "alone.json"
    save(replace(load("dgx-a100"), name="alone", between=None), path)
    return path


# -- what there is --------------------------------------------------------------------------------------------------------------------


def test_a_cluster_is_loaded_by_name_or_from_a_file(tmp_path):
    one, four = fx.Cluster.load("dgx-a100"), fx.Cluster.load("dgx-a100", hosts=4)
    assert (one.hosts, one.devices_per_host, one.world_size, one.most_hosts) == (1, 8, 8, None)
    assert (four.hosts, four.world_size, four.most_hosts, four.hardware.hosts) == (4, 32, 4, 4)
    assert one.hardware == load("dgx-a100") and one != four and one != fx.Cluster(1, 8)
    save(replace(load("p5"), name="ours", hosts=3), tmp_path / "ours.json")
    ours = fx.Cluster.load(tmp_path / "ours.json")
    assert (ours.hosts, ours.most_hosts, ours.world_size) == (3, 3, 24)
    assert fx.Cluster.load(str(tmp_path / "ours.json"), hosts=2).world_size == 16
    assert repr(ours) == "Cluster.load('ours', hosts=3)" and repr(one) == "Cluster.load('dgx-a100')"
    assert repr(fx.Cluster(2, 4, hardware=one.hardware)) == "Cluster(hosts=2, devices_per_host=4)"
    assert len({one, fx.Cluster.load("dgx-a100"), four}) == 2 and pickle.loads(pickle.dumps(four)) == four


def test_costs_of_messages_and_collectives_come_from_the_figures():
    links = fx.Cluster.load("dgx-v100").links
    # 4 cards of 11.4 GB/s for 8 devices, one NVLink of 22.5 GB/s; a call takes 17.5 us, a collective of n ranks 2 (n - 1) x 2.75 us more
    assert links.between == pytest.approx(Link(17.5e-6 + 6e-6, 1 / 5.7e9))
    assert links.inside == pytest.approx(Link(17.5e-6 + 2.75e-6, 1 / 22.5e9))
    for n, bandwidth in ((2, 22.5e9), (4, 85e9), (8, 134e9)):
        assert links.collective(n) == pytest.approx(Link(17.5e-6 + 2 * (n - 1) * 2.75e-6, 1 / bandwidth))
    assert links.shared == links.collective(8)
    assert fx.Cluster.load("dgx-a100").links.between.byte == pytest.approx(1 / 22.75e9)  # a card for each device
    given = Links(inside=Link(1.0, 1.0))
    assert fx.Cluster(1, 8, links=given, hardware=load("p5")).links is given
    assert fx.Cluster(2, 2).links == Links() and Links().collective(2) == Links().shared


def test_a_mesh_lies_on_the_hosts_that_its_ranks_need():
    cluster = fx.Cluster.load("dgx-h100")
    m = fx.Mesh(dp=4, tp=8).on(cluster)
    assert (m.hosts, m.world_size, m.links, m.cluster) == (4, 32, cluster.links, cluster)
    assert [m.hosts_of(g) for g in m.groups()["tp"]] == [1] * 4 and {m.hosts_of(g) for g in m.groups()["dp"]} == {4}
    assert m.groups() == fx.Mesh(dp=4, tp=8).groups() and m.axes == fx.Mesh(dp=4, tp=8).axes
    # three devices of tp do not divide eight: ranks 6, 7 and 8 are one group on two hosts
    assert [fx.Mesh(dp=4, tp=3).on(cluster).hosts_of(g) for g in ((3, 4, 5), (6, 7, 8))] == [1, 2]
    few = fx.Mesh(tp=4).on(fx.Cluster(2, 2))
    assert (few.hosts, few.hosts_of((0, 1)), few.hosts_of((1, 2)), few.links) == (2, 1, 2, Links())
    assert Served(fx.Mesh(dp=4).on(fx.Cluster(2, 2)), 1).hosts_of(range(5)) == 2


def test_a_mesh_on_hosts_is_another_than_the_mesh_alone():
    alone, on = fx.Mesh(dp=16), fx.Mesh(dp=16).on(fx.Cluster.load("p4d"))
    assert on != alone and on == fx.Mesh(dp=16).on(fx.Cluster.load("p4d")) != fx.Mesh(dp=16).on(fx.Cluster.load("p5"))
    assert repr(on) == "Mesh(dp=16).on(Cluster.load('p4d'))" and repr(alone) == "Mesh(dp=16)"
    assert len({on, fx.Mesh(dp=16).on(fx.Cluster.load("p4d"))}) == 1 and alone.hosts == 1 and pickle.loads(pickle.dumps(on)) == on


def test_a_topology_has_the_figures_on_its_edges():
    g = fx.Cluster.load("p4d", hosts=2).topology()
    assert sorted(kind for _, kind in g.nodes(data="kind")) == ["device"] * 16 + ["host"] * 2 + ["switch"]
    edge = g.edges["host0", "network"]
    assert (edge["kind"], edge["count"], edge["bandwidth"], edge["latency"]) == ("network", 4, 10.45e9, 55e-6)
    assert edge["source"].startswith("aws-samples/awsome-distributed-training")
    edge = g.edges["host1", "rank8"]
    assert (edge["kind"], edge["count"], edge["bandwidth"], edge["by_group"][8]) == ("device", 1, 235e9, 229e9)
    assert "network" not in fx.Cluster.load("p4d").topology()
    assert dict(fx.Cluster(2, 1).topology().edges["host0", "network"]) == {"kind": "network"}


# -- what is refused ------------------------------------------------------------------------------------------------------------------


def test_unknown_clusters_and_counts_of_hosts_are_refused(tmp_path):
    said = message(lambda: fx.Cluster.load("dgx-h10"), fx.FluidxError)
    assert said == "unknown cluster 'dgx-h10'; did you mean 'dgx-h100'? (a file of your own ends with .json)"
    assert message(lambda: fx.Cluster.load(8), fx.FluidxError) == "a cluster is a name or the path of a JSON file, got 8"
    assert message(lambda: fx.Cluster.load("p5", hosts=0)) == "Cluster: hosts must be an integer of at least 1, got 0"
    save(replace(load("p5"), name="ours", hosts=3), tmp_path / "ours.json")
    assert message(lambda: fx.Cluster.load(tmp_path / "ours.json", hosts=4)) == (
        "Cluster: ours has 3 hosts, got hosts=4; change hosts in its file"
    )
    assert message(lambda: fx.Cluster(1, 16, hardware=load("p5"))) == (
        "Cluster: p5 has 8 devices on a host, got devices_per_host=16; take more hosts"
    )
    assert message(lambda: fx.Cluster.load(without_network(tmp_path), hosts=2)) == (
        "Cluster: alone has no network, got hosts=2; take one host, or give the network's figures in its file: between"
    )
    assert message(lambda: fx.Cluster(1, 8, hardware="p5")) == (
        "Cluster: hardware must be the figures of a machine, got 'p5'; fx.Cluster.load takes a name or a file"
    )


def test_a_mesh_that_does_not_fit_is_refused(tmp_path):
    assert message(lambda: fx.Mesh(dp=4, tp=8).on(fx.Cluster.load("p5", hosts=2))) == (
        "Mesh(dp=4, tp=8) has 32 ranks, and Cluster.load('p5', hosts=2) has 16 devices, 8 on each of 2 hosts; make an axis smaller, "
        "or take hosts=4"
    )
    assert message(lambda: fx.Mesh(dp=4).on(fx.Cluster(1, 2))) == (
        "Mesh(dp=4) has 4 ranks, and Cluster(hosts=1, devices_per_host=2) has 2 devices, 2 on each of 1 host; make an axis smaller, "
        "or take hosts=2"
    )
    alone = fx.Cluster.load(without_network(tmp_path))
    assert fx.Mesh(dp=2, tp=4).on(alone).hosts == 1
    assert message(lambda: fx.Mesh(dp=2, tp=8).on(alone)) == (
        "axis dp of Mesh(dp=2, tp=8) crosses hosts: ranks 0, 8 are on 2 hosts, and alone has no network; take at most 8 ranks, or give the "
        "network's figures in its file: between"
    )
    assert message(lambda: fx.Mesh(dp=2).on("p5")) == (
        "Mesh.on takes a Cluster, got 'p5'; fx.Cluster.load('dgx-a100') makes one from a name"
    )


# -- programs -------------------------------------------------------------------------------------------------------------------------


def transpiled(strategy, trainers, model=None, **options):
    model = model or integer_mlp()
    t = fx.DistributeTranspiler(fx.strategies.get(strategy, **options))
    return t.transpile(program=model.main, startup_program=model.startup, trainers=trainers)


TWO_HOSTS = fx.Cluster(2, 2, hardware=load("dgx-a100"))


@pytest.mark.parametrize("strategy", [name for name in fx.strategies.CATALOGUE if name != "rails"])
def test_every_strategy_makes_the_programs_of_the_mesh_alone(strategy):
    model = layers(2) if strategy == "pipeline" else integer_mlp()
    mesh = fx.Mesh(pp=2, dp=2) if strategy == "pipeline" else fx.Mesh(dp=4)
    alone, on = transpiled(strategy, mesh, model), transpiled(strategy, mesh.on(TWO_HOSTS), model)
    assert str(on.main) == str(alone.main) and str(on.startup) == str(alone.startup)
    on.verify()


@pytest.mark.parametrize("strategy", [name for name in fx.strategies.CATALOGUE if name != "pipeline"])
def test_every_strategy_makes_the_programs_of_a_cluster_without_figures(strategy):
    t = transpiled(strategy, TWO_HOSTS)
    assert str(t.main) == str(transpiled(strategy, fx.Cluster(2, 2)).main)
    t.verify()


def test_a_named_algorithm_is_used_on_every_axis_as_on_the_mesh_alone():
    model = layers(1, tp=True)
    mesh = fx.Mesh(dp=2, tp=2)
    alone, on = [transpiled("data_parallel", m, model, algorithm="ring") for m in (mesh, mesh.on(TWO_HOSTS))]
    assert str(on.main) == str(alone.main) and 'algorithm="ring"' in str(on.main)
    with pytest.warns(UserWarning, match="'rails' is for several hosts, and the ranks are a Mesh, not a Cluster; leave it out"):
        transpiled("data_parallel", fx.Mesh(dp=4).on(TWO_HOSTS), algorithm={"all_reduce": "rails"})


def compared(mesh):
    """What "auto" compared for the gradients, a bucket of 236 bytes."""
    found = transpiled("data_parallel", mesh, algorithm="auto").explain()
    return next(str(line).partition("236 bytes: ")[2] for line in found if "236 bytes" in str(line))


def test_auto_compares_the_costs_of_the_hosts():
    # two V100: a message takes 17.5 + 2.75 us, a collective 17.5 + 2 x 2.75; 85 GB/s and 22.5 GB/s do not count for 236 bytes
    v100 = fx.Mesh(dp=2).on(fx.Cluster.load("dgx-v100"))
    assert compared(v100) == "recursive_doubling 20.3 us; communicator 23 us; halving_doubling 40.5 us"
    # eight A100: 34.5 us and 14 messages of 2.75, or three messages of 37.25 us
    assert compared(fx.Mesh(dp=8).on(fx.Cluster.load("p4d"))).startswith("communicator 73 us; recursive_doubling 112 us; ")
    # one device on each of four hosts: two messages of 34.5 + 55 us
    assert compared(fx.Mesh(dp=4).on(fx.Cluster(4, 1, hardware=load("p4d")))).startswith("recursive_doubling 179 us; ")


@pytest.mark.parametrize("strategy", ["data_parallel", "zero1", "fsdp"])
def test_what_is_made_for_hosts_trains_bit_for_bit(strategy):
    model = integer_mlp()
    (one,), scope = train_single(model, [model.feed(24)], [model.loss])
    for trainers in (fx.Mesh(dp=4).on(TWO_HOSTS), TWO_HOSTS):
        made = fx.strategies.get(strategy, algorithm="auto")
        (many,), state = train_ranks(model, made, trainers, [model.feed(24)], [model.loss])
        assert (one[0] == many[0]).all() and all((scope.get(p) == state[p]).all() for p, _ in model.gradients)
