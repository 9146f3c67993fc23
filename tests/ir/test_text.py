"""The printed form of programs, operators and variables, and the lines that errors show."""

from __future__ import annotations

import math
import time

import pytest

from fluidx.ir import OPS, At, BlockRef, OpDef, Operator, Partial, Program, ProgramError, Required, Role, Shard, TensorType, Var
from fluidx.ir.parser import parse_pair, parse_program
from fluidx.ir.text import PARAM_DEFAULTS, excerpt, show_block, show_op, show_program, show_value, show_var


class MatMul(OpDef):
    """A product, with the attributes that the examples show."""

    name = "t_matmul"
    inputs, outputs = ("X", "Y"), ("Out",)
    attrs = {"transpose_x": False, "transpose_y": False, "alpha": 1.0}


class Reduce(OpDef):
    """Stands for a collective."""

    name = "t_all_reduce"
    inputs, outputs = ("X",), ("Out",)
    attrs = {"group": "dp", "op": "sum", "stream": ""}


class Update(OpDef):
    """Stands for an optimizer's update, with an optional slot."""

    name = "t_sgd"
    inputs, outputs = ("Param", "Mask?", "Grad"), ("ParamOut",)
    attrs = {"lr": 0.1}


class Uniform(OpDef):
    """Stands for an initializer."""

    name = "t_uniform"
    inputs, outputs = (), ("Out",)
    attrs = {"shape": Required(tuple), "low": -1.0, "high": 1.0}


class Split(OpDef):
    """Several outputs in one slot, and one that may be absent."""

    name = "t_split"
    inputs, outputs = ("X", "Rest*"), ("Out*", "Mask?")
    attrs = {"num": 2}


def op(kind, ins, outs, role=Role.FORWARD, attrs=None, **more):
    return Operator(kind, ins, outs, OPS[kind].complete_attrs(attrs or {}), role, **more)


def f32(*shape):
    return TensorType("float32", shape)


def mnist() -> Program:
    p = Program("mnist")
    p.groups = {"dp": ((0, 1),)}
    b = p.global_block()
    b.declare(Var("x", f32(-1, 784), (Shard(0, "dp"),), stop_gradient=True, is_data=True))
    b.declare(Var("w", f32(784, 10), persistable=True, is_parameter=True, attrs={**PARAM_DEFAULTS, "learning_rate": 0.5}))
    b.declare(Var("y", f32(-1, 10), (Shard(0, "dp"),)))
    b.declare(Var("w@GRAD", f32(784, 10), (Partial("sum", "dp"),)))
    b.declare(Var("w@GRAD.sum", f32(784, 10)))
    b.oplist += [
        op("t_matmul", {"X": ("x",), "Y": ("w",)}, {"Out": ("y",)}),
        op("t_matmul", {"X": ("x",), "Y": ("y",)}, {"Out": ("w@GRAD",)}, Role.BACKWARD, {"transpose_x": True}, role_var=("w", "w@GRAD")),
        op("t_all_reduce", {"X": ("w@GRAD",)}, {"Out": ("w@GRAD.sum",)}, Role.BACKWARD),
        op("t_sgd", {"Param": ("w",), "Grad": ("w@GRAD.sum",)}, {"ParamOut": ("w",)}, Role.OPTIMIZE),
    ]
    return p


def start() -> Program:
    p = Program("mnist")
    p.groups = {"dp": ((0, 1),)}
    b = p.global_block()
    b.declare(mnist().global_block().descs["w"])
    b.oplist += [
        op("t_uniform", {}, {"Out": ("w",)}, attrs={"shape": (784, 10)}),
        op("t_all_reduce", {"X": ("w",)}, {"Out": ("w",)}, Role.DIST),
    ]
    return p


