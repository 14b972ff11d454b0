"""Programs for Orbax made of a seed: options and calls, and what they see.

`python orbax_sequences.py MODULE FOLDER RESULT FIRST COUNT [ADDRESS RANK]` runs the programs of
some seeds with one of the two modules, and writes what they saw as JSON; with an address and a
rank as one of two processes of a job. A program depends on its seed alone. What is known to differ
is not drawn: see `orbax_exceptions.py`. With "programs" or "exceptions" as FIRST, those of
`orbax_programs.py` or `orbax_exceptions.py` run first, and then the first COUNT seeds.
"""

from __future__ import annotations

import datetime
import importlib
import json
import logging
import os
import random
import sys
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tests.interop.orbax_exceptions import EXCEPTED
from tests.interop.orbax_programs import attempt, shown
from tests.interop.orbax_v1_programs import PROGRAMS

CALLS_MIN, CALLS_MAX = 8, 20
ITEMS = ("state", "extra", "weights")


class EvenSteps:
    """A policy of the user's own: saves even steps."""

    def should_save(self, step, previous_steps, *, context):
        return step.step % 2 == 0 and not context.reached_preemption


class EvenOrNewest:
    """A policy of the user's own: keeps even steps and the newest."""

    def should_preserve(self, checkpoints, *, context):
        return [one.step % 2 == 0 or one is checkpoints[-1] for one in checkpoints]


def decision_policy(draw, ocp):
    own = ocp.checkpoint_managers.save_decision_policy
    return draw.choice(
        [
            lambda: own.FixedIntervalPolicy(draw.randint(1, 3)),
            lambda: own.SpecificStepsPolicy(draw.sample(range(20), 8)),
            lambda: own.AnySavePolicy(
                [own.FixedIntervalPolicy(draw.randint(2, 4)), own.InitialSavePolicy()]
            ),
            lambda: own.AnySavePolicy(
                [own.PreemptionCheckpointingPolicy(), own.FixedIntervalPolicy(2)]
            ),
            EvenSteps,
        ]
    )()


def preservation_policy(draw, ocp):
    own = ocp.checkpoint_managers.preservation_policy
    return draw.choice(
        [
            lambda: own.LatestN(draw.randint(1, 4)),
            own.LatestN,
            own.PreserveAll,
            lambda: own.AnyPreservationPolicy(
                [own.LatestN(1), own.EveryNSteps(draw.randint(2, 4))]
            ),
            lambda: own.AnyPreservationPolicy(
                [own.CustomSteps(draw.sample(range(20), 5)), own.LatestN(2)]
            ),
            lambda: own.EveryNStepsClosest(interval_steps=draw.randint(2, 5)),
            lambda: own.LatestDuration(datetime.timedelta(hours=1)),
            lambda: own.AnyPreservationPolicy([own.EveryNSeconds(3600), own.LatestN(2)]),
            EvenOrNewest,
        ]
    )()


