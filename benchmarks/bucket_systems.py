"""The checkpointers of PyTorch whose checkpoints lie in a bucket, or on a disk beside it.

Orbax has none for S3.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks.torch_states import TorchState
from benchmarks.torch_systems import Dcp, Holdfast, TorchSystem


class DcpS3(Dcp):
    """`dcp.async_save` with its threads and the writer of `s3torchconnector`.

    It syncs nothing: an object is durable once it is visible. The writer has one thread for each
    checkpoint, as is its default and that of PyTorch.
    """

    def __init__(self, url: str) -> None:
        import obstore
        from obstore.store import from_url
        from s3torchconnector import S3ClientConfig

        # Steps are kept by name only; the folder stays empty.
        super().__init__(Path(tempfile.mkdtemp()))
        self._url = url
        self._api: Any = obstore
        self._store = from_url(url, client_options={"allow_http": True})
        prefixes = self._api.list_with_delimiter(self._store)["common_prefixes"]
        self._steps = sorted(int(Path(prefix).name) for prefix in prefixes)
        self._options = {
            "region": os.environ["AWS_REGION"],
            "s3client_config": S3ClientConfig(force_path_style=True),
        }

    def restore(self, into: TorchState) -> None:
        from s3torchconnector.dcp import S3StorageReader

        found = into.state_dicts()
        path = f"{self._url}/{self._steps[-1]}"
        dcp.load(found, storage_reader=S3StorageReader(path=path, **self._options))
        into.load(found)

    def close(self) -> None:
        super().close()
        self._directory.rmdir()

    def _remove(self, path: Path) -> None:
        for page in self._api.list(self._store, prefix=path.name):
            self._api.delete(self._store, [one["path"] for one in page])

    def _begin(self, step: int, state: TorchState) -> None:
        from s3torchconnector.dcp import S3StorageWriter

        found: Any = dcp.async_save(
            state.state_dicts(),
            storage_writer=S3StorageWriter(path=f"{self._url}/{step}", **self._options),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        self._saving = getattr(found, "upload_completion", found)


BUCKET_SYSTEMS: dict[str, Callable[[str], TorchSystem]] = {
    "holdfast": Holdfast,
    "dcp s3torchconnector": DcpS3,
}
