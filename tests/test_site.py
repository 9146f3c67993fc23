"""The documentation as it is built: every page in a browser, wide and narrow, light and dark."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fluidx as fx

pytest.importorskip("material", reason="builds the documentation (pip install -e '.[docs]')")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the documentation, built once for all workers of pytest. `--strict` fails at a link or an anchor that is not there."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_only_pages_are_published(site):
    assert [str(p.relative_to(site)) for p in site.rglob("*.py*")] == []


def test_the_version_stands_beside_the_name(site, browser):
    browser.open(site / "tutorial.html")
    assert browser.run("document.querySelector('.md-header__topic').innerText.trim()") == f"fluidx {fx.__version__}"


def test_a_search_finds_from_disk(site, browser):
    browser.open(site / "index.html")
    browser.run(
        """{
        document.querySelector("[data-md-toggle=search]").click();
        const input = document.querySelector(".md-search__input");
        input.focus();
        input.value = "reduce_scatter";
        input.dispatchEvent(new Event("input", { bubbles: true }));
        input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
        }"""
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map((a) => a.getAttribute('href'))"
    end = time.monotonic() + 20
    while not (found := browser.run(links)) and time.monotonic() < end:
        browser.run("new Promise((done) => setTimeout(done, 50))")
    assert any(link.endswith("#reduce_scatter") for link in found), found
    assert browser.errors == []


def test_colours_can_be_switched(site, browser):
    shown = "getComputedStyle(document.body).backgroundColor"
    browser.open(site / "index.html")
    light = browser.run(shown)
    browser.run("document.querySelector('.md-header__option label:not([hidden])').click()")
    assert browser.run(shown) != light
    browser.open(site / "index.html", dark=True)
    assert browser.run(shown) != light
