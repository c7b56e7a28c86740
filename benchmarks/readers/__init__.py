"""The contenders that read files: this package, DataLoaders, other libraries."""
