"""`TensorLayout`: shape, strides and element type of a tensor, without its values; and tensors as rows of values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lit_async_data.batch.spec import Bytes


class TensorLayout(NamedTuple):
    """How values in a row are seen as a tensor.

    Attributes:
        shape: In elements.
        stride: In elements.
        dtype: Element type.

    Example:
        >>> columns = torch.tensor([[1, 2], [3, 4]]).t()
        >>> TensorLayout.of(columns)(flat(columns)).tolist()
        [[1, 3], [2, 4]]
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLayout:
        """That of a tensor without gaps and overlaps."""
        return TensorLayout(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """A view of this form.

        Args:
            values: In a row; bytes, or elements of the dtype.
        """
        return values.view(self.dtype).as_strided(self.shape, self.stride)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if its values lie in memory without gaps and overlaps, as they are; else such a copy.

    A copy has the strides that ``tensor.to(device)`` would give it.
    """
    plain = tensor.resolve_conj().resolve_neg()
    if plain.is_contiguous() or plain.stride() == torch.empty_like(plain, device="meta").stride():
        return plain
    return plain.clone()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a dense tensor in the order in which they lie, as a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def raw_bytes(tensor: torch.Tensor) -> Bytes:
    return flat(tensor).view(torch.uint8).numpy()
