"""`open_run`: what a read-only handle answers, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy
from holdfast.adapt.contract import EVERYTHING, RestoreRequest
from holdfast.adapt.nested import NestedRestoration
from holdfast.adapt.numpy_state import NumpyFramework
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.view import View, find_newest_sound, find_sound
from holdfast.format.names import manifest_key, part_key
from holdfast.format.records import CheckpointSpec
from holdfast.trainer.opening.run_access import read_only
from holdfast.trainer.restore.restoring import (
    LoneReader,
    RestoredState,
    Restorer,
)
from tests.hosts import Host


def training(directory: Path) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        directory,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=preservation_policy.LatestN(None),
    )


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, step), "n": step}


@pytest.fixture
def run_directory(one_host: Host, tmp_path: Path) -> Path:
    with training(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), metrics={"loss": 1 / step})
            manager.wait_until_finished()
    return tmp_path / "run"


def test_a_run_is_read_as_its_manager_reads_it(run_directory: Path, one_host: Host) -> None:
    with holdfast.open_run(str(run_directory)) as run:
        assert run.directory == str(run_directory)
        assert run.run_id == json.loads((run_directory / "holdfast.json").read_text())["run_id"]
        assert (run.latest_step(), run.all_steps()) == (3, [1, 2, 3])
        assert run.restore(2)["n"] == 2
        assert run.restore(like=state(0))["w"].tolist() == [3] * 1000
        with training(run_directory) as manager:
            assert run.metadata(2) == manager.metadata(2)
            assert run.metadata() == run.metadata(run.latest_step())
            assert run.process_values(2) == manager.process_values(2) == {}
        with pytest.raises(errors.StepNotFoundError, match="find step 7"):
            run.restore(7)
        with pytest.raises(errors.StepNotFoundError):
            run.metadata(7)
        with pytest.raises(errors.InvalidArgumentError, match=r"step 1\.5"):
            run.restore(1.5)  # type: ignore[arg-type]
    for call in (run.latest_step, run.all_steps, run.restore, run.wait_for_step):
        with pytest.raises(errors.InvalidArgumentError, match="is closed"):
            call()


def test_what_is_in_ram_alone_is_read_too(one_host: Host, tmp_path: Path) -> None:
    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=save_decision_policy.FixedIntervalPolicy(10**9)
    ) as manager:
        manager.save(0, state(0))
        manager.wait_until_finished()
        run = holdfast.open_run(tmp_path / "run")
        assert run.restore()["n"] == 0
        assert run.last_restore is not None
        assert run.last_restore.sources == {"ram": 8000}


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.NotARunError):
        holdfast.open_run(tmp_path)
    with pytest.raises(errors.NotARunError):
        holdfast.load(tmp_path / "missing")
    with pytest.raises(errors.InvalidArgumentError):
        holdfast.open_run("")


def test_waiting_returns_the_newest_step_or_ends_in_time(run_directory: Path) -> None:
    with holdfast.open_run(run_directory) as run:
        assert run.wait_for_step() == 3
        assert run.wait_for_step(after=1, timeout_secs=0) == 3
        started = time.monotonic()
        with pytest.raises(errors.WaitTimeoutError, match=r"a step after 3 .* newest one is 3"):
            run.wait_for_step(after=3, timeout_secs=0.2)
        assert 0.2 <= time.monotonic() - started < 20
        found: list[int] = []
        waiter = threading.Thread(
            target=lambda: found.append(run.wait_for_step(after=3, timeout_secs=240))
        )
        waiter.start()
        with training(run_directory) as manager:
            manager.save(9, state(9), force=True)
            manager.wait_until_finished()
        waiter.join(60)
        assert found == [9]


class DeletingRun:
    """A run whose newest checkpoint of the moment is deleted right after each of some listings."""

    def __init__(self, run: ReadableRun, count: int) -> None:
        self._run, self._left = run, count

    def load_view(self) -> View:
        view = self._run.load_view()
        if self._left and view.timeline:
            self._left -= 1
            newest = view.timeline[-1]
            remove(self._run.durable, newest, list_checkpoints(self._run.durable)[newest])
        return view


def without_ram(directory: Path) -> ReadableRun:
    run = read_only(directory)
    return ReadableRun(location=run.location, run_id=run.run_id, durable=run.durable)


class OvertakenRun:
    """A run that is listed first when it has its oldest checkpoint alone, which is deleted then."""

    def __init__(self, run: ReadableRun) -> None:
        self._run, self._is_first = run, True

    def load_view(self) -> View:
        view = self._run.load_view()
        if not self._is_first:
            return view
        self._is_first = False
        oldest = view.timeline[0]
        remove(self._run.durable, oldest, list_checkpoints(self._run.durable)[oldest])
        listings = {name: {oldest: held[oldest]} for name, held in view.listings.items()}
        return replace(view, listings=listings, timeline=(oldest,))


def test_a_checkpoint_that_is_deleted_after_it_was_listed_is_not_the_newest(
    run_directory: Path,
) -> None:
    newest = find_newest_sound(DeletingRun(without_ram(run_directory), 1).load_view)
    assert newest is not None
    assert newest.step == 2
    newest = find_newest_sound(OvertakenRun(without_ram(run_directory)).load_view)
    assert newest is not None
    assert newest.step == 2


def test_a_run_that_deletes_all_that_was_listed_is_listed_again(run_directory: Path) -> None:
    assert [c.step for c in find_sound(OvertakenRun(without_ram(run_directory)).load_view)] == [
        2,
        3,
    ]
    found = restored(OvertakenRun(without_ram(run_directory)))
    assert found is not None
    assert found.report.step == 3


def restored(deleting: DeletingRun | OvertakenRun, step: int | None = None) -> RestoredState | None:
    look, framework, rounds = deleting.load_view, NumpyFramework(), LoneReader()
    if step is None:
        return Restorer(framework, rounds, SystemClock()).newest(look, EVERYTHING)
    return Restorer(framework, rounds, SystemClock()).step(look, step, EVERYTHING)


def test_a_restore_goes_on_to_the_newest_that_is_left(run_directory: Path) -> None:
    found = restored(DeletingRun(without_ram(run_directory), 1))
    assert found is not None
    assert (found.report.step, found.report.skipped) == (2, ())
    with pytest.raises(errors.StepNotFoundError, match="find step 2"):
        restored(DeletingRun(without_ram(run_directory), 1), step=2)
    assert restored(DeletingRun(without_ram(run_directory), 9)) is None


def test_a_step_that_may_be_in_a_remote_tier_that_cannot_be_read_is_not_called_missing(
    run_directory: Path,
) -> None:
    def find_remote() -> None:
        raise errors.StorageUnreachableError("s3://bucket/run does not answer")

    run = replace(without_ram(run_directory), find_remote=find_remote)
    assert run.find_sources(3).id.step == 3
    with pytest.raises(errors.StorageUnreachableError, match=r"find step 7.*s3://bucket/run"):
        run.find_sources(7)


@dataclass(frozen=True, kw_only=True)
class VanishingRun(ReadableRun):
    """A run that deletes the newest checkpoint while it is read: its manifest, then a record."""

    looks: list[View] = field(default_factory=list)

    def load_view(self) -> View:
        view = super().load_view()
        self.looks.append(view)
        if len(self.looks) == 1:
            self.durable.delete(manifest_key(view.timeline[-1]))
        elif len(self.looks) == 2:
            self.durable.delete(part_key(view.timeline[-1], 0, 1))
            # The record of another rank, which is deleted later.
            self.durable.put(part_key(view.timeline[-1], 1, 2), b"{}")
        return view


def vanishing(run: ReadableRun) -> VanishingRun:
    return VanishingRun(location=run.location, run_id=run.run_id, durable=run.durable)


@pytest.mark.parametrize("call", ["metadata", "process_values", "restore"])
def test_a_step_that_is_deleted_while_it_is_read_is_not_damaged(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with holdfast.open_run(run_directory) as run:
        monkeypatch.setattr(run, "_run", vanishing(without_ram(run_directory)))
        with pytest.raises(errors.StepNotFoundError, match="find step 3: it was deleted meanwhile"):
            getattr(run, call)(3)


def test_a_record_that_is_missing_for_good_is_damage(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", state(0))
    (record,) = (tmp_path / "a" / "checkpoints").glob("*/part-*.json")
    record.unlink()
    with holdfast.open_run(tmp_path / "a") as run:
        for call in (run.metadata, run.process_values, run.restore):
            with pytest.raises(errors.CheckpointDamagedError, match="no good copy of part 0"):
                call(0)


@pytest.fixture
def public_place() -> Iterator[Path]:
    """A folder that other users may read, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


