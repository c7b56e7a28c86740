"""`checksum` of a tensor, by which a proof of copies sees each changed word."""

from __future__ import annotations

import torch

# Of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as int64, which torch multiplies modulo 2⁶⁴ everywhere.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64
_WORD = 8
# Words that are summed at a time, to bound the temporary memory on the device, which is a few times as much.
_BLOCK = 2**20


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the 64-bit words of a tensor, each mixed with its place: int64, shape (), on its device.

    Each term is a bijection of its word, so one changed word always changes the sum; of other changes one in 2⁶⁴ does
    not. The words of a dense tensor are taken in the order of memory. The function waits for nothing: it enqueues its
    work on the current stream of the tensor's device.
    """
    content = _bytes(tensor)
    length, whole = len(content), len(content) // _WORD * _WORD
    total = torch.full((), length, dtype=torch.int64, device=content.device)
    for begin in range(0, whole, _BLOCK * _WORD):
        words = content[begin : min(begin + _BLOCK * _WORD, whole)].view(torch.int64)
        total = total + _mixed(words, begin // _WORD)
    if whole < length:
        last = content.new_zeros(_WORD)
        last[: length - whole] = content[whole:]
        total = total + _mixed(last.view(torch.int64), whole // _WORD)
    return total


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    places = torch.arange(first + 1, first + 1 + len(words), device=words.device)
    found = words + places * _GOLDEN
    found = (found ^ _shifted(found, 32)) * _MIX
    return (found ^ _shifted(found, 29)).sum()


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; those of a dense one in the order of memory, without a copy."""
    lying = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    content = tensor.detach().permute(lying).contiguous().reshape(-1).view(torch.uint8)
    return content if content.storage_offset() % _WORD == 0 else content.clone()
