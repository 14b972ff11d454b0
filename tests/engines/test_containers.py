"""Trainings in containers of a real Docker that are killed, stopped and replaced.

The first process of a container is `holdfast run`, as in examples/containers, with a user that is
not root. The manifests beside it are compared with the schemas of Kubernetes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

import holdfast
from tests.engines.docker import EXAMPLES, USER, Container, Engine, engine, why_not
from tests.hosts import ROOT, is_running, wait_until

MANIFESTS = ROOT / "examples" / "containers"
KUBERNETES = ("1.34", "1.37")
TRAINING = ("python3", f"{EXAMPLES}/train.py")
COMMAND = ("python3", "-m", "holdfast", "run", "--max-restarts=3", "--preempted-code=75", "--")
ENDLESS = {"STEPS": "1000000", "STEP_SECS": "0.05"}

reason = why_not()
in_containers = pytest.mark.skipif(reason is not None, reason=str(reason))
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(tmp_path_factory.mktemp("containers")) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of the machine's memory, which outlives containers."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def train(docker: Engine, name: str, run: str, *options: str, **variables: str) -> Container:
    where = {"RUN": str(docker.folder / run), "HOLDFAST_HOST": name, **ENDLESS, **variables}
    return docker.run(name, *COMMAND, *TRAINING, variables=where, options=options)


def newest(docker: Engine, run: str) -> int:
    """The newest durable step; -1: none."""
    step = holdfast.open_run(docker.folder / run).latest_step()
    return -1 if step is None else step


@in_containers
def test_a_killed_trainer_goes_on_from_ram_and_a_stopped_container_ends_with_75(
    docker: Engine,
) -> None:
    # Docker's default /dev/shm has 64 MB.
    training = train(docker, "one", "one")
    assert training.await_starts(1) == ["0"]
    last = training.last_step()
    training.trainer().kill()
    step, tier = training.await_starts(2)
    assert (int(step) >= last, tier) == (True, "ram")
    # The killed trainer was reaped, and so was whatever it had started.
    wait_until(lambda: all(p.status() != psutil.STATUS_ZOMBIE for p in training.processes()))
    last = training.last_step()
    assert training.stop() < 15
    assert training.code == 75
    assert newest(docker, "one") >= last
    # It begins where it has left, and a training that finishes ends with 0.
    steps = str(newest(docker, "one") + 4)
    again = docker.run(
        "again", *COMMAND, *TRAINING, variables={"RUN": str(docker.folder / "one"), "STEPS": steps}
    )
    assert again.code == 0
    assert newest(docker, "one") == int(steps) - 1


@in_containers
@pytest.mark.parametrize("is_same_host", [True, False])
def test_a_container_that_replaces_a_killed_one_takes_its_ram_if_the_host_name_is_the_same(
    docker: Engine, memory: Path, is_same_host: bool
) -> None:
    run = f"replaced-{is_same_host}"
    shared = f"--volume={memory}:/ram"
    first = train(docker, f"{run}-1", run, shared, HOLDFAST_HOST="node", HOLDFAST_RAM="/ram/own")
    first.await_starts(1)
    wait_until(lambda: newest(docker, run) >= 0)
    last = first.last_step()
    first.kill()
    began = time.monotonic()
    host = "node" if is_same_host else "another"
    second = train(docker, f"{run}-2", run, shared, HOLDFAST_HOST=host, HOLDFAST_RAM="/ram/own")
    step, *tiers = second.await_starts(1, secs=90)
    secs = time.monotonic() - began
    if is_same_host:
        assert (int(step) >= last, tiers) == (True, ["ram"])
        assert secs < 20, secs
    else:
        # The lease of the first attempt has to expire, and RAM of another name is not looked at.
        assert (int(step) <= 1, tiers) == (True, ["durable"])
        assert 15 < secs < 60, secs
    second.stop()


@in_containers
def test_an_agent_in_a_sidecar_outlives_the_trainers_container(
    docker: Engine, memory: Path
) -> None:
    shared, run = f"--volume={memory}:/ram", str(docker.folder / "sidecar")
    where = {"RUN": run, "HOLDFAST_HOST": "pod", "HOLDFAST_RAM": "/ram/own", **ENDLESS}
    waiting = ("holdfast", "run", "--directory", run, "--", "sleep", "infinity")
    sidecar = docker.run("agent", "python3", "-m", *waiting, variables=where, options=[shared])
    wait_until(lambda: len(sidecar.processes()) > 1)
    options = [shared, "--pid=container:agent"]
    trainer = docker.run("trainer", *TRAINING, variables=where, options=options)
    trainer.await_starts(1)
    (agent,) = (p for p in sidecar.processes() if "holdfast.host" in p.cmdline())
    last = trainer.last_step()
    trainer.kill()
    trainer.start_again()
    step, tier = trainer.await_starts(2)
    assert (int(step) >= last, tier) == (True, "ram")
    assert is_running(agent.pid)
    trainer.stop()
    # Its end waits until all is durable.
    last = trainer.last_step()
    sidecar.stop()
    assert newest(docker, "sidecar") >= last


@in_containers
def test_a_memory_volume_that_belongs_to_root_is_refused_with_its_cure(docker: Engine) -> None:
    volume = "--tmpfs=/ram:mode=755"
    refused = train(docker, "refused", "refused", volume, HOLDFAST_RAM="/ram", HOLDFAST_LOG="off")
    assert refused.code == 1
    assert f"expected a folder of user {USER}" in refused.errors
    assert "/ram" in refused.errors
    own = train(docker, "own", "own", "--tmpfs=/ram:mode=1777", HOLDFAST_RAM="/ram/own")
    own.await_starts(1)
    own.stop()
    assert own.code == 75


def manifests() -> list[tuple[str, dict]]:
    files = sorted(MANIFESTS.glob("*.yaml"))
    return [(f.name, part) for f in files for part in yaml.safe_load_all(f.read_text())]


@pytest.mark.parametrize(("name", "manifest"), [m for m in manifests() if m[1]["kind"] != "JobSet"])
@pytest.mark.parametrize("version", KUBERNETES)
def test_a_manifest_is_valid(name: str, manifest: dict, version: str) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    validator.validate(manifest, version, strict=True)


def test_the_manifest_of_a_job_set_is_valid() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    sources = os.environ.get("HOLDFAST_JOBSET")
    if sources is None:
        pytest.skip("HOLDFAST_JOBSET does not name the sources of JobSet, which have its schema")
    file = Path(sources) / "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
    versions = yaml.safe_load(file.read_text())["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1alpha2")
    forbid_unknown(schema["properties"]["spec"])
    (manifest,) = (part for _, part in manifests() if part["kind"] == "JobSet")
    jsonschema.validate(manifest, schema)


def forbid_unknown(schema: object) -> None:
    """Makes a schema refuse members that it does not list, as the API server reports them."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for key, part in schema.items():
            if key != "metadata":
                forbid_unknown(part)
    elif isinstance(schema, list):
        for part in schema:
            forbid_unknown(part)
