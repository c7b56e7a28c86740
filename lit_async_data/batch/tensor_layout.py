"""`TensorLayout`: shape, strides and element type of a tensor without its values; and dense tensors as flat values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lit_async_data.batch.spec import Bytes


class TensorLayout(NamedTuple):
    """How a flat row of values becomes a tensor."""

    shape: tuple[int, ...]  # in elements
    stride: tuple[int, ...]  # in elements
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLayout:
        """Returns the layout of a tensor without gaps and overlaps."""
        return TensorLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Returns flat values as a view with this layout."""
        return values.view(self.dtype).as_strided(self.shape, self.stride)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if its memory has no gaps and overlaps, otherwise a copy without them.

    A copy has the strides that ``tensor.to(device)`` would give it.
    """
    plain = tensor.resolve_conj().resolve_neg()
    if plain.is_contiguous() or plain.stride() == torch.empty_like(plain, device="meta").stride():
        return plain
    return plain.clone()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-dimensional view of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def raw_bytes(tensor: torch.Tensor) -> Bytes:
    return flat(tensor).view(torch.uint8).numpy()
