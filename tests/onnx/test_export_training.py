"""`training_info`: one step of a program's training, run step by step beside the program itself."""

import numpy as np
import pytest

import fluidx as fx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import numpy_helper  # noqa: E402

from fluidx.ir.opdef import OPS  # noqa: E402
from fluidx.onnx.export import to_onnx  # noqa: E402
from fluidx.testing.one_operator import program_of_sample  # noqa: E402

from .written import IN_STEPS, LACKS, close, lenet, run, session_of, transformer  # noqa: E402

# operator -> how many of its samples have no ONNX form, and a part of the reason
REFUSED = {
    "pad2d_grad": (1, "gradients add up at the border"),
    "rmsprop": (3, "has no ONNX form; fetch another one"),  # the mean gradient, without `centered`
    "scatter_fold_grad": (1, "the derivative by one factor"),
    "sigmoid_cross_entropy_with_logits_grad": (1, "normalize divides by the number of labels"),
    "slice_grad": (1, "it has strides"),
}


@pytest.mark.parametrize("name", IN_STEPS)
def test_gradients_and_updates_mean_the_same_in_onnx(name):
    judged = refused = 0
    for sample in OPS[name].samples():
        program, _, feed = program_of_sample(name, sample)
        outs = [program.global_block().var(n) for n in program.ops[-1].output_arg_names]
        try:
            model = to_onnx(program, None, outs)
        except fx.onnx.OnnxError as e:
            assert name in REFUSED and REFUSED[name][1] in str(e)
            refused += 1
            continue
        if "bfloat16" in {v.dtype for v in program.list_vars()}:
            continue  # which the runtime does not take from NumPy
        expected = fx.Executor(fx.CPUPlace()).run(program, feed=feed, fetch_list=outs)
        try:
            found = run(session_of(model), feed)
        except LACKS:  # operators of the training domain, and others of some types
            found = fx.onnx.session(model).run(feed)
        judged += 1
        for a, b in zip(found, expected, strict=True):
            close(a, b)
    assert judged and refused == REFUSED.get(name, (0, ""))[0]


# -- steps ---------------------------------------------------------------------------------------------------------------------


def images():
    """Convolutions with strides and groups, normalization by batch, both kinds of pooling, windows that overlap.

    Nothing is added before the normalization, which takes it away: its gradient would be rounding, and Adam makes steps of that.
    """
    image = fx.data("image", [-1, 1, 12, 12], "float32")
    hidden = fx.layers.batch_norm(fx.layers.conv2d(image, 4, 3, padding=1, bias_attr=False), act="relu")
    hidden = fx.layers.conv2d(fx.layers.pool2d(hidden, 3, "max", 2, pool_padding=1), 4, 3, stride=2, groups=2, bias_attr=False)
    return fx.layers.fc(fx.layers.pool2d(hidden, 2, "avg", 1), 5)


def products():
    return fx.layers.fc(fx.layers.reduce_prod(fx.layers.fc(fx.data("image", [-1, 6], "float32"), 4), dim=1, keep_dim=True), 5)


def noisy_rounds():
    """A loop whose gradient needs nothing of a round but what it drew."""
    w = fx.layers.create_parameter([5], "float32", name="w")
    i, n = fx.layers.zeros([1], "int64"), fx.layers.fill_constant([1], "int64", 2)
    more, hidden = fx.layers.less_than(i, n), fx.layers.fc(fx.data("image", [-1, 1, 12, 12], "float32"), 5)
    with fx.layers.While(more).block():
        fx.layers.assign(hidden + fx.layers.dropout(fx.layers.ones([5], "float32"), 0.5) * w, output=hidden)
        fx.layers.less_than(fx.layers.increment(i), n, cond=more)
    return hidden


def halves():
    """A parameter of 16 bits, whose optimizer has a state of 32."""
    image = fx.layers.cast(fx.data("image", [-1, 1, 12, 12], "float32"), "float16")
    return fx.layers.cast(fx.layers.fc(image, 5, bias_attr=False), "float32")


class Trained:
    """A minimized net after startup; `step` is one run of it."""

    def __init__(self, net, optimizer):
        self.main, startup = fx.Program(net.__name__), fx.Program()
        self.main.random_seed = startup.random_seed = 1
        with fx.program_guard(self.main, startup), fx.unique_name.guard():
            self.y = net()
            label = fx.data("label", [-1, 1], "int64")
            self.loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(self.y, label))
            optimizer().minimize(self.loss)
        self.exe, self.scope = fx.Executor(fx.CPUPlace()), fx.Scope()
        self.exe.run(startup, scope=self.scope)
        rng = np.random.default_rng(0)
        feed = {
            "image": rng.standard_normal((4, 1, 12, 12), "float32"),
            "ids": rng.integers(0, 11, (4, 6)),
            "label": rng.integers(0, 3, (4, 1)),
        }
        self.feed = {n: a for n, a in feed.items() if self.main.global_block().has_var(n)}

    def model(self, **options):
        return to_onnx(self.main, None, [self.y], scope=self.scope, loss=self.loss, **options)

    def step(self):
        return self.exe.run(self.main, feed=self.feed, fetch_list=[self.loss], scope=self.scope)[0]


def stepped(model, execute, feed):
    """The losses of three steps, the initializers becoming after each what `update_binding` says, and what they are at the end."""
    step, losses = fx.onnx.training_step(model), []
    bindings = {b.key: b.value for b in model.training_info[0].update_binding}
    assert bindings == {p.key[7:]: p.value for p in step.metadata_props}
    for _ in range(3):
        values = dict(zip([o.name for o in step.graph.output], execute(step, feed), strict=True))
        losses.append(values[model.training_info[0].algorithm.output[0].name])
        for t in step.graph.initializer:
            if t.name in bindings:
                t.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values[bindings[t.name]]), t.name))
    return losses, {t.name: numpy_helper.to_array(t) for t in step.graph.initializer if t.name in bindings}


