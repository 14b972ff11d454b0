"""Trainers come and go: attempts begin, branch, and end with their last process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.agent import group as groups
from holdfast.agent import protocol, words
from holdfast.agent.deciding import Decider
from holdfast.agent.group import Group, Member
from holdfast.agent.location import GROUP
from holdfast.agent.protocol import Notice
from holdfast.agent.state import AgentState, Policies
from holdfast.engine.attempts import AttemptStart, begin_attempt, newest_attempt, read_attempts
from holdfast.engine.sources import readable
from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    InvalidArgumentError,
    StepNotFoundError,
)
from holdfast.format.names import CheckpointId
from holdfast.format.timeline import on_timeline
from holdfast.policy import preservation_policy, save_decision_policy

T = TypeVar("T")


class Joining:
    """Who is attached. Blocking work on the store runs on a thread of its own."""

    def __init__(self, state: AgentState, decider: Decider) -> None:
        self._state = state
        self._decider = decider
        self._lock = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, "holdfast-join")
        self._seat = 0
        self._followed: dict[Member, int] = {}
        self._branch: protocol.Branch | None = None
        self._untold: list[Notice] = []

    def adopt(self) -> None:
        """Takes over the group that an agent before this one left, if its processes live."""
        path = self._state.folder / GROUP
        found = groups.read_group(path)
        if found is None:
            return
        self._seat = max((m.seat for m in found.members.values()), default=-1) + 1
        if not found.living:
            groups.write_group(path, None)
            return
        self._state.group = found
        self._state.events.attempt = found.attempt
        for member in found.members.values():
            if member.is_alive:
                self._follow(member)
            else:
                self._tell_gone(found, member, "has ended")

    async def attach(self, request: protocol.Attach, pid: int) -> protocol.Attached:
        """Seats a trainer; the first of a group begins an attempt.

        Raises:
            RunBusyError, FencedError, InvalidArgumentError, StorageError.
        """
        if request.protocol != protocol.PROTOCOL_VERSION:
            raise AgentUnavailableError(
                f"attach to the agent of {self._state.config.run}: it speaks protocol "
                f"{protocol.PROTOCOL_VERSION}, this process {request.protocol}; stop the agent "
                "(`holdfast stop`) so that one of this version is started"
            )
        async with self._lock:
            group = self._state.group
            if group is None or group.group != request.group:
                group = await self._new_group(request, pid)
            if not 0 <= request.rank < request.count == group.count:
                raise InvalidArgumentError(
                    f"attach: rank {request.rank} of {request.count}, expected one of {group.count}"
                )
            member = self._seat_member(group, request.rank, pid)
            self._take_policies(request)
            origin = await self._blocking(self._origin_of, group.attempt)
            ram = self._state.ram.root if request.ram is not None else None
            return protocol.Attached(
                attempt=group.attempt,
                origin=(origin.step, origin.attempt) if origin else None,
                seat=member.seat,
                ram_folder=str(ram) if ram else None,
            )

    async def branch(self, request: protocol.Branch) -> protocol.Attached:
        """Begins a new attempt for the same processes, from another checkpoint.

        Every rank asks for it; the first one's asking begins it, and the others get the same.

        Raises:
            FencedError: another group has taken the run over.
            StepNotFoundError: the origin was removed meanwhile; the timeline stays as it is.
        """
        async with self._lock:
            group = self._state.group
            if group is None or group.group != request.group:
                raise FencedError(
                    "branch: another attempt has taken the run over; stop this process"
                )
            if request.rank not in group.members:
                raise InvalidArgumentError(f"branch: rank {request.rank} is not attached")
            known = self._branch
            is_again = (
                known is not None
                and (known.attempt, known.origin) == (request.attempt, request.origin)
                and request.attempt < group.attempt
            )
            if not is_again:
                origin = CheckpointId(*request.origin) if request.origin else None
                group.attempt = await self._blocking(self._begin_at, origin)
                self._branch = request
                # Targets that lie beyond the origin would hold the new branch up.
                self._decider.reset()
                self._enter(group)
            return protocol.Attached(
                attempt=group.attempt,
                origin=request.origin,
                seat=group.members[request.rank].seat,
                ram_folder=None,
            )

    def detach(self, request: protocol.Detach) -> None:
        """A trainer leaves in good order; its process may live on."""
        group = self._state.group
        if group is not None and group.group == request.group and request.rank in group.members:
            group.left.add(request.rank)
            self._unfollow(group.members[request.rank])
            self._gone(group, group.members[request.rank])

    async def tick(self) -> None:
        """Tells the other trainers of those that are gone: they may wait for them."""
        untold, self._untold = self._untold, []
        for notice in untold:
            await self._state.notices.post(notice)

    def close(self) -> None:
        """Ends the thread, and follows nobody any more."""
        self._pool.shutdown()
        self._unfollow_all()

    async def _blocking(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def _new_group(self, request: protocol.Attach, pid: int) -> Group:
        state = self._state
        if request.attempt is not None:
            # It had a place with an agent that is gone; nobody else may have taken it since.
            newest = await self._blocking(newest_attempt, state.durable)
            if newest != request.attempt or state.group is not None:
                raise FencedError(
                    f"attach: attempt {newest} has taken the run over from attempt "
                    f"{request.attempt}; stop this process"
                )
            attempt = request.attempt
        else:
            if state.group is not None and not request.takeover:
                state.group.check_free_for(request.group, state.config.host, state.config.run)
            origin = await self._blocking(self._newest_checkpoint)
            attempt = await self._blocking(self._begin, origin, pid)
        # Nobody asks any more how the processes of the group before this one end.
        self._unfollow_all()
        group = Group(request.group, attempt, request.count)
        state.filling.clear()
        state.handed_out.clear()
        self._branch = None
        self._decider.reset()
        self._enter(group)
        state.events.write("attempt_started", pid=pid, processes=request.count)
        return group

    def _enter(self, group: Group) -> None:
        self._state.group = group
        self._state.events.attempt = group.attempt
        self._state.words.values[words.ATTEMPT] = group.attempt
        groups.write_group(self._state.folder / GROUP, group)

    def _newest_checkpoint(self) -> CheckpointId | None:
        listings = self._state.listings()
        timeline = on_timeline(readable(listings), read_attempts(self._state.durable))
        return timeline[-1] if timeline else None

    def _begin_at(self, origin: CheckpointId | None) -> int:
        # What lies beyond the origin is left by this: it must not be all there is.
        if origin is not None and origin not in readable(self._state.listings()):
            raise StepNotFoundError(
                f"go back to {origin}: it was removed while it was restored; restore another step"
            )
        return self._begin(origin, os.getpid())

    def _begin(self, origin: CheckpointId | None, pid: int) -> int:
        config = self._state.config
        start = AttemptStart(
            run_id=config.run_id,
            origin=origin,
            host=config.host,
            pid=pid,
            time=self._state.clock.now(),
        )
        return begin_attempt(self._state.durable, start).attempt

    def _origin_of(self, attempt: int) -> CheckpointId | None:
        found = read_attempts(self._state.durable).get(attempt)
        if found is None:
            raise FencedError(
                f"attach: attempt {attempt} is off the run's timeline by now; stop this process"
            )
        return CheckpointId(*found.origin) if found.origin else None

    def _seat_member(self, group: Group, rank: int, pid: int) -> Member:
        known = group.members.get(rank)
        if known is not None and known.pid == pid and rank not in group.left:
            return known
        if known is not None and known.is_alive and rank not in group.left:
            raise InvalidArgumentError(
                f"attach: rank {rank} is process {known.pid} already; each process of a job needs "
                "a rank of its own (was jax.distributed started in all of them?)"
            )
        started = groups.process_start(pid)
        if started is None:
            raise FencedError(f"attach: process {pid} has ended")
        member = Member(rank=rank, seat=self._seat % words.SEAT_COUNT, pid=pid, started=started)
        self._seat += 1
        self._state.words.values[words.step_word(member.seat)] = words.NO_STEP
        self._state.words.values[words.notice_word(member.seat)] = 0
        self._state.words.values[words.cost_word(member.seat)] = words.NO_COST
        self._state.words.values[words.taken_word(member.seat)] = words.NO_STEP
        group.members[rank] = member
        group.left.discard(rank)
        group.ended.discard(rank)
        groups.write_group(self._state.folder / GROUP, group)
        self._follow(member)
        return member

    def _follow(self, member: Member) -> None:
        """Waits for the process to end; the kernel tells it at once."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(member.pid)
        except ProcessLookupError:
            loop.call_soon(self._ended, member)
            return
        loop.add_reader(fd, self._ended, member)
        self._followed[member] = fd

    def _unfollow(self, member: Member) -> None:
        fd = self._followed.pop(member, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _unfollow_all(self) -> None:
        for member in list(self._followed):
            self._unfollow(member)

    def _ended(self, member: Member) -> None:
        self._unfollow(member)
        group = self._state.group
        if group is None or group.members.get(member.rank) != member or member.rank in group.left:
            return
        group.is_broken = True
        group.ended.add(member.rank)
        self._state.events.write("trainer_lost", rank=member.rank, pid=member.pid)
        self._gone(group, member)

    def _gone(self, group: Group, member: Member) -> None:
        state = self._state
        has_left = member.rank in group.left
        self._tell_gone(group, member, "has closed its manager" if has_left else "has ended")
        state.filling.pop(member.rank, None)
        state.handed_out.pop(member.rank, None)
        remaining = [m for m in group.living if m.rank not in group.left]
        if not remaining:
            # A lost member stays told in its events; nobody is left who could go on.
            state.group = None
            groups.write_group(state.folder / GROUP, None)
            self._decider.reset()
        state.wake()

    def _tell_gone(self, group: Group, member: Member, how: str) -> None:
        reason = (
            f"rank {member.rank} (process {member.pid} on host {self._state.config.host}) {how}; "
            "stop this process and start the job again"
        )
        self._untold.append(Notice(kind="gone", reason=reason, data=group.group))

    def _take_policies(self, request: protocol.Attach) -> None:
        state = self._state
        state.linger_secs = request.linger_secs
        state.has_ram = request.ram is not None
        if request.rank == 0:
            state.durable_policies = _policies(request.durable)
            state.ram_policies = _policies(request.ram) if request.ram else Policies()
            state.pool.limit_bytes = request.ram_limit_bytes


def _policies(tier: protocol.TierPolicies) -> Policies:
    return Policies(
        save=save_decision_policy.decode(tier.save.encode()) if tier.save else None,
        preserve=preservation_policy.decode(tier.preserve.encode()) if tier.preserve else None,
        user_preserves=tier.user_preserves,
    )
