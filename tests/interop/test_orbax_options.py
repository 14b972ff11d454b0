"""Each option of Orbax is honoured, or refused by its name."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import pickle
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import holdfast.interop.orbax as ocp
from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.interop.orbax import options as ocp_options
from holdfast.interop.orbax.experimental.emergency import checkpoint_manager as emergency
from holdfast.interop.orbax.v1 import options as v1_options
from tests.hosts import Host

decide = ocp.checkpoint_managers.save_decision_policy
keep = ocp.checkpoint_managers.preservation_policy
STEPS = range(1, 7)


def steps_kept(folder: Path, **given: Any) -> list[int]:
    """The steps that are there after saves of steps 1 to 6 with metrics, by a new manager too."""
    options = ocp.CheckpointManagerOptions(**given)
    with ocp.CheckpointManager(folder, options=options, metadata={"a": 1}) as manager:
        for step in STEPS:
            save = ocp.args.StandardSave({"x": jnp.ones(1)})
            manager.save(step, args=save, metrics={"loss": -abs(step - 4) - 0.1 * step})
        manager.wait_until_finished()
        found = list(manager.all_steps())
        manager.reload()
        assert manager.all_steps() == found
    return found


class OddSteps:
    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return bool(step.step % 2)


CHANGES: dict[str, tuple[Any, list[int]]] = {
    "save_interval_steps": (3, [1, 3, 6]),
    "max_to_keep": (2, [5, 6]),
    "save_decision_policy": (OddSteps(), [1, 3, 5]),
    "preservation_policy": (keep.LatestN(3), [4, 5, 6]),
    "should_save_fn": (lambda step, last: step > 3, [4, 5, 6]),
}
"""Options whose effect is seen in the steps that stay."""

TOGETHER: dict[str, tuple[dict[str, Any], list[int]]] = {
    "save_on_steps": ({"save_interval_steps": 10, "save_on_steps": {3, 5}}, [1, 3, 5]),
    "keep_period": ({"max_to_keep": 1, "keep_period": 3}, [3, 6]),
    "keep_time_interval": (
        {"max_to_keep": 1, "keep_time_interval": datetime.timedelta(hours=1)},
        [1, 6],
    ),
    "best_fn": ({"max_to_keep": 2, "best_fn": lambda metrics: metrics["loss"]}, [3, 4, 6]),
    "best_mode": (
        {"max_to_keep": 2, "best_fn": lambda metrics: metrics["loss"], "best_mode": "min"},
        [1, 6],
    ),
    "keep_checkpoints_without_metrics": (
        {
            "max_to_keep": 1,
            "best_fn": lambda metrics: metrics["loss"],
            "prevent_write_metrics": True,
            "keep_checkpoints_without_metrics": False,
        },
        [6],
    ),
    "prevent_write_metrics": (
        {
            "max_to_keep": 1,
            "best_fn": lambda metrics: metrics["loss"],
            "prevent_write_metrics": True,
        },
        [1, 2, 3, 4, 5, 6],
    ),
    "enable_async_checkpointing": ({"enable_async_checkpointing": False}, [1, 2, 3, 4, 5, 6]),
    "enable_should_save_is_saving_in_progress_check": (
        {
            "save_decision_policy": decide.ContinuousCheckpointingPolicy(),
            "enable_should_save_is_saving_in_progress_check": False,
        },
        [1, 2, 3, 4, 5, 6],
    ),
    "lightweight_initialize": ({"lightweight_initialize": True}, [1, 2, 3, 4, 5, 6]),
    "async_options": (
        {"async_options": ocp.AsyncOptions(timeout_secs=60)},
        [1, 2, 3, 4, 5, 6],
    ),
}
"""The same, of options that need others."""

ELSEWHERE = {
    "step_prefix": "test_orbax_round_trips.py::an_old_directory_is_used_in_place",
    "step_format_fixed_length": "test_orbax_round_trips.py::an_old_directory_is_used_in_place",
    "step_name_format": "test_orbax_round_trips.py::an_old_directory_is_used_in_place",
    "read_only": "test_orbax.py::read_only",
    "create": "test_a_directory_is_made_only_if_asked",
    "save_root_metadata": "test_metadata_of_the_run_is_stored_only_if_asked",
    "multiprocessing_options": "test_processes_that_do_not_take_part_are_refused",
    "file_options": "test_files_with_other_permissions_are_refused",
}
"""Options that other tests are about."""

REFUSED: dict[str, Any] = {
    "atomicity_options": object(),
    "temporary_path_class": object,
    "enable_per_process_directory_creation": True,
}


def test_each_field_of_orbax_is_honoured_or_refused() -> None:
    orbax: Any = pytest.importorskip("orbax.checkpoint", reason="Orbax cannot be had here")
    theirs = dataclasses.fields(orbax.CheckpointManagerOptions)
    own = {field.name: field for field in dataclasses.fields(ocp.CheckpointManagerOptions)}
    # Each one is tested to have its effect, to be refused, or is about work that Holdfast does.
    known = {*CHANGES, *TOGETHER, *ELSEWHERE, *REFUSED, *ocp_options.FULFILLED}
    assert [field.name for field in theirs if field.name not in own] == []
    assert [field.name for field in theirs if field.name not in known] == []
    assert {*REFUSED} == {*ocp_options.REFUSED}
    assert [name for name in known if name not in own] == []
    for field in theirs:
        if isinstance(field.default, bool | int | str | None):
            assert own[field.name].default == field.default, field.name


def test_each_option_about_when_to_save_and_what_to_keep_has_its_effect(
    one_host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in one_host.environment.items():
        monkeypatch.setenv(name, value)
    cases = {name: ({name: value}, kept) for name, (value, kept) in CHANGES.items()} | TOGETHER
    found = {name: steps_kept(tmp_path / name, **given) for name, (given, _) in cases.items()}
    assert found == {name: kept for name, (_, kept) in cases.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(tmp_path: Path, name: str) -> None:
    options = ocp.CheckpointManagerOptions(**{name: REFUSED[name]})
    with pytest.raises(InvalidArgumentError, match=rf"CheckpointManagerOptions\({name}="):
        ocp.CheckpointManager(tmp_path, options=options)


def test_an_option_that_orbax_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class OtherOptions:
        a_new_one: int = 1

    with pytest.raises(TypeError, match="a_new_one"):
        ocp.CheckpointManagerOptions(a_new_one=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgumentError, match="a_new_one"):
        ocp.CheckpointManager(tmp_path, options=OtherOptions())
    with pytest.raises(InvalidArgumentError, match="found 'dict'"):
        ocp.CheckpointManager(tmp_path, options={"max_to_keep": 1})


def test_a_directory_is_made_only_if_asked(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(tmp_path / "none", options=options) as manager:
        assert manager.all_steps() == []
    assert not (tmp_path / "none").exists()


def test_metadata_of_the_run_is_stored_only_if_asked(tmp_path: Path) -> None:
    for asked, expected in ((True, {"a": 1}), (False, {})):
        options = ocp.CheckpointManagerOptions(save_root_metadata=asked)
        folder = tmp_path / str(asked)
        with ocp.CheckpointManager(folder, options=options, metadata={"a": 1}) as manager:
            assert manager.metadata().custom_metadata == expected


def test_processes_that_do_not_take_part_are_refused(tmp_path: Path) -> None:
    kind = ocp.options.MultiprocessingOptions
    for given in (kind(primary_host=1), kind(active_processes={0})):
        options = ocp.CheckpointManagerOptions(multiprocessing_options=given)
        with pytest.raises(InvalidArgumentError, match="primary_host=0 and active_processes=None"):
            ocp.CheckpointManager(tmp_path, options=options)


def test_files_with_other_permissions_are_refused(tmp_path: Path) -> None:
    given = ocp.options.FileOptions(path_permission_mode=0o750)
    options = ocp.CheckpointManagerOptions(file_options=given)
    with pytest.raises(InvalidArgumentError, match="path_permission_mode"):
        ocp.CheckpointManager(tmp_path, options=options)


def test_arguments_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        for wrong in ({"x": 1}, 3, ocp.args.StandardSave):
            with pytest.raises(TypeError, match=r"save: expected arguments such as .*StandardSave"):
                manager.save(1, args=wrong)
        with pytest.raises(InvalidArgumentError, match="expected a step, found 'one'"):
            manager.save("one", args=ocp.args.StandardSave({"x": 1}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"item_names=.*expected one of the two"):
        ocp.CheckpointManager(tmp_path, ocp.PyTreeCheckpointer(), item_names=("a",))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"open .*/file: expected a directory"):
        ocp.CheckpointManager(tmp_path / "file")


def test_an_option_of_the_second_interface_that_orbax_does_not_know_is_refused() -> None:
    context = ocp.v1.Context()
    with pytest.raises(InvalidArgumentError, match=r"PyTreeOptions.Loading.other: not supported"):
        context.pytree.loading.other = 1
    with pytest.raises(InvalidArgumentError, match=r"Context.other: not supported"):
        context.other = 1
    with pytest.raises(AttributeError, match=r"Context.other: not supported"):
        assert context.other
    with pytest.raises(InvalidArgumentError, match=r"Context\(other=...\): not supported"):
        ocp.v1.Context(other=1)
    with pytest.raises(InvalidArgumentError, match=r"array_options=.*expected ArrayOptions"):
        ocp.v1.Context(array_options=1)


def refused_options() -> dict[str, Any]:
    values = dict.fromkeys(v1_options.REFUSED, object()) | {"multiprocessing.primary_host": 1}
    values["pytree.saving.pytree_metadata_options"] = types.SimpleNamespace(support_rich_types=True)
    return values


@pytest.mark.parametrize("place", refused_options())
def test_an_option_that_would_promise_something_untrue_is_refused(
    tmp_path: Path, place: str
) -> None:
    context = ocp.v1.Context()
    *groups, name = place.split(".")
    setattr(functools.reduce(getattr, groups, context), name, refused_options()[place])
    with pytest.raises(InvalidArgumentError, match=place), context:
        ocp.v1.save(tmp_path / "a", {"x": 1})
    assert not (tmp_path / "a").exists()
    with pytest.raises(InvalidArgumentError, match=place):
        ocp.v1.training.Checkpointer(tmp_path / "run", context=context)


def test_each_option_that_is_said_to_be_honoured_or_refused_exists() -> None:
    for place in (*v1_options.HONOURED, *v1_options.REFUSED):
        functools.reduce(getattr, place.split("."), ocp.v1.Context())


def test_a_class_with_the_name_of_holdfasts_is_pickled_and_shown_by_orbaxs_name() -> None:
    made = [
        keep.BestN(get_metric_fn=float),
        decide.FixedIntervalPolicy(2),
        decide.AnySavePolicy([]),
    ]
    made += [ocp.CheckpointManagerOptions(), emergency.CheckpointManagerOptions()]
    made += [ocp.v1.training.CheckpointMetadata(step=1, path="a", metadata=None)]
    made += [ocp.v1.CheckpointMetadata(path="a", metadata=None)]
    for one in made:
        assert pickle.loads(pickle.dumps(one)) == one
    policy = keep.LatestN(3)
    assert repr(policy) == "LatestN(n=3)"
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert isinstance(policy, keep.LatestN)
    assert ocp.CheckpointManager.__name__ == "CheckpointManager"


def test_errors_name_what_the_call_takes(tmp_path: Path) -> None:
    state = {"x": jnp.ones(1)}
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidArgumentError, match=r"it exists; .* replace it with force=True"):
        ocp.StandardCheckpointer().save(tmp_path / "there", state)
    with (
        ocp.CheckpointManager(tmp_path / "runs") as manager,
        pytest.raises(InvalidArgumentError, match=r"to save, .* found args\.StandardRestore"),
    ):
        manager.save(1, args=ocp.args.StandardRestore(state))


@pytest.mark.parametrize("interval", [0, -1, 0.5, "2"])
def test_an_interval_that_is_none_is_refused_by_name(interval: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="save_interval_steps"):
        ocp.CheckpointManagerOptions(save_interval_steps=interval)


@pytest.mark.parametrize("step", [1.0, "1", np.float32(1), [1], -1])
def test_what_is_no_step_is_refused(tmp_path: Path, step: Any) -> None:
    state = {"x": jnp.ones(1)}
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(InvalidArgumentError, match="step"):
            manager.save(step, args=ocp.args.StandardSave(state))
        with pytest.raises(InvalidArgumentError, match="step"):
            manager.restore(step, args=ocp.args.StandardRestore(state))


def test_a_part_without_a_sharding_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    v1 = ocp.v1
    v1.save(tmp_path / "one", {"x": jnp.ones(2), "y": 1})
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = v1.load(tmp_path / "one", {"x": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert isinstance(found["x"], jax.Array)


def test_an_object_with_a_shape_and_a_dtype_describes_an_array_of_numpy(tmp_path: Path) -> None:
    ocp.v1.save(tmp_path / "one", {"x": jnp.ones(2), "y": np.ones(3)})
    described = types.SimpleNamespace(shape=(2,), dtype=np.dtype(np.float64))
    like = {"x": described, "y": types.SimpleNamespace(shape=(3,), dtype=np.dtype(np.float32))}
    found = ocp.v1.load(tmp_path / "one", like)
    assert [type(leaf) for leaf in found.values()] == [np.ndarray, np.ndarray]
    assert [leaf.dtype.name for leaf in found.values()] == ["float64", "float32"]


def test_stored_metrics_are_an_item_in_the_metadata(tmp_path: Path) -> None:
    items = ocp.args.Composite(state=ocp.args.StandardSave({"w": np.ones(2)}))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(0, args=items, metrics={"loss": 1.0})
        manager.save(1, args=items)
        manager.wait_until_finished()
        assert list(manager.item_metadata(0).keys()) == ["metrics", "state"]
        assert manager.item_metadata(0)["metrics"] is None
        assert list(manager.item_metadata(1).keys()) == ["state"]
