"""Combine the parts of one agent, run its loop, and decide when it exits.

See docs/decisions/0043.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import assert_never

from holdfast.coordination import effects, inputs
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.settings import Settings
from holdfast.format.names import NO_AGE, Age, CheckpointId, age_of
from holdfast.format.records import Manifest
from holdfast.host.driver.agent_run import AgentRun
from holdfast.host.driver.attached_trainers import AttachedTrainers, JobSettings, NoticeBoard
from holdfast.host.driver.driver import Driver, Operation
from holdfast.host.driver.peer_network import PeerNetwork, ServedHost
from holdfast.host.leaving import Leaving
from holdfast.host.metering.meters import Metering
from holdfast.host.metering.step_meter import SavePhase, StepMeter
from holdfast.host.outages import OutageReports
from holdfast.host.tiers.directory_watch import DirectoryWatch
from holdfast.host.tiers.mirror_worker import MirrorWorker
from holdfast.host.tiers.mirroring import Mirroring
from holdfast.host.tiers.ram_tier import open_ram
from holdfast.host.tiers.retention import Retention
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.tiers.takeover_watch import TakeoverWatch
from holdfast.host.trainers.handover import found_again, group_of, record_by_storage
from holdfast.host.trainers.save_scheduler import SaveScheduler
from holdfast.host.trainers.save_tracker import SaveTracker
from holdfast.host.trainers.sessions import TrainerSessions
from holdfast.host.wire.agent_directory import GROUP, WORDS
from holdfast.host.wire.control_block import create_cells, next_incarnation
from holdfast.host.wire.group_record import read_record
from holdfast.host.wire.protocol import Notice
from holdfast.observe.events.schema import RamAdopted
from holdfast.observe.run_status import HostStatus
from holdfast.peers.address import parsed_addresses
from holdfast.store.ram import RamStore

LINGER_TICK_SECS = 5.0
"""The time from a tick to the next without trainers, unless something happens before."""
PLACE_SECS = 2.0
SURPLUS_SECS = 5.0
"""How often slots that were free the whole time are freed where the next saves need none of them.

