"""FLUIDX_NATIVE decides what setup.py builds; no compiler is needed to ask it."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def extensions(monkeypatch):
    pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py", run_name="setup")["extensions"]


def test_unset_tries_and_forgives(extensions):
    (native,) = extensions({})
    assert native.name == "fluidx._native" and native.optional
    assert {Path(s).name for s in native.sources} >= {"module.c", "pool.c", "level_base.c", "level_v3.c", "level_v4.c"}


def test_1_makes_a_failure_an_error(extensions):
    (native,) = extensions({"FLUIDX_NATIVE": "1"})
    assert not native.optional


def test_0_builds_a_pure_package(extensions):
    assert extensions({"FLUIDX_NATIVE": "0"}) == []


def test_another_value_is_refused(extensions):
    with pytest.raises(SystemExit, match="FLUIDX_NATIVE: expected 0, 1 or nothing, found 'yes'"):
        extensions({"FLUIDX_NATIVE": "yes"})
