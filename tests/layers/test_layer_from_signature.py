"""Layers that are made from rows (layers/layer_from_signature.py), and their types for type checkers, fluidx/layers/__init__.pyi.

`python -m tests.layers.test_layer_from_signature` writes the types again.
"""

import inspect
import re
import traceback
from pathlib import Path
from textwrap import fill

import pytest

import fluidx as fx
from fluidx.layers.layer_from_signature import axis_of, row

TAB = "    "
TYPES = Path(fx.layers.__file__).with_suffix(".pyi")


def made_layers():
    """The layers of `fluidx.layers` that come from rows, by name."""
    functions = {name: getattr(fx.layers, name) for name in fx.layers.__all__ if inspect.isfunction(getattr(fx.layers, name))}
    return {name: f for name, f in functions.items() if "layer" in inspect.getclosurevars(inspect.unwrap(f)).nonlocals}


def types_of_layers():
    """The text of the file with the types: the signatures of made layers, and where the others are defined."""
    made = made_layers()
    lines = ["# The types of layers. Written by `python -m tests.layers.test_layer_from_signature`", "# ruff: noqa"]
    lines += ["from collections.abc import Sequence", "from typing import Any", "", "from ..ir import Variable"]
    modules = {name: getattr(fx.layers, name).__module__.removeprefix("fluidx.") for name in fx.layers.__all__ if name not in made}
    for module in sorted(set(modules.values())):
        near = module.removeprefix("layers.") if module.startswith("layers.") else f".{module}"
        names = ", ".join(f"{name} as {name}" for name in sorted(modules) if modules[name] == module)
        line = f"from .{near} import {names}"
        wrapped = fill(names, 140, initial_indent=TAB, subsequent_indent=TAB)
        lines.append(line if len(line) <= 140 else f"from .{near} import (\n{wrapped}\n)")
    signatures = {name: re.sub(r"(: |-> )'(.*?)'", r"\1\2", str(inspect.signature(made[name]))) for name in sorted(made)}
    lines += ["", *(f"def {name}{signature}: ..." for name, signature in signatures.items())]
    return "\n".join(lines) + "\n"


def test_the_types_of_layers_are_those_of_the_rows():
    assert TYPES.read_text() == types_of_layers(), "write them again: python -m tests.layers.test_layer_from_signature"


def test_a_row_is_bound_to_the_name_in_its_signature():
    assert {name: f.__name__ for name, f in made_layers().items()} == {name: name for name in made_layers()}


def test_arguments_become_operands_and_attributes_by_the_declaration_of_the_op():
    layer = row("log_loss(input, label, epsilon=1e-4, name=None)", "A loss.")
    main = fx.Program("p")
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        p, label = fx.data("p", [4, 1], "float32"), fx.data("y", [4, 1], "float32")
        layer(p, label, 0.5)
        layer(label=label, input=p, name="mine")
    assert str(main) == (
        "program p {\n  data %p: f32[4,1]\n  data %y: f32[4,1]\nforward:\n"
        "  %log_loss_0.tmp_0: f32[4,1] stop_gradient = log_loss(%p, %y) {epsilon=0.5}\n"
        "  %mine.tmp_0: f32[4,1] stop_gradient = log_loss(%p, %y)\n}\n"
    )


def test_slots_result_kind_and_always():
    second = row("second(label, left, right, margin=0.1)", "", "margin_rank_loss", slots=["left", "right", "label"], result=1)
    lower = row("lower(x, diagonal=0)", "", "tril_triu", kind="cut", always={"lower": False})
    main = fx.Program()
    with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
        label, left, right = (fx.data(name, [3, 1], "float32") for name in ("label", "left", "right"))
        assert second(label, left, right).name == "second_0.tmp_1"
        assert lower(left).name == "cut_0.tmp_0"
    first, cut = main.global_block().oplist
    assert first.input_arg_names == ("left", "right", "label")
    assert cut.attrs["lower"] is False


