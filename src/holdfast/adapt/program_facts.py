"""What can be known of a program's random numbers and data loaders, besides its state.

For `holdfast prove`, and for the warning about loaders at a first save. Nothing is imported and
nothing is changed: what the program has not imported is not there. Objects are found in those that
the garbage collector tracks, which takes some tens of milliseconds in a large program.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.format.paths import Path, path_name

LOADERS_MAX = 20
DEPTH_MAX = 100
SAMPLE_ORDERS = weakref.WeakSet[Any]()
"""The orders of samples that are alive; `is_saved` is true once their state was saved or set."""
_CONTAINERS = (dict, list, tuple)
_TRAINERS = ("accelerate", "lightning", "torchtitan", "transformers")
_LOADERS = ("DataLoader", "StatefulDataLoader")
_EXACT = ("ExactLoader", "PreparedLoader")
_PREPARED = "DataLoaderAdapter"
"""accelerate's class of the loaders that it has prepared, each around one of PyTorch."""


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A data loader, or an iterator with a state, that is alive in the program.

    Attributes:
        name: its class.
        in_state: whether it is a leaf of the state.
        has_state: whether it has a state that can be saved.
        is_exact: whether it is in the state within an `ExactLoader` or a `PreparedLoader`.
        is_prepared: whether it is a loader of PyTorch that accelerate has prepared.
        has_generator: whether it is a loader of PyTorch that has a generator of its own.
        is_torch: whether it is a loader of PyTorch.
        is_random: whether it is a loader of PyTorch that shuffles.
        worker_count: the processes that load for it.
        is_stream: whether it is an `IterableDataset` of Hugging Face's datasets that is a leaf of
            the state, or an attribute of one.
    """

    name: str
    in_state: bool
    has_state: bool
    is_exact: bool = False
    is_prepared: bool = False
    has_generator: bool = False
    is_torch: bool = False
    is_random: bool = False
    worker_count: int = 0
    is_stream: bool = False


class ProgramFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a program at its first save.

    Attributes:
        random_paths: the names in the state of each `RandomState`.
        time_paths: the names in the state of durations, which differ in equal trainings: an object
            of the state has their keys in its `host_times`.
        loaders: the loaders and iterators that are alive.
        is_deterministic: whether PyTorch is to use deterministic algorithms alone; None: it is not
            imported.
    """

    random_paths: tuple[str, ...]
    loaders: tuple[LoaderFacts, ...]
    is_deterministic: bool | None = None
    time_paths: tuple[str, ...] = ()


def random_streams() -> dict[str, str]:
    """Return a digest of the state of each random generator that programs share, by name."""
    streams = {"python": repr(random.getstate())}
    if numpy := sys.modules.get("numpy.random"):
        kind, keys, *rest = numpy.get_state()
        streams["numpy"] = f"{kind} {keys.tobytes().hex()} {rest}"
    if torch := _imported_torch():
        streams["torch"] = torch.get_rng_state().numpy().tobytes().hex()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states = torch.cuda.get_rng_state_all()
            streams["cuda"] = "".join(state.numpy().tobytes().hex() for state in states)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in streams.items()}


def _imported_torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_rng_state") else None


def epochs_of() -> dict[str, int]:
    """Return the epochs of the samplers that are alive and have one, by class and number."""
    epochs: dict[str, int] = {}
    for loader in _alive_loaders():
        for part in (loader, getattr(loader, "sampler", None)):
            for name in ("epoch", "iteration"):
                number = getattr(part, name, None)
                if type(number) is int:
                    epochs[f"{type(part).__name__}.{name} {len(epochs)}"] = number
    return epochs


def _alive_loaders() -> list[Any]:
    """Return the loaders of PyTorch, and the iterators of Grain and the like, that are alive."""
    if not {"torch.utils.data", "grain", "grain.python", "torchdata"} & sys.modules.keys():
        return []
    loaders = [thing for thing in gc.get_objects() if _is_loader(type(thing))]
    inner = {id(loader.base_dataloader) for loader in loaders if _is_prepared(type(loader))}
    return [loader for loader in loaders if id(loader) not in inner][:LOADERS_MAX]


def _is_prepared(kind: type) -> bool:
    return any(base.__name__ == _PREPARED for base in kind.__mro__)


_KINDS: dict[type, bool] = {}


