"""Settings and their validation: where state lives, compilation; and human-readable sizes."""