BY = {"runtime": lambda model, feed: run(session_of(model), feed), "fluidx": lambda model, feed: fx.onnx.session(model).run(feed)}
PLAIN = {
    "sgd": lambda: fx.optimizer.SGD(0.1),
    "decay": lambda: fx.optimizer.SGD(0.1, regularization=fx.regularizer.L2Decay(0.1)),
    "adam": lambda: fx.optimizer.Adam(0.01),
    "clip": lambda: fx.optimizer.SGD(0.1, grad_clip=fx.clip.GradientClipByGlobalNorm(0.5)),
    "rmsprop": lambda: fx.optimizer.RMSProp(0.01, centered=True),
    "adamax": lambda: fx.optimizer.Adamax(0.01),
    "ftrl": lambda: fx.optimizer.Ftrl(0.1),
    "lamb": lambda: fx.optimizer.Lamb(0.01),
    "lars": lambda: fx.optimizer.LarsMomentum(0.1, 0.9),
    "schedule": lambda: fx.optimizer.SGD(fx.layers.exponential_decay(0.1, 1, 0.5)),
}
STANDARD = {
    "momentum": lambda: fx.optimizer.Momentum(0.1, 0.9),
    "nesterov": lambda: fx.optimizer.Momentum(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: fx.optimizer.Adagrad(0.1),
}


@pytest.mark.parametrize(
    ("net", "optimizer", "by"),
    [(images, name, "runtime") for name in PLAIN]
    + [(transformer, "sgd", "runtime"), (halves, "sgd", "runtime"), (halves, "momentum", "fluidx")]
    + [(images, name, "fluidx") for name in STANDARD]
    + [(transformer, "momentum", "fluidx")],
)
def test_three_steps_give_the_parameters_that_the_program_has(net, optimizer, by):
    trained = Trained(net, {**PLAIN, **STANDARD}[optimizer])
    model = trained.model()
    losses, found = stepped(model, BY[by], trained.feed)
    assert found.keys() >= {p.name for p in trained.main.all_parameters() if p.trainable}
    for value in losses:
        if net is halves:
            np.testing.assert_allclose(value, trained.step(), rtol=1e-3)  # 11 bits
        else:
            close(value, trained.step())
    # three steps of sums in other orders, and Adam divides by roots of what is nearly 0
    for name, value in found.items():
        np.testing.assert_allclose(value, np.asarray(trained.scope.get(name)), rtol=2e-3, atol=2e-5)


def test_the_standards_optimizers_are_written_where_they_mean_the_same():
    domains = {o.domain: o.version for o in Trained(images, STANDARD["momentum"]).model().opset_import}
    assert domains == {"": 21, "ai.onnx.preview.training": 1}
    kinds = {n.op_type for n in Trained(images, STANDARD["adagrad"]).model().training_info[0].algorithm.node if n.domain}
    assert kinds == {"Adagrad"}
    assert not any(n.domain for n in Trained(images, PLAIN["adam"]).model().training_info[0].algorithm.node)


def test_the_graph_stays_the_inference_form_and_load_takes_it_alone():
    trained = Trained(images, PLAIN["sgd"])
    model, plain = trained.model(), to_onnx(trained.main, None, [trained.y], scope=trained.scope)
    assert model.graph == plain.graph
    assert str(fx.onnx.load(model).program) == str(fx.onnx.load(plain).program)
    shared = {i.name for i in model.training_info[0].algorithm.input}
    assert shared == {"label"}  # the image is an input of the graph


def test_what_the_graph_computes_is_not_computed_again():
    model = Trained(transformer, PLAIN["sgd"]).model()
    kinds = [n.op_type for n in model.training_info[0].algorithm.node]
    assert "LayerNormalization" not in kinds and "Gelu" not in kinds
    assert kinds.count("Softmax") == 1  # the loss's own


def test_dropout_drops_in_a_step_and_its_gradient_follows_its_mask():
    model = Trained(lenet, PLAIN["sgd"]).model()
    (node,) = [n for n in model.training_info[0].algorithm.node if n.op_type == "Dropout"]
    assert len(node.input) == 3 and len(node.output) == 2
    assert sum(node.output[1] in n.input for n in model.training_info[0].algorithm.node) >= 1


def test_what_cannot_be_trained_in_a_model_is_refused():
    trained = Trained(transformer, PLAIN["sgd"])
    with pytest.raises(fx.onnx.OnnxError, match="one operator of program transformer .*\n.*its ScatterND has add from opset 16 on"):
        trained.model(opset=15)
    with pytest.raises(fx.onnx.OnnxError, match="one operator of program products .*\n.* = reduce_prod_grad"):
        Trained(products, PLAIN["sgd"]).model()
    inference = trained.main.clone(for_test=True)
    with pytest.raises(fx.onnx.OnnxError, match="its gradient repeats random draws, and a Loop would draw other numbers"):
        Trained(noisy_rounds, PLAIN["sgd"]).model()
    with pytest.raises(fx.onnx.OnnxError, match="updates no parameter.*call minimize first"):
        to_onnx(inference, None, [trained.y], scope=trained.scope, loss=trained.loss)
    with pytest.raises(fx.onnx.OnnxError, match=r"has no training_info; fx.onnx.save\(..., loss=\) writes it"):
        fx.onnx.training_step(to_onnx(trained.main, None, [trained.y], scope=trained.scope))
