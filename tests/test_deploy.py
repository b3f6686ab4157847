"""The image's settings, the compose file and the Kubernetes manifests: valid, and true to the server's settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from loramux.common.settings.file import load_settings
from loramux.data.storage.objects import open_objects

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes/base"
KUBERNETES = "1.30"
SETTINGS = (DEPLOY / "loramux.toml", BASE / "loramux.toml", DEPLOY / "kubernetes/overlays/kuberay/loramux.toml")


def documents(folder: Path) -> list[dict]:
    files = [file for file in sorted(folder.glob("*.yaml")) if file.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_settings_are_valid_and_name_the_internal_port(file: Path) -> None:
    settings = load_settings(file)
    assert settings.server.internal_port == 9090
    assert settings.logging.format == "json"


@pytest.mark.parametrize("document", documents(BASE), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_manifest_matches_kubernetes_schema(document: dict) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_wrong_manifest_is_found() -> None:
    (server,) = [one for one in documents(BASE) if one["kind"] == "Deployment"]
    server["spec"]["template"]["spec"]["terminationGrace"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(server, KUBERNETES, strict=True)


def test_pod_has_time_to_drain_and_leaves_the_load_balancer_first() -> None:
    (server,) = [one for one in documents(BASE) if one["kind"] == "Deployment"]
    pod = server["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = load_settings(BASE / "loramux.toml").server
    ready = container["readinessProbe"]
    assert pod["terminationGracePeriodSeconds"] >= settings.lame_duck_seconds + settings.drain_seconds + 10
    assert ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"] <= settings.lame_duck_seconds
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"api": settings.port, "internal": settings.internal_port}
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/var/lib/loramux", "/tmp"}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (Debian: kubernetes-client)")
def test_overlay_for_one_gpu_builds() -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes/overlays/single-gpu")],
        capture_output=True,
        text=True,
        check=True,
    )
    by_kind = {one["kind"]: one for one in yaml.safe_load_all(built.stdout)}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "loramux:cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert tomllib.loads(by_kind["ConfigMap"]["data"]["loramux.toml"])["server"]["internal_port"] == 9090
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "loramux"}
    for document in by_kind.values():
        if document["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (Debian: kubernetes-client)")
def test_overlay_for_kuberay_builds_and_its_parts_agree() -> None:
    """The operator's own schema is not in kubernetes-validate: its pod templates are, and the fields beside them."""
    folder = DEPLOY / "kubernetes/overlays/kuberay"
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    made = list(yaml.safe_load_all(built.stdout))
    for document in made:
        if document["kind"] != "RayCluster":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
    (cluster,) = [one for one in made if one["kind"] == "RayCluster"]
    (server,) = [one for one in made if one["kind"] == "Deployment"]
    assert not [one for one in made if one["kind"] == "HorizontalPodAutoscaler"]
    spec, name = cluster["spec"], cluster["metadata"]["name"]
    assert spec.keys() == {
        "rayVersion",
        "enableInTreeAutoscaling",
        "autoscalerOptions",
        "headGroupSpec",
        "workerGroupSpecs",
    }
    assert spec["headGroupSpec"].keys() == {"rayStartParams", "template"}
    (workers,) = spec["workerGroupSpecs"]
    assert workers.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in (spec["headGroupSpec"], workers):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay wants strings"
    settings = load_settings(folder / "loramux.toml")
    (base,), ray = settings.bases, settings.fleet.ray
    (node,) = server["spec"]["template"]["spec"]["initContainers"]
    address = f"{name}-head-svc:6379"
    assert (settings.fleet.launcher, ray.address) == ("ray", address)
    assert f"--address={address}" in node["command"]
    assert {node["image"]} == {
        container["image"]
        for group in (server["spec"], spec["headGroupSpec"], workers)
        for container in group["template"]["spec"]["containers"]
    }
    (worker,) = workers["template"]["spec"]["containers"]
    resources = worker["resources"]
    assert float(resources["limits"]["nvidia.com/gpu"]) == ray.num_gpus
    assert float(resources["requests"]["cpu"]) >= ray.num_cpus
    assert workers["rayStartParams"]["num-cpus"] == resources["requests"]["cpu"]
    assert workers["rayStartParams"]["num-gpus"] == resources["limits"]["nvidia.com/gpu"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (base.engines.min, base.engines.most)
    assert {"mountPath": str(Path(base.path).parent), "name": "models", "readOnly": True} in worker["volumeMounts"]


def test_compose_mounts_files_that_exist_and_publishes_to_this_machine_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
    assert int(services["loramux"]["stop_grace_period"].removesuffix("s")) >= 140


def test_image_runs_as_a_user_and_copies_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "USER 10001:10001" in text
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()


def test_image_gets_what_it_is_built_from_and_nothing_else() -> None:
    """`COPY . .` takes what .dockerignore lets through: every package of the wheel, and no environment."""
    let_through = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*build["only-include"], "client", "pyproject.toml", "README.md", "LICENSE", "deploy/loramux.toml"}
    assert let_through == needed
    assert all((ROOT / name).exists() for name in needed)


def test_blob_options_of_the_settings_are_the_stores_own() -> None:
    """Options that belong to the client (allow_http) end the server's start."""
    for file in SETTINGS:
        records = load_settings(file).records
        open_objects(records.blobs, records.blob_options)


@pytest.mark.parametrize("script", ["deploy/try.sh", "deploy/try/image.sh"])
def test_script_is_executable_and_parses(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
