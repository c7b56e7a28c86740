"""Training on real photographs through Lightning's Trainer: a table, JPEG files, random crops, checkpoints."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from lit_async_data import AsyncDataModule, ManifestSource, Normalize, ToFloat

datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """24 JPEG crops of each of two photographs, and a table that calls them by name and by number."""
    folder = tmp_path_factory.mktemp("photographs")
    random = np.random.default_rng(0)
    lines = ["id,path,what,number"]
    for name, image in zip(("china", "flower"), datasets.load_sample_images().images, strict=True):
        for number in range(24):
            height, width = random.integers(100, 160, 2)
            top, left = random.integers(0, image.shape[0] - height), random.integers(0, image.shape[1] - width)
            path = f"{name}-{number:02d}.jpg"
            Image.fromarray(image[top : top + height, left : left + width]).save(folder / path, quality=90)
            lines.append(f"{len(lines) - 1:03d},{path},{name},{int(name == 'flower')}")
    (folder / "photographs.csv").write_text("\n".join(lines))
    return folder


def module(photographs, y="what", **options):
    source = ManifestSource(
        photographs / "photographs.csv",
        {"x": "path", "y": y},
        id="id",
        image_size=48,
        resize="random_crop",
        scale=(0.3, 1.0),
        check_files="all",
    )
    return AsyncDataModule(
        source=source,
        split={"train": 0.7, "val": 0.3},
        loader={"batch_size": 8, "seed": 1},
        device_transform=Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), scale="type"),
        **options,
    )


def network(seen):
    from lit_async_data.lightning.compat import pl

    class Network(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 5, 4), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, 2), torch.nn.ReLU(),
                torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 2),
            )  # fmt: skip

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.layers(batch["x"]), batch["y"])
            seen["losses"].append(float(loss.detach()))
            seen["shapes"].add(tuple(batch["x"].shape[1:]))
            return loss

        def validation_step(self, batch, index):
            right = self.layers(batch["x"]).argmax(1) == batch["y"]
            seen["right"] += right.tolist()

        def on_validation_epoch_start(self):
            seen["right"] = []

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.02)

    return Network()


def trainer(folder, epochs):
    from lit_async_data.lightning.compat import pl

    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, num_sanity_val_steps=0, enable_checkpointing=False,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_network_tells_two_photographs_apart(photographs, tmp_path):
    torch.manual_seed(0)
    seen = {"losses": [], "shapes": set(), "right": []}
    data = module(photographs)
    assert data.classes == {"y": ("china", "flower")}
    assert data.num_classes == {"y": 2}
    training = trainer(tmp_path, 10)
    training.fit(network(seen), datamodule=data)
    assert all(map(math.isfinite, seen["losses"]))
    assert np.mean(seen["losses"][-4:]) < 0.7 * np.mean(seen["losses"][:2])
    assert np.mean(seen["right"]) > 0.8
    assert seen["shapes"] == {(3, 48, 48)}
    training.save_checkpoint(tmp_path / "last.ckpt")
    kept = torch.load(tmp_path / "last.ckpt")
    assert any("china" in str(value) and "flower" in str(value) for key, value in kept.items() if key != "state_dict")
    more = trainer(tmp_path, 11)
    more.fit(network(seen), datamodule=module(photographs), ckpt_path=tmp_path / "last.ckpt")
    assert more.current_epoch == 11


def test_images_become_floats_on_their_way(photographs):
    source = ManifestSource(photographs / "photographs.csv", ["path", "number"], image_size=(20, 30))
    batches = {}
    for name, transform in {"bytes": None, "float": ToFloat(), "unit": Normalize(scale="type")}.items():
        data = AsyncDataModule(train=source, loader={"batch_size": 4, "shuffle": False}, device_transform=transform)
        batches[name] = next(iter(data.train_dataloader()))[0]
        data.close()
    wanted = batches["bytes"].numpy().astype("f8") / 255
    assert batches["float"].dtype == batches["unit"].dtype == torch.float32
    np.testing.assert_allclose(batches["float"], wanted, atol=1e-6)
    np.testing.assert_allclose(batches["unit"], wanted * 2 - 1, atol=1e-6)
    assert batches["unit"].is_contiguous(memory_format=torch.channels_last)
