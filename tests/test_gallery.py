"""docs/gallery.md and the pictures in docs/img are what the scripts make; the gallery has every strategy, and its formulas hold."""

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from math import log2
from pathlib import Path

import pytest

import fluidx as fx
from fluidx.ir.parts import coords_of, holds, local_type
from fluidx.transpiler.cluster import SERVERS
from fluidx.transpiler.scheduling.pipeline_schedules import SCHEDULES

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROWS = 8  # of a batch; the ranks of the gallery cut it evenly


def script(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(DOCS))  # as for a script: they import one another
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCS))
    return module


make_pictures, gallery = script("make_pictures"), script("make_gallery")


@pytest.mark.parametrize("made, folder", [(make_pictures, DOCS / "img"), (gallery, DOCS / "img" / "gallery")], ids=["pages", "gallery"])
def test_pictures_are_what_the_script_draws(made, folder):
    drawn, there = made.pictures(), {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.svg")}
    assert sorted(drawn) == sorted(there)
    assert [name for name in drawn if drawn[name] != there[name]] == [], f"run: python docs/{made.__name__}.py"
    for svg in drawn.values():
        ET.fromstring(svg)


def test_the_page_is_up_to_date():
    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == gallery.page(), "run: python docs/make_gallery.py"


def test_every_strategy_and_every_schedule_is_in_the_gallery():
    assert {e.strategy.name for e in gallery.ENTRIES} == set(fx.transpiler.strategies.CATALOGUE)
    assert {dict(e.strategy.options).get("schedule") for e in gallery.ENTRIES} - {None} == set(SCHEDULES)


def test_two_entries_side_by_side_are_as_wide_as_a_page():
    widths = {name: float(re.search(r' width="([0-9.]+)"', svg)[1]) for name, svg in gallery.pictures().items()}
    assert max(widths.values()) <= 420, widths


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda e: e.name)
def test_the_formulas_of_an_entry_hold(entry):
    t = entry.transpiled()
    report = t.verify()
    assert report.parameters == 2
    params, state = ({n: d for n, d in t.main.global_block().descs.items() if of(d)} for of in (is_parameter, is_state))
    sizes = {g: len(sets[0]) for g, sets in t.main.groups.items()}
    servers = t.main.world_size - sizes["dp"] if SERVERS in sizes else 0
    weight = gallery.WIDTH * gallery.WIDTH * 4
    letters = {
        "n": sizes.get("dp", 1), "h": sizes.get("rail"), "g": sizes.get("node"), "k": servers, "p": sizes.get("pp"), "t": sizes.get("tp"),
        "P": 2 * weight, "S": 2 * weight,  # a velocity for each
        "A": ROWS // (sizes["dp"] if "tp" in sizes else 1) * gallery.WIDTH * 4,
        "F": 2 * 2 * gallery.WIDTH * 4,  # of each weight a column and a row
    }  # fmt: skip
    keepers = [r for r in range(t.main.world_size) if bytes_on(t, r, params)]  # with servers, they or the trainers
    for kept, formula in ((params, entry.params), (state, entry.state)):
        assert sum(bytes_on(t, r, kept) for r in keepers) / len(keepers) == value(formula, letters)
    if entry.name == "dgc":
        return  # how many elements are 0 is known when it runs: tests/transpiler/test_dgc.py
    traffic = [t.traffic(r, ROWS) for r in range(sizes.get("dp", t.main.world_size) if servers else t.main.world_size)]
    sent = sum(found[entry.over] if entry.over else found.total for found in traffic) / len(traffic)
    expected = value(entry.sent.removeprefix("at most "), letters)
    assert sent < expected if entry.sent.startswith("at most ") else sent == expected


def is_parameter(d):
    return d.is_parameter


def is_state(d):
    return "state_of" in d.attrs


def bytes_on(t, rank, kept):
    at = coords_of(t.main.groups, rank, t.main.turns)
    return sum(local_type(d.type, d.placement, at).nbytes for d in kept.values() if holds(d.placement, at))


def value(formula, letters):
    return eval(formula.replace("·", "*"), {"log2": log2, **letters})
