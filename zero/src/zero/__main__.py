"""`python -m zero` is the command `zero`."""

from zero.cli import app

app(prog_name="zero")
