"""Save by DCP in the background beside a training on the same processes: `async_save`.

DCP's threads exchange plans on the process group of the save, which is the default one unless the
program gives another. A training on gloo uses that group at the same time, in an order that differs
among the ranks: both hang, or take each other's messages. So a save gets a group of its own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

_private: list[tuple[Any, Any]] = []
"""The default group and the group of its saves; owned by the thread that calls `async_save`."""


def async_save(state_dict: dict[str, Any], *, process_group: Any = None, **options: Any) -> Any:
    """Save as `torch.distributed.checkpoint.async_save` does, on a process group for saves alone.

    All ranks call it, as they call DCP's. The first call makes the group, with gloo.

    Args:
        state_dict: The state.
        process_group: Another group for the exchange of plans, which nothing else uses meanwhile.
        options: The other arguments of DCP's function.

    Returns:
        What DCP's function returns: a future.
    """
    is_of_threads = (
        options.get("async_checkpointer_type", AsyncCheckpointerType.THREAD)
        is AsyncCheckpointerType.THREAD
    )
    if process_group is None and is_of_threads and not options.get("no_dist"):
        process_group = _private_group()
    return dcp.async_save(state_dict, process_group=process_group, **options)


def _private_group() -> Any:
    """Return the group of saves; None: there is one process, or none knows of others."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    default = dist.group.WORLD
    if not _private or _private[0][0] is not default:
        _private[:] = [(default, dist.new_group(backend="gloo"))]
    return _private[0][1]
