"""What people new to fluidx get wrong. Each is answered by an error of fluidx or by a warning: none is silent, none a bare Python error."""

import warnings

import numpy as np
import pytest

import fluidx as fx
from fluidx.ir import FluidxError

L = fx.layers

# {kind: {what is done: the code}}; the fixture `there` says which names the code has
MISUSES = {
    "places": {
        "an executor on a number": "fx.Executor(0)",
        "an executor on a list": "fx.Executor([fx.CPUPlace()])",
        "a number of places": "fx.ParallelExecutor(t, places=4)",
        "a place for the list of places": "fx.ParallelExecutor(t, places=fx.CPUPlace())",
        "a string for places": "fx.ParallelExecutor(t, places='cpu')",
        "fewer places than ranks": "fx.ParallelExecutor(t, places=fx.cpu_places(1))",
        "more places than ranks": "fx.ParallelExecutor(t, places=fx.cpu_places(3))",
        "no places": "fx.ParallelExecutor(t, places=[])",
        "a place that is a string": "fx.ParallelExecutor(t, places=['cpu', 'cpu'])",
        "an executor on a string": "fx.Executor('cpu')",
        "zero places": "fx.cpu_places(0)",
        "minus one place": "fx.cpu_places(-1)",
        "places as text": "fx.cpu_places('4')",
        "a GPU where there is none": "fx.Executor(fx.CUDAPlace(0)).run(startup)",
    },
    "programs": {
        "a constant too large for an index": "exe.run(main, feed=feed, fetch_list=[L.fill_constant([2**62], 'float32', 0.0)])",
        "a layer too large for an index": "L.fc(x, 2**63); exe.run(startup)",
        "a layer too large for memory": "L.fc(x, 10**15); exe.run(startup)",
        "a stride without an end": "L.conv2d(fx.data('i', [-1, 1, 8, 8], 'float32'), 2, 3, stride=2**63 - 1)",
        "an activation in capitals": "L.fc(x, 4, act='Relu')",
        "an unknown activation": "L.fc(x, 4, act='rellu')",
        "an activation that is a function": "L.fc(x, 4, act=np.tanh)",
        "a negative size": "L.fc(x, -4)",
        "a size of zero": "L.fc(x, 0)",
        "a size that is a string": "L.fc(x, '4')",
        "a size that is a float": "L.fc(x, 4.5)",
        "an array as input": "L.fc(np.ones((2, 3), 'float32'), 4)",
        "nothing as input": "L.fc(None, 4)",
        "a list of names as input": "L.fc('x', 4)",
        "shapes that do not fit": "L.matmul(x, L.fill_constant([7, 2], 'float32', 1.0))",
        "dtypes that do not fit": "L.elementwise_add(x, L.cast(x, 'float64'))",
        "an unknown dtype": "fx.data('z', [-1, 3], 'float33')",
        "a dtype that is no dtype": "fx.data('z', [-1, 3], 3)",
        "a shape that is a number": "fx.data('z', 3, 'float32')",
        "a shape with a string": "fx.data('z', ['a b', 3], 'float32')",
        "a shape with -2": "fx.data('z', [-2, 3], 'float32')",
        "a name that is a number": "fx.data(3, [-1, 3], 'float32')",
        "a name twice": "fx.data('x', [-1, 5], 'float32')",
        "an axis that is not there": "L.reduce_sum(x, dim=7)",
        "a reshape of another size": "L.reshape(L.fill_constant([2, 3], 'float32', 1.0), [4, 2])",
        "concat of unlike shapes": "L.concat([x, L.fill_constant([2, 5], 'float32', 1.0)], axis=0)",
        "concat of nothing": "L.concat([], axis=0)",
        "a transpose of too few axes": "L.transpose(x, [0])",
        "a kernel larger than the image": "L.conv2d(fx.data('i', [-1, 1, 3, 3], 'float32'), 2, 9)",
        "a stride of zero": "L.conv2d(fx.data('i', [-1, 1, 8, 8], 'float32'), 2, 3, stride=0)",
        "groups that do not divide": "L.conv2d(fx.data('i', [-1, 3, 8, 8], 'float32'), 4, 3, groups=2)",
        "an image without channels": "L.conv2d(x, 2, 3)",
        "a dropout above 1": "L.dropout(x, 1.5)",
        "labels that are floats": "L.cross_entropy(L.softmax(x), L.cast(label, 'float32'))",
        "an embedding of floats": "L.embedding(x, [10, 4])",
        "a layer that is not there": "L.dense(x, 4)",
        "a layer of fluid that is not here": "L.sequence_pool(x, 'max')",
        "an attribute of fluidx that is not there": "fx.Programm()",
        "a condition that is a number": "L.cond(1, lambda: x, lambda: x)",
        "branches of two types": "L.cond(L.less_than(loss, loss), lambda: x, lambda: L.cast(x, 'float64'))",
        "a truth value of a comparison": "bool(L.less_than(loss, loss))",
        "a parameter twice with two shapes": "L.fc(x, 4, param_attr='w9'); L.fc(x, 5, param_attr='w9')",
        "a param_attr that is a number": "L.fc(x, 4, param_attr=3)",
        "an initializer that is a string": "L.fc(x, 4, param_attr=fx.ParamAttr(initializer='xavier'))",
        "a regularizer that is a number": "fx.optimizer.SGD(0.1, regularization=0.01).minimize(loss)",
        "a placement that is a string": "L.fc(x, 4, param_attr=fx.ParamAttr(placement='tp'))",
        "a loop over a variable": "for row in x: pass",
        "the length of a variable": "len(x)",
        "a variable as a number": "float(loss)",
        "a variable as an array": "np.asarray(x)",
        "an array plus a variable": "np.ones((4, 3), 'float32') + x",
        "the value of a variable as in PyTorch": "loss.item()",
        "the array of a variable as in PyTorch": "x.numpy()",
        "backward as in PyTorch": "loss.backward()",
        "an argument of a layer misspelt": "L.fc(x, 4, activation='relu')",
        "a layer without its size": "L.fc(x)",
        "an argument of ParamAttr misspelt": "fx.ParamAttr(initialiser=fx.initializer.Xavier())",
        "trainable that is text": "fx.ParamAttr(trainable='no')",
        "an argument of an initializer that it has not": "fx.initializer.Xavier(gain=2)",
        "a size of an embedding that is a number": "L.embedding(label, 10)",
        "a constant that is text": "L.fill_constant([1], 'float32', 'a')",
        "a scope that is a number": "fx.name_scope(3).__enter__()",
        "a picture of a number": "fx.view.draw(3)",
        "a seed that is text": "main.random_seed = 'one'",
        "a seed that is a float": "startup.random_seed = 1.5",
        "text that is no program": "fx.Program.parse_from_string('hello')",
        "text that is cut off": "fx.Program.parse_from_string(str(main)[:-40])",
        "text that is bytes of something": "fx.Program.parse_from_string('\\0\\1\\2')",
    },
    "optimizers": {
        "a negative learning rate": "fx.optimizer.SGD(-0.1).minimize(loss)",
        "a learning rate that is text": "fx.optimizer.SGD('0.1').minimize(loss)",
        "a learning rate that is NaN": "fx.optimizer.SGD(float('nan')).minimize(loss)",
        "a loss that is no number": "fx.optimizer.SGD(0.1).minimize(x)",
        "a loss that is an array": "fx.optimizer.SGD(0.1).minimize(np.float32(1))",
        "minimize twice": "fx.optimizer.SGD(0.1).minimize(loss)",
        "a loss without parameters": "fx.optimizer.SGD(0.1).minimize(L.mean(label))",
        "a parameter that is not there": "fx.optimizer.SGD(0.1).minimize(loss, parameter_list=['nope'])",
        "an optimizer that is not there": "fx.optimizer.AdamX(0.1)",
        "an argument of an optimizer misspelt": "fx.optimizer.SGD(lr=0.1)",
        "an optimizer without a learning rate": "fx.optimizer.SGD()",
        "arguments as in PyTorch": "fx.optimizer.Adam(0.1, betas=(0.9, 0.99))",
        "a momentum that is text": "fx.optimizer.Momentum(0.1, 'big')",
    },
    "feeds": {
        "no rows": "exe.run(main, feed=none)",
        "no feed": "exe.run(main, fetch_list=[loss])",
        "a name that is not there": "run(feed={**feed, 'y': feed['x']})",
        "a float64": "run(feed={**feed, 'x': feed['x'].astype('float64').astype(object)})",
        "columns too many": "run(feed={**feed, 'x': np.ones((4, 9), 'float32')})",
        "labels of rank 1": "run(feed={**feed, 'label': np.zeros(4, 'int64')})",
        "labels that are floats": "run(feed={**feed, 'label': np.zeros((4, 1), 'float32')})",
        "labels out of range": "run(feed={**feed, 'label': np.full((4, 1), 99)})",
        "unequal rows": "run(feed={**feed, 'label': np.zeros((3, 1), 'int64')})",
        "ragged lists": "run(feed={**feed, 'x': [[1.0, 2.0], [1.0]]})",
        "text": "run(feed={**feed, 'x': 'abc'})",
        "nothing": "run(feed={**feed, 'x': None})",
        "a list of arrays": "exe.run(main, feed=[feed['x'], feed['label']], fetch_list=[loss])",
        "a fetch that is not there": "exe.run(main, feed=feed, fetch_list=['lossy'])",
        "a fetch that is a number": "exe.run(main, feed=feed, fetch_list=[3])",
        "a fetch that is a string": "exe.run(main, feed=feed, fetch_list='loss')",
        "a fetch of another program": "exe.run(main, feed=feed, fetch_list=[other])",
        "before startup": "fx.Executor().run(main, feed=feed, fetch_list=[loss], scope=fx.executor.Scope())",
        "a transpiler where a program belongs": "exe.run(t, feed=feed, fetch_list=[loss])",
        "a string where a program belongs": "exe.run('main', feed=feed)",
        "a loss where a program belongs": "exe.run(loss, feed=feed)",
        "no rows on ranks": "unstarted().run(feed=none)",
        "ranks before startup": "unstarted().run(feed=feed, fetch_list=[loss])",
        "a feed of ranks that is missing": "ranks().run(feed={'x': feed['x']})",
        "an argument of run misspelt": "exe.run(main, feeds=feed)",
        "an argument of run of ranks misspelt": "ranks().run(feeds=feed)",
        "a program for ranks to run": "ranks().run(main, feed=feed, fetch_list=[loss])",
        "a timeout that is text": "fx.ParallelExecutor(t, places=fx.cpu_places(2), timeout='5')",
        "an argument of an executor that it has not": "fx.Executor(device='cpu')",
        "a closed executor": "e = ranks(); e.close(); e.run(feed=feed, fetch_list=[loss])",
    },
    "transpiling": {
        "replicas without an optimizer for them": "transpile('replicas', trainers=2)",
        "a pipeline on a number": "transpile(fx.strategies.pipeline(4), trainers=2)",
        "a mesh axis that nothing uses": "transpile('data_parallel', trainers=fx.Mesh(dp=1, tp=2))",
        "a strategy that is not there": "transpile('ring', trainers=2)",
        "a strategy that is a number": "fx.DistributeTranspiler(3)",
        "a strategy that is a class": "transpile(fx.strategies.zero1, trainers=2)",
        "an option misspelt": "fx.strategies.data_parallel(bucket_size=25)",
        "an option by name misspelt": "fx.strategies.get('data_parallel', bucket_size=25)",
        "an option of another type": "fx.strategies.data_parallel(bucket_mb='25')",
        "a negative option": "fx.strategies.data_parallel(bucket_mb=-1)",
        "an algorithm that is not there": "fx.strategies.data_parallel(algorithm='rings')",
        "no trainers": "transpile('zero1', trainers=0)",
        "trainers that are a float": "transpile('zero1', trainers=2.5)",
        "a program that is text": "transpile('zero1', program='main', startup_program=startup, trainers=2)",
        "startup for main": "transpile('zero1', program=startup, startup_program=main, trainers=2)",
        "a mesh axis of zero": "fx.Mesh(dp=0)",
        "a mesh without axes": "fx.Mesh()",
        "transpiled twice": "transpile('zero1', program=t.get_trainer_program(0), startup_program=startup, trainers=2)",
        "a rank that is not there": "t.get_trainer_program(7)",
        "verify before transpile": "fx.DistributeTranspiler('zero1').verify()",
        "rails on one host": "transpile('rails', trainers=2)",
        "a choice of an unknown parameter": "transpile(fx.strategies.reduce_broadcast(roots={'nope': 0}), trainers=2)",
        "an argument of transpile misspelt": "transpile('zero1', world_size=2)",
        "an argument of verify that it has not": "t.verify(ranks=3)",
        "pservers without servers": "transpile('data_parallel', trainers=2, pservers='a:1')",
        "wire of an unknown dtype": "fx.strategies.data_parallel(wire='int4')",
    },
    "files": {
        "an ONNX path with NUL": "fx.onnx.load('a\\0b.onnx')",
        "a path with NUL": "fx.io.save(main, 'a\\0b')",
        "a folder that is not there": "fx.io.load(main, str(folder / 'nope' / 'w'), exe)",
        "a file that is text": "(folder / 'w.safetensors').write_text('hello'); fx.io.load(main, str(folder / 'w'), exe)",
        "a path that is None": "fx.io.save(main, None)",
        "a path that is a number": "fx.io.save(main, 3)",
        "an ONNX file that is not there": "fx.onnx.load(str(folder / 'no.onnx'))",
        "an ONNX file that is text": "(folder / 'm.onnx').write_text('hello'); fx.onnx.load(str(folder / 'm.onnx'))",
        "a PyTorch file as ONNX": "(folder / 'm.pt').write_bytes(b'PK\\3\\4' + bytes(60)); fx.onnx.load(str(folder / 'm.pt'))",
        "a folder as ONNX": "fx.onnx.load(str(folder))",
        "a program that is saved as another": "fx.io.save('main', str(folder / 'w'))",
        "a pickle of PyTorch as a checkpoint": "(folder / 'w.pth').write_bytes(b'PK\\3\\4'); fx.io.load(main, str(folder / 'w.pth'), exe)",
        "an inference model of nothing": "fx.io.save_inference_model(str(folder), ['nope'], [loss], exe, main)",
        "a model that is not there": "fx.io.load_inference_model(str(folder / 'nope'), exe)",
    },
}
CASES = [pytest.param(code, id=f"{kind}: {what}") for kind, cases in MISUSES.items() for what, code in cases.items()]


