"""Whole trainings with PyTorch and with JAX are exact, and each cause is found where it is left in.

Epochs end between the kill and the end of the training, and there is dropout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from tests.hosts import Host, ending, host
from tests.proving.proofs import EXAMPLES, proof_of

TORCH, JAX = EXAMPLES / "torch_training.py", EXAMPLES / "jax_training.py"
SCRATCH = EXAMPLES.parent / "from_scratch"
FROM_SCRATCH = [
    pytest.param(SCRATCH / "pytorch.py", "torch", id="pytorch"),
    pytest.param(SCRATCH / "jax_nnx.py", "jax", id="jax"),
]
LOSS = re.compile(r"step (\d+): loss ([0-9.]+)$", re.MULTILINE)
KILLED_AT_2 = {"kill_count": 1, "seed": 1, "every": 1}
"""By SIGKILL, in the middle of the first epoch."""
KILLED_AT_12 = KILLED_AT_2 | {"seed": 4}
"""By SIGKILL, between the second and the third epoch."""


@pytest.fixture(scope="module")
def shared_host() -> Iterator[Host]:
    with host() as made:
        yield made


@pytest.mark.parametrize(("program", "stem"), FROM_SCRATCH)
def test_the_training_from_scratch_runs_and_uses_its_best_checkpoint(
    shared_host: Host, tmp_path: Path, program: Path, stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ending(shared_host.start(program, stem=stem)) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    lines = out.splitlines()
    losses = {int(step): float(loss) for step, loss in LOSS.findall(out)}
    assert [*losses] == [9, 19, 29, 39, 49, 59]
    assert losses[59] < losses[9]
    best = min(losses, key=lambda step: losses[step])
    assert lines[-1].startswith(f"the best is step {best}, and writes: the red "), lines[-1]
    (directory,) = (tmp_path / "runs").iterdir()
    with holdfast.open_run(directory) as run:
        ranked = sorted(losses, key=lambda step: losses[step])[:2]
        assert run.all_steps() == sorted({*ranked, 59})


@pytest.mark.soak
@pytest.mark.parametrize(("program", "stem"), FROM_SCRATCH)
def test_the_training_from_scratch_is_exact_with_each_kind_of_kill(
    shared_host: Host, tmp_path: Path, program: Path, stem: str
) -> None:
    proof = proof_of(shared_host, tmp_path, program, stem=stem, every=1)
    assert proof["identical"], proof
    assert {kill["kind"] for kill in proof["kills"]} == {"sigkill", "sigterm", "host"}
    assert proof["steps"] == [*range(60)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("program", "case", "stem"),
    [(TORCH, "exact", "torch"), (TORCH, "workers", "torch"), (JAX, "exact", "jax")],
)
def test_the_training_that_leaves_nothing_out_is_exact(
    shared_host: Host, tmp_path: Path, program: Path, case: str, stem: str
) -> None:
    proof = proof_of(shared_host, tmp_path, program, case, stem=stem, every=1)
    assert proof["identical"], proof
    assert proof["steps"] == [*range(16)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("no-generator", "a loader without generator="),
        ("no-exact-loader", "a loader's generator left out"),
        ("no-random-state", "a random state that is not in the state"),
        ("no-loader", "an iterator left out"),
        ("plain-loader", "a loader without a state"),
        ("worker-randomness", "random augmentation in loader workers"),
        ("sampler-epoch", "a sampler's epoch"),
    ],
)
def test_each_cause_is_found_with_pytorch(
    shared_host: Host, tmp_path: Path, case: str, cause: str
) -> None:
    options = KILLED_AT_12 if case == "sampler-epoch" else KILLED_AT_2
    proof = proof_of(shared_host, tmp_path, TORCH, case, stem="torch", **options)
    assert (proof["identical"], proof["deterministic"]) == (False, True), proof
    assert proof["causes"][0]["name"] == cause


@pytest.mark.soak
def test_an_iterator_left_out_is_found_with_jax(shared_host: Host, tmp_path: Path) -> None:
    proof = proof_of(shared_host, tmp_path, JAX, "--careless", stem="jax", **KILLED_AT_2)
    assert (proof["identical"], proof["deterministic"]) == (False, True), proof
    assert proof["first_difference"]["step"] == 2
    assert proof["causes"][0]["name"] == "an iterator left out"
