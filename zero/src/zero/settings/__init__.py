"""Settings and their validation: where state lives, compilation; human-readable sizes; `~` in paths."""
