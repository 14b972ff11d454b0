"""What a host makes of a message: whose it is, and whether its sender is behind.

Fencing comes first. A message of an older attempt is answered with the newer one, whoever sent it,
except where its sender joins the newer attempt. One that knows of a newer attempt ends what is led
here.
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
    """Takes one message."""
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
        # Its start is not here yet; it will say so again.
        return
    if report.attempt > follower.attempt:
        reason = f"{sender} knows of attempt {report.attempt}"
        roles.fence(turn, report.attempt, reason)
    elif report.attempt < follower.attempt:
        follower.send_newer(turn, sender)
    elif leader is not None:
        leader.accept_report(turn, sender, report)
    elif follower.election.incarnation:
        # The sender took this host for a leader; who leads is known here.
        follower.send_newer(turn, sender)


def _orders(roles: HostRoles, turn: Turn, sender: str, orders: Orders) -> None:
    follower, leader = roles.follower, roles.leader
    is_other = leader is not None and sender != turn.host
    if leader is not None and is_other and orders.attempt == leader.leadership.attempt:
        if leader.leadership.is_first and orders.term > leader.term:
            # A successor took this one for dead. The trainers' own host goes on leading.
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
    group, leader = roles.follower.group, roles.leader
    is_other = group is not None and group.token != probe.group
    is_living = group is not None and is_other and group.is_living
    if is_living and leader is not None and leader.is_broken:
        # Without all its ranks it cannot go on, so it does not stand in the way.
        is_living = False
    attempt = roles.follower.attempt
    if roles.bootstrap is not None and roles.bootstrap.may_have(probe.attempt):
        # The record that the other start has found is the one that this host is putting.
        is_living, attempt = True, probe.attempt
    alive = Alive(run=probe.run, attempt=attempt, group=probe.group, is_living=is_living)
    turn.send(sender, alive)
