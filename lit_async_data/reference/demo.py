"""The demo of ``train.py``: scikit-learn's digits, as HDF5 or as a table of PNG files, and a small network."""

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
from torchmetrics import MeanMetric

from lit_async_data.errors import ConfigError, MissingError
from lit_async_data.lightning.trainer.compat import pl, rank_zero_warn
from lit_async_data.sources.hdf5.source import HDF5Source
from lit_async_data.sources.manifest.source import ManifestSource

Part = Literal["train", "val", "test"]
# What evaluation logs.
LOGGED = "loss", "acc"
# Shares of the 1797 digits.
SHARES: dict[Part, float] = {"train": 0.7, "val": 0.15, "test": 0.15}


def digits(root: str | os.PathLike[str], part: Part) -> HDF5Source:
    """One part of the handwritten digits. Writes ``root/digits/PART.h5`` first if the file does not exist.

    Args:
        root: Folder for data sets.
        part: ``"train"``, ``"val"`` or ``"test"``: 70, 15 and 15 % of 1797 images.

    Returns:
        A source of ``x``, uint8 of shape (1, 8, 8) with values 0 to 16, and ``y``, 0 to 9.

    Raises:
        MissingError: scikit-learn, which contains the images, is not installed.
    """
    path = Path(root) / "digits" / f"{part}.h5"
    if not path.exists():
        _write_digits(path, part)
    return HDF5Source(path, fields={"x": "data", "y": "labels"})


def digits_manifest(root: str | os.PathLike[str], **options: Any) -> ManifestSource:
    """The handwritten digits as a table of PNG files. Writes ``root/digits_manifest`` first if it does not exist.

    Args:
        root: Folder for data sets.
        **options: Options of `ManifestSource`. The table has the columns ``id`` (``"0007"``), ``path``, ``digit`` (0 to
            9) and ``even`` (0 or 1).

    Returns:
        A source of 1797 images, 8 × 8 grey values from 0 to 240, unless ``options`` say otherwise.

    Raises:
        MissingError: scikit-learn, which contains the images, is not installed.
        ConfigError: pyarrow or Pillow is missing, or an option is wrong.
    """
    folder = Path(root) / "digits_manifest"
    if not folder.exists():
        _write_manifest(folder)
    return ManifestSource(folder / "digits.csv", **{"mode": "L", "id": "id", **options})


def _write_manifest(folder: Path) -> None:
    loaded = _digits()
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("image: Pillow is missing: pip install 'lit-async-data[manifest]'") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: several processes may do this at once, and the first one wins.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        written = Path(temporary) / "written"
        (written / "images").mkdir(parents=True)
        lines = ["id,path,digit,even"]
        for number, (values, digit) in enumerate(zip(loaded.images, loaded.target.tolist(), strict=True)):
            path = f"images/{number:04}.png"
            Image.fromarray((15 * values).astype(np.uint8)).save(written / path)
            lines.append(f"{number:04},{path},{digit},{int(digit % 2 == 0)}")
        (written / "digits.csv").write_text("\n".join(lines) + "\n")
        if not folder.exists():
            with contextlib.suppress(OSError):  # another process renamed its folder first
                written.rename(folder)


def _digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingError(
            "data=digits: scikit-learn, which contains the digits, is missing: pip install 'lit-async-data[demo]', or "
            "train on your own file: python train.py data=hdf5 data.train.path=FILE.h5"
        ) from error
    return load_digits()


def _write_digits(path: Path, part: Part) -> None:
    loaded = _digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    ends = np.cumsum([0, *(round(share * len(order)) for share in SHARES.values())])
    number = list(SHARES).index(part)
    rows = order[ends[number] : ends[number + 1]]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Linked into place when complete: several processes may do this at once, and the first one wins.
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".h5", delete=False) as temporary:
        pass
    with h5py.File(temporary.name, "w") as file:
        file["data"] = loaded.images[rows].astype(np.uint8)[:, None]
        file["labels"] = loaded.target[rows].astype(np.int64)
    os.chmod(temporary.name, 0o644)
    try:
        os.link(temporary.name, path)
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        os.replace(temporary.name, path)
        return
    os.unlink(temporary.name)


