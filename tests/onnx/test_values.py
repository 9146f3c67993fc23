"""Models of sequences, optionals and strings as programs: what the official cases expect, and what the specification says."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx", minversion="1.23")

from fluidx.onnx import OnnxError  # noqa: E402

from . import suite  # noqa: E402


def model(text, opset=22):
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "ai.onnx.ml" : 3]>{text}')


def load(text, opset=22):
    return fx.onnx.load(model(text, opset))


def texts(*values):
    return np.array(values, object)


def ran(loaded, *feed):
    """The outputs of a loaded model for inputs in order; its program is read back from its text first."""
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    program = fx.Program.parse_from_string(str(loaded.program))
    assert program == loaded.program
    fed = {v.name: value for v, value in zip(loaded.feeds, feed, strict=True)}
    return exe.run(program, feed=fed, fetch_list=[v.name for v in loaded.fetches], scope=scope)


# -- the official cases --------------------------------------------------------------------------------------------------------

FILES = ("identity", "if_", "loop", "sequenceinsert", "splittosequence", "sequence_map", "optionalgetelement", "optionalhaselement",
         "string_concat", "string_split", "stringnormalizer", "regex_full_match", "equal")  # fmt: skip


def _beyond_tensors(graph):
    kinds = {(i.type.WhichOneof("value"), i.type.tensor_type.elem_type) for i in (*graph.input, *graph.output)}
    made = ("Sequence", "SplitToSequence", "Optional", "String", "Regex")
    return any(k != "tensor_type" or t == onnx.TensorProto.STRING for k, t in kinds) or any(p.op_type.startswith(made) for p in graph.node)


def check_as_program(case):
    loaded = fx.onnx.load(suite.model_of(case))
    for inputs, outputs in suite.data_of(case):
        for got, want in zip(ran(loaded, *inputs), outputs, strict=True):
            assert suite.same(got, want, case.rtol, case.atol) == "", case.name


@pytest.mark.parametrize("file", [*FILES, "simple"])
def test_official_cases_run_as_programs(file):
    cases = suite.other_cases(file) if file in suite.OTHERS else suite.node_cases(file)
    some = [c for c in cases.values() if _beyond_tensors(suite.model_of(c).graph)]
    assert some
    for case in some:
        check_as_program(case)


# -- sequences -----------------------------------------------------------------------------------------------------------------


def test_a_fed_sequence_is_edited_at_computed_positions():
    loaded = load("""
        g (seq(float[n]) s, float[n] x, int64 k) => (seq(float[n]) more, seq(float[n]) less, float[n] at, int64 many, float[m] all) {
            more = SequenceInsert (s, x, k)
            less = SequenceErase (s, k)
            at = SequenceAt (s, k)
            many = SequenceLength (more)
            all = ConcatFromSequence <axis = 0> (more)
        }""")
    assert [str(v.desc.type) for v in loaded.feeds] == ["seq<f32[-1]>", "f32[n]", "i64[]"]
    s, x = [np.float32([1]), np.float32([2, 3]), np.float32([4])], np.float32([9, 9])
    more, less, at, many, all_ = ran(loaded, s, x, np.array(-2))
    assert [v.tolist() for v in more] == [[1], [9, 9], [2, 3], [4]] and [v.tolist() for v in less] == [[1], [4]]
    assert at.tolist() == [2, 3] and many == 4 and all_.tolist() == [1, 9, 9, 2, 3, 4]


def test_known_and_computed_elements_make_one_sequence_which_is_called_as_the_output_is():
    loaded = load("""
        g (float[2] x, int64 k) => (seq(float[2]) s, float[2] y, seq(float[2]) none) {
            c = Constant <value_floats = [1.0, 2.0]> ()
            s = SequenceConstruct (c, x)
            y = SequenceAt (s, k)
            none = SequenceEmpty ()
        }""")
    assert [v.name for v in loaded.fetches] == ["s", "y", "none"]
    s, y, none = ran(loaded, np.float32([5, 6]), np.array(0))
    assert [v.tolist() for v in s] == [[1, 2], [5, 6]] and y.tolist() == [1, 2] and none == []


def test_a_tensor_of_open_size_is_cut_and_trained():
    # y = sum of (w * part k) over the parts of two rows each: dy/dw is the sum of the rows of part k
    loaded = load("""
        g (float[n, 2] x, int64 k) => (float y) <float[2] w = {1, 1}> {
            two = Constant <value_int = 2> ()
            scaled = Mul (x, w)
            parts = SplitToSequence (scaled, two)
            part = SequenceAt (parts, k)
            y = ReduceSum <keepdims = 0> (part)
        }""", 18)  # fmt: skip
    with fx.program_guard(loaded.program, loaded.startup):
        (g,) = fx.gradients(loaded.fetches, loaded.parameters)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    x = np.arange(10, dtype="float32").reshape(5, 2)
    for k, rows in enumerate((x[:2], x[2:4], x[4:])):
        y, found = exe.run(loaded.program, feed={"x": x, "k": np.array(k)}, fetch_list=[*loaded.fetches, g], scope=scope)
        assert y == rows.sum() and found.tolist() == rows.sum(0).tolist()


def test_a_loop_of_known_length_edits_a_fed_sequence():
    loaded = load("""
        g (seq(float[n]) s, float[n] x) => (seq(float[n]) t) {
            three = Constant <value = int64 {3}> ()
            t = Loop (three, "", s) <body = b (int64 k, bool c, seq(float[n]) u) => (bool d, seq(float[n]) v) {
                d = Identity (c)
                v = SequenceInsert (u, x)
            }>
        }""")
    (t,) = ran(loaded, [np.float32([1])], np.float32([2, 3]))
    assert [v.tolist() for v in t] == [[1], [2, 3], [2, 3], [2, 3]]


# -- optionals -----------------------------------------------------------------------------------------------------------------


def test_an_optional_is_asked_and_opened():
    loaded = load("""
        g (optional(seq(float[n])) o, float[2] x) => (bool has, bool sure, bool not, optional(float[2]) nothing) {
            has = OptionalHasElement (o)
            held = Optional (x)
            sure = OptionalHasElement (held)
            not = OptionalHasElement ()
            nothing = Optional <type = float[2]> ()
        }""")
    x = np.float32([1, 2])
    assert [v.tolist() if v is not None else v for v in ran(loaded, None, x)] == [False, True, False, None]
    assert ran(loaded, [x], x)[0]


# -- strings -------------------------------------------------------------------------------------------------------------------


def test_fed_and_known_strings_are_moved_compared_and_chosen():
    loaded = load("""
        g (string[n] t, int64[2] k) => (string[m] all, string[2] two, bool[n] same, string[n] z) {
            known = Constant <value_strings = ["a", "ä"]> ()
            one = Constant <value_strings = ["a"]> ()
            all = Concat <axis = 0> (known, t)
            two = Gather (all, k)
            same = Equal (t, one)
            marked = StringConcat (t, one)
            z = Where (same, marked, t)
        }""")
    all_, two, same, z = ran(loaded, texts("b", "a", ""), np.array([1, 4]))
    assert all_.tolist() == ["a", "ä", "b", "a", ""] and two.tolist() == ["ä", ""]
    assert same.tolist() == [False, True, False] and z.tolist() == ["b", "aa", ""]


def test_strings_are_cut_read_as_numbers_and_written():
    loaded = load("""
        g (string[n] t) => (float[n] sums, string[n] said) {
            parts, count = StringSplit <delimiter = "+"> (t)
            numbers = Cast <to = 1> (parts)
            last = Constant <value_ints = [-1]> ()
            sums = ReduceSum <keepdims = 0> (numbers, last)
            whole = Cast <to = 7> (sums)
            said = Cast <to = 8> (whole)
        }""")
    sums, said = ran(loaded, texts("1.5+2", "-3+0"))
    assert sums.tolist() == [3.5, -3] and said.tolist() == ["3", "-3"]


# -- maps, and the classifiers that give them ----------------------------------------------------------------------------------------


def classifier(labels, coefficients, how):
    """What converters write for a scaled linear classifier: its label, and a map of the shares of classes for each row."""
    kind = "int64s" if isinstance(labels[0], int) else "strings"
    said, listed = kind[:-1], ", ".join(str(v) if kind == "int64s" else f'"{v}"' for v in labels)
    held = f"coefficients = {coefficients}, intercepts = {[0.5] * (len(coefficients) // 2)}"
    return f"""
        g (float[n, 2] x) => ({said}[n] label, seq(map({said}, float)) shares) {{
            v = ai.onnx.ml.Scaler <offset = [1.0, 0.0], scale = [1.0, 2.0]> (x)
            label, p = ai.onnx.ml.LinearClassifier <classlabels_{kind.replace("64", "")} = [{listed}], {held}, post_transform = "{how}"> (v)
            q = ai.onnx.ml.Normalizer <norm = "L1"> (p)
            shares = ai.onnx.ml.ZipMap <classlabels_{kind} = [{listed}]> (q)
        }}"""


POINTS = np.float32([[2, 1], [0, -1], [3, 0.5], [1, 0]])
SCALED = (POINTS - [1, 0]) * [1, 2]


def test_a_classifier_of_many_classes_gives_labels_and_maps():
    label, shares = ran(load(classifier([4, 9, 2], [1.0, 2.0, -1.0, 0.0, 0.5, -1.0], "SOFTMAX")), POINTS)
    scores = SCALED @ np.array([[1, -1, 0.5], [2, 0, -1]]) + 0.5
    want = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    assert label.tolist() == [(4, 9, 2)[k] for k in scores.argmax(1)] and [list(s) for s in shares] == [[4, 9, 2]] * 4
    # float32 against float64, of sums of two terms and one exponential
    np.testing.assert_allclose([list(s.values()) for s in shares], want, rtol=1e-5)


def test_a_classifier_of_two_classes_has_one_score():
    label, shares = ran(load(classifier(["no", "yes"], [1.0, -2.0], "LOGISTIC")), POINTS)
    scores = SCALED @ [1, -2] + 0.5
    assert label.tolist() == ["yes" if s > 0 else "no" for s in scores]
    np.testing.assert_allclose([s["yes"] for s in shares], 1 / (1 + np.exp(-scores)), rtol=1e-5)  # as above


def test_a_linear_model_is_trained():
    # the sum of x @ w + b, 2 targets: its gradient is the sum of the rows of x for each target, and the number of rows
    loaded = load("""
        g (float[n, 2] x) => (float[n, 2] y) {
            y = ai.onnx.ml.LinearRegressor <targets = 2, coefficients = [1.0, 2.0, 3.0, 4.0], intercepts = [5.0, 6.0]> (x)
        }""")
    with fx.program_guard(loaded.program, loaded.startup):
        grads = fx.gradients(loaded.fetches, loaded.parameters)
    exe, scope = fx.Executor(fx.CPUPlace()), fx.Scope()
    exe.run(loaded.startup, scope=scope)
    y, w, b = exe.run(loaded.program, feed={"x": POINTS}, fetch_list=[*loaded.fetches, *grads], scope=scope)
    assert y.tolist() == (POINTS @ np.float32([[1, 3], [2, 4]]) + [5, 6]).tolist()
    assert w.tolist() == [[6, 6], [0.5, 0.5]] and b.tolist() == [4, 4]


def test_maps_are_fed():
    loaded = load("""
        g (map(int64, float) m, map(string, float) named) => (float[1, k] dense, string[1, 4] places, float[1, 3] row) {
            dense = ai.onnx.ml.CastMap <cast_to = "TO_FLOAT"> (m)
            places = ai.onnx.ml.CastMap <cast_to = "TO_STRING", map_form = "SPARSE", max_map = 4> (m)
            row = ai.onnx.ml.DictVectorizer <string_vocabulary = ["b", "z", "a"]> (named)
        }""")
    dense, places, row = ran(loaded, {3: np.float32(1.5), 1: np.float32(2)}, {"a": np.float32(7), "b": np.float32(8)})
    assert dense.tolist() == [[2, 1.5]] and places.tolist() == [["0", "2.000000", "0", "1.500000"]] and row.tolist() == [[8, 0, 7]]


def test_features_are_looked_up_filled_in_and_compared():
    loaded = load("""
        g (string[n] t, float[n, 2] x, int64[n] k)
        => (int64[n] at, string[n] name, float[n, 3] hot, float[n, 2] full, float[n, 2] over, float[n, 1] first) {
            at = ai.onnx.ml.LabelEncoder <keys_strings = ["b", "a"], values_int64s = [7, 8], default_int64 = 9> (t)
            name = ai.onnx.ml.CategoryMapper <cats_strings = ["one", "two"], cats_int64s = [1, 2], default_string = "many"> (k)
            hot = ai.onnx.ml.OneHotEncoder <cats_int64s = [2, 5, 1]> (k)
            full = ai.onnx.ml.Imputer <imputed_value_floats = [7.0, 8.0], replaced_value_float = 0.0> (x)
            over = ai.onnx.ml.Binarizer <threshold = 1.5> (full)
            zero = Constant <value_ints = [0]> ()
            first = ai.onnx.ml.ArrayFeatureExtractor (x, zero)
        }""")
    at, name, hot, full, over, first = ran(loaded, texts("a", "z", "b"), np.float32([[1, 0], [0, 2], [3, 4]]), np.array([1, 3, 2]))
    assert at.tolist() == [8, 9, 7] and name.tolist() == ["one", "many", "two"]
    assert hot.tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0]] and first.tolist() == [[1], [0], [3]]
    assert full.tolist() == [[1, 8], [7, 2], [3, 4]] and over.tolist() == [[0, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_rows_are_normalized_but_those_of_length_zero(norm):
    loaded = load(f'g (float[n, 2] x) => (float[n, 2] y) {{ y = ai.onnx.ml.Normalizer <norm = "{norm}"> (x) }}')
    (y,) = ran(loaded, np.float32([[3, 4], [0, 0]]))
    assert y[1].tolist() == [0, 0]
    np.testing.assert_allclose(y[0], np.array([3, 4]) / {"MAX": 4, "L1": 7, "L2": 5}[norm], rtol=1e-6)  # a rounding or two of float32


# -- what is refused -----------------------------------------------------------------------------------------------------------


def test_branches_read_sequences():
    loaded = load("""
        g (bool c, seq(float[n]) s) => (int64 y) {
            y = If (c) <then_branch = yes () => (int64 a) { a = SequenceLength (s) }, else_branch = no () => (int64 b) {
                b = Constant <value = int64 {7}> () }>
        }""")
    s = [np.zeros(2, "float32"), np.zeros(3, "float32")]
    assert [ran(loaded, np.array(c), s)[0] for c in (True, False)] == [2, 7]


def test_shapes_are_of_tensors_and_feeds_of_the_declared_type():
    m = model("g (seq(float[2]) s) => (float[m] y) { y = ConcatFromSequence <axis = 0> (s) }")
    with pytest.raises(OnnxError, match=r"input 's': shapes gives it the sizes \[3\], but it is seq<f32\[2\]>; leave it out of shapes"):
        fx.onnx.load(m, shapes={"s": [3]})
    with pytest.raises(fx.FeedError, match=r"variable 's' is declared seq<f32\[2\]>, in the feed element 1 is f32\[3\], expected f32\[2\]"):
        ran(fx.onnx.load(m), [np.zeros(2, "float32"), np.zeros(3, "float32")])
