"""What a user meets who annotates parameters, names axes or writes an update choice or a pass wrongly."""

from dataclasses import dataclass, field

import pytest

import fluidx as fx
from fluidx.ir import At, Partial, Shard
from fluidx.transpiler import Pass, strategy


def model(placement=None):
    main, startup = fx.Program("small"), fx.Program("small_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 6])
        y = fx.layers.fc(x, 4, param_attr=fx.ParamAttr(name="w", placement=placement), bias_attr=False)
        fx.optimizer.SGD(0.1).minimize(fx.layers.mean(fx.layers.square(y)))
    return main, startup


def transpile(how="data_parallel", placement=None, trainers=2):
    main, startup = model(placement)
    t = fx.DistributeTranspiler(how).transpile(program=main, startup_program=startup, trainers=trainers)
    t.verify()
    return t


def first_line(call):
    with pytest.raises(fx.FluidxError) as e:
        call()
    return str(e.value).splitlines()[0]


@pytest.mark.parametrize(
    "placement, message",
    [
        (Shard(5, "tp"), "layers.fc: placement shard(5) over tp of 'w' names an axis that its shape [6, 4] does not have"),
        (Shard(-1, "tp"), "layers.fc: placement shard(-1) over tp of 'w' names an axis that its shape [6, 4] does not have"),
        ("shard(0)", "ParamAttr: placement must be a Shard such as Shard(1, 'tp'), a list of them, or None, got 'shard(0)'"),
        (At(1, "tp"), "ParamAttr: placement must be a Shard such as Shard(1, 'tp'), a list of them, or None, got At(root=1, group='tp')"),
        (
            [Shard(0, "tp"), Shard(1, "tp")],
            "ParamAttr: placement shard(0) over tp shard(1) over tp names a group twice; a group cuts one axis",
        ),
        (Shard(0, "tp", 0), "ParamAttr: placement shard(0, 0) over tp: the unit of a shard must be at least 1"),
        (Shard(True, "tp"), "ParamAttr: the axis of a placement must be an integer, got bool: True"),
        (Shard(0, "tp", 2.0), "ParamAttr: the unit of a placement must be an integer, got float: 2.0"),
    ],
)
def test_an_annotation_is_refused_where_it_is_written(placement, message):
    assert first_line(lambda: model(placement)) == message


def test_an_annotation_over_an_axis_that_the_ranks_do_not_have():
    assert first_line(lambda: transpile(placement=Shard(0, "tp"))) == (
        "'w' is annotated shard(0) over tp, but the ranks have no axis 'tp'; they have: dp; give trainers=fx.Mesh(dp=2, tp=2)"
    )


def test_an_annotation_over_a_group_of_a_cluster():
    placement = Shard(0, "node")
    assert first_line(lambda: transpile(placement=placement, trainers=fx.Cluster(3, 2))) == (
        "'w' is annotated shard(0) over node, but 'node' is a group of a Cluster, for collectives alone; to cut over it give "
        "trainers=fx.Mesh(dp=3, node=2)"
    )
    transpile(placement=placement, trainers=fx.Mesh(dp=3, node=2)).verify()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fx.Mesh(), "Mesh: name at least one axis: Mesh(dp=4)"),
        (lambda: fx.Mesh(2, 2), "Mesh: name the axes, Mesh(dp=2, tp=2), instead of 2, 2"),
        (lambda: fx.Mesh(dp=0), "Mesh: axis dp must be an integer of at least 1, got 0"),
        (lambda: fx.Mesh(dp=2.0), "Mesh: axis dp must be an integer of at least 1, got 2.0"),
        (lambda: fx.Mesh(**{"a b": 2}), "Mesh: 'a b' is not a name for an axis; names are letters, digits and underscores: dp, tp"),
        (
            lambda: transpile(trainers={"dp": 2}),
            "trainers must be a rank count, a Cluster, a Mesh, or endpoints 'host:port' in a list, got {'dp': 2}",
        ),
    ],
)
def test_a_mesh_that_is_none(make, message):
    assert first_line(make) == message


@dataclass(frozen=True)
class Everything:
    """Every parameter at one place."""

    at: object = field(repr=False)

    def entries(self, params, group, ranks):
        return dict.fromkeys(params, self.at)


@pytest.mark.parametrize(
    "update, message",
    [
        (Everything(At(2)), "Everything() cannot have 'w' there: at(2) over dp names a rank outside of the group's 2"),
        (Everything(Shard(3)), "Everything() cannot have 'w' there: shard(3) over dp names an axis that f32[6,4] does not have"),
        (Everything(Shard(0, "tp")), "Everything() cannot have 'w' there: shard(0) over tp names no declared group"),
        (
            Everything(Partial("sum")),
            "Everything() cannot have 'w' there: partial(sum) over dp; "
            "a parameter is replicated, sharded, in pieces or at a root",
        ),
        (3, "a choice has a method entries(params, group, ranks), 3 has none; see transpiler/placement/parameter_homes.py"),
    ],
)
def test_an_update_choice_that_names_no_place(update, message):
    assert first_line(lambda: transpile(strategy("mine", update))) == message


class Nothing:
    def entries(self, params, group, ranks):
        return {}


def test_a_parameter_that_an_update_choice_forgets_is_updated_everywhere():
    assert [op.type for op in transpile(strategy("mine", Nothing())).main.ops].count("all_reduce") == 1


@dataclass(frozen=True)
class TooManyInputs(Pass):
    def rule(self, b, op):
        return b.all_reduce(op.input("X")[0], op.input("X")[0], group="dp") if op.type == "all_reduce" else None


@dataclass(frozen=True)
class NoSuchOutput(Pass):
    def rule(self, b, op):
        return b.all_reduce(op.input("X")[0], group="dp", out={"Y": "y"}) if op.type == "all_reduce" else None


@pytest.mark.parametrize(
    "one, message",
    [(TooManyInputs(), "op all_reduce takes 1 inputs (X), got 2"), (NoSuchOutput(), "op all_reduce has no output 'Y'; it has: Out")],
)
def test_a_pass_that_builds_wrongly(one, message):
    assert first_line(lambda: transpile(fx.strategies.data_parallel().after("lower", one))) == message


def test_strict_mode_lets_pass_what_the_strategies_ask_for():
    for name in set(fx.strategies.CATALOGUE) - {"pipeline"}:  # its stages are marked in the program
        transpile(fx.strategies.get(name, strict=True), trainers=fx.Cluster(2, 1))
