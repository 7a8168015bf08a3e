from dataclasses import MISSING, fields
from typing import Literal, get_args, get_origin

import pytest

import imagepivot
from pipelines.exchange.jobs import ImportJob
from schemas.conversion import alternatives_of, hints_of
from schemas.errors import UsageError
from schemas.options import Options, opt_in

JOBS = [getattr(imagepivot, name) for name in dir(imagepivot) if name.endswith("Job")]
CASES = [
    (job, field.name)
    for job in JOBS
    if issubclass(job, Options)
    for field in fields(job)
    if (kinds := alternatives_of(hints_of(job)[field.name]))
    and str not in kinds
    and any(get_origin(kind) is tuple for kind in kinds)
]


@pytest.mark.parametrize(("job", "name"), CASES)
def test_text_for_a_list_is_refused_by_every_job(job, name):
    with pytest.raises(UsageError, match=r"is the text '.*', expected a list: give \('.*',\)"):
        job(**{key: ("x",) if (job, key) in CASES else _text(job, key) for key in _needed(job)} | {name: "en"})


def _text(job, name):
    kind = alternatives_of(hints_of(job)[name])[0]
    return get_args(kind)[0] if get_origin(kind) is Literal else "x"


def _needed(job):
    hints = hints_of(job)
    required = {name for name, hint in hints.items() if (opt := opt_in(hint)) is not None and opt.is_required}
    has_default = {field.name: (field.default, field.default_factory) != (MISSING, MISSING) for field in fields(job)}
    return [name for name, is_optional in has_default.items() if name in required or not is_optional]


def test_jobs_with_lists_are_covered():
    assert len(CASES) >= 20
    assert (ImportJob, "ids") in CASES