@contextlib.contextmanager
def denied(folder: Path) -> Iterator[None]:
    """Denies this process the folder; the superuser, who may read all, acts as another user."""
    uid, mode = os.geteuid(), folder.stat().st_mode
    folder.chmod(0)
    os.seteuid(uid or 65534)
    try:
        yield
    finally:
        os.seteuid(uid)
        folder.chmod(mode)


def test_ram_that_this_user_may_not_read_is_skipped(
    one_host: Host, public_place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    holdfast.save(public_place / "a", {"n": 1})
    with holdfast.open_run(public_place / "a") as run:
        run.restore()
        agents = one_host.folder / f"{run.run_id}-{one_host.name}"
        (agents / "ram").mkdir(parents=True)
    one_host.folder.chmod(0o755)
    with denied(agents), holdfast.open_run(public_place / "a") as run:
        assert run.wait_for_step(timeout_secs=0) == 0
        assert run.restore() == {"n": 1}
    assert caplog.text.count("belongs to another user") == 1


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_folder_of_the_run_that_may_not_be_read_is_named(public_place: Path, name: str) -> None:
    directory = public_place / "a"
    holdfast.save(directory, {"n": 1})
    folder = directory / name
    expected = rf" {folder}: Permission denied \(errno 13\); check its permissions"
    with holdfast.open_run(directory) as run:
        run.restore()
        calls: list[Callable[[], object]] = [
            lambda: holdfast.load(directory),
            run.latest_step,
            run.all_steps,
            run.restore,
            lambda: run.restore(0),
            lambda: run.metadata(0),
            lambda: run.process_values(0),
            run.wait_for_step,
        ]
        with denied(folder):
            for call in calls:
                with pytest.raises(errors.StorageError, match=expected):
                    call()


class BorrowingFramework(NumpyFramework):
    """Takes memory that a store lends, and counts how often it did."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[np.ndarray] = []

    def restoration(self, spec: CheckpointSpec, request: RestoreRequest) -> NestedRestoration:
        made = NestedRestoration(spec, request)
        made.targets = [target._replace(take=self.taken.append) for target in made.targets]
        return made


def test_memory_of_the_run_is_copied_and_not_borrowed(run_directory: Path) -> None:
    look = read_only(run_directory).load_view
    framework = BorrowingFramework()
    found = Restorer(framework, LoneReader(), SystemClock()).newest(look, EVERYTHING)
    assert found is not None
    assert found.report.sources == {"ram": 8000}
    assert not framework.taken
    # A process of the job borrows it.
    own = LoneReader(is_outside=False)
    assert Restorer(framework, own, SystemClock()).newest(look, EVERYTHING) is not None
    assert len(framework.taken) == 1


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for call in (holdfast.open_run, holdfast.load):
        with pytest.raises(errors.StorageError, match=r"found a symbolic link to .*/gone, which"):
            call(tmp_path / "link")


def test_a_reader_of_a_replaced_directory_is_told_to_open_it_again(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "saved", {"w": np.ones(3)})
    with holdfast.open_run(tmp_path / "saved") as run:
        holdfast.save(tmp_path / "saved", {"w": np.zeros(3)}, overwrite=True)
        with pytest.raises(errors.StorageError, match="open the run again") as caught:
            run.restore()
    assert "stop this process" not in str(caught.value)
