"""Which slabs a `DecodedChunkCache` holds, found out by asking for them."""

from __future__ import annotations


def _absent():
    raise LookupError


def cached(slabs, key):
    """Whether a slab is cached. Decodes nothing; no thread may be decoding it."""
    try:
        slab = slabs.get(key, _absent, wait=False)
    except LookupError:
        return False
    assert slab is not None, f"{key} is still being decoded"
    return True
