"""What ``imagepivot tables`` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from schemas.errors import UsageError
from schemas.storage import Folder
from train.config.sections import Config, resolve
from train.data.corpus import Corpus
from train.devices import check_device_name, check_precision_name
from train.reports.published import rows_of_paper

__all__ = ["TablesJob"]


@dataclass(frozen=True)
class TablesJob:
    """The rows of a paper's tables to train, as ``imagepivot tables`` runs them.

    Attributes:
        paper: one of `train.reports.published.PAPERS`.
        output: local folder for runs, results and the report; kept as an absolute path.
        corpus: folders of captions, features and vocabulary, of word vectors for the rows that begin with them, and of vectors of
            tokens for those that read these.
        seeds: number of runs per row, with seeds 0, 1, ...
        rows: patterns of presets, such as ``bilingual*``; all rows if empty.
        overrides: values in the configurations, as `train.config.resolve` takes them.
        workers: number of runs at a time; 0 means one per GPU, or one per core if there is no GPU.
        device: a name that `train.devices.resolve_device` knows; ``auto`` and ``cuda`` use all GPUs.
        precision: a name that `train.devices.check_precision` knows.
        memory_map: folder for a copy of the features that is mapped into memory, and that all runs share.
        allow_missing_features: leave out the captions of images that lack features instead of raising an error.

    Raises:
        UsageError: a value is impossible.
    """

    paper: str
    output: str
    corpus: Corpus
    seeds: int = 10
    rows: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0
    device: str = "auto"
    precision: str = "fp32"
    memory_map: str | None = None
    allow_missing_features: bool = False

    def __post_init__(self) -> None:
        rows_of_paper(self.paper)
        if self.seeds < 1:
            raise UsageError(f"--seeds is {self.seeds}, expected 1 or more")
        if self.workers < 0:
            raise UsageError(f"--workers is {self.workers}, expected 0 or more")
        check_device_name(self.device)
        check_precision_name(self.precision)
        if not Folder(self.output).is_local:
            raise UsageError(f"{self.output!r} is not a local folder: train into one, and copy it when it is done")
        # "~" is resolved once, for everything that is written there.
        object.__setattr__(self, "output", str(Folder(self.output).local_path))

    def presets(self) -> list[str]:
        """Return the presets of the selected rows, each once, in the order of the tables.

        Without word vectors, rows that begin with them are left out, and without vectors of tokens those that read these.

        Raises:
            UsageError: a pattern matches no row, no row is left, or none takes the vectors that are given.
        """
        return self._divided()[0]

    def left_out(self) -> list[str]:
        """Return the presets that `presets` leaves out."""
        return self._divided()[1]

    def corpus_of(self, config: Config) -> Corpus:
        """Return the folders of what a row is trained on: without word vectors, or vectors of tokens, if it does not take them."""
        return replace(
            self.corpus,
            word_vectors=self.corpus.word_vectors if config.model.pretrained_width else "",
            token_features=self.corpus.token_features if config.model.token_width else "",
        )

    def lacking(self, preset: str) -> str:
        """Return what a preset needs and is not given, with the option that takes it; empty if there is nothing."""
        model = resolve(preset, self.overrides).model
        if model.pretrained_width and not self.corpus.word_vectors:
            return "pretrained word vectors: give --word-vectors FOLDER, a dataset that imagepivot word-vectors makes"
        if model.token_width and not self.corpus.token_features:
            return "vectors of tokens: give --token-features FOLDER, a dataset that imagepivot token-features makes"
        return ""

    def _divided(self) -> tuple[list[str], list[str]]:
        """Return the presets of the rows to train, and those left out because something that they need is not given."""
        names = list(dict.fromkeys(row.preset for row in rows_of_paper(self.paper)))
        chosen: list[str] = []
        for pattern in self.rows or ("*",):
            matches = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{self.paper}/{pattern}")]
            if not matches:
                raise UsageError(f"--rows {pattern!r} matches no row of {self.paper}: its rows are {', '.join(names)}")
            chosen += matches
        chosen = [name for name in names if name in chosen]
        models = [resolve(name, self.overrides).model for name in chosen]
        for option, given, taken, what in (
            (
                "--word-vectors",
                self.corpus.word_vectors,
                any(model.pretrained_width for model in models),
                "begins with word vectors",
            ),
            (
                "--token-features",
                self.corpus.token_features,
                any(model.token_width for model in models),
                "reads vectors of tokens",
            ),
        ):
            if given and not taken:
                raise UsageError(
                    f"{option} {given!r} is given, but no row that is chosen {what}: leave it out, or choose others with --rows"
                )
        left_out = [name for name in chosen if self.lacking(name)]
        kept = [name for name in chosen if name not in left_out]
        if not kept:
            raise UsageError(f"{', '.join(left_out)} needs {self.lacking(left_out[0])}")
        return kept, left_out
