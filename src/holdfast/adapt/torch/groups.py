"""Form the default process group of one generation, and leave it.

Trap: a traceback keeps the frames of the training, which keep the group and its sockets. Whoever
leaves a group after an exception first drops that exception's traceback.

See docs/decisions/0064 and docs/decisions/0069.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.adapt.torch.computed import note_abort, note_new_group
from holdfast.errors import InvalidArgumentError, ProcessLostError

log = logging.getLogger(__name__)

FORM_SECS = 20.0
"""How long the ranks may take to connect to each other. All wait for their ranks before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The ranks of one generation, as `holdfast.torch.surviving` gives them to the training.

    The default process group of `torch.distributed` is that of these ranks.

    Attributes:
        rank: The rank of this process. A process keeps its rank as long as the number of ranks
            is the same.
        world_size: The number of ranks.
        local_rank: The device of this process, which it keeps.
        generation: The number of the generation, counted from 1.
        lost_ranks: The ranks of the generation before that were lost since.
    """

    rank: int
    world_size: int
    local_rank: int
    generation: int
    lost_ranks: tuple[int, ...] = field(default=())

    @property
    def device(self) -> torch.device:
        """The device of this process: a GPU if there are any, else the CPU.

        More ranks than GPUs share them, in turn, which NCCL itself refuses.
        """
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return torch.device("cpu")

    def mesh(self, *sizes: int, names: tuple[str, ...]) -> DeviceMesh:
        """Return a mesh of all ranks.

        Args:
            sizes: The size of each axis. One may be -1: what the others leave of the ranks, also
                after their number has changed.
            names: The name of each axis.

        Raises:
            InvalidArgumentError: The ranks cannot be divided so.
        """
        free = [axis for axis, size in enumerate(sizes) if size == -1]
        others = 1
        for size in sizes:
            others *= size if size != -1 else 1
        is_divided = others > 0 and self.world_size % others == 0
        if len(names) != len(sizes) or len(free) > 1 or not is_divided:
            raise InvalidArgumentError(
                f"mesh: expected sizes of {len(names)} axes, at most one of them -1, that divide "
                f"{self.world_size} ranks, found {sizes}"
            )
        shape = [self.world_size // others if size == -1 else size for size in sizes]
        if not free and others != self.world_size:
            raise InvalidArgumentError(
                f"mesh: expected {self.world_size} ranks in all, found {sizes}; give one axis the "
                "size -1"
            )
        return init_device_mesh(self.device.type, tuple(shape), mesh_dim_names=names)


TCP_ESTABLISHED = 1
PASSES_MAX = 4
"""How often to look for connections of a lost generation, until none is found."""


def default_backend() -> str:
    """Return the backend of a process group on this host's devices."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def form_group(job: Job, store: str, backend: str, timeout_secs: float | None) -> None:
    """Initialise the default process group.

    Args:
        job: The ranks.
        store: The address of the launcher's store for this generation.
        backend: The backend, as for `init_process_group`.
        timeout_secs: How long a collective may take; None: PyTorch's own default.

    Raises:
        ProcessLostError: A rank was lost meanwhile. `leave_group` has to be called.
    """
    try:
        _form(job, store, backend, timeout_secs)
    except (RuntimeError, ValueError) as error:
        raise ProcessLostError(
            f"form generation {job.generation} of {job.world_size} ranks: "
            f"{str(error).splitlines()[0]}; see the logs of the other ranks"
        ) from error


def _form(job: Job, store: str, backend: str, timeout_secs: float | None) -> None:
    host, _, port = store.rpartition(":")
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    if "nccl" in backend:
        _set_watchdog()
    note_new_group()
    forming = timedelta(seconds=FORM_SECS)
    server = dist.TCPStore(host, int(port), is_master=False, timeout=forming)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"gen{job.generation}", server),
        rank=job.rank,
        world_size=job.world_size,
        timeout=forming,
    )
    group: Any = dist.group.WORLD
    default: timedelta = dist.distributed_c10d.default_pg_timeout
    limit = default if timeout_secs is None else timedelta(seconds=timeout_secs)
    dist.distributed_c10d._set_pg_timeout(limit, group)
    server.set_timeout(limit)


WATCHDOG = {
    # A failed collective ends no process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Nor does its thread, on which the group's end waits, sleep for four times the second of these,
    # for each failed collective, while another one writes a trace and then sleeps for 480 s.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Settings of PyTorch's watchdog over NCCL, with which a process outlives a lost rank.

See https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html.
"""


def _set_watchdog() -> None:
    """Let PyTorch's watchdog over NCCL leave a failed collective to the launcher."""
    for name, value in WATCHDOG.items():
        found = os.environ.get(name, value)
        if found != value:
            log.warning(
                "%s is set to %s, in place of %s: a process could not go on after a lost rank",
                name,
                value,
                found,
            )
        os.environ[name] = value


def interrupt_group(pids: Collection[int], peers: Collection[str] = ()) -> None:
    """End the collectives of this process that wait for other ranks; on any thread.

    NCCL has a call for that; what the devices compute after it is torn. Gloo has none, and keeps
    its connections as long as anything refers to a group. So the connections to the other ranks'
    processes are shut down: the collectives at both ends then fail.

    Args:
        pids: Processes of this host, among them all of its ranks.
        peers: The addresses of the other hosts. All connections of this process to them are shut
            down, as it is not known which of them are a group's.
    """
    if not dist.is_initialized():
        return
    if "nccl" in str(dist.get_backend_config()):
        note_abort()
        _abort_groups()
    # The system's list of connections may lack some while others end.
    for _ in range(PASSES_MAX):
        if not _shut_down(_addresses_of(pids), peers):
            break


def _addresses_of(pids: Collection[int]) -> set[tuple[str, int]]:
    """Return the local addresses of the connections of other processes."""
    found: set[tuple[str, int]] = set()
    for pid in pids:
        if pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                connections = psutil.Process(pid).net_connections("tcp")
                found |= {_plain(each.laddr) for each in connections}
    return found


def _shut_down(others: set[tuple[str, int]], peers: Collection[str]) -> int:
    """Shut down this process's connections to these addresses or hosts; return their number."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        # A file, or closed by another thread, which may have opened another file by its number.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
            if own.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            state = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            remote = _plain(own.getpeername())
            if state == TCP_ESTABLISHED and (remote in others or remote[0] in peers):
                own.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _plain(address: tuple[Any, ...]) -> tuple[str, int]:
    """Return host and port; an IPv4 address in IPv6 as it is in IPv4."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _abort_groups() -> None:
    """Abort the communicators of NCCL, all at once.

    An abort first ends the kernels of its communicator, and then waits for the device, on which
    those of others may run.
    """
    groups = list(dist.distributed_c10d._world.pg_map)
    aborts = [threading.Thread(target=group.abort, name="holdfast-abort") for group in groups]
    for abort in aborts:
        abort.start()
    for abort in aborts:
        abort.join()


def leave_group() -> None:
    """Destroy the process groups of this process, if there are any, and what belongs to them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


class GroupStore:
    """The store of one generation, held by the launcher. Closing it ends all waits in it.

    Args:
        address: The address of this host at which the ranks reach it.
    """

    def __init__(self, address: str) -> None:
        self._server: Any = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.address = f"{address}:{self._server.port}"

    def close(self) -> None:
        """End the store. Processes that wait in it fail."""
        self._server = None
        gc.collect()