MNIST = """\
program mnist {
  group dp = [0, 1]
  data %x: f32[-1,784] shard(0) over dp
  param %w: f32[784,10] {learning_rate=0.5}
forward:
  %y: f32[-1,10] shard(0) over dp = t_matmul(%x, %w)
backward:
  %w@GRAD: f32[784,10] partial(sum) over dp = t_matmul(%x, %y) {transpose_x=true} for %w, %w@GRAD
  %w@GRAD.sum: f32[784,10] = t_all_reduce(%w@GRAD) {group="dp", op="sum"}
optimize:
  %w = t_sgd(%w, _, %w@GRAD.sum)
}
"""


def test_a_program_prints_as_declarations_and_sections():
    assert str(mnist()) == MNIST
    assert parse_program(MNIST) == mnist()


def test_a_pair_prints_its_startup_section_first_and_shared_variables_once():
    text = show_program(mnist(), startup=start())
    head, rest = MNIST.split("forward:\n")
    assert (
        text
        == head
        + ('startup:\n  %w = t_uniform() {shape=[784, 10]}\nstartup dist:\n  %w = t_all_reduce(%w) {group="dp", op="sum"}\nforward:\n')
        + rest
    )
    pair = parse_pair(text)
    assert (pair.main, pair.startup) == (mnist(), start())


def test_startup_says_where_its_settings_and_records_differ_from_mains():
    startup = start()
    startup.name, startup.groups, startup.random_seed = "init", {}, 3
    startup.global_block().declare(Var("w", f32(784, 10), persistable=True))
    startup.global_block().declare(Var("step", TensorType("int64", (1,)), persistable=True))
    text = show_program(mnist(), startup=startup)
    assert (
        "startup:\n  name init\n  seed 3\n  group none\n  var %step: i64[1] persistable\n"
        "  %w: f32[784,10] persistable = t_uniform() {shape=[784, 10]}\n" in text
    )
    assert parse_pair(text).startup == startup


def test_a_rank_program_says_its_rank_strategy_and_seed():
    p = Program("a b")
    p.rank, p.strategy, p.random_seed = 2, 'ring_optimizer("dp")', 7
    p.groups = {"node": ((0, 1), (2, 3))}
    text = 'program "a b" {\n  rank 2\n  strategy "ring_optimizer(\\"dp\\")"\n  seed 7\n  group node = [0, 1] [2, 3]\n}\n'
    assert str(p) == text
    assert parse_program(text) == p


def test_sub_blocks_follow_the_operators():
    p = Program("loop")
    p.global_block().oplist.append(Operator("f_while", {}, {}, {"sub_block": BlockRef(1)}))
    b = p.create_block(0)
    b.declare(Var("h", f32(2)))
    b.oplist.append(Operator("f_step", {"X": ("x",)}, {"Out": ("h",)}))
    assert str(p) == (
        "program loop {\nforward:\n  f_while() {sub_block=block 1}\nblock 1 in 0 {\nforward:\n  Out=[%h: f32[2]] = f_step(X=[%x])\n}\n}\n"
    )
    assert parse_program(str(p)) == p
    assert show_block(b) == "forward:\nOut=[%h: f32[2]] = f_step(X=[%x])"


def test_list_slots_and_absent_slots():
    o = op("t_split", {"X": ("x",), "Rest": ("a", "b")}, {"Out": ("p", "q")})
    assert show_op(o, {"p": f32(2), "q": f32(3)}) == "[%p: f32[2], %q: f32[3]], _ = t_split(%x, [%a, %b])"
    assert show_op(op("t_split", {"X": ("x",)}, {"Out": ("p",), "Mask": ("m",)}, attrs={"num": 1})) == "[%p], %m = t_split(%x, []) {num=1}"


def test_an_operator_that_no_declaration_fits_names_its_slots_and_all_attributes():
    assert show_op(Operator("t_matmul", {"Y": ("y",), "X": ("x",)}, {"Out": ("o",)}, {"alpha": 1})) == (
        "%o = t_matmul(Y=[%y], X=[%x]) {only alpha=1}"
    )


