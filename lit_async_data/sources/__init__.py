"""Where samples come from. `base.Source` is the contract; each other module keeps it for one kind of data."""
