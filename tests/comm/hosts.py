"""Hosts, played by namespaces of this one: each has a network and a name of its own, and cables join them."""

import contextlib
import os
import shutil
import subprocess
from typing import NamedTuple

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")
TOOLS = ("unshare", "nsenter", "ip", "hostname")


@contextlib.contextmanager
def two_hosts(folder, slots):
    """The command that runs something on the first, the file of hosts with so many ranks on each, and the environment in which mpirun and
    `fluidx run` reach the second. Skips the test where this process may not make namespaces. They end with what runs in them."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"two hosts on one take {missing[0]}, which is not here")
    with contextlib.ExitStack() as stack:
        pids = [_host(stack) for _ in ADDRESSES]
        enter = [["nsenter", "-t", str(pid), "-n", "-u"] for pid in pids]
        _do(*enter[0], "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(pids[1]))
        for k, (inside, address) in enumerate(zip(enter, ADDRESSES, strict=True)):
            _do(*inside, "hostname", f"host-{k}")
            _do(*inside, "ip", "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _do(*inside, "ip", "link", "set", device, "up")
        hosts, agent = folder / "hosts", folder / "agent"
        hosts.write_text("".join(f"{address} slots={slots}\n" for address in ADDRESSES))
        agent.write_text(f'#!/bin/sh\nshift\nexec {" ".join(enter[1])} sh -c "$*"\n')  # is given a host and a command, as ssh is
        agent.chmod(0o755)
        yield enter[0], str(hosts), {**os.environ, "PRTE_MCA_plm_ssh_agent": str(agent), "FLUIDX_SSH": str(agent)}


class Host(NamedTuple):
    """How a process gets there, and the address by which others reach it."""

    enter: list[str]
    address: str
    name: str


@contextlib.contextmanager
def hosts(n):
    """Hosts with a network each, which a switch joins; where this process may not make them, addresses of this host's own network."""
    with contextlib.ExitStack() as stack:
        try:
            yield _joined(stack, n)
        except pytest.skip.Exception:
            yield [Host([], f"127.0.0.{2 + k}", os.uname().nodename) for k in range(n)]


def _joined(stack, n):
    if any(shutil.which(tool) is None for tool in TOOLS):
        pytest.skip("no tools for namespaces")
    switch, *pids = [_host(stack) for _ in range(n + 1)]
    inside = [["nsenter", "-t", str(pid), "-n", "-u"] for pid in (switch, *pids)]
    for words in (("link", "add", "switch", "type", "bridge"), ("link", "set", "switch", "up")):
        _do(*inside[0], "ip", *words)
    for k, pid in enumerate(pids):
        _do(*inside[0], "ip", "link", "add", f"port{k}", "type", "veth", "peer", "name", "cable", "netns", str(pid))
        _do(*inside[0], "ip", "link", "set", f"port{k}", "master", "switch", "up")
        _do(*inside[k + 1], "hostname", f"host-{k}")
        _do(*inside[k + 1], "ip", "addr", "add", f"10.213.8.{k + 1}/24", "dev", "cable")
        for device in ("lo", "cable"):
            _do(*inside[k + 1], "ip", "link", "set", device, "up")
    return [Host(inside[k + 1], f"10.213.8.{k + 1}", f"host-{k}") for k in range(n)]


def _host(stack):
    """The number of a process that lives in new namespaces until this one lets go of it, or ends."""
    args = ["unshare", "--net", "--uts", "sh", "-c", "echo; exec cat"]
    process = stack.enter_context(subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    stack.callback(process.stdin.close)
    if not process.stdout.readline():
        pytest.skip(f"this process may not make namespaces: {process.stderr.read().decode().strip()}")
    return process.pid


def _do(*args):
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this process may not set up namespaces: {' '.join(args)}: {done.stderr.strip()}")
