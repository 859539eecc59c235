"""Models whose parameters have no values until they are sharded: `zero.init()`."""
