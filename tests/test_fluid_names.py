"""Every name that fluid 1.8 exports is here, or the one table says what is written instead; docs/migration.md shows that table."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import fluidx as fx
from fluidx import fluid_names

ROOT = Path(__file__).resolve().parents[1]


def exported():
    """(module, name) of all that fluid exports."""
    module, found = "", []
    for line in (ROOT / "tests" / "fluid_names.txt").read_text().splitlines():
        if line.startswith("["):
            module = line.strip("[]").replace("fluid", "")
        elif not line.startswith("#"):
            found += [(module, name) for name in line.split()]
    return found


def there(module, name):
    home = getattr(fx, module) if module else fx
    try:
        return getattr(home, name) is not None
    except AttributeError as error:
        assert str(error).endswith(str(fluid_names.answer(module, name))), error
        return False


def test_every_name_of_fluid_is_here_or_the_table_says_what_to_write():
    silent = [f"{m or 'fluid'}.{n}" for m, n in exported() if not there(m, n) and fluid_names.answer(m, n) is None]
    assert silent == []


def test_the_table_lists_nothing_that_is_here_and_no_name_twice():
    for module, rows in fluid_names.NOT_HERE.items():
        names = [n for listed in rows for n in listed.split()]
        assert len(names) == len(set(names)), module
        assert [n for n in names if there(module, n)] == [], module


def test_the_layers_that_an_answer_names_are_there():
    for module, rows in fluid_names.NOT_HERE.items():
        for answer in rows.values():
            for part, name in re.findall(r"\b(layers|optimizer|io|nets|metrics|strategies|lr_scheduler)\.(\w+)", answer):
                home = fx.strategies if part == "strategies" else import_module(f"fluidx.{part}")
                assert hasattr(home, name), f"{module}: {answer}"


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: fx.layers.dynamic_gru, "fluidx.layers has no layer 'dynamic_gru'; sequences are padded: write layers.rnn(GRUCell(size)"),
        (lambda: fx.layers.sequence_softmax, "write layers.softmax(scores + (mask - 1.0) * 1e9)"),
        (lambda: fx.layers.sofmax, "fluidx.layers has no layer 'sofmax'; did you mean 'softmax'?"),
        (lambda: fx.layers.quantum_layer, "fluidx.layers has no layer 'quantum_layer'; it has: GRUCell, "),
        (lambda: fx.dygraph, "fluidx has no 'dygraph'; programs are static graphs"),
        (lambda: fx.CompiledProgramm, "fluidx has no 'CompiledProgramm'; did you mean 'CompiledProgram'?"),
        (lambda: fx.nets.sequence_conv_pool, "fluidx.nets has no 'sequence_conv_pool'; sequences are padded"),
        (lambda: fx.optimizer.Adamm, "fluidx.optimizer has no 'Adamm'; did you mean 'Adam'?"),
        (lambda: fx.core.LoDTensor, "fluidx.core has no 'LoDTensor'; there are no LoD tensors"),
        (lambda: fx.contrib.slim, "fluidx.contrib has no 'slim'; fx.quantize quantizes a program after training"),
    ],
)
def test_a_name_that_is_not_here_is_answered_by_the_table_before_the_nearest(call, text):
    with pytest.raises(AttributeError) as error:
        call()
    assert text in str(error.value)


def test_the_page_for_users_of_fluid_shows_the_table():
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    assert fluid_names.as_markdown() in page, "write what `python -m fluidx.fluid_names` prints into docs/migration.md"
