import numpy as np

import fluidx as fluid
import fluidx.layers as layers

IS_SPARSE = True


def get_usr_combined_features():
    uid = fluid.data(name="user_id", shape=[None], dtype="int64")
    usr_emb = fluid.embedding(input=uid, dtype="float32", size=[30, 8], param_attr="user_table", is_sparse=IS_SPARSE)
    usr_fc = layers.fc(input=usr_emb, size=8)
    usr_gender_id = fluid.data(name="gender_id", shape=[None], dtype="int64")
    usr_gender_emb = fluid.embedding(input=usr_gender_id, size=[2, 4], param_attr="gender_table", is_sparse=IS_SPARSE)
    usr_gender_fc = layers.fc(input=usr_gender_emb, size=4)
    concat_embed = layers.concat(input=[usr_fc, usr_gender_fc], axis=1)
    return layers.fc(input=concat_embed, size=12, act="tanh")


def get_mov_combined_features():
    mov_id = fluid.data(name="movie_id", shape=[None], dtype="int64")
    mov_emb = fluid.embedding(input=mov_id, dtype="float32", size=[40, 8], param_attr="movie_table", is_sparse=IS_SPARSE)
    mov_fc = layers.fc(input=mov_emb, size=8)
    title = fluid.data(name="movie_title", shape=[None, 6], dtype="int64")
    title_emb = fluid.embedding(input=title, size=[50, 8], is_sparse=IS_SPARSE)
    title_pool = layers.reduce_sum(title_emb, dim=1)
    concat_embed = layers.concat(input=[mov_fc, title_pool], axis=1)
    return layers.fc(input=concat_embed, size=12, act="tanh")


usr_combined_features = get_usr_combined_features()
mov_combined_features = get_mov_combined_features()
inference = layers.cos_sim(X=usr_combined_features, Y=mov_combined_features)
scale_infer = layers.scale(x=inference, scale=5.0)
label = fluid.data(name="score", shape=[None, 1], dtype="float32")
square_cost = layers.square_error_cost(input=scale_infer, label=label)
avg_cost = layers.mean(square_cost)
fluid.optimizer.SGD(learning_rate=0.2).minimize(avg_cost)

exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = np.random.RandomState(3)
feed = {
    "user_id": rng.randint(0, 30, [16]),
    "gender_id": rng.randint(0, 2, [16]),
    "movie_id": rng.randint(0, 40, [16]),
    "movie_title": rng.randint(0, 50, [16, 6]),
    "score": rng.randint(1, 6, [16, 1]).astype("float32"),
}
losses = [float(exe.run(feed=feed, fetch_list=[avg_cost])[0][0]) for _ in range(30)]
assert losses[-1] < losses[0], losses
