"""What is asked for and has no effect is an error, or is said in one warning, with what to write instead."""

import warnings

import pytest

import fluidx as fx
from fluidx import optimizer as O
from fluidx import strategies as S
from fluidx.ir import Shard
from fluidx.testing.models import classifier


def transpile(strategy, trainers=2, optimizer=None):
    model = classifier(optimizer)
    return fx.DistributeTranspiler(strategy).transpile(program=model.main, startup_program=model.startup, trainers=trainers)


def half(strategy):
    main, startup = fx.Program("half"), fx.Program("half_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        O.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float16"), 3)))
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=2)


def single_elements(strategy):
    main, startup = fx.Program("ones"), fx.Program("ones_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        O.SGD(0.1).minimize(fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 1]), 1)))
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=2)


SAID = {
    "LocalSGD where parameters are shared": (
        lambda: transpile(S.data_parallel(), optimizer=O.LocalSGDOptimizer(O.SGD(0.1), 4)),
        r"data_parallel\(\) keeps the parameters of all ranks equal, so replica_mean changes nothing .*replicas\(\)",
    ),
    "DGC where gradients are added up": (
        lambda: transpile(S.zero1(), optimizer=O.DGCMomentum(0.1, 0.9, 0, least=10)), r"so replica_.*mean changes nothing",
    ),
    "replicas that never meet": (
        lambda: transpile(S.replicas(), 3), r"replicas\(\): ranks train separately, .* 3 separate models; .*LocalSGDOptimizer",
    ),
    "an axis without an annotation": (
        lambda: transpile(S.data_parallel(), fx.Mesh(dp=2, tp=3)),
        r"no value is placed over axis tp of Mesh\(dp=2, tp=3\): its 3 ranks all do the same work; .*trainers=fx.Mesh\(dp=6\)",
    ),
    "nothing to cut": (lambda: single_elements(S.zero1()), r"zero1\(\) cuts no parameter of program ones, and none has a root"),
    "servers of one trainer": (lambda: transpile(S.reduction_servers(1), 1), r"the servers receive nothing"),
    "gradients that have 16 bits": (lambda: half(S.data_parallel(wire="bfloat16")), r"wire='bfloat16' narrows nothing: no gradient"),
    "a row for a group that there is not": (
        lambda: transpile(S.data_parallel(algorithm={("", "dq"): "ring", "": "tree"})),
        r"algorithm=\{\('', 'dq'\): 'ring'\} has no effect: the ranks have no group 'dq'",
    ),
    "a row for several hosts": (
        lambda: transpile(S.data_parallel(algorithm={"all_reduce": [(100, "ring"), (1e9, "rails")]})),
        r"'rails'\)\]\} has no effect: 'rails' is for several hosts",
    ),
    "factors that are larger": (
        lambda: classifier(O.PowerSGDOptimizer(O.SGD(0.1), 40)), r"PowerSGDOptimizer: no gradient is larger than its factors of rank 40",
    ),
    "parameters too small for DGC": (lambda: classifier(O.DGCMomentum(0.1, 0.9, 0)), r"no parameter has \d+ elements"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_it_is_said_once(name):
    make, said = SAID[name]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            make()
    texts = [str(w.message) for w in found]
    assert len(texts) == 1, texts
    with pytest.warns(UserWarning, match=said):
        warnings.warn(texts[0], stacklevel=1)
    assert found[0].filename == __file__


USED = [
    *((make, 2, O.Momentum) for make in (S.data_parallel, S.zero1, S.fsdp, S.ring_optimizer, S.parameter_server, S.reduction_servers)),
    (lambda: S.micro_batches(1), 2, O.Momentum),
    (S.zero1, 4, O.SGD),  # there is no state to cut, and the update is cut all the same
    (S.replicas, 2, lambda lr, *_: O.LocalSGDOptimizer(O.SGD(lr))),
    (S.replicas, 2, lambda lr, mu: O.DGCMomentum(lr, mu, 0, least=10)),
    (S.data_parallel, 1, lambda lr, *_: O.LocalSGDOptimizer(O.SGD(lr))),
    (lambda: S.data_parallel(wire="float16"), 2, O.Momentum),
    (lambda: S.data_parallel(algorithm={("all_reduce", "dp"): "ring", ("", "rail"): "tree", "": ""}), 2, O.Momentum),
    (S.data_parallel, fx.Mesh(dp=4), O.Momentum),
    (S.data_parallel, fx.Mesh(dp=2, tp=1), O.Momentum),
]


@pytest.mark.parametrize("make, trainers, optimizer", USED, ids=range(len(USED)))
def test_nothing_is_said_of_what_has_an_effect(make, trainers, optimizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transpile(make(), trainers, optimizer(0.1) if optimizer is O.SGD else optimizer(0.1, 0.9))


def test_an_axis_that_a_parameter_is_cut_over_is_used():
    main, startup = fx.Program(), fx.Program()
    with fx.unique_name.guard(), fx.program_guard(main, startup), warnings.catch_warnings():
        warnings.simplefilter("error")
        h = fx.layers.fc(fx.data("x", [-1, 4]), 6, param_attr=fx.ParamAttr(placement=Shard(1, "tp")))
        O.SGD(0.1).minimize(fx.layers.mean(h))
        fx.DistributeTranspiler().transpile(program=main, startup_program=startup, trainers=fx.Mesh(dp=2, tp=2))


def test_stages_want_an_axis_of_ranks():
    with pytest.raises(fx.TranspileError, match=r"all 2 ranks are in dp; give trainers=fx.Mesh\(pp=2\) and mark the stages"):
        transpile(S.pipeline(4))
    transpile(S.pipeline(4), 1)
