"""The speed table of ``docs/internals/performance.md``: a run replaces the rows that it has measured."""

from collections.abc import Mapping
from pathlib import Path

Key = tuple[str, str, str]
"""Extractor, maker and class of the processor, precision."""

COLUMNS = ("baseline", "folded", "compiled", "imagepivot", "imagepivot, --compile", "targets", "one image, s")
"""What is measured. An empty cell was not."""

_HEAD = ("extractor", "processor", "precision", *COLUMNS)
_BEGIN, _END = "<!-- speed: begin -->", "<!-- speed: end -->"


def read(page: Path) -> dict[Key, dict[str, str]]:
    """Return the cells of the rows of a page, by column; cells that are empty are left out."""
    rows = {}
    for line in _inside(page.read_text(encoding="utf-8"))[1].splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == len(_HEAD) and cells[0] != _HEAD[0] and not cells[0].startswith("--"):
            rows[cells[0], cells[1], cells[2]] = {name: cell for name, cell in zip(COLUMNS, cells[3:], strict=True) if cell}
    return rows


def write(page: Path, rows: Mapping[Key, Mapping[str, str]]) -> None:
    """Put the cells of a run into the table of a page; cells that the run did not measure stay."""
    old = read(page)
    before, _, after = _inside(page.read_text(encoding="utf-8"))
    merged = {key: {**old.get(key, {}), **rows.get(key, {})} for key in {**old, **rows}}
    page.write_text(f"{before}{_BEGIN}\n{render(merged)}{_END}{after}", encoding="utf-8")


def render(rows: Mapping[Key, Mapping[str, str]]) -> str:
    """Return the table in Markdown."""
    lines = [_HEAD, ("---",) * len(_HEAD)]
    for (extractor, processor, precision), cells in rows.items():
        lines.append((f"`{extractor}`", processor, precision, *(cells.get(name, "") for name in COLUMNS)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _inside(text: str) -> tuple[str, str, str]:
    """Split a page into what stands before the marks, between them and behind them."""
    before, _, rest = text.partition(_BEGIN)
    inside, found, after = rest.partition(_END)
    if not found:
        raise SystemExit(f"the page lacks {_BEGIN} and {_END}, between which the table goes")
    return before, inside, after
