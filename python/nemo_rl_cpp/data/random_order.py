"""Random order without generator state: every random number is a function of a key. The numbers are the raw 64-bit
output of numpy's Philox generator, because numpy guarantees these values, but not those of its higher-level methods."""

import hashlib

import numpy as np

_SHUFFLE = 3  # the `shuffle` stream of csrc/common/random.h


def _raw(count: int, seed: int, *key: int) -> np.ndarray:
    digest = hashlib.sha256(repr((int(seed), _SHUFFLE, *map(int, key))).encode()).digest()
    philox = np.random.Philox(key=np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64))
    return philox.random_raw(count)


def permutation(count: int, seed: int, epoch: int) -> list[int]:
    """Return the indices below `count` in an order that depends only on (seed, epoch)."""
    return np.argsort(_raw(count, seed, epoch), kind="stable").tolist()


class Draws:
    """A sequence of random numbers for one row of a data set, determined by `seed` and `key`. `below(n)` returns the
    next number, uniform in 0..n-1 (bias under 2**-50 for n below 2**14)."""

    def __init__(self, seed: int, *key: int):
        self._seed, self._key, self._turn = seed, key, 0

    def below(self, n: int) -> int:
        value = int(_raw(1, self._seed, *self._key, self._turn)[0])
        self._turn += 1
        return (value * n) >> 64

    def distinct(self, count: int, n: int, exclude: int | None = None) -> list[int]:
        """Return `count` different numbers from 0 to n - 1 except `exclude`. Raise ValueError if n is too small."""
        found: list[int] = []
        if count > n - (exclude is not None):
            raise ValueError(f"cannot draw {count} different numbers below {n}")
        while len(found) < count:
            number = self.below(n)
            if number != exclude and number not in found:
                found.append(number)
        return found


def is_held_out(text: str, fraction: float) -> bool:
    """Return whether the question `text` belongs to the validation set, which gets about the share `fraction` of all
    questions. The result depends only on the text and `fraction`, so that no seed, size or order can put a question
    into both training and validation."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big") < fraction * 2**64
