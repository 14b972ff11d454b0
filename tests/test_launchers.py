"""What has started a process, by its variables."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.adapt.torch.processes import TorchProcesses
from holdfast.errors import InvalidArgumentError
from holdfast.launchers import HOSTS_MAX, Launch, hosts_in, launch_of
from holdfast.local_agent.place import host_name

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node09",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
RAY = {"RAY_RAYLET_PID": "77", "RAY_JOB_ID": "01000000"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-1",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "JOBSET_NAME": "train",
    "JOBSET_RESTART_ATTEMPT": "4",
}


def launch(*variables: dict[str, str], **modules: Any) -> Launch:
    environ = {name: value for each in variables for name, value in each.items()}
    return launch_of(environ, {name.replace("_", "."): each for name, each in modules.items()})


def ranked(of: Launch) -> tuple[str, int | None, int | None]:
    assert of.ranked is not None
    return of.ranked.of.name, of.ranked.rank, of.ranked.count


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, ("slurm", 1, 2)),
        (TORCHRUN, ("torchrun", 5, 8)),
        (RAY | {"RANK": "1", "WORLD_SIZE": "3"}, ("ray", 1, 3)),
        (OPEN_MPI, ("mpi", 3, 4)),
        (HYDRA, ("mpi", 0, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("env", 1, 2)),
    ],
    ids=["slurm", "torchrun", "ray", "open-mpi", "hydra", "by-hand"],
)
def test_a_launcher_is_known_by_its_variables(
    variables: dict[str, str], expected: tuple[str, int, int]
) -> None:
    alone = launch(variables)
    assert alone.names == expected[:1]
    assert ranked(alone) == expected


def test_without_variables_there_is_no_launcher() -> None:
    assert launch({"PATH": "/bin", "RANK": "", "SLURM_JOB_ID": ""}) == Launch()
    assert launch().ranked is None


def test_a_pod_has_an_index_and_no_rank_and_a_jobset_counts_restarts() -> None:
    pod = launch(JOBSET)
    assert pod.names == ("kubernetes",)
    assert pod.ranked is None
    assert pod.launchers[0].node == 2
    assert pod.restarts == {"kubernetes": 4}
    assert launch(JOBSET, {"HOLDFAST_RESTART_COUNT": "1"}).restarts == {
        "kubernetes": 4,
        "holdfast": 1,
    }


def test_the_batch_script_of_slurm_is_no_rank() -> None:
    """It has SLURM_PROCID=0 and the number of tasks of the whole job."""
    batch = {name: value for name, value in SLURM.items() if "STEP" not in name}
    script = launch(batch, {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "node[08-09]"})
    assert script.ranked is None
    assert script.restarts == {"slurm": 2}
    assert script.launchers[0].hosts == ("node08", "node09")
    assert script.host == "node09"


def test_the_innermost_launcher_gives_the_rank_and_the_outer_ones_the_rest() -> None:
    nested = launch(TORCHRUN, SLURM, RAY, JOBSET)
    assert nested.names == ("torchrun", "ray", "slurm", "kubernetes")
    assert ranked(nested) == ("torchrun", 5, 8)
    # RANK is torchrun's, not Ray's.
    assert nested.launchers[1].rank is None
    assert nested.host == "node09"
    assert nested.signals == (signal.SIGUSR1, signal.SIGUSR2)
    assert nested.contradiction() is None


@pytest.mark.parametrize(
    "outer",
    [SLURM, SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, OPEN_MPI | SLURM],
    ids=["one task per node", "one torchrun in each task", "mpirun in a step"],
)
def test_nested_launchers_contradict_nothing(outer: dict[str, str]) -> None:
    launch(outer, TORCHRUN).check(0, 1)


def test_ranks_that_a_task_starts_by_itself_contradict_nothing() -> None:
    launch(SLURM, {"RANK": "5", "WORLD_SIZE": "8"}).check(0, 1)


@pytest.mark.parametrize(
    "left_over",
    [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "3"}],
    ids=["another rank", "another count"],
)
def test_launchers_that_contradict_each_other_are_named(left_over: dict[str, str]) -> None:
    both = launch(SLURM, left_over)
    with pytest.raises(InvalidArgumentError) as caught:
        both.check(0, 1)
    text = str(caught.value)
    assert f"RANK and WORLD_SIZE as rank {left_over['RANK']} of {left_over['WORLD_SIZE']}" in text
    assert "Slurm (job 12) as rank 1 of 2" in text
    assert "HOLDFAST_LAUNCHER=slurm" in text
    # The framework settles it.
    both.check(1, 2)
    both.check(int(left_over["RANK"]), int(left_over["WORLD_SIZE"]))
    # So does the user.
    launch(SLURM, left_over, {"HOLDFAST_LAUNCHER": "slurm"}).check(0, 1)


def test_a_job_larger_than_the_frameworks_is_named() -> None:
    assert launch(SLURM).larger_job(1) == "Slurm (job 12) as rank 1 of 2"
    assert launch(SLURM).larger_job(2) == ""
    assert launch(SLURM, TORCHRUN).larger_job(8) == ""
    # One torchrun for each task, by mistake or for a sweep.
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}
    assert launch(SLURM, alone).larger_job(1) == "Slurm (job 12) as rank 1 of 2"
    assert launch(JOBSET).larger_job(1) == ""


def test_the_launchers_that_count_can_be_named() -> None:
    nested = (SLURM, TORCHRUN)
    assert launch(*nested, {"HOLDFAST_LAUNCHER": "none"}) == Launch()
    assert ranked(launch(*nested, {"HOLDFAST_LAUNCHER": "Slurm"})) == ("slurm", 1, 2)
    assert launch(*nested, {"HOLDFAST_LAUNCHER": "slurm, torchrun"}).names == ("torchrun", "slurm")
    with pytest.raises(InvalidArgumentError, match="expected none, or some of env, holdfast"):
        launch({"HOLDFAST_LAUNCHER": "slrum"})


def test_a_number_that_is_none_is_not_used() -> None:
    assert launch(SLURM, {"SLURM_PROCID": "x"}).ranked is None
    assert launch(TORCHRUN, {"WORLD_SIZE": "-8"}).ranked is None
    (slurm,) = launch(SLURM, {"SLURM_PROCID": "x"}).launchers
    assert slurm.unreadable == ("SLURM_PROCID=x",)
    assert not any(each.unreadable for each in launch(SLURM, TORCHRUN).launchers)


class _TrainContext:
    def get_world_rank(self) -> int:
        return 1

    def get_world_size(self) -> int:
        return 2


def test_a_worker_of_ray_train_asks_the_context_that_its_program_has_imported() -> None:
    """`JaxTrainer` sets no variables for ranks."""

    def no_context() -> None:
        raise RuntimeError("not initialized")

    def in_a_trial() -> None:
        raise DeprecationWarning("use the equivalent ray.tune API")

    assert launch(RAY).ranked is None
    assert launch(RAY, ray_train=SimpleNamespace(get_context=no_context)).ranked is None
    assert launch(RAY, ray_train=SimpleNamespace(get_context=in_a_trial)).ranked is None
    worker = launch(RAY, ray_train=SimpleNamespace(get_context=_TrainContext))
    assert ranked(worker) == ("ray", 1, 2)
    assert worker.larger_job(1) == "Ray (job 01000000) as rank 1 of 2"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],other", ["n1", "n2", "n3", "n7", "other"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("rack[1-2]n[1-2].x", ["rack1n1.x", "rack1n2.x", "rack2n1.x", "rack2n2.x"]),
        ("", []),
        ("n[a-b]", []),
        (f"n[1-{HOSTS_MAX + 2}]", []),
        ("a[1-1000]b[1-1000]c[1-1000]", []),
    ],
)
def test_slurms_list_of_hosts_is_expanded(text: str, hosts: list[str]) -> None:
    assert hosts_in(text) == tuple(hosts)


def test_the_host_of_a_rank_is_known_where_each_host_has_one() -> None:
    assert launch(SLURM).host_of(0, 2) == "node08"
    assert launch(SLURM).host_of(0, 4) == ""
    assert launch(SLURM, {"SLURM_STEP_NUM_TASKS": "4"}).host_of(0, 4) == ""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "vm.example"),
        ({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "vm"}, "vm.example"),
        ({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "node7"}, "node7"),
        ({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "node7", "HOLDFAST_HOST": "mine"}, "mine"),
        (
            {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "node7", "HOLDFAST_LAUNCHER": "none"},
            "vm.example",
        ),
    ],
    ids=["none", "the same without its domain", "another", "named by hand", "left out"],
)
def test_the_launchers_name_of_the_host_is_used_where_it_is_another(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "vm.example")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host_name() == expected


def test_a_process_of_torchrun_without_its_process_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=r"torchrun \(job abc\) as rank 5 of 8, and"):
        TorchProcesses()
    # A launcher of trainings that may be independent refuses nothing here.
    monkeypatch.setenv("HOLDFAST_LAUNCHER", "none")
    assert (TorchProcesses().rank, TorchProcesses().count) == (0, 1)
    monkeypatch.setenv("HOLDFAST_LAUNCHER", "slurm")
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert TorchProcesses().count == 1
