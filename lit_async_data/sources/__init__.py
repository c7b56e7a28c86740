"""Sources: `base.Source` is the contract; each other module implements it for one kind of data."""
