"""The story of docs/how-to/nightly.md, night by night as the page tells it, on emulators of both stores."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.builders import stored
from tests.fake_extractors import colours, use_colours
from tests.integration.processes import ForkedSteps, Started, start, wait_for
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


# --- a machine with the script ---------------------------------------------------------------------------------------

CLIENT = """#!{python} -IS
import json, os, socket, sys
name = os.path.basename(sys.argv[0])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    stdin = sys.stdin.read() if name == "mail" else ""
    server.sendall(json.dumps([name, sys.argv[1:], stdin]).encode() + b"\\n")
    code, out, err = json.loads(server.makefile("rb").readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
"""In place of a program: the test does what it is asked for, and need not import anything anew."""


@dataclass
class Machine:
    """What runs the script.

    Attributes:
        folder: where the script lies.
        scheme: of the store.
        night: the date.
        codes: exit codes of ``imagepivot features`` of this night.
        pauses: for how long the script has slept, each time.
        mails: command lines and texts of mails.
        wrong: what failed in a thread of this test.
        on_features: is called with the process of ``imagepivot features``, while it runs.
        on_pause: is called when the script sleeps.
    """

    folder: Path
    scheme: str
    night: str = ""
    codes: list[int] = field(default_factory=list)
    pauses: list[int] = field(default_factory=list)
    mails: list[tuple[list[str], str]] = field(default_factory=list)
    on_features: Callable[[Started], object] = lambda process: None
    on_pause: Callable[[], object] = lambda: None
    wrong: list[Exception] = field(default_factory=list)

    def write(self, name: str, text: str) -> Path:
        """Write a program."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("gs://", f"{self.scheme}://"), encoding="utf-8")
        path.chmod(0o755)
        return path

    def run(self, line: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a line of the shell."""
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if self.wrong:
            raise self.wrong[0]
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr, self.log())
        return done

    def begin(self, night: str) -> None:
        """Let a night begin."""
        self.night, self.codes, self.pauses, self.mails = night, [], [], []
        self.on_features, self.on_pause = lambda process: None, lambda: None

    def log(self) -> list[dict]:
        """Events of the night."""
        path = self.folder / f"{self.night}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def answer(self, name: str, words: list[str], stdin: str) -> tuple[int, str, str]:
        """Do what a program was asked for."""
        try:
            return self._answer(name, words, stdin)
        except Exception as error:  # noqa: BLE001 -- raised where the test waits
            self.wrong.append(error)
            return 2, "", str(error)

    def _answer(self, name: str, words: list[str], stdin: str) -> tuple[int, str, str]:
        if name == "date":
            assert words == ["+%F"]
            return 0, f"{self.night}\n", ""
        if name == "sleep":
            self.pauses.append(int(words[0]))
            if int(words[0]):
                self.on_pause()
        elif name == "mail":
            self.mails.append((words, stdin))
        elif name == "imagepivot":
            return self._imagepivot(words)
        else:
            {"gcloud": gcloud, "aws": aws}[name](words)
        return 0, "", ""

    def _imagepivot(self, words: list[str]) -> tuple[int, str, str]:
        with start(*words, folder=self.folder / "process", before=colours) as process:
            if words[0] == "features":
                self.on_features(process)
            done = process.wait(300)
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        if words[0] == "features":
            self.codes.append(code)
        return code, done.stdout, done.stderr


def copy(source: str, target: str, left_out: Callable[[str], bool]) -> None:
    for name in Folder(source).names():
        if not left_out(name):
            Folder(target).put(name, Folder(source).read(name))


def copy_file(source: str, target: str) -> None:
    (before, _, name), (after, _, other) = source.rpartition("/"), target.rpartition("/")
    Folder(after).put(other, Folder(before).read(name))


def gcloud(words: list[str]) -> None:
    """Do what Google's program documents of the two commands of the script."""
    assert words[:2] in (["storage", "rsync"], ["storage", "cp"])
    source, target = words[-2:]
    if words[1] == "cp":
        return copy_file(source, target)
    recursive, exclude = words[2:-2]
    pattern = re.compile(exclude.removeprefix("--exclude="))
    assert recursive == "--recursive"
    return copy(source, target, lambda name: pattern.match(name) is not None)


