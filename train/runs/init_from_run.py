"""Initial weights from another run instead of random ones."""

from collections.abc import Sequence
from typing import Any

from schemas.errors import UsageError
from schemas.escapes import redact
from train.models.encoders import embedding_parameters
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import BEST, weights_digest
from train.runs.restoring import MAX_PROBLEMS, weight_problems
from train.runs.run import Run


def provenance(run: Run) -> dict[str, Any]:
    """Return folder, step, weights digest and data fingerprints of a run."""
    return {
        "run": redact(run.folder.location),
        "step": run.step,
        "weights_sha256": weights_digest(run.model.state_dict()),
        "fingerprints": dict(run.fingerprints),
    }


def init_from_run(model: RetrievalModel, tokens: Sequence[str], run: Run) -> str:
    """Replace random weights of a model by those of another run.

    Returns:
        A sentence about the run.

    Raises:
        UsageError: the run has other words, languages or parameters; the model is unchanged.
    """
    weights, problems = run.model.state_dict(), []
    if _words(model, tokens) != _words(run.model, run.vocabulary.tokens):
        problems.append("its word embeddings are of other words")
    if not run.config.model.mixes_languages and run.model.languages != model.languages:
        problems.append(f"it has encoders of {', '.join(run.model.languages)}, not of {', '.join(model.languages)}")
    problems += weight_problems(model, weights)
    if problems:
        raise UsageError(
            f"--init-from {run.folder.location!r}: its model is another one ({'; '.join(problems[:MAX_PROBLEMS])}), so that its "
            "weights cannot be taken: encode the captions with the vocabulary of that run, train with its languages, section "
            "[model] and features, both runs with data.min_count=0; or leave --init-from out"
        )
    model.load_state_dict(weights)
    return f"started from {redact(run.folder.location)!r} ({BEST}, step {run.step:,})"


def _words(model: RetrievalModel, tokens: Sequence[str]) -> dict[str, list[str]]:
    """Return the token of each row of the word embeddings, by parameter."""
    return {name: [tokens[token_id] for token_id in ids] for name, ids in embedding_parameters(model, len(tokens)).items()}
