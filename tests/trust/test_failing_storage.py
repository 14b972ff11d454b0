"""Fail each operation of a save and of a delete, in each way in which storage fails.

The engine's calls come first, over stores whose n-th operation fails, for every n; then an agent in
this process over such stores. `test_failing_disk` runs real processes with a disk that is full,
stalls or dies.
"""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.adapt.contract import EVERYTHING
from holdfast.adapt.jax.state import JaxFramework
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.commit import commit
from holdfast.engine.reading.view import view_of
from holdfast.errors import HoldfastError, OutOfSpaceError
from holdfast.format.names import CheckpointId, manifest_key
from holdfast.policy.preservation_policy import LatestN
from holdfast.store.disk import STAGING_SIZE_BYTES, DiskStore
from holdfast.testing.block_source import BlockSource
from holdfast.trainer.restore.restoring import LoneReader, RestoredState, Restorer
from tests.engine.making import memory_folder, same_bits
from tests.manifests import manifests
from tests.store.failing_files import FailingFileSystem, FailurePlan, Fault, nothing
from tests.trust.failing_calls import CASES, NEW, OLD, Case, Noted, Place, clear, made, place_for
from tests.trust.figures import tell
from tests.trust.in_process import InProcessHost, Trainer
from tests.trust.model_host import ModelHost, check_offered, named

EIO = Fault(errno=errno.EIO)
ENOSPC = Fault(errno=errno.ENOSPC)
EINTR = Fault(errno=errno.EINTR)
LATE = Fault(errno=errno.EIO, is_done=True)
READ_ONLY = Fault(errno=errno.EROFS)
SHORT = Fault(taken_bytes=4096)

ALIGNED_MAX = 2
"""How many operations a call has more where its bytes happen to be aligned: one for each file."""

KINDS = [
    *((EIO, 1), (ENOSPC, math.inf), (LATE, 1), (SHORT, math.inf)),
    *((ENOSPC, 1), (EIO, math.inf), (EINTR, 1), (READ_ONLY, math.inf), (SHORT, 1)),
]
"""A fault, and how many operations in a row have it."""
READ_FAULTS = [EIO, SHORT, LATE, EINTR]


def test_the_file_system_fails_what_its_plan_says_and_nothing_else(tmp_path: Path) -> None:
    plan = FailurePlan(ENOSPC, at=3, operations={"write"}, path="*/.image-*")
    files = FailingFileSystem(plan)
    store = DiskStore(tmp_path, SystemClock(), files)
    blocks = [bytes(STAGING_SIZE_BYTES)] * 4
    for key in ("other", "image-0"):
        store.put(key, b"x")
    with pytest.raises(OutOfSpaceError, match="ENOSPC on purpose"):
        store.put("image-1", BlockSource(blocks))
    assert [hit.name for hit in plan.hits] == ["write"]
    assert files.open_descriptors() == {}
    assert sorted(stored.name for stored in tmp_path.iterdir()) == ["image-0", "other"]
    files.plan = short = FailurePlan(SHORT, until=math.inf, operations={"read", "write"})
    store.put("image-1", BlockSource(blocks))
    assert store.get("image-1") == b"".join(blocks)
    assert len(short.hits) >= 2 * 4 * STAGING_SIZE_BYTES // 4096


def count_operations(case: Case, root: Path) -> int:
    """How many operations the call has where nothing fails."""
    place = place_for(case, root)
    place.files.plan = plan = FailurePlan(None)
    case.call(place)
    place.files.plan = nothing
    place.close()
    shutil.rmtree(root)
    return plan.seen


def check_was_reached(plan: FailurePlan, number: int) -> None:
    """The operation came, or the call had slightly fewer of them than when they were counted.

    Bytes whose memory happens to be aligned are written directly, by an operation of their own.
    """
    assert plan.hits or number - ALIGNED_MAX <= plan.seen < number


def fail_operation(case: Case, root: Path, number: int, kind: tuple[Fault, float]) -> None:
    """Fails the operation of that number, checks what is left, and that a repeated call works."""
    fault, length = kind
    place = place_for(case, root)
    plan = FailurePlan(fault, at=number, until=number + length)
    try:
        with Noted(case.name, number, plan):
            _check_one(case, place, plan)
            check_was_reached(plan, number)
    finally:
        place.files.plan = nothing
        place.close()
    shutil.rmtree(root)


