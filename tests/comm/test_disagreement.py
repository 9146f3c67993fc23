"""Ranks that meet in C and ranks that meet in Python say a disagreement in the same words."""

import re
from pathlib import Path

from fluidx import native
from fluidx.comm import disagreement

SOURCE = Path(native.__file__).parent / "src" / "meet.c"
TEXTS = [
    disagreement.other_call(0, "A", 1, "B"),
    disagreement.other_count(0, 1, "W", 2, 3),
    disagreement.other_type(0, "A", 1, "W", "B"),
    disagreement.other_message(0, "A", 1, "B"),
]


def test_c_has_the_texts_of_python():
    formats = re.findall(r'SAY\(team, "(ranks disagree: [^"]*)"', SOURCE.read_text())
    found = [re.sub(r"%(\.\*)?(lld|d|s)", "_", text) for text in formats]
    wanted = [re.sub(r"\b(\d|A|B|W)\b", "_", str(disagreement.disagreement(text, 0))) for text in TEXTS]
    assert found == wanted


def test_the_error_names_the_rank():
    assert disagreement.disagreement("rank 0 is in A, rank 1 in B", 1).rank == 1
