"""Permutations of numbers below a length, computed for any place from a key.

A `Permutation` is a Feistel network over the next power of four, walked until the number is below
the length (Black and Rogaway, Ciphers with arbitrary finite domains, 2002). Results depend on the
key alone, and are the same on every machine. It shuffles data; it hides nothing.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import xxhash

ROUNDS = 8
KEPT_MAX = 64
"""The permutations that are kept: those of the present epoch of each source."""
TABLE_MAX = 1 << 14
"""Up to this length all images are computed at once, which is faster than those of each batch."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def key_of(*numbers: int) -> int:
    """Return a key of 64 bits for some numbers, each of which fits 64 bits with its sign."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))


def mixed(numbers: np.ndarray, key: int) -> np.ndarray:
    """Return a random number of 64 bits for each of `numbers` (uint64), by SplitMix64's function.

    Different numbers get different ones.
    """
    mix = (numbers + np.uint64(1)) * _ODD + np.uint64(key)
    mix = (mix ^ (mix >> _SHIFTS[0])) * _MULTIPLIERS[0]
    mix = (mix ^ (mix >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return mix ^ (mix >> _SHIFTS[2])


class Permutation:
    """A permutation of the numbers in [0, `length`)."""

    def __init__(self, length: int, key: int) -> None:
        self._length = np.uint64(length)
        # At least two bits, one for each half.
        half_bits = max(1, -(-(length - 1).bit_length() // 2))
        self._half_bits, self._mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
        self._keys = [key_of(key - (1 << 63), number) for number in range(ROUNDS)]
        self._images: np.ndarray | None = None
        if length <= TABLE_MAX:
            self._images = self._walked(np.arange(length), is_inverse=False)
            self._preimages = np.argsort(self._images)

    def image(self, numbers: np.ndarray) -> np.ndarray:
        """Return the images of `numbers` (int64), in their order."""
        if self._images is not None:
            images: np.ndarray = self._images[numbers]
            return images
        return self._walked(numbers, is_inverse=False)

    def preimage(self, numbers: np.ndarray) -> np.ndarray:
        """Return the numbers whose images are `numbers` (int64), in their order."""
        if self._images is not None:
            preimages: np.ndarray = self._preimages[numbers]
            return preimages
        return self._walked(numbers, is_inverse=True)

    def _walked(self, numbers: np.ndarray, *, is_inverse: bool) -> np.ndarray:
        places = self._network(numbers.astype(np.uint64), is_inverse)
        while (outside := places >= self._length).any():
            places[outside] = self._network(places[outside], is_inverse)
        return places.astype(np.int64)

    def _network(self, numbers: np.ndarray, is_inverse: bool) -> np.ndarray:
        left, right = numbers >> self._half_bits, numbers & self._mask
        if is_inverse:
            for key in reversed(self._keys):
                left, right = right ^ (mixed(left, key) & self._mask), left
        else:
            for key in self._keys:
                left, right = right, left ^ (mixed(right, key) & self._mask)
        return (left << self._half_bits) | right


@lru_cache(KEPT_MAX)
def permutation(length: int, seed: int, source: int, epoch: int) -> Permutation:
    """Return the permutation of one epoch of one source."""
    return Permutation(length, key_of(seed, source, epoch))
