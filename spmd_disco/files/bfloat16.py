"""How TVM's tensor caches store float32 in half the bytes."""

from __future__ import annotations

import numpy as np

from .streams import Array

__all__ = ["to_bfloat16_bits"]

#: The largest finite bfloat16, as a float32.
LIMIT = np.uint32(0x7F7F0000).view(np.float32)


def to_bfloat16_bits(values: Array) -> Array:
    """Return float32 as the uint16 that TVM stores for them, bit for bit.

    Within the range of bfloat16 they are rounded to the nearest, ties to even. Whatever is not
    (infinity, NaN, and finite values that would become infinite) loses its lower half. So a NaN
    that has bits only there becomes an infinity; those that NumPy makes have others.
    """
    bits = values.view(np.uint32)
    result = bits >> np.uint32(16)
    rounded = result & np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    with np.errstate(invalid="ignore"):  # comparing signalling NaN
        np.copyto(result, rounded, where=np.abs(values) < LIMIT)
    return result.astype(np.uint16)
