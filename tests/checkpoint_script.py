"""What the tests of checkpoints start on ranks that are processes: a training on small whole numbers, saved in several ways."""

import json
import os
import resource
import signal
import sys

import numpy as np

import fluidx as fx
from fluidx.io import CheckpointError, CheckpointManager

FEED = {"x": np.arange(24, dtype="float32").reshape(6, 4) % 5 - 2}


def net():
    main, startup = fx.Program("net"), fx.Program("net_startup")
    with fx.program_guard(main, startup), fx.unique_name.guard():
        x = fx.data("x", [-1, 4], "float32")
        y = fx.layers.fc(x, 2, param_attr=fx.ParamAttr("w", initializer=fx.initializer.ConstantInitializer(1.0)), bias_attr=False)
        loss = fx.layers.reduce_sum(y)
        fx.optimizer.Momentum(1.0, 0.5).minimize(loss)
    return main, startup, y, loss


def built(ranks):
    main, startup, y, loss = net()
    t = fx.DistributeTranspiler(fx.strategies.fsdp())
    t.transpile(program=main, startup_program=startup, trainers=ranks)
    return main, y, loss, t


def train(exe, loss, steps):
    return [exe.run(feed=FEED, fetch_list=[loss])[0].item() for _ in range(steps)]


def saved(folder, main, y, loss, exe):
    """Every way to save; what steps fetch is the same whatever is written meanwhile."""
    fx.io.save(main, f"{folder}/at once", exe, sharded=True, extra={"next": 2})
    with CheckpointManager(f"{folder}/behind", asynchronous=True) as checkpoints:
        checkpoints.save(2, main, exe, extra={"next": 2})
        values = train(exe, loss, 2)
    fx.io.save_inference_model(f"{folder}/model", ["x"], [y], exe, main)
    fx.io.save_persistables(exe, f"{folder}/vars", main)
    fx.io.save_params(exe, folder, main, filename="params.safetensors")
    for load in (lambda: fx.io.load(main, f"{folder}/at once", exe), lambda: checkpoints.restore(main, exe)):
        assert load() == {"next": 2}
        assert train(exe, loss, 2) == values
    return values


def exported(folder, main, y, loss, exe):
    fx.onnx.save(main, f"{folder}/net.onnx", fetches=[y], executor=exe)


def judged(folder, main, y, loss, exe):
    """What another executor finds of the variables before and behind two steps."""
    main, startup, y, _ = net()
    t = fx.DistributeTranspiler(fx.strategies.fsdp())
    t.transpile(program=main.clone(for_test=True), startup_program=startup, trainers=fx.world_size())
    with fx.ParallelExecutor(t, scopes=exe.scopes) as judge:
        before = judge.run(feed=FEED, fetch_list=[y])[0].tolist()
        train(exe, loss, 2)
        return before, judge.run(feed=FEED, fetch_list=[y])[0].tolist()


def not_waited_for(folder, main, y, loss, exe):
    CheckpointManager(folder, asynchronous=True).save(2, main, exe)


def elsewhere(folder, main, y, loss, exe):
    """Rank 1 is on another host, as it were: a path leads it to another folder than rank 0."""
    fx.io.save(main, f"{folder}/run", exe, sharded=True)
    if fx.rank() == 1:
        os.makedirs(f"{folder}/host-1")
    os.chdir(f"{folder}/host-1" if fx.rank() == 1 else folder)
    train(exe, loss, 1)
    return refused(lambda: fx.io.save(main, "run", exe, sharded=True)), refused(lambda: fx.io.load(main, "run", exe)), train(exe, loss, 1)


def full(folder, main, y, loss, exe):
    """On rank 1 no more can be written."""
    checkpoints = CheckpointManager(folder, asynchronous=True)
    checkpoints.save(1, main, exe)
    checkpoints.wait()
    train(exe, loss, 1)
    if fx.rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checkpoints.save(1, main, exe)
    said = refused(checkpoints.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    return said, checkpoints.restore(main, exe), exe.state("w").tolist()


def one_alone(folder, main, y, loss, exe):
    if fx.rank() == 0:
        fx.io.save_inference_model(f"{folder}/model", ["x"], [y], exe, main)
    train(exe, loss, 1)


def feed(step):
    return {"x": np.arange(24, dtype="float32").reshape(6, 4) * (step + 1) % 5 - 2}


def elastic(folder, main, y, loss, exe):
    """Eight steps with a checkpoint behind every second. Of three ranks the last is killed in the fifth."""
    checkpoints = CheckpointManager(folder)
    exe.run_startup()
    first = (checkpoints.restore(main, exe) or {"next": 0})["next"]
    losses = []
    for step in range(first, 8):
        if fx.rank() == 2 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(exe.run(feed=feed(step), fetch_list=[loss])[0].item())
        if step % 2:
            checkpoints.save(step + 1, main, exe, extra={"next": step + 1})
    return fx.world_size(), first, losses, exe.state("w").tolist()


def refused(save):
    try:
        save()
    except CheckpointError as e:
        return str(e)


if __name__ == "__main__":
    what, folder = sys.argv[1:]
    wrote = set()

    def opens(event, args):
        if event == "open" and isinstance(args[0], str) and isinstance(args[1], str) and "x" in args[1]:
            wrote.add(os.path.basename(args[0]).split(".")[1])

    main, y, loss, t = built(fx.world_size())
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        train(exe, loss, 2)
        sys.addaudithook(opens)
        found = globals()[what](os.path.abspath(folder), main, y, loss, exe)
    with open(os.path.join(sys.argv[2], f"{fx.rank()}.json"), "w") as f:
        json.dump({"found": found, "wrote": sorted(wrote)}, f)
