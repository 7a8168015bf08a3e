"""Commands that prepare data: captions, vocabularies, vectors, features."""

from dataclasses import replace
from typing import Annotated

import typer

from pipelines.commands.binding import command
from pipelines.commands.imports import Imports, import_modules
from pipelines.commands.results import AsJson, MaxFailures, console, finish_dataset, notes, print_remark
from pipelines.jobs import CaptionsJob, EncodeJob, FeaturesJob, TextFeaturesJob, VocabularyJob, WordVectorsJob
from pipelines.running.execution import Accelerator, Execution
from pipelines.running.meter import dataset_counts, show_progress
from schemas.console.progress import Monitoring
from schemas.console.tables import Table, render_tables
from schemas.escapes import to_json
from schemas.options import Opt
from schemas.parameters import untrained_remark
from schemas.writing.reuse_policy import FailureLimit


@command("captions multi30k captions --format multi30k --languages en,de")
def captions(
    job: CaptionsJob,
    max_failures: MaxFailures = FailureLimit(),
    monitoring: Monitoring = Monitoring(),
    execution: Execution = Execution(),
) -> None:
    """Tokenize raw captions into shards.

    SOURCE depends on --format: [b]multi30k[/b]: the folder with task1 and task2; [b]karpathy[/b]: a file such
    as dataset_flickr30k.json; [b]coco[/b]: a captions_SPLIT.json or a folder of them; [b]scan[/b]: a folder
    with SPLIT_caps.txt and SPLIT_ids.txt, such as f30k_precomp; [b]table[/b]: a CSV, TSV, JSON lines or
    Parquet file with the columns image_id and text, and optionally language, portion, index and split.

    Empty captions become failure rows. Flags after -- go to Beam: -- --runner=DataflowRunner --project=...
    """
    from pipelines.inputs.ids import extension_remark
    from pipelines.text.captions import prepare_captions
    from schemas.dataset import open_dataset
    from schemas.overlaps import leakage_remark

    execution = replace(execution, max_failures=max_failures)
    with show_progress(notes, "captions", unit="captions", monitoring=monitoring) as meter:
        manifest = prepare_captions(job, execution, meter)
        meter.finalize(captions=manifest.rows + manifest.failed, **dataset_counts(manifest))
    dataset = open_dataset(job.output)
    if len(manifest.statistics.get("images", ())) > 1 and (remark := leakage_remark(dataset)):
        print_remark(remark)
    first = next((table for table in dataset.shards(["image_id"]) if table.num_rows), None)
    if first is not None and (remark := extension_remark(first["image_id"].to_pylist())):
        print_remark(remark)
    finish_dataset(manifest, job.output, max_failures)


@command("vocabulary captions vocabulary --min-count 4")
def vocabulary(job: VocabularyJob, monitoring: Monitoring = Monitoring(), execution: Execution = Execution()) -> None:
    """Build the joint vocabulary of captions, in which rare tokens are <unk>.

    Writes a Parquet shard (id, token, count, counts by language) and _vocabulary.txt, and prints the overlap of languages.
    """
    from pipelines.text.vocabulary import build_vocabulary, unknown_remark
    from schemas.dataset import open_dataset

    total = open_dataset(job.captions, kind="captions").manifest.rows
    with show_progress(notes, "vocabulary", unit="captions", total=total, monitoring=monitoring) as meter:
        manifest = build_vocabulary(job, execution, meter)
        meter.finalize(captions=total)
    if remark := unknown_remark(job, manifest.statistics["unknown"]):
        print_remark(remark)
    finish_dataset(manifest, job.output)


@command("encode captions vocabulary encoded --max-length 100")
def encode(job: EncodeJob, monitoring: Monitoring = Monitoring(), execution: Execution = Execution()) -> None:
    """Encode the tokens of captions as ids of a vocabulary."""
    from pipelines.text.encoding import encode_captions
    from schemas.dataset import open_dataset

    total = open_dataset(job.captions, kind="captions").manifest.rows
    with show_progress(notes, "encode", unit="captions", total=total, monitoring=monitoring) as meter:
        manifest = encode_captions(job, execution, meter)
        meter.finalize(captions=manifest.rows, **dataset_counts(manifest))
    finish_dataset(manifest, job.output)


@command("word-vectors vocabulary wiki.en.align.vec wiki.de.align.vec word-vectors --languages en,de")
def word_vectors(job: WordVectorsJob, monitoring: Monitoring = Monitoring()) -> None:
    """Import pretrained vectors of a vocabulary's words, to initialize a training.

    Each language has a FILE. The vectors of all languages share a space: use the aligned ones of fastText.
    Tokens are looked up without Moses escapes (&apos;s as 's), then in lower case. A fastText model (.bin,
    needs the extra fasttext) also computes vectors of unknown words from sub-words.

    Prints the share of words with a vector, by language.
    """
    from pipelines.text.word_vectors import import_word_vectors

    with show_progress(notes, "word-vectors", unit="words", monitoring=monitoring) as meter:
        manifest = import_word_vectors(job, meter)
        meter.finalize(words=sum(counts["file_words"] for counts in manifest.statistics.values()))
    finish_dataset(manifest, job.output)


