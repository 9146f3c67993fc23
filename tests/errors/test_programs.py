"""Every message that a wrongly written program gives, whole, with the line of the user that wrote it."""

import pytest

import fluidx as fx
from fluidx.layers.helper import ACTIVATIONS

L = fx.layers


def x(*shape, dtype="float32"):
    return fx.data("x", list(shape or (-1, 3)), dtype)


def op(type, inputs, attrs=None):
    return fx.default_main_program().global_block().append_op(type, inputs, {"Out": "y"}, attrs)


def message(call, error=fx.ProgramError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


CASES = [
    (
        lambda: L.matmul(x(-1, 3), L.ones([4, 5], "float32")),
        "op matmul: X f32[-1,3] has 3 columns and Y f32[4,5] has 4 rows; they must be equal\n  in matmul(x, fill_constant_0.tmp_0)",
    ),
    (
        lambda: L.elementwise_add(x(), fx.data("i", [-1, 3], "int64")),
        "op elementwise_add: X is float32 and Y is int64; cast one of them\n  in elementwise_add(x, i)",
    ),
    (lambda: x() + "a", "cannot combine variable 'x' with str: 'a'"),
    (lambda: x()[0, 0, 0], "variable 'x' has 2 axes, 3 indices were given"),
    (lambda: x()[:, 3], "index 3 is out of range for axis 1 of variable 'x' with shape [-1, 3]"),
    (lambda: x()["a"], "variable 'x' can be indexed with integers, slices, None and ...; got str"),
    (lambda: L.fc(x(), 4, act="rleu"), f"layers.fc: unknown act 'rleu'; did you mean 'relu'? There are: {', '.join(ACTIVATIONS)}"),
]


@pytest.mark.parametrize("call, text", CASES, ids=[t[:30] for _, t in CASES])
def test_the_line_that_wrote_it_is_named(call, text):
    got = message(call)
    first = call.__code__.co_firstlineno
    assert got in [f'{text}\n  written at "{__file__}", line {first + k}, in <lambda>' for k in (0, 1)]


RAW = [
    (lambda: op("relu", {"X": x()}, {"axs": 1}), "op relu has no attribute 'axs'; it has: none\n  in relu(x)"),
    (lambda: op("softmax", {"X": x()}, {"axes": 1}), "op softmax has no attribute 'axes'; did you mean 'axis'?\n  in softmax(x)"),
    (lambda: op("softmax", {"X": x()}, {"axis": "1"}), "op softmax: attribute 'axis' must be int, got str: '1'\n  in softmax(x)"),
    (lambda: op("reshape", {"X": x()}), "op reshape needs attribute 'shape' (tuple), which was not given\n  in reshape(x)"),
    (lambda: op("soft_max", {"X": x()}), "there is no op 'soft_max'; did you mean 'softmax'?\n  in soft_max(x)"),
    (lambda: op("relu", {"Y": x()}), "op relu has no input 'Y'; it has: X\n  in relu(x)"),
    (lambda: op("matmul", {"X": x()}), "op matmul needs input 'Y', which was not given\n  in matmul(x)"),
    (lambda: op("relu", {"X": [x(), x()]}), "op relu takes one variable as input 'X', got 2\n  in relu(x, x)"),
    (lambda: op("relu", {"X": "z"}), "program main has no variable 'z'; it declares: none\n  in relu(z)"),
    (lambda: (x(), op("relu", {"X": "xs"})), "program main has no variable 'xs'; did you mean 'x'?\n  in relu(xs)"),
]


@pytest.mark.parametrize("call, text", RAW, ids=[t[:40] for _, t in RAW])
def test_an_appended_operator_that_does_not_fit(call, text):
    lines = message(call).rsplit("\n", 1)
    assert lines[0] == text
    assert lines[1] == f'  written at "{__file__}", line {op.__code__.co_firstlineno + 1}, in op'


@pytest.mark.parametrize(
    "body, text",
    [
        (2, "op while runs block 2; program main has 2 blocks"),
        (0, "op while in block 0 runs block 0, which is the program itself; an operator may only run blocks inside its own"),
        (1, "op while runs block 1, which op while runs already; a block has one operator that runs it"),
    ],
)
def test_an_operator_runs_a_block_of_its_own(body, text):
    main, go = fx.default_main_program(), fx.data("go", [1], "bool")

    def loop(body):
        main.global_block().append_op("while", {"Condition": go}, {"Out": go}, {"sub_block": body})

    main.create_block()
    loop(1)
    at = loop.__code__.co_firstlineno + 1
    assert message(lambda: loop(body)) == f'{text}\n  in while(go)\n  written at "{__file__}", line {at}, in loop'
    assert len(main.ops) == 1
    with pytest.raises(fx.ProgramError, match="program main has no block 7; it has 2"):
        main.create_block(7)


def test_the_name_scope_is_part_of_the_place():
    def inside():
        with fx.name_scope("encoder"):
            L.matmul(x(-1, 3), L.ones([4, 5], "float32"))

    assert message(inside).endswith(f"line {inside.__code__.co_firstlineno + 2}, in encoder/inside")


def test_a_variable_has_no_truth_value():
    def ask():
        if x(-1, 3) > 0:
            return 1

    text, line = message(ask).rsplit("\n", 1)
    assert text == "variable 'greater_than.tmp_0' has no value while the program is written; use layers.cond or layers.While"
    assert line == f'  written at "{__file__}", line {ask.__code__.co_firstlineno + 1}, in ask'


PAIR = """
program net {
  data %x: f32[-1,4]
  param %w: f32[4,3]
startup:
  %w = fill_constant() {shape=[4, 3], value=1.0}
forward:
  %y: f32[-1,3] = mul(%x, %w)
}
"""

TEXTS = [
    ("", "line 1: expected program NAME {, found the end of the text\n    1 | \n        ^"),
    ("module { }", 'line 1: expected program NAME {, found "module"\n    1 | module { }\n        ^'),
]


@pytest.mark.parametrize("text, expected", TEXTS, ids=["empty", "foreign"])
def test_a_text_that_is_no_program(text, expected):
    assert message(lambda: fx.Program.parse_from_string(text), fx.ParseError) == expected


def test_a_program_that_is_no_text():
    assert message(lambda: fx.Program.parse_from_string(b"program net {}"), fx.ParseError) == "program text must be a str, got bytes"


@pytest.mark.parametrize("end", range(3, len(PAIR) - 2, 7))
def test_every_truncated_program_is_refused_with_its_line(end):
    assert message(lambda: fx.Program.parse_from_string(PAIR[:end]), fx.ParseError).startswith("line ")
