"""Cases of the official suite that need not pass, and why. `python -m tests.onnx.suite` asks for the deletion of those that do pass."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple


class Exclusion(NamedTuple):
    """Cases whose whole name matches `pattern`. Where `by_chance`, one that passes is no news."""

    pattern: str
    reason: str
    by_chance: bool = False


EXCLUSIONS = (
    Exclusion(r"test_bernoulli(_double|_seed)?(_expanded)?", "the result is drawn at random, by a generator that no standard names", True),
)


def excluded(name: str) -> Exclusion | None:
    """Why a case need not pass."""
    if name.startswith("test_image_decoder") and find_spec("PIL") is None:
        return Exclusion(name, "images are decoded by pillow, which is not installed: pip install pillow", True)
    return next((e for e in EXCLUSIONS if re.fullmatch(e.pattern, name)), None)
