"""Functions of jobs take the job, or its fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from schemas.errors import UsageError
from schemas.options import Opt, Options, takes_fields


@dataclass(frozen=True)
class Model:
    name: str
    weights: str = "default"


@dataclass(frozen=True)
class Share:
    percent: int

    @classmethod
    def parse(cls, text: str) -> "Share":
        return cls(int(text.removesuffix("%")))


@dataclass(frozen=True, repr=False)
class Job(Options):
    source: str
    model: Model = Model("small")
    languages: Annotated[tuple[str, ...], Opt("Languages.")] = ()

    limit: Share | None = None
    top: Annotated[int, Opt("Number.", min_=1)] = 5
    sub_words: Annotated[Literal["mean", "first"] | None, Opt("Vectors.")] = None
    splits: Sequence[str] | None = None
    images: str | tuple[str, ...] = ()


@takes_fields(Job)
def run(job: Job, workers: int = 1, *, note: str = "") -> tuple[Job, int, str]:
    """Run a job."""
    return job, workers, note


def test_fields_build_the_job_beside_arguments_of_the_function():
    assert run("a", top=2, workers=4) == (Job("a", top=2), 4, "")
    assert run("a", model="large", languages=["en", "de"], limit="3%", note="x") == (
        Job("a", Model("large"), ("en", "de"), Share(3)),
        1,
        "x",
    )
    assert run(source="a", model=Model("large", "random:0"))[0].model.weights == "random:0"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("top", 0, "--top is 0, expected 1 or more"),
        ("sub_words", "last", "--sub-words is 'last', expected one of 'mean', 'first'"),
        ("languages", "en", r"--languages is the text 'en', expected a list: give \('en',\)"),
    ],
)
def test_wrong_value_is_refused(name, value, problem):
    assert Job("a", sub_words="first", splits=("train",), images="photos").images == "photos"
    with pytest.raises(UsageError, match=problem):
        Job("a", **{name: value})
