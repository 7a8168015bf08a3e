"""Plans and configuration of strangers: they run no code and write nowhere else, unless the command line allows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.commands.app import app
from pipelines.plans.plan import read_plan
from schemas.errors import UsageError
from tests.pipelines.plans.test_plan import LINE

CAPTIONS = "[steps.captions]\ncommand = 'captions'\nsource = './captions.tsv'\nformat = 'table'\n"
TRAIN = "[steps.run]\ncommand = 'train'\nconfig = 'demo'\ncaptions = 'c/'\nfeatures = 'f/'\n"


def call(*words: str) -> None:
    """Call a command in this process; its errors are raised."""
    CliRunner().invoke(app, words, catch_exceptions=False)


def read(folder: Path, text: str, **options):
    (folder / "plan.toml").write_text(text, encoding="utf-8")
    return read_plan(str(folder / "plan.toml"), LINE, **options)


@pytest.mark.parametrize(
    "variable",
    [
        *("PYTHONPATH", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONHOME", "BROWSER", "PATH", "LD_PRELOAD"),
        *("LD_LIBRARY_PATH", "HOME"),
        *("OMP_TOOL_LIBRARIES", "CUDA_INJECTION64_PATH", "CXX", "TORCHINDUCTOR_CACHE_DIR", "GLIBC_TUNABLES"),
        *("MPLBACKEND", "TMPDIR"),
        *("http_proxy", "AWS_ENDPOINT_URL", "OMP_NUM_THREADS\n", "IMAGEPIVOT_CACHE"),
        *("IMAGEPIVOT_CAPTIONS_TRUST", "IMAGEPIVOT_"),
    ],
)
def test_variables_that_may_run_code_are_refused_without_trust(tmp_path, variable):
    text = f"{CAPTIONS}environment = {{ {variable!r} = 'lib' }}\n".replace("'OMP_NUM_THREADS\\n'", '"OMP_NUM_THREADS\\n"')
    with pytest.raises(UsageError, match=rf"steps\.captions\.environment sets {variable}, .* give --trust"):
        read(tmp_path, text)
    assert read(tmp_path, text, trust=True).steps["captions"].environment == {variable: "lib"}


@pytest.mark.parametrize(
    "variable",
    ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "MALLOC_TRIM_THRESHOLD_", "IMAGEPIVOT_MY_MODEL"],
)
def test_variables_of_devices_threads_memory_and_projects_are_set(tmp_path, variable):
    plan = read(tmp_path, f"{CAPTIONS}environment = {{ {variable} = '1' }}\n")
    assert plan.steps["captions"].environment == {variable: "1"}


CODE_FLAGS = [
    *("--prism_location=./prism", "--setup_file=./setup.py", "--runner=package.module.Runner", "--environment_type=PROCESS"),
    *("--runner=PortableRunner", "--job_endpoint=host:1", "--flink_master=host:1", "--flink_job_server_jar=x.jar"),
    *("--sdk_container_image=image", "--beam_plugins=module", "--requirements_file=r.txt", "--extra_package=p.tar.gz"),
    *("--sdk_location=s", "--save_main_session"),
    *("--experiments=use_portable_job_submission", "--worker_harness_container_image=i"),
]


@pytest.mark.parametrize("flag", CODE_FLAGS)
def test_flags_that_name_code_are_refused_in_files_without_trust(tmp_path, flag, monkeypatch):
    text = f"{CAPTIONS}beam-flags = ['--runner=DataflowRunner', '{flag}']\n"
    with pytest.raises(
        UsageError, match=r"steps\.captions has beam-flags = '--.*', which runs code: nothing was done.* --trust"
    ):
        read(tmp_path, text)
    assert read(tmp_path, text, trust=True).steps["captions"].values["beam_flags"][1] == flag
    (tmp_path / "run.toml").write_text(text.partition("\n")[2].replace("command = 'captions'\n", "output = 'out'\n"))
    for trust in ("", "false", "0"):
        monkeypatch.setenv("IMAGEPIVOT_CAPTIONS_TRUST", trust)
        with pytest.raises(UsageError, match=r"run\.toml' has beam-flags = '--.*', which runs code"):
            call("captions", "--config", str(tmp_path / "run.toml"))
    monkeypatch.setenv("IMAGEPIVOT_CAPTIONS_TRUST", "maybe")
    with pytest.raises(UsageError, match=r"--trust is 'maybe', expected true or false.*_TRUST is 'maybe'\)"):
        call("captions", "--config", str(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trust = true", "build has no option or argument 'trust'"),
        ("""set = ["steps.run.import=['own']"]""", """ has set = .*, which runs code"""),
        ("set = ['paths.a=b', 'steps.run.beam_flags =x']", " has set = 'steps.*, which runs code"),
    ],
)
def test_file_does_not_trust_itself(tmp_path, line, message):
    (tmp_path / "run.toml").write_text(f"plan = 'plan.toml'\n{line}\n")
    with pytest.raises(UsageError, match=rf"run\.toml'.*{message}"):
        call("build", "--config", str(tmp_path / "run.toml"))


def test_flags_of_resources_need_no_trust(tmp_path):
    flags = ["--runner=DataflowRunner", "--project=p", "--region=r", "--temp_location=gs://b/t", "--max_num_workers=4"]
    assert read(tmp_path, f"{CAPTIONS}beam-flags = {flags}\n").steps["captions"].values["beam_flags"] == tuple(flags)


def test_modules_are_imported_only_with_trust_or_from_the_command_line(tmp_path):
    with pytest.raises(UsageError, match=r"steps\.run has import = 'own', which runs code"):
        read(tmp_path, f"{TRAIN}import = ['own']\n")
    trusted = [
        read(tmp_path, f"{TRAIN}import = ['own']\n", trust=True),
        read(tmp_path, TRAIN, settings={"steps.run.import": "['own']"}),
    ]
    assert [plan.steps["run"].values["import_"] for plan in trusted] == [("own",)] * 2


@pytest.mark.parametrize("output", ["{tmp}/home/real.png", "../home", "gs://bucket/x", "link/x", "../plan-other"])
def test_outputs_outside_the_folders_of_the_command_are_refused(tmp_path, output, monkeypatch):
    for name in ("home", "plan", "current"):
        (tmp_path / name).mkdir()
    (tmp_path / "plan/build").mkdir()
    (tmp_path / "plan/build/link").symlink_to(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "current")
    output = output.format(tmp=tmp_path).replace("../", "../../")
    text = f"output = 'build'\n{CAPTIONS}output = '{output}'\n"
    with pytest.raises(
        UsageError, match=r"steps\.captions: the plan would write .*, which is outside its folder and the current"
    ):
        read(tmp_path / "plan", text)
    assert read(tmp_path / "plan", text, trust=True).steps["captions"].output.endswith(output.rpartition("/")[2])
    assert read(tmp_path / "plan", text, settings={"steps.captions.output": "ours"}).steps["captions"].output.endswith("/ours")


@pytest.mark.parametrize(("key", "value"), [("memory-map", "../maps"), ("metrics-file", "~/x.prom")])
def test_other_files_of_a_step_outside_the_folders_are_refused(tmp_path, key, value, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"steps\.run: the plan would write '.*, which is outside its folder"):
        read(tmp_path, f"{TRAIN}{key} = '{value}'\n")
    read(tmp_path, f"{TRAIN}{key} = '{value}'\n", trust=True)
    read(tmp_path, f"{TRAIN}{key} = '{value}'\n", settings={f"steps.run.{key}": value})
    read(tmp_path, f"{TRAIN}{key} = './x.prom'\n")


def test_outputs_below_a_folder_of_the_command_line_are_written(tmp_path):
    (tmp_path / "plan").mkdir()
    plan = read(tmp_path / "plan", f"output = '/etc'\n{CAPTIONS}", output=str(tmp_path / "out"))
    assert plan.steps["captions"].output == str(tmp_path / "out/captions")
    assert read(tmp_path / "plan", CAPTIONS, output="gs://bucket/b").steps["captions"].output == "gs://bucket/b/captions"
    with pytest.raises(UsageError, match="would write '/etc/captions'"):
        read(tmp_path / "plan", f"output = '/etc'\n{CAPTIONS}")


@pytest.mark.slow
def test_plan_of_a_stranger_runs_nothing(tmp_path, monkeypatch):
    """Reproduces plans that ran code: by ``sitecustomize``, a browser, a binary of a runner, and a ``setup.py``."""
    monkeypatch.chdir(tmp_path)
    Path("captions.tsv").write_text("image_id\tlanguage\tcaption\nimg-0\ten\ta dog\n")
    Path("lib").mkdir()
    marker = tmp_path / "marker"
    Path("lib/sitecustomize.py").write_text(f"open({str(marker)!r}, 'a').write('x')")
    Path("prism").write_text(f"#!/bin/sh\ntouch {marker}\n")
    Path("prism").chmod(0o755)
    Path("setup.py").write_text(f"open({str(marker)!r}, 'a').write('x')")
    for line in (
        "environment = { PYTHONPATH = 'lib' }",
        f"""environment = {{ PYTHONWARNINGS = "all:0:antigravity.x:0:0", BROWSER = "/bin/sh -c 'touch {marker}' #%s" }}""",
        f"beam-flags = ['--runner=PrismRunner', '--prism_location={tmp_path}/prism']",
        f"beam-flags = ['--runner=FlinkRunner', '--flink_master=127.0.0.1:9', '--setup_file={tmp_path}/setup.py']",
    ):
        Path("plan.toml").write_text(f"{CAPTIONS}{line}\n")
        for words in (("--dry-run",), ()):
            with pytest.raises(UsageError, match="nothing was done"):
                call("build", "plan.toml", "--output", "out", *words)
    assert not marker.exists()
    assert sorted(path.name for path in Path().iterdir()) == ["captions.tsv", "lib", "plan.toml", "prism", "setup.py"]
