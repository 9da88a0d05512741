"""Parameters from files onto the workers, each its own part, and back."""

from . import shard_loader as _shard_loader  # registers TVM's functions

del _shard_loader
