"""What ``train.py`` trains on its own: scikit-learn's digits, as HDF5 or as PNG files in a table, and a small model."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import torch
from torch import Tensor, nn

from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.lightning.compat import pl, rank_zero_warn
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.manifest.source import ManifestSource

Part = Literal["train", "val", "test"]
# 1797 digits in all.
SHARES: dict[Part, float] = {"train": 0.7, "val": 0.15, "test": 0.15}


def digits(root: str | os.PathLike[str], part: Part) -> HDF5Source:
    """One part of the handwritten digits, written to ``root/digits/PART.h5`` if it is not there yet.

    Args:
        root: Folder for data sets.
        part: ``"train"``, ``"val"`` or ``"test"``: 70, 15 and 15 % of 1797 images.

    Returns:
        A source of ``x``, uint8 of shape (1, 8, 8) with values 0 to 16, and ``y``, 0 to 9.

    Raises:
        MissingError: scikit-learn, which has the images, is not installed.
    """
    path = Path(root) / "digits" / f"{part}.h5"
    if not path.exists():
        _write_digits(path, part)
    return HDF5Source(path, fields={"x": "data", "y": "labels"})


def digits_manifest(root: str | os.PathLike[str], **options: Any) -> ManifestSource:
    """The handwritten digits as PNG files and a table, written to ``root/digits_manifest`` if they are not there yet.

    Args:
        root: Folder for data sets.
        **options: Of `ManifestSource`. The table's columns are ``id`` (``"0007"``), ``path``, ``digit`` (0 to 9) and
            ``even`` (0 or 1).

    Returns:
        A source of 1797 images, 8 × 8 grey values from 0 to 240, unless ``options`` say otherwise.

    Raises:
        MissingError: scikit-learn, which has the images, is not installed.
        ConfigError: pyarrow or Pillow is missing, or an option is wrong.
    """
    folder = Path(root) / "digits_manifest"
    if not folder.exists():
        _write_manifest(folder)
    return ManifestSource(folder / "digits.csv", **{"mode": "L", "id": "id", **options})


def _write_manifest(folder: Path) -> None:
    found = _digits()
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("image: Pillow is missing: pip install 'lit-async-data[manifest]'") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Put into place when it is whole: several processes may do this at once, and the first one's counts.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        (made / "images").mkdir(parents=True)
        lines = ["id,path,digit,even"]
        for number, (values, digit) in enumerate(zip(found.images, found.target.tolist(), strict=True)):
            path = f"images/{number:04}.png"
            Image.fromarray((15 * values).astype(np.uint8)).save(made / path)
            lines.append(f"{number:04},{path},{digit},{int(digit % 2 == 0)}")
        (made / "digits.csv").write_text("\n".join(lines) + "\n")
        if not folder.exists():
            with contextlib.suppress(OSError):  # another process was faster
                made.rename(folder)


def _digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingError(
            "the digits come with scikit-learn: pip install 'lit-async-data[demo]', or train on a file of yours: "
            "python train.py data=hdf5 data.train.path=FILE.h5"
        ) from error
    return load_digits()


def _write_digits(path: Path, part: Part) -> None:
    found = _digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    ends = np.cumsum([0, *(round(share * len(order)) for share in SHARES.values())])
    number = list(SHARES).index(part)
    rows = order[ends[number] : ends[number + 1]]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Put into place when it is whole, and by one only: several processes may do this at once.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".h5", delete=False) as temporary:
        pass
    with h5py.File(temporary.name, "w") as file:
        file["data"] = found.images[rows].astype(np.uint8)[:, None]
        file["labels"] = found.target[rows].astype(np.int64)
    os.chmod(temporary.name, 0o644)
    try:
        os.link(temporary.name, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.replace(temporary.name, path)
        return
    os.unlink(temporary.name)


class ImageClassifier(pl.LightningModule):
    """A small convolutional network for images of any size, of any number type.

    Channels and classes are taken from the data: from ``trainer.datamodule``, unless they are given. Input is
    normalised by its own first layer, so that values as stored will do.

    Args:
        x: Batch key of the images, of shape (N, C, H, W).
        y: Batch key of the class numbers, of shape (N,) or (N, 1).
        channels: Channels of an image.
        classes: Number of classes.
        width: Channels after the first convolution.
        lr: Learning rate at its peak, for AdamW; it rises over a tenth of the training and falls from there.

    Raises:
        ConfigError: ``width`` or ``lr`` is not a number above 0. Before training: the data have no such fields, or
            others than ``channels`` and ``classes`` say.
    """

    def __init__(
        self,
        x: str = "x",  # noqa: ARG002  # Lightning reads them off the frame, in save_hyperparameters
        y: str = "y",  # noqa: ARG002
        *,
        channels: int | None = None,  # noqa: ARG002
        classes: int | None = None,  # noqa: ARG002
        width: int = 32,
        lr: float = 0.01,
    ) -> None:
        super().__init__()
        for name, value in {"width": width, "lr": lr}.items():
            if not value > 0:
                raise ConfigError(f"model.{name}: {value!r} is not above 0")
        self.save_hyperparameters()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the layers, once the data are known."""
        if self.net is not None:
            return
        hparams: Any = self.hparams
        dm: Any = getattr(self.trainer, "datamodule", None)
        if dm is None and None in (hparams["channels"], hparams["classes"]):
            raise ConfigError("model.channels, model.classes: give both where there is no AsyncDataModule to ask")
        if dm is not None:
            # Into the checkpoint, so that the model can be loaded without the data.
            hparams["channels"] = _channels(dm, hparams["x"], hparams["channels"])
            hparams["classes"] = _classes(dm, hparams["y"], hparams["classes"])
        self.net = _network(hparams["channels"], hparams["classes"], hparams["width"])

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (N, classes) for images of shape (N, C, H, W) or, of one channel, (N, H, W)."""
        assert self.net is not None
        if images.ndim == 3:
            images = images[:, None]
        scores: Tensor = self.net(images.to(self.dtype))
        return scores

    def _scored(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch[self.hparams["y"]].flatten()
        scores = self(batch[self.hparams["x"]])
        return nn.functional.cross_entropy(scores, labels), (scores.argmax(1) == labels).float().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Cross-entropy of a batch."""
        loss, accuracy = self._scored(batch)
        self.log_dict(
            {"train/loss": loss, "train/acc": accuracy}, prog_bar=True, batch_size=len(batch[self.hparams["y"]])
        )
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # noqa: ARG002
        """Log loss and accuracy."""
        self._log("val", batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # noqa: ARG002
        """Log loss and accuracy."""
        self._log("test", batch)

    def _log(self, stage: str, batch: dict[str, Tensor]) -> None:
        loss, accuracy = self._scored(batch)
        self.log_dict(
            {f"{stage}/loss": loss, f"{stage}/acc": accuracy},
            prog_bar=True,
            batch_size=len(batch[self.hparams["y"]]),
            sync_dist=self.trainer.world_size > 1,
        )

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Class numbers."""
        scores: Tensor = self(batch[self.hparams["x"]])
        return scores.argmax(1)

    def configure_optimizers(self) -> Any:
        """AdamW, with a rate that rises and falls once over the whole training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = max(float(self.trainer.estimated_stepping_batches), 1.0)  # 0 where no batch is trained on

        def rate(step: int) -> float:
            # A function of the step and not a state: a run that is resumed for longer goes on along a longer curve.
            done = min((step + 1) / steps, 1.0)
            return done / 0.1 if done < 0.1 else (1 + math.cos(math.pi * (done - 0.1) / 0.9)) / 2

        if steps == math.inf:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _check_field(dm: Any, option: str, key: str) -> None:
    """Make sure that batches have a field.

    Raises:
        ConfigError: They have not; names those that there are.
    """
    spec, keys = dm.spec, list(dm.spec)
    if not spec.as_mapping:
        fields = ", ".join(f"{name}: {given}" for name, given in zip("xy", keys, strict=False))
        raise ConfigError(
            f"fields: batches are tuples of {', '.join(keys)}, and this model takes what it needs by key; name the "
            f"fields, as in 'data.train.fields={{{fields}}}'"
        )
    if key not in spec:
        raise ConfigError(
            f"model.{option}: there is no field {key!r}, but {', '.join(keys)}; name one of these with "
            f"model.{option}=KEY, or add {key} to the fields of the data"
        )


def _classes(dm: Any, key: str, wanted: int | None) -> int:
    _check_field(dm, "y", key)
    if key not in dm.num_classes:
        raise ConfigError(
            f"field {key!r} is {dm.spec[key]} and holds no class numbers: this model takes one each, 0 or more"
        )
    found: int = dm.num_classes[key]
    if wanted is not None and wanted < found:
        raise ConfigError(
            f"model.classes: {wanted}, but field {key!r} has {found} classes, 0 to {found - 1}; leave it out, and they "
            "are counted"
        )
    return found if wanted is None else wanted


def _channels(dm: Any, key: str, wanted: int | None) -> int:
    _check_field(dm, "x", key)
    shape = dm.spec[key].shape
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"field {key!r} has samples of shape {shape}, and this model takes images (C, H, W) or (H, W); "
            "choose another model"
        )
    if len(shape) == 3 and shape[2] <= 4 < shape[0]:
        rank_zero_warn(
            f"field {key!r} has samples of shape {shape}; if the last axis holds the channels, set "
            "data.train.layout=NHWC"
        )
    found: int = shape[0] if len(shape) == 3 else 1
    if wanted not in (None, found):
        raise ConfigError(
            f"model.channels: {wanted}, but the images of field {key!r} have {found} (shape {shape}); leave it out, "
            "and they are counted"
        )
    return found


def _network(channels: int, classes: int, width: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    return nn.Sequential(
        nn.BatchNorm2d(channels),
        *block(channels, width),
        *block(width, width),
        nn.MaxPool2d(2, ceil_mode=True),
        *block(width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )
