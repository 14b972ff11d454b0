"""Objects whose state becomes a part of the tree: modules, optimizers, schedulers, sparse tensors.

The state of such an object is the same on all ranks, or distributed over them as DTensors. Any
other object with `state_dict` and `load_state_dict` is a leaf: each rank saves its own state.

See docs/decisions/0026.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.adapt.contract import RestoreRequest
from holdfast.adapt.leaves import divides_states, object_errors
from holdfast.adapt.nested import nested
from holdfast.adapt.torch import tensors
from holdfast.errors import StructureMismatchError, UnsupportedLeafError
from holdfast.format.dtypes import dtype_name, numpy_dtype
from holdfast.format.paths import Path, path_name
from holdfast.format.records import CheckpointSpec
from holdfast.format.values import TensorValue, decode_value

log = logging.getLogger(__name__)

TENSORS_OF_VALUE_MAX_BYTES = 64 * 1024 * 1024
"""More bytes of tensors in one object's own state are refused: they would be text in a record."""

_SPARSE = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""What schedulers add to the groups of an optimizer."""


class Replicated:
    """An object with `state_dict` and `load_state_dict` whose state is the same on all ranks.

    Its tensors are saved like those of a module, once for all ranks: use it for large states, such
    as averaged weights. Without it, each rank saves the object's state for itself.
    """

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def state_dict(self) -> Any:
        """Return the state of the wrapped object."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Set the state of the wrapped object."""
        self.wrapped.load_state_dict(state)


