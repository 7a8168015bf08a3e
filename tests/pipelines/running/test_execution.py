from __future__ import annotations

import pytest
from apache_beam.options.pipeline_options import DebugOptions

from pipelines.running.execution import Accelerator, Execution
from schemas.console import events
from schemas.errors import UsageError

DATAFLOW = "--runner=DataflowRunner"
L4 = Accelerator("nvidia-l4")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("",), "--gpu is '', expected a type of GPU, e.g. nvidia-l4"),
        (("nvidia-l4", 0), "--gpus-per-worker is 0, expected 1 or more"),
        (("nvidia-l4", 1, "g2;x"), "--worker-machine is 'g2;x', expected a type of machine, e.g. g2-standard-4"),
        (("nvidia-l4", 1, "", "5;x"), "--gpu-driver is '5;x', expected a version, e.g. 5xx"),
        (("nvidia-tesla-v100",), "--gpu is 'nvidia-tesla-v100', whose compute capability is below 7.5"),
    ],
)
def test_accelerator_invalid_values_are_refused(values, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        Accelerator(*values)


def test_hints_are_those_of_beam():
    from apache_beam.transforms.resources import parse_resource_hints

    hints = parse_resource_hints(Accelerator("nvidia-l4", machine="g2-standard-4").hints())
    expected = b"type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver"
    assert hints["beam:resources:accelerator:v1"] == expected
    newest = parse_resource_hints(Accelerator("nvidia-l4", driver="5xx").hints())
    assert newest["beam:resources:accelerator:v1"] == b"type:nvidia-l4;count:1;install-nvidia-driver:5xx"
    assert parse_resource_hints(Accelerator("nvidia-tesla-t4", 2).hints()) == {
        "beam:resources:accelerator:v1": b"type:nvidia-tesla-t4;count:2;install-nvidia-driver",
        "beam:resources:max_active_bundles_per_worker:v1": b"2",
    }


@pytest.mark.parametrize(("given", "threads"), [((), 3), (("--number_of_worker_harness_threads=5",), 5)])
def test_one_process_with_a_thread_for_each_gpu(given, threads):
    flags = (DATAFLOW, "--experiments=a", *given)
    debug = Execution(beam_flags=flags, accelerator=Accelerator("nvidia-l4", 3)).to_options().view_as(DebugOptions)
    assert debug.experiments == ["a", "no_use_multiple_sdk_containers"]
    assert debug.number_of_worker_harness_threads == threads


@pytest.mark.parametrize(
    "flag",
    [
        "--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1;install-nvidia-driver",
        "--experiments=a,worker_accelerator=type:nvidia-l4;count:1",
        "--resource_hints=accelerator=type:nvidia-l4;count:1",
    ],
)
def test_gpus_are_asked_for_once(flag):
    expected = (
        r"^--gpu is 'nvidia-l4', and --\w+=(worker_)?accelerator=type:nvidia-l4;count:1.* follows --: .*Leave the flag out"
    )
    with pytest.raises(UsageError, match=expected):
        Execution(beam_flags=(DATAFLOW, flag), accelerator=L4)
    Execution(beam_flags=(DATAFLOW, flag))


def test_process_for_each_core_is_refused():
    with pytest.raises(UsageError, match="every core of a worker would load the model into GPU memory"):
        Execution(beam_flags=(DATAFLOW, "--experiments=use_multiple_sdk_containers"), accelerator=L4)


@pytest.mark.parametrize("flags", [(), ("--runner=DirectRunner",), ("--runner=PortableRunner", "--environment_type=LOOPBACK")])
def test_on_this_machine_they_are_refused(flags):
    expected = "^--gpu is 'nvidia-l4', and the workers run on this machine: .* for a GPU of this machine give --device cuda"
    with pytest.raises(UsageError, match=expected):
        Execution(beam_flags=flags, accelerator=L4)


@pytest.fixture
def notes(monkeypatch) -> list[str]:
    """What is remarked."""
    remarks: list[str] = []
    monkeypatch.setattr(events, "_show", lambda text, style: remarks.append(text))
    return remarks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--runner=DirectRunner", "--max_num_wokers=8"), "--max_num_wokers after -- .*: did you mean --max_num_workers"),
        (("--max_num_workers=many",), "argument --max_num_workers: invalid int value: 'many'"),
    ],
)
def test_beam_flags_misspelled_suggests_a_flag(flags, message):
    with pytest.raises(UsageError, match=message):
        Execution(beam_flags=flags)


def test_unknown_flags_are_noted_and_known_ones_are_not(notes):
    known = (DATAFLOW, "--project=p", "--region", "r", "--no_use_public_ips", "--experiments=a", "--experiments=b")
    Execution(beam_flags=known)
    assert notes == []
    Execution(beam_flags=(*known, "--zebra=3"))
    assert notes == ["--zebra after -- is not a flag of Beam, which ignores it"]
