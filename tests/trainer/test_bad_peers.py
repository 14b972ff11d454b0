"""Peers that are cut off, slow, or have bad bytes: bounded, told, and the next source is used."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.peers.address import parse_address
from tests import network
from tests.hosts import Host, await_events, events, stop, wait_until
from tests.trainer.job import (
    Job,
    check_went_on,
    has_copies,
    lose,
    parts_in_ram,
    run_job,
    seen,
    sources,
    spin_until,
    start_job,
)

SMALL: dict[str, Any] = {"device_count": 1}
COORDINATOR = "10.123.0.1:7777"


@pytest.fixture
def net() -> Iterator[network.Network]:
    reason = network.why_not()
    if reason is not None:
        pytest.skip(reason)
    with network.network(3) as made:
        yield made


def flip(one: Host, step: int, rank: int) -> None:
    """Changes the last byte of a part's image in the host's RAM."""
    (image,) = one.folder.glob(
        f"*/ram/checkpoints/{step:09d}.1-*/image-{rank:05d}-of-*.safetensors"
    )
    with image.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def address_of(one: Host) -> str:
    """Where the host's agent serves, as messages name it."""
    serves_at = one.agent().peer_address
    assert serves_at is not None
    return parse_address(serves_at).authority


@pytest.mark.soak
def test_a_peer_with_a_bad_block_is_named_and_another_peer_is_read(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    a, b, _ = three_hosts
    run_job(three_hosts, run, **SMALL, steps=5, interval=4, copies=3, dies=True)
    wait_until(lambda: has_copies(three_hosts, 4, 3))
    lose(b)
    flip(a, 4, rank=1)
    address = address_of(a)
    found = run_job(three_hosts, run, **SMALL, steps=1, interval=100, copies=3)
    check_went_on(found, 4)
    assert set(sources(run)) <= {"ram", "peer"}
    # The new host's agent may have copied the part before its trainer reads it.
    copied = [e["reason"] for e in events(run, "copy_failed") if e["host"] == "host-b"]
    told = " ".join([*found[1]["passed_over"], *copied])
    assert f"peer {address}" in told
    assert "image-00001-of-00003" in told
    assert "digest" in told
    restored = [e for e in events(run, "restored") if e["host"] == "host-b"]
    assert restored[-1]["passed_over"] == found[1]["passed_over"]


@pytest.mark.soak
def test_a_bad_block_is_not_copied_and_the_checkpoint_before_is_gone_on_from(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    _, b, c = three_hosts
    todo = SMALL | {"interval": 10**6, "ram_interval": 4}
    job = start_job(three_hosts, run, **todo, steps=10, stand_at=4, sleep=0.1)
    wait_until(lambda: 0 in seen(run, "protected"))
    copier = c.agent().pid
    spin_until(lambda: 2 in parts_in_ram(c, 4))
    stop(copier)
    spin_until(lambda: 1 in parts_in_ram(b, 4))
    assert 1 not in parts_in_ram(c, 4)
    flip(b, 4, rank=1)
    os.kill(copier, signal.SIGCONT)
    wait_until(lambda: seen(run, "copy_failed"))
    (told,) = [e for e in events(run, "copy_failed") if e["host"] == "host-c"]
    assert (told["step"], told["rank"], told["source"]) == (4, 1, "host-b")
    assert "digest" in told["reason"]
    assert 1 not in parts_in_ram(c, 4)
    job.kill()
    check_went_on(run_job(three_hosts, run, **todo, steps=1), 0)
    skipped = [e["skipped"] for e in events(run, "restored") if e["host"] == "host-b"][-1]
    assert [step for step, *_ in skipped] == [4]


@pytest.mark.soak
@pytest.mark.slow
def test_a_cut_network_stops_no_training_and_all_hosts_save_again_once_it_is_healed(
    net: network.Network, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = start_job(
        net.hosts, run, **SMALL, address=COORDINATOR, steps=10**6, sleep=0.02, tell=True
    )
    go_on(job, run)
    net.separate(1, 2)
    wait_until(lambda: "host-b" in {e["source"] for e in events(run, "copy_failed")})
    go_on(job, run)
    net.join(1, 2)
    wait_until(lambda: 1 in parts_in_ram(net.hosts[2], max(seen(run, "protected"))))
    net.cut(2)
    steps = [newest_step(job, rank) for rank in range(3)]
    wait_until(lambda: all(newest_step(job, r) > steps[r] + 400 for r in range(3)))
    before = max(seen(run, "committed"))
    net.heal(2)
    wait_until(lambda: max(seen(run, "committed")) > before + 50)
    os.kill(job.ranks[1].process.pid, signal.SIGTERM)
    found = job.results()
    (left,) = {r["left"] for r in found}
    committed = seen(run, "committed")
    assert left in committed
    assert committed <= set.intersection(*(set(r["saved"]) for r in found))
    check_went_on(run_job(net.hosts, run, **SMALL, address=COORDINATOR, steps=1), left)


@pytest.mark.soak
@pytest.mark.slow
def test_a_host_that_a_start_hears_late_and_a_lost_host_cost_no_protected_step(
    net: network.Network, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo = SMALL | {"address": f"{net.uncut_addresses[0]}:7777", "interval": 10**6}
    job = start_job(net.hosts, run, **todo, ram_interval=4, steps=10**6, stand_at=8, sleep=0.02)
    wait_until(lambda: has_copies(net.hosts, 8) and 8 in seen(run, "protected"))
    # Nothing becomes durable now, and the only copy of the lost host's part is cut off.
    checkpoints, aside = run / "checkpoints", run / "aside"
    checkpoints.rename(aside)
    checkpoints.touch()
    net.cut(2)
    lose(net.hosts[1])
    job.kill()
    again = start_job(net.hosts, run, **todo, steps=1)
    again.wait_until(lambda: "of host host-c" in waits_for(net.hosts[0]))
    time.sleep(18)
    assert "of host host-c" in waits_for(net.hosts[0])
    checkpoints.unlink()
    aside.rename(checkpoints)
    net.heal(2)
    check_went_on(again.results(), 8)
    assert not events(run, "given_up")
    assert len(await_events(run, "attempt_started", count=2)) == 2


def waits_for(one: Host) -> str:
    """What the start on that host waits for, as its agent says."""
    return " ".join(status.waits_for for status in one.agents())


def go_on(job: Job, run: Path) -> None:
    """Waits until all ranks have come some steps further, and two more steps are committed."""
    steps = [newest_step(job, rank) for rank in range(len(job.ranks))]
    count = len(seen(run, "committed"))
    wait_until(lambda: len(seen(run, "committed")) >= count + 2)
    wait_until(lambda: all(newest_step(job, r) > step + 50 for r, step in enumerate(steps)))


def newest_step(job: Job, rank: int) -> int:
    return max((line["step"] for line in job.ranks[rank].said("step")), default=-1)


@pytest.mark.soak
def test_a_slow_peer_costs_a_bounded_wait_and_the_next_one_is_read(
    net: network.Network, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    todo = SMALL | {"address": COORDINATOR, "big_mib": 24, "big_every": 4}
    run_job(net.hosts, run, **todo, steps=5, interval=4, dies=True)
    wait_until(lambda: has_copies(net.hosts, 4))
    address = address_of(net.hosts[1])
    with net.slow(1, kilobits=2000):
        found = run_job(net.hosts, run, **todo, steps=1, interval=100)
    check_went_on(found, 4)
    assert set(sources(run)) <= {"ram", "peer"}
    assert f"peer {address}" in " ".join(found[0]["passed_over"])
