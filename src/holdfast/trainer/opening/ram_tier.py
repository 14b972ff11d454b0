"""The RAM tier of a run on this host, of a live agent or left by an earlier one.

The places of a run, such as its directory and its remote tier, have one id, by which RAM is found.
If they were trained apart, RAM of one of them has no checkpoint of the other
(`host.tiers.ram_attempts`). A reader leaves such RAM out, and a start that would displace it is
refused as long as its own place can still continue from it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.attempts import read_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.run import read_run_record
from holdfast.errors import AgentUnavailableError, HoldfastError, WaitInterruptedError
from holdfast.format.names import CheckpointId
from holdfast.host.tiers.ram_attempts import foreign_attempts
from holdfast.host.tiers.ram_place import noted_place
from holdfast.host.wire.agent_directory import agent_folders, ram_folder
from holdfast.host.wire.launch import find_agent
from holdfast.local_agent.place import host_name
from holdfast.store.durable import DurableStore
from holdfast.store.location import open_durable
from holdfast.store.ram import RamStore

log = logging.getLogger(__name__)

_denied: set[Path] = set()
"""The RAM tiers of other users that a line was logged for."""


def ram_store(run_id: str, host: str, clock: Clock) -> RamStore | None:
    """Return the RAM tier of a run on `host`, of a live agent or left by an earlier one.

    Another user's RAM tier is skipped, with one line per folder in the log.
    """
    agent = find_agent(run_id, host)
    candidates = [agent] if agent is not None else agent_folders(run_id, host)
    folder = next((f for f in map(ram_folder, candidates) if _may_read(f)), None)
    return RamStore(folder, _reads_only, clock) if folder is not None else None


def _may_read(folder: Path) -> bool:
    """Return whether there is a folder, and none that belongs to another user alone."""
    try:
        return folder.is_dir()
    except PermissionError:
        if folder not in _denied:
            _denied.add(folder)
            log.info("%s belongs to another user: checkpoints in RAM there are not read", folder)
        return False


def _reads_only(size_bytes: int) -> str:
    raise AssertionError("a reader does not write to RAM")


def foreign_checkpoints(ram: RamStore, durable: DurableStore) -> Sequence[CheckpointId]:
    """Return the checkpoints in RAM whose attempt is not one of `durable`, ascending.

    Raises:
        StorageError, CheckpointDamagedError, NewerFormatError: The attempts cannot be read.
    """
    checkpoints = sorted(list_checkpoints(ram))
    attempts = {checkpoint.attempt for checkpoint in checkpoints}
    foreign = foreign_attempts(ram.root.parent, durable, attempts)
    return [checkpoint for checkpoint in checkpoints if checkpoint.attempt in foreign]


def check_foreign_ram(run_id: str, durable: DurableStore, clock: Clock) -> None:
    """Check that a start here displaces no RAM from which another place of the run can continue.

    Raises:
        AgentUnavailableError: It would.
        StorageError, CheckpointDamagedError, NewerFormatError: The attempts cannot be read.
    """
    host = host_name()
    if find_agent(run_id, host) is not None:
        # A live agent compares the places itself.
        return
    ram = ram_store(run_id, host, clock)
    if ram is None:
        return
    foreign = foreign_checkpoints(ram, durable)
    noted = noted_place(ram.root.parent)
    if not foreign or noted is None or not _continues(run_id, noted.path, ram, clock):
        return
    newest, place = foreign[-1], noted.path
    raise AgentUnavailableError(
        f"open {durable.home.location_text}: this host's RAM has checkpoints of the same run at "
        f"{place}, up to step {newest.step} of attempt {newest.attempt}, which are not those of "
        f"{durable.home.location_text}: the two were trained apart. Open {place} to keep them, or "
        "remove them from RAM (`holdfast clean`), and start again"
    )


def _continues(run_id: str, place: str, ram: RamStore, clock: Clock) -> bool:
    """Return whether the run at `place` has the attempts of what is in RAM."""
    try:
        durable = open_durable(place, clock)
        attempts = {checkpoint.attempt for checkpoint in list_checkpoints(ram)}
        if read_run_record(durable, place).run_id != run_id:
            return False
        return all(read_attempt(durable, a.number).attempt == a for a in attempts)
    except WaitInterruptedError:
        raise
    except HoldfastError:
        return False
