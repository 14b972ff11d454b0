"""Run a trainer of some user, without a framework: `start`, `save` … a run; print JSON.

start RUN     finds or starts the agent; prints its folder, and its process
save RUN      the same, and saves step 1; prints also the agent's notices of it
train RUN     begins an attempt, prints its number, and lives on
takeover RUN  begins an attempt, and fences one that is live
call FOLDER   asks the agent in that folder for its status
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.saving.part_writer import write_part
from holdfast.errors import HoldfastError
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.host.wire.client import AgentClient
from holdfast.host.wire.config import AgentConfig
from holdfast.host.wire.launch import ensure_agent
from holdfast.local_agent.client import AgentGoneError
from holdfast.local_agent.place import host_name
from holdfast.policy.preservation_evaluation import encode
from holdfast.policy.preservation_policy import LatestN
from holdfast.store.disk import DiskStore
from holdfast.store.ram import RamStore
from tests.trust.in_process import RUN_ID, right_array, right_plan


def start(run: Path) -> dict:
    clock = SystemClock()
    run.mkdir(exist_ok=True)
    create_run(DiskStore(run, clock), str(run), RUN_ID, clock.now())
    config = AgentConfig(run=str(run), run_id=RUN_ID, host=host_name(), folder="")
    folder, reason = ensure_agent(config, clock)
    client = AgentClient(folder)
    status = client.call("status", protocol.Empty(), protocol.AgentStatus)
    client.close()
    return {"folder": str(folder), "reason": reason, "pid": status.pid}


def begin(client: AgentClient, *, takeover: bool = False) -> protocol.Attached:
    tier = protocol.TierPolicies(save=None, preserve=encode(LatestN(1)).decode())
    attach = protocol.Attach(
        group="group",
        rank=0,
        count=1,
        attempt=None,
        takeover=takeover,
        durable=tier,
        ram=tier,
        ram_limit_bytes=None,
        linger_secs=600.0,
    )
    return client.call("attach", attach, protocol.Attached)


def train(run: Path) -> dict:
    client = AgentClient(Path(start(run)["folder"]))
    print(json.dumps({"attempt": begin(client).attempt.number}), flush=True)
    signal.pause()
    raise AssertionError("a signal that is handled")


def takeover(run: Path) -> dict:
    client = AgentClient(Path(start(run)["folder"]))
    return {"attempt": begin(client, takeover=True).attempt.number}


def save(run: Path) -> dict:
    found = start(run)
    client = AgentClient(Path(found["folder"]))
    place = begin(client)
    one = CheckpointId(1, place.attempt)
    clock = SystemClock()
    plan = right_plan(one, 0, 1, clock.now())
    want = protocol.WantSlot(rank=0, id=one, size_bytes=plan.layout.size_bytes)
    slot = client.call("slot", want, protocol.Slot)
    array = right_array(one).view("u1").data
    store = RamStore(Path(place.ram_folder), lambda size: slot.name, clock)
    write_part(store, plan, lambda chunk: array)
    store.close()
    sealed = protocol.Sealed(rank=0, id=one, part_count=1, tier=protocol.PartTier.RAM, durable=True)
    client.call("sealed", sealed, protocol.Empty)
    # A new agent also reports the protection, since it does not know of earlier drops.
    cursor, ends = 0, []
    while not ends:
        watch = protocol.Watch(group="group", rank=0, cursor=cursor)
        found_notices = client.call("watch", watch, protocol.Notices)
        cursor = found_notices.cursor
        ends = [notice for notice in found_notices.notices if notice.kind != "protected"]
    told = ends[0]
    client.close()
    return found | {"told": told.kind, "why": told.reason}


def call(folder: Path) -> dict:
    client = AgentClient(folder, timeout_secs=5.0)
    try:
        return {"pid": client.call("status", protocol.Empty(), protocol.AgentStatus).pid}
    finally:
        client.close()


def main() -> None:
    os.umask(0o022)
    try:
        print(json.dumps(globals()[sys.argv[1]](Path(sys.argv[2]))))
    except (HoldfastError, AgentGoneError) as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))


if __name__ == "__main__":
    main()
