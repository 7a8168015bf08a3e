import json

import pytest

from schemas.storage.folder import Folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_existing_bucket_is_left_as_it_was(store, imagepivot):
    Folder(store.address("features")).put("_manifest.json", b"{}")
    done = imagepivot("doctor", store.address("features"), "--json")
    assert json.loads(done.stdout)["checks"][-1] == {
        "name": "output",
        "status": "ok",
        "result": f"a file was written to {store.address('features')!r} and deleted",
        "advice": "",
    }
    assert Folder(store.address("")).names() == ["features/_manifest.json"]
