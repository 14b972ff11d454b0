"""Implement `holdfast clean`: remove the memory and the agents that no live run owns.

Invariants:
- An agent is asked to end; it makes durable what it holds, and refuses while it has trainers.
- A folder is removed only under its lock, so that no agent is in it or starts in it.
- Memory that may hold the only copy of a checkpoint stays unless `--all` is given.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from holdfast.cli import output
from holdfast.cli.file_agents import FilesInRam, files_in_ram, stop_file_agent
from holdfast.cli.output import counted, size_text
from holdfast.cli.stop import stop_agent
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.errors import HoldfastError
from holdfast.format.names import NO_AGE
from holdfast.format.timeline import last_steps
from holdfast.host.tiers.ram_place import noted_place, whole_in
from holdfast.host.wire import protocol
from holdfast.host.wire.agent_directory import GROUP, ram_folder
from holdfast.host.wire.agents_here import folders_here, leaving, living, run_of
from holdfast.host.wire.group_record import read_record
from holdfast.local_agent.place import is_locked, remove_place
from holdfast.store.location import RunLocation
from holdfast.supervise.own_folder import OF_PROOF, OF_SUPERVISOR, abandoned_folders
from holdfast.trainer.opening.run_access import read_only

STOP_SECS = 60.0
STOP_FILES_SECS = 70.0
"""A file agent gives up the writes of its files after 60."""

_LEAVING = re.compile(r"\.[0-9a-f]{32}-.+\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unowned:
    """Memory that no trainer uses; `agent` is None where it has no agent.

    `kept_for` is the reason why it stays without `--all`, empty if there is none.
    """

    folder: Path
    size_bytes: int
    text: str
    kept_for: str = ""
    agent: protocol.AgentStatus | None = None
    files: FilesInRam | None = None
    """Set where the memory has whole files; their agent ends by another call."""

    @property
    def agent_pid(self) -> int | None:
        """The process of its agent."""
        agent = self.agent if self.files is None else self.files.agent
        return agent.pid if agent is not None else None


@click.command()
@click.option("--all", "is_all", is_flag=True, help="Also what may be a checkpoint's only copy.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def clean(is_all: bool, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Remove the memory and the agents of runs that do not train on this host.

    These are agents without trainers, which make durable what they hold and end, and what killed
    agents and killed `holdfast run`, `prove` and `bisect` have left; file agents too, if no process
    uses them. What a trainer or its agent uses is never touched.
    """
    leftovers = [*unowned_memory()]
    chosen = [leftover for leftover in leftovers if is_all or not leftover.kept_for]
    for leftover in leftovers if not as_json else ():
        kept = f"; kept: {leftover.kept_for}; --all removes it" if leftover not in chosen else ""
        output.print_line(
            f"{leftover.folder}: {size_text(leftover.size_bytes)}, {leftover.text}{kept}"
        )
    problems = []
    if chosen and not dry_run:
        total = size_text(sum(leftover.size_bytes for leftover in chosen))
        output.confirm(f"Remove {total} in {len(chosen)} folders?", is_answered=yes)
        for leftover in chosen:
            try:
                _remove(leftover)
            except (HoldfastError, OSError) as error:
                problems.append(f"{leftover.folder}: {error}")
    for problem in problems:
        output.print_error(problem)
    if as_json:
        rows = [
            {
                "folder": str(leftover.folder),
                "size_bytes": leftover.size_bytes,
                "reason": leftover.text,
                "kept_for": leftover.kept_for if leftover not in chosen else None,
                "pid": leftover.agent_pid,
            }
            for leftover in leftovers
        ]
        output.print_json({"found": rows, "removed": not dry_run, "problems": problems})
    elif not leftovers:
        output.print_line("nothing to remove")
    return 1 if problems else 0


def unowned_memory() -> Iterator[Unowned]:
    """Yield the memory on this host that no trainer uses."""
    yield from _idle_agents()
    yield from _left_behind()
    yield from _unused_files()
    used = [*_runs_in_use()]
    for prefix, command in ((OF_SUPERVISOR, "run"), (OF_PROOF, "prove` or `bisect")):
        for folder in abandoned_folders(prefix):
            if not any(run.is_relative_to(folder) for run in used):
                text = f"left by a killed `holdfast {command}`"
                yield Unowned(folder=folder, size_bytes=_size_bytes(folder), text=text)