def _check_one(case: Case, place: Place, plan: FailurePlan) -> None:
    place.files.plan = plan
    try:
        case.call(place)
        has_failed = False
    except HoldfastError:
        has_failed = True
    place.files.plan = nothing
    for store in place.sound():
        place.check_reads(OLD, store)
    if has_failed:
        assert plan.fault is not SHORT, "short reads and writes just work"
        case.call(place)
    case.check(place)
    place.close()
    assert place.files.open_descriptors() == {}
    clear(place)
    assert place.left_behind() == []
    # Two parts of each checkpoint, and one that was discarded and is free.
    assert place.slot_count() <= 5
    for store in place.sound():
        place.check_reads(OLD, store)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_call_whose_nth_operation_fails_raises_or_works_and_can_be_repeated(case: Case) -> None:
    with memory_folder() as folder:
        place = Path(folder, "place")
        count = count_operations(case, place)
        # A second name for a slot takes the fewest: two.
        assert count >= 2
        for number in range(1, count + 1):
            # The soak test has every kind at every operation.
            fail_operation(case, place, number, KINDS[number % len(KINDS)])


# A restore, whose copies fail while they are read.


@dataclass(frozen=True)
class Failing:
    """What fails of a restore, and what may be restored then."""

    name: str
    path: str
    length: float
    steps: tuple[int, ...]


RESTORES = [
    Failing("one operation", "*", 1, (OLD.step, NEW.step)),
    Failing("RAM", "*/ram/*", math.inf, (NEW.step,)),
    Failing("the newest on disk", f"*/run/checkpoints/*{NEW}*", math.inf, (NEW.step,)),
    Failing("the newest everywhere", f"*/checkpoints/*{NEW}*", math.inf, (OLD.step,)),
]


def restore(place: Place) -> RestoredState:
    """As `CheckpointManager.restore()` does it in a job of one process."""
    rounds = LoneReader(rank=0, count=1, is_outside=False)
    stores = (place.ram, place.durable)
    restored = Restorer(JaxFramework(), rounds, SystemClock()).newest(
        lambda: view_of(stores, place.durable), EVERYTHING
    )
    assert restored is not None
    return restored


def restore_while(failing: Failing, root: Path, number: int, fault: Fault | None) -> int:
    """Restores while the operations from `number` on fail; returns how many there were."""
    place = place_for(CASES[0], root)
    ram, durable = place.sound()
    place.write(NEW, ram, durable)
    commit(durable, NEW, 2)
    plan = FailurePlan(fault, at=number, until=number + failing.length, path=failing.path)
    place.files.plan = plan
    try:
        with Noted(failing, number, plan):
            _check_restore(failing, place, plan)
    finally:
        ram.close()
        place.close()
    assert place.files.open_descriptors() == {}
    shutil.rmtree(root)
    return plan.seen


def _check_restore(failing: Failing, place: Place, plan: FailurePlan) -> None:
    restored = restore(place)
    one = made(restored.id)
    assert sorted(restored.state) == ["a", "b"]
    for path, array in one.arrays.items():
        assert same_bits(restored.state[path[0]], array)
    if not plan.hits:
        assert restored.id == NEW
        return
    report = restored.report
    assert restored.id.step in failing.steps or restored.id == NEW
    # A close that fails loses nothing, and a short read is read on.
    is_harmless = plan.fault is SHORT or {hit.name for hit in plan.hits} == {"close"}
    told = [*report.passed_over, *(reason for _, _, reason in report.skipped)]
    # An attempt's record has a copy, which the log names.
    is_record = all("/attempts/" in str(hit.path) for hit in plan.hits)
    assert is_harmless or is_record or told, "what was passed over is told"
    assert restored.id == NEW or [s[:2] for s in report.skipped] == [(NEW.step, NEW.attempt.number)]


