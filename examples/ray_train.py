"""With Ray Train: each worker reads its share. ``pip install 'ray[train]'``, ``python examples/ray_train.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import ray  # pyright: ignore[reportMissingImports]
import ray.train  # pyright: ignore[reportMissingImports]
import torch
from ray.train.torch import TorchTrainer, get_device, prepare_model  # pyright: ignore[reportMissingImports]

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions


def train(config: dict[str, Any]) -> str:
    """Runs in every worker. The result has the return value of rank 0."""
    context, device = ray.train.get_context(), get_device()
    source = HDF5Source(config["path"], fields={"x": "spectra", "y": "target"})
    loader = AsyncLoader(
        source,
        LoaderOptions(batch_size=64, shuffle=True, return_indices=True),
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=device,
    )
    model = prepare_model(torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    times, loss = torch.zeros(len(source), device=device), torch.zeros(())
    with loader:
        for epoch in range(3):
            times.zero_()  # how often each sample came
            for batch in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(batch["x"].to(device)).squeeze(1), batch["y"].to(device))
                loss.backward()
                optimizer.step()
                times[batch["index"].to(device)] += 1
            torch.distributed.all_reduce(times)
            ray.train.report({"epoch": epoch, "loss": loss.item()})
        once, waited = int(times.eq(1).sum()), loader.stats().wait_s
    return f"{once} of {len(source)} samples came once over {loader.world_size} workers; rank 0 waited {waited:.3f} s"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spectra.h5")
        with h5py.File(path, "w") as file:
            spectra = np.random.default_rng(0).normal(size=(1001, 128)).astype(np.float32)
            file["spectra"], file["target"] = spectra, spectra[:, 0]
        trainer = TorchTrainer(
            train,
            train_loop_config={"path": str(path)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="spectra", storage_path=folder),
        )
        print(trainer.fit().return_value)
        ray.shutdown()
