"""Rows of a benchmark kept in a JSON file, so that it can be run in several parts."""

import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

Row = TypeVar("Row")  # a dataclass


def read_rows(file: Path | None, row: type[Row], key: Callable[[Row], Hashable]) -> dict[Hashable, Row]:
    """The rows of earlier runs, by their keys; none if there is no file."""
    if file is None or not file.exists():
        return {}
    rows = [row(**fields) for fields in json.loads(file.read_text())]
    return {key(one): one for one in rows}


def write_rows(file: Path | None, rows: Iterable[Row]) -> None:
    """Writes all rows, if there is a file for them."""
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1))
