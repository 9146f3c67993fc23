"""Placements that access patterns refuse are tried: a placement that works, but that no row allows, is a missing row, unless its reason is
listed here.
"""

import fluidx.ops  # noqa: F401 - fills OPS
from fluidx.ir import all_ops
from fluidx.testing import missing_rows
from tests.each import each

RATE = "the new value is linear in it and the learning rate together, and nobody holds a rate in terms"
BOTH = "each result is linear in the other operand, and nobody holds both operands in terms"
LUCK = "luck of the sample"

# op -> (reason, the placements)
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "adagrad": (RATE, {"partial(sum), whole, whole, partial(sum) -> partial(sum), whole"}),
    "bn_running": (
        "terms of the step's statistics are added up before: one reduction and not one of each result",
        {"partial(sum), partial(sum), partial(sum) -> partial(sum), partial(sum)"},
    ),
    "cast": ("a sum is cast last where bits are lost: terms would be rounded one by one", {"partial(sum) -> partial(sum)"}),
    "check_finite_and_unscale": ("not where a sum overflows", {"partial(sum), whole -> partial(sum), partial(sum)"}),
    "conv2d_grad": (BOTH, {"partial(sum), partial(sum), whole -> partial(sum), partial(sum)"}),
    "conv2d_transpose_grad": (BOTH, {"partial(sum), partial(sum), whole -> partial(sum), partial(sum)"}),
    "decayed_adagrad": (RATE, {"partial(sum), whole, whole, partial(sum) -> partial(sum), whole"}),
    "fake_quantize_grad": (
        f"{LUCK}: nothing is out of range, whatever the zero point is",
        {
            "whole, whole, partial(sum), whole -> whole", "whole, whole, partial(sum), partial(sum) -> partial(sum)",
            *(f"shard({k}), whole, partial(sum), shard({k}) -> shard({k})" for k in range(3)),
        },
    ),
    "hard_sigmoid_grad": (
        f"{LUCK}: nothing is saturated, and one row is repeated for all",
        {"shard(0), whole -> whole", "shard(0), partial(sum) -> partial(sum)"},
    ),
    "isinf": ("not where a sum overflows", {"partial(sum) -> partial(max)"}),
    "isnan": ("not where infinities cancel", {"partial(sum) -> partial(max)"}),
    "matmul_vector_grad": (BOTH, {"partial(sum), partial(sum), whole -> partial(sum), partial(sum)"}),
    "momentum": (RATE, {"partial(sum), whole, whole, partial(sum) -> partial(sum), whole"}),
    "pool2d_grad": (
        "windows that do not overlap could be cut between them; others are whole along the image",
        {"shard(2, 2), shard(2), shard(2) -> shard(2, 2)", "shard(3, 2), shard(3), shard(3) -> shard(3, 2)"},
    ),
    "quantized_lookup": ("nobody holds a table in terms", {"whole, partial(sum) -> partial(sum)"}),
    "replica_adasum": (
        "one device has one value and leaves it as it is; ranks weigh theirs by all of its elements",
        {"shard(0) -> shard(0)", "shard(1) -> shard(1)", "partial(sum) -> partial(sum)"},
    ),
    "scatter_nd_add": (
        "a sum begun elsewhere; updates are dealt while X is whole, or X is terms",
        {"partial(sum), shard(0), shard(0) -> partial(sum)"},
    ),
    "sgd": (RATE, {"partial(sum), whole, partial(sum) -> partial(sum)"}),
    "shift_left": (
        f"linear in X, and nobody holds bits in terms; {LUCK}: all are shifted out",
        {"partial(sum), whole -> partial(sum)", "partial(sum), whole -> whole"},
    ),
    "shift_right": (f"{LUCK}: all bits are shifted out", {"partial(sum), whole -> whole"}),
    "update_loss_scaling": (
        f"{LUCK}: a bad step, which does not look at the good ones",
        {"whole, whole, partial(sum), whole -> whole, whole, whole"},
    ),
}


@each("name", [op.name for op in all_ops() if op.__module__.startswith("fluidx.ops.") and op.pattern is not None])
def test_no_row_is_missing(name):
    _, allowed = ALLOWED.get(name, ("", set()))
    missing = missing_rows(name)
    assert [str(m) for m in missing if m.says not in allowed] == []
    assert allowed <= {m.says for m in missing}, "a row that is there by now needs no reason"
