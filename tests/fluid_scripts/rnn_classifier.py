import numpy as np

import fluidx as fluid

max_len, vocab = 6, 30
words = fluid.data("words", [None, max_len], "int64")
lengths = fluid.data("lengths", [None], "int64")
label = fluid.data("label", [None, 1], "int64")
emb = fluid.embedding(words, [vocab, 8])
outputs, (hidden, cell) = fluid.layers.rnn(fluid.layers.LSTMCell(8), emb, sequence_length=lengths)
mask = fluid.layers.unsqueeze(fluid.layers.sequence_mask(lengths, max_len, "float32"), axes=[2])
pooled = fluid.layers.reduce_sum(outputs * mask, dim=1)
prediction = fluid.layers.fc([pooled, hidden], size=2, act="softmax")
loss = fluid.layers.mean(fluid.layers.cross_entropy(prediction, label))
acc = fluid.layers.accuracy(prediction, label)
fluid.clip.set_gradient_clip(fluid.clip.GradientClipByGlobalNorm(clip_norm=5.0))
fluid.optimizer.Adam(0.05).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = np.random.RandomState(0)
w = rng.randint(0, vocab, [16, max_len])
feed = {"words": w, "lengths": rng.randint(1, max_len + 1, [16]), "label": (w[:, :1] > vocab // 2).astype("int64")}
losses = [float(exe.run(feed=feed, fetch_list=[loss, acc])[0][0]) for _ in range(8)]
assert losses[-1] < losses[0], losses
