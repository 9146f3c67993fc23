"""What a layer leaves in the two programs: names, parameter records, and the operators that give parameters their first values."""

import numpy as np
import pytest

import fluidx as fx
from fluidx import initializer
from fluidx.initializer import derive_seed


@pytest.fixture
def programs():
    main, startup = fx.Program("main"), fx.Program("startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        yield main, startup


def test_fc_names_its_variables_as_fluid_does(programs):
    main, startup = programs
    y = fx.layers.fc(fx.data("x", [-1, 8], "float32"), 4, act="relu")
    assert [op.type for op in main.ops] == ["mul", "elementwise_add", "relu"]
    assert [op.output_arg_names for op in main.ops] == [("fc_0.tmp_0",), ("fc_0.tmp_1",), ("fc_0.tmp_2",)]
    assert (y.name, y.shape) == ("fc_0.tmp_2", (-1, 4))
    assert [(p.name, p.shape) for p in main.all_parameters()] == [("fc_0.w_0", (8, 4)), ("fc_0.b_0", (4,))]
    assert [(op.type, op.output_arg_names) for op in startup.ops] == [("uniform_random", ("fc_0.w_0",)), ("fill_constant", ("fc_0.b_0",))]


def test_a_name_takes_the_place_of_the_counted_one(programs):
    y = fx.layers.fc(fx.data("x", [-1, 8], "float32"), 4, name="hidden")
    assert y.name == "hidden.tmp_1"
    assert [p.name for p in programs[0].all_parameters()] == ["hidden.w_0", "hidden.b_0"]


def test_a_second_layer_of_one_name_gets_parameters_of_its_own(programs):
    x = fx.data("x", [-1, 4], "float32")
    fx.layers.fc(fx.layers.fc(x, 4, name="h"), 4, name="h")
    assert [p.name for p in programs[0].all_parameters()] == ["h.w_0", "h.b_0", "h.w_1", "h.b_1"]


def test_counting_anew_in_one_program_does_not_reuse_a_name(programs):
    x = fx.data("x", [-1, 4], "float32")
    fx.layers.fc(x, 4)
    with fx.unique_name.guard():
        y = fx.layers.fc(x, 4)
    assert y.name == "fc_0.tmp_3"
    assert len(programs[0].all_parameters()) == 4


def test_the_record_of_a_parameter_holds_plain_values(programs):
    attr = fx.ParamAttr("w", initializer.Constant(0.5), 0.1, fx.regularizer.L2Decay(1e-4), trainable=False, need_clip=False)
    fx.layers.fc(fx.data("x", [-1, 8], "float32"), 4, param_attr=attr, bias_attr=False)
    (w,) = programs[0].all_parameters()
    assert dict(w.desc.attrs) == {"trainable": False, "learning_rate": 0.1, "regularizer": ("l2", 1e-4), "need_clip": False}
    assert (w.trainable, w.stop_gradient, w.persistable) == (False, True, True)
    assert programs[1].global_block().var("w").desc == w.desc


def test_what_a_parameter_attribute_may_be(programs):
    x = fx.data("x", [-1, 8], "float32")
    fx.layers.fc(x, 4, param_attr="shared", bias_attr=initializer.Constant(2.0))
    fx.layers.fc(x, 4, param_attr="shared", bias_attr=False)
    main, startup = programs
    assert [p.name for p in main.all_parameters()] == ["shared", "fc_0.b_0"]
    assert [op.output_arg_names for op in startup.ops] == [("shared",), ("fc_0.b_0",)]
    assert startup.ops[1].attr("value") == 2.0


def test_a_startup_program_shared_by_two_programs_initializes_once(programs):
    main, startup = programs
    fx.layers.fc(fx.data("x", [-1, 8], "float32"), 4)
    with fx.program_guard(fx.Program(), startup), fx.unique_name.guard():
        fx.layers.fc(fx.data("x", [-1, 8], "float32"), 4)
    assert len(startup.ops) == 2


def test_several_inputs_have_a_weight_each(programs):
    a, b = fx.data("a", [-1, 3], "float32"), fx.data("b", [-1, 5], "float32")
    fx.layers.fc([a, b], 4, param_attr=["wa", "wb"])
    assert [op.type for op in programs[0].ops] == ["mul", "mul", "sum", "elementwise_add"]
    assert [(p.name, p.shape) for p in programs[0].all_parameters()][:2] == [("wa", (3, 4)), ("wb", (5, 4))]


def test_batch_norm_keeps_its_statistics_as_parameters_that_are_not_trained(programs):
    main, startup = programs
    y = fx.layers.batch_norm(fx.data("x", [-1, 3, 8, 8], "float32"), act="relu")
    assert y.shape == (-1, 3, 8, 8)
    assert [(p.name, p.trainable) for p in main.all_parameters()] == [
        ("batch_norm_0.w_0", True), ("batch_norm_0.b_0", True), ("batch_norm_0.w_1", False), ("batch_norm_0.w_2", False)
    ]  # fmt: skip
    assert [op.attr("value") for op in startup.ops] == [1.0, 0.0, 0.0, 1.0]
    op = main.ops[0]
    assert op.output("MeanOut") == op.input("Mean") == ("batch_norm_0.w_1",)
    assert op.output("VarianceOut") == op.input("Variance") == ("batch_norm_0.w_2",)
    assert main.clone(for_test=True).ops[0].attr("is_test") is True


def test_a_filter_starts_normal_with_fluids_spread(programs):
    fx.layers.conv2d(fx.data("x", [-1, 4, 9, 9], "float32"), 6, 3)
    op = programs[1].ops[0]
    assert (op.type, op.attr("mean"), op.attr("std")) == ("gaussian_random", 0.0, (2.0 / (3 * 3 * 4)) ** 0.5)


def initial(init, shape, dtype="float32"):
    startup = fx.Program()
    with fx.program_guard(fx.Program(), startup):
        fx.layers.create_parameter(shape, dtype, name="p", default_initializer=init)
    (op,) = startup.ops
    return op


@pytest.mark.parametrize(
    "init, op_type, attrs",
    [
        (initializer.Constant(3), "fill_constant", {"value": 3.0}),
        (initializer.Uniform(-2, 3, seed=7), "uniform_random", {"min": -2.0, "max": 3.0, "seed": 7}),
        (initializer.Normal(1, 2, seed=7), "gaussian_random", {"mean": 1.0, "std": 2.0, "seed": 7}),
        (initializer.TruncatedNormal(seed=9), "truncated_gaussian_random", {"mean": 0.0, "std": 1.0, "seed": 9}),
        (initializer.Xavier(), "uniform_random", {"min": -(1.0**0.5), "max": 1.0**0.5}),
        (initializer.Xavier(uniform=False, fan_in=1, fan_out=7), "gaussian_random", {"std": 0.5}),
        (initializer.MSRA(uniform=False), "gaussian_random", {"std": 1.0}),
        (initializer.MSRA(fan_in=6), "uniform_random", {"max": 1.0}),
        (initializer.NumpyArrayInitializer(np.arange(8, dtype="float32").reshape(2, 4)), "assign_value", {"values": tuple(range(8))}),
    ],
    ids=repr,
)
def test_an_initializer_writes_one_operator(init, op_type, attrs):
    op = initial(init, [2, 4])
    assert (op.type, op.output_arg_names, op.attr("shape"), op.attr("dtype")) == (op_type, ("p",), (2, 4), "float32")
    for name, value in attrs.items():
        assert op.attr(name) == pytest.approx(value)  # square roots, to float64


def test_bilinear_weights_worked_by_hand():
    # k = 2: factor 1, center (2 - 1 - 1) / 2 = 0, so the line is 1 - |0/1 - 0|, 1 - |1/1 - 0| = 1, 0
    assert initial(initializer.Bilinear(), [1, 1, 2, 2]).attr("values") == (1.0, 0.0, 0.0, 0.0)
    # k = 4: factor 2, center (4 - 1 - 0) / 4 = 0.75, so the line is .25 .75 .75 .25
    line = np.array([0.25, 0.75, 0.75, 0.25])
    assert initial(initializer.Bilinear(), [1, 1, 4, 4]).attr("values") == tuple(np.outer(line, line).ravel())


def test_a_seed_follows_from_the_random_seed_and_the_name_alone():
    ops = [initial(initializer.Xavier(), [2, 4]) for _ in range(2)]
    assert ops[0].attr("seed") == ops[1].attr("seed") == derive_seed(fx.Program(), "p") != 0
    startup = fx.Program()
    startup.random_seed = 1
    with fx.program_guard(fx.Program(), startup):
        fx.layers.create_parameter([2], "float32", name="p", default_initializer=initializer.Normal())
    assert startup.ops[0].attr("seed") == derive_seed(startup, "p") != ops[0].attr("seed")


def test_dropouts_have_different_seeds_and_the_same_ones_when_built_again():
    def seeds(random_seed=0):
        main = fx.Program()
        main.random_seed = random_seed
        with fx.program_guard(main, fx.Program()), fx.unique_name.guard():
            x = fx.data("x", [-1, 4], "float32")
            fx.layers.dropout(fx.layers.dropout(fx.layers.dropout(x, 0.5, name="d"), 0.5, name="d"), 0.5, seed=3)
        return [op.attr("seed") for op in main.ops]

    assert seeds() == seeds() != seeds(random_seed=1)
    assert len(set(seeds())) == 3 and seeds()[2] == 3


def test_arithmetic_after_a_guard_does_not_write_into_an_older_variable(programs):
    x = fx.data("x", [-1, 4], "float32")
    y = x * 2.0
    with fx.unique_name.guard():
        z = x * 3.0
    assert y.name != z.name
