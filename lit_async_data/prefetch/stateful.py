"""`StatefulPrefetchedLoader`: a prefetched loader that can say where it is."""

from __future__ import annotations

from typing import Any

from lit_async_data.prefetch.loader import PrefetchedLoader


class StatefulPrefetchedLoader(PrefetchedLoader):
    """One whose loader can say where it is, and go on from there.

    Its state is that after the batch which was handed out last, however many have been read ahead.
    """

    _stateful = True

    def state_dict(self) -> Any:
        """The loader's state after the last batch that was handed out.

        Raises:
            Exception: What the loader's own ``state_dict`` raised.
        """
        return self.loader.state_dict() if self._at.state is None else self._at.state.told()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from a state, with the next pass."""
        self._rest()
        self._at.state, self._at.fresh = None, True
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