def _runs_in_use() -> Iterator[Path]:
    """Yield the runs into whose directories an agent may still write once this command ends.

    A program that has outlived its proof may train there, and its agent outlives the program.
    """
    answering = living()
    yield from (Path(agent.run) for agent in answering if not _is_idle(agent))
    for folder in leaving(answering=[Path(agent.folder) for agent in answering]):
        record = read_record(folder / GROUP)
        if record is not None:
            yield Path(record.run)


def _unused_files() -> Iterator[Unowned]:
    for ram_files in files_in_ram():
        if ram_files.is_used:
            continue
        text, kept_for = "left by a killed file agent", ""
        if ram_files.agent is not None:
            text = f"file agent {ram_files.agent.pid} that no process uses"
        elif ram_files.pending_count:
            files = counted(ram_files.pending_count, "file")
            kept_for = f"{files} may be in RAM alone; the next file agent writes them"
        yield Unowned(
            folder=ram_files.folder,
            size_bytes=_size_bytes(ram_files.folder),
            text=text,
            kept_for=kept_for,
            files=ram_files,
        )


def _idle_agents() -> Iterator[Unowned]:
    for agent in living():
        if _is_idle(agent):
            text = f"agent {agent.pid} of {agent.run} without trainers"
            folder = Path(agent.folder)
            yield Unowned(folder=folder, size_bytes=_size_bytes(folder), text=text, agent=agent)


def _is_idle(agent: protocol.AgentStatus) -> bool:
    return not agent.trainers and not agent.waits_for and agent.leaves_in_secs is not None


def _left_behind() -> Iterator[Unowned]:
    for folder in folders_here():
        leaving = _LEAVING.fullmatch(folder.name)
        if leaving is not None and not Path(f"/proc/{leaving[1]}").exists():
            text = "left by an agent that was killed while it removed it"
            yield Unowned(folder=folder, size_bytes=_size_bytes(folder), text=text)
        if run_of(folder) is None or is_locked(folder):
            continue
        record = read_record(folder / GROUP)
        if record is not None and any(member.is_alive for member in record.members):
            # Its trainers start another agent at once.
            continue
        run = record.run if record is not None else ""
        yield Unowned(
            folder=folder,
            size_bytes=_size_bytes(folder),
            text=f"left by a killed agent of {run or 'run ' + str(run_of(folder))}",
            kept_for=_only_copy(folder, run),
        )


def _only_copy(folder: Path, run: str) -> str:
    """Return why the folder may hold the only copy of a checkpoint; empty if it cannot."""
    try:
        whole = whole_in(ram_folder(folder), SystemClock())
        if not whole:
            return ""
        newest = whole[-1]
        noted = noted_place(folder)
        run = noted.path if noted is not None else run
        location = RunLocation(run)
        is_there = location.is_url or location.record.exists()
        opened = read_only(run) if run and is_there else None
        if run and (opened is None or opened.run_id != run_of(folder)):
            # A move to another file system cannot be told from a deletion.
            return (
                f"step {newest.step} may be in RAM alone: its run is not in {run} any more. If it "
                "was moved, a start at its new place continues from it"
            )
        if opened is not None:
            limits = last_steps(read_attempts(opened.durable))
            committed = [
                c.age
                for c, listing in list_checkpoints(opened.durable).items()
                if listing.is_committed and c.step <= limits.get(c.attempt, -1)
            ]
            is_needed = newest.step <= limits.get(newest.attempt, -1)
            is_newest = max(committed, default=NO_AGE) < newest.age
            if not (is_needed and is_newest):
                return ""
    except HoldfastError as error:
        return f"it is unknown whether it is needed ({error})"
    return f"step {newest.step} may not be durable; the run's next start makes it so"


def _remove(one: Unowned) -> None:
    if one.files is not None and one.files.agent is not None:
        clock = SystemClock()
        stop_file_agent(one.files, clock.monotonic() + STOP_FILES_SECS, clock)
        return
    if one.agent is not None:
        clock = SystemClock()
        stop_agent(one.agent, clock.monotonic() + STOP_SECS, clock)
        return
    remove_place(one.folder)


def _size_bytes(folder: Path) -> int:
    """Return the bytes of all files; an image is a second name of its slot, and counts once."""
    sizes: dict[int, int] = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            state = path.lstat()
            sizes[state.st_ino] = state.st_blocks * 512
    return sum(sizes.values())
