"""fluid's names of collectives: each operator that communicates is written with them and read back to itself."""

import pytest

import fluidx as fx
from fluidx.ir import OPS, Effect, Operator, ParseError, Program, ProgramError, opdef
from fluidx.ir.fluid_text import REDUCTIONS, WITHOUT
from fluidx.ir.opdef import Required
from fluidx.ir.parser import parse_pair
from fluidx.ir.text import show_program

STYLES = [True, "nccl", "c"]
NAMELESS = {"adasum_reduce", "gather_parts", "pull", "push", "sparse_all_reduce", "transfer"}
COMMUNICATE = sorted(
    name for name, d in OPS.items() if d.effect in (Effect.COLLECTIVE, Effect.P2P) and d.__module__.startswith("fluidx.ops.")
)
HOW = {
    "shape": (3, 2), "dtype": "float32", "peer": 1, "root": 1, "to": 0, "to_axis": 1, "trainers": "dp", "group": "tp", "bounds": (0, 2, 6),
    "axis": 1, "unit": 2, "algorithm": "ring", "wave": 3, "layers": (0, 6), "share": 0.5, "batch": "b1", "ring": 1, "rings": 2,
}  # fmt: skip


def program(*ops, rank=None):
    p = Program("p")
    p.groups = {"dp": ((0, 1, 2, 3),), "tp": ((0, 1), (2, 3)), "odd": ((0, 1, 2), (3,))}
    p.rank = rank
    p.global_block().oplist.extend(ops)
    return p


def operator(kind, **attrs):
    d = opdef(kind)
    names = [s.name for s in d.in_slots], [s.name for s in d.out_slots]
    ins, outs = ({n: (f"{n.lower()}{k}",) for k, n in enumerate(side)} for side in names)
    return Operator(kind, ins, outs, d.complete_attrs({k: v for k, v in attrs.items() if k in d.attrs}))


def least(kind, group):
    """The attributes that the op needs, at their simplest."""
    return operator(kind, **{k: {**HOW, "group": group}[k] for k, v in opdef(kind).attrs.items() if isinstance(v, Required)})


def again(p, style):
    return Program.parse_from_string(p.to_string(fluid_names=style))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", COMMUNICATE)
def test_every_operator_that_communicates_is_read_back(kind, style):
    ops = [operator(kind, **HOW), *(least(kind, g) for g in ("dp", "tp", "odd"))]
    if "op" in opdef(kind).attrs:
        ops += [operator(kind, **HOW, op=r) for r in REDUCTIONS]
    for rank in (None, 2):
        p = program(*ops, rank=rank)
        assert again(p, style) == p
        assert str(again(p, style)) == str(p)


def test_the_operators_without_a_name_in_fluid_are_listed():
    assert {k for k in COMMUNICATE if not opdef(k).comm.fluid_names} == NAMELESS
    text = program(least("gather_parts", "dp"), least("broadcast", "dp"), least("adasum_reduce", "dp")).to_string(fluid_names="c")
    assert "  # without a name in fluid: adasum_reduce, gather_parts\n" in text
    assert "# without" not in program(least("broadcast", "dp")).to_string(fluid_names="c")


def lines(style, *ops, rank=None):
    return [line.strip() for line in program(*ops, rank=rank).to_string(fluid_names=style).splitlines() if "(" in line]


