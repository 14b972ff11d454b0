"""Choose the kills of a proof from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from holdfast.proving.program import Kill, KillKind


def choose_kills(seed: int, count: int, steps: Sequence[int], rank_count: int) -> list[Kill]:
    """Return `count` kills at steps after the first checkpoint, in the order of their steps.

    Each kind is taken once before one is repeated.

    Args:
        seed: the same seed chooses the same kills.
        count: how many.
        steps: the steps of the checkpoints of the uninterrupted run, at least two.
        rank_count: how many processes the program has.
    """
    generator = random.Random(seed)
    kinds: list[KillKind] = []
    while len(kinds) < count:
        kinds += generator.sample([*KillKind], len(KillKind))
    candidates = range(steps[0] + 1, steps[-1] + 1)
    if count <= len(candidates):
        moments = generator.sample(candidates, count)
    else:
        moments = generator.choices(candidates, k=count)
    return [
        Kill(step, kind, generator.randrange(rank_count))
        for step, kind in zip(sorted(moments), kinds, strict=False)
    ]
