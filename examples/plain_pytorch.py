"""Without Lightning: an `AsyncLoader` in your own loop. Runs unchanged: ``python examples/plain_pytorch.py``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch

from lit_async_data import AsyncLoader, HDF5Source, LoaderOptions

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "scan.h5")
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["data"] = random.integers(0, 255, (1000, 32, 32, 3), dtype=np.uint8)
        file["labels"] = random.integers(0, 10, 1000)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10)).to(device)
    source = HDF5Source(path, fields={"x": "data", "y": "labels"}, layout={"x": "NHWC"})
    model(torch.zeros(1, *source.spec["x"].shape, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    with AsyncLoader(source, LoaderOptions(batch_size=64, shuffle=True), device=device) as loader:
        for epoch in range(3):
            loss = torch.zeros(())
            for batch in loader:
                x, y = batch["x"].to(device), batch["y"].to(device)  # no copy if the loader has copied it already
                loss = torch.nn.functional.cross_entropy(model(x.float() / 255), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}, {loader.stats().wait_s:.3f} s waited for data so far")
    source.close()
