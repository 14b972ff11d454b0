"""Proofs and replays of trainings of two ranks of PyTorch, under both launchers."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, host

PROGRAM = Path(__file__).with_name("two_ranks.py")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    str(PROGRAM),
)
SUPERVISED = (
    *(sys.executable, "-m", "holdfast", "run", "--nproc", "2", "--spares", "0", "--"),
    *(sys.executable, str(PROGRAM)),
)
SECS_MAX = 1700.0

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(2 * SECS_MAX),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="PyTorch cannot be had here"
    ),
]


@pytest.fixture
def one_host() -> Iterator[Host]:
    with host() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the programs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(host: Host, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Runs a Python program to its end; returns its exit code and its output."""
    process = host.start(*arguments, OMP_NUM_THREADS="1", **variables)
    out, err = process.communicate(timeout=SECS_MAX)
    return process.returncode, out, err


def holdfast(host: Host, *arguments: str) -> tuple[int, dict]:
    """Runs a command of Holdfast; returns its exit code and its document."""
    code, out, err = ended(host, "-m", "holdfast", *arguments)
    assert out, err
    document: dict = json.loads(out)
    return code, document | {"notes": err}


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [(TORCHRUN, "fsdp"), (TORCHRUN, "ddp"), (SUPERVISED, "fsdp")],
    ids=["torchrun FSDP2", "torchrun DDP", "holdfast run --nproc"],
)
def test_a_training_of_two_ranks_is_the_same_with_each_kind_of_kill(
    one_host: Host, folder: Path, launcher: tuple[str, ...], kind: str
) -> None:
    code, proof = holdfast(one_host, "prove", "--every", "1", "--json", "--", *launcher, kind)
    assert code == 0, proof
    assert proof["identical"]
    assert proof["processes"] == 2
    assert {kill["kind"] for kill in proof["kills"]} == {"sigkill", "sigterm", "host"}
    assert proof["steps"] == [*range(21)]
    assert proof["metrics"] == 21
    assert [*folder.iterdir()] == []


def test_a_replay_names_the_rank_whose_part_is_not_reproduced(one_host: Host, folder: Path) -> None:
    code, _, err = ended(one_host, *TORCHRUN[1:], "fsdp", FAULT="1")
    assert code == 0, err
    code, found = holdfast(one_host, "bisect", "run", "--json", "--", *TORCHRUN, "fsdp")
    assert (code, found["outcome"]) == (1, "not_reproduced"), found
    assert (found["reproduced"], found["step"]) == (10, 15)
    (difference,) = found["differences"]
    assert difference["name"].endswith("/exp_avg")
    assert (difference["count"], difference["saved_by"]) == (1, [1])
    assert difference["text"].endswith("saved by rank 1 (float32 (8, 8))")
