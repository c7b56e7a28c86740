"""For your own tests.

`check_contract` tests a source, `ArraySource` is a source in memory, and `FakeStreams` is a fake device.
"""

from __future__ import annotations

from lit_async_data.testing.arrays import ArraySource as ArraySource
from lit_async_data.testing.contract import check_contract as check_contract
from lit_async_data.testing.fake_device import FakeEvent as FakeEvent
from lit_async_data.testing.fake_device import FakeStream as FakeStream
from lit_async_data.testing.fake_device import FakeStreams as FakeStreams
from lit_async_data.testing.fake_device import raw as raw
