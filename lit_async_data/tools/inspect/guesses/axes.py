"""The likely letters of stored axes."""

from __future__ import annotations

from collections.abc import Sequence

# Axes of at most `FEW` entries hold channels; larger ones up to `MOST_CHANNELS`, if the other axes are much longer.
FEW, MOST_CHANNELS = 4, 32
_SPACE = {1: "W", 2: "HW", 3: "DHW"}


def layout_of(shape: Sequence[int], axis: int, *, reverse: bool = False) -> str | None:
    """The layout to give a source; None if it needs none: samples first, and no channels.

    Args:
        shape: As stored.
        axis: The axis that counts samples.
        reverse: Whether axes are stored from the last to the first, as by MATLAB.

    Example:
        >>> layout_of((1000, 64, 48, 3), 0), layout_of((1000, 3, 64, 48), 0), layout_of((1000, 28, 28), 0)
        ('NHWC', 'NCHW', None)
        >>> layout_of((64, 48, 3, 1000), 3), layout_of((500, 5000, 12), 0)
        ('HWCN', 'NWC')
    """
    rest = [n for place, n in enumerate(shape) if place != axis]
    channel = _channel(rest)
    space = _SPACE.get(len(rest) - (channel is not None))
    if space is None:
        letters = "C" if len(rest) == 1 and axis else None
    else:
        letters = space[::-1] if reverse else space
        if channel is not None:
            letters = letters[:channel] + "C" + letters[channel:]
    if letters is None or (axis == 0 and channel is None):
        return None
    return f"{letters[:axis]}N{letters[axis:]}"


def _channel(rest: Sequence[int]) -> int | None:
    """The axis of channels among those of a sample: the last or the first, if it is short."""
    if len(rest) < 2:
        return None
    candidates = [place for place in (len(rest) - 1, 0) if _is_short(rest, place)]
    return min(candidates, key=lambda place: (rest[place], -place), default=None)


def _is_short(rest: Sequence[int], place: int) -> bool:
    n, others = rest[place], [each for other, each in enumerate(rest) if other != place]
    few = n <= FEW and len(rest) > 2 and n <= min(others)
    return few or (n <= MOST_CHANNELS and 4 * n <= min(others))
