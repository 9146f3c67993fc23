"""zero1 on four ranks: the gradients are reduce-scattered, each rank updates its shard and keeps only that part of Adam's state.

Run it: `python examples/zero1.py`
"""

import numpy as np

import fluidx as fx

RANKS = 4


def build():
    main, startup = fx.Program("regression"), fx.Program("regression_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 32], "float32")
        y = fx.data("y", [-1, 1], "float32")
        hidden = fx.layers.fc(x, 64, act="tanh")
        loss = fx.layers.mean(fx.layers.square_error_cost(fx.layers.fc(hidden, 1), y))
        fx.optimizer.Adam(learning_rate=0.01).minimize(loss)
    return main, startup, loss


def batches(steps: int):
    """Batches of 30 rows, which do not divide by four ranks: that is fine."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((32, 1), "float32")
    for _ in range(steps):
        x = rng.standard_normal((30, 32), "float32")
        yield {"x": x, "y": np.tanh(x @ weight)}


def main(steps: int = 50) -> None:
    program, startup, loss = build()
    exe, scope = fx.Executor(fx.CPUPlace()), fx.executor.Scope()
    exe.run(startup, scope=scope)
    one = [exe.run(program, feed=feed, fetch_list=[loss], scope=scope)[0].item() for feed in batches(steps)]

    t = fx.DistributeTranspiler(fx.strategies.zero1()).transpile(program=program, startup_program=startup, trainers=RANKS)
    print(t.diff().census().communication)
    print(t.verify())
    with fx.ParallelExecutor(t, places=fx.cpu_places(RANKS)) as ranks:
        ranks.run_startup()
        many = [ranks.run(feed=feed, fetch_list=[loss])[0].item() for feed in batches(steps)]
        for rank in range(RANKS):
            held = sum(a.nbytes for name, a in ranks.scopes[rank].arrays.items() if "_moment" in name)
            print(f"rank {rank} keeps {held} bytes of Adam's moments")
    print(f"one device keeps {sum(a.nbytes for name, a in scope.arrays.items() if '_moment' in name)}")
    print(f"loss {one[0]:.4f} -> {one[-1]:.4f} on one device, {many[0]:.4f} -> {many[-1]:.4f} on {RANKS} ranks")
    np.testing.assert_allclose(many, one, rtol=1e-3)  # sums in another order, over all steps


if __name__ == "__main__":
    main()
