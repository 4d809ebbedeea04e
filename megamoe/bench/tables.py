"""Rows of measurements, on the screen and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def columns_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Every column that a row has, in the order in which they first occur."""
    return list(dict.fromkeys(column for row in rows for column in row))


def show(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    """Prints those of ``columns`` that a row has; a value that a row lacks is left blank."""
    shown = [column for column in columns if any(column in row for row in rows)]
    table = Table(*shown)
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in shown))
    Console(width=180).print(table)


def write_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Writes all columns of ``rows``, and the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns_of(rows))
        writer.writeheader()
        writer.writerows(rows)
