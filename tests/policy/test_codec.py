"""Built-in policies travel as JSON, and nothing else arrives."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import preservation_policy, save_decision_policy
from holdfast.errors import InvalidArgumentError
from holdfast.policy import preservation_evaluation, save_evaluation
from tests.policy.strategies import (
    UserSavePolicy,
    any_keeper,
    any_save,
    built_in_keepers,
    by_agent,
    by_step,
    keeps_nothing,
)

MODULES = [save_evaluation, preservation_evaluation]


@given(policy=any_save(by_step | by_agent))
def test_save_policy_comes_back_as_it_was(policy: Any) -> None:
    back = save_evaluation.decode(save_evaluation.encode(policy))
    assert type(back) is type(policy)
    assert back == policy
    assert repr(back) == repr(policy)


@given(policy=any_keeper(built_in_keepers))
def test_preservation_policy_comes_back_as_it_was(policy: Any) -> None:
    back = preservation_evaluation.decode(preservation_evaluation.encode(policy))
    assert type(back) is type(policy)
    assert back == policy
    assert repr(back) == repr(policy)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (save_decision_policy.PreemptionCheckpointingPolicy(), {}),
        (
            save_decision_policy.ContinuousCheckpointingPolicy(30),
            {"minimum_interval_secs": 30.0, "max_overhead": None, "goodput": None},
        ),
        (save_decision_policy.SpecificStepsPolicy({2, 1}), {"steps": [1, 2]}),
        (
            save_decision_policy.AnySavePolicy([save_decision_policy.FixedIntervalPolicy(4)]),
            {"policies": [{"policy": "FixedIntervalPolicy", "interval": 4}]},
        ),
        (preservation_policy.LatestN(None), {"n": None}),
        (preservation_policy.BestN(2, metric="x"), {"n": 2, "metric": "x", "mode": "min"}),
        (
            preservation_policy.AnyPreservationPolicy([preservation_policy.EveryNSeconds(180)]),
            {"policies": [{"policy": "EveryNSeconds", "secs": 180.0}]},
        ),
    ],
    ids=str,
)
def test_a_message_names_the_class_and_its_arguments(policy: Any, message: dict[str, Any]) -> None:
    is_save = hasattr(policy, "should_save")
    module = save_evaluation if is_save else preservation_evaluation
    expected = {"policy": type(policy).__name__, **message}
    assert json.loads(module.encode(policy)) == expected


def test_users_policy_is_not_encoded() -> None:
    save: Any = UserSavePolicy(True)
    keeper = keeps_nothing()
    whole = save_decision_policy.AnySavePolicy([save_decision_policy.FixedIntervalPolicy(1), save])
    for policy in (save, whole):
        with pytest.raises(InvalidArgumentError, match="found UserSavePolicy"):
            save_evaluation.encode(policy)
    for kept in (keeper, preservation_policy.AnyPreservationPolicy([keeper])):
        with pytest.raises(InvalidArgumentError, match="found UserPreservationPolicy"):
            preservation_evaluation.encode(kept)


def test_subclass_of_a_built_in_policy_is_not_encoded_as_its_base() -> None:
    class Mine(save_decision_policy.FixedIntervalPolicy, frozen=True):  # type: ignore[misc]
        pass

    for policy in (Mine(1), save_decision_policy.AnySavePolicy([Mine(1)])):
        with pytest.raises(InvalidArgumentError, match="found Mine"):
            save_evaluation.encode(policy)


DEEP = 200_000
HOSTILE = [
    b"",
    b"null",
    b"3",
    b"[]",
    b"{}",
    b"{",
    b"\xff",
    b'{"policy":"\xff"}',
    b'{"policy":"Unknown"}',
    b'{"policy":3}',
    b'{"policy":"FixedIntervalPolicy"}',
    b'{"policy":"FixedIntervalPolicy","interval":0}',
    b'{"policy":"FixedIntervalPolicy","interval":true}',
    b'{"policy":"FixedIntervalPolicy","interval":"4"}',
    b'{"policy":"FixedIntervalPolicy","interval":1.5}',
    b'{"policy":"FixedIntervalPolicy","interval":' + b"9" * 30 + b"}",
    b'{"policy":"FixedIntervalPolicy","interval":' + b"9" * 10_000 + b"}",
    b'{"policy":"FixedIntervalPolicy","interval":4,"interval_secs":3}',
    b'{"policy":"FixedIntervalPolicy","interval":4}{}',
    b'{"policy":"ContinuousCheckpointingPolicy","minimum_interval_secs":1e999}',
    b'{"policy":"ContinuousCheckpointingPolicy","minimum_interval_secs":NaN}',
    b'{"policy":"ContinuousCheckpointingPolicy","minimum_interval_secs":-1}',
    b'{"policy":"SpecificStepsPolicy","steps":"123"}',
    b'{"policy":"SpecificStepsPolicy","steps":[]}',
    b'{"policy":"SpecificStepsPolicy","steps":[-1]}',
    b'{"policy":"AnySavePolicy","policies":[]}',
    b'{"policy":"AnySavePolicy","policies":[{}]}',
    b'{"policy":"AnySavePolicy","policies":[{"policy":"LatestN","n":1}]}',
    b'{"policy":"AnySavePolicy","policies":' * DEEP,
    b'{"policy":"AnySavePolicy","policies":[' * DEEP,
    b'{"interval":' + b"[" * DEEP + b',"policy":"FixedIntervalPolicy"}',
    b"[" * DEEP,
    b'{"policy":"LatestN","n":0}',
    b'{"policy":"EveryNSeconds","secs":null}',
    b'{"policy":"BestN","n":1,"metric":"x","mode":"mean"}',
    b'{"policy":"BestN","n":1,"metric":"\xff"}',
    b'{"policy":"BestN","n":1,"metric":"\\ud800"}',
    b'{"policy":"BestN","n":1}',
    b'{"policy":"AnyPreservationPolicy","policies":[]}',
]


@pytest.mark.parametrize("module", MODULES, ids=["save", "preservation"])
@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:60]))
def test_what_is_no_policy_is_refused(module: ModuleType, data: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        module.decode(data)


tags = st.sampled_from(
    [name for module in MODULES for name in vars(module) if name[0].isupper()] + ["x"]
)
names = st.sampled_from(["policy", "policies", "interval", "steps", "n", "secs", "metric", "mode"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | tags
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=10,
)
tagged = st.builds(
    lambda tag, rest: {**rest, "policy": tag}, tags, st.dictionaries(names, json_values)
)


@pytest.mark.parametrize("module", MODULES, ids=["save", "preservation"])
@given(data=st.binary(max_size=50) | (tagged | json_values).map(lambda v: json.dumps(v).encode()))
def test_any_bytes_are_a_policy_or_an_invalid_argument(module: ModuleType, data: bytes) -> None:
    try:
        policy = module.decode(data)
    except InvalidArgumentError:
        return
    assert module.decode(module.encode(policy)) == policy


@given(
    policy=any_keeper(built_in_keepers),
    position=st.integers(0),
    replacement=st.integers(0, 255),
)
def test_changed_byte_of_a_message_gives_a_policy_or_an_invalid_argument(
    policy: Any, position: int, replacement: int
) -> None:
    data = bytearray(preservation_evaluation.encode(policy))
    data[position % len(data)] = replacement
    try:
        preservation_evaluation.decode(bytes(data))
    except InvalidArgumentError:
        return