@pytest.mark.parametrize("failing", RESTORES, ids=lambda failing: failing.name)
def test_a_restore_whose_nth_operation_fails_takes_the_next_copy_and_tells_it(
    failing: Failing,
) -> None:
    with memory_folder() as folder:
        root = Path(folder, "place")
        count = restore_while(failing, root, 1, None)
        assert count >= 8
        for number in range(1, count + 1):
            restore_while(failing, root, number, READ_FAULTS[number % len(READ_FAULTS)])


# An agent in this process; its trainer works, its storage fails.


@dataclass(frozen=True)
class Action:
    """What an agent is asked for while its `tier` fails."""

    name: str
    tier: str
    call: Callable[[InProcessHost, Trainer], None]


def _save(host: InProcessHost, trainer: Trainer) -> None:
    """A save, with which the policy drops the one before it."""
    host.tell_sealed(trainer, CheckpointId(2, trainer.attempt))
    host.settle()


def _save_and_lose_trainer(host: InProcessHost, trainer: Trainer) -> None:
    _save(host, trainer)
    host.kill_trainer(trainer)
    host.settle()


def _adopt(host: InProcessHost, trainer: Trainer) -> None:
    """Agent and trainer are killed after a save, and the next agent makes it durable."""
    host.crash_agent()
    host.kill_trainer(trainer)
    host.start_agent()
    host.settle()


def _delete(host: InProcessHost, trainer: Trainer) -> None:
    host.delete(1)
    host.settle()


ACTIONS = [
    Action("save", "run", _save),
    Action("save", "agent", _save_and_lose_trainer),
    Action("adopt", "run/checkpoints", _adopt),
    Action("adopt", "agent", _adopt),
    Action("delete", "run", _delete),
    Action("delete", "agent", _delete),
]


def try_action(action: Action, root: Path, plan: FailurePlan) -> None:
    """Saves step 1, does the action while `plan` holds, and saves step 3."""
    files = FailingFileSystem()
    # What fails is tried again after some time, which goes by while this host settles.
    with contextlib.closing(ModelHost(root, files=files, preserve=LatestN(1))) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 1)
        host.settle()
        if action.call is not _delete:
            host.seal(trainer, CheckpointId(2, trainer.attempt))
        files.plan = plan
        raised = None
        try:
            action.call(host, trainer)
        except HoldfastError as error:
            raised = error
        files.plan = nothing
        _check_told(host, action, raised)
        _check_next_save(host, trainer, action)
        # The next agent finds nothing that the failure left.
        host.crash_agent()
        for one in host.trainers:
            host.kill_trainer(one)
        host.start_agent()
        host.settle()
        assert _left_behind(host) == []
        host.crash_agent()
        assert files.open_descriptors() == {}


def _check_told(host: InProcessHost, action: Action, raised: HoldfastError | None) -> None:
    notices = (notice for notice in host.board.posted if notice.id is not None)
    kinds = {notice.kind: notice for notice in notices if named(notice.id) == (2, 1)}
    kinds.pop("preserved", None)
    timeline = [named(one) for one in host.look().timeline]
    if action.call is _delete:
        # It is gone, or the caller got an error and may repeat the call.
        assert raised is not None or timeline == []
        if timeline:
            host.delete(1)
        check_offered(host, [])
        return
    assert raised is None
    assert len(kinds) == 1, f"the trainer was told {kinds}"
    if "failed" in kinds and action.tier != "agent":
        assert timeline == [(1, 1), (2, 1)], "the one before stays"
    assert timeline[-1] == (2, 1), "RAM has it either way"
    check_offered(host, timeline)


def _check_next_save(host: InProcessHost, trainer: Trainer, action: Action) -> None:
    if host.agent.trainers.group is None:
        trainer = host.attach()
    last = CheckpointId(3, trainer.attempt)
    host.save(trainer, 3)
    host.settle()
    assert host.stores()[1].get(manifest_key(last))
    check_offered(host, [named(last)])
    # What a failed save or delete left takes no room any more; a hidden file or an empty folder may
    # stay until the next agent.
    kept = {key.split("/")[1] for key in _durable_keys(host)} - {"manifests"}
    assert kept == {str(last)}
    assert [*manifests(host.run).values()] == [host.run / manifest_key(last)]


