"""The manifests against the fields of KubeRay's ray.io/v1 and of Kubernetes that they use, and the script that lets a run save."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
QUANTITY = re.compile(r"\d+(\.\d+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?")


@dataclass(frozen=True)
class Fields:
    """A mapping with these keys and no other."""

    required: dict[str, Any]
    optional: dict[str, Any]


@dataclass(frozen=True)
class Words:
    """A mapping from names to one kind of value."""

    value: Any


def fields(required: dict[str, Any], **optional: Any) -> Fields:
    return Fields(required, optional)


RESOURCES = fields({}, requests=Words(QUANTITY), limits=Words(QUANTITY))
CONTAINER = fields(
    {"name": str, "image": str},
    workingDir=str,
    command=[str],
    args=[str],
    env=[fields({"name": str, "value": str})],
    lifecycle=fields({}, preStop=fields({"exec": fields({"command": [str]})})),
    resources=RESOURCES,
    volumeMounts=[fields({"name": str, "mountPath": str})],
)
VOLUME = fields(
    {"name": str},
    persistentVolumeClaim=fields({"claimName": str}),
    emptyDir=fields({}, medium=str, sizeLimit=QUANTITY),
)
POD = fields({"containers": [CONTAINER]}, terminationGracePeriodSeconds=int, volumes=[VOLUME])
TEMPLATE = fields({"spec": POD}, metadata=fields({}, labels=Words(str)))
WORKERS = fields(
    {"groupName": str, "minReplicas": int, "maxReplicas": int, "rayStartParams": Words(str), "template": TEMPLATE},
    replicas=int,
    numOfHosts=int,
)
CLUSTER = fields(
    {"headGroupSpec": fields({"rayStartParams": Words(str), "template": TEMPLATE})},
    workerGroupSpecs=[WORKERS],
    rayVersion=str,
    enableInTreeAutoscaling=bool,
    suspend=bool,
)
JOB = fields(
    {"entrypoint": str, "rayClusterSpec": CLUSTER},
    backoffLimit=int,
    activeDeadlineSeconds=int,
    shutdownAfterJobFinishes=bool,
    ttlSecondsAfterFinished=int,
    submissionMode=str,
    suspend=bool,
)
CLAIM = fields({"accessModes": [str], "resources": RESOURCES}, storageClassName=str)
KINDS = {
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("ray.io/v1", "RayJob"): JOB,
    ("v1", "PersistentVolumeClaim"): CLAIM,
}


def mistakes(value: Any, wanted: Any, place: str) -> list[str]:
    """What does not fit, each with its place."""
    if isinstance(wanted, Fields):
        if not isinstance(value, dict):
            return [f"{place} is no mapping"]
        known = {**wanted.required, **wanted.optional}
        found = [f"{place}.{name} is missing" for name in wanted.required if name not in value]
        found += [f"{place}.{name} is unknown" for name in value if name not in known]
        return found + [text for name in value if name in known for text in mistakes(value[name], known[name], f"{place}.{name}")]
    if isinstance(wanted, Words):
        return [text for name in value for text in mistakes(value[name], wanted.value, f"{place}.{name}")]
    if isinstance(wanted, list):
        return [text for number, item in enumerate(value) for text in mistakes(item, wanted[0], f"{place}[{number}]")]
    if isinstance(wanted, re.Pattern):
        return [] if isinstance(value, str) and wanted.fullmatch(value) else [f"{place}: {value!r} is no quantity"]
    return [] if type(value) is wanted else [f"{place}: {value!r} is no {wanted.__name__}"]


def check(resource: dict[str, Any]) -> None:
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", resource["metadata"]["name"])
    wanted = KINDS[(resource["apiVersion"], resource["kind"])]
    assert mistakes(resource["spec"], wanted, resource["kind"]) == []
    assert resource.keys() <= {"apiVersion", "kind", "metadata", "spec"}
    for pod in pods(resource):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"strop-shared"} == {
            v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v
        }
    if pods(resource):
        head = pods(resource)[0]
        command = head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert (FOLDER / Path(command[1]).name).is_file()
        assert int(command[2]) < head["terminationGracePeriodSeconds"]


def pods(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's and the workers' pods."""
    if resource["kind"] == "PersistentVolumeClaim":
        return []
    cluster = resource["spec"] if resource["kind"] == "RayCluster" else resource["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


@pytest.mark.parametrize("name", ["shared-folder.yaml", "cluster/raycluster.yaml", "job/rayjob.yaml"])
def test_a_manifest_has_the_fields_that_its_kind_knows(name: str) -> None:
    for resource in yaml.safe_load_all((FOLDER / name).read_text()):
        check(resource)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl lays the overlays over the manifests")
@pytest.mark.parametrize("name", ["cluster", "job", "cluster-gpu", "job-gpu"])
def test_an_overlay_gives_a_manifest_in_which_all_pods_have_the_same_image_and_gpus(name: str) -> None:
    made = subprocess.run(["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=True).stdout
    (resource,) = yaml.safe_load_all(made)
    check(resource)
    device = "gpu" if name.endswith("gpu") else "cpu"
    containers = [container for pod in pods(resource) for container in pod["containers"]]
    assert {container["image"] for container in containers} == {f"strop:{device}"}
    gpus = {container["resources"]["limits"].get("nvidia.com/gpu") for container in containers}
    assert gpus == ({"8"} if device == "gpu" else {None})
    if name == "job-gpu":
        assert "cluster.gpus_per_node=8" in resource["spec"]["entrypoint"]


def test_stopping_waits_for_the_run_to_save_and_tells_the_run_alone(tmp_path: Path) -> None:
    script = tmp_path / "run_it_for_a_test.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "child = os.fork()\n"  # has the run's command line, as forked engines have
        "name = 'run' if child else 'fork'\n"
        "def save(*_):\n"
        "    time.sleep(1 if child else 0)\n"
        f"    pathlib.Path({str(tmp_path)!r}, name + '-told').touch()\n"
        "    if child: os.kill(child, signal.SIGKILL)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"pathlib.Path({str(tmp_path)!r}, name + '-ready').touch()\n"
        "time.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, str(script)])
    while not ((tmp_path / "run-ready").exists() and (tmp_path / "fork-ready").exists()):
        time.sleep(0.05)
    pattern = r"(strop|run_[a-z_]+\.py)"
    text = (FOLDER / "stop-run.sh").read_text()
    assert pattern in text and re.fullmatch(pattern, script.name)
    text = text.replace(pattern, r"run_it_for_a_test\.py")  # in a pod there is one run; here it must not find those of others
    assert subprocess.Popen(["bash", "-c", text, "stop-run.sh", "30"]).wait(60) == 0
    assert (tmp_path / "run-told").exists() and not (tmp_path / "fork-told").exists()
    assert run.wait(10) == 0
