import numpy as np

import fluidx as fluid
from fluidx.incubate.fleet.base import role_maker
from fluidx.incubate.fleet.collective import DistributedStrategy, fleet

fleet.init(role_maker.UserDefinedCollectiveRoleMaker(current_id=0, worker_endpoints=["127.0.0.1:6170"]))
x = fluid.data("x", [None, 8], "float32")
y = fluid.data("y", [None, 1], "int64")
h1 = fluid.layers.fc(x, 16, act="relu")
h2 = fluid.layers.fc(h1, 16, act="relu")
loss = fluid.layers.mean(fluid.layers.softmax_with_cross_entropy(fluid.layers.fc(h2, 4), y))
strategy = DistributedStrategy()
strategy.forward_recompute = True
strategy.recompute_checkpoints = [h1, h2]
strategy.use_amp = True
strategy.amp_loss_scaling = 128.0
fleet.distributed_optimizer(fluid.optimizer.Adam(0.01), strategy).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
rng = np.random.RandomState(0)
feed = {"x": rng.normal(size=[8, 8]).astype("float32"), "y": rng.randint(0, 4, [8, 1])}
losses = [float(exe.run(fleet.main_program, feed=feed, fetch_list=[loss])[0][0]) for _ in range(8)]
assert losses[-1] < losses[0], losses
