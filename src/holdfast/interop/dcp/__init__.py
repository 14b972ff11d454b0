"""torch.distributed.checkpoint (DCP): a storage in Holdfast's format.

`dcp.save(state, checkpoint_id=PATH, storage_writer=HoldfastWriter(PATH))` makes the directory PATH,
which is a run with one checkpoint like one of `holdfast.save`: all that reads runs reads it.

- A tensor is an array whose path is its name in DCP (`model.layers.0.weight`), and its chunks are
  the shards of DCP's plan. Each rank writes one part: its image and its record. Shards that form no
  grid are arrays of their own, one below the other's name for each shard.
- Another object is an array of the bytes that the planner made of it (`torch.save`).
- DCP's metadata is pickled, as a value named `__dcp_metadata__`. As with DCP's own storage, reading
  it and the objects executes pickles: load what trusted programs saved.

Invariants:
- The coordinator makes a hidden directory beside PATH, all ranks write into it, and `finish`
  commits it and renames it to PATH. PATH has all of a save or what was there before. A failed save
  leaves a hidden directory at most, which the next one removes.
- All bytes are checked by their digests when they are read.

All ranks must see the same directory.
"""

from holdfast.interop.dcp.asynchronous import async_save as async_save
from holdfast.interop.dcp.files import dcp_to_torch_save as dcp_to_torch_save
from holdfast.interop.dcp.files import torch_save_to_dcp as torch_save_to_dcp
from holdfast.interop.dcp.names import is_of_dcp as is_of_dcp
from holdfast.interop.dcp.reader import HoldfastReader as HoldfastReader
from holdfast.interop.dcp.writer import HoldfastWriter as HoldfastWriter

__all__ = [
    "HoldfastReader",
    "HoldfastWriter",
    "async_save",
    "dcp_to_torch_save",
    "is_of_dcp",
    "torch_save_to_dcp",
]
