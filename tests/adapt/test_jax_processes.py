"""The processes of a JAX job."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from holdfast import errors
from holdfast.adapt.jax.processes import JaxProcesses, slice_of
from tests.trainer.ranks import RankOf, jax_words


@dataclass
class Device:
    """A device as JAX has it on TPUs and GPUs."""

    slice_index: int


@pytest.mark.parametrize(
    ("all_slices", "own", "expected"),
    [
        ([0, 0, 0, 0], [0, 0], None),
        ([0, 0, 1, 1], [0, 0], 0),
        ([0, 0, 1, 1], [1, 1], 1),
        # One process may have devices of two.
        ([0, 0, 1, 1], [0, 1], None),
    ],
)
def test_a_slice_is_told_where_there_are_several(
    all_slices: list[int], own: list[int], expected: int | None
) -> None:
    assert slice_of([Device(i) for i in all_slices], [Device(i) for i in own]) == expected


def test_devices_that_know_of_no_slices_are_in_none() -> None:
    assert slice_of([object(), object()], [object()]) is None


def test_a_process_by_itself_is_rank_0_of_1_and_in_no_slice_of_several() -> None:
    processes = JaxProcesses()
    assert (processes.rank, processes.count, processes.slice_index) == (0, 1, None)


def test_a_job_whose_service_was_not_started_is_told_how_to_start_it() -> None:
    processes = JaxProcesses()
    processes.count = 4
    with pytest.raises(errors.InvalidArgumentError, match=r"jax.distributed.initialize\(\)"):
        processes.key_values()


def test_what_stands_in_for_processes_in_other_tests_says_what_jax_s_do() -> None:
    with jax_words() as words:
        stand_in = RankOf(0, 1, words)
        assert {name for name in dir(JaxProcesses()) if not name.startswith("_")} <= set(
            dir(stand_in)
        )
