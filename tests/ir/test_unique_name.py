"""Fresh names: one function for each use, and no name that is taken."""

from hypothesis import given
from hypothesis import strategies as st

from fluidx.ir import unique_name
from fluidx.ir.unique_name import UnusedNames, generate, unused

bases = st.sampled_from(["w", "w_1", "x", "w_1_1"])
numbered = "_{}".format


@given(st.sets(st.sampled_from(["w", "w_1", "w_2", "x_1", "w_1_1"])), st.lists(bases, max_size=12))
def test_a_search_that_goes_on_finds_what_a_new_one_finds(taken, asked):
    one, other = set(taken), set(taken)
    names = UnusedNames(one.__contains__, numbered)
    for base in asked:
        found = names(base)
        assert found not in one and found == unused(base, other, numbered)
        one.add(found)
        other.add(found)


@given(st.lists(st.tuples(bases, st.booleans()), max_size=12))
def test_names_that_are_given_up_are_found_again(asked):
    taken = {"w", "x"}
    names = UnusedNames(taken.__contains__, numbered)
    for base, renamed in asked:
        found = names(base)
        assert found not in taken
        if not renamed:
            taken.add(found)


def test_the_last_name_given_up_makes_the_search_begin_anew():
    taken = {"w", "w_1", "w_2"}
    names = UnusedNames(taken.__contains__, numbered)
    assert names("w") == "w_3"
    taken.discard("w_1")
    assert names("w") == "w_1"  # nobody took w_3


def test_numbered_names_never_are_the_base():
    names = UnusedNames({"y_1"}.__contains__, numbered, numbered=True)
    assert [names("x"), names("y")] == ["x_1", "y_2"]


def test_keys_count_on_over_names_that_are_taken():
    with unique_name.guard():
        assert [generate("fc", {"fc_0", "fc_2"}.__contains__) for _ in range(2)] == ["fc_1", "fc_3"]
        assert generate("fc") == "fc_4"
    with unique_name.guard("a_"):
        assert generate("fc", {"a_fc_0"}.__contains__) == "a_fc_1"
