"""Rank programs that a wrong strategy could write, by hand: each computes something else than one device, and none is let through.

`testing/mutate.py` breaks communication in every mechanical way; here are mistakes of thought.
"""

from collections.abc import Callable

import pytest

import fluidx as fx
from fluidx.ir import Operator, Role
from fluidx.ir.verifier import verify_ranks
from fluidx.testing.models import classifier, integer_mlp

DP, RB, RING = "data_parallel", "reduce_broadcast", "ring_optimizer"
MODELS = {
    "adam": lambda: classifier(fx.optimizer.Adam(0.01), width=8),
    "norm": lambda: classifier(fx.optimizer.SGD(0.1, grad_clip=fx.clip.GradientClipByGlobalNorm(0.1)), width=8),
    "dropout": lambda: classifier(kind="dropout"),
    "sum": lambda: integer_mlp("sum"),
}
ATTACKS: list[tuple[Callable, str, str, tuple[int, ...], bool]] = []


def attack(*strategies, model="adam", ranks=(0, 1, 2), startup=False):
    """Register `f(program, ops, find)`, which edits the programs of `ranks`, once for each strategy."""

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


def scaled(x, out, factor, role=Role.DIST):
    return Operator("scale", {"X": (x,)}, {"Out": (out,)}, {"scale": factor, "bias": 0.0, "bias_after_scale": True}, role)


def reduced(x, op="avg"):
    return Operator("all_reduce", {"X": (x,)}, {"Out": (x,)}, {"group": "dp", "op": op, "stream": "comm"}, Role.DIST)


# -- gradients --------------------------------------------------------------------------------------------------------------------------


@attack(DP)
def a_gradient_is_clipped_before_it_is_reduced(e):
    i = e.find("all_reduce")
    x = e.ops[i].input_arg_names[0]
    clipped = e.like(x, "clipped")
    e.ops[i] = e.ops[i].renamed({x: clipped})
    e.ops.insert(i, Operator("clip", {"X": (x,)}, {"Out": (clipped,)}, {"min": -1.0, "max": 1.0}, Role.DIST))


@attack(DP)
def an_update_takes_the_ranks_own_gradient(e):
    i = e.find("all_reduce")
    e.rename(e.ops[i].output_arg_names[0], e.ops[i].input_arg_names[0], i + 1)


@attack(DP)
def a_gradient_is_reduced_twice(e):
    i = e.find("all_reduce")
    out = e.ops[i].output_arg_names[0]
    e.ops.insert(i + 1, reduced(out, "sum"))


@attack(RB)
def a_gradient_is_reduced_by_its_maximum(e):
    e.change(e.find("reduce"), op="max")


@attack(DP, RB, RING)
def the_forward_part_is_another(e):
    i = e.find("tanh")
    e.ops[i] = e.ops[i].replace(type="sigmoid")


@attack(DP)
def activations_are_averaged_over_the_ranks(e):
    i = e.find("tanh")
    e.ops.insert(i + 1, reduced(e.ops[i].output_arg_names[0]))


@attack(DP)
def labels_are_not_split(e):
    e.descs["label"] = e.descs["label"].changed(placement=())


@attack(DP, model="dropout")
def every_rank_drops_the_same_elements(e):
    e.change(e.find("dropout"), sharded=False)


# -- the weight of an uneven batch -----------------------------------------------------------------------------------------------------


@attack(DP, RB, RING)
@attack(DP, model="sum")
def the_seed_is_not_weighed(e):
    i = e.find("batch_weight")
    op = e.ops.pop(i)
    e.rename(op.output_arg_names[0], op.input_arg_names[0])


@attack(DP, RB, RING)
def the_seed_is_weighed_twice(e):
    i = e.find("batch_weight")
    w = e.ops[i].output_arg_names
    e.ops.insert(i + 1, e.ops[i].replace(inputs={"X": w}, outputs={"Out": w}))


@attack(DP)
def a_gradient_is_weighed_again(e):
    i = e.find("all_reduce")
    x = e.ops[i].input_arg_names
    e.ops.insert(i, Operator("batch_weight", {"X": x}, {"Out": x}, {"group": "dp", "op": "avg"}, Role.DIST))


@attack(DP)
def the_seed_is_weighed_as_for_a_sum(e):
    e.change(e.find("batch_weight"), op="sum")


# -- updates ----------------------------------------------------------------------------------------------------------------------------


@attack(DP, RB, ranks=(1,))
def the_learning_rate_is_halved_on_one_rank(e):
    i = e.find("adam")
    lr = e.ops[i].input("LearningRate")[0]
    half = e.like(lr, "half", persistable=False)
    e.ops[i] = e.ops[i].renamed({lr: half})
    e.ops.insert(i, scaled(lr, half, 0.5, Role.OPTIMIZE))


@attack(DP, ranks=(1,))
def one_rank_has_another_beta(e):
    e.change(e.find("adam"), beta1=0.8)


@attack(DP)
def the_two_moments_are_swapped(e):
    i = e.find("adam")
    slots = e.ops[i].inputs
    e.ops[i] = e.ops[i].replace(inputs={**slots, "Moment1": slots["Moment2"], "Moment2": slots["Moment1"]})


