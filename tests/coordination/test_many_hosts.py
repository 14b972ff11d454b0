"""The work of a leader for one checkpoint grows with the number of hosts, not with its square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.coordination.leader import durability
from holdfast.coordination.leader.leader import Leader
from holdfast.coordination.messages import CheckpointStatus
from holdfast.coordination.settings import Settings, heartbeat_for
from tests.coordination.cases import make, reached, running, until

HOSTS, RANKS_A_HOST = 64, 4


def test_a_checkpoint_costs_the_leader_a_few_orders_for_each_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return real(*arguments)

        return call

    monkeypatch.setattr(Leader, "_command", counted("orders", Leader._command))
    monkeypatch.setattr(durability, "_own_first", counted("parts", durability._own_first))
    world = make(HOSTS, ranks_a_host=RANKS_A_HOST, every=2, pace_secs=1.0)
    # As with thousands of hosts.
    world.settings = Settings(heartbeat_secs=heartbeat_for(4096) / 10)
    for host in world.hosts.values():
        host.kill_agent()
        host.start_agent()
    running(world)
    started = dict(calls)
    until(world, lambda: reached(world, CheckpointStatus.COMMITTED))
    assert calls["orders"] - started["orders"] < 20 * HOSTS
    # Each placement of replicas, and of writes, visits each part.
    assert calls["parts"] - started.get("parts", 0) < 20 * HOSTS * RANKS_A_HOST
