"""Models that are sharded as they are built: `zero.init()`."""
