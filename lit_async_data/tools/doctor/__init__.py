"""``doctor``: measures how fast files feed training, and says what limits it and what helps."""
