"""Trainers come and go: they are seated, their attempt is agreed on, and their end is noticed.

A trainer that comes waits here until the agreement has begun its attempt, or refuses it. Those of
the present attempt are `state.group`; those that wait are kept here.
"""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec

from holdfast.agent import control_block, protocol
from holdfast.agent import trainer_group as groups
from holdfast.agent.coordinator import Coordinator
from holdfast.agent.handover import found_again
from holdfast.agent.lone_ranks import FORGOTTEN_JOB, is_like_one_job
from holdfast.agent.pending_start import Layout, PendingStart, apply_request
from holdfast.agent.protocol import Notice
from holdfast.agent.refusals import refusal_error
from holdfast.agent.state import AgentState
from holdfast.agent.storage_worker import StorageWorker
from holdfast.agent.trainer_group import TrainerGroup, TrainerProcess
from holdfast.coordination import effects, inputs
from holdfast.coordination.rank_runs import ranks_text
from holdfast.engine.lifecycle.attempts import newest_attempt
from holdfast.engine.lifecycle.catalog import list_stores
from holdfast.engine.reading.sources import readable
from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    InvalidArgumentError,
    RunBusyError,
    StepNotFoundError,
)
from holdfast.format.names import CheckpointId
from holdfast.peers.address import parsed_addresses

log = logging.getLogger(__name__)


