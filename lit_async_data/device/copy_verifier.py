"""`CopyVerifier`: whether the first batches come to the training step, and stay there, as they were read.

Each of these batches is summed three times, field by field:

1. in its slot, just before its copy is enqueued;
2. on the device, when it is handed over: by a kernel on compute, enqueued after compute has been told to wait;
3. there again when it is released, which is when the next batch is asked for: enqueued behind the step.

A device transform makes other values of what was copied. So there the copy is summed on side before the transform, and
what the transform has made is summed after it, also on side; 2. and 3. must be like the latter.

Sums are compared when the last of these batches is released, or with the first batch of an epoch, all at once. To look
earlier would hold the host until the device is done, and hide the very races that are looked for. Until a batch is
released it is held; then the last kernel that was enqueued reads all of it, and its memory is free: a copy into it that
does not wait for that kernel changes the sum. What goes wrong only if the step lets go of its batch before it has ended
is not found, since it does not let go of a batch that is watched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_async_data.device.checksum import checksum
from lit_async_data.device.streams import Streams
from lit_async_data.errors import TransferError
from lit_async_data.order.plan import BatchIndex

Sums = dict[str, Tensor]
When = Literal["hand-over", "release"]
# What stands in the message, and where to look.
_FOUND: dict[When, str] = {
    "hand-over": "did not arrive as it was read",
    "release": "changed while the step had it, and not by torch",
}


class _Compared(NamedTuple):
    """Sums that must be the same."""

    key: BatchIndex
    when: When
    wanted: Sums
    found: Sums


@dataclasses.dataclass
class _Coming:
    """What has been summed of a batch on its way: in host memory, where it was copied to, and what was made of it."""

    read: Sums
    arrived: Sums | None = None
    made: Sums | None = None


@dataclasses.dataclass
class _Held:
    """A batch that the user has; fields with the number of changes that torch had counted at hand-over."""

    key: BatchIndex
    fields: dict[str, Tensor]
    versions: dict[str, int]
    sums: Sums


class CopyVerifier:
    """Watches the first batches of a loader. For one thread, that of the queue which calls it.

    Args:
        batches: How many.
        streams: The device; None where it has no streams, and batches are handed out in host memory.
    """

    def __init__(self, batches: int, streams: Streams | None = None) -> None:
        self._left = batches
        self._streams = streams
        self._coming: dict[BatchIndex, _Coming] = {}
        self._held: _Held | None = None
        self._compared: list[_Compared] = []

    def read(self, key: BatchIndex, fields: Any) -> None:
        """A batch lies in host memory, and nobody has touched it yet.

        Args:
            key: Which it is.
            fields: A nested batch of tensors, as in the other methods.
        """
        if self._left:
            self._coming[key] = _Coming({name: checksum(tensor) for name, tensor in _tensors(fields)})

    def arrived(self, key: BatchIndex, fields: Any) -> None:
        """What was read lies where it was copied to, in the order of the current stream."""
        if key in self._coming:
            self._coming[key].arrived = self._sums(dict(_tensors(fields)))

    def made(self, key: BatchIndex, batch: Any) -> None:
        """A transform has made this of it, on the current stream."""
        if key in self._coming:
            self._coming[key].made = self._sums(dict(_tensors(batch)))

    def handed_over(self, key: BatchIndex, batch: Any) -> None:
        """The user has the batch; compute has been told to wait for it."""
        coming = self._coming.pop(key, None)
        if coming is None:
            return
        self._left -= 1
        if not self._left:
            self._coming.clear()  # more were on their way
        fields = dict(_tensors(batch))
        sums = self._sums(fields)
        if coming.arrived is not None:
            self._compared.append(_Compared(key, "hand-over", coming.read, coming.arrived))
        if coming.made is not None:
            self._compared.append(_Compared(key, "hand-over", coming.made, sums))
        versions = {name: tensor._version for name, tensor in fields.items()}  # noqa: SLF001  # it has no other name
        self._held = _Held(key, fields, versions, coming.made or sums)

    def released(self, upcoming: BatchIndex) -> None:
        """The user asks for the next batch.

        Args:
            upcoming: Which that is.

        Raises:
            TransferError: As `settle`, where it is time to compare.
        """
        self._release()
        if not self._left or upcoming.step == 0:
            self.settle()

    def settle(self) -> None:
        """Compare what has been summed; the host waits for the device, if there is anything.

        Raises:
            TransferError: A batch is not what was read; names its fields, step and epoch.
        """
        self._release()
        if self._compared and self._streams is not None:
            self._streams.happened(self._streams.record(self._streams.compute()), block=True)
        compared, self._compared = self._compared, []  # one error is enough, and the same one is not raised again
        for key, when, wanted, found in compared:
            wrong = [name for name, total in found.items() if int(total) != int(wanted[name])]
            if wrong:
                raise _error(key, when, wrong)

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        untouched = {
            name: tensor
            for name, tensor in held.fields.items()
            if tensor._version == held.versions[name]  # noqa: SLF001
        }
        self._compared.append(_Compared(held.key, "release", held.sums, self._sums(untouched)))

    def _sums(self, fields: Mapping[str, Tensor]) -> Sums:
        enqueued = checksum if self._streams is None else self._streams.checksum
        return {name: enqueued(tensor) for name, tensor in fields.items()}


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested batch, with what leads to each: ``x``, ``0``, ``1.boxes``."""
    if isinstance(batch, Tensor):
        # Those of inference mode count no changes, and sparse, nested and quantized ones have no plain bytes.
        plain = batch.layout == torch.strided and not (batch.is_nested or batch.is_quantized)
        if plain and not batch.is_inference():
            yield name or "the batch", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(batch, tuple | list):
        for place, value in enumerate(batch):
            yield from _tensors(value, f"{name}.{place}" if name else str(place))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from _tensors({each.name: getattr(batch, each.name, None) for each in dataclasses.fields(batch)}, name)


def _error(key: BatchIndex, when: When, fields: list[str]) -> TransferError:
    return TransferError(
        f"verify_copies: {', '.join(fields)} of batch {key.step} of epoch {key.epoch} {_FOUND[when]} "
        f"(found at {when}). "
        "Unless code of yours writes to batches where torch does not see it, as through numpy, that is a fault of this "
        "package or of a driver: please report it with this line; device_depth=0 copies nothing ahead meanwhile",
        stage="copy",
    )
