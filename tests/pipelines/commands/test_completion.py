"""What a shell completes, asked as the shells ask: by environment variables, of the installed command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import extractors
from extractors.request import extractor_completions
from pipelines.commands.binding import options_of
from pipelines.jobs import CaptionsJob
from train.config.presets import list_presets

ROOT = Path(__file__).parents[3]
# Asks several times in one process, which is forked for each: starting Python takes longer than completing.
ASK = """
import os, sys
from imagepivot import main
sys.argv = ["imagepivot"]
for words in sys.stdin.read().split("\\n"):
    sys.stdout.flush()
    if not os.fork():
        {variables}
        try:
            main()
        except SystemExit as end:
            print("=>", end.code or 0, [n for n in ("torch", "apache_beam", "numpy", "pyarrow", "PIL") if n in sys.modules])
            sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
VARIABLES = {
    "bash": 'os.environ.update(_IMAGEPIVOT_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))',
    "zsh": 'os.environ.update(_IMAGEPIVOT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words)',
    "fish": (
        'os.environ.update(_IMAGEPIVOT_COMPLETE="complete_fish", _TYPER_COMPLETE_ARGS=words, '
        '_TYPER_COMPLETE_FISH_ACTION="get-args")'
    ),
}
EXPECTED = {
    "imagepivot val": ["validate"],
    "imagepivot features photos out --extractor res": ["resnet50-pool"],
    "imagepivot features --weights d": ["default"],
    "imagepivot features --device cu": ["cuda", "cuda:0"],
    "imagepivot features --precision b": ["bf16"],
    "imagepivot captions source out --format k": ["karpathy"],
    "imagepivot captions --recipe multi": ["multi30k-lc"],
    "imagepivot train gella2017/pivot": ["gella2017/pivot-asym", "gella2017/pivot-sym"],
    "imagepivot evaluate run --device c": ["cpu", "cuda", "cuda:0"],
    "imagepivot reproduce k": ["kadar2018"],
    "imagepivot features --dry": ["--dry-run"],
    "imagepivot inspect bui": [],  # Bash then completes names of files.
}


@pytest.mark.cluster
@pytest.mark.parametrize("shell", VARIABLES)
def test_shell_completion_loads_neither_torch_nor_beam(shell):
    script = ASK.format(variables=VARIABLES[shell])
    done = subprocess.run(
        [sys.executable, "-c", script], input="\n".join(EXPECTED), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    answers = done.stdout.split("=> 0 []\n")[:-1]
    assert len(answers) == len(EXPECTED), done.stdout
    for (words, expected), answer in zip(EXPECTED.items(), answers, strict=True):
        for value in expected:
            assert value.replace(":", r"\\:") in answer if shell == "zsh" else value in answer.split(), (words, answer)
    assert "vgg19" not in answers[1]
    assert shell != "bash" or not answers[-1].strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_runs_the_completion_script():
    show = (
        "import shellingham; shellingham.detect_shell = lambda: ('bash', 'bash')\n"
        "import sys; sys.argv = ['imagepivot', '--show-completion']\n"
        "from imagepivot import command; command()"
    )
    source = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ask = (
        "COMP_WORDS=(imagepivot features --extractor vgg); COMP_CWORD=3; _imagepivot_completion imagepivot; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{source}\n{ask}"], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["vgg19-10crop", "vgg19-10crop-caffe", "vgg19-grid"], "")


@pytest.mark.slow
def test_completion_lists_all_choices():
    from pipelines.text.moses import RECIPES

    def completed(job, name):
        return next(option.opt.completion for option in options_of(job) if option.key == name)

    assert set(extractors.extractor_names()) < set(extractor_completions())
    assert completed(CaptionsJob, "recipe") == tuple(RECIPES)
    assert "vsepp" in list_presets()
