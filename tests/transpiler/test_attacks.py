"""Rank programs that a wrong strategy could write: each computes something else than one device, and none is let through.

Strategies' own programs are edited here, with mistakes of thought; tests/mutants breaks them in every mechanical way.
"""

from collections.abc import Callable

import pytest

import fluidx as fx
from fluidx.ir import Operator, Pieces, Role, Shard, opdef
from fluidx.testing.models import classifier, integer_mlp
from fluidx.verify import verify_ranks

DP, RB, RING, ZERO = "data_parallel", "reduce_broadcast", "ring_optimizer", "zero1"
MODELS = {
    "adam": lambda: classifier(fx.optimizer.Adam(0.01), width=8),
    "norm": lambda: classifier(fx.optimizer.SGD(0.1, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)), width=8),
    "dropout": lambda: classifier(kind="dropout", width=4),
    "batch_norm": lambda: classifier(kind="batch_norm", width=4),
    "sum": lambda: integer_mlp("sum"),
}
ATTACKS: list[tuple[Callable, str, str, tuple[int, ...], bool]] = []


def attack(*strategies, model="adam", ranks=(0, 1, 2), startup=False):
    """Register `f(edit)`, which changes the programs of `ranks`, once for each strategy."""

    def register(f):
        ATTACKS.extend((f, strategy, model, ranks, startup) for strategy in strategies)
        return f

    return register


class Edit:
    """One rank's program, open for changes."""

    def __init__(self, program):
        self.program = program.copy()
        self.block = self.program.global_block()
        self.ops = self.block.oplist
        self.descs = self.block.descs

    def find(self, type, k=0):
        return [i for i, op in enumerate(self.ops) if op.type == type][k]

    def like(self, name, new, **changes):
        self.descs[new] = self.descs[name].changed(name=new, **changes)
        return new

    def rename(self, old, new, start=0):
        for k in range(start, len(self.ops)):
            self.ops[k] = self.ops[k].renamed({old: new})

    def change(self, i, **attrs):
        self.ops[i] = self.ops[i].replace(attrs={**self.ops[i].attrs, **attrs})

    def replace(self, i, type, **attrs):
        op = self.ops[i]
        self.ops[i] = Operator(type, op.inputs, op.outputs, opdef(type).complete_attrs(attrs), role=op.role)


def made(type, x, out, role=Role.DIST, **attrs):
    return Operator(type, {"X": (x,)}, {"Out": (out,)}, opdef(type).complete_attrs(attrs), role=role)


# -- gradients --------------------------------------------------------------------------------------------------------------------------


@attack(DP, ZERO)
def a_gradient_is_clipped_before_it_is_reduced(e):
    i = e.find("all_reduce" if any(op.type == "all_reduce" for op in e.ops) else "reduce_scatter")
    x = e.ops[i].input_arg_names[0]
    clipped = e.like(x, "clipped")
    e.ops[i] = e.ops[i].renamed({x: clipped})
    e.ops.insert(i, made("clip", x, clipped, min=-1.0, max=1.0))


@attack(DP)
def an_update_takes_the_ranks_own_gradient(e):
    i = e.find("all_reduce")
    e.rename(e.ops[i].output_arg_names[0], e.ops[i].input_arg_names[0], i + 1)


@attack(DP)
def a_gradient_is_reduced_twice(e):
    i = e.find("all_reduce")
    out = e.ops[i].output_arg_names[0]
    e.ops.insert(i + 1, made("all_reduce", out, out, group="dp", op="sum"))


@attack(DP, ZERO)
def a_gradient_is_averaged(e):
    i = next(i for i, op in enumerate(e.ops) if op.type in ("all_reduce", "reduce_scatter"))
    out = e.ops[i].output_arg_names[0]
    e.ops.insert(i + 1, made("scale", out, out, scale=1 / 3))


@attack(RB)
def a_gradient_is_reduced_by_its_maximum(e):
    e.change(e.find("reduce"), op="max")


@attack(DP, RB, RING, ZERO)
def the_forward_part_is_another(e):
    i = e.find("tanh")
    e.ops[i] = e.ops[i].replace(type="sigmoid")


@attack(DP)
def activations_are_added_up_over_the_ranks(e):
    i = e.find("tanh")
    out = e.ops[i].output_arg_names[0]
    e.ops.insert(i + 1, made("all_reduce", out, out, group="dp", op="sum"))


@attack(DP, RING, ZERO)
def labels_are_not_split(e):
    e.descs["label"] = e.descs["label"].changed(placement=())


@attack(DP, model="dropout", ranks=(1,))
def one_rank_drops_other_elements(e):
    e.change(e.find("dropout"), seed=5)


