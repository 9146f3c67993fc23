"""What publications say of data parallelism, from programs of those shapes: the order of results, not their size."""

import sys
from pathlib import Path

import fluidx as fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _published_programs as published


def step(programs, strategy, ranks, rows, cluster, runtime="static"):
    main, startup = programs
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=ranks)
    return fx.simulate(t, cluster=cluster, batch=rows * ranks, runtime=runtime, verify=False)


def test_vgg_16_scales_worse_than_resnet_101_over_25_gb_ethernet():
    """Sergeev and Del Balso (2018): 68 % against 90 % of linear on 512 GPUs."""

    def efficiency(build):
        one, many = (step(build(), fx.strategies.data_parallel(bucket_mb=0), n, 64, "v100-25gb", "horovod") for n in (1, 64))
        return one.seconds / many.seconds

    vgg, resnet = efficiency(published.vgg16), efficiency(lambda: published.resnet((3, 4, 23, 3)))
    assert vgg < resnet - 0.02 < 1


def test_a_graph_that_is_sent_whole_exposes_its_all_reduce_and_buckets_hide_it_again():
    """A compiled graph whose all_reduces all wait for the end of backward, and the repair: send each bucket when it is full."""

    def exposed(**options):
        bert = published.transformer(6, 1024, 16, 30528, 128, True)
        return step(bert, fx.strategies.data_parallel(**options), 16, 32, "p4d").of_rank(0).exposed

    assert exposed(overlap=False) > 3 * exposed()


def test_gradients_of_a_tied_table_are_ready_last_and_are_what_is_exposed():
    """Transformer-XL: most bytes are those of its table of words."""

    def exposed(words):
        net = published.transformer(4, 512, 8, words, 192, False, head_rows=2000)
        return step(net, fx.strategies.data_parallel(bucket_mb=0), 4, 16, "dgx-v100", "ddp").of_rank(0).exposed

    assert exposed(200_000) > 5 * exposed(20_000)
