"""Report that hosts do not reach each other: each outage once, and its end.

Reports go to the events, to the agent's log, and as warnings to the trainers of this host.
"""

from __future__ import annotations

import logging

from holdfast.coordination import effects
from holdfast.host.driver.attached_trainers import NoticeBoard
from holdfast.host.wire.protocol import Notice
from holdfast.observe.events.schema import LeaderReplaced, PeerHeard, PeerSilent, ProtectionDelayed
from holdfast.observe.events.writer import EventWriter

log = logging.getLogger(__name__)


class OutageReports:
    """The reports of one agent; owned by the event loop."""

    def __init__(self, events: EventWriter, notices: NoticeBoard) -> None:
        self._events = events
        self._notices = notices
        self._silent: set[str] = set()

    def on_effect(self, effect: effects.Effect) -> None:
        """Report an outage or its end; other effects are ignored."""
        events = self._events
        match effect:
            case effects.HostSilent():
                self._silent.add(effect.host)
                events.write(PeerSilent(of_host=effect.host, secs=effect.secs))
                self._warn(
                    f"host {effect.host} has sent nothing for {effect.secs:.0f} s: until it does, "
                    "checkpoints are only as safe as the durable tier, which every host writes "
                    "its parts to"
                )
            case effects.HostHeard():
                self._silent.discard(effect.host)
                events.write(PeerHeard(of_host=effect.host))
                log.info("host %s reports again", effect.host)
            case effects.LeaderChanged():
                events.write(LeaderReplaced(leader=effect.leader, before=effect.before))
                if effect.is_first:
                    log.info("host %s, where rank 0 is, leads again", effect.leader)
                else:
                    self._warn(
                        f"host {effect.before} is silent and host {effect.leader} leads in its "
                        "place: checkpoints become durable, but no policy or preemption sets a step"
                    )
            case effects.ProtectionLate():
                first, last = effect.first_step, effect.last_step
                events.write(ProtectionDelayed(first_step=first, last_step=last, secs=effect.secs))
                silent = f"; silent hosts: {', '.join(sorted(self._silent))}" * bool(self._silent)
                self._warn(
                    f"no checkpoint was protected for {effect.secs:.0f} s: steps {first} to {last} "
                    f"wait for parts of other ranks, for replicas or for storage{silent}"
                )

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self._notices.post(Notice(kind="warning", reason=text))