@pytest.fixture
def there(tmp_path):
    """A classifier with its optimizer, two ranks of it, and what is fed."""
    main, startup, elsewhere = fx.Program("main"), fx.Program("startup"), fx.Program("elsewhere")
    main.random_seed = startup.random_seed = 1
    with fx.unique_name.guard():
        with fx.program_guard(elsewhere, fx.Program("its_startup")):
            other = L.fc(fx.data("z", [-1, 3], "float32"), 2)
        with fx.program_guard(main, startup):
            x, label = fx.data("x", [-1, 3], "float32"), fx.data("label", [-1, 1], "int64")
            loss = L.mean(L.softmax_with_cross_entropy(L.fc(x, 4), label))
            fx.optimizer.Momentum(0.1, 0.9).minimize(loss)
    exe = fx.Executor()
    exe.run(startup)
    t = fx.DistributeTranspiler("data_parallel").transpile(program=main, startup_program=startup, trainers=2)
    opened = []

    def unstarted():
        opened.append(fx.ParallelExecutor(t, places=fx.cpu_places(2)))
        return opened[-1]

    def ranks():
        unstarted().run_startup()
        return opened[-1]

    def transpile(strategy, **given):
        return fx.DistributeTranspiler(strategy).transpile(**{"program": main, "startup_program": startup, **given})

    def run(feed):
        return exe.run(main, feed=feed, fetch_list=[loss])

    feed = {"x": np.ones((4, 3), "float32"), "label": np.zeros((4, 1), "int64")}
    names = {"main": main, "startup": startup, "loss": loss, "x": x, "label": label, "feed": feed, "exe": exe, "t": t, "folder": tmp_path}
    names |= {"none": {n: a[:0] for n, a in feed.items()}, "other": other, "fx": fx, "L": L, "np": np}
    yield {**names, "unstarted": unstarted, "ranks": ranks, "transpile": transpile, "run": run}
    for one in opened:
        one.close()


