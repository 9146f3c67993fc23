"""A small seeded part of `make mutants`: nothing that the proof accepts is wrong, nothing right is refused."""

import subprocess
import sys
from pathlib import Path

from tests.sweep import examples

ROOT = Path(__file__).parents[2]


def run(*args):
    # a process of its own: the engine forks, and its watchdog is a signal
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--workers", "1", *args], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def test_no_mutant_that_is_accepted_is_wrong():
    assert "0 HOLES" in run("--count", str(examples(80, 120)), "--cases", str(examples(4, 6)))


def test_right_programs_are_accepted():
    assert "0 FALSE ALARMS" in run("--false-alarms", str(examples(1, 2)))
