"""Build a new directory beside its place, and put it there whole; or a checkpoint in parts.

For the storages of other libraries and for converters. `holdfast.save` saves a state of one process
with less work, and a `CheckpointManager` the states of a training.

- `CheckpointBuilder`, `PartTask`: a checkpoint whose parts several processes write (`parts`).
- `local_path`, `locked_directory`, `put_in_place`, `remove_leftovers`: a directory of any files,
  which is there whole or not at all (`directory`).
- `check_file_name`, `new_content`: a file, likewise.
"""

from holdfast.building.directory import (
    STEP,
    is_saved_one,
    local_path,
    locked_directory,
    put_in_place,
    remove_leftovers,
)
from holdfast.building.parts import (
    CheckpointBuilder,
    NewArray,
    PartTask,
    RegionBytes,
    WrittenPart,
    forms_grid,
)
from holdfast.store.files.named_file import check_file_name, new_content

__all__ = [
    "STEP",
    "CheckpointBuilder",
    "NewArray",
    "PartTask",
    "RegionBytes",
    "WrittenPart",
    "check_file_name",
    "forms_grid",
    "is_saved_one",
    "local_path",
    "locked_directory",
    "new_content",
    "put_in_place",
    "remove_leftovers",
]
