"""A soak test: the real server runs for hours while adapters change, and its memory, descriptors, pages and disk are
recorded to find growth.

    python benchmarks/soak.py --minutes 120 --rate 4 --out build/soak
    python benchmarks/soak.py --minutes 12          # a tenth of the time: pytest -m slow tests/benchmarks/test_soak.py

64 clients send requests to six adapters, the base, and adapters that are added and deleted; some clients disconnect in
the middle of a stream. At the same time adapters are uploaded, released as canaries, promoted, rolled back, pinned,
deleted, restored, and uploads are cancelled. Every upload has a new digest, with the weights of one of the shipped
adapters. So every answer can be compared with the model's answer to the same prompt alone.

The folder `--out` gets samples.csv, soak.png and summary.json. The exit code is 0 if no series grew, no answer was
wrong and the ledger has every token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from progress import say
from safetensors import safe_open
from safetensors.torch import save_file
from soak_watch import Watch, metrics_of, summary_of

from loramux_client import AsyncClient
from loramux_client.errors import ClientError, Conflict, LimitReached
from loramux_client.uploads import describe
from loramux_demo.assets import MODEL_NAME, OWNERS, adapter_folder, completion_prompt, load_prompts
from loramux_demo.server import DemoServer, Workspace, create_customers, free_port, running_server
from loramux_demo.tour import Customer

CLIENTS = 64
ROWS = 8
"""Sequences in a step: few enough that requests of 64 clients wait for each other now and then."""
QUESTIONS = 6
MAX_TOKENS = 40
TENANT = "acme"
STYLES = OWNERS[TENANT]
LEAVE_SHARE = 0.15
LIVE_ADAPTERS = 3
REVISIONS_OF_A_LIFE = 5
EXPECTED_CONFLICTS = (Conflict, LimitReached)
REST_SECONDS = 60.0
TIMEOUT = httpx.Timeout(300.0, connect=30.0)


@dataclass
class Life:
    """An adapter that is made, changed and deleted."""

    name: str
    styles: dict[int, str] = field(default_factory=dict)
    """The shipped adapter whose weights each revision has, including deleted revisions."""
    numbers: set[int] = field(default_factory=set)
    """Revisions that are not deleted."""
    is_over: bool = False


@dataclass(frozen=True)
class Told:
    """An answer to check. The revision that gave it may become known only later."""

    model: str
    question: str
    text: str


@dataclass
class Soak:
    """Clients and changes on one server."""

    url: str
    keys: dict[str, str]
    folder: Path
    rate: float
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    lives: list[Life] = field(default_factory=list)
    expected: dict[tuple[str | None, str], str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    unchecked: list[Told] = field(default_factory=list)
    wrong: list[Told] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    async def run(self, watch: Watch, seconds: float, change_seconds: float) -> None:
        """Learn the answers, then let clients and changes run for `seconds`, sampling."""
        limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT, limits=limits, trust_env=False) as http,
            AsyncClient(self.url, api_key=self.keys[TENANT]) as customer,
        ):
            await self.learn(http)
            tasks = [asyncio.create_task(self.client(http, number)) for number in range(CLIENTS)]
            tasks.append(asyncio.create_task(self.change_on(customer, change_seconds)))
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                done, _ = await asyncio.wait(tasks, timeout=min(watch.period, max(0.1, until - time.monotonic())))
                for task in done:
                    task.result()  # raises an error if a client of this benchmark has failed
                self.check()
                watch.sample(self.counts)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.end_lives(customer)
        self.check()

    async def learn(self, http: httpx.AsyncClient) -> None:
        """Ask every question of every model while nothing else runs."""
        questions = list(dict.fromkeys(prompt.question for prompt in load_prompts()))[:QUESTIONS]
        for tenant, styles in OWNERS.items():
            for style in (*styles, None):
                for question in questions:
                    model = MODEL_NAME if style is None else f"{tenant}/{style}"
                    told = await self.ask(http, tenant, model, question, leaves=False)
                    assert told is not None, dict(self.faults)
                    self.expected[style, question] = told.text

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        """Ask at this client's share of the rate until cancelled."""
        chance = random.Random(number)
        questions = sorted({question for _, question in self.expected})
        while True:
            await asyncio.sleep(chance.expovariate(self.rate / CLIENTS))
            tenant = chance.choice(list(OWNERS))
            names = [f"{tenant}/{style}" for style in OWNERS[tenant]] + [MODEL_NAME]
            if tenant == TENANT:
                names += [
                    f"{TENANT}/{life.name}"
                    for life in self.lives
                    if life.numbers and not life.is_over
                    for _ in range(2)
                ]
            told = await self.ask(
                http, tenant, chance.choice(names), chance.choice(questions), leaves=chance.random() < LEAVE_SHARE
            )
            if told is not None:
                self.unchecked.append(told)

    async def ask(
        self, http: httpx.AsyncClient, tenant: str, model: str, question: str, *, leaves: bool
    ) -> Told | None:
        """Send one streamed completion; None if the stream was left, refused or failed, which is counted."""
        body = {
            "model": model,
            "prompt": completion_prompt(question),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        text, answered_by, events = "", "", 0
        try:
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    return self._refused(model, answer)
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        self.faults[f"stream: {chunk['error']['code']}"] += 1
                        return None
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    answered_by, events = chunk["model"], events + 1
                    if leaves and events == 2:
                        self.counts["left"] += 1
                        return None
        except httpx.TransportError as error:
            self.faults[type(error).__name__] += 1
            return None
        self.counts["answered"] += 1
        return Told(answered_by, question, text)

    def _refused(self, model: str, answer: httpx.Response) -> None:
        """Count a refusal: a model may be deleted before a request for it arrives; every other refusal is a fault."""
        over = {f"{TENANT}/{life.name}" for life in self.lives if life.is_over}
        if answer.status_code == 404 and model in over:
            self.counts["gone"] += 1
        else:
            self.faults[f"{answer.status_code}: {answer.text[:200]}"] += 1

    def check(self) -> None:
        """Compare the answers whose revision is known with the answers that this revision gave alone."""
        styles = {
            f"{TENANT}/{life.name}@{number}": style for life in self.lives for number, style in life.styles.items()
        }
        later = []
        for told in self.unchecked:
            name, _, _ = told.model.partition("@")
            style = styles.get(told.model, name.partition("/")[2] or None)
            if (style, told.question) not in self.expected:
                later.append(told)
                continue
            self.counts["checked"] += 1
            if self.expected[style, told.question] != told.text:
                self.wrong.append(told)
        self.unchecked = later

    async def change_on(self, customer: AsyncClient, seconds: float) -> None:
        """Make one change every `seconds` until cancelled."""
        while True:
            await self.change(customer)
            await asyncio.sleep(seconds)

    async def change(self, customer: AsyncClient) -> None:
        """Begin, continue or end one adapter's life."""
        living = [life for life in self.lives if not life.is_over]
        if len(living) < LIVE_ADAPTERS:
            living.append(Life(f"bot-{len(self.lives)}"))
            self.lives.append(living[-1])
        life = living[-1] if not living[-1].numbers else self.chance.choice(living)
        numbers = sorted(life.numbers)
        actions: dict[str, Any] = {"upload": self.upload, "cancelled upload": self.cancel_upload}
        if len(numbers) > 1:
            some = self.chance.choice(numbers)
            actions |= {
                "canary": lambda: customer.adapters.canary(life.name, some, self.chance.randint(1, 99)),
                "promote": lambda: customer.adapters.promote(life.name, some),
                "rollback": lambda: customer.adapters.rollback(life.name),
                "pin": lambda: self.pin(customer, life.name, some),
                "delete revision": lambda: self.delete_revision(customer, life, some),
            }
        name = self.chance.choice(list(actions)) if numbers else "upload"
        if len(life.styles) >= REVISIONS_OF_A_LIFE:
            name, actions["delete"] = "delete", lambda: self.delete(customer, life)
        try:
            if name in ("upload", "cancelled upload"):
                await actions[name](customer, life)
            else:
                await actions[name]()
        except (*EXPECTED_CONFLICTS, ValueError):
            name = "refused"
        except ClientError as error:
            self.faults[f"{name}: {error}"] += 1
        self.counts[f"change: {name}"] += 1

    async def upload(self, customer: AsyncClient, life: Life) -> None:
        style = self.chance.choice(STYLES)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            self._write(style, Path(folder))
            upload = await customer.uploads.push(
                folder, life.name, promote=not life.numbers or self.chance.random() < 0.5
            )
        assert upload.revision is not None, "push() waits until it is ready"
        number = int(upload.revision.rpartition("@")[2])
        life.styles[number] = style
        life.numbers.add(number)

    async def cancel_upload(self, customer: AsyncClient, life: Life) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            self._write(self.chance.choice(STYLES), Path(folder))
            sizes = await customer.run(describe(Path(folder)))
            upload = await customer.uploads.create(life.name, sizes)
            first = (Path(folder) / "adapter_model.safetensors").read_bytes()[:100_000]
            await customer.uploads.put_part(upload.id, "adapter_model.safetensors", 0, first)
            await customer.uploads.cancel(upload.id)

    async def pin(self, customer: AsyncClient, name: str, number: int) -> None:
        await customer.adapters.pin(name, number)
        await customer.adapters.unpin(name, number)

    async def delete_revision(self, customer: AsyncClient, life: Life, number: int) -> None:
        await customer.adapters.delete_revision(life.name, number)
        life.numbers.discard(number)

    async def delete(self, customer: AsyncClient, life: Life) -> None:
        """Delete the adapter; sometimes restore it for a moment."""
        life.is_over = True  # counted before the call, because a request that was already sent may not find the adapter
        if self.chance.random() < 0.3:
            await customer.adapters.delete(life.name)
            await customer.adapters.undelete(life.name)
        await customer.adapters.delete(life.name)

    async def end_lives(self, customer: AsyncClient) -> None:
        for life in self.lives:
            if not life.is_over and life.styles:
                await self.delete(customer, life)

    def _write(self, style: str, folder: Path) -> None:
        """Write an adapter with the weights of `style` and a new digest."""
        source = adapter_folder(style)
        (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
        with safe_open(source / "adapter_model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        mark = {"format": "pt", "made": f"{self.chance.getrandbits(64):x}"}
        save_file(tensors, folder / "adapter_model.safetensors", metadata=mark)


def prepare(folder: Path) -> Workspace:
    """A server whose deletions are final after the shortest time, with few rows in a step."""
    folder.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(folder / "server", free_port(None))
    workspace.prepare()
    text = workspace.config.read_text().replace("[engine]\n", f"[engine]\nmax_num_seqs = {ROWS}\nnum_threads = 1\n")
    workspace.config.write_text(f"{text}\n[adapters]\nundo_seconds = 0\n")
    return workspace


def soak(folder: Path, out: Path, *, seconds: float, rate: float, change_seconds: float) -> dict[str, Any]:
    """Run the whole test and return the summary. The files are in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    workspace = prepare(folder)
    keys = create_customers(workspace)
    with running_server(workspace) as server, server.explain_failures():
        server.wait_until_ready()
        for tenant, key in keys.items():
            Customer(tenant, workspace.url, key).upload_adapters()
        made = Soak(workspace.url, keys, folder, rate)
        watch = Watch(workspace, server.pid, out, period=max(2.0, seconds / 720))
        asyncio.run(made.run(watch, seconds, change_seconds))
        at_rest = wait_for_rest(server, workspace.url)
    reconciled = workspace.loramux("usage", "reconcile")
    return summary_of(watch, made, at_rest, reconciled["entries"])


def wait_for_rest(server: DemoServer, url: str) -> dict[str, float]:
    """Wait until no request holds a page, and return the engine's gauges."""
    until = time.monotonic() + REST_SECONDS
    while True:
        server.ensure_alive()
        found = metrics_of(url)
        if found["loramux_engine_pages_kv"] == 0 == found["loramux_unsettled_requests"] or time.monotonic() > until:
            return found
        time.sleep(1.0)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second, of all clients together")
    parser.add_argument("--change-seconds", type=float, default=5.0, help="pause between two changes of adapters")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loramux-soak-") as folder:
        say(f"{chosen.minutes:g} minutes; samples in {chosen.out}")
        summary = soak(
            Path(folder),
            chosen.out,
            seconds=chosen.minutes * 60,
            rate=chosen.rate,
            change_seconds=chosen.change_seconds,
        )
    print(json.dumps(summary, indent=2))
    return 0 if not summary["faults"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
