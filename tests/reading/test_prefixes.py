"""A prefix of a path ends at a whole key."""

from __future__ import annotations

import pytest

from holdfast.format.paths import Path, PathPrefixes, path_name


@pytest.mark.parametrize(
    ("prefix", "path", "covers"),
    [
        ("params", ("params", "w"), True),
        ("params", ("params",), True),
        ("params", ("params_ema", "w"), False),
        ("opt/0", ("opt", 0, "mu"), True),
        ("opt/0", ("opt", 10), False),
        ("opt/0/mu", ("opt", 0), False),
        (".", ("a",), True),
        (".", (), True),
        ("a%2Fb", ("a/b", "w"), True),
        ("a/b", ("a/b", "w"), False),
        ("%5F_metadata__", ("__metadata__",), True),
        ("__metadata__", ("__metadata__", "w"), True),
    ],
)
def test_a_prefix_covers_whole_keys(prefix: str, path: Path, covers: bool) -> None:
    assert PathPrefixes((prefix,)).covers(path) is covers


@pytest.mark.parametrize("path", [("a",), ("a/b", 3), ("__metadata__",), ()])
def test_the_name_of_a_path_covers_it(path: Path) -> None:
    assert PathPrefixes((path_name(path),)).covers(path)


def test_what_is_above_a_prefix_is_known() -> None:
    prefixes = PathPrefixes(("opt/0/mu", "params"))
    above: list[Path] = [(), ("opt",), ("opt", 0)]
    assert all(prefixes.has_above(path) for path in above)
    others: list[Path] = [("params",), ("opt", 0, "mu"), ("op",), ("opt", 1)]
    assert not any(prefixes.has_above(path) for path in others)
    assert not PathPrefixes((".",)).has_above(())
