"""The process that is given hostile input: `python -m tests.trust.hostile_child SEED COUNT`.

It may take half a gigabyte of address space beyond what it begins with, and a few seconds of
processor time an input. Only Holdfast's own errors count as an answer; anything else ends it, with
the target and the number of the input, which as two more arguments replay it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.adapt.contract import EVERYTHING
from holdfast.cli.main import main as command
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.run import read_run
from holdfast.engine.reading.view import view_of
from holdfast.errors import HoldfastError
from holdfast.format.check import check_manifest, check_part
from holdfast.format.layout import image_layout
from holdfast.format.names import (
    MANIFESTS,
    manifest_key,
    parse_attempt_name,
    parse_checkpoint_name,
    parse_manifest_key,
    parse_part_name,
    parse_reused_image_name,
)
from holdfast.format.ownership import Ownership
from holdfast.format.records import (
    AttemptRecord,
    CheckpointSpec,
    Manifest,
    PartRecord,
    RunRecord,
    decode_metrics,
)
from holdfast.format.sealed import unseal
from holdfast.format.timeline import last_steps, on_timeline
from holdfast.format.values import decode_value
from holdfast.local_agent.calls import decoded
from holdfast.policy import preservation_evaluation, preservation_policy, save_evaluation
from holdfast.store.contract import check_key
from holdfast.trainer.restore.restoring import LoneReader, Restorer
from tests.attempts import checkpoint_id
from tests.trust import hostile_inputs as inputs
from tests.trust.damaged_run import (
    NEWEST,
    DamagedRun,
    NestedFramework,
    right_state,
    same_tree,
    told_on_failure,
)

MEMORY_BYTES = 512 * 1024 * 1024
INPUT_SECS = 10.0
CHUNKS_LAID_OUT_MAX = 100

KINDS: dict[str, Any] = {
    "manifest": Manifest,
    "part": PartRecord,
    "attempt": AttemptRecord,
    "run": RunRecord,
}


class TooSlowError(Exception):
    """An input took more processor time than it may."""


class Targets:
    """What is given hostile input; each takes a source of randomness, and may refuse."""

    def __init__(self, root: Path) -> None:
        self.damaged = DamagedRun(root, 2, keeps=True)
        self.folder = self.damaged.run
        checkpoint = self.folder / "checkpoints" / str(NEWEST)
        self.paths = {
            "manifest": self.folder / manifest_key(NEWEST),
            "part": checkpoint / "part-00000-of-00002.json",
            "part 1": checkpoint / "part-00001-of-00002.json",
            "attempt": self.folder / "attempts/000000003.json",
            "run": self.folder / "holdfast.json",
        }
        self.bytes = {name: path.read_bytes() for name, path in self.paths.items()}
        self.trees = {name: json.loads(data) for name, data in self.bytes.items()}
        for tree in self.trees.values():
            del tree["digest"]
        # Attempts without copies, so that the records themselves are what is read.
        for path in self.folder.glob("attempts/*.copy.json"):
            path.unlink()

    def spoilt_bytes(self, rng: random.Random) -> None:
        """Records as spoilt bytes, with their old digest."""
        name = rng.choice(list(self.bytes))
        data = self.bytes[name]
        while data == self.bytes[name]:
            data = inputs.mutated_bytes(rng, data)
        unseal(data, KINDS[name.split()[0]], name)
        raise AssertionError("spoilt bytes were taken")

    def records(self, rng: random.Random) -> None:
        """Return records with the right digest and false contents."""
        name = rng.choice(["manifest", "manifest", "part", "part", "part 1", "attempt", "run"])
        record = unseal(inputs.spoilt_record(rng, self.trees[name]), KINDS[name.split()[0]], name)
        if isinstance(record, Manifest):
            check_manifest(record, name)
            _use(record.checkpoint, len(record.parts))
        elif isinstance(record, PartRecord):
            check_part(record, name)
            for value in record.values:
                decode_value(value.value)
            if record.checkpoint is not None:
                _use(record.checkpoint, record.part_count)
        elif isinstance(record, AttemptRecord):
            attempts = {record.attempt.number: record, 1: record}
            last_steps(attempts)
            on_timeline([checkpoint_id(20), NEWEST], attempts)

    def values(self, rng: random.Random) -> None:
        """Values as they come out of a record."""
        tree = rng.choice(inputs.VALUES)
        for _ in range(rng.choice([1, 1, 2, 3])):
            tree = inputs.mutated(rng, tree)
        try:
            tree = msgspec.json.decode(json.dumps(tree))
        except (msgspec.DecodeError, RecursionError):
            return
        decode_value(tree)

    def names(self, rng: random.Random) -> None:
        """Names of files and folders."""
        name = inputs.spoilt_name(rng)
        committed = parse_manifest_key(f"{MANIFESTS}/{name}")
        assert committed is None or manifest_key(committed) == f"{MANIFESTS}/{name}"
        checkpoint, part = parse_checkpoint_name(name), parse_part_name(name)
        assert checkpoint is None or str(checkpoint) == name
        assert part is None or "part-{:05d}-of-{:05d}.json".format(*part) == name
        kept = parse_reused_image_name(name)
        assert kept is None or name == "image-{:05d}-of-{:05d}.from-{}.safetensors".format(*kept)
        number = parse_attempt_name(name)
        assert number is None or name in (f"{number:09d}.json", f"{number:09d}.copy.json")
        inside = self.folder / check_key(name)
        assert os.path.normpath(inside) == str(inside)
        assert inside.is_relative_to(self.folder)

    def messages(self, rng: random.Random) -> None:
        """Return the messages of trainers to the agent."""
        name = rng.choice(list(inputs.MESSAGES))
        data = inputs.spoilt_message(rng, name)
        message = decoded(f"/{name}", data, type(inputs.MESSAGES[name]))
        msgspec.json.encode(message)

    def policies(self, rng: random.Random) -> None:
        """Policies as trainers send them."""
        policy = preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(2), preservation_policy.EveryNSeconds(60)]
        )
        tree = json.loads(preservation_evaluation.encode(policy))
        data = json.dumps(inputs.mutated(rng, tree)).encode()
        if rng.random() < 0.2:
            data = inputs.mutated_bytes(rng, data)
        for decode in (preservation_evaluation.decode, save_evaluation.decode):
            with contextlib.suppress(HoldfastError):
                decode(data)

    def attempts(self, rng: random.Random) -> None:
        """The timeline of a run with a spoilt attempt."""
        with self._in_place("attempt", rng):
            found = read_attempts(self.damaged.durable)
            on_timeline(list_checkpoints(self.damaged.durable), found)

    def restores(self, rng: random.Random) -> None:
        """A run with a record that is sealed and spoilt; what is restored is one checkpoint."""
        name = rng.choice(["manifest", "part", "part 1", "attempt", "run"])
        rounds = LoneReader(rank=0, count=2, is_outside=False)
        stores = self.damaged.views()[rng.choice(["disk", "with-ram"])]
        durable = self.damaged.durable
        with self._in_place(name, rng) as changed:
            read_run(durable, "run")
            view = view_of(stores, durable)
            view.sound()
            found = Restorer(NestedFramework(), rounds, SystemClock()).newest(
                lambda: view, EVERYTHING
            )
        # What is sealed and committed is what the run says; all else is what was saved.
        is_said = found is not None and found.id == NEWEST and "manifest" in changed
        if found is not None and not is_said:
            assert same_tree(found.state, right_state(found.id, 0, False)), "a mix was restored"

    def commands(self, rng: random.Random) -> None:
        """The command line on such a run: `ls`, `show` and `verify`."""
        name = rng.choice(["manifest", "part", "part 1", "attempt", "run"])
        arguments = rng.choice([["ls"], ["show"], ["verify"]])
        extra = rng.choice([[], ["--json"]])
        quiet = io.StringIO()
        with (
            self._in_place(name, rng),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            assert command([*arguments, str(self.folder), *extra]) in (0, 1)

    @contextlib.contextmanager
    def _in_place(self, name: str, rng: random.Random) -> Any:
        """Puts a spoilt record into the run; a part's new digest often goes into the manifest."""
        data, changed = inputs.spoilt_record(rng, self.trees[name]), {name}
        self.paths[name].write_bytes(data)
        if name.startswith("part") and rng.random() < 0.8:
            self._commit_anew(int(name == "part 1"), data)
            changed.add("manifest")
        try:
            yield changed
        finally:
            for one in changed:
                self.paths[one].write_bytes(self.bytes[one])

    def _commit_anew(self, rank: int, data: bytes) -> None:
        from holdfast.format.sealed import record_digest

        tree = json.loads(self.bytes["manifest"])
        del tree["digest"]
        tree["parts"][rank]["record_digest"] = record_digest(data)
        self.paths["manifest"].write_bytes(inputs.sealed_json(tree))


