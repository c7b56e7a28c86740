"""For your own tests: `check_contract` tests a source, and `ArraySource` is a source in memory."""

from __future__ import annotations

from lit_async_data.testing.arrays import ArraySource as ArraySource
from lit_async_data.testing.contract import check_contract as check_contract
