import numpy as np

import fluidx as fluid
import fluidx.incubate.fleet.base.role_maker as role_maker
from fluidx.incubate.fleet.collective import DistributedStrategy, fleet

role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)

input_x = fluid.data(name="x", shape=[None, 8], dtype="float32")
input_y = fluid.data(name="y", shape=[None, 1], dtype="int64")
fc_1 = fluid.layers.fc(input=input_x, size=16, act="tanh")
prediction = fluid.layers.fc(input=fc_1, size=2, act="softmax")
cost = fluid.layers.mean(fluid.layers.cross_entropy(input=prediction, label=input_y))

optimizer = fluid.optimizer.SGD(learning_rate=0.1)
strategy = DistributedStrategy()
strategy.nccl_comm_num = 1
exec_strategy = fluid.ExecutionStrategy()
exec_strategy.num_threads = 3
strategy.exec_strategy = exec_strategy
optimizer = fleet.distributed_optimizer(optimizer, strategy=strategy)
optimizer.minimize(cost, fluid.default_startup_program())

exe = fluid.Executor(fluid.CPUPlace())
exe.run(fleet.startup_program)
rng = np.random.RandomState(fleet.worker_index())
costs = []
for i in range(6):
    x = rng.normal(size=[16, 8]).astype("float32")
    y = (x[:, :1] > 0).astype("int64")
    (cost_val,) = exe.run(program=fleet.main_program, feed={"x": x, "y": y}, fetch_list=[cost.name])
    costs.append(float(cost_val[0]))
assert fleet.is_first_worker() or fleet.worker_index() > 0
assert fleet.split_files(["a", "b"]) and np.isfinite(costs).all()
