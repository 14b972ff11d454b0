"""Answer the calls of trainers and of the command line to one agent."""

from __future__ import annotations

import asyncio
import os

import msgspec

from holdfast.coordination import inputs
from holdfast.coordination.messages import COMPLETE_STATUSES, TargetKind
from holdfast.coordination.rank_runs import ranks_in
from holdfast.engine.lifecycle.attempts import newest_attempt
from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    RunBusyError,
    WaitTimeoutError,
)
from holdfast.format.names import AttemptId
from holdfast.host.agent import Agent
from holdfast.host.leaving import CLOSED_SECS
from holdfast.host.metering.metrics_server import MetricsServer
from holdfast.host.metrics_source import MetricsSource
from holdfast.host.tiers.directory_watch import LEAVE_SECS
from holdfast.host.tiers.opening_listing import listing_message
from holdfast.host.wire import protocol
from holdfast.local_agent.calls import BODY_SECS, Handler, serve_calls
from holdfast.local_agent.socket_server import SocketServer
from holdfast.observe.events.schema import SaveRequested
from holdfast.observe.metrics.measures import RecentSteps
from holdfast.observe.metrics.metric_families import AgentMetrics
from holdfast.observe.run_status import (
    Answers,
    HostStatus,
    JobStatus,
    installed_version,
    job_of,
    read_answers,
)
from holdfast.peers.wire import STATUS
from holdfast.quantities import secs_text

ASK_SECS = 0.02
LEFT_LOOKS_MAX, LEFT_LOOK_SECS = 20, 0.005
"""How long the answer to the last trainer that leaves may wait until this agent's end is known."""
TARGET_SECS = 30.0


