"""Open a run for the command line: read-only, with this host's RAM tier if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.agent_directory import agent_folders, host_name, ram_folder
from holdfast.agent.launch import find_agent
from holdfast.clock import Clock, SystemClock
from holdfast.engine.lifecycle.identity import Finding, find
from holdfast.engine.lifecycle.run import read_run, read_run_record
from holdfast.engine.reading.view import View, view_of
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NotARunError,
    ObjectNotFoundError,
)
from holdfast.format.names import CHECKPOINTS
from holdfast.job.opening import open_run, run_directory
from holdfast.job.rendezvous import OneProcess, Rendezvous
from holdfast.store.contract import Store
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run.

    Attributes:
        directory: Its directory.
        run_id: Its id. A directory that is a copy of a run and was never opened has the original's
            id, whose agents and RAM belong to the original.
        durable: Its durable tier.
        ram: Its RAM tier on this host; None if memory holds nothing of it.
        is_copy: Whether it is such a copy.
    """

    directory: Path
    run_id: str
    durable: DiskStore
    ram: RamStore | None
    is_copy: bool = False

    @property
    def agents_id(self) -> str:
        """The run id of its own agents; empty for a copy, which can have none yet."""
        return "" if self.is_copy else self.run_id

    @property
    def stores(self) -> list[Store]:
        """The tiers, the nearest one first."""
        return [self.ram, self.durable] if self.ram is not None else [self.durable]

    def load_view(self) -> View:
        """Return what the tiers hold now.

        Raises:
            CheckpointDamagedError: An attempt's record is damaged, so the timeline is unknown.
        """
        return view_of(self.stores, self.durable)


def read_only(directory: Path) -> Run:
    """Open the run in `directory` without changing anything.

    Raises:
        NotARunError, NewerFormatError, StorageError, InvalidArgumentError: The directory.
    """
    clock = SystemClock()
    path = run_directory(directory)
    durable = DiskStore(path, clock)
    record = read_run(durable, str(path))
    is_copy = find(durable, record, clock) is Finding.COPY
    return Run(
        directory=path,
        run_id=record.run_id,
        durable=durable,
        ram=None if is_copy else ram_store(record.run_id, host_name(), clock),
        is_copy=is_copy,
    )


def read_damaged(directory: Path) -> tuple[Run, HoldfastError | None]:
    """Open a run read-only even if its own record is bad.

    Returns:
        The run, and the error of its record; None if the record is good.

    Raises:
        NotARunError: The directory has no record and no checkpoints.
        NewerFormatError, StorageError, InvalidArgumentError: The directory.
    """
    try:
        run = read_only(directory)
    except NotARunError as error:
        path = run_directory(directory)
        durable = DiskStore(path, SystemClock())
        if not any(durable.list(CHECKPOINTS)):
            raise
        return Run(directory=path, run_id="", durable=durable, ram=None), error
    try:
        read_run_record(run.durable, str(run.directory))
    except (CheckpointDamagedError, ObjectNotFoundError) as error:
        return run, error
    return run, None


def open_or_create(directory: Path) -> Run:
    """Open the run in `directory`, creating it if it is missing."""
    clock = SystemClock()
    opened = open_run(directory, Rendezvous(OneProcess(), clock), clock)
    ram = ram_store(opened.run_id, host_name(), clock)
    return Run(directory=opened.directory, run_id=opened.run_id, durable=opened.durable, ram=ram)


def ram_store(run_id: str, host: str, clock: Clock) -> RamStore | None:
    """Return the RAM tier of a run on `host`, of a live agent or left by an earlier one."""
    agent = find_agent(run_id, host)
    candidates = [agent] if agent is not None else agent_folders(run_id, host)
    folder = next((f for f in map(ram_folder, candidates) if f.is_dir()), None)
    return RamStore(folder, _reads_only, clock) if folder is not None else None


def _reads_only(size_bytes: int) -> str:
    raise AssertionError("the command line does not write to RAM")
