"""Imported where weight sharing is on. The real one replaces the class of every Parameter."""
