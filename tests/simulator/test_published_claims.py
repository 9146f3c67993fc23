"""What publications say of data parallelism, from programs of those shapes: the order of results, not their size."""

import sys
from pathlib import Path

import pytest

import fluidx as fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _published_programs as published

BENCHMARKS = Path(published.__file__).parent
FAIRRING = fx.Cluster.load(BENCHMARKS / "data" / "v100_fairring.json", hosts=8)  # NCCL, and a message, as they took at two sizes there
NCCL = fx.strategies.data_parallel(bucket_mb=0, hierarchical=False)


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


# -- Fairring: the communication of one all_reduce on 8 hosts of 8 V100 -------------------------------------------------------------------


def communication(strategy, mib, trainers=FAIRRING):
    """The seconds of communication of a program with one gradient."""
    main, startup = published.gradients(mib)
    t = fx.DistributeTranspiler(strategy).transpile(program=main, startup_program=startup, trainers=trainers)
    return fx.simulate(t, cluster=FAIRRING, batch=64, verify=False, fetch=[]).of_rank(0).communication


def rails(mib, in_flight=2):
    return communication(fx.strategies.rails(bucket_mb=0, parallelism=in_flight, staging_mb=25 * in_flight), mib)


@pytest.mark.parametrize("mib", [0.1, 1, 6])
def test_rails_are_slower_than_nccl_up_to_6_mib(mib):
    """For small tensors (up to ~6MiB) NCCL is faster: every message of a library of its own has much to do beside its bytes."""
    assert rails(mib) > communication(NCCL, mib)


@pytest.mark.parametrize("mib", [25, 100])
def test_rails_are_faster_than_nccl_from_25_mib(mib):
    """For larger tensors (25MiB or more) Fairring starts outperforming NCCL: its messages use all network cards."""
    assert rails(mib) < communication(NCCL, mib)


def test_slices_in_flight_help_up_to_a_knee_at_4_to_8():
    """Micro-benchmark 2, a quarter as long: with one slice in flight slower than NCCL, the sweet spot is "at 4 or slightly above"."""
    nccl, took = communication(NCCL, 400), {k: rails(400, k) for k in (1, 4, 8, 16)}
    assert took[1] > nccl > took[4] > took[8] > took[16]
    gained = [(took[1] - took[k]) / (took[1] - took[16]) for k in (4, 8)]
    assert 0.5 < gained[0] < 0.75 < gained[1]


def test_parts_sent_from_device_to_device_lose_on_one_machine():
    """Faster than NCCL except on a single machine: there a device sends each other one its part and gets the sums back, over links of
    pairs, where NCCL has rings over all links. The strategy refuses one host."""
    one = fx.Cluster.load(BENCHMARKS / "data" / "v100_fairring.json", hosts=1)
    assert communication(fx.strategies.data_parallel(bucket_mb=0, algorithm="direct"), 25, one) > communication(NCCL, 25, one)
    with pytest.raises(fx.TranspileError, match="on one host, take data_parallel in its place"):
        communication(fx.strategies.rails(), 25, one)
