"""A metric that a policy ranks by and that no save passes is told once."""

from __future__ import annotations

import pytest

from holdfast.policy.preservation_policy import AnyPreservationPolicy, BestN, LatestN
from holdfast.trainer.arguments import MetricNames

BEST = BestN(2, metric="eval/loss")


@pytest.mark.parametrize("policy", [BEST, AnyPreservationPolicy([LatestN(1), BEST])])
def test_a_metric_of_another_name_is_told_once_with_both_names(
    policy: object, caplog: pytest.LogCaptureFixture
) -> None:
    names = MetricNames(policy)
    names.check(3, {"eval_loss": 1.0})
    names.check(4, {"eval_loss": 1.0})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "step 3" in record.message
    assert "'eval/loss'" in record.message
    assert "'eval_loss'" in record.message


def test_no_metrics_at_all_are_told(caplog: pytest.LogCaptureFixture) -> None:
    MetricNames(BEST).check(0, None)
    assert "'eval/loss'" in caplog.text
    assert "metrics has none" in caplog.text


def test_nothing_is_told_where_the_name_is_right_or_no_policy_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    MetricNames(BEST).check(0, {"eval/loss": 1.0})
    MetricNames(LatestN(1)).check(0, None)
    MetricNames(BEST, rank=1).check(0, None)
    assert not caplog.records
