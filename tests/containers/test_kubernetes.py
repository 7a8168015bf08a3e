"""The manifests of docker/kubernetes, against the schemas of Kubernetes and of Flink's operator, and against our own commands."""

import io
import os
import shlex
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="the extra dev installs it")
jsonschema = pytest.importorskip("jsonschema", reason="the extra dev installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra dev installs it")

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "docker" / "kubernetes"
REPOSITORY = os.environ.get("IMAGEPIVOT_MAVEN", "https://repo1.maven.org/maven2")
OPERATOR = "org/apache/flink/flink-kubernetes-operator-api/1.10.0/flink-kubernetes-operator-api-1.10.0.jar"
"""It carries the definition of the operator's resources."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            name = f"-{document['metadata']['name']}" if document["kind"] == "NetworkPolicy" else ""
            yield f"{path.name}-{document['kind']}{name}", document


DOCUMENTS = dict(documents())


def strict(schema: Any) -> Any:
    """Return a schema that refuses keys of which it says nothing: Kubernetes drops them in silence."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return made


@pytest.fixture(scope="module")
def operator() -> dict[str, Any]:
    """The schema of a FlinkDeployment."""
    try:
        with urllib.request.urlopen(f"{REPOSITORY}/{OPERATOR}", timeout=60) as answer:
            jar = zipfile.ZipFile(io.BytesIO(answer.read()))
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"the operator's jar cannot be downloaded: {error}")
    definition = yaml.safe_load(jar.read("META-INF/fabric8/flinkdeployments.flink.apache.org-v1.yml"))
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1beta1"]
    return strict(version["schema"]["openAPIV3Schema"]["properties"]["spec"])


@pytest.mark.parametrize(
    "name", [name for name, document in DOCUMENTS.items() if "flink.apache.org" not in document["apiVersion"]]
)
def test_kubernetes_takes_it(name):
    kubernetes_validate.validate(DOCUMENTS[name], kubernetes_validate.latest_version(), strict=True)


@pytest.mark.cluster
def test_flinks_operator_takes_it(operator):
    deployment = DOCUMENTS["flink.yaml-FlinkDeployment"]
    jsonschema.validate(deployment["spec"], operator)
    with pytest.raises(jsonschema.ValidationError, match="replica'"):
        jsonschema.validate({**deployment["spec"], "taskManager": {"replica": 3}}, operator)


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications of pods in a manifest, wherever they are."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for each in value.values():
            yield from pods(each)


def test_our_containers_name_mounted_folders():
    containers = [each for document in DOCUMENTS.values() for pod in pods(document) for each in pod["containers"]]
    ours = [each for each in containers if "imagepivot/" in each.get("image", "")]
    assert ours
    for container in ours:
        (mounted,) = container["volumeMounts"]
        places = [word for text in container["args"] for word in shlex.split(text) if word.startswith("/")]
        assert all(place.startswith((mounted["mountPath"], "/opt/imagepivot/weights/")) for place in places)


PODS = [
    pytest.param(name, pod, id=f"{name}-{pod['containers'][0]['name']}-{number}")
    for name, document in DOCUMENTS.items()
    for number, pod in enumerate(pods(document))
]


@pytest.mark.parametrize(("name", "pod"), PODS)
def test_pods_have_no_rights_that_they_do_not_need(name, pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context.get("runAsUser", 1) > 0
        assert not context.get("privileged")
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    # Flink's job manager alone asks Kubernetes for anything: for task managers.
    is_job_manager = pod is DOCUMENTS["flink.yaml-FlinkDeployment"]["spec"]["jobManager"]["podTemplate"]["spec"]
    assert pod["automountServiceAccountToken"] is is_job_manager


def test_policies_let_only_named_pods_reach_what_runs_code():
    jobs, flink = (DOCUMENTS[f"flink.yaml-NetworkPolicy-{name}"]["spec"] for name in ("beam-jobs", "flink"))
    labels = DOCUMENTS["flink.yaml-Deployment"]["spec"]["template"]["metadata"]["labels"]
    client = DOCUMENTS["flink-job.yaml-Job"]["spec"]["template"]["metadata"]["labels"]
    ports = [{"port": each["port"]} for each in DOCUMENTS["flink.yaml-Service"]["spec"]["ports"]]
    assert jobs == {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": client}}], "ports": ports}],
    }
    own = {"matchLabels": {"app": DOCUMENTS["flink.yaml-FlinkDeployment"]["metadata"]["name"]}}
    inside, rest = flink["ingress"]
    assert (flink["podSelector"], flink["policyTypes"], inside) == (own, ["Ingress"], {"from": [{"podSelector": own}]})
    assert rest["ports"] == [{"port": 8081}], "not the pools' port 50000"
    assert rest["from"][0] == {"podSelector": {"matchLabels": labels}}
    assert all(place.keys() == {"namespaceSelector"} for place in rest["from"][1:])


def test_ports_and_names_agree():
    service = DOCUMENTS["flink.yaml-Service"]
    job = " ".join(DOCUMENTS["flink-job.yaml-Job"]["spec"]["template"]["spec"]["containers"][0]["args"])
    deployment = DOCUMENTS["flink.yaml-Deployment"]["spec"]["template"]
    assert service["spec"]["selector"] == deployment["metadata"]["labels"]
    flags = " ".join(deployment["spec"]["containers"][0]["args"])
    for port, flag, service_flag in ((8099, "job_endpoint", "job-port"), (8098, "artifact_endpoint", "artifact-port")):
        assert f"--{flag}={service['metadata']['name']}:{port}" in job
        assert f"--{service_flag}={port}" in flags
        assert port in [each["port"] for each in service["spec"]["ports"]]
    assert f"--flink-master={DOCUMENTS['flink.yaml-FlinkDeployment']['metadata']['name']}-rest:8081" in flags


@pytest.mark.parametrize(("name", "pod"), PODS)
def test_pods_have_limits_and_an_end(name, pod):
    for container in pod["containers"]:
        if container.get("image", "").startswith("registry.example.com"):
            limits, requests = container["resources"]["limits"], container["resources"]["requests"]
            assert {key: limits[key] for key in ("cpu", "memory")} == requests
    document = DOCUMENTS[name]
    if document["kind"] in ("Job", "CronJob"):
        job = document["spec"]["jobTemplate"]["spec"] if document["kind"] == "CronJob" else document["spec"]
        assert job["activeDeadlineSeconds"] <= 86_400
        assert job["ttlSecondsAfterFinished"] > 0
        assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} & {"FailIndex", "FailJob"}
        assert pod["terminationGracePeriodSeconds"] >= 30
