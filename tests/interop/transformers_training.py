"""Train a tiny GPT-2 with Hugging Face's Trainer: `RUN OUTPUT STEP`, killed after STEP.

RUN `-` trains without Holdfast. It prints the last step and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast import save_decision_policy
from holdfast.interop.trainers.transformers import train

RUN, OUTPUT, LAST = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Kill(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == LAST:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = torch.randint(0, 50, (20, 8))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=OUTPUT,
            per_device_train_batch_size=2,
            num_train_epochs=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Kill()],
    )
    if RUN == "-":
        trainer.train()
    else:
        every_3 = save_decision_policy.FixedIntervalPolicy(3)
        train(trainer, RUN, save_decision_policy=every_3)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("ENDED", trainer.state.global_step, digest.hexdigest())


main()
