"""Every message that a wrong feed or fetch gives, whole."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fluidx as fx

L = fx.layers
HERE = re.escape(f'"{Path(__file__)}"')


@pytest.fixture
def program():
    x = fx.data("x", [-1, 2], "float32")
    label = fx.data("label", [-1, 1], "int64")
    small = fx.data("small", [-1], "int8")
    w = L.create_global_var([2], 1.0, "float32", persistable=True, name="w")
    fx.default_startup_program()
    return {"y": L.elementwise_add(x, w), "label": label, "small": small}


def message(error, feed=None, fetch=("x",), startup=True, program=None, exe=None):
    exe = exe or fx.Executor()
    if startup:
        exe.run(fx.default_startup_program())
    with pytest.raises(error) as caught:
        exe.run(program, feed=feed, fetch_list=list(fetch))
    # the line number is that of the test, not part of the message
    return re.sub(rf"{HERE}, line \d+, in \w+", "FILE:LINE", str(caught.value))


X = np.ones((2, 2), "float32")


def test_a_missing_feed(program):
    assert message(fx.FeedError, {}, [program["y"]]).startswith(
        "feed is missing variable 'x' (f32[-1,2]), which op elementwise_add reads\n  written at FILE:LINE"
    )
    assert message(fx.FeedError, None) == "feed is missing variable 'x' (f32[-1,2]), which is fetched"


def test_an_unknown_feed(program):
    assert message(fx.FeedError, {"xs": X}) == "feed names 'xs', which program main does not declare; did you mean 'x'?"
    assert message(fx.FeedError, {"images": X}) == "feed names 'images', which program main does not declare; it takes: label, small, x"


def test_a_misshaped_feed(program):
    text = "variable 'x' is declared f32[-1,2], the feed has shape"
    assert message(fx.FeedError, {"x": np.ones((2, 3), "float32")}) == f"{text} [2, 3]"
    assert message(fx.FeedError, {"x": np.ones(2, "float32")}) == f"{text} [2]; feed x[None], a batch of one"
    assert message(fx.FeedError, {"x": 1.0}) == f"{text} []"


def test_a_feed_of_the_wrong_dtype(program):
    large = {"x": np.full((2, 2), 1e300)}
    assert message(fx.FeedError, large) == "variable 'x' is declared f32[-1,2], the feed holds 1e+300, which float32 cannot"
    assert message(fx.FeedError, {"x": np.ones((2, 2), complex)}) == (
        "variable 'x' is declared f32[-1,2], the feed has dtype complex128; convert it with .astype('float32')"
    )
    assert message(fx.FeedError, {"label": [[1.5]]}) == (
        "variable 'label' is declared i64[-1,1], the feed has dtype float64; convert it with .astype('int64')"
    )
    assert message(fx.FeedError, {"small": [1, 300]}) == "variable 'small' is declared i8[-1], the feed holds 300, which int8 cannot"


def test_a_feed_that_is_no_array(program):
    text = "variable 'x' is declared f32[-1,2], the feed"
    assert message(fx.FeedError, {"x": "abc"}) == f"{text} holds <U3 (rows of unequal length, or text?)"
    assert message(fx.FeedError, {"x": {1, 2}}) == f"{text} holds object (rows of unequal length, or text?)"
    assert message(fx.FeedError, {"x": [[1.0], [1.0, 2.0]]}).startswith(f"{text} is not an array: ")
    assert message(fx.FeedError, [X]) == "feed must be a dict of name to array, got list"


def test_plain_numbers_take_the_declared_dtype(program):
    exe = fx.Executor()
    exe.run(fx.default_startup_program())
    assert exe.run(feed={"x": [[1, 2]]}, fetch_list=[program["y"]])[0].tolist() == [[2, 3]]
    assert exe.run(feed={"small": [1, -5]}, fetch_list=["small"])[0].tolist() == [1, -5]


def test_an_unknown_fetch(program):
    assert (
        message(fx.FeedError, {"x": X}, ["labels"])
        == "fetch_list names 'labels', which program main does not declare; did you mean 'label'?"
    )
    assert message(fx.FeedError, {"x": X}, [3]) == "fetch_list takes Variables and names, got int: 3"


def test_a_fetch_that_no_operator_computes(program):
    fx.default_main_program().global_block().create_var("ghost", [2], "float32")
    assert message(fx.ProgramError, {"x": X}, ["ghost"]) == "variable 'ghost' has no value to fetch: no operator defines it"


def test_state_without_startup(program):
    assert message(fx.NotInitializedError, {"x": X}, [program["y"]], startup=False) == (
        "w has no value in this scope; run the startup program first: exe.run(startup), or run_startup() on many ranks"
    )
    with pytest.raises(fx.FeedError) as error:
        fx.global_scope().get("w")
    assert str(error.value) == "the scope holds no variable 'w'; it holds: none"


def test_state_of_another_shape(program):
    fx.global_scope().set("w", np.ones(3, "float32"))
    assert message(fx.FeedError, {"x": X}, [program["y"]], startup=False) == (
        "variable 'w' is declared f32[2], this scope holds f32[3]; run the startup program again"
    )
    with pytest.raises(fx.FeedError) as error:
        fx.global_scope().set("w", np.ones(3))
    assert str(error.value) == "variable 'w' is float32[3] in this scope, the new value is float64[3]"


def test_sizes_that_do_not_fit_each_other():
    a, b = fx.data("a", [-1, 2], "float32"), fx.data("b", [-1, 2], "float32")
    y = L.elementwise_add(a, b)
    assert message(fx.FeedError, {"a": np.ones((2, 2), "float32"), "b": np.ones((3, 2), "float32")}, [y]) == (
        "op elementwise_add: axis 0 of 'a' is 2 and axis 0 of 'b' is 3; the program gives these open axes one size\n"
        '  feed one size, or declare the axes of the data with two names, as in fx.data(name, ["rows", ...])\n'
        "  in %elementwise_add_0.tmp_0 = elementwise_add(%a, %b)\n  written at FILE:LINE"
    )
    c, d = fx.data("c", ["n", 2], "float32"), fx.data("d", ["m", 2], "float32")
    text = message(fx.ProgramError, {"c": np.ones((2, 2), "float32"), "d": np.ones((3, 2), "float32")}, [L.elementwise_add(c, d)])
    assert "in op elementwise_add, with the sizes that were fed\n  written at FILE:LINE" in text


def test_a_closed_executor(program):
    exe = fx.Executor()
    exe.close()
    exe.close()
    with pytest.raises(fx.ExecutionError) as error:
        exe.run()
    assert str(error.value) == "this executor is closed; make a new one"


def test_things_that_are_no_program(program):
    assert message(fx.FeedError, program="main") == "run takes a Program, got str"


def parallel(**options):
    x, y = fx.data("x", [-1, 2], "float32"), fx.data("y", [-1, 2], "float32")
    z = L.elementwise_add(x, y)
    t = fx.DistributeTranspiler("data_parallel")
    t.transpile(trainers=2)
    return fx.ParallelExecutor(t, **options), z


def test_feeds_and_fetches_of_many_ranks():
    exe, z = parallel(uneven="error")
    with exe:
        exe.run_startup()
        for error, feed, fetch, text in [
            (fx.FeedError, {"x": X}, [z], "feed is missing variable 'y' (f32[-1,2]), which op elementwise_add reads"),
            (fx.FeedError, {"x": X, "yy": X}, [z], "feed names 'yy', which program main does not declare; did you mean 'y'?"),
            (
                fx.FeedError,
                {"x": X},
                ["zz"],
                "fetch_list names 'zz', which program main does not declare; it declares: elementwise_add_0.tmp_0, x, y",
            ),
            (
                fx.FeedError,
                {"x": X, "y": np.ones((3, 2), "float32")},
                [z],
                "feeds that are split among the ranks must have the same number of rows, or a multiple: 'x' has 2, 'y' has 3",
            ),
            (
                fx.FeedError,
                {"x": X, "y": np.ones((4, 2), "float32")},
                [z],
                "op elementwise_add: axis 0 of 'x' is 2 and axis 0 of 'y' is 4; the program gives these open axes one size",
            ),
            (
                fx.FeedError,
                {"x": X[:1], "y": X[:1]},
                [z],
                "a batch of 1 rows does not divide among 2 ranks; feed a multiple of 2, or choose uneven='weight', 'pad' or 'drop' "
                "when making the ParallelExecutor",
            ),
            (
                fx.FeedError,
                {"x": X[:0], "y": X[:0]},
                [z],
                "variable 'x' is declared f32[-1,2], the feed has shape [0, 2]: a batch of no rows; leave it out",
            ),
        ]:
            with pytest.raises(error) as caught:
                exe.run(feed=feed, fetch_list=fetch)
            assert str(caught.value).split("\n")[0] == text
        # none of these ran anything, so the executor goes on
        assert exe.run(feed={"x": X, "y": X}, fetch_list=[z])[0].tolist() == [[2, 2], [2, 2]]
    with pytest.raises(fx.ExecutionError, match="^this executor is closed; make a new one$"):
        exe.run(feed={"x": X, "y": X}, fetch_list=[z])


def test_places_and_policies_of_many_ranks():
    for options, text in [
        ({"places": fx.cpu_places(3)}, "the program was transpiled for 2 ranks, 3 places were given"),
        ({"places": fx.cpu_places(1)}, "the program was transpiled for 2 ranks, 1 place was given"),
        ({"uneven": "cut"}, "unknown policy uneven='cut'; there are: drop, error, pad, weight"),
    ]:
        with fx.program_guard(fx.Program(), fx.Program()), pytest.raises(fx.ExecutionError) as error:
            parallel(**options)
        assert str(error.value) == text
    for make, text in [
        (lambda: fx.process_places(0), "places: the number of places must be an integer above 0, got int: 0"),
        (lambda: fx.cpu_places("two"), "places: the number of places must be an integer above 0, got str: 'two'"),
        (lambda: fx.process_places(2, "m.ops"), "process_places: imports must be a list of modules, got str: 'm.ops'; give ['m.ops']"),
    ]:
        with pytest.raises(fx.ProgramError) as error:
            make()
        assert str(error.value).split("\n")[0] == text
    with pytest.raises(fx.ExecutionError) as error:
        fx.ParallelExecutor(7)
    assert str(error.value) == (
        "ParallelExecutor takes the DistributeTranspiler that transpiled the program, ParallelExecutor(t, places=fx.cpu_places(4)), "
        "or one ProgramPair for each rank; got int"
    )


def test_bfloat16_of_a_file_of_numpy_is_viewed(tmp_path):
    """NumPy's files say of such numbers only that each has two bytes; 0x3F80 is 1."""
    np.save(tmp_path / "x.npy", np.ones((1, 2), ml_dtypes.bfloat16))
    read, main = np.load(tmp_path / "x.npy"), fx.Program()
    with fx.program_guard(main, fx.Program()):
        y = fx.layers.scale(fx.data("x", [-1, 2], "float32"), 2.0)
    exe = fx.Executor(fx.CPUPlace())
    with pytest.raises(fx.FeedError) as caught:
        exe.run(main, feed={"x": read}, fetch_list=[y])
    assert "holds bytes without a type, |V2, as NumPy's files keep bfloat16; give .view(ml_dtypes.bfloat16)" in str(caught.value)
    assert exe.run(main, feed={"x": read.view(ml_dtypes.bfloat16)}, fetch_list=[y])[0].tolist() == [[2, 2]]
