"""Train a small language model with PyTorch alone, and lose nothing when it is killed.

    python pytorch.py                      # begins, or goes on where it was killed
    holdfast prove -- python pytorch.py    # proves that kills change nothing

The model learns which character follows eight others: shuffled batches over several epochs from a
loader with a worker, augmentation in the worker, dropout, a schedule, clipped gradients. At each
tenth step the loss of held-out text is measured, and the two best checkpoints are kept. At the end
the best one is read, and writes some text.
"""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.torch import RandomState

STEPS = 60
BATCH = 32
CONTEXT = 8
WIDTH = 16
EVALUATED = 10
SEED = 7
ANIMALS, KINDS = ("fox", "crow", "hare", "goose", "mouse"), ("red", "old", "shy")
TEXT = "".join(f"the {kind} {animal} sees the {animal}. " for kind in KINDS for animal in ANIMALS)
ALPHABET = sorted(set(TEXT))
CODES = torch.tensor([ALPHABET.index(character) for character in TEXT])
TRAINED = len(CODES) * 3 // 4


class Windows(Dataset):
    """The trained part of the text: each place in it with the characters before it."""

    def __len__(self) -> int:
        """Return the number of places."""
        return TRAINED - CONTEXT

    def __getitem__(self, place: holdfast.data.Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the characters before a place, of which one may be another one, and its own."""
        context = CODES[place : place + CONTEXT].clone()
        # The numbers come from the sample's own seed: no worker has a generator that is lost.
        random = torch.Generator().manual_seed(place.seed >> 1)
        if torch.rand((), generator=random) < 0.1:
            context[0] = torch.randint(len(ALPHABET), (), generator=random)
        return context, CODES[place + CONTEXT]


class Model(nn.Module):
    """Scores of the next character, from the characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), WIDTH)
        self.hidden = nn.Linear(CONTEXT * WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.scores = nn.Linear(4 * WIDTH, len(ALPHABET))

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """Return the scores for each context."""
        hidden = self.hidden(self.embedding(contexts).flatten(1))
        return self.scores(self.dropout(hidden.relu()))


def rate_at(step: int) -> float:
    """Return the factor of the learning rate: it rises for eight steps, then falls."""
    return min(1.0, (step + 1) / 8) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


@torch.no_grad()
def evaluate(model: Model) -> float:
    """Return the loss of the held-out text."""
    model.eval()
    contexts = CODES[TRAINED:].unfold(0, CONTEXT, 1)[:-1]
    loss = nn.functional.cross_entropy(model(contexts), CODES[TRAINED + CONTEXT :])
    model.train()
    return loss.item()


@torch.no_grad()
def write(model: Model, length: int = 32) -> str:
    """Return text that the model writes: the likeliest character each time."""
    model.eval()
    text = TEXT[:CONTEXT]
    for _ in range(length):
        context = torch.tensor([[ALPHABET.index(character) for character in text[-CONTEXT:]]])
        text += ALPHABET[int(model(context).argmax())]
    return text


def main() -> None:
    """Train, and use the best checkpoint."""
    torch.manual_seed(SEED)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    order = holdfast.data.Order(len(Windows()), batch=BATCH, seed=SEED)
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "order": order,
        "random": RandomState(),
    }
    best = holdfast.preservation_policy.BestN(2, metric="loss")
    with holdfast.CheckpointManager("runs/pytorch", preservation_policy=best) as manager:
        start, state = manager.resume(state)
        loader = DataLoader(
            Windows(),
            batch_sampler=order.batches(start),
            num_workers=1,
            generator=torch.Generator(),  # else it draws from the generator of all
        )
        for step, (contexts, following) in zip(range(start, STEPS), loader, strict=False):
            loss = nn.functional.cross_entropy(model(contexts), following)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            metrics = {"training": loss.item(), "loss": math.nan}  # NaN: worse than any number
            is_evaluated = (step + 1) % EVALUATED == 0
            if is_evaluated:
                with manager.waiting("evaluation"):
                    metrics["loss"] = evaluate(model)
                print(f"step {step}: loss {metrics['loss']:.3f}", flush=True)
            manager.save(step, state, metrics=metrics, force=is_evaluated)
            if manager.reached_preemption(step):
                return
        manager.finish(STEPS - 1, state)

    with holdfast.open_run("runs/pytorch") as run:
        losses = {run.metadata(step).metrics["loss"]: step for step in run.all_steps()}
        least = min(loss for loss in losses if not math.isnan(loss))
        run.restore(losses[least], like={"model": model}, only="model")
    print(f"the best is step {losses[least]}, and writes: {write(model)}")


if __name__ == "__main__":
    main()
