import numpy

import fluidx as fluid

train_program, startup_program = fluid.Program(), fluid.Program()
train_program.random_seed = startup_program.random_seed = 1
with fluid.program_guard(train_program, startup_program):
    with fluid.unique_name.guard():
        data = fluid.data(name="X", shape=[None, 6], dtype="float32")
        hidden = fluid.layers.fc(input=data, size=10)
        hidden = fluid.layers.dropout(hidden, 0.2)
        loss = fluid.layers.mean(hidden * hidden)
        test_program = train_program.clone(for_test=True)
        fluid.optimizer.Momentum(learning_rate=0.01, momentum=0.9).minimize(loss)

exe = fluid.Executor(fluid.CPUPlace())
exe.run(startup_program)

build_strategy = fluid.BuildStrategy()
build_strategy.memory_optimize = True
build_strategy.enable_inplace = True
build_strategy.fuse_all_optimizer_ops = True
build_strategy.sync_batch_norm = False
exec_strategy = fluid.ExecutionStrategy()
exec_strategy.num_threads = 4
exec_strategy.num_iteration_per_drop_scope = 10
compiled_prog = fluid.CompiledProgram(train_program).with_data_parallel(
    loss_name=loss.name, build_strategy=build_strategy, exec_strategy=exec_strategy, places=fluid.cpu_places(2)
)
compiled_test_prog = fluid.CompiledProgram(test_program).with_data_parallel(share_vars_from=compiled_prog, places=fluid.cpu_places(2))

x = numpy.random.RandomState(0).normal(size=(8, 6)).astype("float32")
before = numpy.array(fluid.global_scope().find_var("fc_0.w_0").get_tensor())
(train_loss,) = exe.run(compiled_prog, feed={"X": x}, fetch_list=[loss.name])
after = numpy.array(fluid.global_scope().find_var("fc_0.w_0").get_tensor())
assert not numpy.array_equal(before, after)
(test_loss,) = exe.run(compiled_test_prog, feed={"X": x}, fetch_list=[loss.name])
(one_device,) = exe.run(test_program, feed={"X": x}, fetch_list=[loss.name])
assert abs(test_loss[0] - one_device[0]) < 1e-5 * abs(one_device[0])
per_place = exe.run(compiled_prog, feed=[{"X": x[:4]}, {"X": x[4:]}], fetch_list=[loss.name], return_merged=True)
assert per_place[0].shape == (1,)
