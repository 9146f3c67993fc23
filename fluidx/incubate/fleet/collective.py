"""fluid.incubate.fleet.collective: `fleet`, whose `distributed_optimizer` makes a program for all workers of a launcher.

Each worker feeds batches of its own with equally many rows. Gradients are those of all batches together, and fetched values are those of
all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import io
from ..._checks import wrong
from ...compiler import BuildStrategy, CompiledProgram, ExecutionStrategy
from ...ir import Operator, Program, Variable, default_startup_program
from ...mixed_precision import decorate
from ...optimizer import LocalSGDOptimizer, RecomputeOptimizer
from ...optimizer.base import Minimizer, ParamsGrads
from ...transpiler import strategies
from .base.role_maker import RoleMakerBase


class DistributedStrategy(BuildStrategy):
    """A BuildStrategy with fleet's options: `use_local_sgd`, `forward_recompute` with `recompute_checkpoints`, `use_amp` with
    `amp_loss_scaling`, `exec_strategy`. `mode` and `collective_mode` are as in DistributeTranspilerConfig."""

    _known = {
        **BuildStrategy._known, "use_local_sgd": False, "use_dist_fc": False, "dist_fc_config": None, "mode": "nccl2",
        "collective_mode": None, "forward_recompute": False, "recompute_checkpoints": [], "use_amp": False, "amp_loss_scaling": 2**15,
        "exec_strategy": None,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.exec_strategy = ExecutionStrategy()
        self.recompute_checkpoints: list[Any] = []


class CollectiveOptimizer:
    """An optimizer whose `minimize` also sets `fleet.main_program`, the program for all workers."""

    def __init__(self, optimizer: Minimizer, strategy: DistributedStrategy | None = None):
        if strategy is not None and not isinstance(strategy, DistributedStrategy):
            raise wrong(f"fleet.distributed_optimizer: strategy must be a DistributedStrategy, got {type(strategy).__name__}")
        if not hasattr(optimizer, "minimize"):
            raise wrong(f"fleet.distributed_optimizer: optimizer must be one of fluidx.optimizer, got {type(optimizer).__name__}")
        self._optimizer, self._strategy = optimizer, strategy or DistributedStrategy()

    def backward(self, *args: Any, **kwargs: Any) -> ParamsGrads:
        return self._optimizer.backward(*args, **kwargs)

    def apply_gradients(self, params_grads: Any) -> list[Operator]:
        return self._optimizer.apply_gradients(params_grads)

    def minimize(
        self, loss: Variable, startup_program: Program | None = None, parameter_list: Any = None, no_grad_set: Any = None
    ) -> tuple[list[Operator], ParamsGrads]:
        """Append gradients and updates as the optimizer does. `fleet.main_program` is then the program that workers run."""
        options, optimizer = self._strategy, self._optimizer
        if options.use_dist_fc:
            raise wrong("DistributedStrategy: use_dist_fc is not available: give the layer's ParamAttr placement=Shard(1, 'tp')")
        if options.collective_mode not in (None, "grad_allreduce", "local_sgd"):
            raise wrong(f"DistributedStrategy: collective_mode must be 'grad_allreduce' or 'local_sgd', got {options.collective_mode!r}")
        if options.forward_recompute:
            if not options.recompute_checkpoints:
                raise wrong("DistributedStrategy: forward_recompute=True needs recompute_checkpoints, a list of variables")
            optimizer = RecomputeOptimizer(optimizer, options.recompute_checkpoints)
        if options.use_amp:
            optimizer = decorate(optimizer, init_loss_scaling=options.amp_loss_scaling)
        local_sgd = options.use_local_sgd or options.collective_mode == "local_sgd"
        if local_sgd:
            optimizer = LocalSGDOptimizer(optimizer)
        startup = startup_program or default_startup_program()
        ops, pairs = optimizer.minimize(loss, startup, parameter_list, no_grad_set)
        fleet._compile(loss, startup, options, strategies.replicas() if local_sgd else None)
        return ops, pairs


class Collective:
    """The class of `fleet`: this process as a worker, and the programs of the last `minimize`."""

    def __init__(self) -> None:
        self._role: RoleMakerBase | None = None
        self.startup_program: Program | None = None
        self._origin_program: Program | None = None
        self.main_program: CompiledProgram | None = None

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Initialize. Without a role maker, the launcher's environment determines the worker number."""
        if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
            raise wrong(f"fleet.init: role_maker must be one of incubate.fleet.base.role_maker, got {type(role_maker).__name__}")
        self._role = role_maker or RoleMakerBase()

    @property
    def role(self) -> RoleMakerBase:
        if self._role is None:
            raise wrong("fleet: call fleet.init(role_maker) first")
        return self._role

    def is_worker(self) -> bool:
        return self.role.is_worker()

    def is_server(self) -> bool:
        return self.role.is_server()

    def is_first_worker(self) -> bool:
        return self.role.is_first_worker()

    def worker_index(self) -> int:
        return self.role.worker_index()

    def worker_num(self) -> int:
        return self.role.worker_num()

    def worker_endpoints(self, to_string: bool = False) -> Any:
        found = self.role.get_trainer_endpoints()
        return ",".join(found) if to_string else found

    def server_num(self) -> int:
        return 0

    def split_files(self, files: Sequence[str]) -> list[str]:
        """This worker's share of files: contiguous runs, of which the first workers have one more if the files do not divide evenly.

        >>> Collective.share(["a", "b", "c", "d", "e"], 0, 2), Collective.share(["a", "b", "c", "d", "e"], 1, 2)
        (['a', 'b', 'c'], ['d', 'e'])
        """
        if isinstance(files, str):
            raise wrong(f"fleet.split_files: files must be a list of names, got str: {files!r}")
        return self.share(files, self.worker_index(), self.worker_num())

    @staticmethod
    def share(files: Sequence[str], worker: int, workers: int) -> list[str]:
        each, more = divmod(len(files), workers)
        start = worker * each + min(worker, more)
        return list(files[start : start + each + (worker < more)])

    # fluid's calls for parameter servers, which have no effect in collective training
    def init_worker(self) -> None:
        """Does nothing."""

    run_worker = init_server = run_server = stop_worker = init_worker

    def distributed_optimizer(self, optimizer: Any, strategy: DistributedStrategy | None = None) -> CollectiveOptimizer:
        """The optimizer with a `minimize` that sets `fleet.main_program`."""
        _ = self.role
        return CollectiveOptimizer(optimizer, strategy)

    def _compile(self, loss: Variable, startup: Program, options: DistributedStrategy, strategy: Any) -> None:
        self.startup_program, self._origin_program = startup, loss.block.program
        compiled = CompiledProgram(self._origin_program).with_data_parallel(loss.name, options, options.exec_strategy)
        compiled._local, compiled._strategy = True, strategy
        self.main_program = compiled

    def _program(self, main_program: Any) -> Program:
        found = main_program if main_program is not None else self._origin_program
        found = found.program if isinstance(found, CompiledProgram) else found
        if found is None:
            raise wrong("fleet: there is no program yet; call distributed_optimizer(...).minimize(loss) first, or give main_program")
        return found

    def save_inference_model(
        self, executor: Any, dirname: Any, feeded_var_names: Any = None, target_vars: Any = None, main_program: Any = None,
        export_for_deployment: bool = True,
    ) -> list[str]:  # fmt: skip
        """`io.save_inference_model` of the program that was minimized."""
        program = self._program(main_program)
        return io.save_inference_model(dirname, feeded_var_names or [], target_vars or [], executor, program)

    def save_persistables(self, executor: Any, dirname: Any, main_program: Any = None, filename: str | None = None) -> None:
        """`io.save_persistables` of the program that was minimized."""
        io.save_persistables(executor, dirname, self._program(main_program), filename)


fleet = Collective()

__all__ = ["Collective", "CollectiveOptimizer", "DistributedStrategy", "fleet"]
