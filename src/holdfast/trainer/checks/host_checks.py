"""Check a host before a training: versions, names, limits, the RAM tier and the network."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from holdfast import torchrun_store
from holdfast.environment import (
    HOST_VARIABLE,
    INTERFACE_VARIABLE,
    LAUNCHER_VARIABLE,
    RAM_VARIABLE,
)
from holdfast.errors import HoldfastError
from holdfast.launchers import launched
from holdfast.local_agent.place import host_name, make_root, roots
from holdfast.peers.config import LOOPBACK, listen
from holdfast.quantities import size_text
from holdfast.store.files.memory_limit import memory_left_bytes
from holdfast.store.files.mounts import (
    MEMORY_FILE_SYSTEMS,
    file_system_type,
    is_hidden_from_first_process,
)
from holdfast.trainer.checks.check_results import CheckResult, failed, noted, passed, warned
from holdfast.trainer.ranks.topology import checked_host

PACKAGES = ("holdfast-checkpoint", "numpy", "jax", "torch", "obstore", "orbax-checkpoint")
DESCRIPTORS_MIN = 4096
"""Below this hard limit an agent of many ranks may run out of descriptors."""


def check_host(needed_bytes: int | None) -> Iterator[CheckResult]:
    """Yield the results for this host; `needed_bytes` of RAM, None if it is not known."""
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    yield passed("versions", ", ".join(versions))
    try:
        yield passed("host name", checked_host(host_name()))
    except HoldfastError as error:
        yield failed("host name", str(error))
    yield from _check_launchers()
    yield from _check_torchrun()
    root = roots()[0]
    was_there = root.exists()
    yield from _check_ram(root, needed_bytes)
    if not was_there:
        # A check leaves nothing; an agent that has started meanwhile is in it.
        with contextlib.suppress(OSError):
            root.rmdir()
    yield _check_memory_limit(needed_bytes)
    yield from _check_limits(needed_bytes)
    yield _check_interface()


def _check_launchers() -> Iterator[CheckResult]:
    """Yield what has started this process, and which of its variables are used."""
    subject = "launcher"
    try:
        launch = launched()
    except HoldfastError as error:
        yield failed(subject, str(error))
        return
    for launcher in launch.launchers:
        words = [launcher.place_text]
        if launcher.restarts:
            words.append(f"restart {launcher.restarts}")
        variables = " ".join(f"{name}={value}" for name, value in launcher.variables.items())
        text = f"{', '.join(words)}; {variables}"
        if launcher.unreadable:
            yield warned(
                f"{subject}, {launcher.of.name}",
                f"{text}: expected numbers, found {', '.join(launcher.unreadable)}",
                "correct or unset them; they are not used",
            )
        else:
            yield passed(f"{subject}, {launcher.of.name}", text)
    pair = launch.contradiction()
    if pair is not None:
        inner, outer = pair
        yield warned(
            subject,
            f"{inner.place_text} and {outer.place_text} contradict each other",
            f"unset {', '.join(inner.variables)}, or set {LAUNCHER_VARIABLE}={outer.of.name}; a "
            "manager whose framework agrees with neither is refused",
        )
    larger_job = launch.larger_job(1)
    if larger_job:
        yield noted(
            subject,
            f"used for messages alone: {larger_job}. The framework's rank and count are used",
            "initialize the framework's processes before the manager is made, or give each "
            "training a directory of its own",
        )
    if "kubernetes" in launch.names and not os.environ.get(HOST_VARIABLE):
        yield noted(
            subject,
            "the host is named after the pod",
            f"where RAM outlives the pod (hostPath), set {HOST_VARIABLE} from spec.nodeName",
        )
    if not launch.launchers:
        yield passed(subject, f"none is used ({LAUNCHER_VARIABLE} is unset, or names none)")


def _check_torchrun() -> Iterator[CheckResult]:
    """Yield whether processes that torchrun starts again find each other."""
    if torchrun_store.is_shared(os.environ):
        yield warned("restarts by torchrun", torchrun_store.CAUSE, torchrun_store.ADVICE)
    elif torchrun_store.MAX_RESTARTS_VARIABLE in os.environ:
        yield passed("restarts by torchrun", "each start of its processes has a store of its own")


def _check_ram(root: Path, needed_bytes: int | None) -> Iterator[CheckResult]:
    subject = f"RAM tier, {root}"
    try:
        make_root(root)
        space = os.statvfs(root)
    except (HoldfastError, OSError) as error:
        yield failed(subject, str(error), f"set {RAM_VARIABLE} to a folder of yours on a tmpfs")
        return
    if space.f_flag & os.ST_RDONLY or not os.access(root, os.W_OK):
        advice = f"set {RAM_VARIABLE} to a tmpfs that can be written"
        yield failed(subject, "it cannot be written", advice)
        return
    kind = file_system_type(root)
    if kind not in MEMORY_FILE_SYSTEMS:
        yield warned(
            subject,
            f"it is on {kind or 'an unknown file system'}, not in memory",
            f"set {RAM_VARIABLE} to a tmpfs; checkpoints are lost with the host all the same, and "
            "writing them is as slow as that file system",
        )
    if is_hidden_from_first_process(root):
        job = (
            " (Slurm's job_container/tmpfs makes such mounts)"
            if "SLURM_JOB_ID" in os.environ
            else ""
        )
        yield noted(
            subject,
            f"it is mounted for this job or session alone, and ends with it{job}",
            "restarts within the job find its checkpoints, and later jobs do not: they go on from "
            f"the durable tier, unless {RAM_VARIABLE} names a tmpfs of the host; docs/hosts.md",
        )
    free_bytes = space.f_bavail * space.f_frsize
    text = f"{size_text(free_bytes)} free of {size_text(space.f_blocks * space.f_frsize)}"
    if needed_bytes is not None and free_bytes < needed_bytes:
        yield warned(
            subject,
            f"{text}; the newest checkpoint needs {size_text(needed_bytes)} here",
            "enlarge the tmpfs (in a container the size of /dev/shm), or checkpoints go straight "
            "to the durable tier; docs/ram.md",
        )
    else:
        yield passed(subject, text)


def _check_memory_limit(needed_bytes: int | None) -> CheckResult:
    left_bytes, subject = memory_left_bytes(), "memory limit of the cgroup"
    if left_bytes is None:
        return passed(subject, "none")
    text = f"{size_text(max(left_bytes, 0))} left for the RAM tier"
    if needed_bytes is not None and left_bytes < needed_bytes:
        advice = "raise the limit of the container or job, or set RamTier(limit_bytes=...)"
        return warned(subject, f"{text}, expected {size_text(needed_bytes)}", advice)
    return passed(subject, text)


def _check_limits(needed_bytes: int | None) -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit_text(hard)}, now {_limit_text(soft)}; the agent raises it"
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        advice = f"raise the hard limit to {DESCRIPTORS_MIN} (ulimit -Hn) for 16 ranks or more"
        yield warned("open files", text, advice)
    else:
        yield passed("open files", text)
    of_file = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if of_file == resource.RLIM_INFINITY:
        yield passed("file size", "unlimited")
    elif needed_bytes is not None and of_file < needed_bytes:
        problem = f"limited to {size_text(of_file)}, the newest checkpoint is larger"
        yield failed("file size", problem, "raise it: ulimit -f unlimited")
    else:
        yield warned("file size", f"limited to {size_text(of_file)}", "ulimit -f unlimited")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else size_text(locked)
    yield passed("locked memory", f"{text}; the RAM tier locks none")


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _check_interface() -> CheckResult:
    name = os.environ.get(INTERFACE_VARIABLE) or LOOPBACK
    subject = f"interface for other hosts, {name}"
    try:
        listen(name, 0).close()
    except HoldfastError as error:
        return failed(subject, str(error), f"set {INTERFACE_VARIABLE} to one of this host's")
    if name == LOOPBACK:
        advice = f"set {INTERFACE_VARIABLE} for jobs of several hosts"
        return noted(subject, "only processes of this host can reach it", advice)
    return passed(subject, "can be listened at")
