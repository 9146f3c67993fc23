import numpy as np

import fluidx as fluid


def generator(like):
    noise = fluid.layers.gaussian_random_batch_size_like(like, shape=[-1, 4])
    hidden = fluid.layers.fc(noise, 8, act="relu", param_attr="g_w1", bias_attr="g_b1")
    return fluid.layers.fc(hidden, 3, param_attr="g_w2", bias_attr="g_b2")


def discriminator(x):
    hidden = fluid.layers.fc(x, 8, act="leaky_relu", param_attr="d_w1", bias_attr="d_b1")
    return fluid.layers.fc(hidden, 1, param_attr="d_w2", bias_attr="d_b2")


def loss_for(scores, value):
    target = fluid.layers.fill_constant_batch_size_like(scores, shape=[-1, 1], dtype="float32", value=value)
    return fluid.layers.mean(fluid.layers.sigmoid_cross_entropy_with_logits(x=scores, label=target))


def names(program, prefix):
    return [p.name for p in program.global_block().all_parameters() if p.name.startswith(prefix)]


d_program, g_program, startup = fluid.Program(), fluid.Program(), fluid.Program()
with fluid.program_guard(d_program, startup):
    real = fluid.data("real", [None, 3], "float32")
    soft = fluid.layers.uniform_random_batch_size_like(real, shape=[-1, 1], min=0.9, max=1.0)
    d_loss = loss_for(discriminator(real), 1.0) + loss_for(discriminator(generator(real)), 0.0)
    fluid.optimizer.Adam(2e-3).minimize(d_loss, startup_program=startup, parameter_list=names(d_program, "d_"))
with fluid.program_guard(g_program, startup):
    real = fluid.data("real", [None, 3], "float32")
    g_loss = loss_for(discriminator(generator(real)), 1.0)
    fluid.optimizer.Adam(2e-3).minimize(g_loss, startup_program=startup, parameter_list=names(g_program, "g_"))
exe = fluid.Executor(fluid.CPUPlace())
exe.run(startup)
x = np.random.RandomState(0).normal(size=[8, 3]).astype("float32")
for _ in range(3):
    d = exe.run(d_program, feed={"real": x}, fetch_list=[d_loss, soft])
    g = exe.run(g_program, feed={"real": x}, fetch_list=[g_loss])
assert np.isfinite(d[0]).all() and np.isfinite(g[0]).all() and (d[1] >= 0.9).all()
