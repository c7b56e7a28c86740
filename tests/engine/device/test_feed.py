"""What of a batch goes to a device, and the memory that it takes there."""

import pytest
import torch

from lit_async_data.engine.device.feeds import DeviceBuffers, HostBatch, moves


@pytest.mark.parametrize(
    ("to", "goes"),
    [
        (lambda self, device: None, True),
        (lambda self, where: None, True),
        (lambda self, other=None, device=None: None, True),
        (lambda self, *given, **named: None, True),
        (lambda self, other=None, *contexts, **context: None, False),  # as those of pint
        (lambda self, unit, equivalencies=(), copy=True: None, False),  # of astropy
        (lambda self, units, equivalence=None: None, False),  # of unyt
        (lambda self, tz: None, False),  # of arrow
        (lambda self, currency: None, False),
        ("a place", False),
    ],
)
def test_an_object_goes_to_a_device_unless_its_to_converts_to_something_else(to, goes):
    assert moves(type("Value", (), {"to": to})()) is goes


def test_a_batch_takes_the_memory_of_its_parts_unless_more_is_known():
    host = HostBatch({"x": torch.zeros(2, 3)}, torch.zeros(5, dtype=torch.uint8))
    assert host.buffers == DeviceBuffers({"x": ((2, 3), torch.float32)}, 5)
    assert HostBatch().buffers == DeviceBuffers({}, None)
    assert HostBatch(known=host.buffers).buffers == host.buffers
