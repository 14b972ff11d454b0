"""Train with Hugging Face's Trainer, and lose nothing when the program is killed.

    holdfast prove -- python transformers_training.py

Shuffled batches over several epochs, dropout, a schedule, a log of each second step, an evaluation
after each epoch. The trainer skips to its position by the seed and the epoch.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from holdfast.interop.trainers.transformers import train

EPOCHS = 3
SIZE = 24
BATCH = 4  # six batches an epoch
SEED = 7


def main() -> None:
    """Train."""
    set_seed(SEED)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (SIZE, 8))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            logging_steps=2,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=SEED,
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
        train(trainer, "runs/transformers")


if __name__ == "__main__":
    main()
