"""Sources: a reference model, what they find and hold, and sources that act when they are read."""
