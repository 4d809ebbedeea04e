"""The command line in this process: what it prints, and the CSV files that it leaves."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from typer.testing import CliRunner

from megamoe.cli import app


def plain(text: str) -> str:
    """Without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─┃━┏┓┡┩└┘]", " ", text).split())


def invoke(*arguments: str):
    """The result of ``megamoe *arguments`` and its plain text."""
    result = CliRunner().invoke(app, list(arguments), terminal_width=200)
    return result, plain(result.output)


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