def drawn_options(draw, ocp):
    """The options of one program, and what the calls need to know of them."""
    given = {}

    def maybe(chance, **options):
        if draw.random() < chance:
            given.update({name: made() for name, made in options.items()})

    maybe(0.4, save_interval_steps=lambda: draw.randint(1, 4))
    maybe(0.2, save_on_steps=lambda: set(draw.sample(range(20), 4)))
    maybe(0.1, should_save_fn=lambda: lambda step, last: step % 3 != 0 or last is None)
    maybe(0.15, save_decision_policy=lambda: decision_policy(draw, ocp))
    maybe(0.5, max_to_keep=lambda: draw.randint(2, 4))
    maybe(0.2, keep_period=lambda: draw.randint(2, 5))
    maybe(0.1, keep_time_interval=lambda: datetime.timedelta(hours=1))
    maybe(0.3, best_fn=lambda: lambda metrics: metrics["loss"])
    maybe(0.5, best_mode=lambda: draw.choice(["min", "max"]))
    maybe(0.2, keep_checkpoints_without_metrics=lambda: draw.random() < 0.5)
    maybe(0.2, preservation_policy=lambda: preservation_policy(draw, ocp))
    maybe(0.2, step_prefix=lambda: draw.choice(["ckpt", "a_b"]))
    maybe(0.2, step_format_fixed_length=lambda: draw.randint(2, 8))
    maybe(0.1, step_name_format=lambda: ocp.step.standard_name_format(step_prefix="named"))
    maybe(0.3, enable_async_checkpointing=lambda: False)
    maybe(0.2, async_options=lambda: ocp.AsyncOptions(timeout_secs=draw.randint(60, 600)))
    maybe(0.1, cleanup_tmp_directories=lambda: True)
    maybe(0.1, lightweight_initialize=lambda: True)
    maybe(0.1, save_root_metadata=lambda: False)
    maybe(0.1, single_host_load_and_broadcast=lambda: True)
    maybe(0.1, enable_should_save_is_saving_in_progress_check=lambda: False)
    maybe(0.05, num_deletion_threads=lambda: 2)
    if "preservation_policy" in given and draw.random() < 0.8:
        # Otherwise they exclude each other, which both say.
        for name in ("max_to_keep", "keep_period", "keep_time_interval"):
            given.pop(name, None)
    if given.get("single_host_load_and_broadcast") and draw.random() < 0.8:
        given.pop("step_name_format", None)
    if given.get("lightweight_initialize"):
        # A manager that reads no times cannot judge by them.
        for name in ("keep_time_interval", "preservation_policy", "best_fn"):
            given.pop(name, None)
    return given


