"""docs/how-to/nightly.md: its script with stand-ins, and its story, night by night as the page tells it, on an emulated store."""

import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.builders import stored
from tests.fake_extractors import colours, use_colours
from tests.integration.processes import start, wait_for
from tests.stores import FarStore, untagged, use

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "nightly.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
NIGHTS = ["2026-11-20", "2026-11-21", "2026-11-22", "2026-11-23", "2026-11-24", "2026-11-25"]


def section(heading: str) -> str:
    return re.split(r"^##+ ", PAGE.partition(f"# {heading}\n")[2], flags=re.MULTILINE)[0]


def blocks(heading: str, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(section(heading)) if name == language]


def rows_of(heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


[SCRIPT] = blocks("Script", "bash")


def update_of_the_script() -> list[str]:
    """Words of the command that updates the features, without the program."""
    [line] = re.findall(r"imagepivot (features .*?) 2>>", SCRIPT)
    for name, location in re.findall(r"(\w+)=(gs://\S+)", SCRIPT):
        line = line.replace(f'"${name}"', location)
    return shlex.split(line)


# --- the script ------------------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/bash
name=$(basename "$0")
echo "$name $*" >>said
case "$name $1" in
    "date "*) echo 2026-11-22 ;;
    "imagepivot features")
        code=$(head -n 1 codes)
        sed -i 1d codes
        echo "ended with $code" >&2
        exit "$code" ;;
    "imagepivot inspect") echo "$*" ;;
    "gcloud storage") [[ $2 == cp || -z $NO_COPY ]] ;;
    "mail "*) cat >>mails ;;
