"""Agents, and whole hosts, that are killed at a request of a save, a commit or a delete.

The run is then opened on a host that has nothing of it, and held against what was acknowledged, by
the oracle of the crash states.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.store.bucket.object_service import connect
from tests.buckets import killed_run
from tests.buckets.fault_proxy import FaultProxy, Request, running_proxy
from tests.buckets.s3_server import BUCKET, S3Server, running_server
from tests.hosts import Host, host
from tests.said import Said
from tests.trust.crash_oracle import (
    KEPT_COUNT,
    Attempted,
    Attempting,
    Begun,
    Deleted,
    Deleting,
    Durable,
    Expectation,
    Id,
    Outcome,
    Seen,
    check,
)

SCRIPT = Path(killed_run.__file__)
assert killed_run.KEPT_COUNT == KEPT_COUNT
MARKS = {"begun": Begun, "durable": Durable, "deleting": Deleting, "deleted": Deleted}
REQUESTS_MAX = 200
IsDue = Callable[[int, Request], bool]


def is_counted(request: Request) -> bool:
    """Whether it belongs to a save, a commit or a delete, and is none that a run makes at times."""
    return not re.search("leases|events", request.path)


class Killer:
    """Kills processes at a request, before the server gets it or once it has answered.

    Attributes:
        pids: The processes; nothing is killed or counted while there are none.
        killed_at: The request; None until then.
        requests: Those that were counted.
    """

    def __init__(self, proxy: FaultProxy, is_due: IsDue, *, when: str) -> None:
        self.killed_at: Request | None = None
        self.requests: list[Request] = []
        self.pids: list[int] = []
        self._is_due = is_due
        self._when = when
        self._lock = threading.Lock()
        proxy.choose, proxy.on_answer = self.choose, self.answered

    def choose(self, request: Request) -> str | None:
        with self._lock:
            if not self.pids or self.killed_at is not None or not is_counted(request):
                return None
            self.requests.append(request)
            if not self._is_due(len(self.requests), request):
                return None
            self.killed_at = request
        if self._when == "before":
            self._kill()
        return f"reset {self._when}"

    def answered(self, request: Request) -> None:
        if request is self.killed_at:
            self._kill()

    def _kill(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _variables(one: Host) -> dict[str, str]:
    return {"HOLDFAST_STATE": str(one.folder / "state")}


def judged(url: str) -> tuple[Outcome, int]:
    """What a new host finds in the run and makes of it, and the step at which it goes on."""
    with host("host-b") as other:
        other.variables |= _variables(other)
        judge = Said(other.start(SCRIPT, "judge", url, stem="numpy"))
        judge.finish()
        told = judge.together()
    seen = {
        when: Seen(
            frozenset(Id(*one) for one in told[when]["readable"]),
            tuple(Id(*one) for one in told[when]["timeline"]),
        )
        for when in ("before", "adopted", "after")
    }
    origin = seen["adopted"].timeline[-1] if seen["adopted"].timeline else None
    return Outcome(
        **seen,
        newest_attempt=told["newest_attempt"],
        origin=origin,
        saved=seen["after"].timeline[-1],
        failed=(),
        left=tuple(told["left"]),
    ), told["start"]


def kill_once(
    proxy: FaultProxy, url: str, is_due: IsDue, *, who: str, when: str, hosts: int = 1
) -> Killer:
    """One run, one kill, one judgement.

    Args:
        who: `agent`, that of the last host alone, or `host`, all processes of all hosts.
        hosts: How many hosts the job has, each with one process.
    """
    killer = Killer(proxy, is_due, when=when)
    with contextlib.ExitStack() as open_hosts:
        folder = Path(open_hosts.enter_context(tempfile.TemporaryDirectory()))
        go = folder / "go"
        job = [open_hosts.enter_context(host(f"host-{number}")) for number in range(hosts)]
        trainers: list[Said] = []
        try:
            for rank, one in enumerate(job):
                one.variables |= _variables(one)
                trainers.append(
                    Said(one.start(SCRIPT, "train", url, go, folder, hosts, rank, stem="numpy"))
                )
            for trainer in trainers:
                trainer.await_line("ready")
            agents = [one.agent().pid for one in job]
            trainers_too = [trainer.process.pid for trainer in trainers]
            killer.pids += [*trainers_too, *agents] if who == "host" else agents[-1:]
            go.touch()
            for trainer in trainers:
                if who == "host":
                    trainer.wait()
                    if killer.killed_at is None:
                        assert trainer.process.returncode == 0, trainer.told()
                else:
                    trainer.finish()
        finally:
            for trainer in trainers:
                trainer.kill()
    # The hosts are gone, with their RAM.
    proxy.choose, proxy.on_answer = lambda request: None, lambda request: None
    expected = Expectation()
    for mark in (Attempting(1, None), Attempted(1)):
        expected.take(mark)
    for line in _marks_of(trainers):
        for name in line.keys() & MARKS.keys():
            expected.take(MARKS[name](Id(line[name], 1)))
    try:
        outcome, start = judged(url)
        tried = Id(killed_run.TRIED, 1)
        if tried in outcome.before.readable:
            # It became durable before the trainer could print that, and replaced an older one.
            expected.take(Durable(tried))
        assert start == (outcome.origin.step + 1 if outcome.origin else 0)
        check(outcome, expected, with_ram=False)
    except AssertionError as error:
        number = len(killer.requests)
        error.add_note(f"{who} killed {when} request {number}: {killer.killed_at}")
        for trainer in trainers:
            error.add_note(f"trainer: {trainer.told()}")
        raise
    return killer


def _marks_of(trainers: list[Said]) -> Iterator[dict]:
    """What the first rank printed, and then what others alone printed of checkpoints."""
    first, *others = trainers
    yield from first.lines
    known = {line["durable"] for line in first.said("durable")}
    for other in others:
        yield from (line for line in other.said("durable") if line["durable"] not in known)


def is_manifest(number: int, request: Request) -> bool:
    return "manifests/" in request.path and request.method == "PUT"


def is_deletion(number: int, request: Request) -> bool:
    return request.method == "DELETE" or "?delete" in request.path


@pytest.mark.parametrize(
    ("who", "when", "is_due"),
    [("agent", "after", is_manifest), ("host", "before", is_deletion)],
)
def test_a_kill_at_a_request_loses_nothing_and_leaves_nothing_half(
    who: str, when: str, is_due: IsDue, proxy: FaultProxy, proxied_url: str
) -> None:
    assert kill_once(proxy, proxied_url, is_due, who=who, when=when).killed_at is not None


@pytest.fixture
def own_server() -> Iterator[S3Server]:
    """A server of the test's own: what is deleted there takes room until it ends."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-s3-") as folder,
        running_server(Path(folder)) as server,
    ):
        yield server


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("who", ["agent", "host"])
@pytest.mark.parametrize("hosts", [1, 2])
def test_kills_at_every_request_lose_nothing_and_leave_nothing_half(
    who: str, when: str, hosts: int, own_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_proxy(own_server.port) as proxy:
        for name, value in own_server.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        # The server makes a bucket with its first object.
        connect(f"s3://{BUCKET}").put("first", [b"1"])
        kinds = set()
        for number in itertools.count(1):
            assert number < REQUESTS_MAX
            url = f"s3://{BUCKET}/killed/{who}-{when}-{hosts}-{number}"
            killer = kill_once(
                proxy,
                url,
                lambda count, _, number=number: count == number,
                who=who,
                when=when,
                hosts=hosts,
            )
            if killer.killed_at is None:
                break
            kinds.add(killer.killed_at.method)
        assert number > 15
        assert kinds >= {"PUT", "POST", "GET"}
