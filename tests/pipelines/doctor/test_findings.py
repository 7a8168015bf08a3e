import json

import pytest

from pipelines.doctor.findings import Diagnosis, Finding, attempt, redacted
from schemas.errors import DatasetError

FINE = Finding("machine", "cores", "ok", "2 cores", values={"usable": 2})
NOTE = Finding("machine", "memory", "note", "1 GB", "buy more")
PROBLEM = Finding("storage", "bucket", "problem", "there is none", "make one")


def test_text_is_aligned_and_has_what_to_do_on_lines_of_its_own():
    assert Diagnosis((FINE, NOTE, PROBLEM)).to_text().splitlines() == [
        "machine",
        "  ok       cores         2 cores",
        "  note     memory        1 GB",
        "           -> buy more",
        "storage",
        "  PROBLEM  bucket        there is none",
        "           -> make one",
        "1 problem, 1 note",
    ]


@pytest.mark.parametrize(
    ("findings", "works", "summary"),
    [
        ((), True, "nothing to do"),
        ((FINE,), True, "nothing to do"),
        ((FINE, NOTE, NOTE), True, "2 notes"),
        ((PROBLEM, FINE, PROBLEM), False, "2 problems"),
    ],
)
def test_only_a_problem_keeps_it_from_working(findings, works, summary):
    diagnosis = Diagnosis(findings)
    assert (diagnosis.works, diagnosis.summary, diagnosis.to_json()["works"]) == (works, summary, works)


def test_json_has_all_of_a_finding():
    assert json.loads(json.dumps(Diagnosis((FINE,)).to_json())) == {
        "works": True,
        "findings": [
            {
                "group": "machine",
                "subject": "cores",
                "status": "ok",
                "found": "2 cores",
                "advice": "",
                "values": {"usable": 2},
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://AKIA:wJal%2Fr@bucket/x", "s3://***@bucket/x"),
        ("'s3://AKIA:wJalr@bucket/x' and 's3://B:c@d'", "'s3://***@bucket/x' and 's3://***@d'"),
        ("s3://AKIA:wJ/al/r@bucket/x", "s3://***@bucket/x"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("cannot parse 's3://AKIA:wJ' at 13", "cannot parse 's3://***' at 13"),
        ("http://127.0.0.1:9000/bucket", "http://127.0.0.1:9000/bucket"),
        ("gs://bucket/x?retry_limit_seconds=3", "gs://bucket/x?retry_limit_seconds=3"),
        (
            "http://u:p@host/w.pth?X-Amz-Signature=12ab&region=eu&sig=9%3D, check it",
            "http://***@host/w.pth?X-Amz-Signature=***&region=eu&sig=***, check it",
        ),
        ("write to anna@example.org", "write to anna@example.org"),
    ],
)
def test_keys_in_addresses_are_not_shown(text, expected):
    assert redacted(text) == expected
    finding = Finding("storage", "bucket", "ok", text, text, {"location": text, "all": [text, 1], "nested": {"one": text}})
    assert finding.found == finding.advice == expected
    assert finding.values == {"location": expected, "all": [expected, 1], "nested": {"one": expected}}


def test_a_check_that_fails_is_a_problem_after_what_it_has_found():
    def check():
        yield FINE
        raise DatasetError("cannot use 's3://a:b@c': make it")

    assert list(attempt("storage", "bucket", check)) == [
        FINE,
        Finding("storage", "bucket", "problem", "cannot use 's3://***@c': make it"),
    ]


def test_whatever_goes_wrong_is_a_problem():
    def check():
        raise RuntimeError("driver is gone\nat 0x12")
        yield

    (found,) = attempt("devices", "gpu", check, advice="start again")
    assert (found.status, found.found, found.advice) == ("problem", "RuntimeError: driver is gone", "start again")