class NewTensor:
    """A tensor to be made while restoring: PyTorch makes an optimizer's at its first step."""

    def __init__(self, shape: tuple[int, ...], dtype: str, like: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self.like = like if like is not None and tuple(like.shape) == shape else None
        self._made: Any = None

    @property
    def tensor(self) -> Any:
        """The tensor, made on first use."""
        if self._made is None:
            dtype = getattr(torch, self.dtype)
            if self.like is not None:
                self._made = torch.empty_like(self.like, dtype=dtype, requires_grad=False)
            else:
                self._made = torch.empty(self.shape, dtype=dtype)
        return self._made


class ModuleState:
    """A module: its tensors by the names of its state dict, whatever wraps it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.leaf = module
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        self._module: Any = getattr(module, "_orig_mod", module)
        # A compiled submodule has this in the names of its tensors.
        self._names = {
            name.replace("_orig_mod.", ""): name for name in self._module.state_dict(keep_vars=True)
        }

    def state_tree(self) -> dict[str, Any]:
        state = self._module.state_dict(keep_vars=True)
        return {name: _plain(state[own]) for name, own in self._names.items()}

    def tree_to_fill(self, spec: CheckpointSpec, request: RestoreRequest, path: Path) -> Any:
        return self.state_tree()

    def set_state(self, tree: Any) -> None:
        """Load what was not filled in place: values, and tensors made for the meta device.

        A module may also make tensors for its state dict, by hooks or methods of its own: those
        that were filled are not its memory, so it has to load them.
        """
        own = self._module.state_dict(keep_vars=True)
        held = _Memory(self._module)
        others: dict[str, Any] = {}
        new_tensors: dict[str, Any] = {}
        for name, value in tree.items():
            of = own[self._names[name]]
            if not isinstance(of, torch.Tensor) or not (of.is_meta or held.has(value)):
                others[self._names[name]] = value
            elif of.is_meta and value is not of:
                new_tensors[self._names[name]] = value
        if new_tensors:
            self._module.load_state_dict(new_tensors, strict=False, assign=True)
        if others:
            self._module.load_state_dict(others, strict=False)


class _Memory:
    """The memory of a module: that of its parameters and buffers."""

    def __init__(self, module: torch.nn.Module) -> None:
        every = [*module.parameters(), *module.buffers()]
        self._ids = set(map(id, every))
        self._every = every
        self._storages: set[int] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether the elements of a tensor are those of the module."""
        if id(tensor) in self._ids:
            return True
        if self._storages is None:
            # Of nearly all modules the state dict has the tensors themselves.
            self._storages = {_storage(member) for member in self._every}
        return _storage(tensor) in self._storages


def _storage(tensor: Any) -> int:
    return int(tensors.local(tensor).untyped_storage()._cdata)


class ObjectState:
    """An object whose `load_state_dict` takes the whole state: the checkpoint gives its structure.

    Tensors that the object has already are filled in place.
    """

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf
        self._is_kept = False

    def state_tree(self) -> Any:
        return _plain(self.leaf.state_dict())

    def tree_to_fill(self, spec: CheckpointSpec, request: RestoreRequest, path: Path) -> Any:
        """Return the object's state with the structure of the checkpoint.

        Raises:
            StructureMismatchError: it is another optimizer, or has other parameters, than the one
                saved.
        """
        own = self.state_tree()
        saved = _saved_tree(spec, path)
        if not isinstance(saved, dict) or not isinstance(own, dict):
            return own
        groups = (*path, "param_groups")
        if isinstance(self.leaf, torch.optim.Optimizer) and request.wants(groups):
            difference = _difference_of_groups(own, saved, self.leaf.defaults)
            if difference is not None and not request.partial.covers(groups):
                raise StructureMismatchError(
                    f"{request.call} {path_name(groups)}: expected {difference}; to start with a "
                    f"new state of the optimizer, pass partial=[{path_name(path)!r}]"
                )
            if difference is not None:
                # Its state belongs to parameters by their numbers, which now are others.
                self._is_kept = True
                return {}
        tree = {}
        for key in dict.fromkeys([*own, *saved]):
            if not request.wants((*path, key)):
                if key in own:
                    tree[key] = own[key]
            elif key in saved:
                tree[key] = self._merged(own.get(key), saved[key], (*path, key), len(path))
            elif request.partial.covers((*path, key)):
                tree[key] = own[key]
        return tree

    def _merged(self, own: Any, saved: Any, path: Path, depth: int) -> Any:
        """Return `saved`, with the object's own tensors in the place of saved arrays."""
        if isinstance(saved, _SavedArray):
            if isinstance(own, torch.Tensor) and tuple(own.shape) == saved.shape:
                return own
            if isinstance(own, np.ndarray | np.generic):
                return own
            return NewTensor(saved.shape, saved.dtype, self._parameter(path[depth:]))
        if isinstance(saved, dict):
            of = own if isinstance(own, dict) else {}
            return {k: self._merged(of.get(k), v, (*path, k), depth) for k, v in saved.items()}
        if isinstance(saved, list | tuple):
            items = own if isinstance(own, list | tuple) and len(own) == len(saved) else ()
            items = [*items, *[None] * (len(saved) - len(items))]
            merged = [
                self._merged(items[i], item, (*path, i), depth) for i, item in enumerate(saved)
            ]
            return merged if isinstance(saved, list) else tuple(merged)
        return saved

    def _parameter(self, key: Path) -> Any:
        """Return the parameter of an optimizer that the state at `key` belongs to, or None."""
        if not isinstance(self.leaf, torch.optim.Optimizer) or key[:1] != ("state",):
            return None
        every = [p for group in self.leaf.param_groups for p in group["params"]]
        index = key[1]
        return every[index] if isinstance(index, int) and index < len(every) else None

    def set_state(self, tree: Any) -> None:
        if not self._is_kept:
            self.leaf.load_state_dict(tree)


class SparseState:
    """A sparse tensor: its components are the arrays."""

    def __init__(self, leaf: torch.Tensor, path: Path) -> None:
        if tensors.is_distributed(leaf) or leaf.is_meta:
            raise UnsupportedLeafError(
                f"save {path_name(path)}: a sparse tensor on {leaf.device} cannot be stored; save "
                "its components"
            )
        self.leaf = leaf

    def state_tree(self) -> dict[str, Any]:
        held = self.leaf.detach()
        names = _SPARSE[held.layout]
        # The components of a tensor that is not coalesced have private names only.
        is_coo = held.layout is torch.sparse_coo
        parts = {name: getattr(held, f"_{name}" if is_coo else name)() for name in names}
        layout = tensors.dtype_name_of(held.layout)
        fields = {**parts, "shape": list(held.shape), "layout": layout}
        return {**fields, "is_coalesced": held.is_coalesced()} if is_coo else fields

    def tree_to_fill(self, spec: CheckpointSpec, request: RestoreRequest, path: Path) -> Any:
        """Return the components as saved: they may be more or fewer than the tensor has.

        Raises:
            StructureMismatchError: the tensor has another shape or layout.
        """
        own, saved = self.state_tree(), _saved_tree(spec, path)
        if not request.wants(path) or not isinstance(saved, dict):
            return own
        for key in ("layout", "shape"):
            if own[key] != saved.get(key):
                raise StructureMismatchError(
                    f"{request.call} {path_name(path)}: expected a sparse tensor of {key} "
                    f"{own[key]}, found {saved.get(key)}"
                )
        return {
            key: NewTensor(value.shape, value.dtype, None)
            if isinstance(value, _SavedArray)
            else value
            for key, value in saved.items()
        }

    def set_state(self, tree: Any) -> None:
        parts = [tree[name] for name in _SPARSE[self.leaf.layout]]
        if self.leaf.layout is torch.sparse_coo:
            sparse_tensor = torch.sparse_coo_tensor(
                *parts, tree["shape"], is_coalesced=tree["is_coalesced"], check_invariants=False
            )
        else:
            sparse_tensor = torch.sparse_compressed_tensor(
                *parts, tree["shape"], layout=self.leaf.layout, check_invariants=False
            )
        with torch.no_grad():
            self.leaf.resize_as_sparse_(sparse_tensor)
            self.leaf.copy_(sparse_tensor)


class ProcessObject:
    """An object with a state of each rank's own; the tensors in it are values."""

    def __init__(self, leaf: Any, path: Path, get: Callable[[], Any], put: Callable[[Any], Any]):
        self.leaf, self._path, self._get, self._put = leaf, path, get, put
        if divides_states(leaf):
            self.set_states = self._divide_states

    def get_state(self) -> Any:
        """Return the state as values.

        Raises:
            UnsupportedLeafError: it has too many bytes of tensors.
        """
        sizes: list[int] = []
        with object_errors(self.leaf, self._path, "save"):
            state = _with_values(self._get(), path_name(self._path), sizes)
        if sum(sizes) > TENSORS_OF_VALUE_MAX_BYTES:
            raise UnsupportedLeafError(
                f"save {path_name(self._path)}: the state of this {type(self.leaf).__qualname__} "
                f"has {sum(sizes)} bytes of tensors, expected at most "
                f"{TENSORS_OF_VALUE_MAX_BYTES} in what each rank saves for itself; if all ranks "
                "have the same state, wrap the object in holdfast.torch.Replicated"
            )
        return state

    def set_state(self, state: Any) -> None:
        with object_errors(self.leaf, self._path, "restore"):
            self._put(with_tensors(state, path_name(self._path)))

    def _divide_states(self, states: Sequence[Any], *, rank: int, count: int) -> None:
        with object_errors(self.leaf, self._path, "restore"):
            tensors_of = [with_tensors(state, path_name(self._path)) for state in states]
            self.leaf.set_states(tensors_of, rank=rank, count=count)


StateObject = ModuleState | ObjectState | SparseState


def state_object(leaf: Any, path: Path) -> StateObject | None:
    """Return what makes a subtree of `leaf`; None if it is a leaf."""
    if isinstance(leaf, torch.Tensor):
        return SparseState(leaf, path) if leaf.layout in _SPARSE else None
    if isinstance(leaf, torch.nn.Module):
        return ModuleState(leaf)
    shared = (
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
        Replicated,
    )
    return ObjectState(leaf) if isinstance(leaf, shared) else None


def process_object(leaf: Any, path: Path) -> ProcessObject | None:
    """Return the state of an object that each rank saves for itself; None for another leaf."""
    if isinstance(leaf, torch.Tensor | type | ProcessObject):
        return None
    for get, put in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        reader, writer = getattr(leaf, get, None), getattr(leaf, put, None)
        if callable(reader) and callable(writer):
            return ProcessObject(leaf, path, reader, writer)
    return None


class _SavedArray:
    """The place of an array of the checkpoint, in a tree of its values."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype


def _saved_tree(spec: CheckpointSpec, path: Path) -> Any:
    """Return what was saved at and below `path`, with `_SavedArray` for arrays; None if nothing."""
    depth = len(path)
    leaves: dict[Path, Any] = {}
    for at, index in spec.array_indices().items():
        if at[:depth] == path:
            leaves[at[depth:]] = _SavedArray(spec.arrays[index].shape, spec.arrays[index].dtype)
    for value in spec.values:
        if value.path[:depth] == path:
            leaves[value.path[depth:]] = decode_value(value.value)
    inner = {c.path[depth:]: c for c in spec.containers if c.path[:depth] == path}
    return nested(inner, leaves) if () in inner else None


def _difference_of_groups(
    own: dict[str, Any], saved: dict[str, Any], defaults: dict[str, Any]
) -> str | None:
    """Return in which way an optimizer is another one than that saved; None if it is the same."""
    groups = [list(tree.get("param_groups", ())) for tree in (own, saved)]
    counts = [[len(group["params"]) for group in of] for of in groups]
    if counts[0] != counts[1]:
        return f"an optimizer of {counts[0]} parameters in its groups, found {counts[1]}"
    for of_own, of_saved in zip(*groups, strict=True):
        missing = sorted(defaults.keys() - of_saved.keys())
        extra = sorted(of_saved.keys() - of_own.keys() - _OF_SCHEDULERS)
        # Another version of PyTorch adds settings to an optimizer, or takes some away.
        if missing and extra:
            return f"an optimizer with {', '.join(missing)}, found one with {', '.join(extra)}"
    return None


def _plain(state: Any) -> Any:
    """Return a state with only dicts, lists and tuples as inner nodes."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, torch.Size):
        return tuple(state)
    if type(state) in (list, tuple):
        return type(state)(map(_plain, state))
    return state


def _with_values(state: Any, where: str, sizes: list[int]) -> Any:
    """Return `state` with values in the place of tensors; add their sizes to `sizes`."""
    if isinstance(state, torch.Tensor):
        tensors.check_storable(state, (where,))
        held = tensors.local(state).contiguous()
        data = tensors.host_bytes(held)
        sizes.append(data.nbytes)
        dtype = numpy_dtype(tensors.dtype_name_of(held.dtype))
        return np.frombuffer(data, dtype).reshape(held.shape).copy().view(TensorValue)
    if isinstance(state, dict):
        return {k: _with_values(v, f"{where}/{k}", sizes) for k, v in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_with_values(v, f"{where}/{i}", sizes) for i, v in enumerate(state))
    return state


def with_tensors(state: Any, where: str) -> Any:
    """Return a state that was read with tensors again where it was saved with some.

    Args:
        state: nested dicts, lists and tuples, as `Run.restore` returns the states of objects.
        where: its path, for messages.
    """
    if isinstance(state, TensorValue):
        name = dtype_name(state.dtype)
        assert name is not None
        return tensors.tensor_of(np.asarray(state), name, where)
    if isinstance(state, dict):
        return {key: with_tensors(value, f"{where}/{key}") for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(with_tensors(value, where) for value in state)
    return state


class RandomState:
    """The generators of PyTorch (of the CPU and of each CUDA device), Python and NumPy.

    Each rank saves its own. CUDA's are saved once it is used, and restored on as many devices.

    Args:
        per_rank: Whether a job of another number of processes may restore it. All generators of a
            rank then begin anew, from a seed that is made of the saved states and the rank: other
            numbers than those of the job before, and the same ones whenever that checkpoint is
            restored on that many processes. Otherwise such a restore is an error.
    """

    def __init__(self, *, per_rank: bool = False) -> None:
        if per_rank:
            self.set_states = self._begin_anew

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        uses_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states."""
        torch.set_rng_state(state["torch"])
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, device)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])

    def _begin_anew(self, states: Sequence[dict[str, Any]], *, rank: int, count: int) -> None:
        digest = xxhash.xxh3_64()
        for state in states:
            digest.update(state["torch"].numpy().tobytes())
            digest.update(repr((state["python"], state["numpy"][1].tobytes())).encode())
        digest.update(f"{rank} of {count}".encode())
        seed = digest.intdigest()
        torch.manual_seed(seed)
        random.seed(seed)
        # With two words it would give the numbers of `random`, whose algorithm is the same.
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
        log.info(
            "the random numbers of rank %d begin anew: saved by %d processes, restored on %d",
            rank,
            len(states),
            count,
        )
