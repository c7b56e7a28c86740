"""Where HDF5 stores the values of a dataset, as h5py says."""

from __future__ import annotations

import h5py


def stored_spans(path, name="data"):
    """Offset and size of the values of a dataset: of each chunk that was written, in grid order, or of all."""
    with h5py.File(path, "r") as file:
        dataset, chunks = file[name], {}
        if dataset.chunks is None:
            return [(dataset.id.get_offset(), dataset.nbytes)]
        dataset.id.chunk_iter(lambda chunk: chunks.update({chunk.chunk_offset: (chunk.byte_offset, chunk.size)}))
        return [chunks[corner] for corner in sorted(chunks)]
