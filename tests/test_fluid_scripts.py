"""Programs as fluid 1.8's users write them, unchanged but for the import: they run, or are refused with what to write instead.

A script whose first line begins with `# refused:` must end in an error that says so.
"""

import runpy
from pathlib import Path

import pytest

import fluidx as fx

SCRIPTS = sorted((Path(__file__).parent / "fluid_scripts").glob("*.py"))


def refusal(script):
    first = script.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("# refused: ") if first.startswith("# refused: ") else ""


@pytest.fixture
def fresh(monkeypatch):
    """What a new process begins with: default programs, a scope, names, and two CPU places."""
    monkeypatch.setenv("CPU_NUM", "2")
    with fx.program_guard(fx.Program(), fx.Program()), fx.scope_guard(fx.Scope()), fx.unique_name.guard():
        yield


@pytest.mark.parametrize("script", [s for s in SCRIPTS if not refusal(s)], ids=lambda s: s.stem)
def test_a_script_runs_unchanged(script, fresh):
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("script", [s for s in SCRIPTS if refusal(s)], ids=lambda s: s.stem)
def test_a_script_that_cannot_run_is_told_what_to_write(script, fresh):
    with pytest.raises((fx.FluidxError, AttributeError, ImportError)) as error:
        runpy.run_path(str(script), run_name="__main__")
    assert refusal(script) in str(error.value)


def test_the_page_for_users_of_fluid_says_how_many_run():
    run = sum(not refusal(s) for s in SCRIPTS)
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text(encoding="utf-8")
    assert f"Of {len(SCRIPTS)} programs" in page and f"{run} run after changing the import. The other {len(SCRIPTS) - run}" in page
