"""Loaders and trainers of other projects are exact as docs/exactness.md says."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, host
from tests.proving.proofs import EXAMPLES, proof_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

NEEDED = {
    "accelerate": ("torch", "accelerate", "torchdata"),
    "lightning": ("torch", "lightning", "torchdata"),
    "datasets": ("datasets",),
    "tfdata": ("tensorflow",),
    "transformers": ("torch", "transformers", "accelerate"),
}


def cases(*pairs: tuple[str, str]) -> list[Any]:
    """Return parameters that are skipped where the packages of a program are missing."""
    parameters = []
    for name, *rest in pairs:
        missing = [n for n in NEEDED[name] if importlib.util.find_spec(n) is None]
        mark = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} cannot be had here")
        parameters.append(pytest.param(name, *rest, marks=mark))
    return parameters


@pytest.fixture(scope="module")
def shared_host() -> Iterator[Host]:
    with host() as made:
        yield made


def proof(one_host: Host, folder: Path, name: str, *arguments: str, **options: object) -> dict:
    stem = "torch" if "torch" in NEEDED[name] else "numpy"
    program = EXAMPLES / f"{name}_training.py"
    words = [argument for argument in arguments if argument]
    return proof_of(one_host, folder, program, *words, stem=stem, every=1, **options)


@pytest.mark.parametrize(
    ("name", "case"),
    cases(
        ("accelerate", ""),
        ("lightning", ""),
        ("datasets", "order"),
        ("datasets", "replayed"),
    ),
)
def test_a_training_is_exact_with_each_kind_of_kill(
    shared_host: Host, tmp_path: Path, name: str, case: str
) -> None:
    found = proof(shared_host, tmp_path, name, case)
    assert found["identical"], found
    assert {kill["kind"] for kill in found["kills"]} == {"sigkill", "sigterm", "host"}
    assert len(found["steps"]) == 18
    assert min(kill["step"] for kill in found["kills"]) < 12, "an epoch ends after a kill"


@pytest.mark.parametrize("name", cases(("lightning",)))
def test_lightning_is_exact_from_the_last_step_of_an_epoch(
    shared_host: Host, tmp_path: Path, name: str
) -> None:
    # This seed kills before the first step of the second epoch.
    found = proof(shared_host, tmp_path, name, seed=15, kill_count=1)
    assert [kill["step"] for kill in found["kills"]] == [7]
    assert found["identical"], found
    assert len(found["steps"]) == 18


@pytest.mark.parametrize("name", cases(("transformers",)))
def test_the_trainer_of_hugging_face_is_exact_with_its_log_and_evaluations(
    shared_host: Host, tmp_path: Path, name: str
) -> None:
    # Each epoch has six steps: this seed kills before the first step of two of them.
    found = proof(shared_host, tmp_path, name, seed=22)
    assert [kill["step"] for kill in found["kills"]] == [7, 13, 16]
    assert found["identical"], found
    durations, *generators = found["not_compared"]
    assert durations == "trainer/durations: durations, which differ in equal runs"
    assert all(name.startswith("rng/") for name in generators)


@pytest.mark.parametrize("name", cases(("datasets",)))
def test_a_stream_that_loses_its_shuffle_buffer_is_found(
    shared_host: Host, tmp_path: Path, name: str
) -> None:
    found = proof(shared_host, tmp_path, name, "careless", kill_count=1)
    assert not found["identical"]
    assert found["deterministic"]
    assert found["causes"][0]["name"] == "a stream's shuffle buffer"


@pytest.mark.parametrize(
    ("name", "case", "path"), cases(("tfdata", "", "data"), ("datasets", "position", "stream"))
)
def test_what_follows_from_a_position_that_has_several_forms_is_exact(
    shared_host: Host, tmp_path: Path, name: str, case: str, path: str
) -> None:
    found = proof(shared_host, tmp_path, name, case, without=[path])
    assert found["identical"], found
    assert found["not_compared"] == [f"{path}: left out with --without"]
