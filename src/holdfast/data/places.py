"""Which sample is at each place of an endless sequence over one or more sources.

A place is a number from 0. Sources are interleaved by a pattern that repeats, in which each has its
share; within a source each epoch has all samples once. Everything is computed from the place.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from holdfast.data.permutation import permutation

PATTERN_MAX = 10_000
"""The longest pattern, unless rounding adds to it: weights are exact to about this part."""


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many places of the pattern each source has, at least one."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    fractions = [fraction / sum(fractions) for fraction in fractions]
    exact = math.lcm(*(fraction.denominator for fraction in fractions))
    scale = exact if exact <= PATTERN_MAX else PATTERN_MAX
    return tuple(max(1, round(fraction * scale)) for fraction in fractions)


class Places:
    """The samples of one or more sources, numbered as if the sources were concatenated.

    Args:
        lengths: The number of samples of each source.
        shares: How many places of the pattern each source has.
        seed: Determines the permutations.
        shuffle: Whether each epoch of a source has a permutation of its own.
    """

    def __init__(
        self, lengths: Sequence[int], shares: Sequence[int], seed: int, *, shuffle: bool
    ) -> None:
        self._lengths, self._shares = lengths, shares
        self._seed, self._shuffle = seed, shuffle
        self._firsts = [sum(lengths[:source]) for source in range(len(lengths))]
        self._pattern_length = sum(shares)
        # The k-th place of a source is in the middle of the k-th of equal parts of the pattern.
        when = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
        of_source = np.repeat(np.arange(len(shares)), shares)
        order = np.argsort(when, kind="stable")
        self._source_at = of_source[order]
        self._number_at = np.concatenate([np.arange(share) for share in shares])[order]

    def samples(self, places: np.ndarray) -> np.ndarray:
        """Return the samples at `places` (both int64)."""
        patterns, offsets = np.divmod(places, self._pattern_length)
        sources = self._source_at[offsets]
        samples = np.empty_like(places)
        for source in np.unique(sources):
            chosen = sources == source
            numbers = patterns[chosen] * self._shares[source] + self._number_at[offsets[chosen]]
            samples[chosen] = self._firsts[source] + self._of_source(int(source), numbers)
        return samples

    def _of_source(self, source: int, numbers: np.ndarray) -> np.ndarray:
        """Return the samples of one source, from its first, that are drawn as those `numbers`."""
        length = self._lengths[source]
        epochs, within = np.divmod(numbers, length)
        if self._shuffle:
            for epoch in np.unique(epochs):
                chosen = epochs == epoch
                of_epoch = permutation(length, self._seed, source, int(epoch))
                within[chosen] = of_epoch.image(within[chosen])
        return within

    def count_before(self, sample: int, place: int) -> int:
        """Return at how many places before `place` a sample is."""
        source = bisect_right(self._firsts, sample) - 1
        patterns, offset = divmod(place, self._pattern_length)
        drawn = patterns * self._shares[source]
        drawn += int(np.count_nonzero(self._source_at[:offset] == source))
        epoch, within = divmod(drawn, self._lengths[source])
        number = sample - self._firsts[source]
        if self._shuffle:
            of_epoch = permutation(self._lengths[source], self._seed, source, epoch)
            number = int(of_epoch.preimage(np.array([number]))[0])
        return epoch + (number < within)


class StreamPlaces:
    """The samples of a stream, which are numbered as they come: each is at the place of its number.

    Its length is unknown.
    """

    def samples(self, places: np.ndarray) -> np.ndarray:
        """Return the samples at `places`."""
        return places

    def count_before(self, sample: int, place: int) -> int:
        """Return whether `sample` is before `place`, as 0 or 1."""
        return int(sample < place)
