"""Where Holdfast differs from Orbax on purpose: the reason, and a program that shows it.

The programs of `orbax_sequences.py` draw none of these.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.interop.orbax_programs import attempt, plain, shown

EXCEPTED = {}
REASONS = {}


def excepted(reason):
    def added(function):
        EXCEPTED[function.__name__], REASONS[function.__name__] = function, reason
        return function

    return added


def saving(ocp, folder, steps, metrics=None, **options):
    """Save steps one by one; return the steps that are there at the end."""
    made = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(folder, options=made) as manager:
        for step in steps:
            given = {} if metrics is None else {"metrics": {"loss": metrics[step]}}
            save = ocp.args.StandardSave({"x": jnp.ones(2)})
            manager.save(step, args=save, force=True, **given)
            manager.wait_until_finished()
        return [manager.latest_step(), list(manager.all_steps(read=True)), manager.best_step()]


@excepted("Orbax saves and then deletes; Holdfast keeps the newest checkpoint always")
def nothing_is_kept(ocp, folder):
    return saving(ocp, folder, [1, 2], max_to_keep=0)


@excepted("Orbax reads max_to_keep=0 of this policy as no limit")
def every_n_steps_with_a_maximum_of_none(ocp, folder):
    keep = ocp.checkpoint_managers.preservation_policy
    policy = keep.EveryNSteps(1, max_to_keep=0)
    return saving(ocp, folder, [1, 2, 3], preservation_policy=policy)


@excepted(
    "in Orbax a NaN is neither above nor below: which checkpoints stay depends on their order"
)
def a_metric_that_is_not_a_number(ocp, folder):
    return saving(
        ocp,
        folder,
        [1, 2, 3],
        {1: 5.0, 2: float("nan"), 3: 4.0},
        max_to_keep=2,
        best_fn=lambda metrics: metrics["loss"],
    )


@excepted("Orbax deletes a checkpoint as soon as it is saved if it ranks low; Holdfast keeps it")
def the_newest_is_not_among_the_best(ocp, folder):
    return saving(
        ocp,
        folder,
        [1, 2, 3],
        {1: 5.0, 2: 4.0, 3: 1.0},
        max_to_keep=2,
        best_fn=lambda metrics: metrics["loss"],
    )


@excepted("Orbax lists steps as they came, and takes the last one for the newest")
def steps_that_go_back(ocp, folder):
    return attempt(lambda: saving(ocp, folder, [0, 9, 4]), plain)


@excepted("for Orbax an empty folder is a checkpoint, and restoring it fails")
def an_empty_folder_is_named_as_a_step(ocp, folder):
    (folder / "7").mkdir()
    with ocp.CheckpointManager(folder) as manager:
        return manager.latest_step()


@excepted("with step_name_format a missing step is a ValueError in Orbax; here always not found")
def a_missing_step_of_named_ones(ocp, folder):
    names = ocp.step.standard_name_format(step_prefix="s")
    options = ocp.CheckpointManagerOptions(step_name_format=names)
    with ocp.CheckpointManager(folder, options=options) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(2)}))
        manager.wait_until_finished()
        return attempt(lambda: manager.restore(5), plain)


@excepted("Orbax stores no metrics without a best_fn")
def metrics_without_a_function_that_ranks(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(2)}), metrics={"loss": 1.0})
        manager.wait_until_finished()
        return manager.metrics(1)


@excepted("after a save that was refused, Orbax says for ever that one is in progress")
def a_refused_save(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        save = ocp.args.StandardSave({"x": jnp.ones(2)})
        manager.save(1, args=save)
        refused = attempt(lambda: manager.save(1, args=save, force=True), plain)
        manager.wait_until_finished()
        return [refused["error"][0], manager.is_saving_in_progress()]


@excepted("a manager of Orbax that has not saved yet has no metadata of items")
def metadata_of_a_fresh_manager(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(2)}))
    with ocp.CheckpointManager(folder) as manager:
        return manager.item_metadata(1) is None


@excepted("a restore that fails makes Orbax refuse single items from then on")
def a_restore_before_the_first_save(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        attempt(lambda: manager.restore(5), plain)
        return attempt(
            lambda: manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(2)})), plain
        )


@excepted("Orbax takes the arguments of one class for an item, the first that it was given")
def arguments_of_two_classes_for_one_item(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(2)}))
        return attempt(lambda: manager.save(2, args=ocp.args.PyTreeSave({"x": jnp.ones(2)})), plain)


@excepted("StandardSave of Orbax takes no strings")
def a_string_in_a_tree(ocp, folder):
    return saved_and_restored(ocp, folder, {"name": "gpt", "x": jnp.ones(2)})


@excepted("Orbax cannot save arrays without elements")
def an_array_without_elements(ocp, folder):
    return saved_and_restored(ocp, folder, {"x": np.zeros((0, 3), np.float32)})


@excepted("keys that are ints become strings in Orbax")
def keys_that_are_ints(ocp, folder):
    return saved_and_restored(ocp, folder, {1: np.ones(2)})


def saved_and_restored(ocp, folder, tree):
    def call():
        with ocp.CheckpointManager(folder) as manager:
            manager.save(1, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
            return shown(manager.restore(1))

    return attempt(call, plain)