@pytest.mark.parametrize("code", CASES)
def test_a_misuse_is_answered(there, code):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with fx.unique_name.guard(), fx.program_guard(there["main"], there["startup"]):
                exec(code, there)
        except (FluidxError, fx.config.ConfigError) as e:
            assert len(str(e)) > 20, "a message says what is expected"
        except (AttributeError, TypeError) as e:  # names and arguments: Python's own classes, with a message of fluidx
            assert "fluidx" in str(e) or "; " in str(e) or "did you mean" in str(e).lower(), f"bare: {e}"
        else:
            assert said, "silent"


def test_numbers_of_numpy_stand_on_either_side_of_a_variable(there):
    x, exe, main, feed = (there[n] for n in ("x", "exe", "main", "feed"))
    with fx.program_guard(main, there["startup"]):
        both = [np.float32(2) * x, x * np.float32(2)]
    assert all(isinstance(v, fx.ir.Variable) for v in both)
    for got in exe.run(main, feed=feed, fetch_list=both):
        assert got.tolist() == (2 * feed["x"]).tolist()


def test_a_call_says_which_arguments_there_are():
    with pytest.raises(TypeError, match=r"^ParamAttr\(\) got an unexpected keyword argument 'initialiser'; did you mean 'initializer'\?$"):
        fx.ParamAttr(initialiser=fx.initializer.Xavier())
    with pytest.raises(TypeError, match=r"^SGD\(\) got an unexpected keyword argument 'lr'; it takes: learning_rate, parameter_list, "):
        fx.optimizer.SGD(lr=0.1)


def test_a_type_error_inside_a_layer_is_left_as_it_is(there):
    def broken(i):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="^mine$"):
        L.while_loop(broken, broken, [L.fill_constant([1], "int64", 0)])