class Program:
    """One program: a manager, a tree, and calls on them."""

    def __init__(self, ocp, folder, seed, ranks):
        self.ocp, self.folder, self.ranks = ocp, folder, ranks
        self.draw = random.Random(seed)
        self.options = drawn_options(self.draw, ocp)
        self.has_items = self.draw.random() < 0.3
        self.metadata = {"seed": seed} if self.draw.random() < 0.3 else None
        self.kind = self.draw.choice(["Standard", "PyTree"])
        self.newest = self.draw.randint(0, 3)
        self.losses = 0
        self.tree = self.drawn_tree()
        self.manager = None
        self.was_refused = False
        self.seen = []

    def drawn_tree(self):
        mesh = jax.make_mesh((2, jax.device_count() // 2), ("x", "y"))
        sharding = NamedSharding(mesh, PartitionSpec(*self.draw.choice([("x",), ("x", "y"), ()])))
        leaves = {
            "w": lambda: jax.device_put(jnp.arange(16.0).reshape(4, 4) + self.newest, sharding),
            "b": lambda: jax.device_put(
                jnp.ones(4, jnp.bfloat16), NamedSharding(mesh, PartitionSpec())
            ),
            "n": lambda: np.arange(3) * self.draw.randint(1, 9),
            "i": lambda: self.draw.randint(0, 99),
            "f": lambda: self.draw.random(),
            "layers": lambda: [{"k": np.ones((2, 2), np.float32)}, (7, 0.5)],
            "none": lambda: None,
            "flag": lambda: self.draw.random() < 0.5,
        }
        names = ["w", *self.draw.sample(sorted(set(leaves) - {"w"}), self.draw.randint(1, 5))]
        return {name: leaves[name]() for name in names}

    def changed(self):
        """The tree with other values, of the same structure."""
        added = self.draw.randint(1, 9)

        def of_leaf(leaf):
            if isinstance(leaf, jax.Array):
                return jax.jit(lambda one: one + added, out_shardings=leaf.sharding)(leaf)
            return leaf if isinstance(leaf, bool) else leaf + added

        self.tree = jax.tree.map(of_leaf, self.tree)
        return self.tree

    def open(self):
        options = self.ocp.CheckpointManagerOptions(**self.options)
        self.manager = self.ocp.CheckpointManager(
            self.folder, options=options, metadata=self.metadata
        )
        # Whether this manager has saved: until then Orbax takes one item, or several, as it comes.
        self.is_known = False

    def run(self):
        self.note("open", attempt(self.open, lambda found: found))
        if self.manager is None:
            return self.seen
        for _ in range(self.draw.randint(CALLS_MIN, CALLS_MAX)):
            name = self.draw.choices([*CALLS], [weight for weight, _ in CALLS.values()])[0]
            call = CALLS[name][1]
            self.note(name, attempt(lambda call=call: call(self), lambda found: found))
        self.manager.wait_until_finished()
        self.note("steps at the end", sorted(self.manager.all_steps(read=True)))
        self.manager.close()
        return self.seen

    def note(self, name, seen):
        if isinstance(seen, dict) and "error" in seen:
            seen = {"error": seen["error"], "message": seen.get("message", "")[:300]}
            self.was_refused = self.was_refused or name.startswith("save")
        self.seen.append([name, seen])

    def metrics(self):
        """Metrics that never rank the newest step lowest; see
        `the_newest_is_not_among_the_best`."""
        self.losses += 1
        value = self.losses + (1.5 if self.losses % 2 else -1.5)
        sign = -1 if self.options.get("best_mode", "max") == "min" else 1
        return {"loss": sign * value, "other": self.losses}

    def arguments(self):
        args = self.ocp.args
        tree = self.changed()
        if not self.has_items:
            return getattr(args, f"{self.kind}Save")(tree)
        items = {"state": getattr(args, f"{self.kind}Save")(tree)}
        if self.draw.random() < 0.6:
            items["extra"] = args.JsonSave({"at": self.newest, "list": [1, None, "x"]})
        if self.draw.random() < 0.3:
            items["weights"] = args.PyTreeSave({"w": tree["w"]})
        return args.Composite(**items)

    def save(self):
        self.newest += self.draw.randint(1, 2)
        force = self.draw.random() < 0.15
        given = {}
        # Without metrics the newest may rank lowest; see `the_newest_is_not_among_the_best`.
        always = self.options.get("keep_checkpoints_without_metrics") is False
        if "best_fn" in self.options and (self.draw.random() < 0.9 or always):
            given["metrics"] = self.metrics()
        if self.draw.random() < 0.2:
            given["custom_metadata"] = {"n": self.newest}
        saved = self.manager.save(self.newest, args=self.arguments(), force=force, **given)
        self.is_known |= saved
        return [self.newest, saved, sorted(self.manager.all_steps())]

    def save_again(self):
        """Save a step that is there already, or an older one, without force."""
        self.manager.wait_until_finished()
        steps, chance = sorted(self.manager.all_steps()), self.draw.random()
        step = max(0, self.newest - self.draw.randint(0, 1))
        if steps and steps[-1] > 0 and chance < 0.3:
            step = steps[-1] - 1
        return [step, self.manager.save(step, args=self.arguments())]

    def save_newest_by_force(self):
        steps = sorted(self.manager.all_steps())
        given = self.arguments()
        if not steps:
            return "none"
        return self.manager.save(steps[-1], args=given, force=True)

    def save_wrongly(self):
        """Save other arguments than the manager takes, after it has saved once."""
        args, kind = self.ocp.args, self.draw.randint(0, 3)
        if not self.is_known:
            return "none"
        self.manager.wait_until_finished()
        self.newest += 1
        wrong = args.Composite(a=args.JsonSave({}))
        if self.has_items:
            wrong = getattr(args, f"{self.kind}Save")(self.tree)
        match kind:
            case 0:
                return self.manager.save(self.newest)
            case 1:
                return self.manager.save(self.newest, args.StandardSave(self.tree))
            case _:
                return self.manager.save(self.newest, args=wrong, force=True)

    def restore(self):
        self.manager.wait_until_finished()
        steps = sorted(self.manager.all_steps())
        if not steps:
            return "none"
        step = self.draw.choice(steps)
        return [step, shown_items(self.manager.restore(step))]

    def restore_newest(self):
        self.manager.wait_until_finished()
        if not self.manager.all_steps():
            return "none"
        return shown_items(self.manager.restore(None))

    def restore_as_asked(self):
        self.manager.wait_until_finished()
        args, steps, kind = self.ocp.args, sorted(self.manager.all_steps()), self.draw.randint(0, 5)
        if not steps:
            return "none"
        step = self.draw.choice(steps)
        target = self.asked(kind)
        if self.kind == "Standard":
            asked = args.StandardRestore(target)
        else:
            like = self.ocp.checkpoint_utils.construct_restore_args(target)
            asked = args.PyTreeRestore(target, restore_args=like)
        if kind == 5 and self.kind == "PyTree":
            part = {"w": self.tree["w"]}
            asked = args.PyTreeRestore(
                part,
                restore_args=self.ocp.checkpoint_utils.construct_restore_args(part),
                partial_restore=True,
            )
        if self.has_items:
            asked = args.Composite(state=asked)
        return [step, kind, shown_items(self.manager.restore(step, args=asked))]

    def asked(self, kind):
        """The tree as it was saved, or with a change that is an error or a conversion."""
        target = dict(self.tree)
        weights = self.tree["w"]
        match kind:
            case 1:
                target["w"] = jax.ShapeDtypeStruct(
                    weights.shape, jnp.bfloat16, sharding=weights.sharding
                )
            case 2:
                target["w"] = jax.ShapeDtypeStruct((8, 4), weights.dtype, sharding=weights.sharding)
            case 3:
                del target["w"]
            case 4:
                spec = NamedSharding(weights.sharding.mesh, PartitionSpec(None, "x"))
                target["w"] = jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=spec)
        return target

    def restore_missing(self):
        if not self.is_known or "step_name_format" in self.options:
            return "none"
        return shown_items(self.manager.restore(self.newest + 50))

    def restore_missing_item(self):
        steps, args = sorted(self.manager.all_steps()), self.ocp.args
        if not steps or not self.has_items or not self.is_known:
            return "none"
        self.manager.wait_until_finished()
        return shown_items(
            self.manager.restore(steps[-1], args=args.Composite(gone=args.StandardRestore()))
        )

    def steps(self):
        read = self.draw.random() < 0.3
        if read:
            self.manager.wait_until_finished()
        return [sorted(self.manager.all_steps(read=read)), self.manager.latest_step()]

    def best(self):
        return self.manager.best_step()

    def metrics_of(self):
        self.manager.wait_until_finished()
        steps = sorted(self.manager.all_steps())
        if "best_fn" not in self.options or not steps:
            return "none"
        return self.manager.metrics(self.draw.choice(steps))

    def metadata_of(self):
        self.manager.wait_until_finished()
        steps = sorted(self.manager.all_steps())
        if not steps:
            return self.manager.metadata().custom_metadata
        if not self.is_known:
            return "none"
        found = self.manager.metadata(self.draw.choice(steps))
        items = found.item_metadata
        tree = items["state"] if self.has_items else items
        weights = tree["w"]
        return [found.custom_metadata, sorted(tree), list(weights.shape), str(weights.dtype)]

    def due(self):
        self.manager.wait_until_finished()
        return [self.manager.should_save(self.newest + more) for more in range(-1, 4)]

    def delete(self):
        self.manager.wait_until_finished()
        steps = sorted(self.manager.all_steps())
        step = self.draw.choice(steps[:-1]) if len(steps) > 1 else self.newest + 70
        self.manager.delete(step)
        return [step, sorted(self.manager.all_steps())]

    def wait(self):
        self.manager.wait_until_finished()
        self.manager.check_for_errors()
        return self.was_refused or self.manager.is_saving_in_progress()

    def reload(self):
        self.manager.wait_until_finished()
        self.manager.reload()
        return sorted(self.manager.all_steps())

    def reopen(self):
        self.manager.close()
        self.open()
        found = sorted(self.manager.all_steps())
        return [found, self.manager.latest_step(), self.manager.metadata().custom_metadata]

    def read_only(self):
        self.manager.wait_until_finished()
        options = self.ocp.CheckpointManagerOptions(
            read_only=True,
            **{name: self.options[name] for name in NAMING if name in self.options},
        )
        reader = self.ocp.CheckpointManager(self.folder, options=options)
        found = [sorted(reader.all_steps()), reader.should_save(self.newest + 1)]
        found.append(reader.save(self.newest + 1, args=self.arguments()))
        reader.close()
        return found

    def foreign(self):
        (self.folder / self.draw.choice(["notes", "x.backup", "logs"])).mkdir(exist_ok=True)
        self.manager.wait_until_finished()
        return sorted(self.manager.all_steps(read=True))


NAMING = ("step_prefix", "step_format_fixed_length", "step_name_format")
CALLS = {
    "save": (30, Program.save),
    "save again": (3, Program.save_again),
    "save the newest by force": (2, Program.save_newest_by_force),
    "save wrongly": (2, Program.save_wrongly),
    "restore": (5, Program.restore),
    "restore the newest": (3, Program.restore_newest),
    "restore as asked": (8, Program.restore_as_asked),
    "restore a missing step": (1, Program.restore_missing),
    "restore a missing item": (2, Program.restore_missing_item),
    "steps": (4, Program.steps),
    "best": (3, Program.best),
    "metrics": (3, Program.metrics_of),
    "metadata": (3, Program.metadata_of),
    "due": (3, Program.due),
    "delete": (3, Program.delete),
    "wait": (3, Program.wait),
    "reload": (2, Program.reload),
    "reopen": (2, Program.reopen),
    "read only": (1, Program.read_only),
    "foreign": (1, Program.foreign),
}


def shown_items(found):
    """A restored item, or all by name; of arrays of several processes the own parts."""
    if hasattr(found, "items") and not isinstance(found, dict):
        return {"items": [[name, shown_items(one)] for name, one in sorted(found.items())]}
    return jax.tree_util.tree_map(
        lambda leaf: shown_parts(leaf) if isinstance(leaf, jax.Array) else shown(leaf),
        {"": found},
        is_leaf=lambda leaf: leaf is None,
    )


def shown_parts(array):
    parts = sorted(
        (str(part.index), np.asarray(part.data).astype(np.float64).tolist())
        for part in array.addressable_shards
    )
    return [str(array.dtype), list(array.shape), str(array.sharding.spec), parts]


def main(module, folder, result, first, count, *distributed):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if distributed:
        address, rank = distributed
        jax.distributed.initialize(address, 2, int(rank))
    ocp = importlib.import_module(module)
    seen = {}
    given = PROGRAMS if first == "programs" else EXCEPTED if first == "exceptions" else {}
    for name, function in given.items():
        own = Path(folder) / name
        own.mkdir(parents=True)
        try:
            seen[name] = function(ocp, own)
        except Exception:
            seen[name] = {"stopped": traceback.format_exc()}
    first = int(first) if first.isdigit() else 0
    for seed in range(first, first + int(count)):
        own = Path(folder) / str(seed)
        own.mkdir(parents=True, exist_ok=True)
        program = None
        try:
            program = Program(ocp, own, seed, jax.process_count())
            seen[seed] = program.run()
        except Exception:
            calls = [] if program is None else program.seen
            seen[seed] = [*calls, ["stopped", traceback.format_exc()]]
    Path(result).write_text(json.dumps(seen, default=int))
    # Threads of a save that Orbax gave up wait for five minutes.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
