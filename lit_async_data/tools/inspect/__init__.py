"""``inspect``: what files hold, how each dataset is read, and the lines that read it."""
