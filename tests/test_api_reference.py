"""The pages of Python names, which docs/make_api.py makes from signatures and docstrings: nothing public is left out."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import fluidx as fx

pytest.importorskip("onnx", reason="its names have a page, too")


@pytest.fixture(scope="module")
def make_api():
    spec = importlib.util.spec_from_file_location("make_api", Path(__file__).resolve().parents[1] / "docs" / "make_api.py")
    module = sys.modules["make_api"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_layer_has_an_entry_and_a_line(make_api):
    pages = make_api.pages()
    entries = re.findall(r"^### .* \{ #(\w+) \}$", pages["api/layers.md"] + pages["api/lr_scheduler.md"], re.MULTILINE)
    assert sorted(entries) == sorted(fx.layers.__all__)
    rows = re.findall(r"^\| \[`(\w+)`\]\(.*\) \| (.+) \|$", pages["api/layers.md"], re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(fx.layers.__all__)


def test_every_public_name_of_the_package_is_on_a_page(make_api):
    described = {id(value) for page in make_api.PAGES.values() for _, _, value in make_api.names(page)}
    public = {name: getattr(fx, name) for name in fx.__all__}
    assert [name for name, value in public.items() if callable(value) and id(value) not in described] == []


def test_every_name_on_a_page_says_what_it_is(make_api):
    found = {full: make_api._first(make_api._doc(value)) for page in make_api.PAGES.values() for _, full, value in make_api.names(page)}
    assert [full for full, says in found.items() if not says] == []


@pytest.mark.parametrize("page, method", [
    ("optimizer", "Optimizer.minimize"), ("programs", "Program.global_block"), ("programs", "Variable.astype"),
    ("executor", "Executor.run"), ("executor", "ParallelExecutor.state"), ("transpiler", "DistributeTranspiler.transpile"),
    ("io", "DataLoader.from_generator"), ("strategies", "Strategy.replace"), ("onnx", "Session.run"),
])  # fmt: skip
def test_methods_have_entries_those_of_bases_too(make_api, page, method):
    assert f"{{ #{method} }}" in make_api.pages()[f"api/{page}.md"]


def test_a_docstring_becomes_markdown(make_api):
    doc = "a*b where x_ < y, [n](m) of `a*b`.\n\nRaises ProgramError when not.\n\n    drawn\n\n>>> 1\n1"
    assert make_api._body(doc) == (
        "a\\*b where x\\_ &lt; y, [n\\](m) of `a*b`.\n\n**Raises** `ProgramError` when not.\n\n"
        "```text\ndrawn\n```\n\n```pycon\n>>> 1\n1\n```\n\n"
    )


def test_a_long_signature_has_one_argument_a_line(make_api):
    shown = make_api._signature(fx.layers.fc, "fx.layers.fc")
    assert shown.splitlines()[:3] == ["```python", "fx.layers.fc(", "    input: Variable | Sequence[Variable],"]
    assert shown.splitlines()[-3:-1] == [") -> Variable", "```"]
    shown = make_api._signature(fx.layers.relu, "fx.layers.relu")
    assert shown.splitlines()[1] == "fx.layers.relu(x: Variable, name: str | None = None) -> Variable"
