"""What the command line tells of checkpoints that keep images of earlier ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.engine.lifecycle.run import create_run
from tests.cli.command_line import answer, holdfast
from tests.engine.making import RUN_ID, TIME, Made, begin, disk, flip_bit, random_array
from tests.engine.reusing import Chain
from tests.hosts import Host

FROZEN, TUNED = ("frozen",), ("tuned",)
BASE_BYTES = 4096 + 40_000 + 4000
OWN_BYTES = 4096 + 4000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10, 11 and 12; the last two keep the image of the first."""
    store = disk(tmp_path / "run")
    create_run(store, "run", RUN_ID, TIME)
    begin(store, None)
    made = Made()
    made.add(FROZEN, random_array((10_000,), "float32", 1))
    made.add(TUNED, random_array((1000,), "float32", 2))
    chain = Chain()
    chain.begin(made, store)
    for step in (11, 12):
        chain.go_on(store, [TUNED], step)
    for one in chain.made:
        chain.commit(store, one)
    return tmp_path / "run"


def kept(run: Path, step: int) -> Path:
    name = "image-00000-of-00001.from-000000010.1.safetensors"
    return run / "checkpoints" / f"{step:09d}.1" / name


def test_show_tells_what_is_kept_and_what_was_written_anew(one_host: Host, run: Path) -> None:
    found = answer(one_host, "show", run, 12)
    assert found["written_bytes"] == OWN_BYTES
    assert found["size_bytes"] == OWN_BYTES + BASE_BYTES
    assert found["kept"] == [{"step": 10, "size_bytes": BASE_BYTES}]
    assert "8.1 kB; kept: 48.1 kB of step 10" in holdfast(one_host, "show", run, 12).stdout
    found = answer(one_host, "show", run, 10)
    assert (found["written_bytes"], found["kept"]) == (BASE_BYTES, [])
    assert "kept:" not in holdfast(one_host, "show", run, 10).stdout


def test_ls_counts_an_image_where_it_was_written(one_host: Host, run: Path) -> None:
    rows = {row["step"]: row for row in answer(one_host, "ls", run)["checkpoints"]}
    assert {row["state"] for row in rows.values()} == {"committed"}
    files = {path.stat().st_ino: path for path in (run / "checkpoints").rglob("*.*")}
    on_disk = sum(path.stat().st_size for path in files.values() if path.is_file())
    assert sum(row["size_bytes"] for row in rows.values()) == on_disk
    assert rows[10]["size_bytes"] > BASE_BYTES > 2 * rows[12]["size_bytes"]


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_ls_sees_that_a_kept_image_is_not_whole(one_host: Host, run: Path, damage: str) -> None:
    if damage == "gone":
        kept(run, 12).unlink()
    else:
        os.truncate(kept(run, 12), BASE_BYTES - 1)
    rows = {row["step"]: row for row in answer(one_host, "ls", run)["checkpoints"]}
    assert rows[12]["state"] == "damaged"
    assert "the images that rank 0 reuses have" in rows[12]["problem"]
    # What is cut off is so under all of its names.
    assert rows[11]["state"] == ("committed" if damage == "gone" else "damaged")


def test_verify_names_the_kept_image_whose_bytes_are_bad(one_host: Host, run: Path) -> None:
    found = answer(one_host, "verify", run)
    assert found["ok"]
    # Of what is kept, the chunk that is not used is not read.
    assert found["checked_bytes"] == 3 * BASE_BYTES + 2 * OWN_BYTES - 2 * 4000
    flip_bit(kept(run, 12), 8 * 5000)
    found = answer(one_host, "verify", run, code=1)
    own = run / "checkpoints/000000010.1/image-00000-of-00001.safetensors"
    assert [problem["file"] for problem in found["problems"]] == [
        str(own),
        str(kept(run, 11)),
        str(kept(run, 12)),
    ]
    kept(run, 11).unlink()
    found = answer(one_host, "verify", run, 11, code=1)
    assert [p["file"] for p in found["problems"]] == [str(kept(run, 11))]