class TrainerSessions:
    """Who is attached."""

    def __init__(
        self, state: AgentState, coordinator: Coordinator, storage_worker: StorageWorker
    ) -> None:
        self._state = state
        self._coordinator = coordinator
        self._storage_worker = storage_worker
        self._coming_back = asyncio.Lock()
        self._seat = 0
        self._starts: dict[str, PendingStart] = {}
        self._branching: PendingStart | None = None
        self._followed: dict[TrainerProcess, int] = {}
        self._given_up: list[str] = []
        """The checkpoints that the attempt which begins now gives up, for its users."""

    def adopt(self, group: TrainerGroup | None) -> None:
        """Takes over the trainers that an agent before this one left."""
        self._state.group = group
        if group is not None:
            self._seat = max((m.seat for m in group.members.values()), default=-1) + 1
            for member in group.present:
                self._follow(member)
            for rank in sorted(group.lost):
                self._tell_gone(group, rank)

    async def attach(self, request: protocol.Attach, pid: int) -> protocol.Attached:
        """Seats a trainer, and waits until its attempt has begun.

        Raises:
            RunBusyError, FencedError, InvalidArgumentError, StorageError.
        """
        state = self._state
        if request.protocol != protocol.PROTOCOL_VERSION:
            raise AgentUnavailableError(
                f"attach to the agent of {state.run}: it speaks protocol "
                f"{protocol.PROTOCOL_VERSION}, this process {request.protocol}; stop the agent "
                "(`holdfast stop`) so that one of this version is started"
            )
        if request.attempt is not None:
            await self._come_back(request, request.attempt)
        if not request.takeover:
            self._leave_earlier(request, pid)
        group, start = self._group_for(request)
        member = self._seat_member(group, request.rank, pid)
        if start is None:
            self._coordinator.update_addresses(parsed_addresses(request.addresses))
            apply_request(self._state, request)
        else:
            self._begin(start, request)
        begun = start.wait() if start is not None else None
        self._coordinator.submit(
            inputs.RankJoined(
                group=group.group,
                rank=request.rank,
                rank_count=group.count,
                leader=group.leader,
                takeover=request.takeover,
                hosts=tuple(sorted({group.leader, state.config.host, *request.addresses})),
            )
        )
        if begun is not None:
            await begun
        attached = self._attached(group, member, has_ram=request.ram is not None)
        warnings = start.warnings if start is not None else ()
        return msgspec.structs.replace(attached, warnings=warnings)

    def _leave_earlier(self, request: protocol.Attach, pid: int) -> None:
        """Let a process that opens the run again leave the group that it was in before.

        Its earlier manager was forgotten, or interrupted while it was opened or closed.
        """
        groups_here = [start.group for start in self._starts.values()]
        if self._state.group is not None:
            groups_here.append(self._state.group)
        for group in groups_here:
            for member in group.present if group.group != request.group else ():
                if member.pid == pid:
                    self.detach(protocol.Detach(group=group.group, rank=member.rank))

    async def begin_branch(self, request: protocol.Branch) -> protocol.Attached:
        """Begins a new attempt for the same processes, from another checkpoint.

        Every rank asks for it, and all get the same.

        Raises:
            FencedError: another group has taken the run over.
            StepNotFoundError: the origin was removed meanwhile; the timeline stays as it is.
        """
        state = self._state
        group = state.group
        if group is None or group.group != request.group:
            raise FencedError("branch: another attempt has taken the run over; stop this process")
        if request.rank not in group.members:
            raise InvalidArgumentError(f"branch: rank {request.rank} is not attached")
        origin = CheckpointId(*request.origin) if request.origin else None
        if origin is not None and request.attempt == group.attempt:
            await self._check_there(origin)
        # Another rank, here or on another host, may have asked for it, and it may have begun.
        if request.attempt != group.attempt:
            self._check_origin(group, origin)
        if request.attempt == group.attempt:
            start = self._branching = self._branching or PendingStart(group)
            begun = start.wait()
            self._coordinator.submit(inputs.BranchWanted(request.attempt, origin))
            await begun
            self._check_origin(group, origin)
        return self._attached(group, group.members[request.rank], has_ram=state.has_ram)

    def detach(self, request: protocol.Detach) -> None:
        """A trainer leaves in good order; its process may live on."""
        group = self._group_of(request.group)
        if group is not None and request.rank in group.members and request.rank not in group.left:
            group.left.add(request.rank)
            self._unfollow(group.members[request.rank])
            self._gone(group, request.rank, inputs.RankLeft(group.group, request.rank))

    def close(self) -> None:
        """Follows nobody any more."""
        for member in list(self._followed):
            self._unfollow(member)

    # What the agreement has decided.

    def joined(self, effect: effects.AttemptJoined) -> bool:
        """The attempt of these trainers has begun, or a branch of it; whether they have started."""
        state = self._state
        start = self._starts.pop(effect.group, None)
        given_up, self._given_up = tuple(self._given_up), []
        if start is not None:
            start.warnings = given_up
            self._let_go()
            for request in start.requests.values():
                apply_request(self._state, request)
            state.group = start.group
            state.filling.clear()
            state.desk.clear()
            state.copies.clear()
        group = state.group
        if group is None or group.group != effect.group:
            return False
        group.attempt, group.origin = effect.attempt, effect.origin
        state.events.attempt = effect.attempt
        state.control.cells[control_block.ATTEMPT] = effect.attempt
        if start is not None and 0 in group.members:
            first = group.members[0]
            state.events.write("attempt_started", pid=first.pid, processes=group.count)
        branching, self._branching = self._branching, None
        for waiting in (start, branching):
            if waiting is not None:
                waiting.end(None)
        return start is not None

    def on_refused(self, effect: effects.GroupRefused) -> None:
        """These trainers cannot begin."""
        run = self._state.run
        start = self._starts.pop(effect.group, None)
        if start is not None:
            for member in start.group.present:
                self._unfollow(member)
            self._restore(start)
        if start is None and self._branching is not None:
            start, self._branching = self._branching, None
        if start is None:
            return
        live = f"{self._who_lives(effect.reason)}; {self._busy_advice(start.group)}"
        start.end(refusal_error(run, effect, live, self._storage_worker.problem))

    def given_up(self, effect: effects.GivenUp) -> None:
        """An attempt of these trainers begins from an older checkpoint than one that was whole."""
        text = f"step {effect.id.step} of attempt {effect.id.attempt} was {effect.status.value}"
        log.warning("%s, and is given up: %s", text, effect.reason)
        self._state.events.write(
            "given_up", effect.id, status=effect.status.value, reason=effect.reason
        )
        self._given_up.append(f"{text}, and the run goes on without it: {effect.reason}")

    def ended_elsewhere(self, effect: effects.RanksEnded) -> None:
        """Ranks on another host are gone, and those here may wait for them."""
        how = "without a word" if effect.is_lost else "by closing the manager"
        reason = (
            f"{ranks_text(effect.ranks)} on host {effect.host} ended {how}; stop this process and "
            "start the job again"
        )
        self._state.notices.post(Notice(kind="gone", reason=reason, data=effect.group))

    def fenced(self, effect: effects.Fenced) -> None:
        """The trainers here must stop: others have taken the run over."""
        state, group = self._state, self._state.group
        if group is None or group.group != effect.group:
            return
        self._let_go()
        # Each of them sees this at its next step, and asks.
        state.control.cells[control_block.ATTEMPT] = effect.attempt
        # Whoever waits for a save does not: nobody may ever tell what becomes of it.
        reason = (
            f"save to {state.run}: attempt {effect.attempt} has taken the run over from "
            f"attempt {group.attempt} ({effect.reason}); stop this process"
        )
        state.notices.post(Notice(kind="fenced", reason=reason, data=group.group))
        state.events.write("fenced", by_attempt=effect.attempt, reason=effect.reason)
        if self._branching is not None:
            branching, self._branching = self._branching, None
            branching.end(FencedError(f"branch: {effect.reason}; stop this process"))

    # How they are seated.

    def _attached(
        self, group: TrainerGroup, member: TrainerProcess, *, has_ram: bool
    ) -> protocol.Attached:
        origin = group.origin
        return protocol.Attached(
            attempt=group.attempt,
            origin=(origin.step, origin.attempt) if origin else None,
            seat=member.seat,
            ram_folder=str(self._state.ram.root) if has_ram else None,
            cursor=group.cursor,
        )

    def _group_for(self, request: protocol.Attach) -> tuple[TrainerGroup, PendingStart | None]:
        """Return the group of a request, and its start where its attempt has not begun.

        Raises:
            InvalidArgumentError: the rank is none of the group's; nothing is changed.
        """
        group, start = self._state.group, None
        if group is None or group.group != request.group:
            start = self._starts.get(request.group)
            if start is None:
                leader = request.leader or self._state.config.host
                start = PendingStart(TrainerGroup(request.group, 0, request.count, leader))
                # What was posted before concerns the trainers before them.
                start.group.cursor = self._state.notices.count
            group = start.group
        if not 0 <= request.rank < request.count == group.count:
            raise InvalidArgumentError(
                f"attach: rank {request.rank} of {request.count}, expected one of {group.count}"
            )
        return group, start

    def _begin(self, start: PendingStart, request: protocol.Attach) -> None:
        """Keep what a request asks until its attempt has begun.

        The agreement needs the other hosts' addresses and the layout before that: both are
        changed now, and restored where the start is refused.
        """
        if start.group.group not in self._starts:
            start.replaced = self._replace_layout(request)
            self._starts[start.group.group] = start
        start.add(self._coordinator, request)

    def _restore(self, start: PendingStart) -> None:
        """Undo what a start that was refused had changed, where nothing newer came since."""
        start.restore_addresses(self._coordinator)
        if start.replaced is not None:
            # The machine that refused still has effects to carry out.
            asyncio.get_running_loop().call_soon(self._restore_layout, start.replaced)

    def _replace_layout(self, request: protocol.Attach) -> Layout | None:
        """Take the request's failure domain and settings; return what they replaced."""
        coordinator = self._coordinator
        wanted = Layout(request.domain or self._state.config.host, request.settings())
        present = Layout(coordinator.domain, coordinator.settings)
        if wanted == present or self._state.group is not None or self._starts:
            return None
        self._set_layout(wanted)
        return present

    def _restore_layout(self, layout: Layout) -> None:
        if self._state.group is None and not self._starts:
            self._set_layout(layout)

    def _set_layout(self, layout: Layout) -> None:
        self._coordinator.restart(
            found_again(self._state, self._storage_worker, self._coordinator.record, None),
            domain=layout.domain,
            settings=layout.settings,
        )

    async def _come_back(self, request: protocol.Attach, attempt: int) -> None:
        """It had a place with an agent that is gone, and whose record is gone with it, perhaps."""
        async with self._coming_back:
            group = self._state.group
            if group is not None and group.group == request.group:
                return
            newest = await self._storage_worker.query(newest_attempt, self._state.durable)
            if newest != attempt or group is not None:
                raise FencedError(
                    f"attach: attempt {newest} has taken the run over from attempt "
                    f"{attempt}; stop this process"
                )
            for word in list(self._starts):
                busy = f"open {self._state.run}: attempt {attempt} is live and came back"
                refused = self._starts.pop(word)
                refused.restore_addresses(self._coordinator)
                refused.end(RunBusyError(f"{busy}; stop it first"))
            leader = request.leader or self._state.config.host
            group = TrainerGroup(request.group, attempt, request.count, leader)
            group.origin = CheckpointId(*request.origin) if request.origin else None
            self._state.group = group
            self._state.events.attempt = attempt
            self._state.control.cells[control_block.ATTEMPT] = attempt
            self._coordinator.restart(
                found_again(self._state, self._storage_worker, None, group, rank=request.rank),
                domain=request.domain or self._state.config.host,
                settings=request.settings(),
            )

    def _check_origin(self, group: TrainerGroup, origin: CheckpointId | None) -> None:
        if group.origin != origin:
            raise FencedError(
                f"branch: attempt {group.attempt} has begun from another checkpoint than this "
                "process went back to; stop it"
            )

    async def _check_there(self, origin: CheckpointId) -> None:
        # What lies beyond the origin is left by a branch: it must not be all there is.
        state = self._state
        stores = [state.ram, *self._coordinator.peer_stores(), state.durable]
        listings, _ = await self._storage_worker.query(list_stores, stores)
        if origin not in readable(listings):
            raise StepNotFoundError(
                f"go back to {origin}: it was removed while it was restored; restore another step"
            )

    def _seat_member(self, group: TrainerGroup, rank: int, pid: int) -> TrainerProcess:
        known = group.members.get(rank)
        is_there = known in group.present
        if known is not None and known.pid == pid and is_there:
            return known
        if known is not None and known.is_alive and is_there:
            raise InvalidArgumentError(
                f"attach: rank {rank} is process {known.pid} already; each process of a job needs "
                "a rank of its own (was jax.distributed started in all of them?)"
            )
        started = groups.process_start(pid)
        if started is None:
            raise FencedError(f"attach: process {pid} has ended")
        member = TrainerProcess(rank=rank, seat=self._free_seat(), pid=pid, started=started)
        self._seat = member.seat + 1
        values = self._state.control.cells
        values[control_block.step_cell(member.seat)] = control_block.NO_STEP
        values[control_block.notice_cell(member.seat)] = 0
        values[control_block.cost_cell(member.seat)] = control_block.NO_COST
        group.members[rank] = member
        group.left.discard(rank)
        group.lost.discard(rank)
        self._follow(member)
        return member

    def _free_seat(self) -> int:
        """Return the next seat that no attached trainer has.

        A seat is reused as late as possible: a trainer that was fenced may still write its words.
        """
        groups_here = [start.group for start in self._starts.values()]
        if self._state.group is not None:
            groups_here.append(self._state.group)
        taken = {member.seat for group in groups_here for member in group.present}
        for offset in range(control_block.SEAT_COUNT):
            seat = (self._seat + offset) % control_block.SEAT_COUNT
            if seat not in taken:
                return seat
        raise InvalidArgumentError(
            f"attach: expected at most {control_block.SEAT_COUNT} processes on a host, "
            "found one more"
        )

    def _group_of(self, word: str) -> TrainerGroup | None:
        group = self._state.group
        if group is not None and group.group == word:
            return group
        start = self._starts.get(word)
        return start.group if start is not None else None

    def _who_lives(self, reason: str) -> str:
        host, group = self._state.config.host, self._state.group
        if group is not None and group.present:
            return f"attempt {group.attempt} is live on host {host} ({_processes(group)})"
        others = [start.group for start in self._starts.values() if start.group.present]
        if others:
            return f"other processes begin an attempt on host {host} ({_processes(others[0])})"
        return reason

    def _busy_advice(self, group: TrainerGroup) -> str:
        """Return what to do about the processes that keep `group` from beginning."""
        here = [self._state.group, *(start.group for start in self._starts.values())]
        if any(other is not None and is_like_one_job(group, other) for other in here):
            return FORGOTTEN_JOB
        return "stop it first, or open with takeover=True to fence it"

    # How their end is noticed.

    def _follow(self, member: TrainerProcess) -> None:
        """Waits for the process to end; the kernel tells it at once."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(member.pid)
        except ProcessLookupError:
            loop.call_soon(self._ended, member)
            return
        loop.add_reader(fd, self._ended, member)
        self._followed[member] = fd

    def _unfollow(self, member: TrainerProcess) -> None:
        fd = self._followed.pop(member, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _let_go(self) -> None:
        """Nobody asks any more how the processes of the present group end."""
        group, self._state.group = self._state.group, None
        for member in group.present if group is not None else ():
            self._unfollow(member)

    def _ended(self, member: TrainerProcess) -> None:
        self._unfollow(member)
        starting = [start.group for start in self._starts.values()]
        for group in (*starting, self._state.group):
            if group is None or group.members.get(member.rank) != member:
                continue
            if member.rank in group.left | group.lost:
                continue
            group.lost.add(member.rank)
            self._state.events.write("trainer_lost", rank=member.rank, pid=member.pid)
            self._tell_sealed(group)
            self._gone(group, member.rank, inputs.RankLost(group.group, member.rank))

    def _tell_sealed(self, group: TrainerGroup) -> None:
        """Ranks may have ended before they came to tell what they had sealed."""
        for checkpoint, listed in self._storage_worker.in_ram().items():
            is_theirs = group.attempt > 0 and checkpoint.attempt == group.attempt
            for rank in sorted(listed.ranks & group.members.keys()) if is_theirs else ():
                self._coordinator.submit(
                    inputs.PartSealed(
                        rank=rank,
                        id=checkpoint,
                        part_count=listed.part_count,
                        in_ram=True,
                        is_due=False,
                    )
                )

    def _gone(
        self, group: TrainerGroup, rank: int, item: inputs.RankLeft | inputs.RankLost
    ) -> None:
        state = self._state
        self._tell_gone(group, rank)
        start = self._starts.get(group.group)
        if start is not None and start.group is group and not group.present:
            del self._starts[group.group]
            self._restore(start)
            start.end(FencedError("attach: the processes that wanted to begin have ended"))
        if group is state.group:
            state.filling.pop(rank, None)
            state.desk.returned(rank)
            state.copies.forget_maker(rank)
            if not group.present:
                # A lost member stays told in its events; nobody is left who could go on.
                state.group = None
                state.desk.forget_sizes()
        self._coordinator.submit(item)

    def _tell_gone(self, group: TrainerGroup, rank: int) -> None:
        """Others may wait for it."""
        state = self._state
        how = "has closed its manager" if rank in group.left else "has ended"
        reason = (
            f"rank {rank} (process {group.members[rank].pid} on host {state.config.host}) {how}; "
            "stop this process and start the job again"
        )
        state.notices.post(Notice(kind="gone", reason=reason, data=group.group))


def _processes(group: TrainerGroup) -> str:
    return ", ".join(f"rank {m.rank} is process {m.pid}" for m in group.present)
