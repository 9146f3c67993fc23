"""A sample of the official backend suite, of every operator; `make onnx-suite` runs all of it."""

import pytest

pytest.importorskip("onnx", minversion="1.23")

from . import suite
from .exclusions import excluded

# the expected values are made by NumPy as the cases are loaded, some of them by dividing by 0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EACH = 7  # of the cases of an operator the first, the eighth and so on


def check(cases):
    """Cases are taken at even distances, so that each variant of an operator is met: they stand in groups."""
    failed = {name: why for name in list(cases)[::EACH] if not excluded(name) and (why := suite.tried(cases[name]))}
    assert not failed


@pytest.mark.parametrize("file", suite.node_files())
def test_nodes(file):
    check(suite.node_cases(file))


@pytest.mark.parametrize("kind", [k for k in suite.OTHERS if k != "real"])
def test_models(kind):
    check(suite.other_cases(kind))
