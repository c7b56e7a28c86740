"""The demo of ``train.py``: scikit-learn's digits as HDF5 files, and a small network."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_async_data import ConfigError, HDF5Source
from lit_async_data.errors import MissingError

SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}  # of the 1797 digits


def digits(root: str, part: str) -> HDF5Source:
    """One part of the digits, ``x``: uint8 (1, 8, 8) with values 0 to 16, ``y``: 0 to 9; written by the first call."""
    folder = Path(root, "digits")
    if not folder.exists():
        _write(folder)
    return HDF5Source(folder / f"{part}.h5", fields={"x": "data", "y": "labels"})


def _write(folder: Path) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingError(
            "data: scikit-learn, which contains the digits, is missing: pip install -e '.[demo]', or train on your own "
            "file: python train.py data=hdf5 data.train.path=FILE.h5"
        ) from error
    loaded: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    ends = np.cumsum([round(share * len(order)) for share in SHARES.values()])
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete: several processes may do this at once, and the first one wins.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        complete = Path(temporary, "complete")
        complete.mkdir()
        for part, rows in zip(SHARES, np.split(order, ends[:-1]), strict=True):
            with h5py.File(complete / f"{part}.h5", "w") as file:
                file["data"] = loaded.images[rows].astype(np.uint8)[:, None]
                file["labels"] = loaded.target[rows].astype(np.int64)
        with contextlib.suppress(OSError):
            complete.rename(folder)


class ImageClassifier(pl.LightningModule):
    """A small convolutional network for images of any size and type; its first layer normalises them.

    Args:
        x: Batch key of the images, of shape (N, C, H, W) or (N, H, W).
        y: Batch key of the class numbers, of shape (N,) or (N, 1).
        channels: Channels of an image; None takes their number from the data.
        classes: Number of classes; None takes it from the data.
        width: Channels after the first convolution.
        lr: Learning rate of AdamW.
    """

    def __init__(
        self,
        x: str = "x",
        y: str = "y",
        *,
        channels: int | None = None,  # noqa: ARG002  # save_hyperparameters reads them from the frame
        classes: int | None = None,  # noqa: ARG002
        width: int = 32,  # noqa: ARG002
        lr: float = 0.01,  # noqa: ARG002
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.x, self.y = x, y
        self.net: nn.Module | None = None
        # With sync_dist, Lightning's own means are too large if ranks have different numbers of samples (issue 21859).
        self.means = nn.ModuleDict({name: MeanMetric() for name in ("val/loss", "val/acc", "test/loss", "test/acc")})

    def configure_model(self) -> None:
        """Build the layers, when the data is known."""
        hparams: Any = self.hparams
        if None in (hparams["channels"], hparams["classes"]):
            # Stored in the checkpoint, so that the model can be loaded without the data.
            self._learn_from(self.trainer.datamodule, hparams)  # type: ignore[attr-defined]  # Lightning sets it
        if self.net is None:
            self.net = _network(hparams["channels"], hparams["classes"], hparams["width"])

    def _learn_from(self, data: Any, hparams: Any) -> None:
        spec = data.spec
        if not spec.as_mapping:
            fields = ", ".join(f"{name}: {each}" for name, each in zip("xy", spec, strict=False))
            raise ConfigError(
                f"batches are tuples of {', '.join(spec)}, but this model takes fields by key; name them: "
                f"'data.train.fields={{{fields}}}'",
                "fields",
            )
        for option, key in {"x": self.x, "y": self.y}.items():
            if key not in spec:
                raise ConfigError(
                    f"there is no field {key!r}; choose model.{option} from {', '.join(spec)}", f"model.{option}"
                )
        shape = spec[self.x].shape
        if len(shape) not in (2, 3):
            raise ConfigError(
                f"field {self.x!r} has shape {shape}, but this model takes (C, H, W) or (H, W)", "model.x"
            )
        if self.y not in data.num_classes:
            raise ConfigError(f"field {self.y!r} is {spec[self.y]}, but this model takes whole numbers ≥ 0", "model.y")
        hparams["channels"] = hparams["channels"] or (shape[0] if len(shape) == 3 else 1)
        hparams["classes"] = hparams["classes"] or data.num_classes[self.y]

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (N, classes) for images of shape (N, C, H, W), or (N, H, W) with one channel."""
        assert self.net is not None
        scores: Tensor = self.net((images[:, None] if images.ndim == 3 else images).to(self.dtype))
        return scores

    def _scored(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        labels, scores = batch[self.y].flatten(), self(batch[self.x])
        return {"loss": nn.functional.cross_entropy(scores, labels), "acc": (scores.argmax(1) == labels).float().mean()}

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of a batch."""
        scored = self._scored(batch)
        logged = {f"train/{name}": value for name, value in scored.items()}
        self.log_dict(logged, prog_bar=True, batch_size=len(batch[self.y]))
        return scored["loss"]

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log loss and accuracy."""
        self._log("val", batch)

    def test_step(self, batch: dict[str, Tensor]) -> None:
        """Log loss and accuracy."""
        self._log("test", batch)

    def _log(self, stage: str, batch: dict[str, Tensor]) -> None:
        count = len(batch[self.y])
        for name, value in self._scored(batch).items():
            mean: Any = self.means[f"{stage}/{name}"]
            mean.update(value, weight=count)
            self.log(f"{stage}/{name}", mean, prog_bar=True, batch_size=count)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def _network(channels: int, classes: int, width: int) -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    first = [nn.BatchNorm2d(channels), *block(channels, width), *block(width, width)]
    middle = [nn.MaxPool2d(2, ceil_mode=True), *block(width, 2 * width), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*first, *middle, nn.Flatten(), nn.Linear(8 * width, classes))
