import numpy as np

import fluidx as fluid
import fluidx.layers as layers

d0 = fluid.data("d0", shape=[None, 4], dtype="float32")
i = layers.zeros(shape=[1], dtype="int64")
i.stop_gradient = True
init = layers.zeros(shape=[4], dtype="float32")
mem_array = layers.array_write(x=layers.elementwise_mul(d0, init), i=i)
data_array = layers.array_write(x=d0, i=i)
i = layers.increment(i)
layers.array_write(d0 * 2.0, i, array=data_array)
i = layers.zeros(shape=[1], dtype="int64")
array_len = layers.fill_constant(shape=[1], dtype="int64", value=2)
cond = layers.less_than(x=i, y=array_len)
while_op = layers.While(cond=cond)
with while_op.block():
    d = layers.array_read(array=data_array, i=i)
    prev = layers.array_read(array=mem_array, i=i)
    result = layers.sums(input=[d, prev])
    i = layers.increment(x=i, in_place=True)
    layers.array_write(result, i=i, array=mem_array)
    layers.less_than(x=i, y=array_len, cond=cond)
sum_result = layers.array_read(array=mem_array, i=array_len)
length = layers.array_length(mem_array)
exe = fluid.Executor(fluid.CPUPlace())
x = np.arange(8).reshape(2, 4).astype("float32")
out, n = exe.run(feed={"d0": x}, fetch_list=[sum_result, length])
assert np.array_equal(out, 3 * x) and int(np.asarray(n).reshape(-1)[0]) == 3
