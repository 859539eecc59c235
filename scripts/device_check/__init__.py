"""Everything that needs a device, in one command: see `scripts/device-check --help`.

It uses the standard library only, since it runs on machines where nothing is installed yet and no package
index is reachable.
"""
