"""Cut the power: the disk keeps what was flushed, and any part of the rest; all else is gone.

See `power_disk` for what a cut leaves, and `power_rig` for what is required of it. The seed
determines after how many requests to the disk each cut comes, what survives it, and what the
trainer does; what the cut interrupts depends on the machine's timing.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trust import power_rig
from tests.trust.figures import tell
from tests.trust.power_disk import SECTOR_SIZE_BYTES, Cuts, Disk
from tests.trust.power_rig import Setting, cut_run, problems_of

SEED = 20261121

SETTINGS = [
    Setting("data=ordered,commit=1"),
    Setting("data=ordered", ram=False),
    Setting("data=writeback,commit=1"),
    Setting("data=ordered,nodelalloc", ram=False),
    Setting("data=journal"),
]


@functools.cache
def _why_not() -> str | None:
    return power_rig.why_not()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where images lie; they are large, so none stays."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    made = tmp_path / "power"
    made.mkdir()
    yield made
    for image in made.rglob("*.img"):
        image.unlink()


def rounds(cuts: int, each: int) -> Iterator[tuple[int, Setting, int]]:
    """Rounds of `each` cuts, of every setting in turn."""
    for number, setting in zip(itertools.count(), itertools.cycle(SETTINGS)):
        if number * each >= cuts:
            return
        yield number, setting, min(each, cuts - number * each)


@pytest.mark.parametrize(
    ("cuts", "each", "gap"), [(1, 1, 200), pytest.param(50, 10, 200, marks=pytest.mark.soak)]
)
def test_a_cut_of_the_power_costs_nothing_that_was_acknowledged(
    cuts: int, each: int, gap: int, folder: Path
) -> None:
    seen: Counter[str] = Counter()
    broken = []
    for number, setting, count in rounds(cuts, each):
        for told, problems in checked(folder / str(number), setting, number, count, gap):
            seen.update(told)
            broken += problems
    under_way = {kind: seen[kind] for kind in ("save", "overwrite", "go back", "delete")}
    said = (
        f"{seen['cut']} cuts, {len(broken)} broken; {sum(under_way.values())} fell into an action "
        f"({', '.join(f'{kind}: {n}' for kind, n in under_way.items())}), "
        f"{seen['acknowledged']} after one was acknowledged, {seen['lost']} lost unflushed writes"
    )
    print(said)
    assert not broken, "\n".join(broken)
    assert seen["cut"] == cuts
    if cuts >= 50:
        assert sum(under_way.values()) >= cuts / 2
        assert seen["acknowledged"] >= cuts / 2
        assert seen["lost"] >= cuts / 5
        tell("power loss", "50 cuts, 0 broken", said)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(4))
def test_a_cut_while_a_run_is_made_leaves_a_run_or_none(number: int, folder: Path) -> None:
    found = checked(folder / str(number), SETTINGS[number], 1000 + number, 6, 8)
    broken = [problem for _, problems in found for problem in problems]
    assert not broken, "\n".join(broken)


@pytest.mark.soak
@pytest.mark.parametrize(
    "setting",
    [
        Setting("data=ordered", not_synced="everything"),
        Setting("data=ordered", not_synced="folders"),
        Setting("data=ordered", not_synced="files"),
        Setting("data=ordered,barrier=0"),
    ],
    ids=["nothing is synced", "no folder is synced", "no file is synced", "nothing is flushed"],
)
def test_what_does_not_sync_is_caught(setting: Setting, folder: Path) -> None:
    """The control: the same cuts, asked the same, where less is done than is needed."""
    for number in range(3):
        for _, problems in checked(folder / str(number), setting, number, 20, 200):
            if problems:
                print("caught:", problems[0])
                return
    raise AssertionError("60 cuts broke nothing; these tests would not see a missing sync")


@pytest.mark.parametrize("seed", range(30))
def test_the_disk_keeps_what_was_flushed_and_makes_nothing_up(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk itself: each sector is left as it was when last flushed, or as a later write did."""
    image = tmp_path / "new.img"
    image.write_bytes(bytes(8 * SECTOR_SIZE_BYTES))
    disk, cuts, chance = Disk(image, tmp_path), Cuts(str(seed), 1, 1), random.Random(seed)
    legal = {sector: {0} for sector in range(8)}
    newest = dict.fromkeys(legal, 0)
    for value in range(1, 20):
        first = chance.randrange(7)
        disk.write(first * SECTOR_SIZE_BYTES, bytes([value]) * (2 * SECTOR_SIZE_BYTES))
        for sector in (first, first + 1):
            legal[sector].add(value)
            newest[sector] = value
        if chance.random() < 0.2:
            disk.flush()
            legal = {sector: {value} for sector, value in newest.items()}
    disk.cut(cuts)
    line = json.loads(capsys.readouterr().out)
    left = Path(line["image"]).read_bytes()
    for sector, values in legal.items():
        data = left[sector * SECTOR_SIZE_BYTES : (sector + 1) * SECTOR_SIZE_BYTES]
        assert data in [bytes([value]) * SECTOR_SIZE_BYTES for value in values], f"seed {seed}"
        now = disk.read(sector * SECTOR_SIZE_BYTES, SECTOR_SIZE_BYTES)
        assert now == bytes([newest[sector]]) * SECTOR_SIZE_BYTES


def checked(
    place: Path, setting: Setting, number: int, count: int, gap: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Cuts one run's power; for each cut, words to count it by, and what was not as promised."""
    seed = f"{SEED} {number}"
    place.mkdir()
    cuts, actions = cut_run(place, setting, seed, count, gap)
    for at, cut in enumerate(cuts):
        possible, sure = actions.at(cut)
        problems = problems_of(cut, actions, setting, place / f"after-{at}")
        print(f"seed {seed}, cut {at}, {setting}, {cut}:", problems or "nothing lost")
        told = ["cut", *(action["kind"] for action in possible[1:2])]
        told += ["acknowledged"] * (sure > 0) + ["lost"] * (cut.lost > 0)
        yield told, [f"seed {seed}, cut {at}: {problem}" for problem in problems]