class Service:
    """The handlers of the server's routes. The second argument of each is the caller's pid."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._run = agent.run
        self._trainers = agent.trainers
        self._driver = agent.driver
        self._metrics = MetricsSource(
            agent.run,
            agent.ram,
            agent.trainers,
            agent.driver,
            agent.metering.measures,
            self._job,
        )
        self._metrics_server = MetricsServer(self._metrics.gather)

    async def close(self) -> None:
        """End the server of metrics."""
        await self._metrics_server.close()
        await self._metrics.close()

    async def attach(self, request: protocol.Attach, pid: int) -> protocol.Attached:
        if request.directory:
            await self._check_directory(request)
        if self._agent.leaving.has_ended:
            # Race: a trainer that is admitted now loses its agent at once. The server's end ends
            # this call; the caller then finds no agent, and starts the next one.
            await asyncio.sleep(LEAVE_SECS)
            raise AgentUnavailableError(f"open {request.run}: its agent leaves; open it again")
        try:
            attached = await self._agent.sessions.attach(request, pid)
        except HoldfastError:
            self._agent.leaving.note_refusal()
            raise
        self._agent.leaving.expected.remove_process(pid)
        self._driver.woken.set()
        if request.metrics is not None:
            problem = await self._metrics_server.open(request.metrics)
            if problem is not None:
                warnings = (*attached.warnings, problem)
                attached = msgspec.structs.replace(attached, warnings=warnings)
        return attached

    async def _check_directory(self, request: protocol.Attach) -> None:
        """Check that a trainer has the agent's directory open; wait if the agent leaves soon.

        A start at another place of the run that takes it over ends the training and the agent.

        Raises:
            StorageError: as `DirectoryWatch.check_identity`.
            FencedError: it is another place, where a newer attempt has begun.
            RunBusyError: it is another place of the run, which is live here.
            AgentUnavailableError: it is another place, and the agent stays.
        """
        try:
            await self._agent.directory.check_identity(request.run, request.directory)
        except AgentUnavailableError as error:
            if request.attempt is not None:
                await self._check_not_displaced(request.attempt)
            elif request.takeover and not self._agent.leaving.is_stopping:
                # Also without a trainer here: another host's training may have ended first.
                self._agent.give_way(request.run)
            secs = self._agent.leaves_in_secs()
            if self._agent.leaving.is_stopping or (secs is not None and secs <= CLOSED_SECS):
                # The caller finds no agent once this one has left, and starts one for its own.
                await asyncio.sleep(LEAVE_SECS)
            if self._trainers.group is not None:
                config, pids = self._run.config, [m.pid for m in self._trainers.group.present]
                raise RunBusyError(
                    f"open {request.run}: the run is live on this host ({config.host}), at "
                    f"{self._run.path} (process {', '.join(map(str, pids)) or 'unknown'}); stop "
                    "that training first, or open with takeover=True to fence it"
                ) from error
            leaves = "once its checkpoints are in all tiers"
            if secs is not None:
                leaves = f"in {secs_text(secs)}"
            raise AgentUnavailableError(
                f"{error}. It has no trainer, and leaves by itself {leaves}"
            ) from error

    async def _check_not_displaced(self, attempt: AttemptId) -> None:
        """Check that no start at this place of the run has displaced a trainer's own agent.

        Raises:
            FencedError: one has.
        """
        newest = await self._agent.storage_worker.threads.query(newest_attempt, self._run.durable)
        if newest.number > attempt.number:
            raise FencedError(
                f"attach: attempt {newest} at {self._run.path}, another place of the run, has "
                f"taken it over from attempt {attempt}; stop this process"
            )

    async def branch(self, request: protocol.Branch, pid: int) -> protocol.Attached:
        return await self._agent.sessions.begin_branch(request)

    async def listing(self, request: protocol.WantListing, pid: int) -> protocol.DurableListing:
        listing = await self._agent.storage_worker.newest_for(request.attempt)
        return listing_message(listing) if listing is not None else protocol.DurableListing()

    async def want_slot(self, request: protocol.WantSlot, pid: int) -> protocol.Slot:
        return await self._agent.save_tracker.want_slot(request)

    async def filling(self, request: protocol.FillStarted, pid: int) -> protocol.Empty:
        self._agent.save_tracker.filling(request)
        return protocol.Empty()

    async def copied(self, request: protocol.Copied, pid: int) -> protocol.Empty:
        self._agent.save_tracker.copied(request)
        return protocol.Empty()

    async def want_spare(self, request: protocol.WantSpare, pid: int) -> protocol.Slot:
        return await self._agent.save_tracker.want_spare(request)

    async def sealed(self, request: protocol.Sealed, pid: int) -> protocol.Empty:
        await self._agent.save_tracker.sealed(request)
        return protocol.Empty()

    async def abandoned(self, request: protocol.Abandoned, pid: int) -> protocol.Empty:
        await self._agent.save_tracker.abandoned(request)
        return protocol.Empty()

    async def watch(self, request: protocol.Watch, pid: int) -> protocol.Notices:
        notices = await self._trainers.notices.after(request.cursor)
        # No notice of these will follow: a reported part is held, or its end was notified before.
        holds = self._driver.view.holds
        unknown = tuple(checkpoint for checkpoint in request.pending if not holds(checkpoint))
        return msgspec.structs.replace(notices, unknown=unknown)

    async def judged(self, request: protocol.Judged, pid: int) -> protocol.Empty:
        await self._agent.retention.judged(request.newest, request.keep)
        return protocol.Empty()

    async def vouched(self, request: protocol.Vouched, pid: int) -> protocol.Empty:
        if self._run.remote is not None:
            self._run.remote.vouched = request.step
        return protocol.Empty()

    async def request_save(self, request: protocol.RequestSave, pid: int) -> protocol.Requested:
        if self._trainers.group is None:
            raise InvalidArgumentError(
                f"save {self._run.path}: no trainer works on it now; there is nothing to save"
            )
        kind = TargetKind.DURABLE if request.durable else TargetKind.RAM
        published = self._trainers.published().highest
        self._driver.submit(inputs.Wish(kind))
        deadline = self._run.clock.monotonic() + TARGET_SECS
        # A durable checkpoint is in RAM first, so that it serves both wishes.
        while (target := self._trainers.last_target({kind, TargetKind.DURABLE})) <= published:
            if self._run.clock.monotonic() > deadline:
                quiet = ", ".join(self._driver.view.quiet_hosts)
                silent = f" (nothing is heard of {quiet})" if quiet else ""
                raise WaitTimeoutError(
                    f"save {self._run.path}: the hosts of the run did not agree on a step "
                    f"within {TARGET_SECS:.0f} s{silent}; they save once they agree"
                )
            await asyncio.sleep(ASK_SECS)
        self._run.events.write(SaveRequested(target_step=target, reason=request.reason))
        return protocol.Requested(target=target)

    async def delete(self, request: protocol.Delete, pid: int) -> protocol.Empty:
        is_trainer = pid in {member.pid for member in self._trainers.present}
        if not is_trainer and not request.by_user:
            raise FencedError(
                f"delete: process {pid} does not belong to the run's present attempt "
                f"({self._driver.attempt}); stop it"
            )
        for checkpoint in request.ids:
            await self._agent.retention.delete_everywhere(checkpoint)
            await self._agent.mirroring.remove_remote(checkpoint)
        return protocol.Empty()

    async def upload(self, request: protocol.Upload, pid: int) -> protocol.Uploaded:
        return self._agent.mirroring.upload(request.id)

    async def peers(self, request: protocol.Empty, pid: int) -> protocol.PeerAddresses:
        addresses = self._agent.network.peers.addresses()
        return protocol.PeerAddresses(
            addresses={host: str(addresses[host]) for host in sorted(addresses)}
        )

    async def report(self, request: protocol.EventReport, pid: int) -> protocol.Empty:
        self._run.events.write(request.event)
        return protocol.Empty()

    async def detach(self, request: protocol.Detach, pid: int) -> protocol.Detached:
        group = self._trainers.group
        self._agent.sessions.detach(request)
        for _ in range(LEFT_LOOKS_MAX):
            is_unknown = self._agent.leaves_in_secs() is None and self._trainers.group is None
            if not is_unknown or self._driver.view.pending_ids():
                break
            # The end of the attempt is being recorded.
            await asyncio.sleep(LEFT_LOOK_SECS)
        # If other hosts' ranks close too, this agent leaves soon; else it lingers.
        is_open_elsewhere = (
            group is not None
            and not group.is_broken
            and len(group.members) < group.count
            and not self._driver.view.is_closed
        )
        return protocol.Detached(
            is_last=self._trainers.group is None,
            pid=os.getpid(),
            ram_bytes=self._agent.ram.pool.size_bytes(),
            is_writing=bool(self._driver.view.pending_ids()),
            leaves_in_secs=None if is_open_elsewhere else self._agent.leaves_in_secs(),
            copies_to=self._agent.mirroring.awaited_place,
        )

    async def stop(self, request: protocol.Stop, pid: int) -> protocol.Empty:
        if self._trainers.present:
            pids = ", ".join(str(member.pid) for member in self._trainers.present)
            raise RunBusyError(
                f"stop the agent of {self._run.path}: its trainers run (processes {pids}) "
                "and would start it again; stop them first"
            )
        self._agent.leave_soon()
        return protocol.Empty()

    async def expect(self, request: protocol.Expect, pid: int) -> protocol.AgentStatus:
        """Stay until the process attaches, which first meets the job's other hosts.

        The agent gives way to a start at another place of the run that takes it over: now, because
        the other hosts are given the address of the agent that stays.

        Returns:
            The status; `leaves_in_secs` is 0.0 if the agent does not stay.
        """
        gives_way = request.takeover and await self._is_at_another_place(request)
        if gives_way and not self._agent.leaving.is_stopping:
            self._agent.give_way(request.run)
        is_leaving = gives_way or self._agent.leaving.has_ended
        if not is_leaving:
            self._agent.leaving.expected.add_process(pid)
        status = await self.status(protocol.Empty(), pid)
        return msgspec.structs.replace(status, leaves_in_secs=0.0) if is_leaving else status

    async def _is_at_another_place(self, request: protocol.Expect) -> bool:
        try:
            await self._agent.directory.check_identity(request.run, request.directory)
        except AgentUnavailableError:
            return True
        return False

    async def status(self, request: protocol.Empty, pid: int) -> protocol.AgentStatus:
        run, trainers, ram = self._run, self._trainers, self._agent.ram
        group, view = trainers.group, self._driver.view
        address = self._agent.network.address
        return protocol.AgentStatus(
            run=run.path,
            run_id=run.config.run_id,
            host=run.config.host,
            pid=os.getpid(),
            attempt=group.attempt.number if group else run.events.attempt,
            folder=run.config.folder,
            ram_bytes=ram.pool.size_bytes(),
            trainers=self._trainer_statuses(),
            held=self._held(),
            pending=len(view.pending_ids()),
            leaves_in_secs=self._agent.leaves_in_secs(),
            peer_address=str(address) if address is not None else None,
            pulled_bytes=ram.pulled_bytes,
            waits_for=view.waits_for,
            prometheus_url=self._metrics_server.url,
            prometheus_problem=self._metrics_server.problem,
            remote=self._agent.mirroring.upload_status(),
        )

    def _trainer_statuses(self) -> tuple[protocol.TrainerStatus, ...]:
        trainers = self._trainers
        return tuple(
            protocol.TrainerStatus(
                rank=member.rank,
                pid=member.pid,
                step=trainers.step_of(member),
                busy=trainers.busy_of(member),
            )
            for member in trainers.present
        )

    def own_status(self) -> HostStatus:
        """Return this agent's report of itself and its host."""
        statuses = self._trainer_statuses()
        trainers, pool, view = self._trainers, self._agent.ram.pool, self._driver.view
        return HostStatus(
            host=self._run.config.host,
            domain=self._driver.domain,
            version=installed_version(),
            pid=os.getpid(),
            attempt=view.attempt,
            leader=view.leader_host,
            ranks=tuple(status.rank for status in statuses),
            steps=tuple(status.step for status in statuses),
            busy={status.rank: status.busy for status in statuses if status.busy},
            ram_bytes=pool.size_bytes(),
            ram_free_bytes=pool.left_bytes() if trainers.job.has_ram else 0,
            held=tuple(outcome.held for outcome in view.held),
            lead=self._driver.survey(),
        )

    async def quiet(self, request: protocol.Empty, pid: int) -> protocol.QuietHosts:
        view = self._driver.view
        return protocol.QuietHosts(hosts=view.quiet_hosts, is_writing=view.is_writing_whole)

    async def metrics(self, request: protocol.Empty, pid: int) -> AgentMetrics:
        return self._metrics.gather()

    async def steps(self, request: protocol.Empty, pid: int) -> RecentSteps:
        return self._agent.metering.measures.recent_steps()

    async def job(self, request: protocol.Empty, pid: int) -> JobStatus:
        return await self._job()

    async def _job(self) -> JobStatus:
        own, network = self._run.config.host, self._agent.network
        addresses = {host: a.authority for host, a in network.peers.addresses().items()}
        answers: Answers = {}
        if addresses:
            # Loaded with the first peer: a host alone needs no HTTP client.
            from holdfast.peers.requests import ask_all

            answers = read_answers(await ask_all(network.peers, STATUS, own), addresses)
        if network.address is not None:
            addresses[own] = network.address.authority
        return job_of(self.own_status(), answers, addresses, network.peers.silent_secs())

    def _held(self) -> tuple[protocol.HeldStatus, ...]:
        statuses = []
        for outcome in self._driver.view.held:
            held = outcome.held
            in_ram = {*ranks_in(held.own), *ranks_in(held.replicas)}
            statuses.append(
                protocol.HeldStatus(
                    step=held.id.step,
                    attempt=held.id.attempt.number,
                    attempt_token=held.id.attempt.token,
                    parts_in_ram=len(in_ram),
                    part_count=held.part_count,
                    complete=len(in_ram) == held.part_count or outcome.status in COMPLETE_STATUSES,
                    committed=outcome.is_committed,
                    durable_due=held.is_due,
                    failed=outcome.failure or None,
                )
            )
        return tuple(statuses)


