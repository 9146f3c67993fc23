import math

import fluidx as fluid

EMBED_SIZE, HIDDEN_SIZE, N, DICT = 8, 16, 5, 20


def inference_program(words, is_sparse):
    embeds = [
        fluid.embedding(input=w, size=[DICT, EMBED_SIZE], dtype="float32", is_sparse=is_sparse, param_attr="shared_w") for w in words
    ]
    concat_embed = fluid.layers.concat(input=embeds, axis=1)
    concat_embed = fluid.layers.reshape(concat_embed, [-1, (N - 1) * EMBED_SIZE])
    hidden1 = fluid.layers.fc(input=concat_embed, size=HIDDEN_SIZE, act="sigmoid")
    return fluid.layers.fc(input=hidden1, size=DICT, act="softmax")


words = [fluid.data(name=n, shape=[None, 1], dtype="int64") for n in ("firstw", "secondw", "thirdw", "fourthw")]
next_word = fluid.data(name="nextw", shape=[None, 1], dtype="int64")
predict_word = inference_program(words, is_sparse=True)
cost = fluid.layers.cross_entropy(input=predict_word, label=next_word)
avg_cost = fluid.layers.mean(cost)
sgd_optimizer = fluid.optimizer.AdagradOptimizer(
    learning_rate=3e-1, regularization=fluid.regularizer.L2DecayRegularizer(8e-4)
)
sgd_optimizer.minimize(avg_cost)


def ngrams():
    for k in range(64):
        yield tuple((k + i) % DICT for i in range(N))


exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
feeder = fluid.DataFeeder(feed_list=[*words, next_word], place=fluid.CPUPlace())
costs = []
for _ in range(12):
    for data in fluid.io.batch(ngrams, 16)():
        out = exe.run(fluid.default_main_program(), feed=feeder.feed(data), fetch_list=[avg_cost])
        costs.append(out[0][0])
        if math.isnan(float(costs[-1])):
            raise SystemExit("got NaN loss, training failed.")
assert costs[-1] < costs[0], costs
