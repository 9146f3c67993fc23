"""docs/ops.md is what docs/make_ops.py writes from the declarations."""

import importlib.util
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


def test_the_reference_page_is_up_to_date(make_ops):
    assert (DOCS / "ops.md").read_text(encoding="utf-8") == make_ops.page(), "run: python docs/make_ops.py"


def test_every_operator_stands_under_a_heading(make_ops):
    assert [d.name for d in make_ops.declared() if make_ops.kind_of(d) == "Others"] == []
