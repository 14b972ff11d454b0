"""Give the arrays and values of a checkpoint other names before they are compared with a state.

A renaming is a pure function of names, as `path_name` prints them. Renaming the description of a
checkpoint changes nothing that is stored: arrays keep their indices, by which they are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from msgspec import structs

from holdfast.errors import InvalidArgumentError, StructureMismatchError
from holdfast.format.paths import ROOT_NAME, Path, path_name
from holdfast.format.records import CheckpointSpec, Container, Key

_INDEX = re.compile(r"0|[1-9][0-9]{0,17}")
NAMES_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Renaming:
    """New names for what a checkpoint has.

    Attributes:
        rule: Replaces the beginnings of names: the longest key that a name starts with is replaced
            by its value, once. Keys are text, so `old` also begins `older/w`; a key that ends with
            a slash or a dot does not. Or a function that returns the new name of a name.
    """

    rule: Mapping[str, str] | Callable[[str], str]
    is_repeated: bool = False
    """Whether it is applied again to what is saved under the new names, as by each `resume`."""

    def name(self, name: str) -> str:
        """Return the new name of `name`.

        Raises:
            InvalidArgumentError: The function failed, or returned something else than a name.
        """
        if isinstance(self.rule, Mapping):
            prefix = max(filter(name.startswith, self.rule), key=len, default=None)
            return name if prefix is None else self.rule[prefix] + name[len(prefix) :]
        try:
            renamed = self.rule(name)
        except Exception as error:
            raise InvalidArgumentError(
                f"rename={self.rule!r}: expected the new name of {name!r}, found "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(renamed, str):
            raise InvalidArgumentError(
                f"rename={self.rule!r}: expected the new name of {name!r} as a str, found "
                f"{renamed!r}"
            )
        return renamed

    def path(self, path: Path) -> Path:
        """Return the path with the new name of `path`.

        The last keys that keep their text keep their type, and with as many keys as before each has
        the type of the one in its place. Others are ints where they are decimal numbers, as the
        indices of lists are.
        """
        name = path_name(path)
        renamed = self.name(name)
        if renamed == name:
            return path
        if renamed in ("", ROOT_NAME):
            return ()
        texts = renamed.split("/")
        if "" in texts:
            raise InvalidArgumentError(
                f"rename: expected a name for {name!r} whose keys are not empty, found {renamed!r}"
            )
        keys: list[Key] = [int(t) if _INDEX.fullmatch(t) else unquote(t) for t in texts]
        if len(keys) == len(path):
            # A number in place of a string is a string.
            keys = [
                str(key) if isinstance(old, str) else key
                for old, key in zip(path, keys, strict=True)
            ]
        for place in range(1, min(len(path), len(keys)) + 1):
            if path_name((path[-place],)) != texts[-place]:
                break
            keys[-place] = path[-place]
        return tuple(keys)

    def spec(self, spec: CheckpointSpec, call: str) -> CheckpointSpec:
        """Return the description of a checkpoint with the new names; nothing else differs.

        Inner nodes that get other children become dicts, with their keys in ascending order.

        Raises:
            InvalidArgumentError: Two arrays or values would have one name, or one would be inside
                another.
            StructureMismatchError: The checkpoint has nothing at a prefix, nor at the name that
                the prefix is replaced by.
        """
        if not self.rule:
            return spec
        leaves = [
            *(array.path for array in spec.arrays),
            *(alias.path for alias in spec.aliases),
            *(value.path for value in spec.values),
            *spec.process_values,
        ]
        self._check_used(map(path_name, leaves), call)
        if self.is_repeated:
            self._check_repeatable(map(path_name, leaves))
        inner = _children([*leaves, *(container.path for container in spec.containers)])
        # An inner node without children has a name of its own, as a leaf has.
        leaves += [c.path for c in spec.containers if c.path and c.path not in inner]
        renamed = {path: self.path(path) for path in leaves}
        _check_distinct(renamed)
        return structs.replace(
            spec,
            arrays=tuple(structs.replace(a, path=renamed[a.path]) for a in spec.arrays),
            aliases=tuple(structs.replace(a, path=renamed[a.path]) for a in spec.aliases),
            values=tuple(structs.replace(v, path=renamed[v.path]) for v in spec.values),
            process_values=tuple(renamed[path] for path in spec.process_values),
            containers=_containers(spec.containers, renamed),
        )

    def _check_repeatable(self, names: Iterable[str]) -> None:
        for name in names:
            renamed = self.name(name)
            again = self.name(renamed)
            if again != renamed:
                raise InvalidArgumentError(
                    f"resume(rename=...): expected new names that stay as they are, since the next "
                    f"start renames again, found {name!r}, {renamed!r}, and then {again!r}; rename "
                    "once with holdfast.load(...) and save to a new run, or give beginnings that "
                    "no new name has, such as 'body/' instead of 'body'"
                )

    def _check_used(self, names: Iterable[str], call: str) -> None:
        if not isinstance(self.rule, Mapping):
            return
        saved = tuple(names)
        for prefix, new in self.rule.items():
            # What was saved after an earlier renaming has the new names.
            beginnings = (prefix, new) if new else (prefix,)
            if not any(name.startswith(beginnings) for name in saved):
                shown = ", ".join(saved[:NAMES_SHOWN_MAX])
                raise StructureMismatchError(
                    f"{call}: expected names that begin with {prefix!r} (rename=...), found none "
                    f"in the checkpoint{f', nor any with {new!r}' if new else ''}; it has {shown}"
                    f"{' and more' if len(saved) > NAMES_SHOWN_MAX else ''}"
                )


NO_RENAMING = Renaming({})
"""The names as they were saved."""


def _check_distinct(renamed: Mapping[Path, Path]) -> None:
    origins: dict[Path, Path] = {}
    for path, new in renamed.items():
        if new in origins:
            raise InvalidArgumentError(
                f"rename: expected different names for {path_name(origins[new])!r} and "
                f"{path_name(path)!r}, found {path_name(new)!r} for both"
            )
        origins[new] = path
    for new, path in origins.items():
        for length in range(len(new)):
            if new[:length] in origins:
                raise InvalidArgumentError(
                    f"rename: expected a place for {path_name(path)!r} beside "
                    f"{path_name(origins[new[:length]])!r}, found {path_name(new)!r} inside of "
                    f"{path_name(new[:length])!r}"
                )


def _containers(
    containers: Sequence[Container], renamed: Mapping[Path, Path]
) -> tuple[Container, ...]:
    """Return the inner nodes of the renamed tree, those above others first."""
    saved = {container.path: container for container in containers}
    origins: dict[Path, Path] = {(): ()}
    for path, new in renamed.items():
        for depth in range(min(len(path), len(new)) + 1):
            origins.setdefault(new[: len(new) - depth], path[: len(path) - depth])
    before, after = _children(renamed), _children(renamed.values())
    nodes = {new: saved[path] for path, new in renamed.items() if path in saved}
    for path, keys in after.items():
        container = saved.get(origins.get(path, path))
        if container is None or before.get(container.path) != keys:
            container = Container(path=path, kind="dict")
        nodes[path] = container
    if () in saved and not renamed:
        nodes[()] = saved[()]
    return tuple(structs.replace(nodes[path], path=path) for path in sorted(nodes, key=len))


def _children(paths: Iterable[Path]) -> dict[Path, set[Key]]:
    """Return the keys of each inner node above `paths`, by the node's path."""
    children: dict[Path, set[Key]] = {}
    for path in paths:
        for length in range(len(path)):
            children.setdefault(path[:length], set()).add(path[length])
    return children
