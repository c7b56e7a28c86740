"""The Lightning package that this program uses.

``pytorch_lightning`` and ``lightning.pytorch`` are the same code under two names, and the Trainer of one refuses the
DataModules and callbacks of the other. This module takes the package that is already imported, and
``pytorch_lightning`` if neither or both are.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
else:
    _name = "pytorch_lightning"
    if "lightning.pytorch" in sys.modules and _name not in sys.modules:
        _name = "lightning.pytorch"
    pl = importlib.import_module(_name)
    _rank_zero = importlib.import_module(f"{_name}.utilities.rank_zero")
    rank_zero_info, rank_zero_warn = _rank_zero.rank_zero_info, _rank_zero.rank_zero_warn

__all__ = ["pl", "rank_zero_info", "rank_zero_warn"]
