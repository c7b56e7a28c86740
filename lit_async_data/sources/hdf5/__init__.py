"""HDF5 files. `source.HDF5Source` is what users build; `dataset` looks at files, `readers` read them."""
