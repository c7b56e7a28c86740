"""`risks`: what may go wrong, or make reading slow, beyond what was measured here."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from lit_async_data.host.resources.cores import cores
from lit_async_data.sources.contract.source import Source
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.hdf5.storage.superblock import SWMR, WRITING, Superblock

# File systems that other machines serve.
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "fuse")
# A sample in more pieces than this is read slowly.
MANY_PIECES = 64


def risks(source: Source, paths: Sequence[str]) -> Iterator[str]:
    """Lines for people.

    Args:
        source: What is read.
        paths: Its files; some of them, where there are many.
    """
    if isinstance(source, HDF5Source):
        yield from _of_hdf5(source, paths)
    served = {kind for path in paths if (kind := file_system(path)).split(".")[0] in NETWORK}
    if served:
        yield (
            f"the files are on {', '.join(sorted(served))}, which other machines may slow down: what was measured now "
            "need not hold; a copy on a local disk does"
        )
    if cores() < 2:
        yield "this process may use one core only: reading takes it from the training loop"


def _of_hdf5(source: HDF5Source, paths: Sequence[str]) -> Iterator[str]:
    for key, field in source.stored_parts[0].fields.items():
        stored = field.values
        where = f"{key} ({stored.name.strip('/')})"
        if source.chunks.reading == "locked" and stored.slow:
            yield f"{where} is read under the lock of h5py, one thread at a time: {stored.slow}"
        if stored.index is not None:
            pairs = enumerate(zip(stored.shape, stored.index.shape, strict=True))
            pieces = math.prod(-(-n // chunk) for axis, (n, chunk) in pairs if axis != stored.axis)
            if pieces > MANY_PIECES:
                yield f"{where}: each sample lies in {pieces:,} chunks; a chunk that holds whole samples is read faster"
    for path in paths:
        head = Superblock.of(path)
        if head is not None and head.flags & (WRITING | SWMR):
            how = "SWMR, single writer and many readers" if head.flags & SWMR else "writing"
            yield (
                f"{path} is marked as open for {how}: a program writes to it, or was killed while it did; samples that "
                "come later are not seen. If none does, h5clear -s removes the mark"
            )


def file_system(path: str) -> str:
    """The kind of file system that holds a file, as Linux names it; empty if it does not say."""
    real, found, kind = os.path.realpath(path), "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    for point, each in mounts:
        place = point.replace("\\040", " ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(found):
            found, kind = place, each
    return kind
