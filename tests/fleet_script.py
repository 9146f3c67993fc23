"""What a test starts as two processes: a training with fleet, in which each worker feeds rows of its own."""

import json
import sys

import numpy as np

import fluidx as fluid
from fluidx.incubate.fleet.base import role_maker
from fluidx.incubate.fleet.collective import DistributedStrategy, fleet

folder, what = sys.argv[1], sys.argv[2]
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
me, workers = fleet.worker_index(), fleet.worker_num()
x = fluid.data("x", [None, 4], "float32")
# workers start alike, though each draws its own first values
w = fluid.ParamAttr("w", initializer=fluid.initializer.Constant(1.0 + me))
loss = fluid.layers.mean(fluid.layers.fc(x, 2, param_attr=w, bias_attr=False))
test_program = fluid.default_main_program().clone(for_test=True)
strategy = DistributedStrategy()
strategy.use_local_sgd = what == "local_sgd"
fleet.distributed_optimizer(fluid.optimizer.SGD(1.0), strategy).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fleet.startup_program)
whole = np.arange(24, dtype="float32").reshape(6, 4) % 5 - 2
own = whole[me * 6 // workers : (me + 1) * 6 // workers]
losses = [float(exe.run(fleet.main_program, feed={"x": own}, fetch_list=[loss])[0][0]) for _ in range(3)]
found = {"losses": losses, "files": fleet.split_files(["a", "b", "c"])}
if me == 0:  # only one worker saves and tests
    fluid.io.save_persistables(exe, f"{folder}/saved", fluid.default_main_program())
    found["test"] = float(exe.run(test_program, feed={"x": whole}, fetch_list=[loss])[0][0])
losses += [float(exe.run(fleet.main_program, feed={"x": own}, fetch_list=[loss])[0][0])]
found["w"] = fluid.global_scope().get("w").tolist()
with open(f"{folder}/{me}.json", "w") as f:
    json.dump(found, f)