def test_attributes_are_those_of_fluid():
    ops = [operator("all_reduce", group="tp", op="max"), operator("broadcast", group="dp", root=1), operator("reduce", group="dp", root=3)]
    assert lines("c", *ops) == [
        "%out0 = c_allreduce_max(%x0) {ring_id=1}", "%out0 = c_broadcast(%x0) {ring_id=0, root=1}",
        "%out0 = c_reduce_sum(%x0) {ring_id=0, root_id=3}",
    ]  # fmt: skip
    assert lines(True, *ops[:2]) == [
        '%out0 = ncclAllReduce(%x0) {group="tp", reduction="ncclMax"}', '%out0 = ncclBcast(%x0) {group="dp", root=1}',
    ]  # fmt: skip
    parts = [operator("all_gather", group="tp"), operator("reduce_scatter", group="dp"), operator("reduce_scatter", group="dp", op="max")]
    assert lines("c", *parts, operator("scatter_parts", group="odd", root=0)) == [
        "%out0 = c_allgather(%x0) {nranks=2, ring_id=1}", "%out0 = c_reducescatter(%x0) {nranks=4, ring_id=0}",
        '%out0 = c_reducescatter(%x0) {nranks=4, op="max", ring_id=0}', "%out0 = c_scatter(%x0) {ring_id=2, root=0}",
    ]  # fmt: skip
    ends = [operator("recv", peer=1, shape=(3, 2), group="dp"), operator("barrier", group="tp"), operator("nccl_init", group="tp")]
    assert lines("c", *ends, rank=3) == [
        "%out0 = recv_v2() {out_shape=[3, 2], peer=1, ring_id=0}", "barrier() {ring_id=1}", "c_comm_init() {nranks=2, rank=1, ring_id=1}",
    ]  # fmt: skip


def read(line, head="  group dp = [0, 1]\n  rank 1\n"):
    return Program.parse_from_string(f"program p {{\n{head}  data %x: f32[2]\nforward:\n  {line}\n}}\n").ops[0]


def test_a_script_of_fluid_may_say_less_or_more():
    assert read("%y = c_allreduce_sum(%x) {ring_id=0, use_calc_stream=true}") == read('%y = all_reduce(%x) {group="dp"}')
    assert read("c_comm_init() {ring_id=0, nranks=2, rank=1}") == read('nccl_init() {group="dp"}')
    assert read('%y = ncclReduce(%x) {group="dp", root=0, reduction="ncclMin"}').attrs["op"] == "min"


@pytest.mark.parametrize(
    "line, why",
    [
        ("%y = c_allreduce_sum(%x) {ring_id=1}", "there is no ring 1; rings are the groups of program p in order: 0 is dp"),
        ("c_comm_init() {ring_id=0, nranks=4}", "nranks=4, but ring 0 is group dp with 2 ranks"),
        ("c_comm_init() {ring_id=0, rank=0}", "rank=0, but ring 0 is group dp with 1 as this rank's index"),
        ("%y = c_allreduce_sum(%x)", "group"),
        *((f"%x = {name}(%x)", f"fluid's {name} has no counterpart here: ") for name in sorted(WITHOUT)),
    ],
)
def test_what_has_no_counterpart_says_so_by_name(line, why):
    with pytest.raises(ParseError) as error:
        read(line)
    assert why in str(error.value)


def test_a_foreign_operator_of_such_a_name_stays_foreign():
    ring = {"ring_id": 0}
    p = program(Operator("c_comm_init", {}, {}, ring), Operator("c_allreduce_sum", {"X": ("x",)}, {"Out": ("x",)}, ring))
    for style in (False, *STYLES):
        assert again(p, style) == p
        assert [op.type for op in again(p, style).ops] == ["c_comm_init", "c_allreduce_sum"]


def test_a_pair_names_the_rings_of_each_program():
    main, startup = program(least("broadcast", "tp")), program(least("nccl_init", "odd"))
    startup.groups = {"odd": ((0, 1),)}
    text = show_program(main, startup=startup, fluid_names="c")
    pair = parse_pair(text)
    assert pair.main == main and pair.startup.ops == startup.ops


def test_a_strategys_program_is_read_back():
    main, startup = fx.Program("mlp"), fx.Program("mlp_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        loss = fx.layers.mean(fx.layers.fc(fx.data("x", [-1, 4], "float32"), 3))
        fx.optimizer.SGD(0.1).minimize(loss)
    for strategy in (fx.strategies.data_parallel(), fx.strategies.zero2(), fx.strategies.reduce_broadcast()):
        t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=3)
        for p in (t.main, t.get_trainer_program(1), t.get_startup_program(1)):
            assert again(p, "c") == p and str(again(p, True)) == str(p)


def test_a_wrong_style_is_refused():
    with pytest.raises(ProgramError, match='fluid_names must be True, "nccl" or "c", got \'nvidia\''):
        program().to_string(fluid_names="nvidia")
