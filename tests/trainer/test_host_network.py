"""`HostNetwork`: its arguments, and where they go."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from holdfast.trainer.options import Options

BAD = [
    {"port": -1},
    {"port": 65536},
    {"port": None},
    {"port": True},
    {"prometheus_port": "9464"},
    {"interface": ""},
    {"interface": 1},
    {"failure_domain": ""},
    {"tls": "agent.pem"},
]


@pytest.mark.parametrize("argument", BAD, ids=str)
def test_a_bad_argument_is_refused_by_name(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(InvalidArgumentError, match=rf"HostNetwork\({name}="):
        holdfast.HostNetwork(**argument)


def test_a_host_without_a_ram_tier_is_reached_at_its_network() -> None:
    tls = holdfast.PeerTls(certificate="own.pem", key="own.key", authority="run.pem")
    options = Options(
        save=ContinuousCheckpointingPolicy(),
        preservation=LatestN(1),
        ram=None,
        network=holdfast.HostNetwork(interface="10.0.0.1", port=4711, tls=tls),
        takeover=False,
    )
    config = options.peer_config("agents.token")
    assert (config.address, config.port, config.tls) == ("10.0.0.1", 4711, tls)


def test_the_interface_of_the_environment_counts_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOLDFAST_INTERFACE", "ib0")
    assert holdfast.HostNetwork().serving_address == "ib0"
    assert holdfast.HostNetwork(interface="eth0").serving_address == "eth0"


def test_a_manager_refuses_what_is_no_network(tmp_path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"network=.*HostNetwork"):
        holdfast.CheckpointManager(tmp_path / "run", network="eth0")  # type: ignore[arg-type]
