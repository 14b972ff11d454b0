"""Attach trainers, begin their attempts, and notice when they end.

A trainer that attaches waits until the coordination has begun its attempt or refused it.
`AttachedTrainers` holds those of the present attempt; starts that wait are kept here.
"""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec

from holdfast.coordination import effects, inputs
from holdfast.coordination.rank_runs import ranks_text
from holdfast.engine.lifecycle.attempts import newest_attempt
from holdfast.engine.lifecycle.catalog import list_stores
from holdfast.engine.reading.sources import readable
from holdfast.environment import RAM_VARIABLE
from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    InvalidArgumentError,
    RunBusyError,
    StepNotFoundError,
)
from holdfast.format.names import NO_ATTEMPT, AttemptId, CheckpointId
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers, TrainerGroup
from holdfast.host.driver.driver import Driver
from holdfast.host.driver.peer_network import PeerNetwork
from holdfast.host.tiers.ram_tier import RamTier
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.trainers.handover import found_again
from holdfast.host.trainers.pending_start import (
    Layout,
    PendingStart,
    apply_request,
    check_policies,
    prepare_remote,
)
from holdfast.host.trainers.refusals import (
    FORGOTTEN_JOB,
    forgotten_ranks,
    is_like_one_job,
    refusal_error,
)
from holdfast.host.wire import control_block, protocol
from holdfast.host.wire.group_record import GroupRecord, TrainerProcess, process_start
from holdfast.host.wire.protocol import Notice
from holdfast.observe.events.schema import (
    AttemptBranched,
    AttemptFenced,
    AttemptStarted,
    CheckpointGivenUp,
    RanksLost,
    TrainerLeft,
    TrainerLost,
)
from holdfast.peers.address import parsed_addresses

log = logging.getLogger(__name__)


