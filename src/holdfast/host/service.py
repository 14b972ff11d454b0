"""Combine the parts of one agent, run its loop, and decide when it exits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

import msgspec

from holdfast.coordination import effects, inputs
from holdfast.coordination.messages import COMPLETE_STATUSES, CheckpointStatus, TargetKind
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.settings import Settings
from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    RunBusyError,
    StorageError,
    WaitTimeoutError,
)
from holdfast.format.names import NO_AGE, CheckpointId, age_of
from holdfast.format.records import Manifest
from holdfast.host import control_block, protocol
from holdfast.host.agent_directory import GROUP
from holdfast.host.coordinator import Coordinator
from holdfast.host.directory_watch import LEAVE_SECS, DirectoryWatch
from holdfast.host.expected_trainers import ExpectedTrainers
from holdfast.host.handover import found_again, group_of, record_by_storage
from holdfast.host.initial_inventory import listing_message
from holdfast.host.metrics_server import MetricsServer
from holdfast.host.metrics_source import MetricsSource
from holdfast.host.mirroring import Mirroring
from holdfast.host.outages import OutageReports
from holdfast.host.retention import Retention
from holdfast.host.save_scheduler import SaveScheduler
from holdfast.host.save_tracker import SaveTracker
from holdfast.host.state import AgentState
from holdfast.host.step_meter import SavePhase
from holdfast.host.storage_worker import StorageWorker
from holdfast.host.trainer_group import read_record
from holdfast.host.trainer_sessions import TrainerSessions
from holdfast.observe.events.schema import (
    CheckpointDropped,
    CheckpointFailed,
    CheckpointProtected,
    CheckpointSealed,
    RamAdopted,
    SaveRequested,
)
from holdfast.observe.metrics.measures import RecentSteps
from holdfast.observe.metrics.metric_families import AgentMetrics
from holdfast.observe.run_status import HostStatus, JobStatus, ask_hosts, installed_version, job_of
from holdfast.peers.address import parse_address, parsed_addresses
from holdfast.peers.directory import PeerDirectory
from holdfast.quantities import secs_text

ASK_SECS = 0.02
IDLE_TICK_SECS = 0.5
FIRST_TRAINER_SECS = 30.0
LEFT_LOOKS_MAX, LEFT_LOOK_SECS = 20, 0.005
"""How long the answer to the last trainer that leaves may wait until this agent's end is known."""
PLACE_SECS = 1.0
RECORDED_MAX = 10_000
TARGET_SECS = 30.0
UNSETTLED_SECS = 3600.0
REFUSED_SECS = 1.0
"""How long an agent without data stays after it has refused its first start."""
CLOSED_SECS = 5.0
"""How long an agent stays once nobody needs it: for the next manager of the same process, and for
hosts that have not received the leader's last orders."""
SURPLUS_SECS = 5.0
"""How often slots that were free the whole time are freed where the next saves need none of them.

Freed slots have to be allocated anew, so none is freed between two saves of a busy run.
"""
STOPPING_SECS = 20.0
"""How long an agent that has to exit waits for a leader on another host, which may be gone."""

log = logging.getLogger(__name__)


