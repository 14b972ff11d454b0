import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.cli import verify
from holdfast.cli.findings import Copy
from holdfast.cli.main import main
from holdfast.cli.verify import merged
from holdfast.engine.reading.verify import BlockCheck
from holdfast.format.names import attempt_keys
from holdfast.format.records import Manifest, PartRecord
from holdfast.format.sealed import FORMAT_VERSION, seal, unseal
from tests.attempts import folder_of
from tests.cli.command_line import answer, holdfast, train
from tests.hosts import Host, host
from tests.manifests import manifest_path

HEADER = range(4096)
KERNEL = range(4096, 4096 + 64 * 32 * 4)


@pytest.fixture(scope="module")
def made(shared_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight checkpoints, whose agent has left with its memory."""
    directory = tmp_path_factory.mktemp("verify") / "run"
    train(shared_host, directory, steps=8, linger=0)
    holdfast(shared_host, "stop", directory)
    return directory


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to do harm to."""
    copy = tmp_path / "run"
    shutil.copytree(made, copy)
    yield copy
    shutil.rmtree(copy)


def image(run: Path, step: int = 1) -> Path:
    return folder_of(run, step) / "image-00000-of-00001.safetensors"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_sound_run_is_all_good(shared_host: Host, run: Path) -> None:
    found = answer(shared_host, "verify", run)
    assert found["ok"]
    assert found["problems"] == []
    assert [copy["step"] for copy in found["copies"]] == list(range(8))
    assert found["checked_bytes"] == sum(image(run, step).stat().st_size for step in range(8))
    assert "all good: 8 checkpoints" in holdfast(shared_host, "verify", run).stdout


@pytest.mark.parametrize(("offset", "extent"), [(100, HEADER), (5000, KERNEL)])
def test_a_flipped_byte_is_found_with_its_file_and_range(
    shared_host: Host, run: Path, offset: int, extent: range
) -> None:
    flip(image(run), offset)
    found = answer(shared_host, "verify", run, code=1)
    (problem,) = found["problems"]
    assert problem["file"] == str(image(run))
    assert (problem["start_bytes"], problem["stop_bytes"]) == (extent.start, extent.stop)
    assert (problem["step"], problem["tier"]) == (1, "durable")
    assert problem["expected"] != problem["found"]
    assert [copy["ok"] for copy in found["copies"]] == [step != 1 for step in range(8)]
    out = holdfast(shared_host, "verify", run, code=1).stdout
    assert f"{image(run)}\n    bytes [{extent.start}, {extent.stop}): wrong digest" in out
    assert problem["expected"] in out
    assert problem["found"] in out
    assert "BAD: 1 range in 1 file" in out


IMAGE = "image-00000-of-00001.safetensors"
PART = "part-00000-of-00001.json"


DAMAGES: list[tuple[Callable[[Path], Path], Callable[[Path], None]]] = [
    (lambda run: folder_of(run, 0) / IMAGE, lambda path: os.truncate(path, 5000)),
    (lambda run: folder_of(run, 1) / IMAGE, lambda path: os.truncate(path, 10**6)),
    (lambda run: folder_of(run, 2) / IMAGE, Path.unlink),
    (lambda run: folder_of(run, 3) / PART, lambda path: flip(path, 50)),
    (lambda run: folder_of(run, 4) / PART, Path.unlink),
    (lambda run: manifest_path(run, 5), lambda path: flip(path, 50)),
    (lambda run: run / "attempts/000000001.json", lambda path: flip(path, 50)),
]


def test_every_kind_of_damage_is_found(shared_host: Host, run: Path) -> None:
    files = [of_run(run) for of_run, _ in DAMAGES]
    for file, (_, harm) in zip(files, DAMAGES, strict=True):
        harm(file)
    found = answer(shared_host, "verify", run, code=1)
    assert {problem["file"] for problem in found["problems"]} == {*map(str, files)}
    # What can still be checked is checked.
    assert [copy["step"] for copy in found["copies"]] == list(range(8))
    assert [copy["step"] for copy in found["copies"] if copy["ok"]] == [6, 7]


@pytest.mark.parametrize("harm", [lambda path: flip(path, 30), Path.unlink], ids=["bad", "gone"])
def test_a_run_whose_own_record_is_bad_is_read_all_the_same(
    shared_host: Host, run: Path, harm: Callable[[Path], None]
) -> None:
    harm(run / "holdfast.json")
    found = answer(shared_host, "verify", run, code=1)
    assert [problem["file"] for problem in found["problems"]] == [str(run / "holdfast.json")]
    assert all(copy["ok"] for copy in found["copies"])
    assert len(found["copies"]) == 8


def test_a_bad_record_hides_no_bad_image(shared_host: Host, run: Path) -> None:
    flip(manifest_path(run, 0), 50)
    flip(image(run), 5000)
    flip(image(run, 2), 5000)
    found = answer(shared_host, "verify", run, code=1)
    assert len({problem["file"] for problem in found["problems"]}) == 3


def test_a_part_record_that_was_not_the_committed_one_is_bad(shared_host: Host, run: Path) -> None:
    path = image(run).with_name(PART)
    part = unseal(path.read_bytes(), PartRecord, PART)
    path.write_bytes(seal(msgspec.structs.replace(part, values=())))
    (problem,) = answer(shared_host, "verify", run, code=1)["problems"]
    assert problem["file"] == str(path)
    assert "this is not the committed record" in problem["problem"]


def test_what_a_newer_holdfast_wrote_is_not_called_damage(shared_host: Host, run: Path) -> None:
    path = manifest_path(run, 3)
    manifest = unseal(path.read_bytes(), Manifest, "manifest")
    path.write_bytes(seal(msgspec.structs.replace(manifest, format_version=FORMAT_VERSION + 1)))
    done = holdfast(shared_host, "verify", run, code=1)
    assert "step 3, attempt 1, durable: newer than this Holdfast" in done.stdout
    assert "1 file of a newer format: not checked, upgrade Holdfast" in done.stdout
    assert "BAD" not in done.stdout
    (problem,) = answer(shared_host, "verify", run, code=1)["problems"]
    assert problem["newer"]
    flip(image(run, 4), 0)
    assert "BAD" in holdfast(shared_host, "verify", run, code=1).stdout


def test_records_of_attempts_that_were_removed_are_named(shared_host: Host, run: Path) -> None:
    shutil.rmtree(run / "attempts")
    found = answer(shared_host, "verify", run, code=1)
    missing = {str(run / key) for key in attempt_keys(1)}
    assert {problem["file"] for problem in found["problems"]} == missing


def test_a_whole_checkpoint_without_its_manifest_is_read_as_a_restore_does(
    shared_host: Host, run: Path
) -> None:
    manifest_path(run, 7).unlink()
    assert [c["step"] for c in answer(shared_host, "verify", run)["copies"]] == list(range(8))
    flip(image(run, 7), 5000)
    (problem,) = answer(shared_host, "verify", run, code=1)["problems"]
    assert (problem["file"], problem["problem"]) == (str(image(run, 7)), "wrong digest")
    (problem,) = answer(shared_host, "verify", run, "7", code=1)["problems"]
    assert problem["step"] == 7


def test_a_run_that_deletes_all_that_is_read_is_listed_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deleting(copy: Copy) -> bool:
        shown.append(copy.id.step)
        return len(shown) <= gone_max

    def bad(copy: Copy) -> list[BlockCheck]:
        return [_check(0, 8)]

    shown: list[int] = []
    monkeypatch.setattr(verify, "is_gone", deleting)
    monkeypatch.setattr(verify, "check_copy", bad)
    gone_max = 8
    assert main(["verify", str(run)]) == 1
    assert "BAD: 1 range" in capsys.readouterr().out
    shown.clear()
    gone_max = 10**6
    assert main(["verify", str(run)]) == 1
    assert "nothing was checked" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_not_called_good(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    assert main(["verify", str(run)]) == 0
    assert "it has no checkpoint" in capsys.readouterr().out


def test_only_the_given_step_is_read(shared_host: Host, run: Path) -> None:
    flip(image(run), 5000)
    assert holdfast(shared_host, "verify", run, "2").stdout.startswith("step 2")
    holdfast(shared_host, "verify", run, "1", code=1)


def test_the_copy_in_ram_is_read_too(tmp_path: Path) -> None:
    with host() as own:
        run = tmp_path / "run"
        train(own, run, steps=2, linger=600)
        assert answer(own, "verify", run)["copies"][-1]["tier"] == "ram"
        (copy,) = own.folder.glob("*/ram/checkpoints/000000001.1-*/image*")
        with copy.open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff")
        (problem,) = answer(own, "verify", run, code=1)["problems"]
        assert problem["file"] == str(copy)
        assert problem["tier"] == "ram"


def _check(start: int, stop: int, key: str = "a", found: str | None = "f") -> BlockCheck:
    return BlockCheck(
        tier="durable",
        key=key,
        start_bytes=start,
        stop_bytes=stop,
        expected="e",
        found=found,
        problem="wrong digest",
    )


def test_bad_blocks_that_touch_are_one_range() -> None:
    checks = [_check(0, 8), _check(8, 16), _check(16, 20), _check(24, 32), _check(32, 40, "b")]
    ranges = [(check.key, check.start_bytes, check.stop_bytes) for check in merged(checks)]
    assert ranges == [("a", 0, 20), ("a", 24, 32), ("b", 32, 40)]
    assert next(merged(checks)).problem == "3 bad blocks"
