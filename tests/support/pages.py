"""The programs of a page, small files at the paths that they name, and the names that they use without defining them.

The tests of documents run all pages. ``python -m support.pages PAGE…`` needs nothing that only tests install:
`.ci/first_minute.py` runs it where a page's own packages are installed, and no others.
"""

import contextlib
import csv
import importlib.util
import os
import re
import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from support.range_server import RangeServer

PROGRAM = re.compile(r"^```(python|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def programs(page):
    """The programs of a page; of a diff, the new one."""
    found = PROGRAM.findall(page.read_text())
    return [code if kind == "python" else re.sub(r"(?m)^(-.*\n|[+ ])", "", code) for kind, code in found]


def images(path, samples=40, channels_last=True):
    shape = (samples, 8, 8, 3) if channels_last else (samples, 3, 8, 8)
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
        file["labels"] = np.arange(samples) % 2


def write_files(page=None):
    """Small versions of the files that programs name, in the current folder; images where Pillow is installed."""
    for folder in ("scans/train", "photos", "train/auk", "train/owl"):
        os.makedirs(folder)
    for number in range(3):
        images(f"scans/train/{number}.h5")
    images("scans/val.h5")
    images("x.h5", channels_last=False)
    with h5py.File("cells.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((80, 8, 8, 3), np.uint8), np.arange(80) % 2
    with h5py.File("rec.h5", "w") as file:
        for patient in range(10):
            file[f"patient_{patient}/data"] = np.zeros((1000, 4), np.float32)
    with h5py.File("singles.h5", "w") as file:
        for patient in range(4):
            file[f"patients/{patient}/image"] = np.zeros((8, 8, 3), np.uint8)
            file[f"patients/{patient}"].attrs.update({"label": patient, "sex": "fm"[patient % 2]})
    if importlib.util.find_spec("PIL"):
        write_images()
    if page is not None and page.stem in {"hdf5", "labels", "windows", "robots"}:
        write_patients()


def write_images():
    from PIL import Image

    from support.files.examples import anndata
    from support.files.pictures import stored

    anndata("cells.h5ad")
    with h5py.File("each.h5", "w") as file:
        for number in range(4):
            file[f"images/{number:06}"] = np.void(stored(Image.new("RGB", (64, 48)), "JPEG"))
            file[f"images/{number:06}"].attrs["species"], file[f"boxes/{number:06}"] = "ab"[number % 2], np.zeros(4)
    rows = [("id", "path", "species", "site")]
    for number in range(20):
        Image.new("RGB", (300, 260), (number, 0, 0)).save(f"photos/{number}.jpg")
        rows.append((f"{number:03}", f"{number}.jpg", "owl" if number % 2 else "auk", f"site {number % 10}"))
    for name in ("birds.csv", "photos/birds.csv"):
        with open(name, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    for number in range(20):
        Image.new("RGB", (230, 240)).save(f"train/{('auk', 'owl')[number % 2]}/{number}.png")


def write_patients():
    from PIL import Image

    from support.files.pictures import stored

    for number in range(20):
        with h5py.File(f"scans/patient_{number:02}.h5", "w") as file:
            file["data"] = np.zeros((10, 8, 8, 3), np.uint8)
            file["labels"] = np.arange(20).reshape(10, 2) % 2
    with h5py.File("era5_2020.nc", "w") as file:
        for name in ("t2m", "tp"):
            file[name] = np.zeros((20, 4, 4), "i2")
            file[name].attrs.update(scale_factor=0.5, add_offset=270.0)
    with h5py.File("eeg.h5", "w") as file:
        file["eeg"] = np.zeros((4, 1000), "f4")
        file["events"] = np.array([(100, 1), (400, 0), (650, 1)], [("onset", "i8"), ("label", "u1")])
    with h5py.File("hits.h5", "w") as file:
        file["hits"] = np.zeros(20, [("momentum", "f4", (3,)), ("energy", "f4"), ("particle", "u1")])
    Path("scans/val.h5").unlink()
    Path("episodes").mkdir()
    for number in range(2):
        frames = [stored(Image.new("RGB", (64, 48), (9 * row, 0, 0)), "JPEG") for row in range(20)]
        with h5py.File(f"episodes/episode_{number}.hdf5", "w") as file:
            padded = [np.frombuffer(frame.ljust(2000, b"\0"), np.uint8) for frame in frames]
            file["observations/images/top"] = np.array(padded)
            file["compress_len"] = np.array([[len(frame) for frame in frames]], "f4")
            file["observations/qpos"] = file["action"] = np.zeros((20, 14))


class Boxes(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        return torch.zeros(3, 4 + number, 5), {"boxes": torch.zeros(number, 4)}


def given(pl, trainer):
    """The names that programs use without defining them. ``pl`` is Lightning, ``trainer`` makes a short Trainer."""
    loader = DataLoader([(torch.zeros(3, 4), torch.tensor(1))] * 6, batch_size=2)

    class Linear(pl.LightningModule):
        """Accepts dicts and tuples of any images and labels."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 2)

        def training_step(self, batch, number):
            x, *_, y = batch.values() if isinstance(batch, dict) else batch
            logits = self.layer(x.float().reshape(len(y), -1).mean(1, keepdim=True))
            return torch.nn.functional.cross_entropy(logits, y.reshape(len(y), -1)[:, 0].long() % 2)

        def validation_step(self, batch, number):
            self.training_step(batch, number)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Loaders(pl.LightningDataModule):
        def train_dataloader(self):
            return loader

    return {
        "Linear": Linear,
        "model": Linear(),
        "your_model": Linear(),
        "your_datamodule": Loaders(),
        "your_dataloader": loader,
        "dataset": Boxes(),
        "torch": torch,
        "Trainer": lambda callbacks=(), **options: trainer(*callbacks, **options),
    }


# A store, a mount and a disk that a page names.
STORE, MOUNT, DISK = "https://minio.example.org", "/nfs/", "/nvme/"


@contextlib.contextmanager
def store_of(page):
    """The address of a store of the current folder, in place of that on the page."""
    if STORE not in page.read_text():
        yield STORE
        return
    served = Path.cwd() / "served"
    served.mkdir()
    (served / "bucket").symlink_to(Path.cwd())
    with RangeServer(served) as server:
        yield server.url


def run(page, names, pl):
    """Run all programs of a page one after the other, and train with each DataModule that they build."""
    with store_of(page) as url:
        _run(page, names, pl, url)


def _run(page, names, pl, url):
    from lit_async_data import HDF5Source

    if page.stem == "transforms":
        names["source"] = HDF5Source("x.h5", {"x": "data", "y": "labels"})
    for program in programs(page):
        # There may be no GPU here; Lightning's name is the one under test; its Trainer is told to be short and quiet.
        text = program.replace('"cuda"', '"cpu"').replace('"cuda:1"', '"cpu"')
        text = text.replace(STORE, url).replace(MOUNT, "").replace(DISK, "")
        text = re.sub(r"^from pytorch_lightning import Trainer\n", "", text, flags=re.MULTILINE)
        exec(compile(text, page.name, "exec"), names)
    for dm in [value for value in names.values() if isinstance(value, pl.LightningDataModule)]:
        names["Trainer"]().fit(names["Linear"](), datamodule=dm)
    for source in [value for value in names.values() if isinstance(value, HDF5Source)]:
        source.close()  # its connections


def main(paths):
    """Run pages, each in a new folder below the current one, with Lightning as it is installed."""
    import pytorch_lightning as pl

    def trainer(*callbacks, **options):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        return pl.Trainer(
            **quiet | {"enable_progress_bar": False, "max_epochs": 1} | options, callbacks=list(callbacks)
        )

    here = os.getcwd()
    for page in map(Path, paths):
        os.makedirs(folder := f"{here}/{page.stem}")
        os.chdir(folder)
        write_files(page)
        run(page, {"__name__": "__main__"} | given(pl, trainer), pl)  # their classes are those of a script
        sys.stdout.write(f"{len(programs(page))} programs of {page.name} ran\n")


if __name__ == "__main__":
    main(sys.argv[1:])
