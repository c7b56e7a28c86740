"""A table of images of which 40 of 340 are bad, and a file with three damaged chunks, read around on 1 and 3 ranks."""

import contextlib
import csv
import io
import itertools
import json

import h5py
import numpy as np
import pytest
from PIL import Image

from lit_async_data import AsyncLoader, HDF5Source, ManifestSource
from lit_async_data.errors import SourceError

IMAGES, ROWS, CHUNK = 340, 96, 4
BATCH, SEED = 12, 9


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Builds a source of images; and the numbers of the bad ones: missing, empty, cut short, or no image."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    bad = sorted(random.choice(IMAGES, 40, replace=False).tolist())
    with (folder / "table.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "y"])
        for number in range(IMAGES):
            data = io.BytesIO()
            Image.fromarray(random.integers(0, 255, (8, 8, 3), np.uint8)).save(data, "PNG")
            content = data.getvalue()
            if number in bad:
                content = (None, b"", content[:-20], b"<html>404</html>")[number % 4]
            if content is not None:
                (folder / f"{number}.png").write_bytes(content)
            rows.writerow([f"{number}.png", number])
    fields = {"x": {"name": "path", "image_size": 8}, "y": {"name": "y", "kind": "number"}}
    return lambda: ManifestSource(folder / "table.csv", fields, check_files="none"), set(bad)


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    """Builds a source of rows in compressed chunks; and the rows of the three damaged ones."""
    path = tmp_path_factory.mktemp("chunks") / "x.h5"
    values = np.random.default_rng(0).integers(0, 255, (ROWS, 40), np.uint8)
    damaged = (1, 10, 22)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(CHUNK, 40), compression="gzip")
        places = [file["x"].id.get_chunk_info(number).byte_offset for number in damaged]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place + 6)
            file.write(bytes(12))
    return lambda: HDF5Source(path, {"x": "x"}), {CHUNK * number + row for number in damaged for row in range(CHUNK)}


@pytest.fixture(params=["images", "chunks"])
def data(request):
    build, bad = request.getfixturevalue(request.param)
    with contextlib.closing(build()) as source:
        yield source, bad


def loaders(source, on_error, ranks, **options):
    given = {"batch_size": BATCH // ranks, "seed": SEED, "max_bad": 0.5, "on_error": on_error, "return_indices": True}
    return [AsyncLoader(source, given | options, rank=rank, world_size=ranks) for rank in range(ranks)]


def step_of(made):
    """The samples of the next step, rank by rank."""
    return [next(loader)["index"].tolist() for loader in made]


def in_order(steps):
    """The samples at the places of the epoch, where ranks take turns."""
    dealt = [itertools.chain(*itertools.zip_longest(*step)) for step in steps]
    return [sample for sample in itertools.chain(*dealt) if sample is not None]


def epoch(source, on_error, ranks, **options):
    made = loaders(source, on_error, ranks, **options)
    steps = [step_of(made) for _ in range(len(made[0]))]
    for loader in made:
        loader.close()
    return steps


def test_raise_names_the_first_bad_sample(data):
    source, bad = data
    (loader,) = loaders(source, "raise", 1, shuffle="none")
    with loader, pytest.raises(SourceError) as caught:
        for _ in loader:
            pass
    assert caught.value.file
    if caught.value.row is not None:
        assert caught.value.row <= min(bad)


@pytest.mark.parametrize("ranks", [1, 3])
def test_skip_reads_every_good_sample_once_in_as_many_steps(data, ranks):
    source, bad = data
    steps = epoch(source, "skip", ranks, workers=2)
    assert len(steps) == -(-len(source) // BATCH)
    read = sorted(itertools.chain(*itertools.chain(*steps)))
    assert [sample for sample in read if sample not in bad] == read
    assert set(read) == set(range(len(source))) - bad


@pytest.mark.processes
def test_substitutes_are_the_same_on_other_ranks_in_processes_and_after_a_kill(data):
    source, bad = data
    whole = in_order(epoch(source, "substitute", 1))
    assert len(whole) == len(source)
    assert not set(whole) & bad
    assert in_order(epoch(source, "substitute", 3, workers=1, worker_kind="process")) == whole
    for before, after in [(3, 1), (1, 3)]:
        begun = loaders(source, "substitute", before)
        steps = [step_of(begun) for _ in range(3)]
        state = json.loads(json.dumps(begun[0].state_dict()))
        for loader in begun:
            loader.close()
        resumed = loaders(source, "substitute", after, workers=0)
        for loader in resumed:
            loader.load_state_dict(state)
        while True:
            try:
                steps.append(step_of(resumed))
            except StopIteration:
                break
        assert in_order(steps) == whole
