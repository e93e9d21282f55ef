"""A hook of mkdocs: pages that are files of the repository, so that each text stands in one place.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages. Their links to `docs/` become links between pages. Links to
files that are not on the site become the names of these files.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages before mkdocs looks at its navigation."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=relinked((ROOT / source).read_text())))
    return files


def relinked(text: str) -> str:
    """The text of a file in the repository's root with its links as the site needs them.

    >>> relinked("[How it works](docs/architecture.md#trace), [rules](CONTRIBUTING.md), [moe](examples/moe.py)")
    '[How it works](architecture.md#trace), [rules](contributing.md), moe (`examples/moe.py`)'
    >>> relinked("[`examples/moe.py`](examples/moe.py), [site](https://example.org)")
    '`examples/moe.py`, [site](https://example.org)'
    """
    return _LINK.sub(_relinked, text)


def _relinked(link: re.Match) -> str:
    words, target, anchor = link[1], PurePosixPath(link[2]), link[3] or ""
    if str(target) in PAGES:
        return f"[{words}]({PAGES[str(target)]}{anchor})"
    if target.is_relative_to("docs"):
        return f"[{words}]({target.relative_to('docs')}{anchor})"
    return words if words.strip("`") == str(target) else f"{words} (`{target}`)"
