import os
import tempfile

import numpy as np

import fluidx as fluid


def net(classes, name):
    image = fluid.data("image", [None, 6], "float32")
    body = fluid.layers.fc(image, 8, act="relu", param_attr="body_w", bias_attr="body_b")
    return image, fluid.layers.fc(body, classes, act="softmax", param_attr=f"{name}_w", bias_attr=f"{name}_b")


exe = fluid.Executor(fluid.CPUPlace())
with tempfile.TemporaryDirectory() as folder:
    source, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(source, startup):
        net(10, "old")
    exe.run(startup)
    fluid.io.save_params(exe, folder, main_program=source)
    pretrained = np.array(fluid.global_scope().find_var("body_w").get_tensor())

    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.scope_guard(fluid.Scope()):
        image, out = net(3, "new")
        loss = fluid.layers.mean(fluid.layers.cross_entropy(out, fluid.data("label", [None, 1], "int64")))
        fluid.optimizer.Momentum(0.01, 0.9).minimize(loss)
        exe.run(startup)

        def if_exist(var):
            return os.path.exists(os.path.join(folder, var.name))

        fluid.io.load_vars(exe, folder, main_program=main, predicate=if_exist)
        assert np.array_equal(np.array(fluid.global_scope().find_var("body_w").get_tensor()), pretrained)
        exe.run(main, feed={"image": np.ones((2, 6), "float32"), "label": np.zeros((2, 1), "int64")}, fetch_list=[loss])
