"""What a host makes of a message: whose it is, and whether its sender is behind.

Fencing comes first. A message of an older attempt is answered with the newer one, whoever sent it,
except where its sender joins the newer attempt. One that knows of a newer attempt ends what is led
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from holdfast.coordination.turn import Turn

if TYPE_CHECKING:
    from holdfast.coordination.node import Node


def receive(agreement: Node, turn: Turn, sender: str, message: AnyMessage) -> None:
    """Takes one message."""
    if message.run != agreement.identity.run:
        return
    match message:
        case Report():
            _report(agreement, turn, sender, message)
        case Orders():
            _orders(agreement, turn, sender, message)
        case Newer():
            _newer(agreement, turn, message)
        case Probe():
            _probe(agreement, turn, sender, message)
        case Alive():
            if agreement.starting is not None:
                agreement.starting.on_alive(message)
        case Refused():
            agreement.member.on_refused(turn, message)
        case WhoHolds():
            if message.attempt >= agreement.member.attempt:
                agreement.member.report_held(turn, sender)
        case Leaving():
            if agreement.leader is not None:
                agreement.leader.left(sender, message)


def _report(agreement: Node, turn: Turn, sender: str, report: Report) -> None:
    member, leader, starting = agreement.member, agreement.leader, agreement.starting
    group = report.state.group
    if report.is_hello and starting is not None and starting.takes(sender, group):
        starting.accept_report(sender, report)
        return
    if leader is not None and group == leader.reign.group and report.attempt <= member.attempt:
        leader.accept_report(turn, sender, report)
        return
    if group in agreement.refused:
        refused = Refused(
            run=report.run,
            attempt=member.attempt,
            group=group,
            reason=agreement.refused[group][0][:REASON_CHARS_MAX],
            kind=agreement.refused[group][1],
        )
        turn.send(sender, refused)
        return
    if report.is_hello:
        # Its start is not here yet; it will say so again.
        return
    if report.attempt > member.attempt:
        reason = f"{sender} knows of attempt {report.attempt}"
        agreement.fence(turn, report.attempt, reason)
    elif report.attempt < member.attempt:
        member.send_newer(turn, sender)
    elif leader is not None:
        leader.accept_report(turn, sender, report)
    elif member.following.incarnation:
        # The sender took this host for a leader; who leads is known here.
        member.send_newer(turn, sender)


def _orders(agreement: Node, turn: Turn, sender: str, orders: Orders) -> None:
    member, leader = agreement.member, agreement.leader
    is_other = leader is not None and sender != turn.host
    if leader is not None and is_other and orders.attempt == leader.reign.attempt:
        if leader.reign.is_first and orders.term > leader.term:
            # A successor took this one for dead. The trainers' own host goes on leading.
            leader.outbid(orders.term)
            return
        if orders.term <= leader.term:
            member.send_newer(turn, sender)
            return
        agreement.step_down()
    member.ordered(turn, sender, orders)
    agreement.check_leads()


def _newer(agreement: Node, turn: Turn, message: Newer) -> None:
    leader = agreement.leader
    if leader is not None and message.attempt == leader.reign.attempt:
        if message.leader == turn.host or message.term < leader.term:
            return
        if leader.reign.is_first:
            leader.outbid(message.term)
            return
        if message.term > leader.term:
            agreement.step_down()
    agreement.member.on_newer(turn, message)
    agreement.check_leads()


def _probe(agreement: Node, turn: Turn, sender: str, probe: Probe) -> None:
    group, leader = agreement.member.group, agreement.leader
    is_other = group is not None and group.word != probe.group
    is_living = group is not None and is_other and group.is_living
    if is_living and leader is not None and leader.is_broken:
        # Without all its ranks it cannot go on, so it does not stand in the way.
        is_living = False
    attempt = agreement.member.attempt
    if agreement.starting is not None and agreement.starting.may_have(probe.attempt):
        # The record that the other start has found is the one that this host is putting.
        is_living, attempt = True, probe.attempt
    alive = Alive(run=probe.run, attempt=attempt, group=probe.group, is_living=is_living)
    turn.send(sender, alive)
