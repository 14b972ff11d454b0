"""MaxText's own trainer on Holdfast. HOLDFAST_MAXTEXT is a folder of its source.

The packages that MaxText needs are in tests/interop/trainers.txt; `make trainers` installs them and
a release of MaxText. Packages beside the source are found first.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import holdfast
from holdfast.interop.trainers.maxtext import STARTUP
from tests.hosts import Host
from tests.interop.trainer_sources import source_or_skip
from tests.ports import free_address

ROOT = Path(__file__).parents[2]
SOURCE = source_or_skip("HOLDFAST_MAXTEXT", "src/maxtext", ("flax", "grain", "omegaconf"))
STEPS = 50
IN_MEMORY = ["local_checkpoint_directory=/unused", "local_checkpoint_period=2"]
ELASTIC = ["packing=false", "grain_use_elastic_iterator=true"]
MULTI_TIER = ["multi_tier_checkpointing_backup_interval_minutes=5"]

pytestmark = pytest.mark.soak


def train(
    host: Host,
    directory: Path,
    kind: str,
    step: int = -1,
    event: str = "-",
    *flags: str,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    paths = [str(ROOT / "src"), str(SOURCE / "src"), str(ROOT)]
    if kind == "startup":
        paths.insert(0, str(STARTUP))
    arguments = [str(directory), kind, str(step), event, str(SOURCE)]
    return subprocess.run(
        [sys.executable, "-m", "tests.interop.maxtext_training", *arguments, *flags],
        env=host.environment
        | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def train_in_two(
    host: Host, directory: Path, kind: str, step: int = -1, event: str = "-", *flags: str
) -> list[subprocess.CompletedProcess[str]]:
    """Train in two processes of two devices each."""
    coordinator = free_address()

    def train_one(number: int) -> subprocess.CompletedProcess[str]:
        return train(
            *(host, directory, kind, step, event, *flags),
            COORDINATOR=coordinator,
            PROCESS=str(number),
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        )

    with ThreadPoolExecutor() as pool:
        return list(pool.map(train_one, range(2)))


def losses(directory: Path) -> dict[int, float]:
    """The loss of each step; of a step that was trained again, the last one.

    MaxText writes a step's loss after the next step, so a kill may lose those of two steps.
    """
    lines = map(json.loads, (directory / "metrics.txt").read_text().splitlines())
    return {int(line["step"]): line["learning/loss"] for line in lines}


def record(tokens: bytes) -> bytes:
    """A `tf.train.Example` whose feature `text` is a list of these numbers, each below 128."""

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    feature = field(1, b"text") + field(2, field(3, field(1, tokens)))
    return field(1, field(1, feature))


def texts() -> list[list[int]]:
    """200 short texts, as numbers of tokens."""
    numbers = random.Random(7)
    return [numbers.choices(range(3, 64), k=numbers.randint(4, 16)) for _ in range(200)]


@pytest.fixture(scope="module")
def grain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags for an input by Grain: the texts, packed and shuffled anew 8 times."""
    from array_record.python.array_record_module import ArrayRecordWriter

    file = tmp_path_factory.mktemp("records") / "texts.array_record"
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for text in texts():
        writer.write(record(bytes(text)))
    writer.close()
    flags = {"dataset_type": "grain", "grain_train_files": str(file), "num_epoch": "8"}
    return [f"{name}={value}" for name, value in flags.items()] + ["tokenize_train_data=false"]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Further flags: the texts are in two Parquet files, each read by a worker of its own."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("parquet")
    for number in range(2):
        table = pyarrow.table({"text": texts()[number::2]})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet")
    return [f"grain_train_files={folder}/*", "grain_file_type=parquet", "grain_worker_count=2"]


