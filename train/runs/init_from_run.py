"""Starting a training from the weights of another run instead of drawn ones.

Parameters are taken by name. Modules that read captions of some languages are looked for by these languages, and vectors of words
by token, so that vocabularies and languages of the two runs may differ: words and languages that only the new one has stay as
drawn. Everything else must be there, with the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import UsageError
from train.models.encoders import embedding_parameters
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import BEST, weights_digest
from train.runs.run import Run

_LISTED = 3


@dataclass(frozen=True)
class Start:
    """What a model took from another run.

    Attributes:
        words: by parameter, the number of words whose vectors were taken, and of all words.
        modules: the modules that stay as drawn, each with its languages.
    """

    source: Mapping[str, Any]
    taken: tuple[str, ...]
    drawn: tuple[str, ...]
    words: Mapping[str, tuple[int, int]]
    modules: Mapping[str, tuple[str, ...]]

    @property
    def remark(self) -> str:
        """What was taken, in one sentence."""
        found, every = (sum(counts[n] for counts in self.words.values()) for n in (0, 1))
        words = f", with the vectors of {found:,} of {every:,} words" if self.words else ""
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
    """Return what tells a run from others: folder, step, digest of its weights, fingerprints of its data."""
    return {
        "run": run.folder.location,
        "step": run.step,
        "weights_sha256": weights_digest(run.model.state_dict()),
        "fingerprints": dict(run.fingerprints),
    }


def start_model(model: RetrievalModel, tokens: Sequence[str], run: Run) -> Start:
    """Replace the drawn weights of a model by those of another run, as far as it has them.

    Raises:
        UsageError: the models differ in their parameters, or it is not clear which ones to take; the model is as it was.
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
        f"{name} is only there" for name in theirs if name not in wanted and not any(_within(name, module) for module in unused)
    ]
    if problems:
        raise UsageError(
            f"--init-from {run.folder.location!r}: its model has other parameters ({'; '.join(problems[:_LISTED])}"
            f"{f'; and {len(problems) - _LISTED} more' if len(problems) > _LISTED else ''}), so that its weights cannot be taken: "
            "give a run whose section [model] and features are alike, or leave --init-from out"
        )
    words = {}
    for name, source in sources.items():
        if source is not None and name in tables:
            rows = {token: row for row, token in enumerate(other_tables[source])}
            known = [(row, rows[token]) for row, token in enumerate(tables[name]) if token in rows]
            into, out = (torch.tensor(numbers, dtype=torch.int64) for numbers in zip(*known, strict=True))
            ours[name][into.to(ours[name].device)] = theirs[source][out].to(ours[name].device)
            words[name] = len(known), len(tables[name])
        elif source is not None:
            ours[name].copy_(theirs[source])
    model.load_state_dict(ours)  # Part of a state may be numbers in the model, such as the seeds of dropout.
    spoken = model.modules_by_language()
    return Start(
        source=provenance(run),
        taken=tuple(name for name, source in sources.items() if source is not None),
        drawn=tuple(name for name, source in sources.items() if source is None),
        words=words,
        modules={module: tuple(spoken[module]) for module, source in modules.items() if source is None},
    )


def _counterparts(model: RetrievalModel, run: Run) -> dict[str, str | None]:
    """Return, for each module that reads some languages, the one that reads any of these in a run; None if there is none."""
    found: dict[str, str | None] = {}
    for module, languages in model.modules_by_language().items():
        spoken = {name: set(other) & set(languages) for name, other in run.model.modules_by_language().items()}
        names = [name for name, common in spoken.items() if common]
        if len(names) > 1:
            common = ", ".join(language for language in languages if any(language in spoken[name] for name in names))
            raise UsageError(
                f"--init-from {run.folder.location!r}: it reads {common} with an encoder each, of which this model has one for all "
                f"({module}), so that there is no saying which to take: give a run with one encoder, or one of fewer languages"
            )
        found[module] = names[0] if names else None
    return found


def _source(name: str, modules: Mapping[str, str | None]) -> str | None:
    """Return the name under which a parameter is looked for; None where it stays as drawn."""
    for module, source in modules.items():
        if _within(name, module):
            return None if source is None else source + name.removeprefix(module)
    return name


def _within(name: str, module: str) -> bool:
    return name.startswith(f"{module}.")


def _shape(name: str, weights: Mapping[str, Tensor], tables: Mapping[str, Sequence[str]]) -> tuple[object, ...]:
    """Return what must be the same: type and shape, of tables of words without their number."""
    values = weights[name]
    return values.dtype, name in tables, *values.shape[1 if name in tables else 0 :]


def _word_tables(model: nn.Module, tokens: Sequence[str]) -> dict[str, list[str]]:
    """Return, by parameter, the token of each row of the tables of word vectors."""
    return {name: [tokens[number] for number in ids] for name, ids in embedding_parameters(model, len(tokens)).items()}
