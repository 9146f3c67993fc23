"""A line that speaks of what is not there is refused: where it is declared, or where a function says it."""

import pytest

from fluidx.ir import OPS, OpDef, ProgramError, TensorType
from fluidx.ir.pattern import parse_pattern

F = TensorType("float32", (4, 3))


@pytest.mark.parametrize(
    "line, message",
    [
        ("i k, k j -> i j | n:+", "'n:+' refers to factor 'n'; the line names: i, j, k"),
        ("v d, n -> n d | vv@", "'vv@' refers to factor 'vv'; did you mean 'v'?"),
        ("i j -> i | jj! L(0)", "'jj!' refers to factor 'jj'; did you mean 'j'?"),
        ("i j -> i j | #n", "'#n' refers to factor 'n'; the line names: i, j"),
        ("i -> i | *:+", "'*:+' refers to factor '*'; the line names: i"),
        ("i j -> i | j:sum", "'j:sum' refers to no factor or operand"),
        ("i -> i | loud", "'loud' refers to no factor or operand"),
    ],
)
def test_a_declaration_with_a_wrong_exception_is_refused(line, message):
    with pytest.raises(TypeError) as e:
        type("Wrong", (OpDef,), {"name": "t_wrong_line", "pattern": line})
    assert str(e.value) == f"op 't_wrong_line': pattern {line!r}: {message}"
    assert "t_wrong_line" not in OPS


def test_a_line_that_a_function_says_is_refused_with_its_op():
    class Wrong(OpDef):
        name = "t_wrong_function"
        inputs = ("X",)

        @staticmethod
        def pattern(ins, outs, attrs):
            return "i j -> i j | k:+"

    try:
        with pytest.raises(ProgramError) as e:
            Wrong.pattern_of([F], [F], {})
        assert str(e.value) == "op t_wrong_function: pattern 'i j -> i j | k:+': 'k:+' refers to factor 'k'; the line names: i, j"
    finally:
        del OPS["t_wrong_function"]


def test_an_operand_that_is_not_there():
    with pytest.raises(ProgramError) as e:
        parse_pattern("* -> * | L(1)", [F], [F])
    assert str(e.value) == "pattern '* -> * | L(1)': 'L(1)' refers to operand 1; there are 1, counted from 0"


def test_factors_of_axes_of_size_one_and_numbered_factors_may_be_missing():
    one = TensorType("float32", (4, 1))
    assert parse_pattern("i k -> i | k:+ e?! r:+", [one], [TensorType("float32", (4,))], {"r": 3}).reduced == {"r": "sum"}
