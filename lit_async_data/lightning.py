"""Whichever of the two names of Lightning this program uses.

``pytorch_lightning`` and ``lightning.pytorch`` are the same code under two names, and each one's Trainer refuses the
other's DataModules and callbacks. The one that is imported already is taken; ``pytorch_lightning`` if neither or both.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytorch_lightning as pl
else:
    _name = "pytorch_lightning"
    if "lightning.pytorch" in sys.modules and _name not in sys.modules:
        _name = "lightning.pytorch"
    pl = importlib.import_module(_name)

__all__ = ["pl"]
