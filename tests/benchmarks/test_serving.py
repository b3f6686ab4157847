"""Server processes of a comparison: waited for, explained when they die, and always ended."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from peers.serving import Command, SystemFailed, free_port, running

SERVER = """
import http.server, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
if "{stubborn}": signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


def command(tmp_path: Path, code: str, port: int) -> Command:
    return Command([sys.executable, "-c", code], f"http://127.0.0.1:{port}/", tmp_path / "logs" / "server.log", {})


@pytest.mark.parametrize("stubborn", ["", "yes"])
def test_a_server_is_up_inside_and_gone_with_its_children_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: str
) -> None:
    monkeypatch.setattr("peers.serving.STOP_SECONDS", 0.5)
    port = free_port()
    server = command(tmp_path, SERVER.format(port=port, stubborn=stubborn), port)
    with running(server) as (pid, start_s):
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        assert len(tree) == 2
        assert start_s > 0
    _, alive = psutil.wait_procs(tree, timeout=10)
    assert alive == []


def test_a_server_that_dies_is_explained_by_its_log(tmp_path: Path) -> None:
    dying = command(tmp_path, "import sys; print('no such model'); sys.exit(3)", free_port())
    with pytest.raises(SystemFailed, match=r"(?s)ended with 3; the end of .*no such model"), running(dying):
        pass


def test_a_server_that_is_never_ready_is_given_up_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.serving.START_SECONDS", 0.5)
    idle = command(tmp_path, "import time; print('loading', flush=True); time.sleep(600)", free_port())
    with pytest.raises(SystemFailed, match=r"(?s)not ready in 0 s"), running(idle):
        pass
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(idle.arguments)]
