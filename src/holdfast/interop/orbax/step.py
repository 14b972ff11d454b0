"""Name the folders of steps, and find steps by such names: `ocp.step` and `ocp.path.step`.

Orbax has a folder for each step, and Holdfast a run for all. So a name is where Orbax wrote a step,
and where the checkpointers of this package find one of a run: `DIRECTORY/NAME`, or one item of it
at `DIRECTORY/NAME/ITEM`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.errors import CheckpointNotFoundError
from holdfast.interop.orbax.paths import path_of
from holdfast.interop.orbax.run_reader import RunReader

ANY_NAME = re.compile(r"(?:.*_)?(\d+)")


@dataclasses.dataclass(frozen=True)
class NamedStep:
    """A step that is there, and its path; Orbax calls it `Metadata`."""

    step: int
    path: Any

    @property
    def commit_timestamp(self) -> datetime:
        """When it was saved."""
        path = Path(os.fspath(self.path))
        of_orbax = RunReader(path)
        if of_orbax.is_old(0):
            return of_orbax.info(0).time
        return RunReader(path.parent).info(self.step).time

    @property
    def commit_timestamp_nsecs(self) -> int:
        """When it was saved, in nanoseconds since the epoch."""
        return int(self.commit_timestamp.timestamp() * 1e9)

    @property
    def init_timestamp_nsecs(self) -> int:
        """The same: Holdfast has one time of a checkpoint."""
        return self.commit_timestamp_nsecs


@dataclasses.dataclass(frozen=True)
class NameFormat:
    """Names with a prefix and a fixed length: `step_000100`.

    Args:
        step_prefix: The part before the number; an underscore is added.
        step_format_fixed_length: The number of digits, filled with zeros.
        single_host_load_and_broadcast: As the option of the manager; each process lists for itself.
    """

    step_prefix: str | None = None
    step_format_fixed_length: int | None = None
    single_host_load_and_broadcast: bool = False

    def build_name(self, step: int) -> str:
        """Return the name of `step`."""
        prefix = f"{self.step_prefix}_" if self.step_prefix else ""
        return f"{prefix}{step:0{self.step_format_fixed_length or 1}d}"

    def step_of(self, name: str) -> int | None:
        """Return the step of a name of this format; None for other names."""
        match = ANY_NAME.fullmatch(name)
        if match is None or self.build_name(int(match[1])) != name:
            return None
        return int(match[1])

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[NamedStep]:
        """Yield the steps of a program's directory: of the run, and those that Orbax wrote."""
        folder = Path(os.fspath(base_path))
        for step in RunReader(folder, self).saved_steps():
            yield NamedStep(step, path_of(folder / self.build_name(step)))

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> NamedStep:
        """Return a step of a program's directory.

        Raises:
            CheckpointNotFoundError: A `ValueError`: it is not there.
        """
        for named_step in self.find_all(base_path):
            if named_step.step == step:
                return named_step
        raise NamedStepNotFoundError(
            f"find step {step}: {base_path} has no checkpoint of it named {self.build_name(step)}"
        )


@dataclasses.dataclass(frozen=True)
class CompositeNameFormat:
    """Names of several formats: the first that has a step names it; `write_name_format` builds."""

    write_name_format: Any
    read_name_formats: Sequence[Any]

    def __post_init__(self) -> None:
        if self.write_name_format not in self.read_name_formats:
            raise InvalidArgumentError(
                "composite_name_format(write_name_format=...): expected one of read_name_formats, "
                f"found {self.write_name_format!r}"
            )

    def build_name(self, step: int) -> str:
        """Return the name of `step`."""
        return str(self.write_name_format.build_name(step))

    def find_all(self, base_path: str | os.PathLike[str]) -> Iterator[Any]:
        """Yield the steps of a program's directory."""
        seen = set()
        for name_format in self.read_name_formats:
            for named_step in name_format.find_all(base_path):
                if named_step.step not in seen:
                    seen.add(named_step.step)
                    yield named_step

    def find_step(self, base_path: str | os.PathLike[str], step: int) -> Any:
        """Return a step of a program's directory.

        Raises:
            CheckpointNotFoundError: A `ValueError`: it is not there.
        """
        for named_step in self.find_all(base_path):
            if named_step.step == step:
                return named_step
        raise NamedStepNotFoundError(f"find step {step}: {base_path} has no checkpoint of it")


class NamedStepNotFoundError(CheckpointNotFoundError, ValueError):
    """There is no checkpoint of a step under this name."""

    __str__ = Exception.__str__


def standard_name_format(
    *,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    single_host_load_and_broadcast: bool = False,
    temporary_path_cls: Any = None,
    atomicity_options: Any = None,
) -> NameFormat:
    """Return names such as `23`, `0023`, `step_23` and `step_0023`.

    Args:
        step_prefix: The part before the number; an underscore is added.
        step_format_fixed_length: The number of digits, filled with zeros.
        single_host_load_and_broadcast: As the option of the manager; each process lists for itself.
        temporary_path_cls: Refused, as in `CheckpointManagerOptions`.
        atomicity_options: Refused, as in `CheckpointManagerOptions`.
    """
    for name, value in (
        ("temporary_path_cls", temporary_path_cls),
        ("atomicity_options", atomicity_options),
    ):
        if value is not None:
            raise InvalidArgumentError(
                f"standard_name_format({name}=...): not supported: a checkpoint exists once its "
                "manifest does, on every storage; leave it out"
            )
    return NameFormat(step_prefix, step_format_fixed_length, single_host_load_and_broadcast)


def composite_name_format(
    write_name_format: Any, read_name_formats: Sequence[Any]
) -> CompositeNameFormat:
    """Return names that are read in several formats and built in one."""
    return CompositeNameFormat(write_name_format, tuple(read_name_formats))


def build_step_path(base_path: str | os.PathLike[str], name_format: Any, step: int) -> Any:
    """Return the path of a step, whether it is there or not."""
    return path_of(Path(os.fspath(base_path)) / name_format.build_name(step))


def find_step_path(
    base_path: str | os.PathLike[str],
    name_format: Any,
    *,
    step: int,
    include_uncommitted: bool = False,
) -> Any:
    """Return the path of a step that is there; uncommitted ones are never found.

    Raises:
        CheckpointNotFoundError: A `ValueError`: it is not there.
    """
    del include_uncommitted
    return name_format.find_step(base_path, step).path


def latest_step_metadata(root_path: str | os.PathLike[str], name_format: Any) -> Any:
    """Return the newest step of a program's directory; None if there is none."""
    return max(name_format.find_all(root_path), key=lambda found: found.step, default=None)


def step_from_checkpoint_name(name: str) -> int:
    """Return the step of a folder's name, whatever its prefix.

    Raises:
        InvalidArgumentError: The name is not that of a step.
    """
    match = ANY_NAME.fullmatch(name)
    if match is None:
        raise InvalidArgumentError(f"step_from_checkpoint_name: {name!r} is not named as a step")
    return int(match[1])


def checkpoint_steps(checkpoint_dir: str | os.PathLike[str]) -> list[int]:
    """Return the steps that can be restored from a program's directory."""
    return RunReader(Path(os.fspath(checkpoint_dir))).saved_steps()


def any_checkpoint_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Return one of the steps; None if there is none."""
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


Metadata = NamedStep

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("step")
