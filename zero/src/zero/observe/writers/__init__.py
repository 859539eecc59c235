"""Observers that write to well-kept libraries, each imported when the writer is made."""
