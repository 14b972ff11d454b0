"""Routing of messages to the roles of a host, and fencing by their attempts.

A message is checked for its attempt before it is applied. A message of an older attempt is answered
with `Newer`, whatever its sender, unless the sender joins the newer attempt. A message of a newer
attempt ends the leadership of this host.
"""

from __future__ import annotations

from holdfast.coordination.messages import (
    REASON_CHARS_MAX,
    Alive,
    AnyMessage,
    Leaving,
    Newer,
    Orders,
    Probe,
    Refused,
    Report,
    WhoHolds,
)
from holdfast.coordination.roles import HostRoles
from holdfast.coordination.turn import Turn


def receive(roles: HostRoles, turn: Turn, sender: str, message: AnyMessage) -> None:
    """Apply one message; messages of another run are ignored."""
    if message.run != roles.identity.run:
        return
    match message:
        case Report():
            _report(roles, turn, sender, message)
        case Orders():
            _orders(roles, turn, sender, message)
        case Newer():
            _newer(roles, turn, message)
        case Probe():
            _probe(roles, turn, sender, message)
        case Alive():
            if roles.bootstrap is not None:
                roles.bootstrap.on_alive(message)
        case Refused():
            roles.follower.on_refused(turn, message)
        case WhoHolds():
            if message.attempt >= roles.follower.attempt:
                roles.follower.report_held(turn, sender)
        case Leaving():
            if roles.leader is not None:
                roles.leader.left(sender, message)


def _report(roles: HostRoles, turn: Turn, sender: str, report: Report) -> None:
    follower, leader, bootstrap = roles.follower, roles.leader, roles.bootstrap
    group = report.state.group
    # The order matters: a report to a start must not be taken for one to the present leader, and
    # both are accepted before the attempts are compared.
    if report.is_hello and bootstrap is not None and bootstrap.accepts(sender, group):
        bootstrap.accept_report(sender, report)
        return
    if (
        leader is not None
        and group == leader.leadership.group
        and report.attempt <= follower.attempt
    ):
        leader.accept_report(turn, sender, report)
        return
    # A host whose ranks joined after the refusal has not got it yet.
    if group in roles.refused:
        refused = Refused(
            run=report.run,
            attempt=follower.attempt,
            group=group,
            reason=roles.refused[group][0][:REASON_CHARS_MAX],
            kind=roles.refused[group][1],
        )
        turn.send(sender, refused)
        return
    if report.is_hello:
        # Its trainers' start has not begun here yet; the sender repeats its report.
        return
    if report.attempt > follower.attempt:
        reason = f"{sender} knows of attempt {report.attempt}"
        roles.fence(turn, report.attempt, reason)
    elif report.attempt < follower.attempt:
        follower.send_newer(turn, sender)
    elif leader is not None:
        leader.accept_report(turn, sender, report)
    elif follower.election.incarnation:
        # The sender follows this host, which does not lead; answer with the leader known here.
        follower.send_newer(turn, sender)


def _orders(roles: HostRoles, turn: Turn, sender: str, orders: Orders) -> None:
    follower, leader = roles.follower, roles.leader
    is_other = leader is not None and sender != turn.host
    if leader is not None and is_other and orders.attempt == leader.leadership.attempt:
        if leader.leadership.is_first and orders.term > leader.term:
            # A successor did not get this leader's orders. Rank 0's host keeps the lead: the
            # trainers and their policies are here.
            leader.outbid(orders.term)
            return
        if orders.term <= leader.term:
            follower.send_newer(turn, sender)
            return
        roles.step_down()
    follower.apply_orders(turn, sender, orders)
    roles.check_leads()


def _newer(roles: HostRoles, turn: Turn, message: Newer) -> None:
    leader = roles.leader
    if leader is not None and message.attempt == leader.leadership.attempt:
        if message.leader == turn.host or message.term < leader.term:
            return
        if leader.leadership.is_first:
            leader.outbid(message.term)
            return
        if message.term > leader.term:
            roles.step_down()
    roles.follower.on_newer(turn, message)
    roles.check_leads()


def _probe(roles: HostRoles, turn: Turn, sender: str, probe: Probe) -> None:
    """Answer whether the attempt's trainers live, unless this agent does not know the attempt.

    It then has the name of the agent that was asked, and is another one, or has lost its RAM. The
    attempt's lease decides.
    """
    group, leader = roles.follower.group, roles.leader
    leadership, bootstrap = roles.follower.leadership, roles.bootstrap
    may_have = bootstrap is not None and bootstrap.may_have(probe.attempt)
    if not may_have and (leadership is None or leadership.attempt < probe.attempt):
        return
    is_other = group is not None and group.token != probe.group
    is_living = group is not None and is_other and group.is_living
    if is_living and leader is not None and leader.is_broken:
        # Without all its ranks it cannot continue, so it does not block a new attempt.
        is_living = False
    attempt = roles.follower.attempt
    if may_have:
        # The record that the other start has found is the one that this host's start is putting.
        is_living, attempt = True, probe.attempt
    alive = Alive(run=probe.run, attempt=attempt, group=probe.group, is_living=is_living)
    turn.send(sender, alive)
