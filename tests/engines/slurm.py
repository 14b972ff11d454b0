"""A Slurm cluster of a test's own: a controller and two nodes, from Debian's packages.

Processes are tracked by cgroups, so that what a job step leaves behind is killed with it, as on
most clusters. The partition `high` preempts `low` after `GRACE_SECS`, and requeues.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.engines import nodes
from tests.engines.nodes import Node
from tests.hosts import wait_until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "munged")
GRACE_SECS = 20
DOWN_SECS = 30
CONTROLLER, NAMES = "control", ("node-a", "node-b")
JOB_SECS = 180.0
CONFIG = """
ClusterName=holdfast
SlurmctldHost={control.name}({control.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge/socket
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmdTimeout={down_secs}
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SchedulerParameters=requeue_setup_env_fail,bf_interval=2,sched_min_interval=100000
StateSaveLocation={work}/state
SlurmdSpoolDir=/srv/slurmd
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd-%n.pid
{nodes}
PartitionName=low Nodes={names} Default=YES PriorityTier=1 GraceTime={grace_secs} MaxTime=60
PartitionName=high Nodes={names} PriorityTier=10 PreemptMode=OFF MaxTime=60
"""
PRIVATE_MEMORY = "JobContainerType=job_container/tmpfs\nPrologFlags=Contain\n"
PRIVATE_MEMORY_PLACE = "AutoBasePath=true\nBasePath=/srv/jobs\n"
CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def why_not() -> str | None:
    """Why there is no Slurm here; None where there is."""
    reason = nodes.why_not(*PROGRAMS, has_cgroups=True)
    if reason is not None and reason.startswith("not installed"):
        reason += f"; Debian's packages are {' '.join(PACKAGES)}"
    return reason


@dataclass
class Slurm:
    """A running cluster. Its files, and what jobs share, are in `work`."""

    work: Path
    control: Node
    nodes: list[Node]
    has_private_memory: bool

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its programs."""
        return {"SLURM_CONF": str(self.work / "slurm.conf")}

    def start_daemon(self, node: Node) -> None:
        """Starts the daemon of a node that has booted, which it reports."""
        command = ("slurmd", "-D", "-b", "-N", node.name)
        if self.has_private_memory:
            command = (*nodes.ON_ONE_CPU, *command)
        node.start(*command, **self.variables)

    def submit(self, script: Path, *options: str, **variables: str) -> int:
        """Submits a batch script with these variables in its environment, and returns the job."""
        command = ["sbatch", "--parsable", f"--chdir={self.work}", *options, str(script)]
        return int(self.control.run(*command, variables=self.variables | variables))

    def control_job(self, *command: str) -> str:
        """What `scontrol` prints."""
        return self.control.run("scontrol", *command, variables=self.variables)

    def job(self, job: int) -> dict[str, str]:
        """The properties of a job, as `scontrol show job` has them."""
        text = self.control_job("--oneliner", "show", "job", str(job))
        return dict(pair.partition("=")[::2] for pair in text.split() if "=" in pair)

    def await_state(self, job: int, *states: str, secs: float = JOB_SECS) -> dict[str, str]:
        """The properties of a job once it is in one of these states."""
        try:
            wait_until(lambda: self.job(job)["JobState"] in states, secs)
        except AssertionError as error:
            raise AssertionError(f"expected {states}, found {self.job(job)}") from error
        return self.job(job)

    def start_now(self, job: int) -> None:
        """Takes the two minutes away that Slurm waits before a requeued job.

        The nodes refuse it within the second in which they have ended the earlier one.
        """
        self.await_state(job, "PENDING")
        wait_until(self.are_idle, JOB_SECS)
        ended = time.time()
        wait_until(lambda: time.time() > ended + 2)
        self.control_job("update", f"JobId={job}", "StartTime=now")

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        files = sorted((self.work / "logs").iterdir())
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    def are_idle(self) -> bool:
        """Whether all nodes are up and free."""
        states = self.control.run(
            "sinfo", "--noheader", "--Node", "--partition=low", "--format=%T",
            variables=self.variables,
        )  # fmt: skip
        return states.split() == ["idle"] * len(self.nodes)


@contextlib.contextmanager
def slurm(*, has_private_memory: bool = False) -> Iterator[Slurm]:
    """A cluster with its nodes idle; with private memory, each job has a /dev/shm of its own."""
    # The path of a socket is short, its folders are not writable for all, and jobs may have a /tmp
    # of their own.
    work = Path(tempfile.mkdtemp(prefix="holdfast-slurm-", dir="/var/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        work.chmod(0o755)
        control, *machines = stack.enter_context(
            nodes.nodes((CONTROLLER, *NAMES), work, has_cgroups=True)
        )
        cluster = Slurm(work, control, machines, has_private_memory)
        (work / "state").mkdir()
        (work / "slurm.conf").write_text(_config(cluster))
        (work / "cgroup.conf").write_text(CGROUP_CONFIG)
        (work / "job_container.conf").write_text(PRIVATE_MEMORY_PLACE)
        try:
            _start_munge(cluster)
            control.start("slurmctld", "-D", **cluster.variables)
            for machine in machines:
                cluster.start_daemon(machine)
            wait_until(cluster.are_idle)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{cluster.logs()}") from error
        yield cluster


def _start_munge(cluster: Slurm) -> None:
    folder = cluster.work / "munge"
    folder.mkdir(mode=0o711)
    key = folder / "key"
    with open(os.open(key, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(secrets.token_bytes(128))
    names = ("socket", "pid", "seed", "log")
    options = {"socket": "socket", "pid": "pid-file", "seed": "seed-file", "log": "log-file"}
    cluster.control.start(
        "munged", "--foreground", f"--key-file={key}",
        *(f"--{options[name]}={folder / name}" for name in names),
    )  # fmt: skip
    wait_until((folder / "socket").exists)


def _config(cluster: Slurm) -> str:
    lines = [
        f"NodeName={n.name} NodeAddr={n.address} CPUs=2 RealMemory=2000" for n in cluster.nodes
    ]
    text = CONFIG.format(
        control=cluster.control,
        work=cluster.work,
        nodes="\n".join(lines),
        names=",".join(n.name for n in cluster.nodes),
        grace_secs=GRACE_SECS,
        down_secs=DOWN_SECS,
    )
    return text + PRIVATE_MEMORY if cluster.has_private_memory else text