def _durable_keys(host: InProcessHost) -> list[str]:
    return [stored.key for stored in host.stores()[1].list("checkpoints")]


def _left_behind(host: InProcessHost) -> list[str]:
    """What belongs to no checkpoint, in both tiers."""
    known = {"manifests", *manifests(host.run)}
    paths = (host.run / "checkpoints").iterdir()
    strangers = [path for path in paths if path.name.partition("-")[0] not in known]
    hidden = [path for root in (host.run, host.folder) for path in root.rglob(".*")]
    return [str(path) for path in strangers + hidden]


def count_action(action: Action, root: Path) -> int:
    plan = FailurePlan(None, path=f"*/{action.tier}/*")
    try_action(action, root, plan)
    shutil.rmtree(root)
    return plan.seen


@pytest.mark.parametrize(
    "action", ACTIONS, ids=lambda action: f"{action.name}, {action.tier} fails"
)
def test_an_agent_whose_nth_operation_fails_tells_it_and_makes_the_next_save(
    action: Action,
) -> None:
    with memory_folder() as folder:
        root = Path(folder, "host")
        count = count_action(action, root)
        assert count >= 4
        # The soak test has every kind at every operation.
        for number in range(1, count + 1, 2):
            fail_action(action, root, number, KINDS[number % len(KINDS)])


def fail_action(action: Action, root: Path, number: int, kind: tuple[Fault, float]) -> None:
    fault, length = kind
    plan = FailurePlan(fault, at=number, until=number + length, path=f"*/{action.tier}/*")
    with Noted(action, number, plan):
        try_action(action, root, plan)
        check_was_reached(plan, number)
    shutil.rmtree(root)


def test_an_agent_that_finds_no_storage_tells_what_is_not_durable_and_leaves() -> None:
    with memory_folder() as folder:
        files = FailingFileSystem()
        with contextlib.closing(ModelHost(Path(folder, "host"), files=files)) as host:
            host.start_agent()
            trainer = host.attach()
            host.save(trainer, 1)
            host.crash_agent()
            files.plan = FailurePlan(EIO, until=math.inf, path="*/run/[ac]*")
            host.start_agent()
            host.join(trainer, attempt=trainer.attempt)
            host.settle()
            assert host.answers() == {(1, 1): "failed"}
            host.detach(trainer)
            host.clock.sleep(host.agent.trainers.job.linger_secs)
            assert any(host.would_leave() for _ in range(10)), "it tries for ever"
            files.plan = nothing


# Each kind at each operation, in memory and on a disk.

WANTED = "every n and kind: raised or worked, repeated works, nothing lost or left"


@pytest.mark.soak
def test_every_operation_of_every_call_fails_in_every_way(tmp_path: Path) -> None:
    tried = 0
    with memory_folder() as memory:
        for case in CASES:
            for root in (Path(memory, "place"), tmp_path / "place"):
                for number in range(1, count_operations(case, root) + 1):
                    for kind in KINDS:
                        fail_operation(case, root, number, kind)
                        tried += 1
    tell("failing storage, calls", WANTED, f"{tried} of {tried}")


@pytest.mark.soak
def test_every_operation_of_every_action_of_an_agent_fails_in_every_way() -> None:
    tried = 0
    with memory_folder() as memory:
        root = Path(memory, "host")
        for action in ACTIONS:
            for number in range(1, count_action(action, root) + 1):
                for kind in KINDS:
                    fail_action(action, root, number, kind)
                    tried += 1
    wanted = "every n and kind: told once, older ones stay, the next save works"
    tell("failing storage, agent", wanted, f"{tried} of {tried}")


@pytest.mark.soak
def test_every_operation_of_a_restore_fails_in_every_way() -> None:
    tried = 0
    with memory_folder() as memory:
        root = Path(memory, "place")
        for failing in RESTORES:
            for number in range(1, restore_while(failing, root, 1, None) + 1):
                for fault in READ_FAULTS:
                    restore_while(failing, root, number, fault)
                    tried += 1
    wanted = "every n and kind: the next copy or an older one, bit for bit, and told"
    tell("failing storage, restore", wanted, f"{tried} of {tried}")
