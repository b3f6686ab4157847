"""The console's pages of fine-tuning jobs: created, followed, paused, resumed, cancelled; losses, answers, events."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from console_site import Visit, visiting
from playwright.sync_api import Browser, expect
from site_fixture import Site
from training_files import jsonl, shouted

from loramux.data.records.database import parse_url

HOSTILE = "<img src=x onerror=alert(1)>"
WIDE = "w" * 60
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    with visiting(browser, site.url, viewport=DESK) as visit:
        visit.sign_in(site.keys["all-scopes"])
        yield visit


def send(site: Site, name: str) -> str:
    with site.openai("all-scopes") as client:
        return client.files.create(file=(name, jsonl(shouted())), purpose="fine-tune").id


def job_with_a_log(site: Site) -> str:
    """A job as a trainer leaves it in the middle: figures of its steps, two validations, answers, and some messages."""
    file = send(site, "seen.jsonl")
    with site.openai("all-scopes") as client:
        id = client.fine_tuning.jobs.create(model="tiny", training_file=file, validation_file=file, suffix=WIDE).id
    entries: list[tuple[str, dict[str, object]]] = []
    for step in range(1, 41):
        figures = {"step": step, "total_steps": 60, "train_loss": 3.0 / step, "trained_tokens": 100 * step}
        entries.append((f"Step {step}/60: training loss={3.0 / step:.4f}", figures))
    entries += [(f"Step {step}/60", {"step": step, "total_steps": 60, "valid_loss": 4.0 / step}) for step in (20, 40)]
    for step, answer in ((0, "A tailor."), (20, f"I WILL {HOSTILE}"), (40, "I WILL NOT SAY.")):
        samples = [
            {"prompt": f"What does {name} do?", "expected": "I WILL NOT SAY.", "answer": answer}
            for name in ("Halkodel", WIDE, HOSTILE)
        ]
        entries.append((f"Answers at step {step}", {"samples": samples, "step": step}))
    engine = sa.create_engine(parse_url(site.settings.records.url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        for number, (message, data) in enumerate(entries, 100):
            connection.execute(
                sa.text(
                    "INSERT INTO training_events (job_id, number, level, message, data, created_at)"
                    " VALUES (:job, :number, 'info', :message, :data, 1700000000000000)"
                ),
                {"job": id, "number": number, "message": message, "data": json.dumps(data, separators=(",", ":"))},
            )
    engine.dispose()
    return id


def test_job_is_created_paused_resumed_and_cancelled(visit: Visit, site: Site) -> None:
    send(site, "examples.jsonl")
    page = visit.load("/fine-tuning", "Fine-tuning")
    page.get_by_role("button", name="Train an adapter").first.click()
    dialog = page.get_by_role("dialog")
    for label, option in (
        ("Model", "tiny"),
        ("Training file", "examples.jsonl"),
        ("Validation file", "examples.jsonl"),
    ):
        dialog.get_by_role("combobox", name=label).click()
        page.get_by_role("option", name=option, exact=True).first.click()
    dialog.get_by_label("Name of the adapter").fill("Not A Name")
    dialog.get_by_role("button", name="Train", exact=True).click()
    expect(dialog.get_by_role("alert")).to_contain_text("is no name for an adapter")
    dialog.get_by_label("Name of the adapter").fill("from-the-console")
    dialog.get_by_label("Epochs").fill("2")
    dialog.get_by_label("Learning rate times").fill("1.5")
    dialog.get_by_label("Rank").fill("4")
    dialog.get_by_role("button", name="Train", exact=True).click()
    page.get_by_role("heading", name="Fine-tuning job").wait_for()
    id = page.url.rpartition("/")[2]
    with site.openai("all-scopes") as client:
        made = client.fine_tuning.jobs.retrieve(id)
    assert (made.model, made.hyperparameters.n_epochs, made.to_dict()["lora"]["r"]) == ("tiny", 2, 4)
    assert made.validation_file is not None
    assert made.method is not None
    assert made.method.supervised is not None
    assert made.method.supervised.hyperparameters is not None
    assert made.method.supervised.hyperparameters.learning_rate_multiplier == 1.5
    expect(page.get_by_text(f"Created fine-tuning job: {id}")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("paused", exact=True)).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("validating_files", exact=True)).to_be_visible()
    page.get_by_role("button", name="Cancel it").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
    expect(page.get_by_text("cancelled", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("Pause|Resume|Cancel it"))).to_have_count(0)
    page = visit.go("/fine-tuning", "Fine-tuning")
    expect(page.get_by_role("row", name=id).get_by_text("cancelled")).to_be_visible()


def test_page_of_a_job_shows_losses_answers_and_events_wide_and_on_a_phone(visit: Visit, site: Site) -> None:
    id = job_with_a_log(site)
    page = visit.load(f"/fine-tuning/{id}", "Fine-tuning job")
    figure = page.get_by_role("figure", name="Loss by step")
    rows = figure.locator("tr")
    expect(rows).to_have_count(42)
    expect(rows.nth(40)).to_contain_text("Validation: 0.2")
    answers = page.get_by_role("table", name="Answers")
    expect(answers.get_by_role("cell", name="A tailor.").first).to_be_visible()
    expect(answers.get_by_role("cell", name="I WILL NOT SAY.", exact=True)).to_have_count(6)
    expect(page.get_by_text("step 40 of 60")).to_be_visible()
    expect(page.get_by_role("table", name="Events").get_by_text("Answers at step 40")).to_be_visible()
    expect(page.get_by_text(re.compile(r"training loss="))).to_have_count(0)
    page.get_by_role("combobox", name="Checkpoint").click()
    page.get_by_role("option", name="Step 20").click()
    expect(answers.get_by_text(f"I WILL {HOSTILE}").first).to_be_visible()
    assert page.locator("img[src=x]").count() == 0, "texts are texts"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for name, size in (("desk", DESK), ("phone", PHONE)):
            page.set_viewport_size(size)
            visit.faults += [f"{name}: {one}" for one in visit.misplaced()]
            picture(visit, f"job-{name}-{scheme}")
        page.set_viewport_size(DESK)
        visit.faults += [f"{scheme}: {one}" for one in visit.barriers()]
    page = visit.go("/fine-tuning", "Fine-tuning")
    page.get_by_role("button", name="Train an adapter").first.click()
    page.get_by_role("dialog").wait_for()
    picture(visit, "create")
    visit.faults += [f"dialog: {one}" for one in (*visit.misplaced(), *visit.barriers())]
    page.keyboard.press("Escape")
    with site.openai("all-scopes") as client:
        client.fine_tuning.jobs.cancel(id)


def picture(visit: Visit, name: str) -> None:
    """Write a screenshot if one is requested."""
    if "SCREENSHOTS" in os.environ:
        folder = Path(os.environ["SCREENSHOTS"])
        visit.page.screenshot(path=folder / f"fine-tuning-{name}.png", full_page=True, animations="disabled")