def _is_loader(kind: type) -> bool:
    is_loader = _KINDS.get(kind)
    if is_loader is None:
        try:
            packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
            methods = ("__next__", "get_state", "set_state")
            is_grain = "grain" in packages and all(hasattr(kind, name) for name in methods)
            is_torch = not packages.isdisjoint(("torch", "torchdata"))
            is_torch = is_torch and any(base.__name__ in _LOADERS for base in kind.__mro__)
            is_loader = is_grain or is_torch or _is_prepared(kind)
        except (AttributeError, TypeError):
            is_loader = False
        _KINDS[kind] = is_loader
    return is_loader


def _is_stream(kind: type) -> bool:
    names = {(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__}
    return ("datasets", "IterableDataset") in names


def program_facts(state: object) -> ProgramFacts:
    """Return what is known of the program whose state this is."""
    leaves, torch = dict(_leaves(state, ())), _imported_torch()
    exact = {id(leaf.loader) for leaf in leaves.values() if type(leaf).__name__ in _EXACT}
    held = {id(leaf) for leaf in leaves.values()} | exact
    loaders = [
        LoaderFacts(
            name=type(loader).__name__,
            in_state=id(loader) in held,
            is_exact=id(loader) in exact,
            is_prepared=_is_prepared(type(loader)),
            has_state=hasattr(loader, "state_dict") or hasattr(loader, "get_state"),
            has_generator=getattr(loader, "generator", None) is not None,
            is_torch=hasattr(loader, "num_workers") and hasattr(loader, "dataset"),
            is_random="Random" in type(getattr(loader, "sampler", None)).__name__,
            worker_count=int(getattr(loader, "num_workers", 0) or 0),
        )
        for loader in _alive_loaders()
    ] + [
        LoaderFacts(name=type(part).__name__, in_state=True, has_state=True, is_stream=True)
        for leaf in leaves.values()
        for part in (leaf, *getattr(leaf, "__dict__", {}).values())
        if _is_stream(type(part))
    ]
    return ProgramFacts(
        random_paths=tuple(
            path_name(path) for path, leaf in leaves.items() if type(leaf).__name__ == "RandomState"
        ),
        loaders=tuple(loaders),
        is_deterministic=torch.are_deterministic_algorithms_enabled() if torch else None,
        time_paths=tuple(
            path_name((*path, key))
            for path, leaf in leaves.items()
            for key in getattr(getattr(leaf, "wrapped", leaf), "host_times", ())
        ),
    )


def loader_problem(state: object) -> str | None:
    """Return what is wrong with a loader beside a `RandomState` in the state; None: nothing.

    Trainers of other projects make iterators in their own way, which their integrations follow:
    with these only loaders that are leaves of the state count.
    """
    if "torch.utils.data" not in sys.modules or not any(
        type(leaf).__name__ == "RandomState" for _, leaf in _leaves(state, ())
    ):
        return None
    has_trainer = any(name in sys.modules for name in _TRAINERS)
    for loader in program_facts(state).loaders:
        if loader.is_exact:
            continue
        is_meant = loader.in_state or (loader.is_random and not has_trainer)
        if loader.is_prepared and is_meant:
            return (
                f"the state has a {loader.name} of accelerate, and not the number of its epoch: "
                "after a restart in a later epoch it gives other batches. Iterate over "
                "holdfast.interop.trainers.accelerate.PreparedLoader(loader), and put that into "
                "the state"
            )
        if loader.is_torch and is_meant and not loader.has_generator:
            return (
                f"the state has a RandomState, and a {loader.name} draws from PyTorch's generator "
                "of all each time that it is iterated over, also after a restart: from there on "
                "all random numbers differ. Give it generator=torch.Generator().manual_seed(0); "
                "see holdfast.torch.ExactLoader, and `holdfast prove`"
            )
    return None


def order_problem() -> str | None:
    """Return what is lost of this process's orders of samples at a restart; None: nothing is."""
    if not SAMPLE_ORDERS or any(order.is_saved for order in SAMPLE_ORDERS):
        return None
    return (
        "no holdfast.data.Order is in the state: a restart loses which samples were skipped, and "
        "where another batch size began; put it there: "
        '{"model": model, …, "order": order}'
    )


def _leaves(node: object, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the objects in a tree of dicts, lists and tuples, with their paths."""
    if isinstance(node, _CONTAINERS) and len(path) < DEPTH_MAX:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(child, (*path, key))
    else:
        yield path, node