@command("text-features captions bert --model bert-base-multilingual-cased --dtype float16")
def text_features(
    job: TextFeaturesJob,
    max_failures: MaxFailures = FailureLimit(),
    dry_run: Annotated[bool, Opt("List shards, captions and the longest caption; do not write.")] = False,
    monitoring: Monitoring = Monitoring(),
    execution: Execution = Execution(),
) -> None:
    """Extract vectors of captions by a pretrained model, or of their tokens.

    The text encoders of joint models ([b]open_clip:[/b]) and models of sentence-transformers ([b]sentence:[/b]) read the raw text,
    with their own tokenizer, and write a vector per caption (kind embeddings).

    Other models are transformers such as BERT, whose last layer is written for each token (kind
    token-features). A token gets the mean vector of its sub-words; <start> and <end> get those of [CLS] and
    [SEP]. A caption has as many vectors as ids in the output of encode.

    Nothing is downloaded but the weights of open_clip by name. Needs the extra bert, for open_clip the extra clip.
    """
    from pipelines.text.text_features import extract_text_features, plan_text_features
    from schemas.dataset import open_dataset

    execution = replace(execution, max_failures=max_failures)
    if dry_run:
        plan_text_features(job, execution).render(console)
        return
    total = open_dataset(job.captions, kind="captions").manifest.rows
    if job.weights.startswith("random:"):
        print_remark(untrained_remark([f"{job.model} ({job.weights})"]))
    if execution.is_local:
        _remark_on_precision(job.precision, job.device)
    with show_progress(notes, "text-features", unit="captions", total=total, monitoring=monitoring) as meter:
        manifest = extract_text_features(job, execution, meter)
        meter.finalize(captions=manifest.rows + manifest.failed, **dataset_counts(manifest))
    finish_dataset(manifest, job.output, max_failures)


@command("features photos features --extractor resnet50-pool")
def features(
    job: FeaturesJob,
    max_failures: MaxFailures = FailureLimit(),
    dry_run: Annotated[bool, Opt("List shards, images and bytes; do not write.")] = False,
    imports: Imports = (),
    monitoring: Monitoring = Monitoring(),
    execution: Execution = Execution(),
    accelerator: Accelerator | None = None,
) -> None:
    """Extract features of images into shards.

    IMAGES is a folder of images or archives; a [b]pattern[/b] such as [i]'photos/**/*.jpg'[/i]; a
    [b]table[/b] (CSV, TSV, JSON lines or Parquet) with columns image_id and uri; a [b].tar[/b]; a
    [b].parquet[/b] file with image bytes; or one image; local, gs:// or s3://.

    The extractors are resnet50-pool, vgg19-10crop, vgg19-10crop-caffe, vgg19-grid, resnet152-grid,
    faster-rcnn-36, timm:NAME, open_clip:NAME and detectron2:CONFIG+WEIGHTS. Unreadable images become failure
    rows. The same command resumes a stopped run. Flags after -- go to Beam: -- --runner=DataflowRunner
    --project=...
    """
    import_modules(imports)
    from pipelines.features.extraction import FeaturesPlan
    from pipelines.inputs.ids import read_skipped

    execution = replace(execution, accelerator=accelerator, max_failures=max_failures)
    plan = FeaturesPlan.open(replace(job, skip=read_skipped(job.skip)), execution)
    if (skipped := plan.job.open_images().skipped) is not None and skipped.warning:
        print_remark(skipped.warning)
    if dry_run:
        from pipelines.features.dry_run import plan_dry_run, plan_table

        plan.remark_on_shards()
        plan_table(plan_dry_run(plan.job, plan.listing, print_remark)).render(console)
        return
    request = job.extractor
    seeds = [name for name in (request.weights, request.name.rpartition("+")[2]) if name.startswith("random:")]
    if seeds:
        print_remark(untrained_remark([f"{request.name} ({seeds[0]})"]))
    if execution.is_local:
        _remark_on_precision(request.precision, job.device)
    with show_progress(notes, request.name, unit="images", total=plan.images, monitoring=monitoring) as meter:
        manifest = plan.run(meter, print_remark)
        if job.task is None:
            meter.finalize(images=manifest.rows + manifest.failed, **dataset_counts(manifest))
        changes = meter.total() if job.policy.update else None
    finish_dataset(manifest, job.output, max_failures, changes)


@command("extractors timm:resnet18")
def extractors(
    name: Annotated[str, Opt("Show only this extractor, also [i]timm:NAME[/i]. Default: all.", is_argument=True)] = "",
    imports: Imports = (),
    as_json: AsJson = False,
) -> None:
    """List extractors with shapes, weights and preprocessing."""
    import_modules(imports)
    from extractors import list_extractors
    from pipelines.datasets.inspection import value_rows

    catalogue = [entry.to_json() for entry in list_extractors(*filter(None, (name,)))]
    if as_json:
        typer.echo(to_json(catalogue, indent=2))
        return
    tables = []
    for entry in catalogue:
        shape = entry.pop("shape")
        entry["makes"] = f"{entry.pop('kind')}, {'shape depends on the model' if shape is None else '×'.join(map(str, shape))}"
        entry["makes"] += f", {entry.pop('dtype')}"
        values = {name: entry[name] for name in ("makes", "source", "weights", "preprocessing") if entry[name]}
        tables.append(Table(("", ""), list(value_rows(values)), entry["name"], has_borders=True))
    render_tables(console, tables)


def _remark_on_precision(precision: str, device: str) -> None:
    """Warn if the processor only emulates the precision."""
    from schemas.process.resources import bfloat16_remark

    sentence = bfloat16_remark(precision, "cpu") if device in ("cpu", "auto") else ""
    if sentence and device == "auto":  # Looking for a GPU loads torch.
        from schemas.process.devices import resolve_device

        sentence = bfloat16_remark(precision, resolve_device(device).type)
    if sentence:
        print_remark(sentence)
