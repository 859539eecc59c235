"""What lives where, by measurement: the memory tracer, the margin rule, and state moved to make room."""
