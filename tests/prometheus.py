"""Strict reader of Prometheus' text exposition format, version 0.0.4, as its documentation defines it.

Order and grouping, which the format leaves open, are those that the documentation asks writers for.
"""

import re
from collections.abc import Mapping
from typing import TypeAlias

Series: TypeAlias = Mapping[frozenset[tuple[str, str]], float]
"""Values of a metric by its labels."""

_HELP = re.compile(r"# HELP ([a-z_]+) ((?:[^\\\n]|\\\\|\\n)+)")
_TYPE = re.compile(r"# TYPE ([a-z_]+) (counter|gauge)")
_SAMPLE = re.compile(r"([a-z_]+)(?:\{(.*)\})? ([^ ]+)", re.DOTALL)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^\\"\n]|\\\\|\\"|\\n)*)"(?:,|$)')
_UNITS = ("seconds", "bytes")
_SCALED = ("milliseconds", "msec", "minutes", "kilobytes", "mb", "percent")


def read_metrics(text: str) -> dict[str, Series]:
    """Return the samples of each metric; an `AssertionError` names the offence."""
    assert text.endswith("\n"), "the last line has no end"
    metrics: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    name = kind = ""
    lines = text.removesuffix("\n").split("\n")
    while lines:
        line = lines.pop(0)
        if (help_ := _HELP.fullmatch(line)) is not None:
            name = help_[1]
            type_ = _TYPE.fullmatch(lines.pop(0))
            assert type_ is not None, f"no TYPE follows {line!r}"
            assert type_[1] == name, f"the TYPE after {line!r} is of {type_[1]}"
            assert name not in metrics, f"{name} has two groups"
            kind, metrics[name] = type_[2], {}
            _check_name(name, kind)
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample is not None, f"{line!r} is no sample"
        assert sample[1] == name, f"{line!r} is in the group of {name!r}"
        labels = frozenset(_labels(sample[2] or ""))
        assert labels not in metrics[name], f"{line!r} is the second of its labels"
        value = float(sample[3])
        assert kind != "counter" or value >= 0, f"{line!r} is a negative counter"
        metrics[name][labels] = value
    return {name: samples for name, samples in metrics.items() if samples}


def _labels(text: str) -> list[tuple[str, str]]:
    labels = []
    while text:
        label = _LABEL.match(text)
        assert label is not None, f"{text!r} are no labels"
        assert not label[1].startswith("__"), f"{label[1]} is reserved"
        value = re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), label[2])
        labels.append((label[1], value))
        text = text[label.end() :]
    assert len(dict(labels)) == len(labels), "a label is given twice"
    return labels


def _check_name(name: str, kind: str) -> None:
    assert name.startswith("imagepivot_")
    assert (kind == "counter") == name.endswith("_total"), f"{name} is a {kind}"
    words = name.split("_")
    assert not set(words).intersection(_SCALED), f"{name} is not in a base unit"
    unit = words[-2] if kind == "counter" else words[-1]
    assert unit in _UNITS or not set(words).intersection(_UNITS) or "per" in words, f"{name} has its unit elsewhere"
