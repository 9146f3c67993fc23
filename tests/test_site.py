"""The documentation as it is built: every page in a browser, wide and narrow, light and dark."""

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fluidx as fx

pytest.importorskip("material", reason="builds the documentation (pip install -e '.[docs]')")

QUIET = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the documentation, built once for all workers of pytest. `--strict` fails at a link or an anchor that is not there."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=QUIET)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


TOO_WIDE = """[
  ...(document.documentElement.scrollWidth > innerWidth ? ["the page"] : []),
  ...[...document.querySelectorAll(".md-content pre > code, .md-content .md-typeset__scrollwrap")]
    .filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => `${e.tagName}: ${e.innerText.slice(0, 60)}`),
]"""
PARTS = 4  # of the pages, for as many workers


@pytest.mark.parametrize("part", range(PARTS))
def test_pages_fit_and_run_and_load_nothing_from_elsewhere(site, browser, part):
    wrong = []
    for page in [p for p in sorted(site.rglob("*.html")) if p.name != "404.html"][part::PARTS]:  # that one is for a server
        browser.open(page, width=1300, dark=True)
        wide = browser.run(TOO_WIDE)
        browser.resize(900)
        outside = [r for r in browser.requests if not r.startswith(("file:", "data:"))]
        if found := [*wide, *browser.run(TOO_WIDE), *browser.errors, *outside]:
            wrong.append((str(page.relative_to(site)), found))
    assert wrong == []


def test_pictures_of_the_gallery_are_drawn_to_one_scale(site, browser):
    browser.open(site / "gallery.html", width=900)
    drawn = "[...document.querySelectorAll('.gallery img')].map((e) => e.width / e.naturalWidth)"
    for width in (900, 1300, 1900):
        browser.resize(width)
        assert set(browser.run(drawn)) == {1}


def test_what_is_copied_has_the_lines_of_the_page(site, browser):
    browser.open(site / "tutorial.html", width=900)
    copied = """[...document.querySelectorAll("pre > code")].map((e) => {
      e.setAttribute("data-md-copying", "");
      return [e.innerText.trim(), e.textContent.trim()];
    })"""
    blocks = browser.run(copied)
    assert blocks and [a for a, b in blocks if a != b] == []


def test_a_session_in_python_is_copied_without_prompts_and_answers(site, browser):
    browser.open(site / "api" / "layers.html")
    copied = """(() => {
      const code = [...document.querySelectorAll("pre > code")].find((e) => e.textContent.includes(">>> "));
      code.setAttribute("data-md-copying", "");
      return code.innerText;
    })()"""
    compile(browser.run(copied), "copied", "exec")


def test_the_search_knows_every_layer(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {doc["location"] for doc in index["docs"]}
    assert [name for name in fx.layers.__all__ if not {f"api/{page}.html#{name}" for page in ("layers", "lr_scheduler")} & found] == []


@pytest.mark.parametrize("link, right", [("a.md#there", True), ("a.md#nowhere", False), ("b.md", False)])
def test_make_docs_refuses_a_dead_link(tmp_path, link, right):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"# There\n\n[to it]({link})\n")
    validation = re.search(r"^validation:.*?\n(?=\n)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: small\ntheme: mkdocs\n{validation}\nnav: [a.md]\n")
    command = re.search(r"bin/(mkdocs build .*)", (ROOT / "Makefile").read_text(encoding="utf-8"))[1].split()
    done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, env=QUIET)
    assert (done.returncode == 0) == right, done.stderr
    assert ("contains a link" in done.stderr) != right


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
