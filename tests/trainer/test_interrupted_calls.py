"""An exception at any place of a call reaches the caller, ends the save, and leaves all usable."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy
from tests.hosts import Host
from tests.interruption import Interruption
from tests.trainer.slots import wait_for_a_slot

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
WAIT_SECS = 240.0
CLOSE_SECS_MAX = 30.0
STRIDES = {"save": 47, "restore": 257, "resume": 257, "close": 61, "open": 601}
"""A quick run takes one position in so many, from a place that a seed gives."""
PER_RUN = 10
KINDS = [KeyboardInterrupt, MemoryError]


@pytest.fixture(autouse=True)
def no_remains() -> Iterator[None]:
    """What an interrupted call left open is collected here, and not in another test."""
    yield
    gc.collect()


def positions(call: str, request: pytest.FixtureRequest) -> Iterable[int]:
    if request.node.get_closest_marker("soak"):
        return itertools.count(1)
    stride = STRIDES[call]
    start = random.Random(request.node.name).randrange(1, stride + 1)
    return itertools.count(start, stride)


def manager(run: Path, *, ram: bool = True) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        run,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(1),
        preservation_policy=preservation_policy.LatestN(2),
        ram=holdfast.RamTier(linger_secs=30) if ram else None,
    )


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full(16, step), "host": np.full(8, step), "n": step}


def check_state(found: dict[str, Any], step: int) -> None:
    assert found["n"] == step
    assert (np.asarray(found["w"]) == step).all()
    assert (found["host"] == step).all()


def finish(saving: holdfast.CheckpointManager) -> None:
    """Wait for what is under way; a save may have failed."""
    with contextlib.suppress(errors.SaveFailedError):
        saving.wait_until_finished(WAIT_SECS)


def go_on(saving: holdfast.CheckpointManager, step: int) -> None:
    """One more save is made, and can be restored."""
    assert saving.save(step, state(step), force=True)
    saving.wait_until_finished(WAIT_SECS)
    check_state(saving.restore(), step)


@contextlib.contextmanager
def closing(run: Path, **options: Any) -> Iterator[holdfast.CheckpointManager]:
    saving = manager(run, **options)
    try:
        yield saving
    finally:
        began = time.monotonic()
        saving.close()
        assert time.monotonic() - began < CLOSE_SECS_MAX


def sweep_saves(run: Path, kind: type[BaseException], at: Iterable[int], *, ram: bool) -> int:
    with closing(run, ram=ram) as saving:
        saving.resume(state(0))
        step = 0
        for position in at:
            if ram and position % 2:
                wait_for_a_slot(saving)
            step += 2
            interruption = Interruption(position, kind())
            made = state(step)
            interruption.run(lambda step=step, made=made: saving.save(step, made))
            finish(saving)
            go_on(saving, step + 1)
            if not interruption.has_raised:
                return position
    raise AssertionError


def sweep_restores(
    run: Path,
    kind: type[BaseException],
    at: Iterable[int],
    call: Callable[[holdfast.CheckpointManager, int], Any],
) -> int:
    left = iter(at)
    for number in itertools.count():
        # A look at the run takes more calls with each attempt, and each restore may begin one.
        with closing(run / str(number)) as saving:
            go_on(saving, 0)
            go_on(saving, 1)
            for step, position in zip(range(1, 2 * PER_RUN, 2), left, strict=False):
                interruption = Interruption(position, kind())
                interruption.run(lambda saving=saving, step=step: call(saving, step))
                finish(saving)
                # From here or from the one before, as far as the restore came.
                go_on(saving, step + 1)
                go_on(saving, step + 2)
                if not interruption.has_raised:
                    return position
    raise AssertionError


def sweep_closes(run: Path, kind: type[BaseException], at: Iterable[int]) -> int:
    for step, position in enumerate(at):
        saving = manager(run)
        assert saving.resume(state(0))[0] == step
        assert saving.save(step, state(step))
        interruption = Interruption(position, kind())
        interruption.run(saving.close)
        if step % 2:
            # Called again, it does what is left.
            began = time.monotonic()
            saving.close()
            assert time.monotonic() - began < CLOSE_SECS_MAX
        with closing(run) as second:
            start, found = second.resume(state(-1))
            assert start == step + 1
            check_state(found, step)
        if not interruption.has_raised:
            return position
    raise AssertionError


def sweep_opens(run: Path, kind: type[BaseException], at: Iterable[int]) -> int:
    for step, position in enumerate(at):
        made: list[holdfast.CheckpointManager] = []
        interruption = Interruption(position, kind())
        interruption.run(lambda made=made: made.append(manager(run)))
        for opened in made:
            opened.close()
        with closing(run) as second:
            start, found = second.resume(state(-1))
            assert start == step, interruption.place
            check_state(found, step - 1)
            assert second.save(step, state(step))
        if not interruption.has_raised:
            return position
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ram", [True, False])
def test_a_save_that_is_interrupted_ends(
    one_host: Host,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: type[BaseException],
    ram: bool,
) -> None:
    last = sweep_saves(tmp_path / "run", kind, positions("save", request), ram=ram)
    assert last > 100


@pytest.mark.parametrize(("kind", "call"), [*zip(KINDS, ["restore", "resume"], strict=True)])
def test_a_restore_that_is_interrupted_leaves_the_manager_usable(
    one_host: Host,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: type[BaseException],
    call: str,
) -> None:
    last = sweep_restores(tmp_path, kind, positions(call, request), CALLS[call])
    assert last > 100


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_close_that_is_interrupted_the_process_can_open_the_run(
    one_host: Host,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: type[BaseException],
) -> None:
    last = sweep_closes(tmp_path / "run", kind, positions("close", request))
    assert last > 30


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_open_that_is_interrupted_the_process_can_open_the_run(
    one_host: Host,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kind: type[BaseException],
) -> None:
    last = sweep_opens(tmp_path / "run", kind, positions("open", request))
    assert last > 100


def test_an_error_that_a_handler_of_logging_swallows_is_no_defect_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    importlib.import_module("multiprocessing")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log = logging.Logger("own")
    log.addHandler(logging.StreamHandler(io.StringIO()))
    for position in itertools.count(1):
        interruption = Interruption(position, MemoryError())
        interruption.run(lambda: log.warning("one of %d", 1))
        # A lock that stays held would stop all other threads that log.
        with ThreadPoolExecutor(1) as other:
            other.submit(logging.Logger("new").isEnabledFor, logging.DEBUG).result(10.0)
        if not interruption.has_raised:
            break
    assert position > 20


CALLS: dict[str, Callable[[holdfast.CheckpointManager, int], Any]] = {
    # An earlier step, so that the run branches.
    "restore": lambda saving, step: saving.restore(step - 1),
    "resume": lambda saving, step: saving.resume(state(-1)),
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ram", [True, False])
def test_a_save_that_is_interrupted_anywhere_ends(
    one_host: Host, tmp_path: Path, request: pytest.FixtureRequest, ram: bool
) -> None:
    sweep_saves(tmp_path / "run", KeyboardInterrupt, positions("save", request), ram=ram)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("call", ["restore", "resume"])
def test_a_restore_that_is_interrupted_anywhere_leaves_the_manager_usable(
    one_host: Host, tmp_path: Path, request: pytest.FixtureRequest, call: str
) -> None:
    kind = MemoryError if call == "resume" else KeyboardInterrupt
    sweep_restores(tmp_path, kind, positions(call, request), CALLS[call])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_after_a_close_that_is_interrupted_anywhere_the_process_can_open_the_run(
    one_host: Host, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sweep_closes(tmp_path / "run", KeyboardInterrupt, positions("close", request))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_after_an_open_that_is_interrupted_anywhere_the_process_can_open_the_run(
    one_host: Host, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    sweep_opens(tmp_path / "run", KeyboardInterrupt, positions("open", request))
