"""What test_profiler_processes.py starts on ranks that each run the script."""

import json
import os
import sys

import fluidx as fx
from fluidx.testing.models import classifier


def built(ranks):
    model = classifier(width=4)
    t = fx.DistributeTranspiler("zero1")
    t.transpile(program=model.main, startup_program=model.startup, trainers=ranks)
    return model, t


def train(exe, model):
    for _ in range(2):
        exe.run(feed=model.feed(8), fetch_list=[model.loss])


def check_clocks(profile, within=0.0):
    """Nobody leaves a sum of all ranks before all have come, by one clock that is right to so many seconds."""
    starts, stops = {}, {}
    for run in profile.runs:
        for i, start, stop in run.times:
            op = run.calls[i].op
            if op.type == "reduce_scatter":
                starts.setdefault((run.step, op.output_arg_names), []).append(start)
                stops.setdefault((run.step, op.output_arg_names), []).append(stop)
    assert starts and all(min(stops[key]) >= max(starts[key]) - within * 1e9 for key in starts)


def runs(profile):
    return None if profile is None else sorted((run.step, run.rank) for run in profile.runs)


def facts(profile):
    """All that does not depend on how long something took."""
    rows = profile.rows(by="operator", at_best=lambda threads: fx.profiler.Ceilings(threads, 1.0, 1.0))
    return sorted((r.name, r.kernel, r.calls, r.flops, r.nbytes, r.bound == "communication", r.site) for r in rows)


if __name__ == "__main__":
    folder, rank = sys.argv[1], fx.rank()

    def writes(event, args):
        if event == "open" and os.path.basename(str(args[0])) == "trace.json":
            with open(f"{folder}/wrote", "a") as f:
                f.write(str(rank))

    sys.addaudithook(writes)
    model, t = built(fx.world_size())
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        with fx.profiler.profiler(profile_path=f"{folder}/trace.json") as both:
            train(exe, model)
        if rank == 1:
            fx.profiler.start_profiler()
        train(exe, model)
        alone = fx.profiler.stop_profiler()
        check_clocks(both)
    with open(f"{folder}/{rank}.json", "w") as f:
        json.dump({"both": runs(both), "facts": facts(both), "alone": runs(alone)}, f)
