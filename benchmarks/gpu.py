"""One training step of the models on a GPU: fluidx against PyTorch, float32, on the same starting values and batch.

PyTorch multiplies in float32, not in TF32, as CuPy does, and has its batch on the GPU; fluidx copies the batch there in every step. A
figure is one step that ends with the loss as a number on the host: the median over the rounds, with minimum and upper quartile. Losses of
the first three steps are compared first. Below each model: the operators that take most of a step, timed one by one, each with a wait for
the GPU behind it.

    --models mlp,lenet,resnet,gpt   --rounds 20   --calls 10 (steps a round)   --save

Not yet run: the project has had no GPU so far.
"""

from __future__ import annotations

from _common import Log, interleaved, option, options, ratio, show
from _models import TOLERANCE, case, fluidx_step
from _peer_models import torch_step


def compare(log: Log, name: str, rounds: int, calls: int) -> None:
    import torch

    from fluidx.profiler import Profile, profiler

    c = case(name)
    steps = {"fluidx": fluidx_step(c, gpu=True), "PyTorch eager": torch_step(c, best=False, device="cuda")}
    steps["PyTorch, fused updates, channels_last"] = torch_step(c, best=True, device="cuda")
    losses = {peer: [step() for _ in range(3)] for peer, step in steps.items()}
    far = max(abs(a - b) / abs(b) for a, b in zip(losses["fluidx"], losses["PyTorch eager"], strict=True))
    verdict = "agree" if far <= TOLERANCE[name] else "DIFFER"
    log(f"{name}: losses of three steps {verdict} (by {far:.1e}, relative)")
    times = interleaved(steps, rounds, calls)
    for peer, seconds in times.items():
        log(f"  {peer:38s} {show(seconds, 1e3, 'ms')}")
    best = min((p for p in times if p != "fluidx"), key=lambda p: min(times[p]))
    log(f"  fluidx / {best}: {ratio(times['fluidx'], times[best])}")
    torch.cuda.synchronize()
    with profiler() as profile:
        for _ in range(3):
            steps["fluidx"]()
    assert isinstance(profile, Profile)
    rows = sorted(profile.rows(), key=lambda r: -r.total)
    log("  operators, ms a step: " + ", ".join(f"{r.name} {r.total / 3 * 1e3:.2f} ({r.calls // 3})" for r in rows[:8]))


def main() -> None:
    import cupy
    import torch

    log = Log("gpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    log(f"{name}; CuPy {cupy.__version__}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, PyTorch {torch.__version__}")
    for model in options("models", "mlp,lenet,resnet,gpt"):
        compare(log, model, int(option("rounds", "20")), int(option("calls", "10")))
    log.close()


if __name__ == "__main__":
    main()
