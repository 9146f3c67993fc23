"""The page in a browser: it draws without an error, opens and closes groups, finds, and tells about what is clicked."""

from __future__ import annotations

from pathlib import Path

import pytest

import fluidx as fx
from tests.view.test_page import residual, transpiled

HELP = """
const page = window.fluidxPage;
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const panes = () => all(".pane");
const boxes = (pane, title) => all(".node", pane).filter((n) => n.querySelector("text").textContent.startsWith(title));
const click = (node) => node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
const toggle = (node) => click(node.querySelector(".toggle text"));
const panel = () => document.getElementById("panel").innerText;
const type = (text) => { const s = document.getElementById("search"); s.value = text; s.dispatchEvent(new Event("input")); };
const enter = () => document.getElementById("search").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
"""


@pytest.fixture
def seen(browser, tmp_path):
    """What the body of a function gives that runs in the page about a program; the page has no errors and loads nothing."""

    def look(shown, script):
        browser.open(Path(fx.view.html(shown, tmp_path / "page.html")))
        got = browser.run(f"(() => {{ {HELP} {script} }})()")
        assert browser.errors == [] and len(browser.requests) == 1
        return got

    return look


def test_before_and_after_stand_side_by_side(seen):
    found = seen(
        transpiled(12),
        """
        const text = panes().map((p) => p.querySelector("h2").textContent);
        const reduced = panes().map((p) => page.panes()[panes().indexOf(p)].graph.ops.filter((o) => o.type === "all_reduce").length);
        click(document.querySelector("[data-mode=after]"));
        return { text, reduced, later: panes().length };
        """,
    )
    assert found["text"] == ["before: one device", "rank 0 (ranks 1-3 alike)"]
    assert found["reduced"][0] == 0 and found["reduced"][1] > 0
    assert found["later"] == 1


def test_a_group_opens_and_closes(seen):
    main, _ = residual(12)
    found = seen(
        main,
        """
        const count = () => boxes(document, "block ").length;
        const before = count();
        toggle(boxes(document, "12 × block")[0]);
        const opened = count();
        toggle(boxes(document, "block 3")[0]);
        const inside = all("[data-id^=o]").length;
        toggle(boxes(document, "12 × block")[0]);
        return { before, opened, inside, closed: count(), drawn: all(".edge").length };
        """,
    )
    assert (found["before"], found["opened"], found["closed"]) == (0, 12, 0)
    assert found["inside"] >= 5 and found["drawn"] > 5


def test_a_click_on_an_operator_tells_its_text_types_and_line(seen):
    main, _ = residual(1)
    found = seen(main, "click(boxes(document, 'mul')[0]); return panel();")
    assert "%fc_0.tmp_0: f32[-1,8] = mul(%x, %fc_0.w_0)" in found
    assert "f32[8,8]" in found and 'h = fx.layers.fc(x, 8, act="tanh")' in found


def test_search_opens_the_groups_above_what_it_finds(seen):
    main, _ = residual(12)
    found = seen(
        main,
        """
        type("b7_up");
        const hits = all("#found li").map((n) => n.firstChild.textContent);
        enter();
        return { hits, open: boxes(document, "block 8").length, panel: panel() };
        """,
    )
    assert found["hits"][0] == "b7_up"
    assert found["open"] > 0 and found["panel"].startswith("%b7_up")


def test_search_says_when_nothing_is_found(seen):
    main, _ = residual(1)
    found = seen(main, "type('no such name'); return document.getElementById('found').innerText;")
    assert found == "nothing has this name"


def test_the_life_of_a_parameter_is_marked_in_both_panes(seen):
    found = seen(
        transpiled(1),
        """
        page.follow("b0_up");
        const numbers = panes().map((p) => [...new Set(all(".badge text", p).map((t) => t.textContent))].sort().join(""));
        return { numbers, panel: panel() };
        """,
    )
    assert found["numbers"] == ["124", "1234"]
    assert "3 communication" in found["panel"]


def test_boxes_stand_in_the_box_of_their_group_and_not_upon_another(seen):
    found = seen(
        transpiled(12),
        """
        document.getElementById("expand").click();
        const wrong = [];
        for (const pane of page.panes()) {
          for (const node of pane.graph.nodes.values()) {
            const mine = (node.children || []).map((c) => [c, pane.boxes.get(c)]);
            const own = pane.boxes.get(node);
            const meet = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;
            const inside = (a, b) => a.x > b.x - 0.5 && a.y >= b.y && a.x + a.w < b.x + b.w + 0.5 && a.y + a.h <= b.y + b.h;
            for (const [c, b] of mine) {
              if (own && !inside(b, own)) wrong.push([c.title, "out"]);
              for (const [d, e] of mine) if (c !== d && meet(b, e)) wrong.push([c.title, d.title]);
            }
          }
        }
        return wrong;
        """,
    )
    assert found == []


def test_programs_without_operators_and_with_loops_are_drawn(seen):
    assert seen(fx.Program("empty"), "return panes().length;") == 1
    main = fx.Program("looped")
    with fx.program_guard(main, fx.Program()):
        i = fx.layers.fill_constant([1], "int64", 0)
        going = fx.layers.less_than(i, fx.layers.fill_constant([1], "int64", 3))
        loop = fx.layers.While(going)
        with loop.block():
            fx.layers.increment(i)
            fx.layers.less_than(i, fx.layers.fill_constant([1], "int64", 3), cond=going)
    found = seen(main, "click(boxes(document, 'while')[0]); return panel();")
    assert "increment" in found


def test_micro_batches_are_joined_to_their_backward(seen):
    main, startup = residual(2)
    t = fx.DistributeTranspiler(fx.strategies.micro_batches(3))
    t.transpile(program=main, startup_program=startup, trainers=2)
    found = seen(
        t,
        """
        const root = page.panes()[1].graph.root;
        return [...root.edges.values()].filter((e) => e.from.section === "forward" && e.to.section === "backward").length;
        """,
    )
    assert found > 0
