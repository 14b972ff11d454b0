"""A run on an overlay file system, as in a container, whose image may have the run already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.cli.main import main
from holdfast.errors import StorageError
from tests.hosts import Host
from tests.store.places import mounted


class Layers:
    """The image below, and a folder for what each container writes."""

    def __init__(self, root: Path, image: Path, options: str) -> None:
        self.root, self.layers, self.options = root, [image], options
        self.place = root / "merged"

    def container(self):
        """Mount a new top layer on all others; leaving it keeps that layer."""
        if self.place.exists():
            self.place.rmdir()
        lower = ":".join(map(str, self.layers))
        upper, work = (self.root / f"{name}-{len(self.layers)}" for name in ("upper", "work"))
        upper.mkdir()
        work.mkdir()
        self.layers.insert(0, upper)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}{self.options}"
        return mounted("overlay", self.place, options)


SOAK = pytest.mark.soak
PARAMS = [
    "one-disk",
    *(pytest.param(name, marks=SOAK) for name in ("two-disks", "two-disks,xino=off")),
]


@pytest.fixture(params=PARAMS)
def layers(request: pytest.FixtureRequest, tmp_path: Path):
    """Layers on one file system or on two, where inodes may not last."""
    kind, _, option = request.param.partition(",")
    options = f",{option}" if option else ""
    image = tmp_path / "image"
    if kind == "one-disk":
        image.mkdir()
        yield Layers(tmp_path, image, options)
    else:
        with mounted("tmpfs", image):
            yield Layers(tmp_path, image, options)


def state_of(step: int) -> dict:
    return {"w": np.full(1000, float(step))}


def train(run: Path, start: int) -> None:
    """Resume at `start`, and save three steps: the first one also on disk."""
    policy = save_decision_policy.FixedIntervalPolicy
    ram = holdfast.RamTier(save_decision_policy=policy(1), linger_secs=0)
    with holdfast.CheckpointManager(run, save_decision_policy=policy(3), ram=ram) as manager:
        step, state = manager.resume(state_of(-1))
        assert step == start
        assert (state["w"] == start - 1).all()
        for number in range(start, start + 3):
            manager.save(number, state_of(number))
            manager.wait_until_finished()
        manager.finish(start + 2, state_of(start + 2))


def test_a_run_is_trained_on_in_each_container_of_an_image_with_it(
    layers: Layers, one_host: Host
) -> None:
    for number in range(3):
        with layers.container() as place:
            train(place / "run", 3 * number)
            # It holds the directory, which could not be unmounted.
            one_host.kill_agents()
            assert main(["verify", str(place / "run")]) == 0
    with layers.container() as place:
        # What lies in a layer below is removed from what is seen, and only from there.
        assert main(["rm", str(place / "run"), "5", "--yes"]) == 0
        with holdfast.open_run(place / "run") as run:
            assert run.all_steps() == [6, 8]
    with layers.container() as place, holdfast.open_run(place / "run") as run:
        assert run.all_steps() == [6, 8]


def test_a_state_in_a_layer_below_is_kept_where_it_cannot_be_replaced(
    layers: Layers, one_host: Host
) -> None:
    with layers.container() as place:
        holdfast.save(place / "one", state_of(1))
    with layers.container() as place:
        with pytest.raises(StorageError, match=r"lower layer of an overlay.*remove it first"):
            holdfast.save(place / "one", state_of(2), overwrite=True)
        assert [path.name for path in place.iterdir()] == ["one"]
        assert (holdfast.load(place / "one")["w"] == 1).all()
        holdfast.save(place / "two", state_of(2))
        holdfast.save(place / "two", state_of(3), overwrite=True)
        assert (holdfast.load(place / "two")["w"] == 3).all()
