"""Everything that needs a device, in one command; `scripts/device-check --help`.

Standard library only: it runs on machines where nothing is installed yet and no package index is reachable.
"""
