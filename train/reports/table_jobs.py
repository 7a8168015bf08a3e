"""What ``imagepivot tables`` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from schemas.dataset import open_dataset
from schemas.errors import UsageError
from schemas.storage.folder import Folder
from train.config.presets import preset_names
from train.config.sections import resolve
from train.data.corpus import Corpus
from train.devices import check_device_name, check_precision_name
from train.reports.published import ENSEMBLES, presets_of_paper, rows_of_paper
from train.reports.row_needs import FURTHER, features_for

__all__ = ["TablesJob", "what_is_left_out"]


@dataclass(frozen=True)
class TablesJob:
    """The rows of a paper's tables to train, as ``imagepivot tables`` runs them.

    Attributes:
        paper: one of `train.reports.published.PAPERS`.
        output: local folder for runs, results and the report; kept as an absolute path.
        corpus: folders of captions, features and vocabulary, of word vectors for the rows that begin with them, and of vectors of
            tokens for those that read these.
        seeds: number of runs per row, with seeds 0, 1, ...
        rows: patterns of presets, such as ``bilingual*``; all rows of retrieval if empty.
        overrides: values in the configurations, as `train.config.resolve` takes them.
        workers: number of runs at a time, which take the GPUs in turn; 0 means one per GPU, or one per core if there is no GPU.
        device: a name that `train.devices.resolve_device` knows; ``auto`` and ``cuda`` use all GPUs.
        precision: a name that `train.devices.check_precision` knows.
        memory_map: folder for a copy of the features that is mapped into memory, and that all runs share.
        allow_missing_features: leave out the captions of images that lack features instead of raising an error.
        other_features: folders of more features, for the rows that those of the corpus do not fit.

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
    other_features: tuple[str, ...] = ()

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

    @property
    def settings(self) -> list[str]:
        """The overrides as ``KEY=VALUE``, sorted."""
        return [f"{key}={value}" for key, value in sorted(self.overrides.items())]

    def presets(self) -> list[str]:
        """Return what `corpora` has corpora of."""
        return list(self.corpora())

    def corpora(self) -> dict[str, Corpus]:
        """Return the presets of the selected rows in the order of the tables, ensembles last, each with what it is trained on.

        Rows that need what is not given are left out: features of another sort, or word vectors. What a row does not take, such as
        word vectors where it draws them, is not in its corpus.

        Raises:
            UsageError: a pattern matches no row, no row is left, or no row takes some features or the word vectors.
            DatasetError: there are no such features.
        """
        kept, left_out = self._divided()
        if not kept:
            raise UsageError(f"there is nothing to train: {'; '.join(what_is_left_out(left_out))}")
        for name, further in FURTHER.items():
            given = getattr(self.corpus, name)
            if given and not any(getattr(corpus, name) for corpus in kept.values()):
                raise UsageError(
                    f"--{name.replace('_', '-')} {given!r} is given, but no row that is chosen {further.taking}: leave it out, or "
                    "choose others with --rows"
                )
        unused = [location for location in self._features if all(corpus.features != location for corpus in kept.values())]
        if unused:
            raise UsageError(
                f"--features {unused[0]!r} is given, but no row that is chosen takes these features: leave it out, or choose "
                "others with --rows"
            )
        return kept

    def left_out(self) -> dict[str, str]:
        """Return the presets that are left out, each with what it lacks and the option that brings it."""
        return self._divided()[1]

    @property
    def _features(self) -> tuple[str, ...]:
        return self.corpus.features, *self.other_features

    def _divided(self) -> tuple[dict[str, Corpus], dict[str, str]]:
        """Return the presets to train with what they are trained on, and those left out with what they lack."""
        given = {location: open_dataset(location) for location in self._features}
        kept: dict[str, Corpus] = {}
        left_out: dict[str, str] = {}
        for name in self._chosen():
            if name in ENSEMBLES:  # Its members stand before it.
                lacking = next((left_out[member] for member in ENSEMBLES[name] if member in left_out), "")
                corpus = kept.get(ENSEMBLES[name][0], self.corpus)
            elif name in preset_names():
                config = resolve(name, self.overrides)
                features, lacking = features_for(name, config, given)
                taken = {field: further for field, further in FURTHER.items() if getattr(config.model, further.asked)}
                folders = {field: getattr(self.corpus, field) if field in taken else "" for field in FURTHER}
                lacking = lacking or next((taken[field].lacking for field in taken if not folders[field]), "")
                corpus = replace(self.corpus, features=features, **folders)
            else:
                lacking, corpus = "a preset", self.corpus
            if lacking:
                left_out[name] = lacking
            else:
                kept[name] = corpus
        return kept, left_out

    def _chosen(self) -> list[str]:
        """Return the presets of the rows that are chosen, and of the members of ensembles among them."""
        names = presets_of_paper(self.paper)
        chosen = set() if self.rows else {row.preset for row in rows_of_paper(self.paper)}
        for pattern in self.rows:
            matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{self.paper}/{pattern}")}
            if not matches:
                raise UsageError(f"--rows {pattern!r} matches no row of {self.paper}: its rows are {', '.join(names)}")
            chosen |= matches
        chosen |= {member for name in chosen for member in ENSEMBLES.get(name, ())}
        return [name for name in names if name in chosen]


def what_is_left_out(left_out: Mapping[str, str]) -> list[str]:
    """Return a sentence for each thing that presets lack.

    Args:
        left_out: what `TablesJob.left_out` returns.
    """
    by_cause: dict[str, list[str]] = {}
    for preset, lacking in left_out.items():
        by_cause.setdefault(lacking, []).append(preset)
    return [f"left out for want of {lacking}: {', '.join(presets)}" for lacking, presets in by_cause.items()]
