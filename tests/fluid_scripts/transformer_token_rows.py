import numpy as np

import fluidx as fluid

seq_len, vocab, d_model = 5, 11, 8
src = fluid.data("src_word", [None, seq_len], "int64")
lengths = fluid.data("src_len", [None], "int64")
lbl_word = fluid.data("lbl_word", [None, 1], "int64")
lbl_weight = fluid.data("lbl_weight", [None, 1], "float32")
mask = fluid.layers.sequence_mask(lengths, maxlen=seq_len, dtype="float32")
emb = fluid.layers.scale(fluid.embedding(src, [vocab, d_model]), d_model**0.5)
emb = fluid.layers.elementwise_mul(emb, fluid.layers.unsqueeze(mask, [2]))
ctx = fluid.nets.scaled_dot_product_attention(emb, emb, emb, num_heads=2)
out = fluid.layers.layer_norm(ctx + emb, begin_norm_axis=2)
logits = fluid.layers.reshape(fluid.layers.fc(out, vocab, num_flatten_dims=2), shape=[-1, vocab])
cost = fluid.layers.softmax_with_cross_entropy(logits=logits, label=lbl_word)
weighted = cost * lbl_weight
sum_cost = fluid.layers.reduce_sum(weighted)
token_num = fluid.layers.reduce_sum(lbl_weight)
token_num.stop_gradient = True
avg_cost = sum_cost / token_num
lr = fluid.layers.learning_rate_scheduler.noam_decay(d_model, 10)
fluid.optimizer.Adam(learning_rate=lr, beta1=0.9, beta2=0.997, epsilon=1e-9).minimize(avg_cost)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
prog = fluid.CompiledProgram(fluid.default_main_program()).with_data_parallel(loss_name=avg_cost.name, places=fluid.cpu_places(2))
rng = np.random.RandomState(0)
n = rng.randint(1, seq_len + 1, [6])
feed = {
    "src_word": rng.randint(0, vocab, [6, seq_len]),
    "src_len": n,
    "lbl_word": rng.randint(0, vocab, [6 * seq_len, 1]),
    "lbl_weight": (np.arange(seq_len) < n[:, None]).astype("float32").reshape(-1, 1),
}
losses = [float(np.sum(exe.run(prog, feed=feed, fetch_list=[avg_cost])[0])) for _ in range(12)]
assert losses[-1] < losses[0], losses