Freed slots have to be allocated anew, so none is freed between two saves of a busy run.
"""
DECISION_PAUSES_SECS = (0.0, *(0.002 * 2**doublings for doublings in range(11)))
"""The pauses, 4 s in all, after which to look whether ranks that have come to a target save it."""

Report = (
    effects.AttemptJoined
    | effects.GroupRefused
    | effects.GivenUp
    | effects.RamGivenUp
    | effects.RanksEnded
    | effects.Fenced
    | effects.ReportOutcome
    | effects.DeleteConfirmed
    | effects.Reached
    | effects.MirrorEnded
    | effects.ReportMirrored
    | effects.HostSilent
    | effects.HostHeard
    | effects.LeaderChanged
    | effects.ProtectionLate
)
"""The effects that concern trainers, policies and events; the others concern stores and hosts."""

log = logging.getLogger(__name__)


class Agent:
    """One agent; owned by its event loop.

    Args:
        run: The agent's run, whose events `metering` receives.
        metering: The agent's measures.
        notices: Takes the notices to the trainers.
        has_place: Returns whether the agent's folder is still its own, and trainers find it there.

    Raises:
        OSError: The agent's folder has no room for its files.
    """

    def __init__(
        self,
        run: AgentRun,
        metering: Metering,
        notices: NoticeBoard | None = None,
        has_place: Callable[[], bool] = lambda: True,
    ) -> None:
        self.run, self.metering = run, metering
        self._has_place = has_place
        self.ram = ram = open_ram(run)
        control = create_cells(run.folder / WORDS)
        meter = StepMeter(
            control,
            run.events,
            run.clock,
            metering.measures,
            lambda: (run.durable.request_count, ram.pulled_bytes),
        )
        job = JobSettings(linger_secs=run.config.linger_secs)
        self.trainers = trainers = AttachedTrainers(control, notices or NoticeBoard(), meter, job)
        self.network = PeerNetwork(run)
        self.storage_worker = worker = StorageWorker(
            run, ram, trainers, self.network.peers, self._committed
        )
        self._mirror_worker = MirrorWorker(run, ram, trainers, lambda item: driver.submit(item))
        self.driver = driver = Driver(
            run, trainers, self.network, self.carry_out, self._mirror_worker.cancel
        )
        self._scheduler = SaveScheduler(run, trainers, driver, metering)
        self.retention = Retention(run, ram, trainers, driver, worker)
        self.mirroring = Mirroring(run, trainers, driver, self._mirror_worker, self.retention.spare)
        self.takeovers = TakeoverWatch(run, driver, worker)
        self._outages = OutageReports(run.events, trainers.notices)
        self.sessions = TrainerSessions(run, ram, trainers, self.network, driver, worker)
        self.save_tracker = SaveTracker(run, ram, trainers, driver, worker)
        self.directory = DirectoryWatch(run, ram, trainers, worker, self._unsaved, driver.woken.set)
        self.leaving = Leaving(
            run, ram, trainers, driver, self._is_needed, self.mirroring.holds_agent
        )
        self._next_check_secs = 0.0

    async def adopt(self) -> None:
        """Take over the previous agent's state; call it before any request is served."""
        run, worker = self.run, self.storage_worker
        record = read_record(run.folder / GROUP)
        group = group_of(record) if record is not None else None
        has_peers = run.config.peers is not None
        if group is None:
            # Only without trainers: RAM may otherwise hold parts that are being filled.
            foreign = await worker.drop_foreign()
            if record is not None and record.attempt in foreign:
                record = None
            self.retention.clear_ram(is_alone=not has_peers)
            if not has_peers:
                await self.retention.recover()
        if group is not None or has_peers:
            await self.retention.find_attempt()
        if record is None and not has_peers:
            counts = [listed.part_count for listed in self.ram.checkpoints().values()]
            record = record_by_storage(run, worker, counts[-1]) if counts else None
        if record is not None:
            self.network.update_addresses(parsed_addresses(record.addresses))
        self.sessions.adopt(group)
        inventory = found_again(self.trainers.control, self.ram.checkpoints(), record, group)
        if inventory.ram:
            run.events.write(RamAdopted(checkpoints=tuple(map(str, sorted(inventory.ram)))))
        domain, settings = self.driver.domain, self.driver.settings
        if record is not None:
            domain = record.domain or domain
            settings = Settings(copies=record.copies, heartbeat_secs=record.heartbeat_secs)
        self.driver.restart(inventory, domain=domain, settings=settings)

    def serve_peers(self, own_status: Callable[[], HostStatus]) -> None:
        """Serve the other hosts from now on, and take their messages."""
        run, driver = self.run, self.driver
        if run.config.peers is None:
            return
        self.network.open(
            ServedHost(
                # A separate store, because the server's thread uses it.
                store=RamStore(self.ram.store.root, self.ram.pool.reserve, run.clock, run.files),
                since=next_incarnation(self.trainers.control.cells, run.clock.now()),
                submit=driver.submit,
                attempt=lambda: driver.attempt,
                status=own_status,
            )
        )

    async def act(self) -> None:
        """Act until it is time to exit."""
        others = [
            asyncio.create_task(self.directory.watch()),
            asyncio.create_task(self._free_surplus_ram()),
            asyncio.create_task(self.mirroring.run()),
            asyncio.create_task(self.takeovers.run()),
        ]
        try:
            await self.act_until_exit()
        finally:
            for task in others:
                task.cancel()
            await asyncio.wait(others)

    async def _free_surplus_ram(self) -> None:
        """Free every `SURPLUS_SECS` the slots that were needed only while storage was behind."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SURPLUS_SECS)
            await loop.run_in_executor(None, self.ram.free_surplus)

    async def act_until_exit(self) -> None:
        """Tick, and sleep until the next input or the time of the next tick."""
        woken = self.driver.woken
        while True:
            self.tick()
            # Only a decision on the present state may end the loop.
            leaves_in_secs = self.leaves_in_secs()
            if leaves_in_secs == 0.0:
                self.leaving.has_ended = True
                self.driver.submit(inputs.LeaveWanted())
                return
            # The inputs of this tick are handled; only later ones are a reason to wake.
            woken.clear()
            secs = self._scheduler.poll_secs if self.trainers.present else LINGER_TICK_SECS
            if leaves_in_secs is not None:
                secs = min(secs, leaves_in_secs)
            secs = max(0.001, min(secs, self.driver.next_in_secs()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(secs):
                    await woken.wait()

    def tick(self) -> None:
        """Do what is due now."""
        trainers = self.trainers
        if trainers.group is not None:
            self.leaving.note_trainers()
        self._check_place()
        self.driver.tick()
        self._scheduler.tick()
        if trainers.group is not None:
            is_writing = bool(self.driver.view.pending_ids())
            phase = SavePhase.WRITING if is_writing else SavePhase.QUIET
            phase = SavePhase.SEALING if trainers.filling else phase
            trainers.meter.read_progress(trainers.present, phase)

    def close(self) -> None:
        """End all threads, after their present work, and close all files."""
        self.leaving.close()
        self.sessions.close()
        self.storage_worker.threads.close()
        self.directory.free_rest()
        self.network.peers.close()
        self.run.events.close()
        self.trainers.control.close()
        self.ram.store.close()

    def leave_soon(self) -> None:
        """Make held checkpoints durable, then exit, even if trainers are attached."""
        log.info("exit requested")
        self.leaving.stop()
        self._want_durable()
        self.driver.woken.set()

    def give_way(self, place: str) -> None:
        """End a training here, and leave to a start at another place that takes the run over."""
        fenced = "; the training here is fenced" if self.trainers.group is not None else ""
        log.warning("a start at %s takes the run over%s", place, fenced)
        self.sessions.give_way(place)
        self.leave_soon()

    def _want_durable(self) -> None:
        """Mark the newest checkpoint here as due in the durable tier, against any policy."""
        view = self.driver.view
        newest = max(view.complete_ids(), key=age_of, default=None)
        for held in (outcome.held for outcome in view.held if outcome.held.id == newest):
            for rank in ranks_in(held.own):
                self.driver.submit(
                    inputs.PartSealed(
                        rank=rank,
                        id=held.id,
                        part_count=held.part_count,
                        in_ram=True,
                        is_due=True,
                    )
                )

    @property
    def is_busy(self) -> bool:
        """Whether an operation on the stores is under way."""
        return any(part.is_busy for part in (self.driver, self.retention, self.mirroring))

    async def wait_idle(self) -> None:
        """Wait for the operations on the stores that are under way."""
        await self.driver.wait_idle()
        await self.retention.wait_idle()
        await self.mirroring.wait_idle()

    # The effects of the coordination.

    def carry_out(self, effect: effects.Effect) -> Operation | None:
        """Carry out an effect; return the operation of one that takes time."""
        worker, trainers = self.storage_worker, self.trainers
        match effect:
            case effects.Send():
                self.network.send(effect.host, effect.message)
            case effects.SetTarget():
                trainers.set_target(effect.kind, effect.step)
                # Read after the write: a rank that is not seen at the target yet reads the cell
                # later.
                looked = trainers.look_at_target(effect.kind, effect.step)
                if looked.is_missed:
                    return self._look_again(effect)
                self.driver.submit(looked)
            case effects.ConfirmTarget():
                trainers.confirm_target(effect.step)
            case effects.ClearTarget():
                trainers.clear_target(effect.kind)
            case effects.Drop():
                self.ram.free_checkpoint(effect.id)
            case effects.Persist():
                self.metering.save_times.begin_write()
                return worker.persist(effect)
            case effects.Commit():
                return worker.commit(effect)
            case effects.Pull():
                return worker.pull(effect)
            case effects.ListDurable():
                return worker.list_durable(effect)
            case effects.BeginAttempt():
                return worker.begin(effect)
            case effects.RenewLease():
                return worker.leases.renew(effect)
            case effects.ReleaseLease():
                return worker.leases.release(effect)
            case effects.ReadLease():
                return worker.read_lease(effect)
            case effects.MirrorParts():
                self._mirror_worker.write_parts(effect)
            case effects.MirrorCommit():
                self._mirror_worker.commit(effect)
            case effects.LeaseAwaited():
                text = (
                    "attempt %s of host %s has ended, and its agent, which serves its own host "
                    "alone, still stores its checkpoints: waiting at most %.0f s for that"
                    if effect.is_storing
                    else "attempt %s of host %s may be live, and its agent cannot be asked: "
                    "waiting at most %.0f s for its lease to expire"
                )
                log.warning(text, effect.attempt, effect.host, effect.secs)
            case _:
                self._report(effect)
        return None

    async def _look_again(self, effect: effects.SetTarget) -> inputs.Input:
        """Look again at a target that seems to be missed, once each rank there has decided.

        At the earliest in the loop's next turn: the leader's response to a refusal is a later
        target, which may be missed as well, and an agent that is held up for longer than a step
        each time would do nothing else.
        """
        for pause_secs in DECISION_PAUSES_SECS:
            await asyncio.sleep(pause_secs)
            if not self.trainers.is_deciding(effect.step):
                break
        return self.trainers.look_at_target(effect.kind, effect.step)

    def _report(self, effect: Report) -> None:
        match effect:
            case effects.AttemptJoined():
                self._joined(effect)
            case effects.GroupRefused():
                self.sessions.on_refused(effect)
            case effects.GivenUp():
                self.sessions.given_up(effect)
            case effects.RamGivenUp():
                self.sessions.ram_given_up(effect)
            case effects.RanksEnded():
                self.sessions.ended_elsewhere(effect)
            case effects.Fenced():
                self.sessions.fenced(effect)
            case effects.ReportOutcome():
                self.retention.on_outcome(effect)
            case effects.DeleteConfirmed():
                self.retention.on_gone(effect.id)
            case effects.Reached():
                self._scheduler.reached(effect)
                self.save_tracker.reached(effect)
            case effects.MirrorEnded():
                self.mirroring.on_ended(effect)
            case effects.ReportMirrored():
                self.trainers.notices.post(Notice(kind="uploaded", id=effect.id))
            case (
                effects.HostSilent()
                | effects.HostHeard()
                | effects.LeaderChanged()
                | effects.ProtectionLate()
            ):
                self._outages.on_effect(effect)
            case _:
                assert_never(effect)

    def _joined(self, effect: effects.AttemptJoined) -> None:
        self.trainers.forget_targets()
        self._scheduler.forget_attempt()
        has_started = self.sessions.joined(effect)
        # After that: the policies of the remote tier are the new attempt's.
        self.mirroring.forget_timeline()
        is_left = not self.retention.has_recovered
        if has_started and is_left and self.driver.view.lead.is_first:
            self.retention.recover_earlier(effect.attempt)

    def _committed(self, manifest: Manifest, secs: float | None) -> None:
        # First: preservation spares what is chosen for the remote tier.
        self.mirroring.on_committed(manifest)
        self.retention.committed(manifest, secs)

    # The end of the agent.

    @property
    def is_all_durable(self) -> bool:
        """Whether this host's RAM is not needed any more."""
        if self.directory.is_lost:
            return not self.directory.kept
        return self.driver.view.is_settled or self.leaving.is_superseded

    def _unsaved(self) -> list[CheckpointId]:
        """Return the checkpoints in RAM to keep if the run's directory is gone, ascending.

        Those are the ones that are newer than the newest committed one, and with trainers attached
        the newest one in any case. Other hosts may have the missing parts of one.
        """
        if self.leaving.is_superseded:
            return []
        has_peers = self.run.config.peers is not None
        listed = self.ram.checkpoints()
        usable = sorted(
            (c for c, parts in listed.items() if parts.is_whole or has_peers), key=age_of
        )
        outcomes = self.driver.view.held
        committed = [age_of(outcome.held.id) for outcome in outcomes if outcome.is_committed]
        newest_committed = max(committed, default=NO_AGE)
        unsaved = [checkpoint for checkpoint in usable if age_of(checkpoint) > newest_committed]
        return unsaved or (usable[-1:] if self.trainers.group is not None else [])

    def _check_place(self) -> None:
        """Exit once trainers cannot find this agent: its folder, or a file there, was removed."""
        now_secs = self.run.clock.monotonic()
        if self.leaving.is_stopping or now_secs < self._next_check_secs:
            return
        self._next_check_secs = now_secs + PLACE_SECS
        if not self._has_place():
            log.warning(
                "another process, such as a cleaner of old files, removed files of this agent in "
                "%s; a trainer will start another agent",
                self.run.folder,
            )
            self.leave_soon()

    def leaves_in_secs(self) -> float | None:
        """Return in how many seconds the agent exits if nothing happens; None: it stays."""
        if self.directory.is_lost:
            return self.directory.leaves_in_secs()
        return self.leaving.leaves_in_secs()

    def _is_needed(self, newest: Age | None) -> bool:
        # What is copied to the remote tier does not count: its service may not answer.
        pending = self.driver.view.pending_ids()
        if self.sessions.is_starting:
            return True
        if newest is not None and self.trainers.group is not None:
            return any(age_of(checkpoint) <= newest for checkpoint in pending)
        return self.driver.is_busy or self.retention.is_busy or bool(pending)
