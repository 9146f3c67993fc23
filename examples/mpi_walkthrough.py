"""The three first steps of every MPI tutorial, as rank programs in text: point to point, all_reduce, several devices in one process.

    python examples/mpi_walkthrough.py p2p
    fluidx run -n 2 --backend processes examples/mpi_walkthrough.py all_reduce
    mpirun -n 2 python examples/mpi_walkthrough.py p2p
    python examples/mpi_walkthrough.py multi_device

Ranks are threads of one process, or processes where a launcher started two; rank 0 tells what each of them has.
"""

import sys

import fluidx as fx
from fluidx.ir import parse_pair

# Rank 0 adds one to its zero and sends it to rank 1.
SENDS = """
program p2p {{
  rank 0
  group world = [0, 1]
startup:
  nccl_init() {{group="world"}}
forward:
  %before: f32[1] local = fill_constant() {{shape=[1]}}
  %after: f32[1] local = scale(%before) {{bias=1.0}}
  send(%after) {{group="world", peer=1}}
}}
"""
RECEIVES = """
program p2p {{
  rank 1
  group world = [0, 1]
startup:
  nccl_init() {{group="world"}}
forward:
  %before: f32[1] local = fill_constant() {{shape=[1]}}
  %after: f32[1] local = recv() {{group="world", peer=0, shape=[1]}}
}}
"""
# Every rank brings a one.
ALL_REDUCE = """
program all_reduce {{
  rank {rank}
  group world = [0, 1]
startup:
  nccl_init() {{group="world"}}
forward:
  %before: f32[1] partial(sum) over world = fill_constant() {{shape=[1], value=1.0}}
  %after: f32[1] = all_reduce(%before) {{group="world", op="sum"}}
}}
"""
# Two processes of two devices, written as four ranks: all four add up, then the first devices of the two.
MULTI_DEVICE = """
program multi_device {{
  rank {rank}
  group world = [0, 1, 2, 3]
  group first = [0, 2] [1, 3]
startup:
  nccl_init() {{group="world"}}
  nccl_init() {{group="first"}}
forward:
  %one: f32[1] partial(sum) over world = fill_constant() {{shape=[1], value=1.0}}
  %before: f32[1] = all_reduce(%one) {{group="world", op="sum"}}
  %again: f32[1] local = assign(%before)
  %after: f32[1] local = {last}
}}
"""


def programs(mode: str) -> list[fx.ProgramPair]:
    """Each rank's programs, in order."""
    if mode == "p2p":
        texts = [SENDS.format(), RECEIVES.format()]
    elif mode == "all_reduce":
        texts = [ALL_REDUCE.format(rank=rank) for rank in range(2)]
    else:
        adds, keeps = 'all_reduce(%again) {group="first", op="sum"}', "assign(%again)"
        texts = [MULTI_DEVICE.format(rank=rank, last=keeps if rank % 2 else adds) for rank in range(4)]
    return [parse_pair(text) for text in texts]


def main(mode: str = "p2p") -> None:
    if mode not in ("p2p", "all_reduce", "multi_device"):
        raise SystemExit(f"{mode!r} is none of p2p, all_reduce, multi_device")
    places = fx.cpu_places(4) if mode == "multi_device" else None  # None: what was launched, or else threads
    with fx.ParallelExecutor(programs(mode), places=places) as exe:
        exe.run_startup()
        before, after = exe.run(fetch_list=["before", "after"], return_merged=False)
    if fx.rank() == 0:
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            who = f"process {rank // 2} device {rank % 2}" if mode == "multi_device" else f"rank {rank}"
            print(f"{who}: {old.item():g} before, {new.item():g} after")


if __name__ == "__main__":
    main(*sys.argv[1:2])
