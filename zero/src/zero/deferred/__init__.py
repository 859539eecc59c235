"""Models born sharded: `zero.init()`."""
