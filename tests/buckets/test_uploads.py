"""The command that lists unfinished uploads of a run, and aborts them."""

from __future__ import annotations

import json
import os

import pytest

from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.store.location import RunLocation
from holdfast.store.unfinished_uploads import UnfinishedUploads
from tests.buckets.s3_server import BUCKET
from tests.buckets.test_runs import run_command


def test_uploads_of_the_run_are_listed_and_aborted_once_they_are_old(url: str) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    client = boto3.client("s3", region_name=os.environ["AWS_REGION"])
    own = f"{RunLocation(url).bucket_and_prefix()[1]}/image"
    # One of the run, and one of a run whose name begins with its.
    for key in (own, own.replace("/image", "-2/image")):
        begun = client.create_multipart_upload(Bucket=BUCKET, Key=key)
        part = {"UploadId": begun["UploadId"], "PartNumber": 1, "Body": b"1"}
        client.upload_part(Bucket=BUCKET, Key=key, **part)

    def listed(*options: str) -> list[str]:
        found = json.loads(run_command("uploads", url, "--json", *options))
        return [one["key"] for one in found["uploads"]]

    assert listed() == []
    assert listed("--older-than", "0") == [own]
    assert own in run_command("uploads", url, "--older-than", "0")
    # One that may be under way is left alone.
    run_command("uploads", url, "--abort", "--yes")
    assert listed("--older-than", "0") == [own]
    aborted = run_command("uploads", url, "--abort", "--yes", "--older-than", "0")
    assert aborted.endswith("aborted 1 upload\n")
    assert listed("--older-than", "0") == []
    left = UnfinishedUploads(RunLocation(f"{url}-2"))
    assert len([*left.list()]) == 1
    for one in left.list():
        left.abort_upload(one)


def test_a_missing_bucket_is_named_and_not_a_permission(url: str) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    with pytest.raises(StorageError, match="no such bucket: create it") as caught:
        [*UnfinishedUploads(RunLocation("s3://missing-bucket/run")).list()]
    assert "this request needs" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "advice"), [("gs://b/run", "rule"), ("az://b/run", "week"), ("/run", "directory")]
)
def test_services_that_list_no_uploads_are_refused_by_name(place: str, advice: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{place}.*s3://.*{advice}"):
        UnfinishedUploads(RunLocation(place))


def test_what_boto3_refuses_is_one_error_of_holdfast(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(InvalidArgumentError, match="missing"):
        UnfinishedUploads(RunLocation("s3://b/run"))
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="credentials"):
        [*UnfinishedUploads(RunLocation("s3://b/run")).list()]
