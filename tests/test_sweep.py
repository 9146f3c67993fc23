"""Parts of combinations: every element is met in a plain run, and all are with FLUIDX_SWEEP=1."""

from tests import sweep


def test_a_part_is_on_diagonals_and_meets_every_element(monkeypatch):
    monkeypatch.setattr(sweep, "ALL", False)
    assert sweep.some(2, "ab", [1, 2, 3]) == [("a", 1), ("a", 3), ("b", 2)]
    assert sweep.examples(3, 9) == 3
    three = sweep.some(3, range(10), range(3), range(2))
    assert len(three) == 20 and [{case[k] for case in three} for k in range(3)] == [{*range(10)}, {*range(3)}, {*range(2)}]


def test_all_are_taken_when_asked(monkeypatch):
    monkeypatch.setattr(sweep, "ALL", True)
    assert sweep.some(2, "ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert sweep.examples(3, 9) == 9


def test_elements_are_called_by_keys_names_or_their_text(monkeypatch):
    monkeypatch.setattr(sweep, "ALL", False)
    mark = sweep.swept(2, strategy={"first": 7, "second": 8}, n=[1, 2], make=[len, max]).mark
    assert mark.args[0] == "strategy, n, make"
    assert [(case.id, case.values) for case in mark.args[1]] == [
        ("first-1-len", (7, 1, len)), ("first-2-max", (7, 2, max)), ("second-1-max", (8, 1, max)), ("second-2-len", (8, 2, len)),
    ]  # fmt: skip
