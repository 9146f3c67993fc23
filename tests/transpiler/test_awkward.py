"""Programs that mix the rows of a batch, or read what one expects them not to: each gives one device's values."""

import numpy as np
import pytest

import fluidx as fx
from fluidx.testing.models import TestModel
from tests.sweep import swept
from tests.transpiler.models import STRATEGIES, same_answers

L, D = fx.layers, "float64"


def model(write, optimizer=None, extra=None, no_grad=()):
    """A model whose loss is `write(x, h)`: x [-1, 4], h [-1, 3]; with more to fetch, the loss first."""
    main, startup = fx.Program("awkward"), fx.Program("awkward_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], D)
        made = write(x, L.fc(x, 3, param_attr=fx.ParamAttr(name="w")))
        loss, *more = made if isinstance(made, tuple) else (made,)
        _, pairs = (optimizer() if optimizer else fx.optimizer.SGD(0.1)).minimize(loss, no_grad_set=set(no_grad) or None)

    def feed(rows, seed=0):
        rng = np.random.default_rng(seed)
        return {"x": rng.standard_normal((rows, 4)), **(extra(rng, rows) if extra else {})}

    return TestModel(main, startup, loss, feed, [(p.name, g.name) for p, g in pairs]), more


def w():
    return fx.default_main_program().global_block().var("w")


# -- the loss and what leads to it -----------------------------------------------------------------------------------------------------


def softmax_over_the_batch(x, h):
    return L.mean(L.square(L.softmax(h, axis=0)))


def running_sum_over_the_batch(x, h):
    return L.mean(L.square(L.cumsum(h, axis=0)))


def largest_of_the_batch(x, h):
    return L.reduce_max(h)


def smallest_row(x, h):
    return L.reduce_sum(L.reduce_min(h, dim=0))


def sorted_batch(x, h):
    values, _ = L.argsort(h, axis=0)
    return L.mean(values * L.cast(L.square(L.cumsum(L.ones_like(h), axis=0)), D)), values


def centred_by_the_batch(x, h):
    return L.mean(L.square(h - L.reduce_mean(h, dim=0)))


def variance_of_the_batch(x, h):
    return L.reduce_sum(L.sqrt(L.reduce_mean(L.square(h), dim=0)))


def product_over_the_batch(x, h):
    return L.reduce_sum(L.reduce_prod(L.sigmoid(h), dim=0))


def similarity_of_all_pairs(x, h):
    """Every row against every row, as in contrastive losses."""
    return L.mean(L.square(L.matmul(h, h, transpose_y=True)))


def parameters_alone(x, h):
    return L.mean(L.square(w()))


def penalty_on_a_sum(x, h):
    return L.reduce_sum(L.square(h)) + L.reduce_sum(L.square(w()))


def penalty_on_a_mean(x, h):
    return L.mean(L.square(h)) + L.scale(L.reduce_sum(L.square(w())), 0.1, bias=3.0)


def sum_over_twelve(x, h):
    return L.reduce_sum(L.square(h)) / 12.0


def sum_over_the_rows(x, h):
    return L.reduce_sum(L.square(h)) / L.cast(L.shape(x)[0], D)


def root_of_a_mean(x, h):
    """Its gradient is not linear in the batch's terms."""
    return L.sqrt(L.mean(L.square(h)))


def log_of_a_sum(x, h):
    return L.log(L.reduce_sum(L.exp(h)))


def product_of_two_means(x, h):
    return L.mean(L.square(h)) * L.mean(L.abs(h))


def loss_of_every_row(x, h):
    return L.mean(L.reduce_sum(L.square(h), dim=1)), L.reduce_sum(L.square(h), dim=1)


def loss_out_of_a_branch(x, h):
    return L.cond(L.reduce_sum(w()) > 100.0, lambda: L.mean(h), lambda: L.mean(L.square(h)))


def mean_in_one_branch_sum_in_the_other(x, h):
    flag = fx.data("flag", [1], D)
    return L.cond(flag > 0.0, lambda: L.reduce_sum(L.square(h)), lambda: L.mean(L.square(h)))


def dropout_in_a_branch(x, h):
    flag = fx.data("flag", [1], D)
    h = L.cond(flag > 0.0, lambda: L.dropout(h, 0.4, dropout_implementation="upscale_in_train"), lambda: h * 0.5)
    return L.mean(L.square(h)), h


def masked_mean(x, h):
    mask = L.cast(x > 0.0, D)
    return L.reduce_sum(L.square(h) * L.slice(mask, [1], [0], [1])) / (L.reduce_sum(L.slice(mask, [1], [0], [1])) + 1e-3)


def clipped_error(x, h):
    """The gradient of h is limited inside the backward part."""
    fx.clip.ErrorClipByValue(0.05).attach(h)
    return L.reduce_sum(L.square(h))


def clipped_error_of_a_sum(x, h):
    total = L.reduce_sum(h, dim=0)
    fx.clip.ErrorClipByValue(0.5).attach(total)
    return L.reduce_sum(L.square(total))


def metrics_beside_the_loss(x, h):
    """Nothing of this is needed by the loss."""
    label = fx.data("label", [-1, 1], "int64")
    accuracy = L.accuracy(L.softmax(h), label, k=2)
    _, order = L.argsort(h, axis=0)
    return (
        L.mean(L.softmax_with_cross_entropy(h, label)),
        accuracy,
        L.shape(h),
        order,
        L.reduce_max(h),
        L.argmax(h, axis=0),
        L.reduce_mean(h, dim=1),
    )


def split_along_another_axis(x, h):
    return L.mean(L.square(h)), L.transpose(h, [1, 0]), L.matmul(w(), L.transpose(h, [1, 0]))


def gradients_in_the_forward_part(x, h):
    """A penalty on the gradient of the inputs, which is a gradient of a gradient for the weights."""
    (g,) = fx.gradients(h, x)
    return L.mean(L.square(h)) + L.mean(L.square(g)), g


def a_gradient_as_a_constant(x, h):
    (g,) = fx.gradients(L.reduce_sum(L.tanh(h)), x)
    return L.mean(L.square(h) * L.reduce_sum(g, dim=1, keep_dim=True)), g


def concat_along_the_batch(x, h):
    return L.mean(L.square(L.concat([h, L.square(h)], axis=0)))


def batch_folded_into_columns(x, h):
    return L.mean(L.square(L.reshape(L.transpose(h, [1, 0]), [-1])))


def first_row(x, h):
    return L.mean(L.square(L.slice(h, [0], [0], [1]))) + L.mean(h)


def reversed_batch(x, h):
    return L.mean(L.cumsum(L.square(h), axis=0, reverse=True))


def gathered_rows(x, h):
    return L.mean(L.square(L.gather(h, L.assign(np.array([1, 0], "int64")))))


PLAIN = [
    softmax_over_the_batch, running_sum_over_the_batch, largest_of_the_batch, smallest_row, sorted_batch, centred_by_the_batch,
    variance_of_the_batch, product_over_the_batch, similarity_of_all_pairs, parameters_alone, penalty_on_a_sum, penalty_on_a_mean,
    sum_over_twelve, sum_over_the_rows, root_of_a_mean, log_of_a_sum, product_of_two_means, loss_of_every_row, loss_out_of_a_branch,
    masked_mean, clipped_error, clipped_error_of_a_sum, split_along_another_axis, gradients_in_the_forward_part,
    a_gradient_as_a_constant, concat_along_the_batch,
    batch_folded_into_columns, first_row, reversed_batch, gathered_rows,
]  # fmt: skip
FED = {
    mean_in_one_branch_sum_in_the_other: lambda rng, rows: {"flag": np.array([rows % 2 - 0.5])},
    dropout_in_a_branch: lambda rng, rows: {"flag": np.array([rows % 2 - 0.5])},
    metrics_beside_the_loss: lambda rng, rows: {"label": rng.integers(0, 3, (rows, 1))},
}
EVERY = [*PLAIN, *FED]


@swept(3, write=EVERY, strategy=["data_parallel", "ring_optimizer", "zero1"])
def test_values_are_one_devices(write, strategy):
    m, more = model(write, extra=FED.get(write), no_grad=["x@GRAD"] if write is a_gradient_as_a_constant else [])
    gradients = [g for _, g in m.gradients]
    same_answers(m, STRATEGIES[strategy](), 3, rows=(7, 4, 2), fetch=(*more, *gradients), tol=1e-9)


@pytest.mark.parametrize(
    "write", [largest_of_the_batch, centred_by_the_batch, similarity_of_all_pairs, dropout_in_a_branch], ids=lambda f: f.__name__
)
def test_on_several_hosts_too(write):
    m, more = model(write, extra=FED.get(write))
    same_answers(m, "data_parallel", fx.Cluster(2, 2), rows=(7, 2), fetch=tuple(more))


# -- evaluation ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("global_stats", [False, True], ids=["for_test", "use_global_stats"])
def test_a_trained_batch_norm_is_evaluated_on_ranks(global_stats):
    main, startup = fx.Program("normed"), fx.Program("normed_startup")
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 4], D)
        h = L.batch_norm(L.tanh(L.fc(x, 3)), momentum=0.5, use_global_stats=global_stats)
        loss = L.mean(L.square(h))
        test = main.clone(for_test=True)
        fx.optimizer.SGD(0.1).minimize(loss)

    def feed(rows, seed=0):
        return {"x": np.random.default_rng(seed).standard_normal((rows, 4))}

    same_answers(TestModel(main, startup, loss, feed, []), "data_parallel", 3, rows=(7, 2), fetch=(h,))
    t = fx.DistributeTranspiler().transpile(program=test, startup_program=startup, trainers=3)
    t.verify()
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(startup, scope=scope)
    for k in range(3):
        exe.run(main, feed=feed(9, k), scope=scope)
    with fx.ParallelExecutor(t, places=fx.cpu_places(3)) as ranks:
        ranks.run_startup()
        for d in test.list_vars():
            if d.persistable:
                ranks.set_state(d.name, scope.get(d.name))
        for rows in (7, 2):
            one = exe.run(test, feed=feed(rows, 5), fetch_list=[h, loss], scope=scope)
            many = ranks.run(feed=feed(rows, 5), fetch_list=[h, loss])
            for a, b in zip(one, many, strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-12)


@pytest.mark.parametrize("policy", ["weight", "pad", "drop"])
def test_one_row_for_many_ranks(policy):
    m, more = model(loss_of_every_row)
    t = fx.DistributeTranspiler("ring_optimizer").transpile(program=m.main, startup_program=m.startup, trainers=3)
    with fx.ParallelExecutor(t, places=fx.cpu_places(3), uneven=policy) as exe:
        exe.run_startup()
        if policy == "drop":
            with pytest.raises(fx.FeedError, match="would drop all 1 rows: there are 3 ranks"):
                exe.run(feed=m.feed(1), fetch_list=[m.loss])
            return
        loss, rows = exe.run(feed=m.feed(1), fetch_list=[m.loss, *more])
        np.testing.assert_allclose(rows, np.repeat(loss, len(rows)), rtol=1e-12)
        assert len(rows) == (1 if policy == "weight" else 3)
