"""What the command line tells of checkpoints that keep images of earlier ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from holdfast import open_run
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.references import remove_durable
from holdfast.engine.lifecycle.run import create_run
from holdfast.errors import StepNotFoundError
from holdfast.format.names import image_key
from tests.attempts import checkpoint_id, folder_of
from tests.cli.command_line import answer, holdfast
from tests.engine.making import RUN_ID, TIME, Made, begin, disk, flip_bit, random_array
from tests.engine.reusing import Chain
from tests.hosts import Host

FROZEN, TUNED = ("frozen",), ("tuned",)
BASE_BYTES = 4096 + 40_000 + 4000
OWN_BYTES = 4096 + 4000


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
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
    return chain


@pytest.fixture
def run(chain: Chain, tmp_path: Path) -> Path:
    assert chain.made
    return tmp_path / "run"


def reused(run: Path) -> Path:
    """The image that steps 11 and 12 reuse."""
    return run / image_key(checkpoint_id(10), 0, 1)


def test_show_tells_what_is_reused_and_what_was_written_anew(one_host: Host, run: Path) -> None:
    found = answer(one_host, "show", run, 12)
    assert found["written_bytes"] == OWN_BYTES
    assert found["size_bytes"] == OWN_BYTES + BASE_BYTES
    assert found["reused"] == [{"step": 10, "size_bytes": BASE_BYTES}]
    assert "8.1 kB; reused: 48.1 kB of step 10" in holdfast(one_host, "show", run, 12).stdout
    found = answer(one_host, "show", run, 10)
    assert (found["written_bytes"], found["reused"]) == (BASE_BYTES, [])
    assert "reused:" not in holdfast(one_host, "show", run, 10).stdout


def test_ls_and_show_count_alike_and_written_bytes_are_those_of_the_files(
    one_host: Host, run: Path
) -> None:
    rows = {row["step"]: row for row in answer(one_host, "ls", run)["checkpoints"]}
    assert {row["state"] for row in rows.values()} == {"committed"}
    for step, row in rows.items():
        shown = answer(one_host, "show", run, step)
        assert (row["size_bytes"], row["written_bytes"]) == (
            shown["size_bytes"],
            shown["written_bytes"],
        )
        images = folder_of(run, step).glob("*.safetensors")
        assert sum(path.stat().st_size for path in images) == row["written_bytes"]
    assert rows[12]["size_bytes"] == OWN_BYTES + BASE_BYTES


def test_a_folder_that_only_holds_images_for_later_checkpoints_is_no_checkpoint(
    one_host: Host, run: Path
) -> None:
    store = disk(run)
    remove_durable(store, list_checkpoints(store), [checkpoint_id(10)])
    assert [path.name for path in reused(run).parent.iterdir()] == [reused(run).name]
    found = answer(one_host, "ls", run)
    assert ([row["step"] for row in found["checkpoints"]], found["count"]) == ([11, 12], 2)
    assert answer(one_host, "verify", run)["ok"]
    assert "expected" not in holdfast(one_host, "show", run, 12).stdout
    with pytest.raises(StepNotFoundError):
        open_run(run).metadata(10)


def test_rm_without_an_agent_spares_the_images_that_later_checkpoints_reuse(
    one_host: Host, run: Path
) -> None:
    assert answer(one_host, "rm", run, 10, "--yes")["removed"]
    assert reused(run).exists()
    assert open_run(run).all_steps() == [11, 12]
    assert answer(one_host, "verify", run)["ok"]
    answer(one_host, "rm", run, 11, 12, "--yes")
    assert not reused(run).exists()


def test_who_globs_a_checkpoints_folder_meets_no_stale_array(chain: Chain, run: Path) -> None:
    """Under the name of a fresh one: as a reader with the safetensors library alone would do."""
    fresh = {}
    for step in (10, 11, 12):
        for path in folder_of(run, step).glob("*.safetensors"):
            for name, array in load_file(path).items():
                assert (step, name) not in fresh
                fresh[step, name] = array.tobytes()
    assert sorted(fresh) == [(10, "frozen"), (10, "tuned"), (11, "tuned"), (12, "tuned")]
    assert len({fresh[step, "tuned"] for step in (10, 11, 12)}) == 3
    made = {one.id.step: one for one in chain.made}
    for (step, name), data in fresh.items():
        assert made[step].arrays[name,].tobytes() == data


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_ls_sees_that_a_reused_image_is_not_whole(one_host: Host, run: Path, damage: str) -> None:
    if damage == "gone":
        reused(run).unlink()
    else:
        os.truncate(reused(run), BASE_BYTES - 1)
    for row in answer(one_host, "ls", run)["checkpoints"]:
        assert row["state"] == "damaged"
        assert image_key(checkpoint_id(10), 0, 1) in row["problem"]


def test_verify_names_the_reused_image_whose_bytes_are_bad(one_host: Host, run: Path) -> None:
    found = answer(one_host, "verify", run)
    assert found["ok"]
    # Of what is reused, the chunk that is not used is not read.
    assert found["checked_bytes"] == 3 * BASE_BYTES + 2 * OWN_BYTES - 2 * 4000
    flip_bit(reused(run), 8 * 5000)
    found = answer(one_host, "verify", run, code=1)
    problems = [(problem["step"], problem["file"]) for problem in found["problems"]]
    assert problems == [(step, str(reused(run))) for step in (10, 11, 12)]
    reused(run).unlink()
    found = answer(one_host, "verify", run, 11, code=1)
    assert [p["file"] for p in found["problems"]] == [str(reused(run))]
