"""Files that tests read: as people have them, with random values."""
