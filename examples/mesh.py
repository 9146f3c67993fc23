"""A mesh of 2 x 2 ranks: `dp` cuts the batch, `tp` cuts the weights of two layers. Three annotations say it, the rest follows.

Run it: `python examples/mesh.py`
"""

import numpy as np

import fluidx as fx
from fluidx.ir import Shard

MESH = fx.Mesh(dp=2, tp=2)


def build():
    main, startup = fx.Program("mesh"), fx.Program("mesh_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 32], "float32")
        label = fx.data("label", [-1, 1], "int64")
        columns = fx.ParamAttr(placement=Shard(1, "tp"))
        rows = fx.ParamAttr(placement=Shard(0, "tp"))
        hidden = fx.layers.fc(x, 64, act="relu", param_attr=columns, bias_attr=fx.ParamAttr(placement=Shard(0, "tp")))
        logits = fx.layers.fc(hidden, 5, param_attr=rows)
        loss = fx.layers.mean(fx.layers.softmax_with_cross_entropy(logits, label))
        fx.optimizer.Momentum(learning_rate=0.1, momentum=0.9).minimize(loss)
    return main, startup, loss


def main(steps: int = 50) -> None:
    program, startup, loss = build()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 32), "float32")
    batch = {"x": x, "label": (x @ rng.standard_normal((32, 5), "float32")).argmax(1)[:, None]}
    exe = fx.Executor(fx.CPUPlace())
    exe.run(startup)  # on one device annotations change nothing
    one = [exe.run(program, feed=batch, fetch_list=[loss])[0].item() for _ in range(steps)]

    t = fx.DistributeTranspiler("data_parallel").transpile(program=program, startup_program=startup, trainers=MESH)
    text = str(t.main)
    print(text[text.index("forward:") : text.index("backward:")])
    print(*t.explain(), sep="\n")
    print(t.verify())
    with fx.ParallelExecutor(t, places=fx.cpu_places(MESH.world_size)) as ranks:
        ranks.run_startup()
        many = [ranks.run(feed=batch, fetch_list=[loss])[0].item() for _ in range(steps)]
    print(f"loss {one[0]:.4f} -> {one[-1]:.4f} on one device, {many[0]:.4f} -> {many[-1]:.4f} on {MESH}")
    np.testing.assert_allclose(many, one, rtol=1e-3)  # sums in another order, over all steps


if __name__ == "__main__":
    main()
