"""A transformer block cut over `tp` by heads and columns, with its stream cut by tokens, which ends in a mixture of experts.

Annotations say it, the rest follows: what is sent is printed, proved, and the losses are those of one device.
Run it: `python examples/tensor_parallel.py`
"""

import numpy as np

import fluidx as fx
from fluidx.ir import Shard

L = fx.layers
MESH = fx.Mesh(dp=2, tp=2)
WORDS, LENGTH, WIDTH, HEADS = 24, 8, 16, 4


def cut(name: str, axis: int) -> dict:
    """A weight cut by columns (1), with its bias, or by rows (0)."""
    bias = Shard(0, "tp") if axis else None
    weight, bias = fx.ParamAttr(f"{name}.w", placement=Shard(axis, "tp")), fx.ParamAttr(f"{name}.b", placement=bias)
    return {"num_flatten_dims": 2, "param_attr": weight, "bias_attr": bias}


def tokens_cut(h):
    return L.shard(h, Shard(1, "tp"))


def build():
    main, startup = fx.Program("block"), fx.Program("block_startup")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard(), fx.program_guard(main, startup):
        ids, label = fx.data("ids", [-1, LENGTH], "int64"), fx.data("label", [-1, LENGTH, 1], "int64")
        h = tokens_cut(fx.embedding(ids, [WORDS, WIDTH], param_attr=fx.ParamAttr("table", placement=Shard(0, "tp"))))
        qkv = L.fc(L.layer_norm(h, begin_norm_axis=2), 3 * WIDTH, **cut("qkv", 1))
        q, k, v = L.unstack(L.transpose(L.reshape(qkv, [0, 0, HEADS, 3, WIDTH // HEADS]), [3, 0, 2, 1, 4]))
        mixed = L.transpose(L.scaled_dot_product_attention(q, k, v, causal=True), [0, 2, 1, 3])
        h = h + tokens_cut(L.fc(L.reshape(mixed, [0, 0, WIDTH]), WIDTH, **cut("out", 0)))
        up = L.fc(L.layer_norm(h, begin_norm_axis=2), 4 * WIDTH, act="gelu", **cut("up", 1))
        h = h + tokens_cut(L.fc(up, WIDTH, **cut("down", 0)))
        # sequences are shared out over dp, and so are the experts: tokens go there and back
        y, balance = L.moe(
            L.layer_norm(h, begin_norm_axis=2), num_experts=4, hidden_size=32, param_attr=fx.ParamAttr(placement=Shard(0, "dp"))
        )
        logits = L.matmul(h + y, main.global_block().var("table"), transpose_y=True)
        loss = L.mean(L.softmax_with_cross_entropy(logits, label)) + L.scale(balance, 0.01)
        fx.optimizer.Adam(learning_rate=0.01).minimize(loss)
    return main, startup, loss


def main(steps: int = 30) -> None:
    program, startup, loss = build()
    ids = np.random.default_rng(0).integers(0, WORDS, (8, LENGTH))
    batch = {"ids": ids, "label": np.roll(ids, -1, axis=1)[:, :, None]}
    exe = fx.Executor(fx.CPUPlace())
    exe.run(startup)
    one = [exe.run(program, feed=batch, fetch_list=[loss])[0].item() for _ in range(steps)]

    t = fx.DistributeTranspiler("zero1").transpile(program=program, startup_program=startup, trainers=MESH)
    print(t.diff().census().communication)
    print(t.verify())
    with fx.ParallelExecutor(t, places=fx.cpu_places(MESH.world_size)) as ranks:
        ranks.run_startup()
        many = [ranks.run(feed=batch, fetch_list=[loss])[0].item() for _ in range(steps)]
    print(f"loss {one[0]:.4f} -> {one[-1]:.4f} on one device, {many[0]:.4f} -> {many[-1]:.4f} on {MESH}")
    np.testing.assert_allclose(many, one, rtol=1e-3)  # sums in another order, over all steps


if __name__ == "__main__":
    main()
