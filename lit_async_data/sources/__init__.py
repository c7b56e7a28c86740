"""Sources: `contract.source.Source` is the contract; each other room implements it for one kind of data."""
