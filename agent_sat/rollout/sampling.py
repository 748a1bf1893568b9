"""Where the random numbers of sampling come from: counters, so that nothing depends on order or batch.

The t-th sampled token of a request uses a number that is a pure function of (the request's seed, t).
No torch here: the workers that drive episodes need the seeds and nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's increment
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def seed_for(*parts: int) -> int:
    """A seed of 63 bits that mixes `parts` in order, e.g. (run seed, group, member, turn)."""
    state = len(parts)
    for part in parts:
        state = _mix((state ^ (part & _MASK)) + _GOLDEN & _MASK)
    return state >> 1


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number of [0, 1) for each (seed, counter): output `counter` of splitmix64 started at mix(seed).

    The seed is mixed first, so that neighbouring seeds do not give shifted copies of one stream
    (Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators).
    """
    state = _mix_array(seeds) + (counters + np.uint64(1)) * np.uint64(_GOLDEN)
    # 52 bits: the largest value, 1 - 2^-52, times a total stays below the total in float64
    return (_mix_array(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of each value; unsigned array arithmetic wraps as it must."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
