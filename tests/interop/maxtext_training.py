"""Train a tiny model with MaxText: `DIRECTORY KIND STEP EVENT SOURCE [FLAG=VALUE...]`.

KIND is `orbax`, `holdfast` (by the page's example) or `startup` (by PYTHONPATH). After STEP comes
EVENT: `kill` or `terminate` (the signals), `remove` (of the run), or nothing. Where COORDINATOR is
set to an address, this is process PROCESS of the two that meet there.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from tests.interop.page_examples import examples

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

FLAGS = {
    "run_name": "tiny",
    "steps": "50",
    "dataset_type": "synthetic",
    "per_device_batch_size": "1",
    "max_target_length": "16",
    "base_emb_dim": "16",
    "base_mlp_dim": "32",
    "base_num_query_heads": "2",
    "base_num_kv_heads": "2",
    "head_dim": "8",
    "base_num_decoder_layers": "2",
    "vocab_size": "64",
    "hardware": "cpu",
    "skip_jax_distributed_system": "true",
    "enable_goodput_recording": "false",
    "enable_checkpointing": "true",
    "attention": "dot_product",
    "checkpoint_period": "10",
}


def main() -> None:
    directory, kind, step, event, source, *flags = sys.argv[1:]
    if "COORDINATOR" in os.environ:
        jax.distributed.initialize(os.environ["COORDINATOR"], 2, int(os.environ["PROCESS"]))
    if kind == "holdfast":
        exec(examples()["MaxText"], {})
    from maxtext.common import checkpointing

    assert getattr(checkpointing, "is_of_holdfast", False) == (kind == "holdfast")
    own_save = checkpointing.maybe_save_checkpoint

    def save(checkpoint_manager: Any, state: Any, config: Any, data: Any, at: Any = None) -> None:
        own_save(checkpoint_manager, state, config, data, at)
        if at != int(step):
            return
        # The name of the call in each generation of MaxText.
        wait = getattr(checkpoint_manager, "wait_until_finished", None) or checkpoint_manager.wait
        if event == "kill":
            wait()
            for worker in multiprocessing.active_children():
                worker.kill()  # Grain's workers would wait for this process forever.
            # A lost process ends the other ones, with what they leave.
            multihost_utils.sync_global_devices("kill")
            os.kill(os.getpid(), signal.SIGKILL)
        elif event == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        elif event == "remove":
            wait()
            shutil.rmtree(Path(directory, "tiny", "checkpoints", "holdfast"))

    checkpointing.maybe_save_checkpoint = save
    assets = Path(source, "src", "maxtext")
    given = FLAGS | {"base_output_directory": directory, "metrics_file": f"{directory}/metrics.txt"}
    given |= {"tokenizer_path": str(assets / "assets" / "tokenizers" / "tokenizer.default")}
    given |= dict(flag.split("=", 1) for flag in flags)
    arguments = (f"{name}={value}" for name, value in given.items())
    sys.argv = ["train", str(assets / "configs" / "base.yml"), *arguments]
    if kind == "startup":
        # The hook acts when the trainer's utilities are imported.
        importlib.import_module("maxtext.utils.train_utils")
        assert checkpointing.is_of_holdfast
        checkpointing.maybe_save_checkpoint = save
    runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