def call_server(service: Service, body_secs: float = BODY_SECS) -> SocketServer:
    """Return the server of one agent."""
    calls: dict[str, tuple[type[msgspec.Struct], Handler]] = {
        "expect": (protocol.Expect, service.expect),
        "attach": (protocol.Attach, service.attach),
        "branch": (protocol.Branch, service.branch),
        "listing": (protocol.WantListing, service.listing),
        "slot": (protocol.WantSlot, service.want_slot),
        "filling": (protocol.FillStarted, service.filling),
        "copied": (protocol.Copied, service.copied),
        "spare": (protocol.WantSpare, service.want_spare),
        "sealed": (protocol.Sealed, service.sealed),
        "abandoned": (protocol.Abandoned, service.abandoned),
        "watch": (protocol.Watch, service.watch),
        "judged": (protocol.Judged, service.judged),
        "vouched": (protocol.Vouched, service.vouched),
        "request": (protocol.RequestSave, service.request_save),
        "delete": (protocol.Delete, service.delete),
        "peers": (protocol.Empty, service.peers),
        "report": (protocol.EventReport, service.report),
        "detach": (protocol.Detach, service.detach),
        "status": (protocol.Empty, service.status),
        "job": (protocol.Empty, service.job),
        "quiet": (protocol.Empty, service.quiet),
        "metrics": (protocol.Empty, service.metrics),
        "steps": (protocol.Empty, service.steps),
        "stop": (protocol.Stop, service.stop),
        "upload": (protocol.Upload, service.upload),
    }
    return serve_calls(calls, body_secs)
