"""Datasets of numbered rows, which DataLoader workers import without Lightning."""

import torch
from torch.utils.data import Dataset, IterableDataset

SAMPLES, WIDTH = 14, 5


class Numbers(Dataset):
    """Sample n is a row of n, and n itself."""

    def __init__(self, samples=SAMPLES, first=0, fails_at=None):
        self.samples, self.first, self.fails_at = samples, first, fails_at

    def __len__(self):
        return self.samples

    def __getitem__(self, number):
        if number == self.fails_at:
            raise KeyError(f"sample {number}")
        return {"x": torch.full((WIDTH,), float(self.first + number)), "index": self.first + number}


class Stream(IterableDataset):
    """The samples of `Numbers` without a length."""

    def __init__(self, samples=SAMPLES):
        self.samples = samples

    def __iter__(self):
        return ({"x": torch.full((WIDTH,), float(n)), "index": n} for n in range(self.samples))
