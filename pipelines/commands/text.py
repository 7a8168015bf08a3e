"""The commands ``captions``, ``vocabulary``, ``encode``, ``word-vectors`` and ``token-features``."""

from __future__ import annotations

from pipelines.commands.binding import command
from pipelines.commands.results import LogJson, MaxFailures, finish, notes, remark, remark_on_precision
from pipelines.jobs import CaptionsJob, EncodeJob, TokenFeaturesJob, VocabularyJob, WordVectorsJob
from pipelines.running.execution import Execution


@command("captions multi30k captions --format multi30k --languages en,de")
def captions(
    job: CaptionsJob,
    max_failures: MaxFailures = 0,
    log_json: LogJson = False,
    execution: Execution = Execution(),
) -> None:
    """Tokenize raw captions into shards.

    SOURCE depends on --format: [b]multi30k[/b] takes the folder with task1 and task2; [b]karpathy[/b] a dataset_flickr30k.json
    or the like; [b]coco[/b] a captions_SPLIT.json or a folder of them; [b]scan[/b] a folder with SPLIT_caps.txt and SPLIT_ids.txt,
    such as f30k_precomp; [b]table[/b] a CSV, TSV, JSON lines or Parquet file with the columns image_id and text, and optionally
    language, portion, index and split.

    An empty caption becomes a failure row. Flags behind -- go to Beam: -- --runner=DataflowRunner --project=...
    """
    from pipelines.running.meter import show_progress
    from pipelines.text.captions import prepare_captions
    from schemas.dataset import open_dataset
    from schemas.overlaps import find_overlap

    with show_progress(notes, "captions", unit="captions", log_json=log_json) as meter:
        manifest = prepare_captions(job, execution, meter)
        meter.settle(captions=manifest.rows + manifest.failed, failed=manifest.failed)
    if len(manifest.statistics.get("images", ())) > 1 and (overlap := find_overlap(open_dataset(job.output))) is not None:
        remark(overlap.remark)
    finish(manifest, job.output, max_failures)


@command("vocabulary captions vocabulary --min-count 4")
def vocabulary(
    job: VocabularyJob,
    log_json: LogJson = False,
    execution: Execution = Execution(workers=1),
) -> None:
    """Build the joint vocabulary of captions: tokens under the threshold become <unk>.

    Writes a Parquet shard (id, token, count, counts by language) and _vocabulary.txt, and prints how the languages' own
    vocabularies overlap.
    """
    from pipelines.running.meter import show_progress
    from pipelines.text.vocabulary import build_vocabulary
    from schemas.dataset import open_dataset

    total = open_dataset(job.captions, kind="captions").manifest.rows
    with show_progress(notes, "vocabulary", unit="captions", total=total, log_json=log_json) as meter:
        manifest = build_vocabulary(job, execution, meter)
        meter.settle(captions=total)
    finish(manifest, job.output)


@command("encode captions vocabulary encoded --max-length 100")
def encode(
    job: EncodeJob,
    log_json: LogJson = False,
    execution: Execution = Execution(),
) -> None:
    """Turn the tokens of captions into ids of a vocabulary."""
    from pipelines.running.meter import show_progress
    from pipelines.text.encoding import encode_captions
    from schemas.dataset import open_dataset

    total = open_dataset(job.captions, kind="captions").manifest.rows
    with show_progress(notes, "encode", unit="captions", total=total, log_json=log_json) as meter:
        manifest = encode_captions(job, execution, meter)
        meter.settle(captions=manifest.rows)
    finish(manifest, job.output)


@command("word-vectors vocabulary wiki.en.align.vec wiki.de.align.vec word-vectors --languages en,de")
def word_vectors(
    job: WordVectorsJob,
    log_json: LogJson = False,
) -> None:
    """Take the pretrained vectors of a vocabulary's words, with which a training can begin.

    Each language has a FILE: vectors of all languages are compared with each other, so that those of fastText should be the
    aligned ones. Tokens are looked up without Moses escapes (&apos;s as 's), then in lower case. A model (.bin) also makes
    vectors of other words from their sub-words; it needs the extra fasttext.

    Prints how many of the words have a vector, by language.
    """
    from pipelines.running.meter import show_progress
    from pipelines.text.word_vectors import import_word_vectors

    with show_progress(notes, "word-vectors", unit="words", log_json=log_json) as meter:
        manifest = import_word_vectors(job, meter)
        meter.settle(words=sum(counts["file_words"] for counts in manifest.statistics.values()))
    finish(manifest, job.output)


@command("token-features captions bert --model bert-base-multilingual-cased --dtype float16")
def token_features(
    job: TokenFeaturesJob,
    max_failures: MaxFailures = 0,
    log_json: LogJson = False,
    execution: Execution = Execution(),
) -> None:
    """Make vectors of the tokens of captions, in their context: the last layer of BERT, or of a model like it.

    A token gets the mean of the vectors of its sub-words. <start> and <end> get those of [CLS] and [SEP], so that a caption has as
    many vectors as encode makes ids. Nothing is downloaded. Needs the extra bert.
    """
    from pipelines.running.meter import show_progress
    from pipelines.text.token_features import extract_token_features
    from schemas.dataset import open_dataset

    total = open_dataset(job.captions, kind="captions").manifest.rows
    if execution.is_local:
        remark_on_precision(job.precision, job.device)
    with show_progress(notes, "token-features", unit="captions", total=total, log_json=log_json) as meter:
        manifest = extract_token_features(job, execution, meter)
        meter.settle(captions=manifest.rows + manifest.failed, failed=manifest.failed)
    finish(manifest, job.output, max_failures)
