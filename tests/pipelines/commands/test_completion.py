"""Choices that shells complete, asked by the script of bash."""

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
