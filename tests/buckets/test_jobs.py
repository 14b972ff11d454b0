"""Jobs of several hosts with their run in a bucket: no host has a directory that others see."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.adapt.contract import OwnProcess
from holdfast.clock import SystemClock
from holdfast.errors import AgentUnavailableError
from holdfast.peers.config import read_token
from holdfast.store.location import RunLocation, open_durable
from holdfast.trainer.ranks import peer_token
from holdfast.trainer.ranks.peer_token import share_token
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.hosts import Host
from tests.trainer.job import check_went_on, lose, run_job, some_hosts

URL = "s3://bucket/runs/one"


@pytest.fixture
def hosts(url: str) -> Iterator[list[Host]]:
    """Three hosts, each with a folder of its own for what it keeps of runs in buckets."""
    with some_hosts(3) as found:
        for one in found:
            one.variables["HOLDFAST_STATE"] = str(one.folder / "state")
        yield found


def _tokens(hosts: list[Host]) -> set[str]:
    files = [path for one in hosts for path in one.folder.rglob("*.token")]
    assert len(files) == len(hosts)
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in files} == {0o600}
    return {path.read_text() for path in files}


def test_hosts_save_one_checkpoint_and_go_on_after_a_lost_host_and_on_new_hosts(
    hosts: list[Host], url: str
) -> None:
    pair = hosts[:2]
    first = run_job(pair, url, steps=9, interval=4, dies=True)
    assert [r["saved"] for r in first] == [[0, 4, 8]] * 2
    # A token of all hosts, which is not in the bucket.
    (token,) = _tokens(pair)
    store = open_durable(url, SystemClock())
    keys = list(store.all_keys())
    assert keys
    assert not [key for key in keys if token.encode() in store.get(key)]
    assert holdfast.open_run(url).latest_step() == 8
    lose(hosts[1])
    check_went_on(run_job([hosts[0], hosts[2]], url, steps=4, interval=4, dies=True), 8)
    assert len(_tokens([hosts[0], hosts[2]])) == 1
    # All hosts are new ones: what is read is in the bucket.
    lose(*hosts)
    check_went_on(run_job(pair, url, steps=1, interval=4), 12)


@pytest.fixture
def token_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    location = RunLocation.parse(URL)
    location.make_folder()

    def share(found: list[str]) -> str:
        """Share a token in a job whose other ranks have those."""

        class Job(Rendezvous):
            def decide(self, name, value, judge, *rest):
                return judge([*found, value])

        return share_token(location, "run", Job(OwnProcess(), SystemClock()), SystemClock())

    return share


def test_a_host_without_a_token_takes_that_of_the_others_and_keeps_it(token_of) -> None:
    other = "t" * 32
    path = token_of(["", other])
    assert read_token(path) == other
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert read_token(token_of([""])) == other
    assert [file.name for file in Path(path).parent.iterdir()] == [Path(path).name]


def test_a_job_without_a_token_makes_one(token_of) -> None:
    assert len(read_token(token_of([""]))) >= 32


def test_an_agent_with_a_token_of_other_hosts_is_named_and_keeps_it(
    token_of, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = token_of([])
    own = read_token(path)
    monkeypatch.setattr(peer_token, "find_agent", lambda run_id, host: tmp_path)
    assert token_of([""]) == path
    with pytest.raises(AgentUnavailableError, match=f"holdfast stop {URL}"):
        token_of(["t" * 32])
    assert read_token(path) == own
    # Once the agent has left, the host belongs to the new job.
    monkeypatch.setattr(peer_token, "find_agent", lambda run_id, host: None)
    token_of(["t" * 32])
    assert read_token(path) == "t" * 32
