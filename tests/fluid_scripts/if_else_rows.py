import numpy as np

import fluidx as fluid

x = fluid.data(name="x", shape=[None, 1], dtype="float32")
y = fluid.data(name="y", shape=[None, 1], dtype="float32")
x_d = fluid.layers.assign(x)
y_d = fluid.layers.assign(y)
cond = fluid.layers.greater_than(x_d, y_d)
ie = fluid.layers.IfElse(cond)
with ie.true_block():
    out_1 = ie.input(x)
    out_1 = out_1 - 10
    ie.output(out_1)
with ie.false_block():
    out_1 = ie.input(x)
    out_1 = out_1 + 10
    ie.output(out_1)
output = ie()
out = fluid.layers.reduce_sum(output[0])
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
feed = {"x": np.float32([[3], [1], [-2], [-3]]), "y": np.float32([[1], [2], [2], [0]])}
rows, total = exe.run(feed=feed, fetch_list=[output[0], out])
assert rows.reshape(-1).tolist() == [-7, 11, 8, 7] and total.tolist() == [19]