esac
"""
"""In place of all programs: it notes what it is asked for, and updates end with the codes of a file, one after the other."""


@pytest.mark.parametrize(
    ("codes", "copies", "code"),
    [
        ((0,), True, 0),
        ((0,), False, 1),
        ((3,), True, 3),
        ((137, 3), True, 3),
        ((1, 0), True, 0),
        ((1, 1, 1), True, 1),
        ((2,), True, 2),
    ],
)
def test_script_retries_reports_and_copies(tmp_path, codes, copies, code):
    (tmp_path / "nightly.sh").write_text(SCRIPT)
    (tmp_path / "codes").write_text("".join(f"{each}\n" for each in codes))
    (tmp_path / "bin").mkdir()
    for name in ("imagepivot", "date", "sleep", "mail", "gcloud"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NO_COPY": "" if copies else "1"}
    assert subprocess.run(["bash", "nightly.sh"], cwd=tmp_path, env=environment, check=False).returncode == code
    said = (tmp_path / "said").read_text().splitlines()
    update, copy = shlex.join(update_of_the_script()), "gs://bucket/features-2026-11-22"
    expected = ["date +%F"]
    for pause, _ in zip((0, 600, 3600), codes, strict=False):
        expected += [f"sleep {pause}", f"imagepivot {update}"]
    if codes[-1] in (0, 3):
        expected += [f"imagepivot inspect gs://bucket/features {words} --json" for words in ("--rows 0", "--failures")]
        expected += [f"gcloud storage rsync --recursive --exclude=.*(_manifest\\.json|\\.records/) gs://bucket/features {copy}"]
        expected += [f"gcloud storage cp gs://bucket/features/_manifest.json {copy}/_manifest.json"] * copies
        for name in ("2026-11-22.json", "2026-11-22-failures.jsonl"):
            assert (tmp_path / name).read_text().startswith("inspect gs://bucket/features ")
    if code:
        expected += [f"mail -s features of 2026-11-22: exit code {code} team@example.com"]
        assert (tmp_path / "mails").read_text() == f"ended with {codes[-1]}\n"
    assert said == expected


@pytest.mark.parametrize("code", [0, 1])
def test_copy_on_s3_leaves_out_what_that_on_google_does(tmp_path, code):
    [block], (left_out,) = blocks("Dated copies", "bash"), re.findall(r"--exclude='(.*?)'", SCRIPT)
    aws = f'aws() {{ echo "$*" >>said; [[ $2 == sync ]] || return {code}; }}'
    line = f'features=s3://bucket/features night=2026-11-22 code=0\n{aws}\n{block}\nexit "$code"'
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, check=False).returncode == code
    sync, copy = (line.split() for line in (tmp_path / "said").read_text().splitlines())
    names = ("_manifest.json", ".records/a.jsonl", "part-00000-of-00001.parquet", "_failures/part-00000-of-00001.parquet")
    patterns = [word for before, word in itertools.pairwise(sync) if before == "--exclude"]
    for name in names:  # A * of Amazon's program matches slashes, too.
        assert any(fnmatchcase(name, pattern) for pattern in patterns) == bool(re.match(left_out, name)), name
    places = ["s3://bucket/features", "s3://bucket/features-2026-11-22"]
    assert (sync[:2], sync[-2:]) == (["s3", "sync"], places)
    assert (copy[:2], copy[-2:]) == (["s3", "cp"], [f"{place}/_manifest.json" for place in places])


# --- the bucket ------------------------------------------------------------------------------------------------------


def photo(number: int) -> bytes:
    data = io.BytesIO()
    noise = Image.effect_noise((40, 40), 50)
    image = Image.merge("RGB", (noise, noise, noise))
    image.paste((number, 250 - number, 20), (0, 0, 16, 16))
    image.save(data, "JPEG", quality=95)
    return data.getvalue()


def broken(number: int) -> bytes:
    return photo(number)[:-700]


def upload(photos: Folder, numbers: range, make: Callable[[int], bytes] = photo, other: int = 0) -> None:
    for number in numbers:
        photos.put(f"{number:03d}.jpg", make(number + other))


def dataset_in(location: str) -> dict[str, bytes]:
    return {name: data for name, data in stored(location).items() if not name.startswith(".")}


def images_read(far: FarStore) -> tuple[list[str], int]:
    """Return the names of the images that were read since the last call, and the number of all requests."""
    asked = far.asked()
    names = re.findall(r"photos(?:/|%2F)(\d+\.jpg)", " ".join(request.path for request in asked.all))
    return sorted(names), len(asked)


# --- the nights ------------------------------------------------------------------------------------------------------


def check_night(imagepivot, night: str, codes: list[int]) -> None:
    """Compare what a night left with the table of the page, and its reports and a copy with the dataset."""
    features, (left_out,) = "gs://bucket/features", re.findall(r"--exclude='(.*?)'", SCRIPT)
    [(_, _, rows, failures, expected_codes)] = [row for row in rows_of("Example") if row[0] == night]
    expected = {} if failures == "none" else {reason: int(n) for n, reason in (part.split() for part in failures.split(", "))}
    assert codes == [int(code) for code in expected_codes.split(", ")]
    dataset = open_dataset(features)
    assert (dataset.manifest.rows, dict(dataset.manifest.failure_reasons)) == (int(rows), expected)
    report = json.loads(imagepivot("inspect", features, "--rows", "0", "--json").stdout)
    assert report["rows"] == int(rows)
    assert {one["reason"]: one["inputs"] for one in report["failures"]} == expected
    lines = imagepivot("inspect", features, "--failures", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines] == dataset.failures().to_pylist()
    copy = Folder(f"{features}-{night}")
    for name in dataset.folder.names():
        if not re.match(left_out, name) or name == "_manifest.json":
            copy.put(name, dataset.folder.read(name))
    assert dataset_in(copy.location) == dataset_in(features)
    assert validate(copy.location) == []


@pytest.mark.parametrize("near", ["gs"], indirect=True)  # The page's store; the requests of both are counted below.
def test_nights_of_the_page(stores, imagepivot, tmp_path, monkeypatch):
    near, far = stores
    use(far.environment, monkeypatch)
    use_colours(monkeypatch)
    photos, features = Folder("gs://bucket/photos"), "gs://bucket/features"
    night = iter(NIGHTS)

    def update(code: int = 0) -> list[dict]:
        far.asked()
        return [json.loads(line) for line in imagepivot(*update_of_the_script(), code=code).stderr.splitlines()]

    upload(photos, range(40))
    for line in blocks("Nightly updates", "sh")[0].splitlines():
        imagepivot(*shlex.split(line)[1:])
    assert Folder(features).names() == []
    update()
    assert images_read(far)[0] == [f"{number:03d}.jpg" for number in range(40)]
    check_night(imagepivot, next(night), [0])

    upload(photos, range(40, 46))
    upload(photos, range(2), other=100)
    upload(photos, range(46, 47), broken)
    for number in range(2, 5):
        photos.delete(f"{number:03d}.jpg")
    update()
    assert images_read(far)[0] == [f"{number:03d}.jpg" for number in (0, 1, *range(40, 47))]
    check_night(imagepivot, next(night), [0])
    [words] = [shlex.split(line) for line in blocks("Report", "sh")[0].splitlines()]
    said = imagepivot(*words[1:], code=1).stdout
    assert "002" in said
    assert "045" in said

    upload(photos, range(50, 62), broken)
    kill_in_the_middle(tmp_path, far, near, open_dataset(features), monkeypatch)
    end = update(code=3)[-1]
    check_night(imagepivot, next(night), [137, 3])
    [line] = blocks("Alerts", "json")
    assert list({**end, "time": ""}.items()) == list({**json.loads(line), "time": ""}.items())

    upload(photos, range(50, 62))
    far.cut("busy", 600, after=0)
    [error] = [event["message"] for event in update(code=1) if event["event"] == "error"]
    assert "it is busy or down" in error
    far.cut("busy", 600, after=0, only="053.jpg")
    update()
    far.cut("", 0, after=0)
    check_night(imagepivot, next(night), [1, 0])

    update()
    assert images_read(far)[0] == ["053.jpg"]
    check_night(imagepivot, next(night), [0])

    before = {entry.name: entry.tag for entry in Folder(features).list()}
    update()
    check_night(imagepivot, next(night), [0])
    assert {entry.name: entry.tag for entry in Folder(features).list()} == before
    imagepivot("features", photos.location, near.address("fresh"), "--max-failures", "10")
    assert untagged(dataset_in(near.address("fresh"))) == untagged(dataset_in(features))
    colour = open_dataset(features).get("000")["feature"]
    assert [abs(int(value) - exact) < 6 for value, exact in zip(colour, (100, 150, 20), strict=True)] == [True] * 3

    # By hand: every failure once more.
    far.asked()
    imagepivot(*shlex.split(blocks("Example", "sh")[0])[1:])
    assert images_read(far)[0] == ["046.jpg"]


def kill_in_the_middle(folder: Path, far: FarStore, near, opened, monkeypatch) -> None:
    """Kill an update between two shards, and look at the dataset as a reader does then."""
    features = opened.folder
    before = {entry.name: entry.tag for entry in features.list()}

    def replaced() -> list[str]:
        return [name for name, _, _, tag, _ in features.list() if name.startswith("part-") and before[name] != tag]

    with start(*update_of_the_script(), folder=folder / "process", before=colours) as process:
        use(near.environment, monkeypatch)
        wait_for(lambda: replaced() or not process.runs)
        far.cut("stall", 600, after=0)
        assert process.runs
        assert "_manifest.json" not in features.names()
        assert 0 < len(replaced()) < 16
        with pytest.raises(DatasetError, match=r"is not a dataset"):
            open_dataset(features.location)
        for number in range(opened.num_shards):
            if opened.manifest.shards[number].path in replaced():
                with pytest.raises(DatasetError, match=r"the manifest says"):
                    opened.shard(number)
            else:
                opened.shard(number)
        process.send(signal.SIGKILL)
        assert process.wait().returncode == -signal.SIGKILL
    far.cut("", 0, after=0)
    use(far.environment, monkeypatch)


# --- starting it -----------------------------------------------------------------------------------------------------


def test_running_nightly_script_locks_out_the_next(tmp_path):
    [line] = blocks("Scheduling", "text")
    assert line.split()[:5] == ["0", "2", "*", "*", "*"]
    command = ["bash", "-c", line.split(maxsplit=5)[5].replace("/srv/nightly", str(tmp_path))]
    (tmp_path / "nightly.sh").write_text("#!/bin/bash\ntouch began\nread <go\ntouch ended\n")
    (tmp_path / "nightly.sh").chmod(0o755)
    os.mkfifo(tmp_path / "go")
    with subprocess.Popen(command, cwd="/") as first:
        wait_for((tmp_path / "began").exists)
        assert subprocess.run(command, cwd="/", check=False).returncode == 1
        (tmp_path / "go").write_text("\n")
        assert first.wait(60) == 0
    assert (tmp_path / "ended").exists()
    (tmp_path / "nightly.sh").write_text("#!/bin/bash\nexit 3\n")
    assert subprocess.run(command, cwd="/", check=False).returncode == 3


def test_systemd_takes_the_units(tmp_path):
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze")
    [block] = blocks("Scheduling", "ini")
    (tmp_path / "nightly.sh").write_text(SCRIPT)
    (tmp_path / "nightly.sh").chmod(0o755)
    units = re.split(r"^# (nightly\.\w+)\n", block.replace("/srv/nightly", str(tmp_path)), flags=re.MULTILINE)[1:]
    for name, text in zip(units[::2], units[1::2], strict=True):
        (tmp_path / name).write_text(text)
    verify = [program, "verify", *(tmp_path / name for name in units[::2])]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert units[::2] == ["nightly.service", "nightly.timer"]


def test_kubernetes_cron_job_follows_the_page():
    yaml = pytest.importorskip("yaml", reason="the extra dev installs it")
    spec = yaml.safe_load((ROOT / "docker" / "kubernetes" / "nightly.yaml").read_text())["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    given_up, disruption = spec["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert (given_up["action"], given_up["onExitCodes"]) == ("FailJob", {"operator": "In", "values": [2, 3]})
    assert disruption["action"] == "Ignore"
    [container] = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    [weights] = [value for value in container["args"] if value.startswith("--weights=")]  # The image has them.
    line = shlex.join(update_of_the_script()).replace("--max-failures 10", "--max-failures=10")
    assert [value for value in container["args"] if value != weights] == ["imagepivot", *shlex.split(line)]


# --- what it asks, and as a plan -------------------------------------------------------------------------------------


def test_requests_of_an_unchanged_night_equal_the_page(stores, imagepivot, monkeypatch):
    near, far = stores
    use(far.environment, monkeypatch)
    (_, *fixed), (_, *each) = rows_of("Cost")
    column = ["gs", "s3"].index(near.scheme)
    use_colours(monkeypatch)
    photos = Folder(near.address("quiet/photos"))
    upload(photos, range(5))
    for shards in (16, 20):
        output = near.address(f"quiet/{shards}")
        imagepivot("features", photos.location, output, "--shards", shards)
        far.asked()
        imagepivot("features", photos.location, output, "--update")
        assert len(far.asked()) == int(fixed[column]) + int(each[column]) * (shards - 16)


def test_plan_of_the_page_runs_the_commands_of_the_page(imagepivot, tmp_path):
    [plan], [line] = blocks("Plan", "toml"), blocks("Plan", "sh")
    (tmp_path / "nightly.toml").write_text(plan, encoding="utf-8")
    printed = imagepivot(*shlex.split(line)[1:], "--dry-run", cwd=tmp_path).stdout.splitlines()
    night = "gs://bucket/nightly"
    assert [set(shlex.split(command)) for command in printed] == [
        {"imagepivot", "captions", "--overwrite", "--format=table", "gs://bucket/captions.tsv", f"{night}/captions"},
        {"imagepivot", "encode", "--overwrite", f"{night}/captions", "gs://bucket/vocabulary", f"{night}/encoded"},
        {"imagepivot", "features", "--update", "--max-failures=10", "gs://bucket/photos", f"{night}/features"},
    ]
