"""Every operator, one declaration each. Importing this package fills the registry `fluidx.ir.OPS`."""

from . import (
    activation,
    collective,
    compare,
    control,
    conv,
    dropout,
    elementwise,
    embedding,
    fill,
    host,
    indexing,
    loss,
    matmul,
    metric,
    movement,
    norm,
    optimize,
    p2p,
    pool,
    random,
    reduction,
    reshape,
    search,
    slicing,
    softmax,
)

__all__ = [
    "activation", "collective", "compare", "control", "conv", "dropout", "elementwise", "embedding", "fill", "host", "indexing",
    "loss", "matmul", "metric", "movement", "norm", "optimize", "p2p", "pool", "random", "reduction", "reshape", "search",
    "slicing", "softmax",
]  # fmt: skip