def test_flags_are_written_where_they_differ_from_what_the_kind_implies():
    assert show_var(Var("m", f32(2), (At(1, "pp"),), persistable=True)) == "var %m: f32[2] at(1) over pp persistable"
    assert show_var(Var("x", f32(2), is_data=True)) == "data %x: f32[2] not stop_gradient"
    assert show_var(Var("an odd name", f32(), stop_gradient=True)) == 'var %"an odd name": f32[] stop_gradient'


def test_a_parameter_says_what_sets_it_apart_from_other_parameters():
    w = Var("w", f32(2), persistable=True, is_parameter=True, attrs=PARAM_DEFAULTS)
    assert show_var(w) == "param %w: f32[2]"
    assert show_var(w.changed(attrs={**PARAM_DEFAULTS, "error_clip": (-1, 1)})) == "param %w: f32[2] {error_clip=[-1, 1]}"
    assert show_var(w.changed(attrs={"trainable": True})) == "param %w: f32[2] {only trainable=true}"
    assert show_var(w.changed(attrs={})) == "param %w: f32[2] {only}"


@pytest.mark.parametrize(
    "value, text",
    [
        (1, "1"), (1.0, "1.0"), (True, "true"), (1e-5, "1e-05"), (math.nan, "nan"), (-math.inf, "-inf"), (None, "none"),
        ((784, 10), "[784, 10]"), (("a", ()), '["a", []]'), ('say "hi"\n', '"say \\"hi\\"\\n"'), ("é", '"é"'), ("\u2028", '"\\u2028"'),
    ],
)  # fmt: skip
def test_values(value, text):
    assert show_value(value) == text


def test_an_excerpt_numbers_the_lines_and_marks_the_operator():
    assert excerpt(mnist(), 2, before=1, after=1) == (
        "  in program mnist, section backward:\n"
        "        1  %w@GRAD: f32[784,10] partial(sum) over dp = t_matmul(%x, %y) {transpose_x=true} for %w, %w@GRAD\n"
        '    >   2  %w@GRAD.sum: f32[784,10] = t_all_reduce(%w@GRAD) {group="dp", op="sum"}\n'
        "        3  %w = t_sgd(%w, _, %w@GRAD.sum)"
    )
    with pytest.raises(ProgramError, match="program mnist, block 0 has no operator 9; it has 4"):
        excerpt(mnist(), 9)


def test_fluids_historic_names():
    o = Operator("all_reduce", {"X": ("g",)}, {"Out": ("g",)}, {"group": "dp", "op": "sum"})
    assert "ncclAllReduce" in show_op(o, fluid_names=True) and 'reduction="ncclSum"' in show_op(o, fluid_names=True)
    assert "c_allreduce_sum" in show_op(o, fluid_names="c")
    assert "ncclBcast" in show_op(Operator("broadcast", {"X": ("w",)}, {"Out": ("w",)}, {"root": 0}), fluid_names=True)
    assert "recv_v2" in show_op(Operator("recv", {}, {"Out": ("w",)}, {"peer": 0}), fluid_names=True)
    with pytest.raises(ProgramError, match="fluid_names must be"):
        show_op(o, fluid_names="nvidia")


def test_printing_and_parsing_take_time_linear_in_the_program():
    def seconds(n):
        p = Program("long")
        b = p.global_block()
        for k in range(n):
            b.declare(Var(f"v{k}", f32(-1, 10)))
            ins = {"X": (f"v{max(0, k - 1)}",), "Y": (f"v{max(0, k - 2)}",)}
            b.oplist.append(op("t_matmul", ins, {"Out": (f"v{k}",)}, attrs={"alpha": 0.5}))
        t0 = time.process_time()
        text = str(p)
        t1 = time.process_time()
        assert parse_program(text) == p
        return t1 - t0, time.process_time() - t1

    def least(n):
        return map(min, zip(*(seconds(n) for _ in range(3))))

    for short, long in zip(least(1000), least(8000)):
        assert long < 8 * short * 4  # a quadratic pass would take 64 times as long
