"""fluidx.ir holds programs of any ops: none is known there by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fluidx.ir
from fluidx.ir import all_ops

HOME = Path(fluidx.ir.__file__).parent
WORDS = {"optional", "part", "shape", "shard", "sum"}  # a kind of value, a parameter of kernels, a field of types, a placement, a reduction


@pytest.mark.parametrize("path", sorted(HOME.glob("*.py")), ids=lambda p: p.name)
def test_no_module_of_ir_names_an_op(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {n.func.attr: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_builder(n.func)}
    quoted = {n.value: n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    ops = {d.name for d in all_ops()} - WORDS
    assert {name: line for name, line in {**called, **quoted}.items() if name in ops} == {}


def _is_builder(func: ast.expr) -> bool:
    """`b.relu`, as operators are written."""
    return isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in ("b", "builder")
