"""Word the state of a run, for `status`, `watch`, `page` and `ls`. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.coordination.survivability import Standing
from holdfast.observe.reports.words import TIER_WORDS
from holdfast.observe.run_status import HeldCheckpoint, JobHostStatus, JobStatus
from holdfast.quantities import counted, secs_text

HOLDS_SHOWN_MAX = 4
"""How many checkpoints of each host are shown, the newest."""


def step_text(step: int) -> str:
    """Return a step in words."""
    return f"step {step:,}"


def tiers_text(tiers: Iterable[str]) -> str:
    """Return the names of tiers."""
    return ", ".join(TIER_WORDS.get(tier, tier) for tier in tiers) or "–"


def headline(job: JobStatus) -> str:
    """Return the state of a run in a few words."""
    silent = [host.host for host in job.hosts if host.problem]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        return f"{counted(len(silent), 'host')} {verb} not answer: {', '.join(silent)}"
    rank_count = sum(len(host.ranks) for host in job.hosts)
    if not rank_count:
        return "no training now; the agents hold its checkpoints"
    return f"training, {counted(rank_count, 'process', 'processes')}"


def leader_text(job: JobStatus) -> str:
    """Return which host leads."""
    if job.leader_answers:
        return job.leader or ""
    named = "none is known" if job.leader is None else f"{job.leader}, which does not answer"
    return f"{named}; the state of the checkpoints is unknown until another host leads"


def standing_text(standing: Standing | None) -> str:
    """Return which checkpoint it is and where."""
    if standing is None:
        return "no checkpoint is complete yet"
    places = []
    if standing.in_ram:
        places.append(f"in the RAM of {counted(standing.domains, 'failure domain')}")
    if standing.durable:
        places.append("durable")
    where = " and ".join(places) or "in RAM and durable storage together"
    return f"{step_text(standing.step)}, attempt {standing.attempt}: {where}"


def survives(job: JobStatus) -> tuple[str, ...]:
    """Return which losses a run survives now, and from which step, the smallest loss first."""
    if not job.leader_answers:
        return ("unknown: the host that leads does not answer",)
    if job.newest is None:
        return (standing_text(None),)
    is_by_host = all(host.domain == host.host for host in job.hosts)
    noun = "host" if is_by_host else "failure domain"
    texts = []
    for outlook in job.goes_on_from:
        if outlook.lost_domains_max is None:
            losses = "any loss"
        elif outlook.lost_domains_max:
            losses = counted(outlook.lost_domains_max, f"more lost {noun}")
        else:
            losses = f"no lost {noun} but lost processes"
        texts.append(f"{losses}, from {step_text(outlook.step)}")
    return tuple(texts) or (f"no lost {noun}",)


def silence(job: JobStatus) -> tuple[str, ...]:
    """Return which hosts do not answer now and what follows, a sentence each; empty: all answer."""
    silent = [host for host in job.hosts if host.problem]
    if not silent:
        return ()
    sentences = [f"Now: {silence_text(host)}." for host in silent]
    if not job.leader_answers:
        return (*sentences, "The host that leads is among them, or is not known.")
    if job.newest is None:
        return (*sentences, "No checkpoint is complete on the hosts that answer.")
    advice = f"the next start continues from {step_text(job.newest.step)} as things are"
    return (
        *sentences,
        f"If that is no interruption of the network, start the job again: {advice}.",
    )


def silence_text(host: JobHostStatus) -> str:
    """Return since when a host does not answer, and why."""
    since = "" if host.silent_secs is None else f" for {secs_text(host.silent_secs)}"
    return f"{host.host} has not answered{since} ({host.problem})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a host."""
    if not ranks:
        return "no rank"
    if len(ranks) > 2 and ranks[-1] - ranks[0] + 1 == len(ranks):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def held_text(held: HeldCheckpoint) -> str:
    """Return what a host holds of a checkpoint: its own ranks' parts, and copies of others'."""
    parts = [counted(len(held.own), "part")] if held.own else []
    copies = [counted(len(held.copies), "copy", "copies")] if held.copies else []
    return " + ".join([*parts, *copies]) or "nothing yet"


def holds_text(host: JobHostStatus) -> str:
    """Return the checkpoints in the RAM of a host, the newest first."""
    texts = [f"{step_text(held.step)}: {held_text(held)}" for held in host.holds[:HOLDS_SHOWN_MAX]]
    more = len(host.holds) - len(texts)
    return "; ".join(texts + ([f"{more} more"] if more else [])) or "nothing"