@attack(RING)
def an_update_uses_the_state_of_another_chunk(e):
    updates = [i for i, op in enumerate(e.ops) if op.type == "adam"]
    by_type = {}
    for i in updates:
        by_type.setdefault(e.descs[e.ops[i].input("Moment1")[0]].type, []).append(i)
    pair = next((group[:2] for group in by_type.values() if len(group) > 1), None)
    if pair is None:
        return
    a, b = (e.ops[i] for i in pair)
    for i, op, other in ((pair[0], a, b), (pair[1], b, a)):
        inputs, outputs = {**op.inputs, "Moment1": other.inputs["Moment1"]}, {**op.outputs, "Moment1Out": other.outputs["Moment1Out"]}
        e.ops[i] = op.replace(inputs=inputs, outputs=outputs)


@attack(RB)
def a_parameter_is_not_handed_back(e):
    e.ops.pop(e.find("broadcast"))


@attack(RB, ranks=(0,))
def a_root_updates_after_it_has_handed_back(e):
    e.ops.append(e.ops.pop(e.find("adam")))


@attack(DP, ranks=(2,))
def one_rank_drifts_by_a_hundred_millionth(e):
    w = e.program.all_parameters()[0].name
    e.ops.append(scaled(w, w, 1.00000001))


# -- chunks ----------------------------------------------------------------------------------------------------------------------------


def windows(e):
    return [d for d in e.descs.values() if d.attrs and "window_of" in d.attrs]


@attack(RING)
def two_chunks_of_one_shape_are_swapped(e):
    by = {}
    for d in windows(e):
        by.setdefault((d.attrs["window_of"], d.type), []).append(d)
    a, b = next(group for group in by.values() if len(group) > 1)[:2]
    e.descs[a.name], e.descs[b.name] = a.changed(attrs=b.attrs), b.changed(attrs=a.attrs)


@attack(RING, ranks=(1,))
def a_chunk_is_handed_back_to_the_next_element(e):
    d = next(d for d in windows(e) if d.attrs["start"] == 0)
    e.descs[d.name] = d.changed(attrs={**d.attrs, "start": 1, "stop": d.attrs["stop"] + 1})


@attack(RING)
def two_chunks_of_a_gradient_are_swapped(e):
    i, j = e.find("chunk", 0), e.find("chunk", 1)
    a, b = e.ops[i].attrs, e.ops[j].attrs
    e.change(i, **b)
    e.change(j, **a)


def swap_packed(e, type, slots, slot):
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


@attack(RING)
def two_values_are_packed_in_the_other_order(e):
    swap_packed(e, "pack", "inputs", "X")


@attack(RING)
def two_values_are_unpacked_in_the_other_order(e):
    swap_packed(e, "unpack", "outputs", "Out")


# -- norms -----------------------------------------------------------------------------------------------------------------------------


@attack(RB, RING, model="norm")
def every_root_clips_by_its_own_norm(e):
    i = e.find("all_reduce")
    op = e.ops[i]
    e.ops[i] = Operator("assign", op.inputs, op.outputs, {}, Role.DIST)


@attack(DP, model="norm")
def the_norm_is_of_the_ranks_own_gradient(e):
    i = e.find("squared_l2_norm")
    x = e.ops[i].input_arg_names[0]
    e.ops[i] = e.ops[i].renamed({x: x.removesuffix(".avg")})


@attack(DP, model="norm")
def the_norms_of_the_ranks_are_averaged(e):
    i = e.find("squared_l2_norm")
    x, out = e.ops[i].input_arg_names[0], e.ops[i].output_arg_names[0]
    e.ops[i] = e.ops[i].renamed({x: x.removesuffix(".avg")}).replace(role=Role.DIST)
    e.ops.insert(i + 1, reduced(out))


# -- startup ---------------------------------------------------------------------------------------------------------------------------


@attack(DP, RB, RING, startup=True)
def a_parameter_starts_with_another_seed(e):
    e.change(next(i for i, op in enumerate(e.ops) if "seed" in op.attrs), seed=5)


@attack(DP, RB, RING, startup=True)
def a_constant_is_another(e):
    e.change(e.find("fill_constant"), value=7.0)


@attack(DP, startup=True)
def a_constant_has_another_shape(e):
    e.change(e.find("fill_constant"), shape=(3,))


def names():
    return [f"{f.__name__}-{strategy}-{model}" for f, strategy, model, _, _ in ATTACKS]


@pytest.mark.parametrize("edit, strategy, model, ranks, startup", ATTACKS, ids=names())
def test_it_is_caught(edit, strategy, model, ranks, startup):
    m = MODELS[model]()
    options = {"chunk_mb": 48 / 2**20} if strategy == RING else {}
    t = fx.DistributeTranspiler(fx.strategies.get(strategy, **options))
    t.transpile(program=m.main, startup_program=m.startup, trainers=3)
    t.verify()
    programs = {True: [], False: []}
    for r in range(3):
        for kind, program in ((False, t.get_trainer_program(r)), (True, t.get_startup_program(r))):
            if kind is startup and r in ranks:
                e = Edit(program)
                edit(e)
                program = e.program
            programs[kind].append(program)
    with pytest.raises(fx.VerifyError):
        verify_ranks(t.source, programs[False], programs[True], layout=t.layout, loss_op=t.job.loss_op, notes=t.job.notes)