def test_layers_of_a_family_share_a_function_that_writes_them():
    def squares(helper, x, times):
        for _ in range(times):
            x = helper.op("square", x)
        return x

    fourth = row("fourth(x, times=2, name=None)", "", write=squares)
    with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():
        x = fx.data("x", [3], "float32")
        assert [fourth(x).name, fourth(x, 1, name="mine").name] == ["fourth_0.tmp_1", "mine.tmp_0"]
        with pytest.raises(fx.ProgramError, match="^layers.fourth: X must be a Variable, got int: 3"):
            fourth(3)


def test_none_leaves_an_attribute_to_the_op_if_it_is_the_default():
    layer = row("softshrink(x, alpha: float | None = None)", "")
    with fx.program_guard(fx.Program(), fx.Program()):
        x = fx.data("x", [3], "float32")
        assert layer(x).block.oplist[-1].attrs["alpha"] == 0.5
        with pytest.raises(fx.ProgramError, match="layers.elu: alpha must be a number, got NoneType: None"):
            fx.layers.elu(x, None)


def test_a_bool_operand_is_not_read_while_the_program_is_written():
    with fx.program_guard(fx.Program(), fx.Program()):
        go = fx.data("go", [3], "bool")
        assert fx.layers.logical_and(go, go).shape == (3,)


def test_an_error_points_at_the_line_that_calls_the_layer_and_the_traceback_shows_the_row():
    with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ProgramError) as failure:
        fx.layers.elu(fx.data("x", [3], "float32"), alpha="1")
    assert str(failure.value).startswith("layers.elu: alpha must be a number, got str: '1'\n  written at ")
    assert f'"{__file__}"' in str(failure.value)
    shown = "".join(traceback.format_exception(failure.value))
    assert 'elu = row("elu(x, alpha=1.0, name=None)"' in shown


def test_wrong_arguments_are_refused_as_for_a_written_function():
    with pytest.raises(TypeError, match=r"^elu\(\) missing 1 required positional argument: 'x'; it takes: x, alpha, name$"):
        fx.layers.elu()
    with pytest.raises(TypeError, match=r"^elu\(\) got an unexpected keyword argument 'alfa'; did you mean 'alpha'\?$"):
        fx.layers.elu(None, alfa=1.0)


def test_an_example_of_one_expression_gets_a_program_around_it():
    doc = row("relu(x, name=None)", """
        max(x, 0).

        >>> fx.layers.relu(fx.data("x", [3]))
        <Variable relu_0.tmp_0: f32[3]>
        """).__doc__  # fmt: skip
    assert doc.splitlines() == [
        "max(x, 0).", "", ">>> import fluidx as fx", ">>> with fx.program_guard(fx.Program(), fx.Program()), fx.unique_name.guard():",
        '...     fx.layers.relu(fx.data("x", [3]))', "<Variable relu_0.tmp_0: f32[3]>",
    ]  # fmt: skip


@pytest.mark.parametrize("signature, checks", [
    ("relu(x, y)", {}),  # relu has one input
    ("softmax(x, axis=-1)", {"dim": axis_of}),  # no argument
])  # fmt: skip
def test_a_row_that_does_not_fit_its_op_is_an_error_at_import(signature, checks):
    with pytest.raises(TypeError, match=r"row \w+: op \w+ has inputs X and attributes "):
        row(signature, "", **checks)


@pytest.mark.parametrize("signature, op, message", [
    ("relu(x, alfa=1.0)", "", "row relu: alfa=1.0 is no attribute; op relu has: none; an input has no default but None"),
    ("norm(x, epsilom=0)", "layer_norm", "row norm: epsilom=0 is no attribute; did you mean 'epsilon'?; an input has no default but None"),
])  # fmt: skip
def test_an_argument_with_a_number_as_its_default_is_no_input(signature, op, message):
    """layer_norm has inputs beside x that may be left out: the misspelt attribute would be one of them."""
    with pytest.raises(TypeError) as failure:
        row(signature, "", op)
    assert str(failure.value) == message


if __name__ == "__main__":
    TYPES.write_text(types_of_layers())
