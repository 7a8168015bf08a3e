"""A template of Dataflow's instead of a run: with the stock client and an emulated bucket."""

import json

import pytest

from schemas.storage.folder import Folder
from tests.stores import emulator, is_installed, use

pytest.importorskip("google.cloud.dataflow")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.skipif(not is_installed("gs"), reason="no emulator of Google Cloud Storage")
def test_template_is_written_and_nothing_else(imagepivot, tmp_path, monkeypatch):
    from apache_beam.internal.gcp import auth

    monkeypatch.setattr(auth._Credentials, "_credentials_init", True)  # None: nobody is asked for any.
    text = "image_id\ttext\na\tx\n"
    with emulator("gs") as store:
        use(store.environment, monkeypatch)
        source, output = Folder(store.address("in")), Folder(store.address("out"))
        source.put("captions.tsv", text.encode())
        flags = (
            "--runner=DataflowRunner",
            "--project=project-1",
            "--region=us-central1",
            "--no_auth",
            f"--temp_location={store.address('tmp')}",
            f"--template_location={store.address('templates/captions')}",
        )
        words = ("captions", source.path_of("captions.tsv"), output.location, "--format", "table")
        done = imagepivot(*words, "--", *flags)
        assert done.stdout == (
            f"the template is written to '{store.address('templates/captions')}'. Launch it once: the job writes "
            f"'{output.location}', which must be empty until then\n"
        )
        assert output.names() == []
        template = json.loads(Folder(store.address("templates")).read("captions"))
        assert template["environment"]["sdkPipelineOptions"]["options"]["pipelineUrl"]
        detached = imagepivot(*words, "--detach", "--", *flags, code=2).stderr
        assert "--template_location writes only a template" in detached
        output.put("part-00000-of-00016.parquet", b"")
        assert "expected an empty folder for a template" in imagepivot(*words, "--", *flags, code=1).stderr
