"""Cost of each attack: run by hand on a quiet machine, `pytest tests/attacks/test_cost.py -m slow -s`."""

from __future__ import annotations

import time

import pytest
from attacked_server import Harness, ended, in_pieces
from attacks import ATTACKS

MEMORY = 200 << 20


@pytest.mark.slow
def test_what_each_attack_costs(harness: Harness) -> None:
    """Seconds of the one-shot upload to its refusal; peak memory of the process that checked it."""
    before, lines, peaks = harness.resident_bytes(), [], []
    with harness.server.http(harness.key) as client:
        for attack in ATTACKS:
            files = attack.change(harness.sound)
            start = time.monotonic()
            assert harness.upload(files).json()["error"]["code"] == attack.code
            seconds = time.monotonic() - start
            upload = ended(client, in_pieces(client, files))
            usage = upload["report"]["usage"]
            assert client.delete(f"/v1/uploads/{upload['id']}").status_code == 200
            peaks.append(usage["peak_bytes"])
            lines.append(f"| {attack.name} | {attack.code} | {seconds:.2f} | {usage['peak_bytes'] >> 20} |")
    grown = harness.resident_bytes() - before
    print("\n| attack | refused as | s | peak MiB of the check |\n|---|---|---|---|", *lines, sep="\n")
    print(f"server: {before >> 20} MiB before, {grown >> 20} MiB more after {2 * len(ATTACKS)} attacks")
    assert max(peaks) < MEMORY
    assert grown < MEMORY