@pytest.fixture(scope="module")
def expected_of(
    tmp_path_factory: pytest.TempPathFactory, grain: list[str]
) -> Callable[..., dict[int, float]]:
    """Returns the losses of an uninterrupted training with Orbax and Grain, with more flags."""
    known: dict[tuple[str, ...], dict[int, float]] = {}

    def found(*flags: str) -> dict[int, float]:
        if flags not in known:
            directory = tmp_path_factory.mktemp("orbax")
            done = train(
                Host("orbax", tmp_path_factory.mktemp("ram")),
                *(directory, "orbax", -1, "-", *grain, *flags),
            )
            assert done.returncode == 0, done.stderr[-3000:]
            known[flags] = losses(directory)
            assert list(known[flags]) == list(range(STEPS))
        return known[flags]

    return found


def are_equal(found: dict[int, float], expected: dict[int, float]) -> bool:
    missing = expected.keys() - found.keys()
    return len(missing) <= 2 and found == {s: expected[s] for s in expected.keys() - missing}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an uninterrupted training with Orbax."""
    directory = tmp_path_factory.mktemp("orbax")
    host = Host("orbax", tmp_path_factory.mktemp("ram"))
    done = train(host, directory, "orbax")
    assert done.returncode == 0, done.stderr[-3000:]
    found = losses(directory)
    assert list(found) == list(range(STEPS))
    return found


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("holdfast", ["enable_continuous_checkpointing=true"]),
        ("holdfast", ["async_checkpointing=false"]),
        ("startup", []),
        ("holdfast", ["enable_emergency_checkpoint=true", *IN_MEMORY]),
        ("holdfast", ["enable_multi_tier_checkpointing=true", *MULTI_TIER, *IN_MEMORY]),
    ],
    ids=["continuous", "synchronous", "startup", "emergency", "multi-tier"],
)
def test_a_killed_training_has_the_losses_of_one_that_was_not(
    kind: str, flags: list[str], expected: dict[int, float], one_host: Host, tmp_path: Path
) -> None:
    killed = train(one_host, tmp_path / "run", kind, 34, "kill", *flags)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again = train(one_host, tmp_path / "run", kind, -1, "-", *flags)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "restoring from this run's directory step" in again.stdout + again.stderr
    assert are_equal(losses(tmp_path / "run"), expected)
    with holdfast.open_run(tmp_path / "run" / "tiny" / "checkpoints" / "holdfast") as run:
        assert run.latest_step() == STEPS - 1
        assert run.metadata(STEPS - 1).attempt == 2


def test_a_training_goes_on_with_half_as_many_shards_as_with_orbax(
    one_host: Host, tmp_path: Path
) -> None:
    fsdp_4, fsdp_2 = (
        ["ici_fsdp_parallelism=4"],
        ["ici_fsdp_parallelism=2", "ici_data_parallelism=2"],
    )
    for kind in ("orbax", "holdfast"):
        first = train(one_host, tmp_path / kind, kind, 30, "kill", *fsdp_4)
        assert first.returncode == -signal.SIGKILL, first.stderr[-3000:]
        again = train(one_host, tmp_path / kind, kind, -1, "-", *fsdp_2)
        assert again.returncode == 0, again.stderr[-3000:]
    found = losses(tmp_path / "holdfast")
    assert max(found) == STEPS - 1
    assert len(found) >= STEPS - 2
    assert found == losses(tmp_path / "orbax")


def test_sigterm_saves_the_step_in_progress_and_ends_the_training(
    expected: dict[int, float], one_host: Host, tmp_path: Path
) -> None:
    ended = train(one_host, tmp_path / "run", "holdfast", 23, "terminate")
    assert ended.returncode == 0, ended.stderr[-3000:]
    with holdfast.open_run(tmp_path / "run" / "tiny" / "checkpoints" / "holdfast") as run:
        last = run.latest_step()
    assert last is not None
    assert 24 <= last < 30
    again = train(one_host, tmp_path / "run", "holdfast")
    assert again.returncode == 0, again.stderr[-3000:]
    assert are_equal(losses(tmp_path / "run"), expected)


def test_a_failed_checkpoint_ends_the_training_with_an_error(
    one_host: Host, tmp_path: Path
) -> None:
    ended = train(one_host, tmp_path / "run", "holdfast", 24, "remove")
    assert ended.returncode == 1, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "holdfast: the training ends: " in ended.stderr


def killed_and_restarted(
    host: Host, directory: Path, kind: str, flags: list[str]
) -> dict[int, float]:
    """The losses of a training that is killed after step 34 and started again."""
    killed = train(host, directory, kind, 34, "kill", *flags)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again = train(host, directory, kind, -1, "-", *flags)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "restoring from this run's directory step" in again.stdout + again.stderr
    assert "without the states of" not in again.stderr
    return losses(directory)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("holdfast", ["enable_continuous_checkpointing=true"]),
        ("startup", ["grain_worker_count=0"]),
        ("holdfast", ["enable_emergency_checkpoint=true", *IN_MEMORY]),
        ("holdfast", ["enable_multi_tier_checkpointing=true", *MULTI_TIER, *IN_MEMORY]),
    ],
    ids=["continuous", "no worker", "emergency", "multi-tier"],
)
def test_grain_goes_on_where_the_killed_training_was(
    kind: str,
    flags: list[str],
    grain: list[str],
    expected_of: Callable[..., dict[int, float]],
    one_host: Host,
    tmp_path: Path,
) -> None:
    found = killed_and_restarted(one_host, tmp_path / "run", kind, [*grain, *flags])
    assert are_equal(found, expected_of())


def test_grain_goes_on_with_an_elastic_iterator(
    grain: list[str],
    expected_of: Callable[..., dict[int, float]],
    one_host: Host,
    tmp_path: Path,
) -> None:
    found = killed_and_restarted(one_host, tmp_path / "run", "holdfast", [*grain, *ELASTIC])
    assert are_equal(found, expected_of(*ELASTIC))


def test_grain_goes_on_within_the_shuffled_rows_of_parquet_files(
    grain: list[str],
    parquet: list[str],
    expected_of: Callable[..., dict[int, float]],
    one_host: Host,
    tmp_path: Path,
) -> None:
    found = killed_and_restarted(one_host, tmp_path / "run", "holdfast", [*grain, *parquet])
    assert are_equal(found, expected_of(*parquet))


def test_grain_goes_on_from_a_checkpoint_of_orbax(
    grain: list[str],
    expected_of: Callable[..., dict[int, float]],
    one_host: Host,
    tmp_path: Path,
) -> None:
    killed = train(one_host, tmp_path / "run", "orbax", 30, "kill", *grain)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again = train(one_host, tmp_path / "run", "holdfast", -1, "-", *grain)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "restoring from this run's directory step 30" in again.stdout + again.stderr
    assert are_equal(losses(tmp_path / "run"), expected_of())


@pytest.mark.parametrize(
    "flags", [[], ["expansion_factor_real_data=2"]], ids=["both read", "one reads"]
)
def test_grain_goes_on_in_two_processes(
    flags: list[str],
    grain: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    one_host: Host,
    tmp_path: Path,
) -> None:
    flags = [*grain, *flags]
    orbax = Host("orbax", tmp_path_factory.mktemp("ram"))
    for done in train_in_two(orbax, tmp_path / "orbax", "orbax", -1, "-", *flags):
        assert done.returncode == 0, done.stderr[-3000:]
    expected = losses(tmp_path / "orbax")
    assert list(expected) == list(range(STEPS))
    killed = train_in_two(one_host, tmp_path / "run", "holdfast", 34, "kill", *flags)
    assert killed[0].returncode == -signal.SIGKILL, killed[0].stderr[-3000:]
    assert killed[1].returncode < 0, killed[1].stderr[-3000:]
    for done in train_in_two(one_host, tmp_path / "run", "holdfast", -1, "-", *flags):
        assert done.returncode == 0, done.stderr[-3000:]
        assert "restoring from this run's directory step" in done.stdout + done.stderr
        assert "without the states of" not in done.stderr
    assert are_equal(losses(tmp_path / "run"), expected)