class Service:
    """The handlers of the server's routes, and the loop that acts on its own."""

    def __init__(self, state: AgentState, peers: PeerDirectory | None = None) -> None:
        self._state = state
        self._peers = peers or PeerDirectory(state.config.run_id, state.clock)
        self._storage_worker = StorageWorker(state, self._peers, self._committed)
        self._coordinator = Coordinator(state, self._storage_worker, self._peers, self._on_effect)
        self._save_scheduler = SaveScheduler(state, self._coordinator)
        self._retention = Retention(state, self._storage_worker, self._coordinator)
        self._mirroring = Mirroring(
            state, self._storage_worker, self._coordinator, self._retention.preserve_again
        )
        self._outages = OutageReports(state)
        self._trainer_sessions = TrainerSessions(state, self._coordinator, self._storage_worker)
        self._save_tracker = SaveTracker(
            state, self._coordinator, self._storage_worker, self._retention
        )
        self._metrics = MetricsSource(state, self._coordinator, self._job)
        self._metrics_server = MetricsServer(state, self._metrics.gather)
        self._wake = asyncio.Event()
        self._directory = DirectoryWatch(state, self._storage_worker, self._unsaved)
        self._recorded: dict[tuple[CheckpointId, CheckpointStatus], None] = {}
        """The newest statuses that are in the events."""
        self._is_stopping = False
        self._stopping_at = 0.0
        self._alone_since = state.clock.monotonic()
        self._has_served = False
        self._refused_at: float | None = None
        """When a start was refused last."""
        self._has_ended = False
        self._expected = ExpectedTrainers(state.clock)
        self._next_check_secs = 0.0
        state.wake = self._wake.set

    @property
    def coordinator(self) -> Coordinator:
        """The agent's share in the hosts' coordination."""
        return self._coordinator

    async def adopt(self) -> None:
        """Take over the previous agent's state; call it before any request is served."""
        state = self._state
        record = read_record(state.folder / GROUP)
        group = group_of(record) if record is not None else None
        has_peers = state.config.peers is not None
        if group is None:
            # Only without trainers: RAM may otherwise hold parts that are being filled.
            foreign = await self._storage_worker.drop_foreign()
            if record is not None and record.attempt in foreign:
                record = None
            self._retention.clear_ram(is_alone=not has_peers)
            if not has_peers:
                await self._retention.recover()
        if group is not None or has_peers:
            await self._retention.find_attempt()
        if record is None and not has_peers:
            counts = [listed.part_count for listed in self._storage_worker.in_ram().values()]
            worker = self._storage_worker
            record = record_by_storage(state, worker, counts[-1]) if counts else None
        if record is not None:
            self._coordinator.update_addresses(parsed_addresses(record.addresses))
        self._trainer_sessions.adopt(group)
        found = found_again(state, self._storage_worker, record, group)
        if found.ram:
            state.events.write(RamAdopted(checkpoints=tuple(map(str, sorted(found.ram)))))
        domain, settings = self._coordinator.domain, self._coordinator.settings
        if record is not None:
            domain = record.domain or domain
            settings = Settings(copies=record.copies, heartbeat_secs=record.heartbeat_secs)
        self._coordinator.restart(found, domain=domain, settings=settings)

    async def run(self) -> None:
        """Act until it is time to exit."""
        others = [
            asyncio.create_task(self._directory.watch()),
            asyncio.create_task(self._free_surplus_ram()),
            asyncio.create_task(self._mirroring.run()),
            asyncio.create_task(self._mirroring.watch_takeovers()),
        ]
        try:
            await self._run()
        finally:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
            await self._metrics_server.close()
            await self._metrics.close()

    async def _free_surplus_ram(self) -> None:
        """Free every `SURPLUS_SECS` the slots that were needed only while storage was behind."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SURPLUS_SECS)
            try:
                await loop.run_in_executor(None, self._state.slots.free_surplus)
                await loop.run_in_executor(None, self._state.ram.release_idle)
            except StorageError as error:
                self._storage_worker.report_ram(error)

    async def _run(self) -> None:
        while True:
            self._tick()
            # Only a decision on the present state may end the loop.
            if self._leaves_in_secs() == 0.0:
                self._has_ended = True
                self._coordinator.submit(inputs.LeaveWanted())
                return
            # The inputs of this tick are handled; only later ones are a reason to wake.
            self._wake.clear()
            has_trainers = self._state.group is not None
            secs = self._save_scheduler.poll_secs if has_trainers else IDLE_TICK_SECS
            secs = max(0.001, min(secs, self._coordinator.next_in_secs()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    await self._wake.wait()

    def close(self) -> None:
        """End all threads, after their present work."""
        self._expected.close()
        self._trainer_sessions.close()
        self._storage_worker.close()
        self._directory.free_rest()
        self._peers.close()

    def leave_soon(self) -> None:
        """Make held checkpoints durable, then exit, even if trainers are attached."""
        log.info("exit requested")
        self._is_stopping = True
        self._stopping_at = self._state.clock.monotonic()
        self._coordinator.want_durable()
        self._wake.set()

    @property
    def is_all_durable(self) -> bool:
        """Whether this host's RAM is not needed any more."""
        if self._directory.is_lost:
            return not self._directory.kept
        return self._coordinator.node.is_settled or self._is_superseded

    def _unsaved(self) -> list[CheckpointId]:
        """Return the checkpoints in RAM to keep if the run's directory is gone, ascending.

        Those are the ones that are newer than the newest committed one, and with trainers attached
        the newest one in any case. Other hosts may have the missing parts of one.
        """
        if self._is_superseded:
            return []
        has_peers = self._state.config.peers is not None
        listed = self._storage_worker.in_ram()
        usable = sorted((c for c, one in listed.items() if one.is_whole or has_peers), key=age_of)
        outcomes = self._coordinator.node.held_outcomes()
        committed = [age_of(outcome.held.id) for outcome in outcomes if outcome.is_committed]
        newest_committed = max(committed, default=NO_AGE)
        unsaved = [checkpoint for checkpoint in usable if age_of(checkpoint) > newest_committed]
        return unsaved or (usable[-1:] if self._state.group is not None else [])

    @property
    def _is_superseded(self) -> bool:
        """Whether another host's attempt has replaced the one here, and no other host reads here.

        With peers, the leader of the newer attempt decides what this host keeps.
        """
        return self._state.config.peers is None and self._coordinator.node.is_superseded

    @property
    def is_busy(self) -> bool:
        """Whether an operation on the stores is under way."""
        parts = self._coordinator, self._retention, self._mirroring
        return any(part.is_busy for part in parts)

    async def wait_idle(self) -> None:
        """Wait for the operations on the stores that are under way."""
        await self._coordinator.wait_idle()
        await self._retention.wait_idle()
        await self._mirroring.wait_idle()

    def _tick(self) -> None:
        if self._state.group is not None:
            self._has_served = True
            self._alone_since = self._state.clock.monotonic()
        self._check_place()
        self._coordinator.tick()
        self._save_scheduler.tick()
        self._meter_steps()

    def _meter_steps(self) -> None:
        state = self._state
        if state.group is not None:
            is_writing = bool(self._coordinator.node.pending_ids())
            phase = SavePhase.WRITING if is_writing else SavePhase.QUIET
            state.step_meter.read_progress(
                state.group.present, SavePhase.SEALING if state.filling else phase
            )

    def _on_effect(self, effect: effects.Effect) -> None:
        """Carry out an effect that concerns the agent's other parts."""
        match effect:
            case effects.AttemptJoined():
                self._save_scheduler.forget_attempt()
                has_started = self._trainer_sessions.joined(effect)
                # After that: the policies of the remote tier are the new attempt's.
                self._mirroring.forget_timeline()
                is_left = not self._retention.has_recovered
                if has_started and is_left and self._coordinator.node.is_first_leader:
                    self._retention.recover_earlier(effect.attempt)
            case effects.GroupRefused():
                self._trainer_sessions.on_refused(effect)
            case effects.GivenUp():
                self._trainer_sessions.given_up(effect)
            case effects.RanksEnded():
                self._trainer_sessions.ended_elsewhere(effect)
            case effects.Fenced():
                self._trainer_sessions.fenced(effect)
            case effects.ReportOutcome():
                self._retention.on_outcome(effect)
            case effects.DeleteConfirmed():
                self._retention.on_gone(effect.id)
            case effects.Reached():
                self._reached(effect)
            case effects.MirrorEnded():
                self._mirroring.on_ended(effect)
            case _:
                self._outages.on_effect(effect)

    def _reached(self, effect: effects.Reached) -> None:
        self._save_scheduler.reached(effect)
        known = effect.id, effect.status
        if known in self._recorded:
            # A leader reports what it leads anew with each attempt, also of earlier ones.
            return
        self._recorded[known] = None
        while len(self._recorded) > RECORDED_MAX:
            del self._recorded[next(iter(self._recorded))]
        events, step, attempt = self._state.events, effect.id.step, effect.id.attempt.number
        match effect.status:
            case CheckpointStatus.COMPLETE:
                tier = self._coordinator.node.tier_of(effect.id)
                events.write(CheckpointSealed(step=step, attempt=attempt, tier=tier))
            case CheckpointStatus.PROTECTED if self._coordinator.node.has_copies:
                events.write(CheckpointProtected(step=step, attempt=attempt))
            case CheckpointStatus.FAILED:
                events.write(CheckpointFailed(step=step, attempt=attempt, reason=effect.reason))
            case CheckpointStatus.DROPPED:
                events.write(CheckpointDropped(step=step, attempt=attempt, reason=effect.reason))

    def _committed(self, manifest: Manifest, secs: float) -> None:
        # First: preservation spares what is chosen for the remote tier.
        self._mirroring.on_committed(manifest)
        self._retention.committed(manifest, secs)

    def _check_place(self) -> None:
        """Exit once the folder is removed: trainers cannot find this agent, and start another."""
        now = self._state.clock.monotonic()
        if self._is_stopping or now < self._next_check_secs:
            return
        self._next_check_secs = now + PLACE_SECS
        if not self._state.has_place():
            log.warning("%s was removed; a trainer will start another agent", self._state.folder)
            self.leave_soon()

    def _leaves_in_secs(self) -> float | None:
        if self._directory.is_lost:
            return self._directory.leaves_in_secs()
        if self._state.group is not None and not self._is_stopping:
            return None
        node = self._coordinator.node
        if self._coordinator.is_busy or self._retention.is_busy or node.pending_ids():
            # What is copied to the remote tier does not count: its service may not answer.
            return None
        if self._trainer_sessions.is_starting:
            return None
        if self._is_stopping:
            # Data that only this host holds has to become durable first; another host may lead and
            # decide when.
            waited_secs = self._state.clock.monotonic() - self._stopping_at
            is_awaited = not node.is_leading and not node.is_settled
            return None if is_awaited and waited_secs < STOPPING_SECS else 0.0
        if self._expected.has_any() or (self._has_served and self._mirroring.holds_agent()):
            return None
        alone_secs = self._state.clock.monotonic() - self._alone_since
        if self._is_superseded or (node.is_closed and node.is_settled):
            # Lingering holds RAM for the restart after a failure, and there was none.
            return max(0.0, min(self._state.linger_secs, CLOSED_SECS) - alone_secs)
        if not node.is_leading and not node.is_settled and alone_secs < UNSETTLED_SECS:
            # Another host leads, and may need this host's checkpoints.
            return None
        # The trainer that started this agent needs time to attach.
        if self._refused_at is not None and not self._has_served:
            # It was started for a start that was refused. If it holds nothing, the next start is
            # better off with an agent of its own, which has that one's environment.
            refused_secs = self._state.clock.monotonic() - self._refused_at
            if not self._storage_worker.in_ram():
                return max(0.0, REFUSED_SECS - refused_secs)
        least_secs = 0.0 if self._has_served else FIRST_TRAINER_SECS
        return max(0.0, max(self._state.linger_secs, least_secs) - alone_secs)

    # Handlers of the routes; the second argument is the caller's process id.

    async def attach(self, request: protocol.Attach, pid: int) -> protocol.Attached:
        if request.directory:
            await self._check_directory(request)
        if self._has_ended:
            # Race: a trainer that is admitted now loses its agent at once. The server's end ends
            # this call; the caller then finds no agent, and starts the next one.
            await asyncio.sleep(LEAVE_SECS)
            raise AgentUnavailableError(f"open {request.run}: its agent leaves; open it again")
        try:
            attached = await self._trainer_sessions.attach(request, pid)
        except HoldfastError:
            self._refused_at = self._state.clock.monotonic()
            raise
        self._expected.remove_process(pid)
        self._wake.set()
        if request.metrics is not None:
            problem = await self._metrics_server.open(request.metrics)
            if problem is not None:
                warnings = (*attached.warnings, problem)
                attached = msgspec.structs.replace(attached, warnings=warnings)
        return attached

    async def _check_directory(self, request: protocol.Attach) -> None:
        """Check that a trainer has the agent's directory open; wait if the agent leaves soon.

        Raises:
            StorageError: as `DirectoryWatch.check_identity`.
            RunBusyError: it is another place of the run, which is live here.
            AgentUnavailableError: it is another place, and the agent stays.
        """
        try:
            await self._directory.check_identity(request.run, request.directory)
        except AgentUnavailableError as error:
            secs = self._leaves_in_secs()
            if secs is not None and secs <= CLOSED_SECS:
                # The caller finds no agent once this one has left, and starts one for its own.
                await asyncio.sleep(LEAVE_SECS)
            if self._state.group is not None:
                config, pids = self._state.config, [m.pid for m in self._state.group.present]
                raise RunBusyError(
                    f"open {request.run}: the run is live on this host ({config.host}), at "
                    f"{self._state.run} (process {', '.join(map(str, pids)) or 'unknown'}); stop "
                    "that training first. takeover=True fences a training at the same place, or "
                    "on another host"
                ) from error
            leaves = "once its checkpoints are in all tiers"
            if secs is not None:
                leaves = f"in {secs_text(secs)}"
            raise AgentUnavailableError(
                f"{error}. It has no trainer, and leaves by itself {leaves}"
            ) from error

    async def branch(self, request: protocol.Branch, pid: int) -> protocol.Attached:
        return await self._trainer_sessions.begin_branch(request)

    async def listing(self, request: protocol.WantListing, pid: int) -> protocol.DurableListing:
        found = await self._storage_worker.newest_for(request.attempt)
        return listing_message(found) if found is not None else protocol.DurableListing()

    async def want_slot(self, request: protocol.WantSlot, pid: int) -> protocol.Slot:
        return await self._save_tracker.want_slot(request)

    async def filling(self, request: protocol.FillStarted, pid: int) -> protocol.Empty:
        self._save_tracker.filling(request)
        return protocol.Empty()

    async def copied(self, request: protocol.Copied, pid: int) -> protocol.Empty:
        self._save_tracker.copied(request)
        return protocol.Empty()

    async def want_spare(self, request: protocol.WantSpare, pid: int) -> protocol.Slot:
        return await self._save_tracker.want_spare(request)

    async def sealed(self, request: protocol.Sealed, pid: int) -> protocol.Empty:
        await self._save_tracker.sealed(request)
        return protocol.Empty()

    async def abandoned(self, request: protocol.Abandoned, pid: int) -> protocol.Empty:
        await self._save_tracker.abandoned(request)
        return protocol.Empty()

    async def watch(self, request: protocol.Watch, pid: int) -> protocol.Notices:
        notices = await self._state.notices.after(request.cursor)
        # No notice of these will follow: a reported part is held, or its end was notified before.
        holds = self._coordinator.node.holds
        unknown = tuple(found for found in request.pending if not holds(found))
        return msgspec.structs.replace(notices, unknown=unknown)

    async def judged(self, request: protocol.Judged, pid: int) -> protocol.Empty:
        keep = request.keep
        await self._retention.judged(request.newest, keep)
        return protocol.Empty()

    async def request_save(self, request: protocol.RequestSave, pid: int) -> protocol.Requested:
        if self._state.group is None:
            raise InvalidArgumentError(
                f"save {self._state.run}: no trainer works on it now; there is nothing to save"
            )
        kind = TargetKind.DURABLE if request.durable else TargetKind.RAM
        published = self._state.published().highest
        self._coordinator.submit(inputs.Wish(kind))
        deadline = self._state.clock.monotonic() + TARGET_SECS
        # A durable checkpoint is in RAM first, so that it serves both wishes.
        while (target := self._coordinator.last_target({kind, TargetKind.DURABLE})) <= published:
            if self._state.clock.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"save {self._state.run}: the hosts of the run did not agree on a step "
                    f"within {TARGET_SECS:.0f} s; they save once they agree"
                )
            await asyncio.sleep(ASK_SECS)
        self._state.events.write(SaveRequested(target_step=target, reason=request.reason))
        return protocol.Requested(target=target)

    async def delete(self, request: protocol.Delete, pid: int) -> protocol.Empty:
        group = self._state.group
        is_trainer = group is not None and pid in {member.pid for member in group.present}
        if not is_trainer and not request.by_user:
            raise FencedError(
                f"delete: process {pid} does not belong to the run's present attempt "
                f"({self._coordinator.node.attempt}); stop it"
            )
        for found in request.ids:
            await self._retention.delete_everywhere(found)
            await self._mirroring.remove_remote(found)
        return protocol.Empty()

    async def upload(self, request: protocol.Empty, pid: int) -> protocol.Empty:
        self._mirroring.want_newest()
        return protocol.Empty()

    async def peers(self, request: protocol.Empty, pid: int) -> protocol.PeerAddresses:
        known = self._peers.addresses()
        return protocol.PeerAddresses(addresses={host: str(known[host]) for host in sorted(known)})

    async def report(self, request: protocol.EventReport, pid: int) -> protocol.Empty:
        self._state.events.write(request.event)
        return protocol.Empty()

    async def detach(self, request: protocol.Detach, pid: int) -> protocol.Detached:
        self._trainer_sessions.detach(request)
        node = self._coordinator.node
        for _ in range(LEFT_LOOKS_MAX):
            is_unknown = self._leaves_in_secs() is None and self._state.group is None
            if not is_unknown or node.pending_ids():
                break
            # The end of the attempt is being recorded.
            await asyncio.sleep(LEFT_LOOK_SECS)
        return protocol.Detached(
            is_last=self._state.group is None,
            pid=os.getpid(),
            ram_bytes=self._state.pool.size_bytes(),
            is_writing=bool(node.pending_ids()),
            leaves_in_secs=self._leaves_in_secs(),
            copies_to=self._mirroring.awaited_place,
        )

    async def stop(self, request: protocol.Stop, pid: int) -> protocol.Empty:
        group = self._state.group
        if group is not None and group.present:
            pids = ", ".join(str(member.pid) for member in group.present)
            raise RunBusyError(
                f"stop the agent of {self._state.run}: its trainers run (processes {pids}) "
                "and would start it again; stop them first"
            )
        self.leave_soon()
        return protocol.Empty()

    async def expect(self, request: protocol.Empty, pid: int) -> protocol.AgentStatus:
        """Stay until the process attaches, which first meets the job's other hosts.

        Returns:
            The status; `leaves_in_secs` is 0.0 if the agent does not stay.
        """
        if not self._has_ended:
            self._expected.add_process(pid)
        status = await self.status(request, pid)
        return msgspec.structs.replace(status, leaves_in_secs=0.0) if self._has_ended else status

    async def status(self, request: protocol.Empty, pid: int) -> protocol.AgentStatus:
        state = self._state
        group = state.group
        members = group.present if group else []
        return protocol.AgentStatus(
            run=state.run,
            run_id=state.config.run_id,
            host=state.config.host,
            pid=os.getpid(),
            attempt=group.attempt.number if group else state.events.attempt,
            folder=state.config.folder,
            ram_bytes=state.pool.size_bytes(),
            trainers=tuple(
                protocol.TrainerStatus(rank=m.rank, pid=m.pid, step=self._step_of(m.seat))
                for m in members
            ),
            held=self._held(),
            pending=len(self._coordinator.node.pending_ids()),
            leaves_in_secs=self._leaves_in_secs(),
            peer_address=state.peer_address,
            pulled_bytes=state.pulled_bytes,
            waits_for=self._coordinator.node.waits_for(state.clock.monotonic()),
            metrics_url=state.metrics_url,
            remote=self._mirroring.upload_status(),
        )

    def own_status(self) -> HostStatus:
        """Return this agent's report of itself and its host."""
        state, node = self._state, self._coordinator.node
        members = state.group.present if state.group is not None else []
        return HostStatus(
            host=state.config.host,
            domain=self._coordinator.domain,
            version=installed_version(),
            pid=os.getpid(),
            attempt=node.attempt,
            leader=node.leader_host,
            ranks=tuple(sorted(member.rank for member in members)),
            ram_bytes=state.pool.size_bytes(),
            ram_free_bytes=state.pool.left_bytes() if state.has_ram else 0,
            held=node.held(),
            lead=node.survey(state.clock.monotonic()),
        )

    async def quiet(self, request: protocol.Empty, pid: int) -> protocol.QuietHosts:
        node = self._coordinator.node
        return protocol.QuietHosts(
            hosts=node.quiet_hosts(self._state.clock.monotonic()),
            is_writing=node.is_writing_whole,
        )

    async def metrics(self, request: protocol.Empty, pid: int) -> AgentMetrics:
        return self._metrics.gather()

    async def steps(self, request: protocol.Empty, pid: int) -> RecentSteps:
        return self._state.measures.recent_steps()

    async def job(self, request: protocol.Empty, pid: int) -> JobStatus:
        return await self._job()

    async def _job(self) -> JobStatus:
        own = self._state.config.host
        answers = await ask_hosts(self._peers, own)
        addresses = {host: address.authority for host, address in self._peers.addresses().items()}
        if self._state.peer_address is not None:
            addresses[own] = parse_address(self._state.peer_address).authority
        return job_of(self.own_status(), answers, addresses, self._peers.silent_secs())

    def _held(self) -> tuple[protocol.HeldStatus, ...]:
        found = []
        for known in self._coordinator.node.held_outcomes():
            held = known.held
            in_ram = {*ranks_in(held.own), *ranks_in(held.replicas)}
            found.append(
                protocol.HeldStatus(
                    step=held.id.step,
                    attempt=held.id.attempt.number,
                    attempt_token=held.id.attempt.token,
                    parts_in_ram=len(in_ram),
                    part_count=held.part_count,
                    complete=len(in_ram) == held.part_count or known.status in COMPLETE_STATUSES,
                    committed=known.is_committed,
                    durable_due=held.is_due,
                    failed=known.failure or None,
                )
            )
        return tuple(found)

    def _step_of(self, seat: int) -> int | None:
        step = self._state.control.cells[control_block.step_cell(seat)]
        return None if step == control_block.NO_STEP else step
