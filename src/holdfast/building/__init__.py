"""Build a new directory beside its place, and put it there whole; or a checkpoint in parts.

For the storages of other libraries and for converters. `holdfast.save` saves a state of one process
with less work, and a `CheckpointManager` the states of a training.

- `CheckpointBuilder`, `PartTask`: a checkpoint whose parts several processes write (`parts`).
- `locked_directory`, `put_in_place`, `remove_leftovers`: a directory of any files, which is there
  whole or not at all (`directory`).
"""

from holdfast.building.directory import STEP as STEP
from holdfast.building.directory import is_saved_one as is_saved_one
from holdfast.building.directory import locked_directory as locked_directory
from holdfast.building.directory import put_in_place as put_in_place
from holdfast.building.directory import remove_leftovers as remove_leftovers
from holdfast.building.parts import CheckpointBuilder as CheckpointBuilder
from holdfast.building.parts import NewArray as NewArray
from holdfast.building.parts import PartTask as PartTask
from holdfast.building.parts import WrittenPart as WrittenPart
from holdfast.building.parts import forms_grid as forms_grid
