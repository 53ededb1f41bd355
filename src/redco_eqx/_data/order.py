"""The order of an epoch: a permutation in constant memory, which is computed only where
it is needed.

It is a Feistel network over pairs of numbers. An index is `x * width + y`, and each
round adds to one half a pseudo-random function of the other, so that every round can be
undone. There are hardly more pairs than examples; an index that becomes none of an
example goes through the network again, along its cycle (Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", 2002).
"""

import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Int, Integer, UInt64

from redco_eqx._base.protocols import Key

SHUFFLED = "feistel"
"""The name of the method that makes an order from a key, for the record of a run. A
method that makes different orders needs a different name."""

# Keeps the order of an epoch independent of other values from the same key.
_EPOCH_ORDER = 0x65706F63

# With 16 or more, 200,000 draws cannot distinguish the orders of 2 to 30 examples from
# uniform ones.
_NUM_ROUNDS = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Permutation:
    """A pseudo-random permutation of the numbers below `num`. A call with positions
    returns the numbers there.

    - `num`: the count of numbers, from 1 to 2**63 - 1.
    - `keys`: one per round.
    """

    num: int
    keys: UInt64[np.ndarray, " num_rounds"]

    def __call__(self, positions: Integer[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the number of the example at each position, below `num`, in a few
        microseconds each."""
        numbers = self._once(positions.astype(np.uint64))
        # The numbers of a cycle return to its beginning, which is below `num`, so this
        # ends.
        while np.any(outside := numbers >= self.num):
            numbers[outside] = self._once(numbers[outside])
        return numbers.astype(np.int64)

    def _once(self, numbers: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
        """Apply the network, a permutation of the numbers below `height * width`,
        once."""
        height = math.isqrt(self.num - 1) + 1
        width = -(-self.num // height)
        x, y = np.divmod(numbers, np.uint64(width))
        for first, second in self.keys.reshape(-1, 2):
            x = (x + _mixed(y ^ first) % np.uint64(height)) % np.uint64(height)
            y = (y + _mixed(x ^ second) % np.uint64(width)) % np.uint64(width)
        return x * np.uint64(width) + y


def epoch_order(num_examples: int, key: Key, epoch: int) -> Permutation:
    """Return the order in which an epoch reads the examples. It is the same on every
    process and in every version.

    Raises `ValueError` if `epoch` is negative or `key` is not one PRNG key.
    """
    if epoch < 0:
        raise ValueError(f"batches: epoch={epoch}, but it must be 0 or more.")
    if not isinstance(key, jax.Array) or jax.random.key_data(key).ndim != 1:
        raise ValueError(
            "batches: key must be one PRNG key, such as jax.random.key(0), but is "
            f"{key!r}."
        )
    # The first copy of the key, because a key in a training state is replicated over
    # all processes.
    words = jax.device_get(jax.random.key_data(key.addressable_data(0)))
    # NumPy promises that this stays the same in every version.
    seed = np.random.SeedSequence([_EPOCH_ORDER, epoch, *words.tolist()])
    return Permutation(num_examples, seed.generate_state(_NUM_ROUNDS, np.uint64))


def _mixed(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each bit of `x`
    flips half of the bits of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
