"""One training script for every way of running ranks: it asks how many there are, and is the same for one device.

    python examples/launched.py
    fluidx run -n 4 examples/launched.py
    fluidx run -n 4 --backend processes --metrics log.jsonl examples/launched.py
    mpirun -n 4 python examples/launched.py
    srun -n 4 python examples/launched.py

After a failure it goes on from its last checkpoint: `fluidx run -n 4 --backend processes --restarts 3 examples/launched.py --folder run`,
with `--elastic` on the ranks that are left.
"""

import argparse

import numpy as np

import fluidx as fx


def build() -> tuple[fx.Program, fx.Program, fx.Variable]:
    main, startup = fx.Program("regression"), fx.Program("regression_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        x = fx.data("x", [-1, 32], "float32")
        y = fx.data("y", [-1, 1], "float32")
        hidden = fx.layers.fc(x, 64, act="tanh")
        loss = fx.layers.mean(fx.layers.square_error_cost(fx.layers.fc(hidden, 1), y))
        fx.optimizer.Adam(learning_rate=0.01).minimize(loss)
    return main, startup, loss


def batch(step: int) -> dict[str, np.ndarray]:
    """The whole batch of a step, the same on every rank, which takes its rows of it."""
    rng = np.random.default_rng(step)
    x = rng.standard_normal((60, 32), "float32")
    return {"x": x, "y": np.tanh(x.sum(1, keepdims=True))}


def main(steps: int = 100, every: int = 20, folder: str | None = None) -> list[float]:
    program, startup, loss = build()
    t = fx.DistributeTranspiler(fx.strategies.zero1())
    t.transpile(program=program, startup_program=startup, trainers=fx.world_size())
    checkpoints = None if folder is None else fx.io.CheckpointManager(folder)
    losses = []
    with fx.ParallelExecutor(t) as exe:
        exe.run_startup()
        found = checkpoints.restore(program, exe) if checkpoints is not None else None
        first = 0 if found is None else found["next"]
        for step in range(first, steps):
            losses.append(exe.run(feed=batch(step), fetch_list=[loss])[0].item())
            if checkpoints is not None and (step + 1) % every == 0:
                checkpoints.save(step + 1, program, exe, extra={"next": step + 1})
        if fx.rank() == 0 and losses:
            print(f"{exe.world_size} ranks, steps {first} to {steps}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on whatever ranks this script was launched on.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--folder", help="where checkpoints are; without it there are none")
    given = parser.parse_args()
    main(given.steps, given.every, given.folder)
