"""Queues of experts, and dispatch and combination of tokens, against loops over tokens."""

import numpy as np
import pytest

from fluidx.ir import ExecutionError, ProgramError, TensorType, opdef
from fluidx.testing.reference import run_op


def run(name, *ins, **attrs):
    return run_op(opdef(name), ins, opdef(name).complete_attrs(attrs))[0]


def queue(ids):
    """Positions of choices [s, k], one after the other."""
    seen, out = {}, np.empty_like(ids)
    for j in range(ids.shape[1]):
        for n in range(len(ids)):
            out[n, j] = seen.get(ids[n, j], 0)
            seen[ids[n, j]] = out[n, j] + 1
    return out


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(9, 1), (9, 2), (2, 3, 7, 2), (0, 2), (3, 0, 2)])
def test_a_queue_has_first_choices_before_second_ones_in_the_order_of_tokens(shape, dtype):
    ids = np.random.default_rng(0).integers(0, 3, shape).astype(dtype)
    found = run("expert_queue", ids)
    assert found.dtype == np.int64
    for at in np.ndindex(shape[:-2]):
        assert np.array_equal(found[at], queue(ids[at]))


def routed(lead, seed=0, experts=3, s=7, k=2, width=4):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts, (*lead, s, k))
    position = run("expert_queue", ids)
    return rng.standard_normal((*lead, s, width)), ids, position, rng.standard_normal(ids.shape)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("weighted", [True, False])
def test_tokens_are_dispatched_to_their_slots_and_results_are_combined(lead, weighted):
    x, ids, position, weight = routed(lead)
    weight = weight if weighted else None
    slots = run("expert_dispatch", x, ids, position, weight, np.zeros(3), capacity=2)
    exact, back = np.zeros((3, *lead, 2, 4)), np.zeros_like(x)
    y = np.random.default_rng(1).standard_normal(exact.shape)
    for at in np.ndindex(ids.shape):
        e, p, w = ids[at], position[at], 1 if weight is None else weight[at]
        if p < 2:  # a third one is dropped
            exact[(e, *at[:-2], p)] += w * x[at[:-1]]
            back[at[:-1]] += w * y[(e, *at[:-2], p)]
    assert np.allclose(slots, exact, rtol=1e-14) and (position >= 2).any()
    assert np.allclose(run("expert_combine", y, ids, position, weight), back, rtol=1e-14)


def test_dispatch_and_combine_give_each_token_times_its_number_of_slots():
    x, ids, position, _ = routed((2,))
    slots = run("expert_dispatch", x, ids, position, None, np.zeros(3), capacity=2)
    kept = (position < 2).sum(axis=-1, keepdims=True)
    assert np.array_equal(run("expert_combine", slots, ids, position, None), x * kept) and (kept == 0).any()


def test_an_unknown_expert_is_refused():
    x, ids, position, _ = routed(())
    ids[3, 1] = 3
    with pytest.raises(ExecutionError, match="op expert_dispatch: id 3 is out of range; the experts has 3 rows"):
        run("expert_dispatch", x, ids, position, None, np.zeros(3), capacity=2)


@pytest.mark.parametrize(
    "name, shapes, message",
    [
        ("expert_dispatch", [(5, 4), (6, 2), (5, 2), None, (3,)], r"Ids i64\[6,2\] must be \[..., k\] for tokens f32\[5,4\]"),
        ("expert_dispatch", [(5, 4), (5, 2), (5, 1), None, (3,)], r"Position must have the shape of Ids i64\[5,2\]"),
        ("expert_combine", [(3, 2, 4), (2, 5, 2), (2, 5, 2), None], r"Y must be \[experts, ..., capacity, d\] for Ids i64\[2,5,2\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name, shapes, message):
    slots = opdef(name).in_slots
    types = [s and TensorType("int64" if slot.name in ("Ids", "Position") else "float32", s) for slot, s in zip(slots, shapes, strict=True)]
    with pytest.raises(ProgramError, match=message):
        opdef(name).infer(*types, **({"capacity": 2} if name == "expert_dispatch" else {}))
