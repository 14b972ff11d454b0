"""Whole proofs of NumPy programs: identical, different, and programs that cannot be judged."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.cli.command_line import INTERRUPTIBLE, answer
from tests.hosts import Host, host, is_running, wait_until
from tests.proving.proofs import EXAMPLES, proof_of

PROGRAM = EXAMPLES / "numpy_training.py"


@pytest.fixture(scope="module")
def shared_host() -> Iterator[Host]:
    with host() as made:
        yield made


def test_a_training_is_the_same_with_each_kind_of_kill(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    proof = proof_of(shared_host, tmp_path, PROGRAM, stem="numpy")
    assert proof["identical"], proof
    assert {kill["kind"] for kill in proof["kills"]} == {"sigkill", "sigterm", "host"}
    assert proof["steps"][-1] == 29
    assert proof["compared_bytes"] == 800 * len(proof["steps"])
    assert proof["metrics"] >= len(proof["steps"]) - 1
    # The real run, and everything else in the program's folder, is left alone.
    assert [path.name for path in tmp_path.iterdir()] == ["proof"]


def test_a_random_state_that_is_not_in_the_state_is_the_first_difference_and_its_cause(
    shared_host: Host, tmp_path: Path
) -> None:
    options = {"kill_count": 1, "every": 1}
    proof = proof_of(shared_host, tmp_path, PROGRAM, "--careless", stem="numpy", **options)
    assert not proof["identical"]
    assert proof["deterministic"]
    first = proof["first_difference"]
    (kill,) = proof["kills"]
    # The step of a preemption is still saved as it was without a kill.
    assert first["step"] == kill["step"] + (kill["kind"] == "sigterm")
    assert first["differences"][0]["text"].startswith("w: 100 of 100 elements differ, by at most")
    assert first["differences"][-1]["kind"] == "metric"
    (cause,) = proof["causes"]
    assert cause["name"] == "a random state that is not in the state"
    assert "NumPy's global generator" in cause["reason"]


def program(folder: Path, body: str) -> Path:
    path = folder / "train.py"
    path.write_text(f"import os\nimport numpy as np\nimport holdfast\n{body}")
    return path


SAVING = (
    "with holdfast.CheckpointManager({run!r}, framework='numpy') as manager:\n"
    "    start, state = manager.resume({state})\n"
    "    for step in range(start, {steps}):\n"
    "        manager.save(step, state)\n"
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("np.save('weights.npy', np.ones(3))\n", "expected a program that opens a holdfast.Check"),
        (SAVING.format(run="r", state={"w": 1}, steps=1), "the program ends before a kill"),
        (
            "import sys\nprint('no data', file=sys.stderr)\nprint('at all')\nraise SystemExit(3)\n",
            "exit code 3",
        ),
        (
            SAVING.format(run="a", state={"w": 1}, steps=2)
            + SAVING.format(run="b", state={"w": 1}, steps=2),
            "expected one manager, found managers of 2 directories",
        ),
        (
            "with holdfast.CheckpointManager('r', framework='numpy') as manager:\n"
            "    for step in range(4):\n"
            "        manager.save(step, {'w': np.ones(3)})\n",
            "StepExistsError",
        ),
        (
            SAVING.format(run="r", state={"w": 1}, steps=20) + "    manager.finish(19, state)\n",
            "the program trained on to its end after SIGTERM",
        ),
    ],
    ids=["no manager", "one step", "fails", "two managers", "no resume", "ignores SIGTERM"],
)
def test_a_program_that_cannot_be_judged_is_named(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = program(tmp_path, body)
    proof = proof_of(shared_host, tmp_path, path, stem="numpy", kill_count=1)
    assert text in f"{proof.get('message', proof)} {proof.get('output')}"
    if "exit code" in text:
        assert proof["output"][-1] == "at all", proof


def test_a_program_that_reads_the_real_run_before_it_trains_is_named(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = (
        "try:\n"
        "    with holdfast.open_run('r') as run: print(run.latest_step())\n"
        "except holdfast.errors.NotARunError: print('none')\n"
    ) + SAVING.format(run="r", state={"w": 1}, steps=4)
    path = program(tmp_path, body)
    proof = proof_of(shared_host, tmp_path, path, stem="numpy", kill_count=1)
    assert proof.get("identical"), proof
    with holdfast.CheckpointManager("r", ram=None, framework="numpy") as manager:
        manager.save(7, {"w": 1})
    shutil.rmtree(tmp_path / "proof")
    proof = proof_of(shared_host, tmp_path, path, stem="numpy", kill_count=1)
    assert "before it reads the run there" in " ".join(proof["output"]), proof


def test_a_program_that_hangs_is_named_with_its_step(
    shared_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hanging = "        while step == 3: __import__('time').sleep(60)\n"
    path = program(tmp_path, SAVING.format(run="r", state={"w": 1}, steps=9) + hanging)
    proof = proof_of(shared_host, tmp_path, path, stem="numpy", timeout_secs=5)
    text = "uninterrupted: expected a new step within 5 s, found rank 0 at step 3: it hangs"
    assert text in proof["message"]
    opening = json.loads((tmp_path / "proof/uninterrupted/openings-0.jsonl").read_text())
    assert not is_running(opening["pid"])


def test_what_a_killed_proof_leaves_is_removed_once_its_program_has_ended(tmp_path: Path) -> None:
    path = program(tmp_path, SAVING.format(run="r", state={"w": 1}, steps=10**9))
    with host() as own:
        own.variables["TMPDIR"] = str(tmp_path)
        proof = own.start("-m", "holdfast", "prove", "--", sys.executable, path)
        openings = "holdfast-proof-*/uninterrupted/openings-0.jsonl"
        wait_until(lambda: any(agent.trainers for agent in own.agents()))
        (opened,) = tmp_path.glob(openings)
        proof.kill()
        proof.wait(240)
        pid = json.loads(opened.read_text())["pid"]
        wait_until(lambda: not is_running(pid))
        log = (opened.parent / "output.log").read_text()
        assert "found that it has ended; so this program ends too" in log
        # Its agent writes into the folder until it has left.
        found: dict[str, str] = {}

        def is_found() -> bool:
            rows = answer(own, "clean", "--yes")["found"]
            found.update((row["folder"], row["reason"]) for row in rows)
            return str(opened.parents[1]) in found

        wait_until(is_found)
        assert found[str(opened.parents[1])] == "left by a killed `holdfast prove` or `bisect`"
        assert not opened.parents[1].exists()


def test_randomness_without_a_seed_is_told_from_a_bad_restart(
    shared_host: Host, tmp_path: Path
) -> None:
    path = program(
        tmp_path, SAVING.format(run="r", state="{'w': np.random.normal(size=3)}", steps=4)
    )
    proof = proof_of(shared_host, tmp_path, path, stem="numpy", kill_count=1)
    assert (proof["identical"], proof["deterministic"]) == (False, False)
    assert proof["first_difference"]["step"] == 0
    assert proof["causes"][0]["name"] == "unseeded randomness from the start"
    assert "numpy.random.seed(0)" in proof["causes"][0]["cure"]


NOT_OPEN = """
import os, signal, time, holdfast.trainer.parts as parts
signal.signal(signal.SIGINT, lambda number, frame: os._exit(1))
join = parts.AgentSession
parts.AgentSession = lambda *given: (join(*given), time.sleep(600))
"""
"""A process that joins its agent, and ends at once before its opening is complete."""


@pytest.mark.parametrize("begin", ["", NOT_OPEN], ids=["training", "opening"])
def test_an_interrupted_proof_leaves_no_process_behind(
    shared_host: Host, tmp_path: Path, begin: str
) -> None:
    body = SAVING.format(run="r", state={"w": 1}, steps=10**9)
    path = program(tmp_path, begin + body)
    command = ["prove", "--directory", tmp_path / "proof", "--", sys.executable, path]
    process = shared_host.start("-c", INTERRUPTIBLE, *command, stem="commands")
    openings = tmp_path / "proof" / "uninterrupted" / "openings-0.jsonl"
    wait_until(lambda: openings.exists() and openings.read_text() != "")
    (opening,) = map(json.loads, openings.read_text().splitlines())
    wait_until(
        lambda: any(
            agent.trainers and agent.run == opening["directory"] for agent in shared_host.agents()
        )
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted"), err
    assert not is_running(opening["pid"])
    # Those of other tests' runs may still be about to leave.
    left = [" ".join(agent.cmdline()) for agent in shared_host.agent_processes()]
    assert not [command for command in left if str(tmp_path) in command]
