"""The calls of MindIO ACP, for trainers that save whole files: `import … as mindio_acp`.

`calls` has them. It is imported on first use, because it imports PyTorch, and the file agent's
process (`holdfast.interop.mindio.file_agent`), which imports this package, needs none.

See docs/decisions/0047.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.interop.mindio.calls import convert as convert
    from holdfast.interop.mindio.calls import flush as flush
    from holdfast.interop.mindio.calls import initialize as initialize
    from holdfast.interop.mindio.calls import load as load
    from holdfast.interop.mindio.calls import multi_save as multi_save
    from holdfast.interop.mindio.calls import preload as preload
    from holdfast.interop.mindio.calls import register_checker as register_checker
    from holdfast.interop.mindio.calls import save as save

__all__ = [
    "convert",
    "flush",
    "initialize",
    "load",
    "multi_save",
    "preload",
    "register_checker",
    "save",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.interop.mindio' has no attribute {name!r}")
    from holdfast.interop.mindio import calls

    function: object = getattr(calls, name)
    # The next access finds the name in the module and does not come here.
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
