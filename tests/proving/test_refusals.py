"""What `holdfast bisect` refuses before it replays anything, and what a full folder means."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.cli.main import main
from holdfast.observe.events.schema import StateRestored
from holdfast.proving.rewinds import rewound_to
from tests.attempts import folder_of
from tests.hosts import await_events


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 0, 5, 10, 15, 20, whose training went back from step 12 to 5."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    guard = holdfast.LossGuard(patience=4)
    state = {"w": np.zeros(8), "guard": guard}
    with holdfast.CheckpointManager(
        directory,
        ram=None,
        framework="numpy",
        guard=guard,
        save_decision_policy=save_decision_policy.FixedIntervalPolicy(5),
        preservation_policy=preservation_policy.LatestN(None),
    ) as manager:
        step, state = manager.resume(state)
        has_gone_back = False
        while step <= 20:
            if guard.rejects(step, np.nan if step == 12 and not has_gone_back else 1.0):
                step, state = manager.rewind(state)
                has_gone_back = True
                continue
            state["w"] += step
            manager.save(step, state)
            manager.wait_until_finished()
            step += 1
    await_events(directory, "trainer_left", count=1)
    return directory


def refusal(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["bisect", str(run), *options, "--", "false"]) == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert "prove" not in error
    return error


def test_a_range_within_which_the_training_went_back_is_not_replayed(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal(trained, capsys)
    assert "found that the run went back to step 5 with manager.rewind" in text
    assert text.endswith("compare what is before or after it, with --to 5 or --from 10")
    # What these options name is replayed: the program is started.
    for options in (("--to", "5"), ("--from", "10")):
        assert "found exit code 1" in refusal(trained, capsys, *options)


def test_restores_off_the_timeline_and_restarts_are_no_rewinds_of_it() -> None:
    restores = [
        StateRestored(run_attempt=attempt, step=step, attempt=1, rank=0, sources={}, secs=1, by=by)
        for attempt, step, by in [
            (1, 9, "rewind"),  # abandoned by the next one
            (2, 5, "rewind"),
            (3, 12, "resume"),
            (7, 3, "rewind"),  # of an attempt that is not on the timeline
        ]
    ]
    assert rewound_to(restores, {1: 5, 2: 12, 3: 99}) == [5]


def test_a_damaged_checkpoint_of_the_run_is_an_error_that_names_the_command_for_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (image,) = folder_of(run, 15, 2).glob("image-*")
    content = bytearray(image.read_bytes())
    content[-1] ^= 1
    image.write_bytes(content)
    for options in ((), ("--from", "15")):
        assert f"`holdfast verify {run} 15` lists the bad bytes" in refusal(run, capsys, *options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--from", "10", "--to", "5"), "expected --from before --to, found --from 10 --to 5"),
        (("--from", "12"), "a checkpoint of step 12 to replay from, found none; the nearest ones"),
        (("--from", "20"), "expected two checkpoints at least to replay between"),
    ],
    ids=["order", "no checkpoint", "one checkpoint"],
)
def test_steps_that_cannot_be_replayed_are_named(
    trained: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    error = refusal(trained, capsys, *options)
    assert error.startswith("error: bisect: ")
    assert text in error


def test_a_full_folder_is_named_with_what_chooses_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "proof"
    program = "echo $HOLDFAST_PROOF/runs/r: No space left on device; exit 1"
    assert main(["prove", "--directory", str(root), "--", "sh", "-c", program]) == 2
    text = f"{root} is full: choose a folder with more room, with TMPDIR or --directory"
    assert text in capsys.readouterr().err
