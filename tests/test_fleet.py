"""fleet under a launcher: each worker is a process that feeds rows of its own."""

import json
from pathlib import Path

import numpy as np
import pytest

import fluidx as fx
from fluidx import native
from fluidx.launch import process_job
from fluidx.native import shared

SCRIPT = str(Path(__file__).with_name("fleet_script.py"))
pytestmark = pytest.mark.skipif(bool(native.why_not() or shared.why_not()), reason="processes need the C kernels and shared memory")


def launched(tmp_path, what="", ranks=2):
    said = []
    found = process_job.run(SCRIPT, [str(tmp_path), what], ranks, say=said.append, timeout=20.0)
    assert found == 0, said
    return [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(ranks)]


def by_hand(x, steps):
    """loss = mean(x @ w) of all rows: the gradient of w is the sum of the rows over the elements of x @ w, in each column."""
    w, losses = np.ones((4, 2)), []
    for _ in range(steps):
        losses.append((x @ w).mean())
        w = w - (x.sum(0) / (2 * len(x)))[:, None]
    return losses, w


def test_workers_train_as_one_on_the_rows_of_all(tmp_path):
    first, second = launched(tmp_path)
    x = (np.arange(24).reshape(6, 4) % 5 - 2).astype("float64")
    losses, w = by_hand(x, 4)
    assert first["losses"] == second["losses"] == pytest.approx(losses, rel=1e-6)  # float32
    np.testing.assert_allclose(first["w"], w, rtol=1e-6)
    assert first["w"] == second["w"]
    assert first["test"] == pytest.approx(losses[3], rel=1e-6)
    assert (first["files"], second["files"]) == (["a", "b"], ["c"])
    assert (tmp_path / "saved" / "w").exists()


def test_local_sgd_of_fleet_averages_what_workers_have(tmp_path):
    first, second = launched(tmp_path, "local_sgd")
    assert np.isfinite(first["losses"]).all() and first["w"] == second["w"]


def test_roles_and_options_that_do_not_fit_say_what_to_write():
    from fluidx.incubate.fleet.base.role_maker import FleetRole, PaddleCloudRoleMaker, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
    from fluidx.incubate.fleet.collective import Collective, DistributedStrategy

    for call, text in [
        (PaddleCloudRoleMaker, "for collective training write PaddleCloudRoleMaker(is_collective=True)"),
        (lambda: UserDefinedCollectiveRoleMaker(1, ["a:1", "b:1"]), "start the script with fluidx run -n 2 --backend processes"),
        (lambda: UserDefinedRoleMaker(0, FleetRole.SERVER, 1), "DistributeTranspiler(strategies.parameter_server(2))"),
        (lambda: Collective().worker_num(), "call fleet.init(role_maker) first"),
        (lambda: setattr(DistributedStrategy(), "use_local_sdg", True), "did you mean 'use_local_sgd'?"),
    ]:
        with pytest.raises(fx.ProgramError) as error:
            call()
        assert text in str(error.value)
