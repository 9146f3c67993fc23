"""docs/features.md names what there is: every call and every option in its rows is that of a function of fluidx."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import fluidx as fx
from fluidx.executor.plan.records import Plan
from fluidx.transpiler.passes.broadcast import BroadcastStartup
from fluidx.transpiler.strategies import CATALOGUE, Common

PAGE = Path(__file__).resolve().parents[1] / "docs" / "features.md"
SPANS = sorted({span for span in re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8")) if re.match(r"[\w.]+(\(|=)", span)})
PLACES = (fx, fx.strategies, fx.optimizer, fx.DistributeTranspiler, fx.Program, Plan)
PASSES = {BroadcastStartup.__name__: BroadcastStartup}


def options_of(function):
    """What a call of it may name; strategies hand `common` on."""
    known = set(inspect.signature(function).parameters)
    return known - {"common"} | set(Common.__annotations__) if "common" in known else known


def named(path):
    """The function that a dotted name of the page stands for."""
    parts = path.split(".")
    parts = parts[1:] if parts[0] in ("fx", "t") else parts
    for place in PLACES:
        found = place
        for part in parts:
            found = getattr(found, part, None) if part in dir(found) else None
        if found is not None:
            return found
    return PASSES.get(path)


@pytest.mark.parametrize("span", SPANS)
def test_a_call_or_an_option_is_one_of_fluidx(span):
    option = re.match(r"(\w+)=", span)
    if option:
        assert option[1] in {name for make in CATALOGUE.values() for name in options_of(make)}
        return
    call = ast.parse(re.sub(r"=(?=[,)])", "=...", span), mode="eval").body
    function = named(ast.unparse(call.func))
    assert function is not None, f"{span}: there is no such function"
    assert {k.arg for k in call.keywords} <= options_of(function)
