"""`PipelineOptimizer`: fluid's optimizer for programs with layers on several devices."""

from __future__ import annotations

import warnings
from typing import Any

from .._checks import whole
from .wrapped import WrappedOptimizer


class PipelineOptimizer(WrappedOptimizer):
    """The optimizer itself: on one device, micro-batches and stages do not change results.

    `cut_list` and fluid's other arguments have no effect. On ranks the same program runs as a pipeline with
    `strategies.pipeline(optimizer.num_microbatches)` for `Mesh(pp=2)`: operators under `device_guard("gpu:1")` are on rank 1.

    >>> import fluidx as fx
    >>> optimizer = fx.optimizer.PipelineOptimizer(fx.optimizer.SGD(0.1), num_microbatches=4)
    >>> fx.strategies.pipeline(optimizer.num_microbatches)
    pipeline(micro_batches=4, schedule='1f1b')
    """

    def __init__(
        self,
        optimizer: Any,
        cut_list: Any = None,
        place_list: Any = None,
        concurrency_list: Any = None,
        queue_size: int = 30,
        sync_steps: int = 1,
        start_cpu_core_id: int = 0,
        num_microbatches: int = 4,
    ):
        super().__init__(optimizer)
        if cut_list is not None:
            warnings.warn(
                f"{self.label}: cut_list is not used; for a pipeline on ranks write the layers of stage k under "
                'device_guard("gpu:k"), and transpile with strategies.pipeline(4) for Mesh(pp=stages)',
                stacklevel=2,
            )
        self.num_microbatches = whole(self.label, "num_microbatches", num_microbatches, 1)
