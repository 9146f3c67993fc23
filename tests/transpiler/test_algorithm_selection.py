"""algorithm= takes a name, an Algorithm, "module:name" of one, or a table by collective, group and size."""

import pytest

import fluidx as fx
from fluidx.transpiler.algorithms import ALGORITHMS, Transfer
from fluidx.transpiler.algorithms.ring import Ring
from fluidx.transpiler.algorithms.schedule import Algorithm

L = fx.layers


class Star(Algorithm):
    """All to rank 0, which sends the sums back."""

    name = "own_star"
    gathers = True

    def reduce(self, n):
        return (tuple(Transfer(k, j, j, j + 1, True) for j in range(n) for k in range(n) if k != j),) if n > 1 else ()


OWN = Star()


@pytest.fixture(autouse=True)
def unregistered():
    yield
    ALGORITHMS.pop("own_star", None)


def transpiled(algorithm, ranks=3, width=16):
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = L.mean(L.fc(L.fc(fx.data("x", [-1, width], "float32"), width), 1))
        fx.optimizer.SGD(0.1).minimize(loss)
    strategy = fx.strategies.data_parallel(algorithm=algorithm, bucket_mb=0)
    return fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)


def algorithms(t):
    """{bytes of the value: algorithm} of the sums."""
    block = t.main.global_block()
    return {block.desc(op.output_arg_names[0]).type.nbytes: op.attrs["algorithm"] for op in block.oplist if op.type == "all_reduce"}


@pytest.mark.parametrize("given", [OWN, f"{__name__}:OWN", f"{__name__}:Star"])
def test_an_algorithm_of_ones_own_is_registered_and_proved(given):
    t = transpiled(given)
    assert set(algorithms(t).values()) == {"own_star"} and ALGORITHMS["own_star"].name == "own_star"
    t.verify()


def test_an_algorithm_that_was_changed_under_its_name_is_the_new_one():
    transpiled(OWN)

    class Again(Star):
        def reduce(self, n):
            return Ring().reduce(n)

    again = Again()
    t = transpiled(again)
    assert ALGORITHMS["own_star"] is again
    t.verify()


def test_a_table_says_it_by_collective_and_size():
    t = transpiled({"all_reduce": [(100, "recursive_doubling"), (float("inf"), "ring")]}, ranks=4)
    assert algorithms(t) == {64: "recursive_doubling", 4: "recursive_doubling", 1024: "ring"}
    t.verify()


def test_what_no_row_of_a_table_fits_is_left_to_the_communicator():
    assert set(algorithms(transpiled({"broadcast": "tree"})).values()) == {""}


@pytest.mark.parametrize("ranks", [fx.Cluster(hosts=2, devices_per_host=2), fx.Cluster(hosts=3, devices_per_host=1)])
def test_between_hosts_a_table_says_it_for_the_rails(ranks):
    t = transpiled({("all_reduce", "rail"): "tree", ("all_reduce", "dp"): "halving_doubling"}, ranks=ranks)
    assert set(algorithms(t).values()) == {"tree" if ranks.devices_per_host > 1 else "halving_doubling"}
    t.verify()


@pytest.mark.parametrize(
    "given, said",
    [
        (Star, "algorithm is the class Star; give an instance: Star()"),
        (3, "algorithm is a name, an Algorithm or a table, got int: 3"),
        ("rign", "unknown algorithm 'rign'; did you mean 'ring'?"),
        ("no_such_module:x", "cannot import 'no_such_module'"),
        (f"{__name__}:L", "which is not an Algorithm"),
        (f"{__name__}:missing", "has no 'missing'"),
        ({"all_reduced": "ring"}, "did you mean 'all_reduce'?"),
        ({"all_reduce": "rign"}, "unknown algorithm 'rign'"),
        ({"all_reduce": [(10, "ring"), (5, "tree")]}, "sizes must rise, got [10, 5]"),
        ({"all_reduce": ["ring"]}, "give pairs of (most bytes, algorithm)"),
    ],
)
def test_anything_else_is_refused_by_name(given, said):
    with pytest.raises(fx.TranspileError) as e:
        fx.strategies.data_parallel(algorithm=given)
    assert str(e.value).startswith("data_parallel: ") and said in str(e.value)


@pytest.mark.parametrize("path", [f"{__name__}:OWN", f"{__name__}:Star"])
def test_the_text_of_a_strategy_keeps_the_module_of_an_algorithm(path):
    strategy = fx.strategies.zero1(algorithm=path)
    assert str(strategy) == f"zero1{{algorithm={path}}}"
    ALGORITHMS.pop("own_star")  # as in another process
    assert fx.strategies.get(str(strategy)) == strategy and "own_star" in ALGORITHMS


@pytest.mark.parametrize("make", [lambda: OWN, lambda: fx.transpiler.register(OWN).name])
def test_a_strategy_with_an_algorithm_that_no_module_names_is_shown_as_its_call(make):
    strategy = fx.strategies.zero1(algorithm=make())
    assert str(strategy) == repr(strategy) == "zero1(algorithm='own_star')"
    assert str(fx.strategies.zero1(algorithm="ring")) == "zero1{algorithm=ring}"
