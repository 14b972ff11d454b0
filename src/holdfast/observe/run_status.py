"""Define the state of a run on all its hosts, and combine it from the answers of their agents.

Pure functions; `peers.requests` asks the agents. One that does not answer is reported as such.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import msgspec

from holdfast.coordination.messages import Held, Name, check_held
from holdfast.coordination.rank_runs import ranks_in
from holdfast.coordination.survivability import (
    HostSeen,
    Lead,
    Outlook,
    Standing,
    check_lead,
    outlook,
    standings,
)
from holdfast.errors import InvalidArgumentError
from holdfast.format.json_codec import decode
from holdfast.format.names import AttemptId

REASON_CHARS_MAX = 300
BUSY_WORDS = {
    "held": "is stopped by a signal, or held by a debugger",
    "call": "waits in a call of its manager",
    "evaluation": "reports an evaluation",
    "other": "reports a wait",
    "starting": "has not made its second step",
}
"""Why a trainer may make no step for a while. Waiting for data is none: each step has that."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's report of itself and its host.

    Attributes:
        attempt: the newest attempt that it knows.
        leader: the host that it follows; None if it knows of none.
        ranks: the trainers that run there.
        steps: the last step of each of them, in the order of `ranks`; None: before the first.
        busy: those that may make no step for a while, and why: a key of `BUSY_WORDS`.
        ram_bytes: the memory that the RAM tier has.
        ram_free_bytes: how much more the RAM tier may have.
        lead: the leader's view; None where the agent does not lead the run.
    """

    host: Name
    domain: Name
    version: Name
    pid: int
    attempt: AttemptId
    leader: Name | None
    ranks: tuple[int, ...]
    ram_bytes: int
    ram_free_bytes: int
    held: tuple[Held, ...]
    lead: Lead | None
    steps: tuple[int | None, ...] = ()
    busy: dict[int, str] = {}


Answers = Mapping[str, HostStatus | str]
"""By host, its agent's report, or the reason why there is none."""


class HeldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of which a host holds parts: its own ranks' parts, and copies of others'."""

    step: int
    attempt: int
    own: tuple[int, ...]
    copies: tuple[int, ...]


class JobHostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a job. Fields that only its own agent knows are None if that does not answer.

    Attributes:
        problem: why there is no answer; empty if there is one.
        silent_secs: the time since its leader or the asking host last received a message of it;
            None: unknown.
        steps: the last step of each of `ranks`; None: before the first; empty: unknown.
        busy: as in `HostStatus`.
    """

    host: str
    domain: str
    address: str | None
    problem: str
    silent_secs: float | None
    version: str | None
    pid: int | None
    ranks: tuple[int, ...]
    ram_bytes: int | None
    ram_free_bytes: int | None
    holds: tuple[HeldCheckpoint, ...]
    steps: tuple[int | None, ...] = ()
    busy: dict[int, str] = {}


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run on all of its hosts, as one of them found it.

    Attributes:
        leader: the host whose agent leads; None if none is known.
        leader_answers: if False, only the attempt, the leader and the hosts are known.
        rank_count: how many trainers the attempt has.
        newest: the newest checkpoint that is whole, in any tier.
        newest_in_ram: the newest one that is whole in RAM.
        newest_durable: the newest one that is committed.
        goes_on_from: the checkpoint from which the run would continue, by the number of losses;
            empty: none.
    """

    attempt: int
    leader: str | None
    leader_answers: bool
    rank_count: int | None
    newest: Standing | None
    newest_in_ram: Standing | None
    newest_durable: Standing | None
    goes_on_from: tuple[Outlook, ...]
    hosts: tuple[JobHostStatus, ...]


@functools.cache
def installed_version() -> str:
    """Return the version of Holdfast that this agent runs."""
    from importlib import metadata

    try:
        return metadata.version("holdfast-checkpoint")
    except metadata.PackageNotFoundError:
        return "unknown"


def encode_status(status: HostStatus) -> bytes:
    """Return the status as JSON."""
    return msgspec.json.encode(status)


def decode_status(data: bytes) -> HostStatus:
    """Return the status in `data`, which another host sent.

    Raises:
        InvalidArgumentError: it is no status of this version.
    """
    try:
        status = decode(data, HostStatus)
        for held in status.held:
            check_held(held)
        if status.lead is not None:
            check_lead(status.lead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise InvalidArgumentError(
            f"its status cannot be decoded: {error}; do all hosts run one version?"
        ) from error
    return status


def read_answers(answers: Mapping[str, bytes | str], addresses: Mapping[str, str]) -> Answers:
    """Read what the agents of other hosts have answered.

    Args:
        answers: By host, the answer of its agent, or the reason why there is none.
        addresses: The addresses at which they were asked.

    Returns:
        By host, its agent's report, or the reason why there is none.
    """
    return {
        host: answer if isinstance(answer, str) else _read(host, answer, addresses.get(host))
        for host, answer in answers.items()
    }


def _read(host: str, answer: bytes, address: str | None) -> HostStatus | str:
    try:
        status = decode_status(answer)
    except InvalidArgumentError as error:
        return str(error)[:REASON_CHARS_MAX]
    # Another host's agent may have taken a known address.
    if status.host != host:
        return f"at {address} is the agent of host {status.host}"[:REASON_CHARS_MAX]
    return status


def job_of(
    own: HostStatus,
    answers: Answers,
    addresses: Mapping[str, str],
    silent_secs: Mapping[str, float],
) -> JobStatus:
    """Combine the hosts' reports into the status of the job.

    Args:
        own: the report of the asking host.
        answers: the reports of the other hosts.
        addresses: where their agents are reached.
        silent_secs: the time since the asking host last received a message of each other host.

    Returns:
        The status; where hosts disagree on the leader, the newest term of the newest attempt
        counts.
    """
    reports = {own.host: own}
    reports |= {host: report for host, report in answers.items() if isinstance(report, HostStatus)}
    attempt = max(report.attempt for report in reports.values())
    leads = [
        report
        for report in reports.values()
        if report.lead is not None and report.lead.attempt == attempt
    ]
    leading = max(leads, key=lambda report: report.lead.term if report.lead else 0, default=None)
    lead = leading.lead if leading is not None else None
    seen = {report.host: report for report in lead.hosts} if lead is not None else {}
    domains = {host: report.domain for host, report in reports.items()}
    whole = (
        standings(lead, {h: report.held for h, report in reports.items()}, domains) if lead else []
    )
    # A host of an earlier start that the leader does not know is no part of this job.
    names = reports.keys() | (seen.keys() if lead is not None else answers.keys())
    return JobStatus(
        attempt=attempt.number,
        leader=leading.host if leading is not None else own.leader,
        leader_answers=lead is not None,
        rank_count=lead.rank_count if lead is not None else None,
        newest=next(iter(whole), None),
        newest_in_ram=next((report for report in whole if report.in_ram), None),
        newest_durable=next((report for report in whole if report.durable), None),
        goes_on_from=outlook(whole),
        hosts=tuple(
            _answering(reports[host], addresses.get(host))
            if host in reports
            else _silent(
                host,
                seen.get(host),
                problem=str(answers.get(host, "its address is not known")),
                address=addresses.get(host),
                own_silent_secs=silent_secs.get(host),
            )
            for host in sorted(names)
        ),
    )


def _answering(status: HostStatus, address: str | None) -> JobHostStatus:
    return JobHostStatus(
        host=status.host,
        domain=status.domain,
        address=address,
        problem="",
        silent_secs=0.0,
        version=status.version,
        pid=status.pid,
        ranks=status.ranks,
        ram_bytes=status.ram_bytes,
        ram_free_bytes=status.ram_free_bytes,
        holds=tuple(_held_entry(held) for held in reversed(status.held)),
        steps=status.steps,
        busy=status.busy,
    )


def _silent(
    host: str,
    seen: HostSeen | None,
    *,
    problem: str,
    address: str | None,
    own_silent_secs: float | None,
) -> JobHostStatus:
    silences_secs = [own_silent_secs, seen.silent_secs if seen is not None else None]
    return JobHostStatus(
        host=host,
        domain=seen.domain if seen is not None else host,
        address=address,
        problem=problem,
        silent_secs=min((secs for secs in silences_secs if secs is not None), default=None),
        version=None,
        pid=None,
        ranks=tuple(ranks_in(seen.ranks)) if seen is not None else (),
        ram_bytes=None,
        ram_free_bytes=None,
        holds=(),
    )


def _held_entry(held: Held) -> HeldCheckpoint:
    return HeldCheckpoint(
        step=held.id.step,
        attempt=held.id.attempt.number,
        own=tuple(ranks_in(held.own)),
        copies=tuple(ranks_in(held.replicas)),
    )
