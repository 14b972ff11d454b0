"""Find out from a worker's environment whether torchrun shares one store among its worker groups.

By default torchrun holds the store in which the processes of a group find each other, and keeps it
when it starts them again. A process of the next group then reads the addresses of the group before
if it comes first: with gloo on PyTorch 2.13 most restarts hang in `init_process_group`, until
`--max-restarts` is used up. No manager is open by then, so it is reported elsewhere.

Pure. See docs/decisions/0058.
"""

from __future__ import annotations

from collections.abc import Mapping

DISABLE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SHARED_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
RESTART_COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"

CAUSE = (
    "torchrun gives the processes that it starts again the store of those before; with gloo they "
    "may connect to addresses that are gone, and hang in init_process_group"
)
ADVICE = f"start torchrun with --rdzv-backend=c10d and {DISABLE_VARIABLE}=1, on every node"


def is_shared(environ: Mapping[str, str]) -> bool:
    """Return whether the process is a worker of torchrun, which shares its store."""
    return environ.get(SHARED_VARIABLE) == "True"


def may_restart(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun is asked to start failed workers again."""
    return environ.get(MAX_RESTARTS_VARIABLE, "0") != "0"


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this worker in place of a failed one."""
    return environ.get(RESTART_COUNT_VARIABLE, "0") != "0"