@attack(DP, RB, RING, ZERO, ranks=(1,))
@attack(DP, model="sum", ranks=(1,))
def the_loss_of_one_rank_weighs_twice(e):
    e.change(e.find("fill_constant"), value=2.0)


# -- batch_norm -------------------------------------------------------------------------------------------------------------------------


@attack(DP, model="batch_norm")
def statistics_are_each_ranks_own(e):
    i = next(i for i, op in enumerate(e.ops) if op.type == "all_reduce")
    e.replace(i, "assign")


@attack(DP, model="batch_norm")
def the_variance_is_taken_for_the_mean(e):
    i, j = e.find("all_reduce", 0), e.find("all_reduce", 1)
    a, b = e.ops[i].output_arg_names[0], e.ops[j].output_arg_names[0]
    k = e.find("bn_apply")
    e.ops[k] = e.ops[k].renamed({a: b, b: a})


# -- updates ----------------------------------------------------------------------------------------------------------------------------


@attack(DP, RB, ZERO, ranks=(1,))
def the_learning_rate_is_halved_on_one_rank(e):
    i = e.find("adam")
    lr = e.ops[i].input("LearningRate")[0]
    half = e.like(lr, "half", persistable=False)
    e.ops[i] = e.ops[i].renamed({lr: half})
    e.ops.insert(i, made("scale", lr, half, Role.OPTIMIZE, scale=0.5))


@attack(DP, ZERO, ranks=(1,))
def one_rank_has_another_beta(e):
    e.change(e.find("adam"), beta1=0.8)


@attack(DP, ZERO)
def the_two_moments_are_swapped(e):
    i = e.find("adam")
    slots = e.ops[i].inputs
    e.ops[i] = e.ops[i].replace(inputs={**slots, "Moment1": slots["Moment2"], "Moment2": slots["Moment1"]})


@attack(RB)
def a_parameter_is_not_handed_back(e):
    e.ops.pop(e.find("broadcast"))


@attack(RB, ranks=(0,))
def a_root_updates_after_it_has_handed_back(e):
    e.ops.append(e.ops.pop(e.find("adam")))


@attack(DP, ranks=(2,))
def one_rank_drifts_by_a_hundred_millionth(e):
    w = e.program.all_parameters()[0].name
    e.ops.append(made("scale", w, w, scale=1.00000001))


# -- cuts and pieces ---------------------------------------------------------------------------------------------------------------------


@attack(ZERO)
def a_gradient_is_cut_along_another_axis_than_its_parameter(e):
    i = next(i for i, op in enumerate(e.ops) if op.type == "reduce_scatter" and len(e.descs[op.output_arg_names[0]].type.shape) == 2)
    out = e.ops[i].output_arg_names[0]
    axis = 1 - e.ops[i].attrs["axis"]
    e.change(i, axis=axis)
    e.descs[out] = e.descs[out].changed(placement=(Shard(axis),))


@attack(ZERO)
def new_values_are_gathered_as_the_ranks_of_another_cut(e):
    e.change(e.find("all_gather"), unit=3)


@attack(ZERO)
def a_parameter_is_cut_only_once(e):
    """The cut of the first step is kept in a persistable and used again."""
    i = e.find("part")
    out = e.ops[i].output_arg_names[0]
    e.descs[out] = e.descs[out].changed(persistable=True)


@attack(ZERO)
def moments_are_the_whole_ones(e):
    i = e.find("adam")
    m = e.ops[i].input("Moment1")[0]
    e.descs[m] = e.descs[m].changed(placement=())


def pieces(e):
    return [d for d in e.descs.values() if any(isinstance(p, Pieces) for p in d.placement)]


@attack(RING, ranks=(1,))
def a_rank_sends_the_elements_beside_its_own(e):
    i = next(i for i, op in enumerate(e.ops) if op.type == "chunk" and 0 < op.attrs["start"] < op.attrs["stop"])
    a = e.ops[i].attrs
    e.change(i, start=a["start"] - 1, stop=a["stop"] - 1)


@attack(RING)
def every_rank_sends_the_elements_beside_its_own(e):
    for i, op in enumerate(e.ops):
        if op.type == "chunk" and 0 < op.attrs["start"] < op.attrs["stop"]:
            e.change(i, start=op.attrs["start"] - 1, stop=op.attrs["stop"] - 1)


@attack(RING)
def the_pieces_of_state_begin_one_element_later(e):
    d = next(d for d in pieces(e) if "moment" in d.name)
    (p,) = d.placement
    moved = Pieces((p.bounds[0], *(b + 1 for b in p.bounds[1:-1]), p.bounds[-1]))
    e.descs[d.name] = d.changed(placement=(moved,))


