"""fluid's role makers, which tell a process its worker number and the number of workers. All of them use the values of the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from ...._checks import whole, wrong
from ....comm.launch_environment import found, rank


class FleetRole(IntEnum):
    """The role of a process: trainer or parameter server."""

    WORKER = 1
    SERVER = 2


Role = FleetRole  # the name in fluid's scripts


class RoleMakerBase:
    """The worker number from the launcher. Without a launcher this process is the only worker.

    A worker is a process; ranks that are threads of one process are one worker.
    """

    def generate_role(self) -> None:
        """fluid's call, without effect: the role is already known."""

    def is_worker(self) -> bool:
        return True

    def is_server(self) -> bool:
        return False

    def is_first_worker(self) -> bool:
        return self.worker_index() == 0

    def worker_index(self) -> int:
        return rank()

    def worker_num(self) -> int:
        there = found()
        return 1 if there is None else there.world_size

    def get_trainer_endpoints(self) -> list[str]:
        """A name for each worker. Ranks find each other without ports."""
        return [f"worker:{k}" for k in range(self.worker_num())]

    def get_pserver_endpoints(self) -> list[str]:
        return []


class PaddleCloudRoleMaker(RoleMakerBase):
    """The role from the launcher's environment. `is_collective=False` means parameter servers and raises ProgramError."""

    def __init__(self, is_collective: bool = False):
        if not is_collective:
            raise wrong(
                "PaddleCloudRoleMaker: parameter servers are a strategy here, strategies.parameter_server(); for collective training write "
                "PaddleCloudRoleMaker(is_collective=True)"
            )


class UserDefinedCollectiveRoleMaker(RoleMakerBase):
    """A role that the script gives: worker `current_id` of `len(worker_endpoints)`. Raises ProgramError if the launcher's values differ."""

    def __init__(self, current_id: int = 0, worker_endpoints: Sequence[str] | None = None):
        self._check(current_id, len(worker_endpoints or ()))

    def _check(self, current_id: Any, workers: int) -> None:
        label = type(self).__name__
        current_id = whole(label, "current_id", current_id, 0)
        if workers not in (0, self.worker_num()) or current_id != self.worker_index():
            raise wrong(
                f"{label}: worker {current_id} of {workers}, but this process is worker {self.worker_index()} of {self.worker_num()}; "
                f"start the script with fluidx run -n {max(1, workers)} --backend processes, and take current_id=fluidx.rank()"
            )


class UserDefinedRoleMaker(UserDefinedCollectiveRoleMaker):
    """A role that the script gives in fluid's older form. Parameter servers raise ProgramError."""

    def __init__(
        self, current_id: int = 0, role: Role = Role.WORKER, worker_num: int = 0, server_endpoints: Sequence[str] | None = None
    ):
        if role == Role.SERVER or server_endpoints:
            raise wrong("UserDefinedRoleMaker: parameter servers are a strategy here: DistributeTranspiler(strategies.parameter_server(2))")
        self._check(current_id, whole("UserDefinedRoleMaker", "worker_num", worker_num, 0))


__all__ = ["PaddleCloudRoleMaker", "Role", "RoleMakerBase", "UserDefinedCollectiveRoleMaker", "UserDefinedRoleMaker"]
