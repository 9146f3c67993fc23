"""CompiledProgram, BuildStrategy, ExecutionStrategy and fluid 1.8's call of ParallelExecutor: a program that was initialised on one device
continues on ranks.

`exe.run(startup)` initialises the variables of a scope. `exe.run(compiled, ...)` copies them to ranks, which are threads or launched ranks.
Whatever reads the scope afterwards gets the values of the ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ._checks import wrong
from .comm.launch_environment import world_size
from .comm.launched_rank import member
from .executor import CPUPlace, CUDAPlace, Executor, ParallelExecutor, Scope, cpu_places, cuda_places, global_scope
from .executor.feeds import joined_feed, read_feed
from .executor.ranks import parallel_executor as _parallel
from .files.state import persistables, put_all
from .ir import ANY, Builder, NotInitializedError, Program, Variable, default_main_program, nearest
from .transpiler import DistributeTranspiler, Strategy, strategies


class _Options:
    """Options under fluid's names. An unknown option is refused, with the most similar name."""

    _known: Mapping[str, Any] = {}

    def __init__(self) -> None:
        for name, value in self._known.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no option {name!r}; {nearest(name, self._known, 'it has')}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._known and not name.startswith("_"):
            raise wrong(f"{type(self).__name__} has no option {name!r}; {nearest(name, self._known, 'it has')}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        changed = {k: v for k in self._known if (v := getattr(self, k)) != self._known[k]}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


class BuildStrategy(_Options):
    """How ranks share the work, under fluid's names.

    Used options: `reduce_strategy` (AllReduce: `strategies.data_parallel`, Reduce: `strategies.reduce_broadcast`), and `num_trainers` and
    `trainer_id`, which must agree with the launch of the script. `gradient_scale_strategy` is always CoeffNumDevice: gradients are those of
    one device for the whole batch. `sync_batch_norm` has no effect: batch_norm uses the statistics of the whole batch on any number of
    ranks.

    The other options have no effect, because they choose between equivalent implementations: `fuse_...`, `memory_optimize`,
    `enable_inplace` and so on.

    >>> strategy = BuildStrategy()
    >>> strategy.reduce_strategy = BuildStrategy.ReduceStrategy.Reduce
    >>> strategy
    BuildStrategy(reduce_strategy=<ReduceStrategy.Reduce: 1>)
    """

    class ReduceStrategy(Enum):
        """AllReduce: all ranks update; Reduce: each parameter is updated by one rank, which sends it to the others."""

        AllReduce = 0
        Reduce = 1
        _NoReduce = 2

    class GradientScaleStrategy(Enum):
        """How fluid scales the gradient of each device's loss."""

        CoeffNumDevice = 0
        One = 1
        Customized = 2

    _known = {
        "reduce_strategy": ReduceStrategy.AllReduce, "gradient_scale_strategy": GradientScaleStrategy.CoeffNumDevice,
        "num_trainers": 1, "trainer_id": 0, "trainers_endpoints": [], "sync_batch_norm": False, "async_mode": False,
        "debug_graphviz_path": "", "enable_sequential_execution": False, "remove_unnecessary_lock": True, "fuse_elewise_add_act_ops": False,
        "fuse_bn_act_ops": False, "fuse_relu_depthwise_conv": False, "fuse_broadcast_ops": False, "fuse_all_optimizer_ops": False,
        "fuse_all_reduce_ops": True, "memory_optimize": None, "enable_inplace": False, "enable_backward_optimizer_op_deps": True,
        "cache_runtime_context": False, "nccl_comm_num": 1, "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0, "enable_auto_fusion": False, "cache_expected_kernel": True, "mkldnn_enabled_op_types": {},
    }  # fmt: skip

    def _finalize_strategy_and_create_passes(self) -> None:
        """fluid's private call, which some scripts make. It does nothing."""


class ExecutionStrategy(_Options):
    """Options of a run, under fluid's names. `num_iteration_per_run` is the number of steps in a call of `run`. The others have no effect:
    a plan's order is fixed, and nothing is dropped between runs.
    """

    class ExecutorType(Enum):
        """fluid's kinds of executors; fluidx has one."""

        Default = 0
        Experimental = 1

    _known = {
        "num_threads": 0, "num_iteration_per_drop_scope": 100, "num_iteration_per_run": 1, "use_thread_barrier": False,
        "allow_op_delay": False, "use_experimental_executor": False, "use_cuda": False, "_dry_run": False,
    }  # fmt: skip


def strategy_of(options: BuildStrategy, loss: Any = None) -> Strategy:
    """The strategy for fluid's options. Raises ProgramError for options that fluidx does not have, with what to write instead."""
    reduce = options.reduce_strategy
    if not isinstance(reduce, BuildStrategy.ReduceStrategy) or reduce is BuildStrategy.ReduceStrategy._NoReduce:
        raise wrong(f"BuildStrategy: reduce_strategy must be BuildStrategy.ReduceStrategy.AllReduce or Reduce, got {reduce!r}")
    if options.gradient_scale_strategy is not BuildStrategy.GradientScaleStrategy.CoeffNumDevice:
        raise wrong(
            f"BuildStrategy: gradient_scale_strategy={options.gradient_scale_strategy} is not available: gradients are one device's of the "
            "whole batch, however many ranks there are; scale the loss (layers.scale(loss, factor)) and leave the option out"
        )
    if options.async_mode:
        raise wrong("BuildStrategy: async_mode=True is not available: the result of a step could not be proved; leave it out")
    if options.debug_graphviz_path:
        warnings.warn("BuildStrategy: debug_graphviz_path draws nothing here; fluidx.view.html(program, 'page.html') does", stacklevel=3)
    of_one = reduce is BuildStrategy.ReduceStrategy.AllReduce
    make = strategies.data_parallel if of_one else strategies.reduce_broadcast
    return make(loss=loss, rings=options.nccl_comm_num)


class CompiledProgram:
    """A program that `Executor.run` runs on ranks after `with_data_parallel` was called; without that, on one device.

    >>> import numpy as np
    >>> import fluidx as fx
    >>> main, startup = fx.Program(), fx.Program()
    >>> with fx.program_guard(main, startup), fx.unique_name.guard():
    ...     x = fx.data("x", [None, 2], "float32")
    ...     loss = fx.layers.mean(fx.layers.fc(x, 1))
    ...     _ = fx.optimizer.SGD(0.1).minimize(loss)
    >>> exe = fx.Executor(fx.CPUPlace())
    >>> with fx.scope_guard(fx.Scope()):
    ...     _ = exe.run(startup)
    ...     compiled = fx.CompiledProgram(main).with_data_parallel(loss_name=loss.name, places=fx.cpu_places(2))
    ...     exe.run(compiled, feed={"x": np.ones((4, 2), "float32")}, fetch_list=[loss])[0].shape
    (1,)
    """

    def __init__(self, program_or_graph: Any, build_strategy: BuildStrategy | None = None):
        if not isinstance(program_or_graph, Program):
            raise wrong(f"CompiledProgram: expected a Program, got {type(program_or_graph).__name__}")
        self._program = program_or_graph
        self._options = _is(BuildStrategy, "build_strategy", build_strategy)
        self._execution = ExecutionStrategy()
        self._loss, self._parallel = "", False
        self._places: Any = None
        self._local = False  # does each launched process feed its own batches?
        self._strategy: Strategy | None = None
        self._ranks: WeakKeyDictionary[Scope, _ScopedRanks] = WeakKeyDictionary()

    def with_data_parallel(
        self,
        loss_name: str | None = None,
        build_strategy: BuildStrategy | None = None,
        exec_strategy: ExecutionStrategy | None = None,
        share_vars_from: Any = None,
        places: Any = None,
    ) -> CompiledProgram:
        """Run on several ranks: one for each of `places` (default: CPU_NUM places of the executor's kind), or on the launched ranks.

        A feed is the whole batch, or a list with a batch for each rank; a fetch gives one value, for the whole batch. `share_vars_from` has
        no effect: programs that run in one scope share its variables.
        """
        if self._parallel:
            raise wrong("CompiledProgram: with_data_parallel was called before; make another CompiledProgram")
        if share_vars_from is not None and not isinstance(share_vars_from, (CompiledProgram, FluidParallelExecutor)):
            raise wrong(f"CompiledProgram: share_vars_from must be a CompiledProgram, got {type(share_vars_from).__name__}")
        if build_strategy is not None:
            self._options = _is(BuildStrategy, "build_strategy", build_strategy)
        self._execution = _is(ExecutionStrategy, "exec_strategy", exec_strategy)
        self._loss = loss_name.name if isinstance(loss_name, Variable) else loss_name or ""
        self._places, self._parallel = _as_places(places), True
        return self

    @property
    def program(self) -> Program:
        """The program for one device."""
        return self._program

    def run_on(self, executor: Executor, feed: Any, fetch_list: Any, scope: Scope | None, return_numpy: bool, return_merged: bool) -> Any:
        """Run the program for `Executor.run`."""
        scope = scope or global_scope()
        for _ in range(max(1, int(self._execution.num_iteration_per_run)) - 1):
            self._run(executor, feed, [], scope, return_numpy, return_merged)
        return self._run(executor, feed, fetch_list, scope, return_numpy, return_merged)

    def _run(self, executor: Executor, feed: Any, fetch_list: Any, scope: Scope, return_numpy: bool, return_merged: bool) -> Any:
        if not self._parallel:
            return executor.run(self._program, feed, fetch_list, scope=scope, return_numpy=return_numpy)
        places = self._rank_places(executor)
        if places is not None and len(places) == 1:
            return executor.run(self._program, feed, fetch_list, scope=scope, return_numpy=return_numpy)
        return self._of(scope, places).run(scope, feed, fetch_list, return_numpy, return_merged)

    def _rank_places(self, executor: Executor) -> Any:
        """The places of the ranks; None if a launcher started them."""
        launched = member()
        trainers = int(self._options.num_trainers)
        if launched is not None:
            if trainers not in (1, launched.world_size):
                ranks = launched.world_size
                raise wrong(f"BuildStrategy: num_trainers={trainers}, and the script was launched as {ranks} ranks; leave it out")
            return None
        if trainers > 1:
            raise wrong(f"BuildStrategy: num_trainers={trainers}: launch as many processes, fluidx run -n {trainers} --backend processes")
        if self._places is not None:
            return self._places
        if isinstance(executor.place, CUDAPlace):
            return cuda_places()
        ranks = world_size()  # set for a script whose ranks are threads
        return cpu_places(ranks if ranks > 1 else None)

    def _of(self, scope: Scope, places: Any) -> _ScopedRanks:
        known = self._ranks.get(scope)
        if known is None or known.version != self._program.version:
            if known is not None:
                scope.sync()
                known.executor.close()
            n = len(places) if places is not None else _world_size()
            strategy = self._strategy or strategy_of(self._options, self._loss or None)
            known = self._ranks[scope] = _ScopedRanks(self._program, strategy, n, places, self._local)
        return known


def _world_size() -> int:
    launched = member()
    return 1 if launched is None else launched.world_size


def _is(kind: type, what: str, value: Any) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise wrong(f"CompiledProgram: {what} must be a {kind.__name__}, got {type(value).__name__}: {value!r:.60}")
    return value


def _as_places(places: Any) -> Any:
    if places is None:
        return None
    found = list(places) if isinstance(places, (list, tuple)) else [places]
    if not found or not all(isinstance(p, CPUPlace | CUDAPlace) for p in found):
        raise wrong(f"CompiledProgram: places must be a list of places, for example fluidx.cpu_places(4), got {places!r:.80}")
    return found


class _ScopedRanks:
    """A program on ranks that train the variables of a scope."""

    def __init__(self, program: Program, strategy: Strategy, n: int, places: Any, local: bool):
        self.program, self.version, self.n, self.local = program, program.version, n, local
        t = DistributeTranspiler(strategy)
        t.transpile(program=program, startup_program=_zeros(program), trainers=n)
        self.executor = ParallelExecutor(t, places)
        self.executor.feeds_own_rows = local
        self.names = [d.name for d in persistables(program)]
        self.started = False

    def run(self, scope: Scope, feed: Any, fetch_list: Any, return_numpy: bool, return_merged: bool) -> Any:
        """A step of the ranks."""
        if self not in (scope.newer_on_ranks, scope.same_on_ranks):
            self._take_over(scope)
        if self.program.readers:
            feed = read_feed(self.program.readers, feed, 1 if self.local else self.n)
        feed = joined_feed(self.program.global_block().descs, feed)
        if self.local and isinstance(feed, Mapping):
            feed = self._among_all(feed)
        self.executor.step = scope.steps.get(self.program, 0)
        scope.newer_on_ranks, scope.same_on_ranks = self, None
        values = self.executor.run(fetch_list, feed, return_numpy=return_numpy, return_merged=return_merged)
        scope.steps[self.program] = self.executor.step
        return values

    def _take_over(self, scope: Scope) -> None:
        """Copy the scope's values to the ranks."""
        scope.sync()
        missing = [p.name for p in self.program.all_parameters() if p.name not in scope.arrays]
        if missing:
            raise NotInitializedError(f"parameter {missing[0]!r} has no value in this scope; run the startup program first")
        if not self.started:
            self.executor.run_startup()
            self.started = True
        names = [n for n in self._held() if n in scope.arrays]
        put_all(self.executor, [(n, scope.get(n)) for n in names])
        if member() is not None:  # each process initialised its scope itself: all take the values of rank 0
            put_all(self.executor, [(n, self.executor.state(n)) for n in names])

    def _among_all(self, feed: Mapping[str, Any]) -> Mapping[str, Any]:
        """The global feed with this process's batch at its place. All processes have equally many rows; the other rows are zeros and not
        read."""
        launched = member()
        if launched is None:
            return feed
        whole, descs = dict(feed), self.program.global_block().descs
        for name, value in feed.items():
            d, rows = descs.get(name), np.asarray(value)
            if d is not None and d.type.shape[:1] == (ANY,) and rows.ndim:
                whole[name] = np.zeros((len(rows) * launched.world_size, *rows.shape[1:]), rows.dtype)
                whole[name][launched.rank * len(rows) :][: len(rows)] = rows
        return whole

    def copy_to(self, scope: Scope) -> None:
        """Copy the ranks' values into the scope."""
        for name in self._held():
            scope.set(name, self.executor.value_here(name))

    def _held(self) -> list[str]:
        """The variables that have a global value."""
        return [n for n in self.names if self.executor.is_global(n)]


def _zeros(program: Program) -> Program:
    """A startup program that fills every persistable variable with zeros, which values of a scope replace later."""
    startup = Program(f"{program.name}_startup")
    block = startup.global_block()
    b = Builder(block)
    for d in persistables(program):
        block.declare(d)
        b.fill_constant(shape=d.type.shape, dtype=d.type.dtype, value=0.0, out={"Out": d.name})
    return startup


class FluidParallelExecutor:
    """fluid's ParallelExecutor(use_cuda, loss_name, main_program): it runs a program on ranks, with variables of a scope.

    `fluidx.ParallelExecutor` called with fluid's arguments returns one. `run(fetch_list, feed)` makes a step; a feed is the whole batch or
    a list with a batch for each rank, and a fetch gives the value for the whole batch.
    """

    def __init__(
        self,
        use_cuda: bool = False,
        loss_name: str | None = None,
        main_program: Program | None = None,
        share_vars_from: Any = None,
        exec_strategy: ExecutionStrategy | None = None,
        build_strategy: BuildStrategy | None = None,
        num_trainers: int = 1,
        trainer_id: int = 0,
        scope: Scope | None = None,
    ):
        self._scope: Scope = scope or (share_vars_from._scope if isinstance(share_vars_from, FluidParallelExecutor) else global_scope())
        options = _is(BuildStrategy, "build_strategy", build_strategy)
        if num_trainers != 1:
            options.num_trainers, options.trainer_id = num_trainers, trainer_id
        main = main_program if main_program is not None else default_main_program()
        self._executor = Executor(CUDAPlace(0) if use_cuda else CPUPlace())
        self._compiled = CompiledProgram(main).with_data_parallel(loss_name, options, exec_strategy, share_vars_from)

    @property
    def device_count(self) -> int:
        """The number of ranks."""
        places = self._compiled._rank_places(self._executor)
        return _world_size() if places is None else len(places)

    def run(
        self, fetch_list: Any = None, feed: Any = None, feed_dict: Any = None, return_numpy: bool = True, return_merged: bool = True
    ) -> Any:
        """One step of all ranks, like `Executor.run` of a CompiledProgram."""
        feed = feed if feed is not None else feed_dict
        return self._compiled.run_on(self._executor, feed, fetch_list, self._scope, return_numpy, return_merged)

    def drop_local_exe_scopes(self) -> None:
        """fluid's call. It does nothing: no scopes are kept between runs."""


_parallel.fluid_form = FluidParallelExecutor

__all__ = ["BuildStrategy", "CompiledProgram", "ExecutionStrategy", "FluidParallelExecutor"]
