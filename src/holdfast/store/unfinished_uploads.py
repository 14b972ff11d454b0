"""Uploads in parts that were begun in a bucket and neither completed nor aborted.

A killed process leaves them. Their parts are billed, and no listing of objects shows them. obstore
cannot list them, so boto3 does, for S3 and services with its protocol. The other services have no
request for it: Google Cloud Storage and Azure remove them by a rule and by themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from holdfast.errors import InvalidArgumentError, StorageError
from holdfast.store.bucket.aws_profile import EXTRA
from holdfast.store.location import RunLocation

CONNECT_SECS = 5
TRIES = 2
OTHER_SERVICES = {
    "gs": "give the bucket a rule with the action AbortIncompleteMultipartUpload",
    "az": "it removes parts by itself, a week after the last one",
}


class UnfinishedUpload(NamedTuple):
    """One upload: the object's whole key in the bucket, and when it was begun."""

    key: str
    id: str
    began: datetime


class UnfinishedUploads:
    """The uploads below the prefix of a run."""

    def __init__(self, location: RunLocation) -> None:
        """Make a client; nothing is requested.

        Raises:
            InvalidArgumentError: the run is in no bucket of S3, boto3 is not installed, or refuses
                the environment's configuration.
        """
        scheme = location.text.partition("://")[0] if location.is_url else ""
        if scheme != "s3":
            advice = OTHER_SERVICES.get(scheme, "a directory has none")
            raise InvalidArgumentError(
                f"list the unfinished uploads of {location}: expected a URL that begins with "
                f"s3://; {advice}"
            )
        try:
            import boto3
            from botocore import config, exceptions
        except ImportError as error:
            raise InvalidArgumentError(
                f"list the unfinished uploads of {location}: expected the package boto3, which is "
                f"not installed; pip install '{EXTRA}'"
            ) from error
        bucket, prefix = location.bucket_and_prefix()
        self._where = location.text
        self._bucket = bucket.partition("://")[2]
        self._prefix = f"{prefix}/"
        self._errors = (exceptions.BotoCoreError, exceptions.ClientError)
        self._refusal = exceptions.ClientError
        # As obstore reaches a service of an endpoint.
        style = {"addressing_style": "path"} if os.environ.get("AWS_ENDPOINT_URL") else {}
        # boto3 has a variable of its own for that, which it reads.
        trusted = None if os.environ.get("AWS_CA_BUNDLE") else os.environ.get("SSL_CERT_FILE")
        self._trusted = next(
            (n for n in ("AWS_CA_BUNDLE", "SSL_CERT_FILE") if os.environ.get(n)), ""
        )
        try:
            self._client: Any = boto3.Session().client(
                "s3",
                region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
                config=config.Config(
                    s3=style, connect_timeout=CONNECT_SECS, retries={"total_max_attempts": TRIES}
                ),
                verify=trusted,
            )
        except (exceptions.BotoCoreError, ValueError) as error:
            raise InvalidArgumentError(
                f"list the unfinished uploads of {location}: the environment's configuration is "
                f"refused: {error}; see docs/buckets.md"
            ) from None

    def list(self) -> Iterator[UnfinishedUpload]:
        """Yield the uploads, among them those that are under way now.

        Raises:
            StorageError: the service does not list them.
        """
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        try:
            for page in pages:
                for upload in page.get("Uploads", ()):
                    # Services differ in whether they apply the prefix.
                    if upload["Key"].startswith(self._prefix):
                        yield UnfinishedUpload(
                            upload["Key"], upload["UploadId"], upload["Initiated"]
                        )
        except self._errors as error:
            raise StorageError(
                f"list the unfinished uploads of {self._where}: {error}"
                f"{self._advice(error, 's3:ListBucketMultipartUploads')}"
            ) from None

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Abort an upload; its parts are removed.

        Raises:
            StorageError: the service refuses.
        """
        try:
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.id
            )
        except self._errors as error:
            raise StorageError(
                f"abort the upload of {upload.key}: {error}"
                f"{self._advice(error, 's3:AbortMultipartUpload')}"
            ) from None

    def _advice(self, error: Exception, permission: str) -> str:
        """Return what to do about an error; a permission only if the service refused for one."""
        text = str(error)
        if isinstance(error, self._refusal):
            if "NoSuchBucket" in text:
                return "; there is no such bucket: create it, or check the URL"
            return f"; this request needs {permission}"
        if "SSL" in text and self._trusted:
            return f"; check the endpoint, and {self._trusted}, which names the trusted authorities"
        if "credentials" in text:
            return "; see docs/buckets.md"
        return "; check the endpoint and its port" if "endpoint" in text else ""
