"""docs/findings.md names a test for each defect that was found: every one of them exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (?P<found>.+?) \| (?P<tests>.+) \|$")


def rows():
    lines = (ROOT / "docs/findings.md").read_text().splitlines()
    table = [ROW.match(line) for line in lines[lines.index("|---|---|") + 1 :] if line]
    assert all(table), "a line of docs/findings.md is no row | what was found | `tests/...` |"
    return [(found, name) for row in table for found in [row["found"]] for name in re.findall(r"`([^`]+)`", row["tests"])]


@pytest.mark.parametrize("found, name", rows())
def test_the_test_of_a_finding_exists(found, name):
    path, *inner = name.split("::")
    assert (ROOT / path).exists(), f"{found}: no file {path}"
    if inner:
        tree = ast.parse((ROOT / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {part.split("[")[0] for part in inner} <= names, f"{found}: {path} has no {inner}"
