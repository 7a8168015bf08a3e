"""MkDocs hooks: the README as start page, pages at the root, links to files outside docs/, and formulas."""

import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
START = "docs/index.md"
ROOT_PAGES = {"CONTRIBUTING.md": "docs/internals/contributing.md", "CHANGELOG.md": "docs/internals/changelog.md"}
SITE_PAGES = {"README.md": START, **ROOT_PAGES}  # A link to the README leads to the start page.
SHIM, OWN_SHIM = "https://unpkg.com/iframe-worker/shim", "javascripts/frame-worker.js"
FORMULA = re.compile(r"^```math\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> None:
    """Add the pages at the root to the site."""
    for name, page in ROOT_PAGES.items():
        text = _with_site_links((ROOT / name).read_text(encoding="utf-8"), name, page)
        files.append(File.generated(config, page.removeprefix("docs/"), content=text))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links that work on the site."""
    path = f"docs/{page.file.src_uri}"
    if path == START:
        return _start_page(markdown)
    return markdown if path in ROOT_PAGES.values() else _with_site_links(_with_mathml(markdown), path, path)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return a page that asks no web server for the worker of the search, see `javascripts/frame-worker.js`."""
    return output.replace(SHIM, os.path.relpath(OWN_SHIM, Path(page.url).parent))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Return the page of the error 404 likewise."""
    return output_content.replace(SHIM, f"/{OWN_SHIM}")


def _start_page(markdown: str) -> str:
    """Return the README, with the page's own sections in place of its section of links."""
    promise, _, after = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation\n")
    limits = after[after.index("## ") :]
    sections = markdown[markdown.index("## ") :]
    return f"{_with_site_links(promise + limits, 'README.md', START)}\n{_with_site_links(sections, START, START)}"


def _with_mathml(markdown: str) -> str:
    """Return a page whose formulas are MathML, which browsers show and print without a script."""
    return FORMULA.sub(lambda match: f'<div class="formula">{convert(match[1], display="block")}</div>', markdown)


def _with_site_links(text: str, source: str, page: str) -> str:
    """Return a text whose relative links start at `page`; links to files that are not in the site become plain text.

    `source` and `page` are paths from the root: of the file, where its links start, and of the file as a page of the site.
    """

    def replace(match: re.Match[str]) -> str:
        label, link = match.groups()
        name, hash_, anchor = link.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return match[0]
        target = os.path.normpath(Path(source).parent / name)
        target = SITE_PAGES.get(target, target)
        if not target.startswith("docs/"):
            return label
        return f"[{label}]({os.path.relpath(target, Path(page).parent)}{hash_}{anchor})"

    return LINK.sub(replace, text)