def _use(spec: CheckpointSpec, part_count: int) -> None:
    """Makes of a spec that passed its check what a reader makes of it."""
    decode_metrics(spec.metrics)
    for value in spec.values:
        decode_value(value.value)
    owned = Ownership(spec.arrays)
    for rank in range(min(part_count, 3)):
        if owned.block_count_min(rank) <= CHUNKS_LAID_OUT_MAX:
            image_layout(spec.arrays, rank, owned)
    if sum(_size_bytes(array) for array in spec.arrays) < 1 << 20:
        NestedFramework().restoration(spec, EVERYTHING).finish({})


def _size_bytes(array: Any) -> int:
    size = 16
    for extent in array.shape:
        size *= extent
    return size


# How many of a million inputs each target gets: in proportion to its speed.
SHARES = {
    "spoilt_bytes": 250,
    "records": 350,
    "values": 150,
    "names": 100,
    "messages": 100,
    "policies": 29,
    "attempts": 10,
    "restores": 10,
    "commands": 1,
}


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {INPUT_SECS} s of processor time")


def try_one(target: Callable[[random.Random], None], seed: str) -> str:
    """Gives one input; returns whether it was taken, or as what it was refused."""
    signal.setitimer(signal.ITIMER_VIRTUAL, INPUT_SECS)
    try:
        target(random.Random(seed))
    except HoldfastError as error:
        str(error).encode("utf-8", "backslashreplace")
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "taken"


def run_all(targets: Targets, seed: int, count: int) -> dict[str, Counter[str]]:
    """Gives `count` inputs to all targets together."""
    seen: dict[str, Counter[str]] = {}
    for name, share in SHARES.items():
        seen[name] = Counter()
        started = time.monotonic()
        for number in range(-(-count * share // 1000)):
            with told_on_failure(f"replay: {seed} {count} {name} {number}"):
                seen[name][try_one(getattr(targets, name), f"{seed} {name} {number}")] += 1
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return seen


def main(arguments: list[str]) -> None:
    """Runs all inputs, or the one that is named; prints what came of them as JSON."""
    seed, count, *replayed = arguments
    signal.signal(signal.SIGVTALRM, _too_slow)
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir="/dev/shm") as root:
        targets = Targets(Path(root))
        os.environ["HOLDFAST_RAM"] = f"{root}/host"
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        try:
            if replayed:
                print(try_one(getattr(targets, replayed[0]), f"{seed} {replayed[0]} {replayed[1]}"))
            else:
                print(json.dumps(run_all(targets, int(seed), int(count))))
        finally:
            targets.damaged.close()


if __name__ == "__main__":
    main(sys.argv[1:])
