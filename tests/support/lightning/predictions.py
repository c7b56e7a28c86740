"""Predictions for numbered samples, simulated ranks that write them, and what the files hold."""

import h5py
import numpy as np
import pyarrow.csv
import pyarrow.parquet

from lit_async_data import AsyncLoader
from lit_async_data.lightning.predictions import LoaderPredictions
from lit_async_data.testing import ArraySource


def numbered(samples):
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


def ranks_of(path, ranks, source, *, batch_size=4, steps=10**9):
    """What each of several ranks predicts, without a Trainer, and the loader of each."""
    options = {"batch_size": batch_size, "shuffle": False}
    loaders = [AsyncLoader(source, options, rank=rank, world_size=ranks) for rank in range(ranks)]
    return [(LoaderPredictions(each, min(steps, len(each)), f"{path}/predictions"), each) for each in loaders]


def predict_with_ranks(path, ranks, source, predicted=predicted_of, **options):
    """All ranks predict, one after the other, and rank 0 merges what they have written."""
    every = ranks_of(path, ranks, source, **options)
    for predictions, loader in every:
        for step in range(min(options.get("steps", 10**9), len(loader))):
            predictions.add(step, predicted(loader.order.batch(step)))
        predictions.close()
        assert predictions.fault(str(every[0][0])) == ""
    every[0][0].merge()


def rows_in(path, name="predictions"):
    # Closed when this returns: pyarrow's own threads may close a file that they opened later.
    with open(f"{path}/{name}.parquet", "rb") as file:
        return pyarrow.parquet.read_table(file).to_pydict()


def arrays_in(path, name="predictions"):
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
