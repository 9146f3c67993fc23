import os

import numpy

import fluidx as fluid

use_cuda = False
place = fluid.CUDAPlace(0) if use_cuda else fluid.CPUPlace()
if not use_cuda:
    os.environ["CPU_NUM"] = str(2)
exe = fluid.Executor(place)
train_program, startup_program = fluid.Program(), fluid.Program()
with fluid.program_guard(train_program, startup_program):
    data = fluid.data(name="X", shape=[None, 1], dtype="float32")
    hidden = fluid.layers.fc(input=data, size=10)
    loss = fluid.layers.mean(hidden)
    test_program = fluid.default_main_program().clone(for_test=True)
    fluid.optimizer.SGD(learning_rate=0.01).minimize(loss)

exe.run(startup_program)
train_exe = fluid.ParallelExecutor(use_cuda=use_cuda, main_program=train_program, loss_name=loss.name)
test_exe = fluid.ParallelExecutor(use_cuda=use_cuda, main_program=test_program, share_vars_from=train_exe)
assert train_exe.device_count == 2
x = numpy.random.random(size=(10, 1)).astype("float32")
(first,) = train_exe.run(feed={"X": x}, fetch_list=[loss.name])
(tested,) = test_exe.run(feed={"X": x}, fetch_list=[loss.name])
assert tested[0] < first[0]
# a list of dicts, one for each device
x2 = numpy.random.random(size=(10, 1)).astype("float32")
train_exe.run(feed=[{"X": x}, {"X": x2}], fetch_list=[loss.name])
train_exe.drop_local_exe_scopes()
