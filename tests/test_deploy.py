"""The image's settings, the compose file and the Kubernetes manifests: valid, and true to the server's settings."""

from __future__ import annotations

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
SETTINGS = (
    ROOT / "configs/container.toml",
    BASE / "loramux.toml",
    DEPLOY / "kubernetes/overlays/kuberay/loramux.toml",
)
OVERLAYS = ("single-gpu", "kuberay")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl (Debian: kubernetes-client)")


def built(overlay: str) -> list[dict]:
    """Return the manifests that `kubectl apply -k` would send."""
    folder = DEPLOY / "kubernetes/overlays" / overlay
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def images_in(document: object) -> set[str]:
    """Every container's image below `document`."""
    if isinstance(document, list):
        return set().union(*(images_in(one) for one in document))
    if not isinstance(document, dict):
        return set()
    named = {one["image"] for key in ("containers", "initContainers") for one in document.get(key, ())}
    return named.union(*(images_in(value) for value in document.values()))


def documents(folder: Path) -> list[dict]:
    files = [file for file in sorted(folder.glob("*.yaml")) if file.name != "kustomization.yaml"]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


@pytest.mark.parametrize("file", SETTINGS, ids=lambda file: str(file.relative_to(ROOT)))
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


@needs_kubectl
def test_overlay_for_one_gpu_builds() -> None:
    by_kind = {one["kind"]: one for one in built("single-gpu")}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith("/loramux:cuda")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert tomllib.loads(by_kind["ConfigMap"]["data"]["loramux.toml"])["server"]["internal_port"] == 9090
    assert by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "loramux"}
    for document in by_kind.values():
        if document["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@needs_kubectl
def test_overlay_for_kuberay_builds_and_its_parts_agree() -> None:
    """The operator's own schema is not in kubernetes-validate: its pod templates are, and the other fields."""
    folder = DEPLOY / "kubernetes/overlays/kuberay"
    made = built("kuberay")
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


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_names_images_of_a_registry(overlay: str) -> None:
    """A node pulls `loramux:cuda` from Docker Hub, where it is not; the base's own name is replaced everywhere."""
    images = images_in(built(overlay))
    assert len(images) == 1
    assert "/" in images.pop().partition(":")[0]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_lets_several_pods_read_the_models(overlay: str) -> None:
    """Pods on several nodes mount a claim together only if its access mode is for many nodes."""
    made = built(overlay)
    (claim,) = [one for one in made if one["kind"] == "PersistentVolumeClaim"]
    (server,) = [one for one in made if one["kind"] == "Deployment"]
    assert claim["spec"]["accessModes"] == ["ReadOnlyMany"]
    (models,) = [one for one in server["spec"]["template"]["spec"]["volumes"] if one["name"] == "models"]
    assert models["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"], "readOnly": True}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_leaves_the_number_of_pods_to_one_of_autoscaler_and_deployment(overlay: str) -> None:
    """A Deployment with `replicas` under an autoscaler goes back to that number at each apply."""
    made = built(overlay)
    (server,) = [one for one in made if one["kind"] == "Deployment"]
    has_autoscaler = any(one["kind"] == "HorizontalPodAutoscaler" for one in made)
    assert ("replicas" in server["spec"]) != has_autoscaler


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policy_lets_traces_out(overlay: str) -> None:
    made = built(overlay)
    (policy,) = [one for one in made if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "loramux"]
    out = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())}
    assert out >= {53, 443, 4318, 5432}


def test_compose_mounts_files_that_exist_and_publishes_to_this_machine_only() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), volume
    assert int(services["loramux"]["stop_grace_period"].removesuffix("s")) >= 140


def test_blob_options_of_the_settings_are_the_stores_own() -> None:
    """Options that belong to the client (allow_http) end the server's start."""
    for file in SETTINGS:
        records = load_settings(file).records
        open_objects(records.blobs, records.blob_options)


@pytest.mark.parametrize("script", ["deploy/try.sh", "deploy/try/image.sh"])
def test_script_is_executable_and_parses(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