def aws(words: list[str]) -> None:
    """Do what Amazon's program documents of the two commands of the script."""
    from fnmatch import fnmatchcase

    assert words[0] == "s3"
    source, target = words[-2:]
    assert words[2] == "--only-show-errors"
    if words[1] == "cp":
        return copy_file(source, target)
    assert words[1] == "sync"
    assert words[3:-2:2] == ["--exclude"] * len(words[3:-2:2])
    return copy(source, target, lambda name: any(fnmatchcase(name, pattern) for pattern in words[4:-2:2]))


@contextlib.contextmanager
def machine_with_script(folder: Path, scheme: str) -> Iterator[Machine]:
    """Make the script of the page, and answer what it asks of programs."""
    machine = Machine(folder, scheme)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            answer = machine.answer(*json.loads(self.rfile.readline()))
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    address = str(folder / "s")
    with socketserver.ThreadingUnixStreamServer(address, Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("imagepivot", "date", "sleep", "mail", "gcloud", "aws"):
            machine.write(f"bin/{name}", CLIENT.format(python=sys.executable, address=address))
        [script] = blocks("Script", "bash")
        if scheme == "s3":
            [of_google] = re.findall(r"^ *gcloud storage rsync.*\n.*\n", script, flags=re.MULTILINE)
            [of_amazon] = blocks("Dated copies", "bash")
            script = script.replace(of_google, of_amazon)
        machine.write("nightly.sh", script)
        yield machine
        server.shutdown()


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


@pytest.fixture
def machine(stores, tmp_path, monkeypatch) -> Iterator[Machine]:
    use(stores[1].environment, monkeypatch)
    with machine_with_script(tmp_path, stores[1].scheme) as machine:
        yield machine


# --- the nights ------------------------------------------------------------------------------------------------------


def check_night(machine: Machine, features: str) -> None:
    """Compare what a night left with the table of the page, and its report with the dataset."""
    [(_, _, rows, failures, codes)] = [row for row in rows_of("Example") if row[0] == machine.night]
    expected = {} if failures == "none" else {reason: int(n) for n, reason in (part.split() for part in failures.split(", "))}
    assert machine.codes == [int(code) for code in codes.split(", ")]
    manifest = open_dataset(features).manifest
    assert (manifest.rows, dict(manifest.failure_reasons)) == (int(rows), expected)
    end = machine.log()[-1]
    assert end["counts"] == {"rows": int(rows), "shards": 16, "failed": expected}
    assert (end["event"], end["exit_code"]) == ("end", machine.codes[-1])
    report = json.loads((machine.folder / f"{machine.night}.json").read_text())
    assert report["rows"] == int(rows)
    assert {one["reason"]: one["inputs"] for one in report["failures"]} == expected
    lines = (machine.folder / f"{machine.night}-failures.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == open_dataset(features).failures().to_pylist()
    copied = dataset_in(f"{features}-{machine.night}")
    assert copied == dataset_in(features)
    assert Folder(f"{features}-{machine.night}").names() == sorted(copied)
    assert validate(f"{features}-{machine.night}") == []


@pytest.mark.parametrize("near", ["gs"], indirect=True)  # The page's store; the requests of both are counted below.
def test_nights_of_the_page(machine, stores, imagepivot, monkeypatch):
    near, far = stores
    photos, features = Folder(near.address("photos")), near.address("features")
    night = iter(NIGHTS)

    machine.begin(next(night))
    upload(photos, range(40))
    with pytest.MonkeyPatch.context() as patch:
        use_colours(patch)
        for line in blocks("Nightly updates", "sh")[0].replace("gs://", f"{near.scheme}://").splitlines():
            imagepivot(*shlex.split(line)[1:])
    assert Folder(features).names() == []
    far.asked()
    machine.run("./nightly.sh")
    check_night(machine, features)
    assert images_read(far)[0] == [f"{number:03d}.jpg" for number in range(40)]

    machine.begin(next(night))
    upload(photos, range(40, 46))
    upload(photos, range(2), other=100)
    upload(photos, range(46, 47), broken)
    for number in range(2, 5):
        photos.delete(f"{number:03d}.jpg")
    far.asked()
    machine.run("./nightly.sh")
    check_night(machine, features)
    assert images_read(far)[0] == [f"{number:03d}.jpg" for number in (0, 1, *range(40, 47))]
    assert machine.mails == []
    [words] = [shlex.split(line) for line in blocks("Report", "sh")[0].splitlines()]
    said = imagepivot(*[word.replace("gs://", f"{near.scheme}://") for word in words[1:]], code=1).stdout
    assert "002" in said
    assert "045" in said

    machine.begin(next(night))
    upload(photos, range(50, 62), broken)
    opened = open_dataset(features)
    before = {entry.name: entry.tag for entry in Folder(features).list()}
    machine.on_features = lambda process: kill_in_the_middle(process, machine, far, near, before, opened, monkeypatch)
    machine.on_pause = lambda: far.cut("", 0, after=0)
    machine.run("./nightly.sh", code=3)
    check_night(machine, features)
    assert machine.pauses == [0, 600]
    [(subject, text)] = machine.mails
    assert subject == ["-s", "features of 2026-11-22: exit code 3", "team@example.com"]
    [line] = blocks("Alerts", "json")
    shown = {**json.loads(line), "output": features}
    assert {**json.loads(text), "time": ""} == {**shown, "time": ""}
    assert list(json.loads(text)) == list(shown)

    machine.begin(next(night))
    upload(photos, range(50, 62))
    far.cut("busy", 600, after=0)
    machine.on_pause = lambda: far.cut("busy", 600, after=0, only="053.jpg")
    machine.run("./nightly.sh")
    far.cut("", 0, after=0)
    check_night(machine, features)
    assert machine.pauses == [0, 600]
    [error] = [event["message"] for event in machine.log() if event["event"] == "error"]
    assert "it is busy or down" in error
    assert machine.mails == []

    machine.begin(next(night))
    far.asked()
    machine.run("./nightly.sh")
    check_night(machine, features)
    assert images_read(far)[0] == ["053.jpg"]

    machine.begin(next(night))
    before = {entry.name: entry.tag for entry in Folder(features).list()}
    machine.run("./nightly.sh")
    check_night(machine, features)
    assert {entry.name: entry.tag for entry in Folder(features).list()} == before
    use_colours(monkeypatch)
    imagepivot("features", photos.location, near.address("fresh"), "--max-failures", "10")
    assert untagged(dataset_in(near.address("fresh"))) == untagged(dataset_in(features))
    colour = open_dataset(features).get("000")["feature"]
    assert [abs(int(value) - exact) < 6 for value, exact in zip(colour, (100, 150, 20), strict=True)] == [True] * 3

    # By hand: every failure once more.
    far.asked()
    line = blocks("Example", "sh")[0].replace("gs://", f"{near.scheme}://")
    imagepivot(*shlex.split(line)[1:])
    assert images_read(far)[0] == ["046.jpg"]


def kill_in_the_middle(process, machine, far, near, before, opened, monkeypatch) -> None:
    """Kill the first attempt between two shards, and look at the dataset as a reader does then."""
    if machine.codes:
        return
    use(near.environment, monkeypatch)
    folder = opened.folder

    def replaced() -> list[str]:
        return [name for name, _, _, tag, _ in folder.list() if name.startswith("part-") and before[name] != tag]

    wait_for(lambda: replaced() or not process.runs)
    far.cut("stall", 600, after=0)
    assert process.runs
    assert "_manifest.json" not in folder.names()
    assert 0 < len(replaced()) < 16
    with pytest.raises(DatasetError, match=r"is not a dataset"):
        open_dataset(folder.location)
    for number in range(opened.num_shards):
        if opened.manifest.shards[number].path in replaced():
            with pytest.raises(DatasetError, match=r"the manifest says"):
                opened.shard(number)
        else:
            opened.shard(number)
    process.send(signal.SIGKILL)
    use(far.environment, monkeypatch)


# --- starting it -----------------------------------------------------------------------------------------------------


def test_running_nightly_script_locks_out_the_next(machine):
    [line] = blocks("Scheduling", "text")
    assert line.split()[:5] == ["0", "2", "*", "*", "*"]
    command = line.split(maxsplit=5)[5].replace("/srv/nightly", str(machine.folder))
    machine.write("nightly.sh", "#!/bin/bash\ntouch began\nread <go\ntouch ended\n")
    os.mkfifo(machine.folder / "go")
    with subprocess.Popen(["bash", "-c", command], cwd="/") as first:
        wait_for((machine.folder / "began").exists)
        machine.run(command, code=1)
        (machine.folder / "go").write_text("\n")
        assert first.wait(60) == 0
    assert (machine.folder / "ended").exists()
    (machine.folder / "nightly.sh").write_text("#!/bin/bash\nexit 3\n")
    machine.run(command, code=3)


def test_systemd_takes_the_units(tmp_path):
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze")
    [block] = blocks("Scheduling", "ini")
    (tmp_path / "nightly.sh").write_text(blocks("Script", "bash")[0])
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
    [script] = blocks("Script", "bash")
    [line] = re.findall(r"imagepivot (features .*?) 2>>", script)
    for name, location in re.findall(r"(\w+)=(gs://\S+)", script):
        line = line.replace(f'"${name}"', location)
    [weights] = [value for value in container["args"] if value.startswith("--weights=")]  # The image has them.
    line = line.replace("--max-failures 10", "--max-failures=10")
    assert [value for value in container["args"] if value != weights] == ["imagepivot", *shlex.split(line)]


# --- what it asks, and as a plan -------------------------------------------------------------------------------------


def test_requests_of_an_unchanged_night_equal_the_page(stores, machine, imagepivot, monkeypatch):
    near, far = stores
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


@pytest.mark.parametrize("near", ["gs"], indirect=True)
def test_same_as_a_plan(stores, tmp_path, imagepivot, monkeypatch):
    near, far = stores
    use(near.environment, monkeypatch)
    steps = ForkedSteps(before=colours)  # With an extractor without a model.
    monkeypatch.setattr("schemas.process.steps.run_command", steps)
    [line] = (text.replace("gs://", f"{near.scheme}://") for text in blocks("Plan", "sh"))
    plain = line.partition(" --overwrite")[0]
    [plan] = blocks("Plan", "toml")
    (tmp_path / "nightly.toml").write_text(plan.replace("gs://", f"{near.scheme}://"), encoding="utf-8")
    captions = [f"{number:03d}\ta dog runs\ttrain\n" for number in range(30)]

    def upload_captions(count: int) -> None:
        Folder(near.address("")).put("captions.tsv", ("image_id\ttext\tsplit\n" + "".join(captions[:count])).encode())

    def run(*more: str, words: str = line, code: int = 0) -> str:
        steps.started.clear()
        said = imagepivot(*shlex.split(words)[1:], *more, code=code, cwd=tmp_path).stderr
        assert [words[0] for words in steps.started] == ["captions", "encode", "features"][: len(steps.started)]
        return said

    photos, output = Folder(near.address("photos")), near.address("nightly")
    for name in photos.names():
        photos.delete(name)
    upload(photos, range(20))
    upload_captions(20)
    imagepivot("captions", near.address("captions.tsv"), tmp_path / "captions", "--format", "table", "--workers", "1")
    imagepivot("vocabulary", tmp_path / "captions", near.address("vocabulary"), "--min-count", "1")

    run()
    before = stored(output)
    run(words=plain)
    assert stored(output) == before

    # New images and captions; of one photo nothing can be read.
    upload(photos, range(20, 30))
    upload_captions(30)
    refused = run(words=plain, code=1)
    assert "step captions (imagepivot captions) failed with exit code 1, these steps did not run: encoded, features" in refused
    use(far.environment, monkeypatch)
    far.cut("busy", 600, after=0, only="023.jpg")
    run()
    far.cut("", 0, after=0)
    assert open_dataset(f"{output}/features").manifest.failure_reasons == {"unreadable": 1}
    assert open_dataset(f"{output}/encoded").manifest.rows == 30

    # It is tried again, and no other.
    far.asked()
    run()
    assert images_read(far)[0] == ["023.jpg"]
    assert open_dataset(f"{output}/features").manifest.rows == 30

    # More broken images than are allowed: the rest is there, and the next night tries again.
    upload(photos, range(40, 52), broken)
    assert "step features (imagepivot features) failed with exit code 3" in run(code=3)
    assert open_dataset(f"{output}/features").manifest.failure_reasons == {"truncated": 12}
    upload(photos, range(40, 50))
    run()
    assert open_dataset(f"{output}/features").manifest.failure_reasons == {"truncated": 2}
    for name in ("captions", "encoded", "features"):
        assert validate(f"{output}/{name}") == []
