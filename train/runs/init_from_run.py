"""Initial weights from another run instead of random ones.

Parameters are matched by name, modules that read captions by their languages, and word vectors by token. Vocabularies and languages
of the two runs may therefore differ: words and languages that only the new run has keep their random initialization. All other
parameters must exist with the same shape.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import UsageError
from schemas.escapes import redact
from train.models.encoders import embedding_parameters
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import BEST, weights_digest
from train.runs.run import Run

_MAX_PROBLEMS = 3


@dataclass(frozen=True)
class WeightInit:
    """Weights that a model took from another run.

    Attributes:
        source: provenance of the other run, see `provenance`.
        taken: names of the parameters that were taken.
        drawn: names of the parameters that keep their random initialization.
        words: number of word vectors taken and of all words, by parameter.
        modules: languages of the modules that keep their random initialization, by module.
    """

    source: Mapping[str, Any]
    taken: tuple[str, ...]
    drawn: tuple[str, ...]
    words: Mapping[str, tuple[int, int]]
    modules: Mapping[str, tuple[str, ...]]

    @property
    def remark(self) -> str:
        """Summary in one sentence."""
        num_taken, num_words = (sum(counts[index] for counts in self.words.values()) for index in (0, 1))
        words = f", with the vectors of {num_taken:,} of {num_words:,} words" if self.words else ""
        modules = "; ".join(f"{module} ({', '.join(languages)})" for module, languages in self.modules.items())
        return (
            f"started from {self.source['run']!r} ({BEST}, step {self.source['step']:,}): {len(self.taken)} of "
            f"{len(self.taken) + len(self.drawn)} parameters taken{words}{f'; as drawn: {modules}' if modules else ''}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for the log and for checkpoints."""
        words = {name: list(counts) for name, counts in self.words.items()}
        return {**self.source, "taken": list(self.taken), "drawn": list(self.drawn), "words": words}


def provenance(run: Run) -> dict[str, Any]:
    """Return folder, step, weights digest and data fingerprints of a run."""
    return {
        "run": redact(run.folder.location),
        "step": run.step,
        "weights_sha256": weights_digest(run.model.state_dict()),
        "fingerprints": dict(run.fingerprints),
    }


def init_from_run(model: RetrievalModel, tokens: Sequence[str], run: Run) -> WeightInit:
    """Replace random weights of a model by those of another run.

    Raises:
        UsageError: the parameters do not match, or match ambiguously; the model is unchanged.
    """
    ours, theirs = model.state_dict(), run.model.state_dict()
    tables, other_tables = _word_tables(model, tokens), _word_tables(run.model, run.vocabulary.tokens)
    modules = _counterparts(model, run)
    sources = {name: _source(name, modules) for name in ours}
    unused = [name for name in run.model.modules_by_language() if name not in modules.values()]
    problems = []
    for name, source in sources.items():
        if source is not None and source not in theirs:
            problems.append(f"{name} is not there")
        elif source is not None and _shape(name, ours, tables) != _shape(source, theirs, other_tables):
            problems.append(f"{name} is {list(ours[name].shape)}, there {list(theirs[source].shape)}")
    wanted = {*sources.values()}
    problems += [
        f"{name} is only there"
        for name in theirs
        if name not in wanted and not any(_is_below(name, module) for module in unused)
    ]
    if problems:
        raise UsageError(
            f"--init-from {run.folder.location!r}: its model has other parameters ({'; '.join(problems[:_MAX_PROBLEMS])}"
            f"{f'; and {len(problems) - _MAX_PROBLEMS} more' if len(problems) > _MAX_PROBLEMS else ''}), so that its weights "
            "cannot be taken: give a run whose section [model] and features are alike, or leave --init-from out"
        )
    words = {}
    for name, source in sources.items():
        if source is not None and name in tables:
            rows = {token: row for row, token in enumerate(other_tables[source])}
            pairs = [(row, rows[token]) for row, token in enumerate(tables[name]) if token in rows]
            target_rows, source_rows = torch.tensor(pairs, dtype=torch.int64).T
            ours[name][target_rows.to(ours[name].device)] = theirs[source][source_rows].to(ours[name].device)
            words[name] = len(pairs), len(tables[name])
        elif source is not None:
            ours[name].copy_(theirs[source])
    model.load_state_dict(ours)  # Part of a state may be Python numbers in the model, e.g. seeds of dropout.
    languages = model.modules_by_language()
    return WeightInit(
        source=provenance(run),
        taken=tuple(name for name, source in sources.items() if source is not None),
        drawn=tuple(name for name, source in sources.items() if source is None),
        words=words,
        modules={module: tuple(languages[module]) for module, source in modules.items() if source is None},
    )


def _counterparts(model: RetrievalModel, run: Run) -> dict[str, str | None]:
    """Return the module of a run with a common language, by module, or None."""
    counterparts: dict[str, str | None] = {}
    for module, languages in model.modules_by_language().items():
        common = {name: set(other) & set(languages) for name, other in run.model.modules_by_language().items()}
        names = [name for name in common if common[name]]
        if len(names) > 1:
            separate = ", ".join(language for language in languages if any(language in common[name] for name in names))
            raise UsageError(
                f"--init-from {run.folder.location!r}: it reads {separate} with an encoder each, of which this model has one for "
                f"all ({module}), so that it is unclear which to take: give a run with one encoder, or one of fewer languages"
            )
        counterparts[module] = names[0] if names else None
    return counterparts


def _source(name: str, modules: Mapping[str, str | None]) -> str | None:
    """Return the counterpart of a parameter; None if it stays random."""
    for module, source in modules.items():
        if _is_below(name, module):
            return None if source is None else source + name.removeprefix(module)
    return name


def _is_below(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _shape(name: str, weights: Mapping[str, Tensor], tables: Mapping[str, Sequence[str]]) -> tuple[object, ...]:
    """Return dtype and shape of a parameter, without the number of words."""
    values = weights[name]
    return values.dtype, name in tables, *values.shape[1 if name in tables else 0 :]


def _word_tables(model: nn.Module, tokens: Sequence[str]) -> dict[str, list[str]]:
    """Return the token of each row of the tables of word vectors, by parameter."""
    return {name: [tokens[token_id] for token_id in ids] for name, ids in embedding_parameters(model, len(tokens)).items()}
