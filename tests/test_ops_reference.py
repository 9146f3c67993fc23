"""The page of operators, which docs/make_ops.py makes from the declarations, has each of them once and under a heading."""

import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="the page says what operators are in ONNX")

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def make_ops():
    spec = importlib.util.spec_from_file_location("make_ops", DOCS / "make_ops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_operator_once(make_ops):
    assert sorted(re.findall(r"^### .+ \{ #(\w+) \}$", make_ops.page(), re.MULTILINE)) == sorted(d.name for d in make_ops.declared())


def test_every_operator_stands_under_a_heading(make_ops):
    assert [d.name for d in make_ops.declared() if make_ops.kind_of(d) == "Others"] == []
