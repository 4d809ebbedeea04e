"""``python -m megamoe``: see ``cli``."""

from megamoe.cli import app

app()
