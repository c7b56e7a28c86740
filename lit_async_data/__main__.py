"""``python -m lit_async_data``: the command line; see ``tools/``."""

from __future__ import annotations

import sys

from lit_async_data.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
