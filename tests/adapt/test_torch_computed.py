"""Which states were computed before collectives were aborted. The events of devices are fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.adapt.torch import computed
from holdfast.adapt.torch.computed import Computed, note_abort, note_new_group
from holdfast.errors import DeviceError, ProcessLostError

GPU = torch.device("cuda", 0)


class FakeEvent:
    """An event of a device, which has passed once `is_passed` or an abort let it."""

    def __init__(self) -> None:
        self.is_passed = False
        self.is_failed = False

    def query(self) -> bool:
        if self.is_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.is_passed

    def synchronize(self) -> None:
        assert self.query(), "the device would hang"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEvent]]:
    made: list[FakeEvent] = []

    def recorded(device: torch.device) -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(computed, "_recorded", recorded)
    note_new_group()
    yield made
    note_new_group()


def test_a_state_that_was_computed_before_an_abort_is_used(events: list[FakeEvent]) -> None:
    state = Computed([GPU])
    events[0].is_passed = True
    note_abort()
    state.wait()
    assert not state.is_torn


def test_a_state_that_an_abort_lets_pass_is_torn(events: list[FakeEvent]) -> None:
    state = Computed([GPU])
    note_abort()
    events[0].is_passed = True
    assert state.is_torn
    with pytest.raises(ProcessLostError, match="they were aborted, since ranks were lost"):
        state.wait()


def test_one_of_several_devices_is_enough(events: list[FakeEvent]) -> None:
    state = Computed([GPU, torch.device("cuda", 1)])
    events[0].is_passed = True
    note_abort()
    assert state.is_torn


def test_what_is_passed_on_after_an_abort_is_torn_until_there_is_a_new_group(
    events: list[FakeEvent],
) -> None:
    note_abort()
    assert Computed([GPU]).is_torn
    note_new_group()
    assert not Computed([GPU]).is_torn


def test_it_stays_torn_when_there_is_a_new_group(events: list[FakeEvent]) -> None:
    state = Computed([GPU])
    note_abort()
    note_new_group()
    events[0].is_passed = True
    assert state.is_torn


def test_what_is_in_the_hosts_memory_was_computed(events: list[FakeEvent]) -> None:
    state = Computed([torch.device("cpu")])
    note_abort()
    state.wait()
    assert not events


def test_a_device_that_has_failed_is_told(events: list[FakeEvent]) -> None:
    state = Computed([GPU])
    events[0].is_failed = True
    with pytest.raises(DeviceError, match="illegal memory access"):
        state.wait()
    note_abort()
    assert state.is_torn
