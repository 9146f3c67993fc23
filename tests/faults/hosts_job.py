"""A job on hosts that tests play, a process for each rank: what each rank prints, and how it ends."""

import ctypes
import json
import os
import secrets
import time
from pathlib import Path

from fluidx.comm import process_spawner
from fluidx.testing.started import started
from fluidx.testing.tcp import free_port

SCRIPT = Path(__file__).with_name("hosts_script.py")
ENDS = 60.0  # seconds for a job to end by itself, on a machine that is busy


class HostsJob:
    """`here` ranks on each of the hosts. `each` has changes of the environment by rank; those of a rank whose changes are None do not
    start."""

    def __init__(self, folder, hosts, here=2, each=None, timeout=20.0, **what):
        self.folder, self.hosts, self.here, self.n = folder, hosts, here, here * len(hosts)
        self.what, self.each, self.key = what, each or {}, secrets.token_hex(8)
        self.address = f"{hosts[0].address}:{free_port()}"
        self.timeout, self.processes = timeout, {}

    def environ(self, rank):
        host = self.hosts[rank // self.here]
        own = {
            "FLUIDX_RANK": rank, "FLUIDX_WORLD_SIZE": self.n, "FLUIDX_LOCAL_WORLD_SIZE": self.here, "FLUIDX_ADDRESS": self.address,
            "FLUIDX_INTERFACE": host.address, "FLUIDX_JOB_KEY": self.key, "FLUIDX_TIMEOUT": self.timeout,
        }  # fmt: skip
        return {name: str(value) for name, value in {**own, **(self.each.get(rank) or {})}.items()}

    def start(self):
        for rank in range(self.n):
            if self.each.get(rank, {}) is not None:
                self.start_rank(rank)
        return self

    def start_rank(self, rank, name=None, **environ):
        host = self.hosts[rank // self.here]
        args, inside = [json.dumps({**self.what, "out": str(self.folder)})], int(host.enter[2]) if host.enter else 0
        given = {"environ": {**self.environ(rank), **environ}, "script": str(SCRIPT), "args": args, "inside": inside}
        name = rank if name is None else name
        with (self.folder / f"{name}.out").open("w") as out, (self.folder / f"{name}.err").open("w") as err:
            self.processes[name] = process_spawner.start(f"{__name__}:enter", given, [out.fileno(), err.fileno()])

    def end(self, stopped=()):
        """The status of each rank that ends by itself, and what it printed to each file. Those that are `stopped` do not end."""
        deadline, found = time.monotonic() + self.timeout + ENDS, {}
        for name, process in self.processes.items():
            if name in stopped:
                continue
            if process.status is not None:  # ended by the test
                continue
            process.channel.sock.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                process.channel.sock.recv(1)
            except TimeoutError:
                raise AssertionError(f"rank {name} did not end: {self.said(name)}") from None
        for name, process in self.processes.items():
            found[name] = (process.end(), *self.said(name))
        return found

    def said(self, name):
        return (self.folder / f"{name}.out").read_text(), (self.folder / f"{name}.err").read_text()

    def close(self):
        for process in self.processes.values():
            process.end()


def enter(channel, fds, given):
    """The main function of a rank: go to its host, and run the script."""
    if given["inside"]:
        for kind in ("net", "uts"):
            file = os.open(f"/proc/{given['inside']}/ns/{kind}", os.O_RDONLY)
            assert ctypes.CDLL(None).setns(file, 0) == 0
            os.close(file)
    started(channel, fds, given)
