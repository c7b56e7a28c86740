"""A source of an HDF5 file that is cut while a reader process reads it."""

import os

from lit_async_data import HDF5Source
from lit_async_data.sources.hdf5.readers.part_reader import PartReader


class CutWhileRead(HDF5Source):
    """In a reader process, its file is cut after it was checked, and before sample 50 is copied from the map."""

    def __init__(self, path):
        super().__init__(path, {"y": "data"})
        self._cut, self._trainer = path, os.getpid()

    def read_into(self, samples, out):
        if 50 in samples and os.getpid() != self._trainer:
            read = PartReader.read

            def read_from_the_rest(reader, rows, out, keys):
                reader._file.map()
                os.truncate(self._cut, 8192)
                read(reader, rows, out, keys)

            PartReader.read = read_from_the_rest
        super().read_into(samples, out)
