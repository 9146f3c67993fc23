import numpy as np

import fluidx as fluid

dict_size, hidden_dim, word_dim, batch_size, max_length = 12, 8, 6, 4, 5

src = fluid.data(name="src_word_id", shape=[max_length, None], dtype="int64")
trg = fluid.data(name="trg_word_id", shape=[max_length, None], dtype="int64")
label = fluid.data(name="trg_next_id", shape=[None, 1], dtype="int64")

src_emb = fluid.embedding(input=src, size=[dict_size, word_dim], param_attr=fluid.ParamAttr(name="vemb"))
encoder = fluid.layers.StaticRNN()
with encoder.step():
    word = encoder.step_input(src_emb)
    prev = encoder.memory(shape=[-1, hidden_dim], batch_ref=word)
    hidden = fluid.layers.fc(input=[word, prev], size=hidden_dim, act="relu")
    encoder.update_memory(prev, hidden)
    encoder.step_output(hidden)
encoded = encoder()
context = fluid.layers.slice(encoded, axes=[0], starts=[max_length - 1], ends=[max_length])
context = fluid.layers.squeeze(context, axes=[0])

trg_emb = fluid.embedding(input=trg, size=[dict_size, word_dim], param_attr=fluid.ParamAttr(name="vemb"))
rnn = fluid.layers.StaticRNN(name="decoder")
with rnn.step():
    current_word = rnn.step_input(trg_emb)
    pre_state = rnn.memory(init=context)
    current_state = fluid.layers.fc(input=[current_word, pre_state], size=hidden_dim, act="tanh")
    current_score = fluid.layers.fc(input=current_state, size=dict_size, act="softmax")
    rnn.update_memory(pre_state, current_state)
    rnn.output(current_score)
scores = fluid.layers.reshape(rnn(), shape=[-1, dict_size])
cost = fluid.layers.cross_entropy(input=scores, label=label)
avg_cost = fluid.layers.mean(cost)
optimizer = fluid.optimizer.Adagrad(
    learning_rate=0.1, regularization=fluid.regularizer.L2DecayRegularizer(regularization_coeff=0.001)
)
optimizer.minimize(avg_cost)

exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = np.random.RandomState(0)
sentences = rng.randint(0, dict_size, [max_length + 1, batch_size])
feed = {"src_word_id": sentences[1:], "trg_word_id": sentences[:-1], "trg_next_id": sentences[1:].reshape(-1, 1)}
losses = [float(exe.run(feed=feed, fetch_list=[avg_cost])[0][0]) for _ in range(20)]
assert losses[-1] < losses[0], losses
