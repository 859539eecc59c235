"""Settings and how they are checked: of where state lives, of compilation; sizes for people."""
