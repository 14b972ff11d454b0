"""A run as the command line opens it: for reading, with this host's RAM tier where there is one."""

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
    """A run; `ram` is None where this host's memory holds nothing of it.

    A directory that is a copy of a run, and was not opened yet, has the original's `run_id`. The
    agents and the RAM of that id are not its own.
    """

    directory: Path
    run_id: str
    durable: DiskStore
    ram: RamStore | None
    is_copy: bool = False

    @property
    def agents_id(self) -> str:
        """The id that its own agents go by; empty where it can have none yet."""
        return "" if self.is_copy else self.run_id

    @property
    def stores(self) -> list[Store]:
        """The tiers, the nearest first."""
        return [self.ram, self.durable] if self.ram is not None else [self.durable]

    def load_view(self) -> View:
        """What the tiers hold now.

        Raises:
            CheckpointDamagedError: an attempt's record is damaged, so there is no telling the
                timeline.
        """
        return view_of(self.stores, self.durable)


def read_only(directory: Path) -> Run:
    """The run in `directory`; nothing is changed.

    Raises:
        NotARunError, NewerFormatError, StorageError, InvalidArgumentError.
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
    """The same, also where the run's own record is bad; then with what is wrong with it.

    Raises:
        NotARunError: nothing there looks like a run.
        NewerFormatError, StorageError, InvalidArgumentError.
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


def made_where_missing(directory: Path) -> Run:
    """The same, of a run that is made where there is none."""
    clock = SystemClock()
    opened = open_run(directory, Rendezvous(OneProcess(), clock), clock)
    ram = ram_store(opened.run_id, host_name(), clock)
    return Run(directory=opened.directory, run_id=opened.run_id, durable=opened.durable, ram=ram)


def ram_store(run_id: str, host: str, clock: Clock) -> RamStore | None:
    """The RAM tier of a run on `host`: a living agent's, else what a dead one left."""
    agent = find_agent(run_id, host)
    candidates = [agent] if agent is not None else agent_folders(run_id, host)
    folder = next((f for f in map(ram_folder, candidates) if f.is_dir()), None)
    return RamStore(folder, _reads_only, clock) if folder is not None else None


def _reads_only(size_bytes: int) -> str:
    raise AssertionError("the command line does not write to RAM")
