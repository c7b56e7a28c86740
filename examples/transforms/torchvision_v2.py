"""torchvision's v2 transforms as a sample transform.

They draw from torch's global generator, which all code of a process shares. So they run where no other code draws: in a
reader process, which the loader chooses by itself if it can, or in the training loop (workers=0). A thread beside the
loop would disturb the random numbers of both.
"""

from __future__ import annotations

import h5py
import numpy as np
import torch
from torchvision.transforms import v2  # pyright: ignore[reportMissingImports]

from lit_async_data import AsyncDataModule, AsyncLoader, HDF5Source

train = v2.Compose([v2.RandomResizedCrop(48, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4)])
evaluation = v2.CenterCrop(48)


def augmented(sample, rng):
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the generators of all GPUs, and takes a thousand times as long.
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        return {"x": train(torch.from_numpy(sample["x"])), "y": sample["y"]}


def centred(sample):
    return {"x": evaluation(torch.from_numpy(sample["x"])), "y": sample["y"]}


if __name__ == "__main__":
    with h5py.File("images.h5", "w") as file:
        file["x"] = np.random.default_rng(0).integers(0, 255, (400, 64, 64, 3), np.uint8)
        file["y"] = np.arange(400) % 10
    found = []
    for workers in ({"workers": 0}, {"worker_kind": "process"}, {"worker_kind": "process", "workers": 3}):
        dm = AsyncDataModule(
            source=HDF5Source("images.h5", {"x": "x", "y": "y"}, layout={"x": "NHWC"}),
            split={"train": 0.8, "val": 0.2},
            loader={"batch_size": 64, "shuffle": True, **workers},
            sample_transform={"train": augmented, "eval": centred},
        )
        loader, val = dm.train_dataloader(), dm.val_dataloader()
        assert isinstance(loader, AsyncLoader)
        assert isinstance(val, AsyncLoader)
        before = torch.get_rng_state()
        found.append(np.concatenate([batch["x"].numpy() for batch in loader]))
        assert torch.equal(torch.get_rng_state(), before)
        print(workers, dm.spec, f"the loop waited {loader.stats().wait_s:.3f} s")
        assert {tuple(batch["x"].shape[1:]) for batch in val} == {(3, 48, 48)}
        dm.close()
    assert all(np.array_equal(found[0], other) for other in found)
