"""Settings of process groups; `tests/supervise/ranks` and `tests/gpu` form and leave real ones."""

from __future__ import annotations

import os

import pytest

from holdfast.adapt.torch import groups
from holdfast.adapt.torch.groups import WATCHDOG


def test_pytorchs_watchdog_ends_no_process_that_outlives_a_lost_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in WATCHDOG:
        monkeypatch.delenv(name, raising=False)
    groups._set_watchdog()
    assert {name: os.environ[name] for name in WATCHDOG} == WATCHDOG
    assert not caplog.text


def test_another_setting_of_the_watchdog_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    groups._set_watchdog()
    groups._set_watchdog()
    assert caplog.text.count("TORCH_NCCL_ASYNC_ERROR_HANDLING is set to 0, in place of 1") == 1
