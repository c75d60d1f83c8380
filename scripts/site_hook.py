"""A hook of mkdocs.yml: what a code host shows well, but mkdocs does not."""

from __future__ import annotations

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace links to files outside docs/, which the site has not, by their paths; and ``\\|`` in code by ``|``."""
    without_links = re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", _path, markdown)
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), without_links)


def _path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if text.strip("`") == path else f"{text} (`{path}`)"
