"""Commands for a run in a bucket, while its agent is busy or its service refuses requests."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

import holdfast
from holdfast.cli.rm import rm
from holdfast.cli.stop import stop
from holdfast.host.wire import agents_here
from tests.buckets.fault_proxy import FaultProxy
from tests.hosts import Host, wait_until

pytest.importorskip("obstore", reason="obstore is not installed")


def test_rm_waits_for_the_upload_of_the_step_that_it_removes(
    proxy: FaultProxy, proxied_url: str, one_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit of the calls that an agent answers at once.
    monkeypatch.setattr(agents_here.ask, "__defaults__", (2.0,))
    with holdfast.CheckpointManager(proxied_url) as manager:
        proxy.rate = 4e5
        manager.save(0, {"w": np.random.default_rng(0).random(250_000)}, force=True)
        wait_until(lambda: any("image" in request.path for request in proxy.requests))
        done = CliRunner().invoke(rm, [proxied_url, "0", "--yes"], standalone_mode=False)
        assert done.exception is None, done.exception
        proxy.rate = None
        assert manager.all_steps() == []


def test_stop_ends_an_agent_here_whatever_its_bucket_answers(
    proxy: FaultProxy, proxied_url: str, one_host: Host
) -> None:
    manager = holdfast.CheckpointManager(proxied_url)
    manager.save(0, {"w": np.arange(3)}, force=True)
    manager.wait_until_finished()
    proxy.choose = lambda request: "slow down"
    done = CliRunner().invoke(stop, [proxied_url, "--timeout", "5"], standalone_mode=False)
    # The agent is asked, and refuses, because its trainer runs.
    assert "its trainers run" in str(done.exception), done.exception
    proxy.choose = lambda request: None
    manager.close()