@attack(RING, ranks=(2,))
def a_hop_forgets_its_own_term(e):
    i = e.find("sum")
    e.ops[i] = e.ops[i].replace(inputs={"X": e.ops[i].input("X")[:1]})


@attack(RING, ranks=(2,))
def a_hop_adds_its_own_term_twice(e):
    i = e.find("sum")
    e.ops[i] = e.ops[i].replace(inputs={"X": (*e.ops[i].input("X"), e.ops[i].input("X")[1])})


def swap(e, type, slots, slot):
    for i, op in enumerate(e.ops):
        if op.type != type:
            continue
        names = list(getattr(op, slots)[slot])
        for a in range(len(names)):
            for b in range(a):
                if e.descs[names[a]].type == e.descs[names[b]].type:
                    names[a], names[b] = names[b], names[a]
                    e.ops[i] = op.replace(**{slots: {slot: tuple(names)}})
                    return
    raise AssertionError("nothing to swap")


@attack(RING, model="sum")
def two_values_are_joined_in_the_other_order(e):
    i = next(i for i, op in enumerate(e.ops) if op.type == "unpack" and len(op.input("X")) > 1)
    e.ops[i] = e.ops[i].replace(inputs={"X": e.ops[i].input("X")[::-1]})


# -- norms -----------------------------------------------------------------------------------------------------------------------------


@attack(RB, RING, ZERO, model="norm")
def every_rank_clips_by_the_norm_of_what_it_holds(e):
    e.replace(e.find("all_reduce"), "assign")


@attack(DP, model="norm")
def the_norm_is_of_the_ranks_own_gradient(e):
    i = e.find("squared_l2_norm")
    x = e.ops[i].input_arg_names[0]
    e.ops[i] = e.ops[i].renamed({x: x.removesuffix(".sum")})


@attack(DP, model="norm")
def the_norms_of_the_ranks_are_added_up(e):
    i = e.find("squared_l2_norm")
    x, out = e.ops[i].input_arg_names[0], e.ops[i].output_arg_names[0]
    e.ops[i] = e.ops[i].renamed({x: x.removesuffix(".sum")}).replace(role=Role.DIST)
    e.ops.insert(i + 1, made("all_reduce", out, out, group="dp", op="sum"))


# -- startup ---------------------------------------------------------------------------------------------------------------------------


@attack(DP, RB, RING, ZERO, startup=True)
def a_parameter_starts_with_another_seed(e):
    e.change(next(i for i, op in enumerate(e.ops) if "seed" in op.attrs), seed=5)


@attack(DP, RB, RING, ZERO, startup=True)
def a_constant_is_another(e):
    e.change(e.find("fill_constant"), value=7.0)


@attack(DP, startup=True)
def a_constant_has_another_shape(e):
    e.change(e.find("fill_constant"), shape=(3,))


@attack(DP, ZERO, startup=True)
def parameters_are_not_the_same_everywhere(e):
    i = e.find("broadcast")
    e.ops.pop(i)
    e.change(next(i for i, op in enumerate(e.ops) if "seed" in op.attrs), seed=5 + e.program.rank)


def names():
    return [f"{f.__name__}-{strategy}-{model}" for f, strategy, model, _, _ in ATTACKS]


def transpiled(model, strategy, trainers=3):
    m = MODELS[model]()
    # pieces of a few elements, and nothing packed away
    ring = fx.strategies.ring_optimizer(chunk_mb=48 / 2**20).replace("pack", fx.transpiler.Pass())
    t = fx.DistributeTranspiler(ring if strategy == RING else fx.strategies.get(strategy, bucket_mb=0))
    return t.transpile(program=m.main, startup_program=m.startup, trainers=trainers)


@pytest.mark.parametrize("edit, strategy, model, ranks, startup", ATTACKS, ids=names())
def test_it_is_caught(edit, strategy, model, ranks, startup):
    t = transpiled(model, strategy)
    t.verify()
    programs = {True: [], False: []}
    for r in range(3):
        for kind, program in ((False, t.get_trainer_program(r)), (True, t.get_startup_program(r))):
            if kind is startup and r in ranks:
                e = Edit(program)
                edit(e)
                program = e.program
            programs[kind].append(program)
    with pytest.raises(fx.VerifyError) as caught:
        verify_ranks(t.source, programs[False], programs[True])
    assert "cannot be checked" not in str(caught.value), str(caught.value)


def test_nothing_runs_unverified():
    t = transpiled("sum", DP)
    broken = []
    for r in range(3):
        e = Edit(t.get_trainer_program(r))
        a_gradient_is_averaged(e)
        broken.append(e.program)
    t._ranks = {r: (broken[r], t.get_startup_program(r)) for r in range(3)}
    with pytest.raises(fx.VerifyError):
        fx.ParallelExecutor(t, places=fx.cpu_places(3))
