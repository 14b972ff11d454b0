"""What is given as a run's place: paths and URLs, and what is neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.store.location import RunLocation


def test_a_path_is_absolute_and_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("runs/gpt", Path("runs/gpt"), tmp_path / "x" / ".." / "runs" / "gpt"):
        location = RunLocation.parse(given)
        assert (location.text, location.is_url) == (os.fspath(tmp_path / "runs/gpt"), False)
    assert RunLocation.parse("./s3:/runs").text == os.fspath(tmp_path / "s3:/runs")


def test_a_url_has_a_bucket_and_a_prefix_and_a_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    location = RunLocation.parse("S3://bucket/runs/gpt/")
    assert location.text == "s3://bucket/runs/gpt"
    assert location.is_url
    assert location.bucket_and_prefix() == ("s3://bucket", "runs/gpt")
    assert location.folder.parent == tmp_path
    assert location.folder != RunLocation.parse("gs://bucket/runs/gpt").folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (7, "expected a path or a URL"),
        ("", "expected a path or a URL"),
        ("a\0b", r"found 'a\\x00b', which no file system can have"),
        ("a\ud800b", r"found 'a\\ud800b', which no file system can have"),
        ("http://bucket/run", "one of s3://, gs://, az://"),
        ("s3:/bucket/run", "with one slash"),
        ("s3://", "a bucket's name"),
        ("s3://bucket", "a bucket alone"),
        ("gs://bucket/a//run", "empty or relative"),
        ("az://container/a/../b", "empty or relative"),
        ("s3://bucket/run?x=1", "empty or relative"),
        ("s3://bucket/run\n", "expected a prefix"),
    ],
)
def test_what_is_no_place_is_named_with_what_was_expected(given: object, expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        RunLocation.parse(given)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidArgumentError, match="credentials or a port") as found:
        RunLocation.parse("s3://key:secret@bucket/run")
    assert "secret" not in str(found.value)
