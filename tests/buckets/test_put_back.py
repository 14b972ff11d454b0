"""Put objects of a run back to earlier versions: delete newer ones, write replaced ones again.

Each checkpoint's state says in which training it was made, so that a mix of two is seen.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.errors import HoldfastError, RunBusyError
from holdfast.store.location import open_durable
from tests.hosts import Host
from tests.said import Said
from tests.trainer.job import some_hosts

EARLIER, LATER, OTHER, LAST = 1.0, 2.0, 3.0, 4.0
"""The trainings: before the versions that are put back, after them, elsewhere, and at the end."""


@pytest.fixture(params=["bucket", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    is_bucket = request.param == "bucket"
    return request.getfixturevalue("url") if is_bucket else str(tmp_path / "run")


def state_of(step: int, training: float) -> dict:
    return {"w": np.full(1000, float(step)), "made_by": np.full(10, training)}


def train(place: str, training: float, count: int, **options: object) -> tuple[int, float]:
    """Resume, save some steps; return the first step and which training the checkpoint is of."""
    with CheckpointManager(place, **options) as manager:
        start, state = manager.resume(state_of(-1, 0.0))
        assert (state["w"] == start - 1).all()
        origin = set(state["made_by"].tolist())
        assert len(origin) == 1, origin
        for step in range(start, start + count):
            assert manager.save(step, state_of(step, training), force=True)
            manager.wait_until_finished()
    return start, origin.pop()


def keys(place: str) -> list[str]:
    if place.startswith("s3:"):
        return list(open_durable(place, SystemClock()).all_keys())
    root = Path(place)
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def versions(place: str) -> dict[str, bytes]:
    store = open_durable(place, SystemClock())
    return {key: store.get(key) for key in keys(place)}


def put_back(place: str, earlier: dict[str, bytes], prefix: str = "") -> None:
    store = open_durable(place, SystemClock())
    store.delete(*(key for key in keys(place) if key.startswith(prefix) and key not in earlier))
    for key, data in earlier.items():
        if key.startswith(prefix):
            store.put(key, data)


def check_sound(place: str, trainings: set[float]) -> None:
    """Check that each listed step is whole, and of one of these trainings."""
    with holdfast.open_run(place) as run:
        for step in run.all_steps():
            state = run.restore(step)
            assert (state["w"] == step).all()
            assert set(state["made_by"].tolist()) <= trainings
    assert main(["verify", place]) == 0


def test_a_run_that_was_put_back_goes_on_from_the_earlier_newest_step(
    one_host: Host, place: str
) -> None:
    train(place, EARLIER, 3)
    earlier = versions(place)
    assert train(place, LATER, 3) == (3, EARLIER)
    put_back(place, earlier)
    assert train(place, LAST, 3) == (3, EARLIER)
    check_sound(place, {EARLIER, LAST})


def test_ram_of_a_training_that_was_put_back_is_never_mixed_with_another(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with some_hosts(2) as (first, other):
        on_host(monkeypatch, first)
        train(place, EARLIER, 3)
        earlier = versions(place)
        later = Said(first.start(__file__, place, stem="numpy"))
        later.await_line("trained")
        # A living trainer would start another agent, which frees the RAM of a run that is gone.
        later.kill()
        first.kill_agents()
        put_back(place, earlier)
        on_host(monkeypatch, other)
        assert train(place, OTHER, 2, takeover=True) == (3, EARLIER)
        on_host(monkeypatch, first)
        assert list(first.folder.glob("*/ram/checkpoints/*")), "RAM of the other training is there"
        assert train(place, LAST, 2, takeover=True) == (5, OTHER)
        check_sound(place, {EARLIER, OTHER, LAST})


@pytest.mark.soak
@pytest.mark.parametrize("prefix", ["attempts/", "checkpoints/", "holdfast.json", "leases/"])
def test_a_run_of_which_a_part_was_put_back_is_sound(
    one_host: Host, place: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(place, EARLIER, 3)
    earlier = versions(place)
    train(place, LATER, 3)
    put_back(place, earlier, prefix)
    if prefix == "attempts/":
        # Preservation has removed the earlier steps, and no record names the later training.
        with pytest.raises(RunBusyError, match="step 5 of attempt 2 committed and no record of"):
            train(place, LAST, 2)
        assert train(place, LAST, 8, takeover=True) == (0, 0.0)
        assert "step 5 of attempt 2 was committed, and the run continues without it" in caplog.text
    else:
        assert train(place, LAST, 2) in {(3, EARLIER), (6, LATER)}
    check_sound(place, {EARLIER, LATER, LAST})


def test_a_run_that_is_put_back_under_its_training_stays_sound(one_host: Host, place: str) -> None:
    train(place, EARLIER, 3)
    earlier = versions(place)
    with contextlib.suppress(HoldfastError), CheckpointManager(place) as manager:
        manager.resume(state_of(-1, 0.0))
        for step in range(3, 9):
            if step == 5:
                put_back(place, earlier)
            manager.save(step, state_of(step, LATER), force=True)
            manager.wait_until_finished()
    one_host.kill_agents()
    start, origin = train(place, LAST, 2, takeover=True)
    assert (start, origin) == (3, EARLIER) or (start > 5 and origin == LATER)
    check_sound(place, {EARLIER, LATER, LAST})


def on_host(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    """Let this process be on a host."""
    monkeypatch.setenv("HOLDFAST_RAM", str(host.folder))
    monkeypatch.setenv("HOLDFAST_HOST", host.name)


def train_later(place: str) -> None:
    """Train, and wait to be killed; what another process runs."""
    manager = CheckpointManager(place)
    start, _ = manager.resume(state_of(-1, 0.0))
    for step in range(start, start + 3):
        manager.save(step, state_of(step, LATER), force=True)
        manager.wait_until_finished()
    print('{"trained": true}', flush=True)
    signal.pause()


if __name__ == "__main__":
    train_later(sys.argv[1])