class TrainerSessions:
    """The attached trainers and the starts that wait; owned by the event loop."""

    def __init__(
        self,
        run: AgentRun,
        ram: RamTier,
        trainers: AttachedTrainers,
        network: PeerNetwork,
        driver: Driver,
        storage_worker: StorageWorker,
    ) -> None:
        self._run = run
        self._ram = ram
        self._trainers = trainers
        self._network = network
        self._driver = driver
        self._storage_worker = storage_worker
        self._reattach_lock = asyncio.Lock()
        self._seat = 0
        self._starts: dict[str, PendingStart] = {}
        self._branching: PendingStart | None = None
        self._followed: dict[TrainerProcess, int] = {}
        self._displaced: dict[str, str] = {}
        """What has displaced the groups that gave way to a start at another place, as text."""
        self._abandoned: list[str] = []
        """Warnings for the users about checkpoints that the attempt which now begins abandons.

        A start whose number an attempt has that is only remembered begins once more, with the next
        number, and abandons the same checkpoints again.
        """

    def adopt(self, group: TrainerGroup | None) -> None:
        """Take over the trainers of the previous agent."""
        self._trainers.group = group
        if group is not None:
            self._seat = max((m.seat for m in group.members.values()), default=-1) + 1
            self._trainers.meter.adopt_members(group.present)
            for member in group.present:
                self._follow(member)
            for rank in sorted(group.lost):
                self._notify_ended(group, rank)

    async def attach(self, request: protocol.Attach, pid: int) -> protocol.Attached:
        """Seat a trainer, and return its place once its attempt has begun.

        Raises:
            RunBusyError, FencedError, InvalidArgumentError, StorageError: the attempt does not
                begin; the agent is as it was.
            AgentUnavailableError: the trainer uses another version of the protocol, or hosts were
                not reached.
        """
        if request.protocol != protocol.PROTOCOL_VERSION:
            raise AgentUnavailableError(
                f"attach to the agent of {self._run.path}: it speaks protocol "
                f"{protocol.PROTOCOL_VERSION}, this process {request.protocol}; start "
                "this process again if Holdfast was updated meanwhile, else stop the agent "
                "(`holdfast stop`) so that one of this version is started"
            )
        if pid <= 0:
            raise RunBusyError(
                f"open {self._run.path}: its agent on host {self._run.config.host} runs in another "
                "PID namespace, and cannot watch this process; stop the container that holds the "
                f"run, or give this one a folder of its own by {RAM_VARIABLE}"
            )
        check_policies(request)
        await self._refresh_remote(request)
        prepare_remote(self._run, self._trainers, request)
        if request.attempt is not None:
            await self._reattach(request, request.attempt)
        if not request.takeover:
            self._leave_earlier(request, pid)
        group, start = self._group_for(request)
        member = self._seat_member(group, request.rank, pid)
        if start is None:
            self._network.update_addresses(parsed_addresses(request.addresses))
            apply_request(self._run, self._ram, self._trainers, request)
        else:
            self._begin(start, request)
        # Created before the input is submitted: the attempt may begin within that call.
        begun = start.wait() if start is not None else None
        self._driver.submit(
            inputs.RankJoined(
                group=group.group,
                rank=request.rank,
                rank_count=group.count,
                leader=group.leader,
                takeover=request.takeover,
                hosts=tuple(sorted({group.leader, self._run.config.host, *request.addresses})),
            )
        )
        if begun is not None:
            await begun
        attached = self._attached(group, member, has_ram=request.ram is not None)
        warnings = start.warnings if start is not None else ()
        return msgspec.structs.replace(attached, warnings=warnings)

    async def _refresh_remote(self, request: protocol.Attach) -> None:
        """Open the remote tier anew if its directory was deleted, and a start has made another."""
        remote = self._run.remote
        if remote is None or request.remote is None or request.remote.place != remote.place:
            return
        is_there = await self._storage_worker.threads.query(remote.store.home.is_at, remote.place)
        if not is_there and self._run.remote is remote:
            log.warning("the remote tier %s is another directory than before", remote.place)
            self._run.reopen_remote()

    def _leave_earlier(self, request: protocol.Attach, pid: int) -> None:
        """Detach a process that opens the run again from its earlier group.

        Its earlier manager was forgotten, or interrupted while it was opened or closed.
        """
        groups_here = [start.group for start in self._starts.values()]
        if self._trainers.group is not None:
            groups_here.append(self._trainers.group)
        for group in groups_here:
            for member in group.present if group.group != request.group else ():
                if member.pid == pid:
                    self.detach(protocol.Detach(group=group.group, rank=member.rank))

    async def begin_branch(self, request: protocol.Branch) -> protocol.Attached:
        """Begin a new attempt for the same processes, from another checkpoint.

        Every rank asks for it, and all get the same attempt.

        Raises:
            FencedError: another group has taken the run over, or the attempt has branched from
                another checkpoint.
            InvalidArgumentError: the rank is not attached.
            StepNotFoundError: the origin was removed meanwhile; the timeline stays as it is.
        """
        group = self._trainers.group
        if group is None or group.group != request.group:
            raise FencedError("branch: another attempt has taken the run over; stop this process")
        if request.rank not in group.members:
            raise InvalidArgumentError(f"branch: rank {request.rank} is not attached")
        origin = request.origin
        if origin is not None and request.attempt == group.attempt:
            await self._check_there(origin)
        # Another rank, here or on another host, may have asked for it, and it may have begun.
        if request.attempt != group.attempt:
            self._check_origin(group, origin)
        if request.attempt == group.attempt:
            start = self._branching = self._branching or PendingStart(group)
            begun = start.wait()
            self._driver.submit(inputs.BranchWanted(request.attempt, origin))
            await begun
            self._check_origin(group, origin)
        return self._attached(
            group, group.members[request.rank], has_ram=self._trainers.job.has_ram
        )

    def detach(self, request: protocol.Detach) -> None:
        """Detach a trainer that ends regularly; its process may continue."""
        group = self._group_of(request.group)
        if group is not None and request.rank in group.members and request.rank not in group.left:
            member = group.members[request.rank]
            group.left.add(request.rank)
            self._unfollow(member)
            last_step, blocked_secs = self._trainers.meter.leave(member)
            self._run.events.write(
                TrainerLeft(
                    rank=member.rank,
                    pid=member.pid,
                    last_step=last_step,
                    blocked_secs=blocked_secs,
                    after_error=request.after_error,
                )
            )
            self._member_ended(group, request.rank, inputs.RankLeft(group.group, request.rank))

    @property
    def is_starting(self) -> bool:
        """Whether trainers wait here for their attempt to begin."""
        return bool(self._starts)

    def close(self) -> None:
        """Stop following all processes."""
        for member in list(self._followed):
            self._unfollow(member)

    # Decisions of the coordination.

    def joined(self, effect: effects.AttemptJoined) -> bool:
        """Record that the attempt of a group, or a branch of it, has begun.

        Returns:
            Whether the group has started with it.
        """
        start = self._starts.pop(effect.group, None)
        given_up, self._abandoned = tuple(self._abandoned), []
        if start is not None:
            start.warnings = given_up
            self._release_group()
            for request in start.requests.values():
                apply_request(self._run, self._ram, self._trainers, request)
            self._trainers.group = start.group
            self._trainers.filling.clear()
            self._ram.slots.clear()
            self._ram.replicas.clear()
        group = self._trainers.group
        if group is None or group.group != effect.group:
            return False
        group.attempt, group.origin = effect.attempt, effect.origin
        self._storage_worker.opening.on_joined(effect.attempt)
        self._storage_worker.note_joined(effect.attempt)
        self._run.events.attempt = effect.attempt.number
        self._trainers.show_attempt(effect.attempt.number)
        if start is not None and 0 in group.members:
            origin = effect.origin
            self._run.events.write(
                AttemptStarted(
                    pid=group.members[0].pid,
                    processes=group.count,
                    origin_step=origin.step if origin is not None else None,
                    origin_attempt=origin.attempt.number if origin is not None else None,
                )
            )
        elif start is None:
            origin = effect.origin
            self._run.events.write(
                AttemptBranched(
                    origin_step=origin.step if origin is not None else None,
                    origin_attempt=origin.attempt.number if origin is not None else None,
                )
            )
        branching, self._branching = self._branching, None
        for waiting in (start, branching):
            if waiting is not None:
                waiting.end(None)
        return start is not None

    def on_refused(self, effect: effects.GroupRefused) -> None:
        """Fail the start, or the branch, of the group that was refused."""
        run = self._run.path
        start = self._starts.pop(effect.group, None)
        if start is not None:
            for member in start.group.present:
                self._unfollow(member)
            self._restore(start)
        if start is None and self._branching is not None:
            start, self._branching = self._branching, None
        if start is None:
            return
        live = f"{self._live_processes(effect.reason)}; {self._busy_advice(start)}"
        start.end(refusal_error(run, effect, live, self._storage_worker.problem))

    def given_up(self, effect: effects.GivenUp) -> None:
        """Report a whole checkpoint that the beginning attempt abandons for an older one."""
        text = f"step {effect.id.step} of attempt {effect.id.attempt} was {effect.status.value}"
        warning = f"{text}, and the run continues without it: {effect.reason}"
        if warning in self._abandoned:
            return
        self._abandoned.append(warning)
        log.warning("%s, and is abandoned: %s", text, effect.reason)
        self._run.events.write(
            CheckpointGivenUp(
                step=effect.id.step,
                attempt=effect.id.attempt.number,
                status=effect.status.value,
                reason=effect.reason,
            )
        )

    def ram_given_up(self, effect: effects.RamGivenUp) -> None:
        """Report that the beginning attempt does without what another host may have in RAM."""
        warning = (
            f"the run continues without checkpoints of attempt {effect.attempt} that only the RAM "
            f"of host {effect.host} has, if it has any: its agent cannot be asked from here, and "
            f"{effect.reason}"
        )
        self._abandoned.append(warning)
        log.warning("%s", warning)

    def ended_elsewhere(self, effect: effects.RanksEnded) -> None:
        """Notify the trainers that ranks on another host have ended: they may wait for them."""
        self._run.events.write(
            RanksLost(of_host=effect.host, ranks=effect.ranks, closed=not effect.is_lost)
        )
        how = "without closing the manager" if effect.is_lost else "by closing the manager"
        reason = (
            f"{ranks_text(effect.ranks)} on host {effect.host} ended {how}; stop this process and "
            "start the job again"
        )
        self._trainers.notices.post(Notice(kind="gone", reason=reason, data=effect.group))

    def fenced(self, effect: effects.Fenced) -> None:
        """Stop the trainers here: another attempt has taken the run over."""
        group = self._trainers.group
        if group is not None and group.group == effect.group:
            by = f"attempt {effect.attempt} has taken the run over from attempt {group.attempt}"
            self._fence(group, effect.attempt.number, f"{by} ({effect.reason})", effect.reason)

    def give_way(self, place: str) -> None:
        """Stop the trainers here: a start at another place of the run takes it over on this host.

        Its attempt can only begin once this agent has left. What the trainers have sealed is
        reported before their end.
        """
        group = self._trainers.group
        if group is None:
            return
        reason = f"a start at {place}, another place of the run, takes it over (takeover=True)"
        ranks = [member.rank for member in group.present]
        self._submit_sealed(group)
        self._displaced[group.group] = f"{reason} from attempt {group.attempt}"
        self._fence(group, group.attempt.number + 1, self._displaced[group.group], reason)
        for rank in ranks:
            self._driver.submit(inputs.RankLost(group.group, rank))

    def _fence(self, group: TrainerGroup, number: int, by: str, reason: str) -> None:
        """Release the trainers, and notify them that attempt `number` fences them."""
        self._release_group()
        # Each trainer reads this cell at its next step, and asks.
        self._trainers.show_attempt(number)
        # A trainer that waits for a save does not read the cell, and no agent may ever report that
        # save's end: the notice ends the wait.
        text = f"save to {self._run.path}: {by}; stop this process"
        self._trainers.notices.post(Notice(kind="fenced", reason=text, data=group.group))
        self._run.events.write(AttemptFenced(by_attempt=number, reason=reason))
        if self._branching is not None:
            branching, self._branching = self._branching, None
            branching.end(FencedError(f"branch: {reason}; stop this process"))

    # Seats.

    def _attached(
        self, group: TrainerGroup, member: TrainerProcess, *, has_ram: bool
    ) -> protocol.Attached:
        origin = group.origin
        return protocol.Attached(
            attempt=group.attempt,
            origin=origin,
            seat=member.seat,
            ram_folder=str(self._ram.store.root) if has_ram else None,
            cursor=group.cursor,
        )

    def _group_for(self, request: protocol.Attach) -> tuple[TrainerGroup, PendingStart | None]:
        """Return the group of a request, and its start where its attempt has not begun.

        Raises:
            InvalidArgumentError: the rank is none of the group's; nothing is changed.
        """
        group, start = self._trainers.group, None
        if group is None or group.group != request.group:
            start = self._starts.get(request.group)
            if start is None:
                leader = request.leader or self._run.config.host
                start = PendingStart(TrainerGroup(request.group, NO_ATTEMPT, request.count, leader))
                # Earlier notices concern the trainers before them.
                start.group.cursor = self._trainers.notices.count
            group = start.group
        if not 0 <= request.rank < request.count == group.count:
            raise InvalidArgumentError(
                f"attach: rank {request.rank} of {request.count}, expected one of {group.count}"
            )
        return group, start

    def _begin(self, start: PendingStart, request: protocol.Attach) -> None:
        """Keep a request until its attempt has begun.

        The coordination needs the other hosts' addresses and the layout before that: both are
        changed now, and restored if the start is refused.
        """
        if start.group.group not in self._starts:
            start.replaced = self._replace_layout(request)
            self._starts[start.group.group] = start
        start.add_process(self._network, request)

    def _restore(self, start: PendingStart) -> None:
        """Undo the changes of a refused start, except where newer ones have followed."""
        start.restore_addresses(self._network)
        if start.replaced is not None:
            # The node that refused still has effects to carry out, so it is replaced only after
            # them.
            asyncio.get_running_loop().call_soon(self._restore_layout, start.replaced)

    def _replace_layout(self, request: protocol.Attach) -> Layout | None:
        """Take the request's failure domain and settings; return what they replaced."""
        layout = Layout(request.domain or self._run.config.host, request.settings())
        present = Layout(self._driver.domain, self._driver.settings)
        if layout == present or self._trainers.group is not None or self._starts:
            return None
        self._set_layout(layout)
        return present

    def _restore_layout(self, layout: Layout) -> None:
        if self._trainers.group is None and not self._starts:
            self._set_layout(layout)

    def _set_layout(self, layout: Layout) -> None:
        self._driver.restart(
            self._found(self._driver.record, None),
            domain=layout.domain,
            settings=layout.settings,
        )

    async def _reattach(self, request: protocol.Attach, attempt: AttemptId) -> None:
        """Restore the group of a trainer of a previous agent, whose record may be lost.

        Starts that wait are refused: the attempt is live.

        Raises:
            FencedError: a newer attempt has begun, another group is attached, or this one gave way.
        """
        if request.group in self._displaced:
            raise FencedError(f"attach: {self._displaced[request.group]}; stop this process")
        # All ranks reattach at the same time, and the first one restores the group.
        async with self._reattach_lock:
            group = self._trainers.group
            if group is not None and group.group == request.group:
                return
            newest = await self._storage_worker.threads.query(newest_attempt, self._run.durable)
            if newest != attempt or group is not None:
                raise FencedError(
                    f"attach: attempt {newest} has taken the run over from attempt "
                    f"{attempt}; stop this process"
                )
            for token in list(self._starts):
                busy = f"open {self._run.path}: attempt {attempt} is live and has reattached"
                refused = self._starts.pop(token)
                refused.restore_addresses(self._network)
                refused.end(RunBusyError(f"{busy}; stop it first"))
            leader = request.leader or self._run.config.host
            group = TrainerGroup(request.group, attempt, request.count, leader)
            group.origin = request.origin
            self._trainers.group = group
            self._run.events.attempt = attempt.number
            self._trainers.show_attempt(attempt.number)
            self._driver.restart(
                self._found(None, group, request.rank),
                domain=request.domain or self._run.config.host,
                settings=request.settings(),
            )

    def _found(
        self, record: GroupRecord | None, group: TrainerGroup | None, rank: int | None = None
    ) -> inputs.Found:
        ram = self._ram.checkpoints()
        return found_again(self._trainers.control, ram, record, group, rank=rank)

    def _check_origin(self, group: TrainerGroup, origin: CheckpointId | None) -> None:
        if group.origin != origin:
            raise FencedError(
                f"branch: attempt {group.attempt} has begun from another checkpoint than the one "
                "this process restored; stop it"
            )

    async def _check_there(self, origin: CheckpointId) -> None:
        # A branch abandons everything beyond its origin, so a readable origin has to exist first.
        stores = [self._ram.store, *self._network.stores(), self._run.durable]
        if self._run.remote is not None:
            stores.append(self._run.remote.store)
        listings, _ = await self._storage_worker.threads.query(list_stores, stores)
        if origin not in readable(listings):
            raise StepNotFoundError(
                f"go back to {origin}: it was removed while it was restored; restore another step"
            )

    def _seat_member(self, group: TrainerGroup, rank: int, pid: int) -> TrainerProcess:
        seated = group.members.get(rank)
        is_there = seated in group.present
        if seated is not None and seated.pid == pid and is_there:
            return seated
        if seated is not None and seated.is_alive and is_there:
            raise InvalidArgumentError(
                f"attach: rank {rank} is process {seated.pid} already; each process of a job needs "
                "a rank of its own (was jax.distributed started in all of them?)"
            )
        started = process_start(pid)
        if started is None:
            raise FencedError(f"attach: process {pid} has ended")
        member = TrainerProcess(rank=rank, seat=self._free_seat(), pid=pid, started=started)
        self._seat = member.seat + 1
        # The cells may still have the values of the seat's previous trainer.
        control_block.reset_seat(self._trainers.control.cells, member.seat)
        group.members[rank] = member
        group.left.discard(rank)
        group.lost.discard(rank)
        self._follow(member)
        return member

    def _free_seat(self) -> int:
        """Return the next seat that no attached trainer has.

        A seat is reused as late as possible: a trainer that was fenced may still write its cells.
        """
        groups_here = [start.group for start in self._starts.values()]
        if self._trainers.group is not None:
            groups_here.append(self._trainers.group)
        taken = {member.seat for group in groups_here for member in group.present}
        for offset in range(control_block.SEAT_COUNT):
            seat = (self._seat + offset) % control_block.SEAT_COUNT
            if seat not in taken:
                return seat
        raise InvalidArgumentError(
            f"attach: expected at most {control_block.SEAT_COUNT} processes on a host, "
            "found one more"
        )

    def _group_of(self, token: str) -> TrainerGroup | None:
        group = self._trainers.group
        if group is not None and group.group == token:
            return group
        start = self._starts.get(token)
        return start.group if start is not None else None

    def _live_processes(self, reason: str) -> str:
        host, group = self._run.config.host, self._trainers.group
        if group is not None and group.present:
            return f"attempt {group.attempt} is live on host {host} ({_processes(group)})"
        others = [start.group for start in self._starts.values() if start.group.present]
        if others:
            return f"other processes begin an attempt on host {host} ({_processes(others[0])})"
        return reason

    def _busy_advice(self, start: PendingStart) -> str:
        """Return what to do about the processes that keep a group from beginning."""
        group = start.group
        larger_job = next((r.larger_job for r in start.requests.values() if r.larger_job), "")
        if larger_job:
            return forgotten_ranks(larger_job, group.count)
        here = [self._trainers.group, *(start.group for start in self._starts.values())]
        if any(other is not None and is_like_one_job(group, other) for other in here):
            return FORGOTTEN_JOB
        return "stop it first, or open with takeover=True to fence it"

    # Ends of trainers.

    def _follow(self, member: TrainerProcess) -> None:
        """Watch for the end of a process; the kernel reports it at once."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(member.pid)
        except ProcessLookupError:
            # It has ended already. Handled later, like any end: the caller has not finished its
            # attach.
            loop.call_soon(self._ended, member)
            return
        loop.add_reader(fd, self._ended, member)
        self._followed[member] = fd

    def _unfollow(self, member: TrainerProcess) -> None:
        fd = self._followed.pop(member, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _release_group(self) -> None:
        """Remove the present group, and stop following its processes."""
        group, self._trainers.group = self._trainers.group, None
        for member in group.present if group is not None else ():
            self._unfollow(member)

    def _ended(self, member: TrainerProcess) -> None:
        self._unfollow(member)
        starting = [start.group for start in self._starts.values()]
        for group in (*starting, self._trainers.group):
            if group is None or group.members.get(member.rank) != member:
                continue
            if member.rank in group.left | group.lost:
                continue
            group.lost.add(member.rank)
            accepted_step = self._trainers.meter.accepted_step(member)
            last_step, blocked_secs = self._trainers.meter.leave(member)
            self._run.events.write(
                TrainerLost(
                    rank=member.rank,
                    pid=member.pid,
                    last_step=last_step,
                    blocked_secs=blocked_secs,
                    accepted_step=accepted_step,
                )
            )
            # The coordination assumes that sealed parts are reported before the end of their rank.
            self._submit_sealed(group)
            self._member_ended(group, member.rank, inputs.RankLost(group.group, member.rank))

    def _submit_sealed(self, group: TrainerGroup) -> None:
        """Submit the parts that ranks have sealed in RAM.

        A rank may have ended between sealing a part and reporting it.
        """
        for checkpoint, listed in self._ram.checkpoints().items():
            is_theirs = bool(group.attempt) and checkpoint.attempt == group.attempt
            for rank in sorted(listed.ranks & group.members.keys()) if is_theirs else ():
                self._driver.submit(
                    inputs.PartSealed(
                        rank=rank,
                        id=checkpoint,
                        part_count=listed.part_count,
                        in_ram=True,
                        is_due=False,
                    )
                )

    def _member_ended(
        self, group: TrainerGroup, rank: int, item: inputs.RankLeft | inputs.RankLost
    ) -> None:
        self._notify_ended(group, rank)
        start = self._starts.get(group.group)
        if start is not None and start.group is group and not group.present:
            del self._starts[group.group]
            self._restore(start)
            start.end(FencedError("attach: the processes that wanted to begin have ended"))
        if group is self._trainers.group:
            self._trainers.filling.pop(rank, None)
            self._ram.slots.release(rank)
            self._ram.replicas.forget_maker(rank)
            if not group.present:
                # The loss of a member is recorded in the events; no trainer is left that could
                # continue.
                self._trainers.group = None
                self._ram.slots.forget_sizes()
        self._driver.submit(item)

    def _notify_ended(self, group: TrainerGroup, rank: int) -> None:
        """Notify the trainers of a rank's end, since they may wait for it."""
        how = "has closed its manager" if rank in group.left else "has ended"
        pid, host = group.members[rank].pid, self._run.config.host
        reason = (
            f"rank {rank} (process {pid} on host {host}) {how}; "
            "stop this process and start the job again"
        )
        self._trainers.notices.post(Notice(kind="gone", reason=reason, data=group.group))


def _processes(group: TrainerGroup) -> str:
    return ", ".join(f"rank {m.rank} is process {m.pid}" for m in group.present)
