"""`python -m accelz` is the command `accelz`."""

from accelz.cli import app

app(prog_name="accelz")