class ImageClassifier(pl.LightningModule):
    """A small convolutional network for images of any size and any number type.

    It takes the numbers of channels and classes from ``trainer.datamodule``, unless they are arguments. Its first layer
    normalises the input, so images can come as stored.

    Args:
        x: Batch key of the images, of shape (N, C, H, W).
        y: Batch key of the class numbers, of shape (N,) or (N, 1).
        channels: Channels of an image.
        classes: Number of classes.
        width: Channels after the first convolution.
        lr: Peak learning rate of AdamW. The rate rises for a tenth of the training, then falls.

    Raises:
        ConfigError: ``width`` or ``lr`` is not a number above 0. Before training: the data has no such field, or does
            not match ``channels`` and ``classes``.
    """

    def __init__(
        self,
        x: str = "x",  # noqa: ARG002  # save_hyperparameters reads them from the frame
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
        # With sync_dist, Lightning's own means are too large if ranks have different numbers of samples (issue 21859).
        self.means = nn.ModuleDict({f"{stage}/{name}": MeanMetric() for stage in ("val", "test") for name in LOGGED})

    def configure_model(self) -> None:
        """Build the layers, when the data is known."""
        if self.net is not None:
            return
        hparams: Any = self.hparams
        dm: Any = getattr(self.trainer, "datamodule", None)
        if dm is None and None in (hparams["channels"], hparams["classes"]):
            raise ConfigError(
                "model.channels, model.classes: missing, and there is no AsyncDataModule to take them from; give both"
            )
        if dm is not None:
            # Stored in the checkpoint, so that the model can be loaded without the data.
            hparams["channels"] = _channels(dm, hparams["x"], hparams["channels"])
            hparams["classes"] = _classes(dm, hparams["y"], hparams["classes"])
        self.net = _network(hparams["channels"], hparams["classes"], hparams["width"])

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (N, classes) for images of shape (N, C, H, W), or (N, H, W) with one channel."""
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
        count = len(batch[self.hparams["y"]])
        for name, value in zip(LOGGED, self._scored(batch), strict=True):
            mean: Any = self.means[f"{stage}/{name}"]
            mean.update(value, weight=count)
            self.log(f"{stage}/{name}", mean, prog_bar=True, batch_size=count)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        """Class numbers."""
        scores: Tensor = self(batch[self.hparams["x"]])
        return scores.argmax(1)

    def configure_optimizers(self) -> Any:
        """AdamW, with a learning rate that rises and falls once in a training."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        steps = max(float(self.trainer.estimated_stepping_batches), 1.0)  # it is 0 if no batch is trained on

        def rate(step: int) -> float:
            # A function of the step alone: a run resumed with more epochs continues on a longer curve.
            done = min((step + 1) / steps, 1.0)
            return done / 0.1 if done < 0.1 else (1 + math.cos(math.pi * (done - 0.1) / 0.9)) / 2

        if steps == math.inf:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _check_field(dm: Any, option: str, key: str) -> None:
    spec, keys = dm.spec, list(dm.spec)
    if not spec.as_mapping:
        fields = ", ".join(f"{name}: {key}" for name, key in zip("xy", keys, strict=False))
        raise ConfigError(
            f"fields: batches are tuples of {', '.join(keys)}, but this model takes fields by key; name the fields, as "
            f"in 'data.train.fields={{{fields}}}'"
        )
    if key not in spec:
        raise ConfigError(
            f"model.{option}: there is no field {key!r}, but {', '.join(keys)}; name one of these with "
            f"model.{option}=KEY, or add {key} to the fields of the data"
        )


def _classes(dm: Any, key: str, configured: int | None) -> int:
    _check_field(dm, "y", key)
    if key not in dm.num_classes:
        raise ConfigError(
            f"model.y: field {key!r} is {dm.spec[key]} and holds no class numbers; name a field with one whole number "
            "≥ 0 per sample"
        )
    classes: int = dm.num_classes[key]
    if configured is not None and configured < classes:
        raise ConfigError(
            f"model.classes: {configured}, but field {key!r} has {classes} classes, 0 to {classes - 1}; leave it "
            "out, and the data decides"
        )
    return classes if configured is None else configured


def _channels(dm: Any, key: str, configured: int | None) -> int:
    _check_field(dm, "x", key)
    shape = dm.spec[key].shape
    if len(shape) not in (2, 3):
        raise ConfigError(
            f"model.x: field {key!r} has samples of shape {shape}, but this model takes images (C, H, W) or (H, W); "
            "name another field, or choose another model"
        )
    if len(shape) == 3 and shape[2] <= 4 < shape[0]:
        rank_zero_warn(
            f"field {key!r} has samples of shape {shape}; if the last axis holds the channels, set "
            "data.train.layout=NHWC"
        )
    channels: int = shape[0] if len(shape) == 3 else 1
    if configured not in (None, channels):
        raise ConfigError(
            f"model.channels: {configured}, but the images of field {key!r} have {channels} (shape {shape}); leave it "
            "out, and the data decides"
        )
    return channels


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
