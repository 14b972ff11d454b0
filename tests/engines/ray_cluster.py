"""Ray for tests: three nodes on this machine, each a host of its own for Holdfast."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.hosts import ROOT, Host, wait_until

NODES = 3
STORE_BYTES = 80 * 2**20
"""The least that Ray takes for the object store of a node is 75 MiB."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The worker of a lost node is to be missed soon.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


def why_not() -> str | None:
    """Why Ray cannot be had; None if it can."""
    if importlib.util.find_spec("ray") is None:
        return "it is not installed in this environment; `make engines` makes one that has it"
    return None


@dataclass
class RayNode:
    """A node of the cluster."""

    handle: Any
    host: Host

    @property
    def id(self) -> str:
        return self.handle.node_id

    def processes(self) -> list[psutil.Process]:
        """The raylet and its workers, without the agents of Holdfast."""
        own = [p for p in _processes() if _variable(p, "HOLDFAST_HOST") == self.host.name]
        return [p for p in own if "holdfast.host" not in p.info["cmdline"]]


@dataclass
class Cluster:
    """A cluster, its folder, and the drivers that a test has started."""

    work: Path
    address: str
    handle: Any
    nodes: list[RayNode]

    def start(self, script: Path, *arguments: object) -> subprocess.Popen[str]:
        """Starts a program that uses the cluster; its output is in the file PROGRAM.out."""
        paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        with open(self.work / "driver.out", "a") as output:
            return subprocess.Popen(
                [sys.executable, str(script), *map(str, arguments)],
                env=os.environ | QUIET | {"RAY_ADDRESS": self.address, "PYTHONPATH": paths},
                cwd=self.work, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True,
            )  # fmt: skip

    def output(self) -> str:
        """What the programs have printed."""
        return (self.work / "driver.out").read_text(errors="replace")

    def node_of(self, pid: int) -> RayNode:
        """The node on which a process runs."""
        name = _variable(psutil.Process(pid), "HOLDFAST_HOST")
        return next(node for node in self.nodes if node.host.name == name)

    def kill(self, node: RayNode) -> None:
        """Loses a node: SIGKILL for all its processes. The agent's host is lost as well."""
        for process in node.processes() + node.host.agent_processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(node.host.folder, ignore_errors=True)

    def drain(self, node: RayNode, secs: int) -> None:
        """Announces the end of a node, as a cloud's autoscaler does."""
        subprocess.run(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
                *("--address", self.address, "--node-id", node.id),
                *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"),
                *("--deadline-remaining-seconds", str(secs)),
            ],
            check=True, capture_output=True, timeout=120, env=os.environ | QUIET,
        )  # fmt: skip


@contextlib.contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Yield a cluster of `NODES` nodes, and end every process of it afterwards."""
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster as Handle

    work = Path(tempfile.mkdtemp(prefix="holdfast-ray-", dir="/tmp"))
    # Sockets of a node have its session's folder in their names, which have at most 107 bytes.
    sessions = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    # The cluster's address is written to Ray's usual folder, wherever the sessions are.
    Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)
    hosts = [
        Host(
            f"{work.name}-{index}", Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
        )
        for index in range(NODES)
    ]
    handle = Handle()
    earlier = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        nodes = [
            RayNode(
                handle.add_node(
                    num_cpus=1,
                    object_store_memory=STORE_BYTES,
                    include_dashboard=False,
                    temp_dir=str(sessions),
                    env_vars={
                        "HOLDFAST_HOST": host.name,
                        "HOLDFAST_RAM": str(host.folder),
                        "HOLDFAST_STATE": str(work / "state" / host.name),
                        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
                    },
                ),
                host,
            )
            for host in hosts
        ]
        yield Cluster(work, handle.address, handle, nodes)
    finally:
        handle.shutdown()
        for process in _processes():
            # Of this cluster: all have the folder of its sessions, or the name of a node.
            is_named = any(_variable(process, "HOLDFAST_HOST") == host.name for host in hosts)
            if is_named or str(sessions) in " ".join(process.info["cmdline"]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    wait_until(lambda gone=process: not gone.is_running())
        for host in hosts:
            host.end()
        for name, value in earlier.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        for folder in (work, sessions):
            shutil.rmtree(folder, ignore_errors=True)


def _processes() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] is not None]


def _variable(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
