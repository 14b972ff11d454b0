"""The calls of a run's agent."""

from __future__ import annotations

import msgspec

from holdfast.host.service import Service
from holdfast.host.wire import protocol
from holdfast.host.wire.calls import BODY_SECS, Handler, serve_calls
from holdfast.host.wire.socket_server import SocketServer


def call_server(service: Service, body_secs: float = BODY_SECS) -> SocketServer:
    """Return the server of one agent."""
    calls: dict[str, tuple[type[msgspec.Struct], Handler]] = {
        "expect": (protocol.Empty, service.expect),
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
        "upload": (protocol.Empty, service.upload),
    }
    return serve_calls(calls, body_secs)
