import pytest

from pipelines.running.execution import Execution
from pipelines.running.flags import check_flags
from schemas.console import events
from schemas.errors import UsageError


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    """What is remarked."""
    remarks: list[str] = []
    monkeypatch.setattr(events, "_show", lambda text, style: remarks.append(text))
    return remarks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--runner=DirectRunner", "--max_num_wokers=8"), "--max_num_wokers behind -- .*: did you mean --max_num_workers"),
        (("--max_num_wokers", "8"), "did you mean --max_num_workers"),
        (("--runner=DataflowRunner", "--projct=p"), "--projct behind -- is no flag of Beam's: did you mean --project"),
        (("--runner=DataflowRunner", "--temp-location=gs://b/t"), "did you mean --temp_location"),
        (("--runners=x",), "did you mean --runner"),
        (("--max_num_workers=many",), "argument --max_num_workers: invalid int value: 'many'"),
    ],
)
def test_a_misspelled_flag_is_an_error_that_names_the_flag_meant(flags, message):
    with pytest.raises(UsageError, match=message):
        Execution(beam_flags=flags)


def test_unknown_flags_are_noted_and_known_ones_are_not(notes):
    known = (
        "--runner=DataflowRunner",
        "--project=p",
        "--region",
        "r",
        "--no_use_public_ips",
        "--experiments=a",
        "--experiments=b",
    )
    check_flags(known)
    assert notes == []
    check_flags((*known, "--zebra=3"))
    assert notes == ["--zebra behind -- is no flag of Beam's, which ignores it"]


def test_flags_of_a_job_service_are_left_to_it(notes):
    check_flags(("--runner=SparkRunner", "--spark_master=local"))
    assert notes == [
        "--spark_master is no flag of Beam's Python: it is passed on, for the job service to know: did you mean "
        "--spark_master_url?"
    ]


def test_flags_of_dask_are_known(notes):
    check_flags(("--runner=DaskRunner", "--dask_client_address=tcp://h:1"))
    assert notes == []
