"""Files of `torch.save` from checkpoints of DCP, and the other way round."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

from holdfast.interop.dcp.reader import HoldfastReader
from holdfast.interop.dcp.writer import HoldfastWriter


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]
) -> None:
    """Write the state of a checkpoint to a file of `torch.save`, as torch's function of this name.

    Objects are unpickled: read what trusted programs saved.

    Args:
        dcp_checkpoint_dir: What `HoldfastWriter`, or DCP's own storage, has written.
        torch_save_path: The file, which is replaced.

    Raises:
        CheckpointException: DCP's, with the reason of each rank.
    """
    state: dict[str, Any] = {}
    reader, planner = HoldfastReader(dcp_checkpoint_dir), _EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(
        state, storage_reader=reader, planner=planner, no_dist=True
    )
    torch.save(state, torch_save_path)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Write the state of a file of `torch.save` to a new checkpoint in Holdfast's format.

    The file is unpickled: read what trusted programs saved.

    Args:
        torch_save_path: The file.
        dcp_checkpoint_dir: The directory, where nothing or an earlier checkpoint is.

    Raises:
        CheckpointException: DCP's, with the reason.
    """
    state = torch.load(torch_save_path, map_location="cpu", weights_only=False)
    dcp.save(state, storage_writer=HoldfastWriter(dcp_checkpoint_dir), no_dist=True)
