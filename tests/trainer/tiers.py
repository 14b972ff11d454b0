"""A run with a remote tier, which is a second directory."""

from __future__ import annotations

from pathlib import Path

from holdfast import CheckpointManager, RemoteTier
from holdfast.cli.main import main
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.run import read_run
from holdfast.format.records import RunRecord
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from holdfast.store.location import open_durable
from tests.hosts import Host, wait_until
from tests.trainer.two_tier_trainer import state_of


class Places:
    """The two places of a run."""

    def __init__(self, root: Path) -> None:
        self.fast = root / "fast"
        self.remote = root / "remote"

    def record(self, place: Path) -> RunRecord:
        return read_run(open_durable(str(place), SystemClock()), str(place))

    def attempts(self, place: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (place / "attempts").iterdir()}

    def check_alike(self) -> None:
        """Both tiers are one run with the same attempts."""
        assert self.record(self.fast).run_id == self.record(self.remote).run_id
        assert self.attempts(self.fast) == self.attempts(self.remote)


class Tiers(Places):
    """The two places of a run that agents copy."""

    def manager(self, *, every: int = 1, keep: int = 3, fast_keep: int = 3, **options: object):
        tier = RemoteTier(
            self.remote,
            save_decision_policy=FixedIntervalPolicy(every),
            preservation_policy=LatestN(keep),
        )
        return CheckpointManager(
            self.fast,
            remote=tier,
            save_decision_policy=FixedIntervalPolicy(1),
            preservation_policy=LatestN(fast_keep),
            **options,
        )

    def train(self, steps: int, *, copies_each: bool = False, **options: object) -> int:
        """Trains for some steps, and returns the first one.

        A step that is due while an earlier one is being copied may be replaced by the next one, so
        the remote tier has all of them only if it is awaited for each.
        """
        with self.manager(**options) as manager:
            start, state = manager.resume(state_of(-1))
            assert (state["w"] == start - 1).all()
            for step in range(start, start + steps):
                manager.save(step, state_of(step), force=True)
                manager.wait_until_finished(30, remote=copies_each)
        if start + steps > 0:
            self.await_remote(start + steps - 1)
        return start

    def await_remote(self, step: int) -> None:
        wait_until(lambda: steps_in(self.remote)[-1:] == [step])


def steps_in(place: Path) -> list[int]:
    """The steps that are committed in one tier."""
    listed = list_checkpoints(open_durable(str(place), SystemClock()))
    return [c.step for c, listing in listed.items() if listing.is_committed]


def stopped(one: Host, run: Path) -> None:
    """Ends the host's agent, which would leave by itself after a while."""
    assert main(["stop", str(run)]) == 0
    wait_until(lambda: not one.agent_processes())
