"""A run in a bucket whose processes are killed: its trainer, and the judge of what is left.

Arguments: `train` or `judge`, the URL, and for a trainer the file that it waits for, the folder of
the job's words, its count of processes and the rank. Prints JSON lines. The judge is on a host that
has nothing of the run.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import holdfast
from holdfast import CheckpointManager, preservation_policy
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.reading.sources import readable
from holdfast.errors import StepNotFoundError
from holdfast.store.location import open_durable
from holdfast.trainer.opening.run_access import read_only
from tests.buckets.numpy_rank import JobFramework, JobProcesses

TRIED, DELETED = 3, 2
"""The step whose save is interrupted, and the one that is deleted after it."""
STATE_BYTES = 17 << 20
"""More than one part of an upload."""
KEPT_COUNT = 2
"""That of the oracle."""
KEEP = preservation_policy.LatestN(KEPT_COUNT)


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(STATE_BYTES, step, np.uint8), "frozen": np.arange(300_000)}


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def train(url: str, go: str, folder: str, count: str, rank: str) -> None:
    """Saves two steps, once `go` is there a third one; the first rank then deletes the second."""
    framework = JobFramework(JobProcesses(Path(folder), int(count), int(rank)))
    with CheckpointManager(url, preservation_policy=KEEP, framework=framework) as manager:
        manager.resume(state_of(0))
        for step in range(1, TRIED + 1):
            if step == TRIED:
                say(ready=step)
                while not Path(go).exists():
                    time.sleep(0.01)
            say(begun=step)
            assert manager.save(step, state_of(step), force=True)
            manager.wait_until_finished()
            say(durable=step)
        if int(rank) > 0:
            return
        say(deleting=DELETED)
        # A trainer whose agent died in the call does not know whether it had been deleted.
        with contextlib.suppress(StepNotFoundError):
            manager.delete(DELETED)
        say(deleted=DELETED)


def judge(url: str) -> None:
    """Looks at the run, opens it with an agent, saves the next step, and looks again."""
    store = open_durable(url, SystemClock())
    say(newest_attempt=max(read_attempts(store)))
    say(before=seen(url))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["verify", url])
    assert code == 0, printed.getvalue()
    assert "all good" in printed.getvalue(), printed.getvalue()
    # The other host is dead, and its lease is not: without `takeover` this would wait 30 s for it.
    with CheckpointManager(url, preservation_policy=KEEP, takeover=True) as manager:
        start, found = manager.resume(state_of(0))
        if start:
            assert_right(found, start - 1)
        say(start=start, adopted=seen(url))
        assert manager.save(start, state_of(start), force=True)
        manager.wait_until_finished()
    say(after=seen(url), left=[*left_over(url)])


def seen(url: str) -> dict[str, list[tuple[int, int]]]:
    """Every checkpoint that can be restored, each with the right bits, and the timeline."""
    view = read_only(url).load_view()
    with holdfast.open_run(url) as run:
        for step in run.all_steps():
            assert_right(run.restore(step), step)
    return {
        "readable": [(one.step, one.attempt.number) for one in readable(view.listings)],
        "timeline": [(one.step, one.attempt.number) for one in view.timeline],
    }


def assert_right(found: dict[str, np.ndarray], step: int) -> None:
    for name, array in state_of(step).items():
        assert np.array_equal(found[name], array), f"step {step}: {name} holds other bits"


def left_over(url: str) -> Iterator[str]:
    """Objects of checkpoints that no manifest names."""
    store = open_durable(url, SystemClock())
    keys = [stored.key for stored in store.list("checkpoints")]
    manifests = [key for key in keys if key.startswith("checkpoints/manifests/")]
    named = {Path(key).stem.partition("-")[2] for key in manifests}
    images = set()
    for key in manifests:
        manifest = json.loads(store.get(key))
        for rank, part in enumerate(manifest["parts"]):
            name = f"image-{rank:05d}-of-{len(manifest['parts']):05d}.safetensors"
            for step, _ in part["origins"]:
                images.add((step, name))
    for key in set(keys) - set(manifests):
        _, folder, name = key.split("/")
        if folder not in named and (int(folder.partition(".")[0]), name) not in images:
            yield key


if __name__ == "__main__":
    {"train": train, "judge": judge}[sys.argv[1]](*sys.argv[2:])
