import numpy as np

import fluidx as fluid

x = fluid.layers.data(name="x", shape=[4], dtype="float32")
loss = fluid.layers.mean(fluid.layers.fc(input=x, size=3))
fluid.optimizer.SGD(0.1).minimize(loss)
config = fluid.DistributeTranspilerConfig()
config.mode = "nccl2"
t = fluid.DistributeTranspiler(config=config)
t.transpile(0, trainers="127.0.0.1:6170,127.0.0.1:6171", current_endpoint="127.0.0.1:6170")
trainer = t.get_trainer_program()
assert any(op.type == "all_reduce" for op in trainer.global_block().ops)
assert trainer is not fluid.default_main_program()
with fluid.ParallelExecutor(t, places=fluid.cpu_places(2)) as exe:
    exe.run_startup()
    (value,) = exe.run(feed={"x": np.ones((4, 4), "float32")}, fetch_list=[loss.name])
assert value.shape == (1,)
