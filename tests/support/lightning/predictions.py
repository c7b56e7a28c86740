"""Predictions for numbered samples, simulated ranks that write them, and what the files hold."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pyarrow.csv
import pyarrow.parquet

from lit_async_data import AsyncLoader
from lit_async_data.lightning.predictions.folder import ResultFolder
from lit_async_data.lightning.predictions.loader_predictions import LoaderPredictions
from lit_async_data.testing import ArraySource

# With the first file that it reads, pyarrow opens a pipe for signals, and keeps it.
pyarrow.csv.read_csv(io.BytesIO(b"a\n1\n"))


def numbered(samples):
    """A source whose sample number n is n."""
    return ArraySource({"y": np.arange(samples)})


def predicted_of(samples):
    """A number, class scores, a text, a compressed mask and uncompressed points for each sample number."""
    samples = np.asarray(samples)
    return {
        "score": samples / 7,
        "classes": np.stack([samples, -samples, samples**2], 1).astype(np.float32),
        "text": [f"sample {number}" for number in samples.tolist()],
        "mask": np.broadcast_to(samples[:, None, None] % 251, (len(samples), 64, 64)).astype(np.uint8),
        "points": np.stack([samples[:, None] + [0, 0.5], samples[:, None] + [1, 1.5]], 1).astype(np.float32),
    }


class Rank:
    """One of several ranks that predict, without a Trainer."""

    def __init__(self, path, rank, ranks, samples, *, batch_size=4, steps=None, source=None):
        source = numbered(samples) if source is None else source
        options = {"batch_size": batch_size, "shuffle": False}
        self.loader = AsyncLoader(source, options, rank=rank, world_size=ranks)
        self.folder = ResultFolder(path)
        if rank == 0:
            self.folder.begin()
        self.steps = len(self.loader) if steps is None else min(steps, len(self.loader))
        self.predictions = LoaderPredictions(self.loader, self.steps, "predictions", self.folder)

    def predict(self, steps=None, predicted=predicted_of):
        for step in range(self.steps if steps is None else steps):
            self.predictions.add(step, predicted(self.loader.order.batch(step).samples))
        self.predictions.close()

    def finish(self):
        """As rank 0: merges and publishes."""
        try:
            for _ in self.predictions.merge():
                pass
            self.folder.publish()
        finally:
            self.folder.release()


def predict_with_ranks(path, ranks, samples, **options):
    """All ranks predict, one after the other; returns rank 0, which has merged nothing yet."""
    every = [Rank(path, rank, ranks, samples, **options) for rank in range(ranks)]
    for each in every:
        each.predict()
    return every[0]


def table_in(path, name="predictions"):
    """The Parquet file. Closed when this returns: pyarrow's own threads may close a file that they opened later."""
    with open(f"{path}/{name}.parquet", "rb") as file:
        return pyarrow.parquet.read_table(file)


def rows_in(path, name="predictions"):
    """The columns of the Parquet file, as lists."""
    return table_in(path, name).to_pydict()


def arrays_in(path, name="predictions"):
    """The datasets of the HDF5 file; texts as a list."""
    with h5py.File(f"{path}/{name}.h5") as file:
        strings = {key for key in file if h5py.check_string_dtype(file[key].dtype)}
        return {key: file[key].asstr()[:].tolist() if key in strings else file[key][:] for key in file}


def check_files(path, samples):
    """Assert that the files hold what `predicted_of` says for these samples, in order."""
    wanted = predicted_of(samples)
    rows, arrays = rows_in(path), arrays_in(path)
    assert list(rows) == ["sample", "file", "row", "score", "classes", "text"]
    assert rows["sample"] == rows["row"] == arrays["sample"].tolist() == list(samples)
    assert rows["file"] == arrays["file"] == ["ArraySource"] * len(samples)
    assert rows["score"] == wanted["score"].tolist()
    assert rows["classes"] == wanted["classes"].tolist()
    assert rows["text"] == wanted["text"]
    np.testing.assert_array_equal(arrays["mask"], wanted["mask"], strict=True)
    np.testing.assert_array_equal(arrays["points"], wanted["points"], strict=True)
