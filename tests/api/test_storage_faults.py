"""A full disk under the adapters, as the client and the operator see it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import httpx
import pytest
from peft_uploads import form, make_adapter
from site_fixture import Site

from loramux.data.storage.objects import Folder


def counted(site: Site, cause: str) -> float:
    (line,) = [
        line
        for line in httpx.get(f"{site.url}/metrics").text.splitlines()
        if line.startswith(f'loramux_storage_faults_total{{cause="{cause}"}}')
    ]
    return float(line.split()[-1])


@pytest.mark.parametrize(
    ("number", "cause", "words"),
    [(errno.ENOSPC, "full", "make room"), (errno.EACCES, "denied", "may not use"), (errno.ETIMEDOUT, "slow", "slowly")],
)
def test_upload_to_a_failing_disk_is_told_its_cause_and_logged_with_errno(
    site: Site,
    base_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    cause: str,
    words: str,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/srv/blobs/x")

    before = counted(site, cause)
    upload = form(make_adapter(base_dir, tmp_path, seed=21), "unlucky")
    with site.http() as client:
        monkeypatch.setattr(Folder, "_place", fail)
        refused = client.post("/v1/adapters", **upload)
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert (error["code"], words in error["message"]) == (f"storage_{cause}", True)
        assert "/srv/blobs" not in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        lines = [record.getMessage() for record in caplog.records if "storage fault" in record.getMessage()]
        assert lines
        assert all(f"cause {cause}, errno {errno.errorcode[number]}" in line for line in lines)
        assert counted(site, cause) > before
        monkeypatch.undo()
        assert client.post("/v1/adapters", **upload).status_code == 201
        client.delete("/v1/adapters/unlucky", params={"undo_s": 0})
