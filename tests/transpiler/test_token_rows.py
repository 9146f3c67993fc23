"""Batches of sequences and batches of their tokens in one program: [batch, T] beside [batch * T] rows."""

import numpy as np
import pytest

import fluidx as fx

T, V = 3, 7


def model(label_of):
    """Tokens are embedded, scored one by one as [batch * T, V], and compared with labels [batch * T, 1]."""
    main, startup = fx.Program("tokens"), fx.Program("tokens_startup")
    main.random_seed = startup.random_seed = 1
    with fx.program_guard(main, startup), fx.unique_name.guard():
        words, label = fx.data("words", [None, T], "int64"), fx.data("label", [None, 1], "int64")
        scores = fx.layers.fc(fx.embedding(words, [V, 4]), V, num_flatten_dims=2)
        scores = fx.layers.reshape(scores, [-1, V])
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(scores, label_of(label)))
        fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    return main, startup, loss


def feed(rows, seed=0):
    rng = np.random.default_rng(seed)
    return {"words": rng.integers(0, V, (rows, T)), "label": rng.integers(0, V, (rows * T, 1))}


def on_one_device(main, startup, loss, feeds):
    exe = fx.Executor()
    with fx.scope_guard(fx.Scope()):
        exe.run(startup)
        return [exe.run(main, feed=f, fetch_list=[loss])[0] for f in feeds]


def transpiled(main, startup, strategy="data_parallel", ranks=2):
    t = fx.DistributeTranspiler(strategy)
    return t.transpile(program=main, startup_program=startup, trainers=ranks)


def on_ranks(t, loss, feeds, **options):
    with fx.ParallelExecutor(t, **options) as exe:
        exe.run_startup()
        return [exe.run(feed=f, fetch_list=[loss])[0] for f in feeds]


@pytest.mark.parametrize("strategy", ["data_parallel", "reduce_broadcast", "zero1", "zero3"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_labels_of_tokens_beside_sequences_train_as_on_one_device(strategy, ranks):
    main, startup, loss = model(lambda label: label)
    feeds = [feed(rows, k) for k, rows in enumerate((4, 5, 7, 1))]
    many = on_ranks(transpiled(main, startup, strategy, ranks), loss, feeds)
    np.testing.assert_allclose(many, on_one_device(main, startup, loss, feeds), rtol=1e-5)  # the order of additions


def test_labels_of_tokens_are_split_where_their_sequences_are_and_nothing_is_sent():
    main, startup, _ = model(lambda label: label)
    t = transpiled(main, startup)
    assert str(t.main.global_block().desc("label").placement) == str((fx.ir.Shard(0, "dp", T),))
    assert [line for line in t.explain() if "label" in line or "words" in line] == []
    t.verify()


def test_labels_that_are_computed_with_first_are_sent_to_where_their_sequences_are():
    main, startup, loss = model(lambda label: fx.layers.cast(fx.layers.scale(label, 1.0), "int64"))
    feeds = [feed(5), feed(6, 1)]
    many = on_ranks(transpiled(main, startup), loss, feeds)
    np.testing.assert_allclose(many, on_one_device(main, startup, loss, feeds), rtol=1e-5)  # the order of additions


def test_rows_that_fit_nowhere_are_refused():
    main, startup, loss = model(lambda label: label)
    wrong = {**feed(4), "label": np.zeros((10, 1), "int64")}
    with pytest.raises(fx.ProgramError, match=r"Label must have shape \[12, 1\] for Logits f32\[12,7\], got \[10, 1\]"):
        on_ranks(transpiled(main, startup), loss, [wrong])
    with pytest.raises(fx.FeedError, match="must have the same number of rows, or a multiple: 'words' has 4, 'label' has 14"):
        on_ranks(transpiled(main, startup), loss, [{**wrong, "label": np.zeros((14, 1), "int64")}])


@pytest.mark.parametrize("uneven, kept", [("drop", [0, 1, 2, 3]), ("pad", [0, 1, 2, 3, 4, 4])])
def test_sequences_and_their_tokens_are_padded_and_dropped_together(uneven, kept):
    main, startup, loss = model(lambda label: label)
    five = feed(5)
    evened = {"words": five["words"][kept], "label": five["label"].reshape(5, T)[kept].reshape(-1, 1)}
    (many,) = on_ranks(transpiled(main, startup), loss, [five], uneven=uneven)
    np.testing.assert_allclose(many, on_one_device(main, startup, loss, [evened])[0], rtol=1e-5)  # the order of additions
