"""Self-contained HTML pages of chapters with tables, charts and pictures.

A page holds its style and pictures and no script; its Content-Security-Policy allows nothing else.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from schemas.console.tables import Table
from schemas.escapes import escape_text
from schemas.storage.folder import Folder

_TEMPLATES = Path(__file__).with_name("templates")
_STYLE = (_TEMPLATES / "page.css").read_text(encoding="utf-8")
_MAX_TEXT = 600

MAP_SIDE, PICTURE_SIDE = 900, 54


class TextLine(NamedTuple):
    """A text below a picture; the language is a BCP 47 tag, or empty."""

    text: str
    language: str = ""


class Exhibit(NamedTuple):
    """A picture with a title and lines of text.

    ``source`` is an address with data; empty without a picture. ``mark`` is a word on a frame around the picture.
    """

    image_id: str
    source: str = ""
    title: str = ""
    lines: Sequence[TextLine] = ()
    mark: str = ""

    @property
    def alternative(self) -> str:
        """Text in place of the picture."""
        return f"{self.image_id}: {self.lines[0].text}" if self.lines else self.image_id

    def to_dict(self) -> dict[str, Any]:
        """Return id, title and texts as plain values, for JSON."""
        return {"image_id": self.image_id, "title": self.title, "captions": [line._asdict() for line in self.lines]}


class Strip(NamedTuple):
    """Pictures below a heading; the layout is ``wide``, ``pairs`` or empty.

    ``following`` are the parameters of the page of a server with more pictures.
    """

    heading: TextLine
    exhibits: Sequence[Exhibit]
    layout: str = ""
    following: Mapping[str, str] = {}


class Chart(NamedTuple):
    """A drawing as SVG, with a title and a text in its place."""

    title: str
    svg: bytes
    alternative: str

    @property
    def source(self) -> str:
        """Address with the data of the drawing."""
        return data_address("image/svg+xml", self.svg)


class PictureMap(NamedTuple):
    """Images at points of a plane, as dots and, without overlaps, as pictures.

    ``dots`` and ``pictures`` have the coordinates of their centres in a square of `MAP_SIDE`, pictures after id and address.
    """

    title: str
    dots: Sequence[tuple[float, float]]
    pictures: Sequence[tuple[str, str, float, float]]

    @classmethod
    def of(cls, title: str, image_ids: Sequence[str], points: np.ndarray, addresses: Mapping[str, str]) -> Self:
        """Place images by points ``[N, 2]``; a picture that would cover another is a dot."""
        low, high = points.min(0), points.max(0)
        inner = MAP_SIDE - PICTURE_SIDE
        places = ((points - low) / np.where(high > low, high - low, 1) * inner + PICTURE_SIDE / 2).round(1)
        dots, pictures, taken = [], [], np.empty((0, 2))
        for image_id, place in zip(image_ids, places, strict=True):
            if image_id in addresses and (np.abs(taken - place).max(1) >= PICTURE_SIDE).all():
                taken = np.vstack([taken, place])
                pictures.append((image_id, addresses[image_id], *place.tolist()))
            else:
                dots.append(tuple(place.tolist()))
        return cls(title, dots, pictures)


Block: TypeAlias = Table | Strip | Chart | PictureMap


@dataclass(frozen=True)
class Chapter:
    """Part of a page.

    Attributes:
        remarks: findings in words, e.g. what is missing.
    """

    title: str
    blocks: Sequence[Block] = ()
    remarks: Sequence[str] = ()

    @property
    def forms(self) -> list[tuple[str, Block]]:
        """The blocks that have content, each after the name of its macro."""
        return [(type(block).__name__.lower(), block) for block in self.blocks if not isinstance(block, Table) or block.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return remarks, and the images of strips, as plain values for JSON."""
        strips = [
            {
                **strip.heading._asdict(),
                "following": dict(strip.following),
                "images": [item.to_dict() for item in strip.exhibits],
            }
            for strip in self.blocks
            if isinstance(strip, Strip)
        ]
        return {"remarks": list(self.remarks), "strips": strips}


class Offer(NamedTuple):
    """Forms of a server: languages of search, filters of browsing, values given."""

    searches: bool
    languages: Sequence[str]
    filters: Mapping[str, Sequence[str]]
    values: Mapping[str, str] = {}


def data_address(media_type: str, data: bytes) -> Markup:
    """Return an address that holds its data; pages show it as it is."""
    return Markup(f"data:{media_type};base64,{b64encode(data).decode()}")


def write_page(folder: Folder, name: str, title: str, chapters: Sequence[Chapter]) -> None:
    """Write chapters as an HTML page."""
    folder.put(name, render_page(title, chapters).encode())


def render_page(title: str, chapters: Sequence[Chapter], offer: Offer | None = None) -> str:
    """Return an HTML page of chapters, with the forms of a server if there is one."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title,
        chapters=chapters,
        map_side=MAP_SIDE,
        picture_side=PICTURE_SIDE,
        style=_STYLE,
        policy=policy_of(offer),
        offer=offer,
    )


def policy_of(offer: Offer | None) -> str:
    """Return the Content-Security-Policy: own style, own pictures, a server's forms."""
    digest = b64encode(sha256(_STYLE.encode()).digest()).decode()
    form = "'none'" if offer is None else "'self'"
    return f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action {form}"


def _escaped(value: Any) -> Any:
    """Shorten texts, and escape control and directional characters in them."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return escape_text(value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…", lines=True)
