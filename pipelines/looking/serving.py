"""Live reports over HTTP: search and browsing by GET alone, without scripts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from secrets import compare_digest
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response
from starlette.routing import Route

from pipelines.looking.captions import read_labels
from pipelines.looking.exhibits import FoundImage, ImageAnswer, Photos, answer_strips, caption_lines
from pipelines.looking.pages import Chapter, Exhibit, Offer, Strip, TextLine, policy_of, render_page
from schemas.errors import ImagepivotError, UsageError
from schemas.escapes import counted, to_json

if TYPE_CHECKING:
    from starlette.requests import Request

    from schemas.dataset import Dataset
    from schemas.duplicates import Duplicate

LOOPBACK = ("127.0.0.1", "localhost")
_SHOWN = 24
_MAX_QUERY = 1000  # Characters.


@dataclass(frozen=True)
class LiveReport:
    """Chapters of a report, and the data that its readers search and browse.

    Attributes:
        find: finds images for a sentence, a language and a number of images; None without a model.
        find_like: finds the images that are most similar to one.
        languages: languages of sentences; empty for any.
    """

    title: str
    chapters: Sequence[Chapter]
    datasets: Sequence[Dataset]
    duplicates: Sequence[Duplicate]
    photos: Photos
    find: Callable[[str, str, int], ImageAnswer] | None = None
    find_like: Callable[[str, int], Sequence[FoundImage]] | None = None
    languages: Sequence[str] = ()

    @cached_property
    def images(self) -> Mapping[str, Mapping[str, set[str]]]:
        """Image ids by filter and value, e.g. split and test; all by empty texts."""
        images: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name, value, image_id in self._labelled_images():
            images[name][value].add(image_id)
            images[""][""].add(image_id)
        return images

    def _labelled_images(self) -> Iterator[tuple[str, str, str]]:
        yield from (("", "", image_id) for image_id in self.photos.refs)
        yield from (("group", str(member.group), member.image_id) for member in self.duplicates)
        for dataset in self.datasets:
            yield from (("failure", row["reason"], row["key"]) for row in dataset.failures().to_pylist())
            if dataset.kind in ("features", "regions"):
                yield from (("", "", image_id) for image_id in dataset.image_ids())
            for name in ("split", "language") if dataset.kind == "captions" else ():
                labels = read_labels(dataset).group_by([name, "image_id"]).aggregate([])
                yield from ((name, row[name], row["image_id"]) for row in labels.to_pylist())

    @property
    def offer(self) -> Offer:
        """Choices of the forms."""
        filters = {name: sorted(values) for name, values in self.images.items() if name}
        return Offer(self.find is not None, self.languages, filters)

    def search(self, values: Mapping[str, str]) -> Chapter:
        """Return images for a sentence, or like an image."""
        if self.find is None or self.find_like is None:
            raise UsageError("this report has no model: serve it with a run and its features")
        query, like, language = values.get("query", "")[:_MAX_QUERY], values.get("like", ""), values.get("language", "")
        if like:
            answer: ImageAnswer = (f"images like {like}", "", self.find_like(like, _SHOWN), None)
        elif self.languages and language not in self.languages:
            raise UsageError(f"the model knows no language {language!r}: choose {' or '.join(self.languages)}")
        else:
            answer = self.find(query, language, _SHOWN)
        ids = [image_id for image_id, _ in answer[2]]
        return Chapter("found", answer_strips([answer], self.photos.addresses(ids), self._lines(ids)))

    def browse(self, values: Mapping[str, str]) -> Chapter:
        """Return images by a part of their ids and by filters."""
        chosen = set(self.images[""][""])
        for name in self.offer.filters:
            if values.get(name):
                chosen &= self.images[name].get(values[name], set())
        ids = sorted(image_id for image_id in chosen if values.get("image_id", "") in image_id)
        number = values.get("start", "")[:9]
        start = int(number) if number.isdecimal() else 0
        shown = ids[start : start + _SHOWN]
        lines, pictures = self._lines(shown), self.photos.addresses(shown)
        exhibits = [Exhibit(image_id, pictures.get(image_id, ""), lines=lines.get(image_id, ())[:_SHOWN]) for image_id in shown]
        following = {**values, "start": str(start + _SHOWN)} if start + _SHOWN < len(ids) else {}
        return Chapter("images", [Strip(TextLine(counted(len(ids), "image")), exhibits, following=following)])

    def _lines(self, image_ids: Sequence[str]) -> Mapping[str, Sequence[TextLine]]:
        captions = [dataset for dataset in self.datasets if dataset.kind == "captions"]
        return caption_lines(captions[0], image_ids) if captions else {}


def build_app(report: LiveReport, *, token: str = "", hosts: Sequence[str] = LOOPBACK) -> Starlette:
    """Build the application of a report.

    Its paths are ``/``, and ``/search`` and ``/browse``, which also end in ``.json``. Requests for another
    host than ``hosts``, or without the token, are refused.
    """

    def respond(request: Request) -> Response:
        values, name = dict(request.query_params), request.path_params.get("name", "")
        given = values.pop("token", "") or request.cookies.get("token", "")
        if token and not compare_digest(given.encode(), token.encode()):
            return Response("the token is missing or wrong: open the address that imagepivot report printed", 403)
        status, chapters = 200, report.chapters
        if name:
            act = {"search": report.search, "browse": report.browse}.get(name.removesuffix(".json"))
            if act is None:
                return Response("there is no such page", 404)
            try:
                chapters = [act(values)]
            except ImagepivotError as error:
                # Options are those of the command line, which readers do not have.
                remark = "the model cannot read sentences here" if "--" in str(error) else str(error)
                status, chapters = 400, [Chapter("error", remarks=[remark])]
        if name.endswith(".json"):
            content, media = to_json([chapter.to_dict() for chapter in chapters]), "application/json"
        else:
            content, media = (
                render_page(report.title, chapters, report.offer._replace(values=defaultdict(str, values))),
                "text/html",
            )
        response = Response(content, status, {"Content-Security-Policy": policy_of(report.offer)}, media)
        response.headers.update({"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"})
        if token:
            response.set_cookie("token", token, httponly=True, samesite="strict")
        return response

    routes = [Route("/", respond), Route("/{name}", respond)]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))])
