"""Uploads over a line that is cut anywhere: every byte arrives once, in its place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loramux_client import Bucket, FilesMissing, Hub, Progress, RetryPolicy, UploadRejected, UploadUnfinished, uploads
from loramux_client.flow import SyncRunner, Wait
from loramux_client.uploads import FILES, fetch, push, read_source, resume

PART_BYTES = 100


class Instant(SyncRunner):
    def _perform(self, step: Any) -> Any:
        return None if isinstance(step, Wait) else super()._perform(step)


class Server:
    """/v1/uploads as the API has it. `cuts`: of each PUT, how many bytes arrive before the line breaks; None: all."""

    def __init__(self, cuts: Iterator[int | None] = iter(())) -> None:  # noqa: B008
        self.uploads: dict[str, dict[str, Any]] = {}
        self.bytes: dict[tuple[str, str], bytearray] = {}
        self.cuts = cuts
        self.checks = 2
        self.error: dict[str, str] | None = None
        self.fetched: dict[str, str] | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        parts = request.url.path.split("/")[3:]
        if request.method == "POST" and not parts:
            return httpx.Response(201, json=self._create(json.loads(request.content)))
        if not parts:
            return httpx.Response(200, json={"data": list(self.uploads.values())})
        upload = self.uploads[parts[0]]
        if request.method == "PUT":
            return self._put(request, upload, parts[2])
        if parts[1:] == ["complete"]:
            upload["state"] = "validating"
            return httpx.Response(202, json=upload)
        if upload["state"] == "validating":
            self.checks -= 1
            if not self.checks:
                upload |= {"state": "rejected" if self.error else "ready", "error": self.error}
        return httpx.Response(200, json=upload)

    def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        id = f"upload-{len(self.uploads)}"
        self.fetched = body.pop("source", None)
        body.setdefault("files", {})
        files = [{"name": name, **file, "received": 0} for name, file in body["files"].items()]
        for name in body["files"]:
            self.bytes[id, name] = bytearray()
        self.uploads[id] = {
            "id": id,
            "adapter": f"acme/{body['adapter']}",
            "state": "validating" if self.fetched else "uploading",
            "files": files,
            "created_at": 1,
            "promote": body["promote"],
        }
        return self.uploads[id]

    def _put(self, request: httpx.Request, upload: dict[str, Any], name: str) -> httpx.Response:
        file = next(one for one in upload["files"] if one["name"] == name)
        if int(request.url.params["offset"]) != file["received"]:
            return httpx.Response(409, json={"error": {"message": "wrong offset", "code": "wrong_offset"}})
        cut = next(self.cuts, None)
        content = self.bytes[upload["id"], name]
        content += request.content if cut is None else request.content[:cut]
        file["received"] = len(content)
        if cut is not None:
            raise httpx.ReadError("cut", request=request)
        return httpx.Response(200, json=file)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", PART_BYTES)


def runner(server: Server) -> Instant:
    return Instant(httpx.Client(base_url="http://harness", transport=httpx.MockTransport(server)), RetryPolicy())


def folder_with(root: Path, config: bytes, weights: bytes) -> Path:
    for name, content in zip(FILES, (config, weights), strict=True):
        (root / name).write_bytes(content)
    return root


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    weights=st.binary(min_size=1, max_size=5 * PART_BYTES),
    cuts=st.lists(st.none() | st.integers(0, PART_BYTES), max_size=7),
)
def test_upload_over_a_broken_connection_sends_every_byte_once(
    tmp_path: Path, weights: bytes, cuts: list[int | None]
) -> None:
    server = Server(iter(cuts))
    folder = folder_with(tmp_path, b"{}", weights)
    seen: list[Progress] = []
    upload = runner(server).run(push(folder, "bot", on_progress=seen.append))
    assert upload.state == "ready"
    assert bytes(server.bytes[upload.id, FILES[1]]) == weights
    assert bytes(server.bytes[upload.id, FILES[0]]) == b"{}"
    sent = [one.done for one in seen if one.stage == "sending" and one.file == FILES[1]]
    assert sent == sorted(sent)
    assert sent[-1] == len(weights)
    assert next(file for file in upload.files if file.name == FILES[1]).sha256 == hashlib.sha256(weights).hexdigest()


def test_push_resumes_an_interrupted_push(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, b"{}", b"w" * 450)
    server = Server(iter([None, None, None, *[0] * 50]))
    with pytest.raises(uploads.ConnectionFailed):
        runner(server).run(push(folder, "bot"))
    assert server.uploads["upload-0"]["files"][1]["received"] == 200
    server.cuts = iter(())
    assert runner(server).run(push(folder, "bot")).id == "upload-0"
    assert server.bytes["upload-0", FILES[1]] == b"w" * 450
    server.checks = 1
    folder_with(tmp_path, b"{}", b"v" * 450)
    assert runner(server).run(push(folder, "bot")).id == "upload-1"


def test_resume_continues_an_upload_by_id(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, b"{}", b"w" * 250)
    server = Server(iter([None, None, *[0] * 50]))
    with pytest.raises(uploads.ConnectionFailed):
        runner(server).run(push(folder, "bot", promote=False))
    server.cuts = iter(())
    assert runner(server).run(resume("upload-0", folder)).state == "ready"


def test_fetch_sends_the_source(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert read_source(f"hf:acme/support@{commit}") == Hub(hub="hf", repo="acme/support", commit=commit)
    found = read_source(f"hf:acme/support@{commit}/runs/sql")
    assert found == Hub(hub="hf", repo="acme/support", commit=commit, subfolder="runs/sql")
    assert read_source("s3://tuned/support/") == Bucket(url="s3://tuned/support/")
    assert read_source("hf:acme/support@main") is None
    server = Server()
    for source in (Bucket(url="s3://tuned/a/"), Hub(hub="hf", repo="acme/a", commit=commit)):
        server.checks = 2
        upload = runner(server).run(fetch("bot", source, promote=False))
        assert (upload.state, upload.promote) == ("ready", False)
        assert server.fetched == {name: getattr(source, name) for name in source.__struct_fields__}


def test_push_rejected_raises_with_code_and_param(tmp_path: Path) -> None:
    server = Server()
    server.error = {"code": "not_finite", "message": "lora_A has a NaN", "param": "lora_A"}
    with pytest.raises(UploadRejected, match="NaN") as told:
        runner(server).run(push(folder_with(tmp_path, b"{}", b"w"), "bot"))
    assert (told.value.code, told.value.param) == ("not_finite", "lora_A")


def test_push_times_out_while_validating(tmp_path: Path) -> None:
    server = Server()
    server.checks = 10**9
    with pytest.raises(UploadUnfinished, match="upload-0"):
        runner(server).run(push(folder_with(tmp_path, b"{}", b"w"), "bot", timeout=20))


def test_push_without_files_raises_before_sending(tmp_path: Path) -> None:
    (tmp_path / FILES[0]).write_bytes(b"{}")
    with pytest.raises(FilesMissing, match="save_pretrained"):
        runner(Server()).run(push(tmp_path, "bot"))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (("adapter_config.json", "adapter_model-00001-of-00002.safetensors"), "sharded"),
        (("adapter_config.json", "adapter_model.safetensors.index.json"), "sharded"),
        (("default/adapter_config.json", "default/adapter_model.safetensors"), "push one of its folders: .*/default"),
        (("README.md", "second/adapter_config.json", "first/adapter_config.json"), "folders: .*/first, .*/second"),
        (("adapter_config.json", "adapters.safetensors"), "lora_alpha is its scale times its rank"),
        (("adapter_config.json", "adapter_model.bin"), "pickle"),
        (("config.json", "model-00001-of-00002.safetensors"), "whole model"),
        (("config.json", "pytorch_model.bin"), "whole model"),
        (("trainer_state.json", "pytorch_model_fsdp_0/__0_0.distcp"), "trainer.save_model"),
        (("zero_to_fp32.py", "global_step2/mp_rank_00_model_states.pt"), "trainer.save_model"),
    ],
)
def test_push_of_another_form_says_which_it_is(tmp_path: Path, files: tuple[str, ...], reason: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(FilesMissing, match=reason):
        runner(Server()).run(push(tmp_path, "bot"))


def test_push_of_a_shrinking_file_raises(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, b"{}", b"w" * 450)
    shrink = lambda progress: (folder / FILES[1]).write_bytes(b"w" * 150) if progress.stage == "sending" else None  # noqa: E731
    with pytest.raises(FilesMissing, match="450"):
        runner(Server()).run(push(folder, "bot", on_progress=shrink))
