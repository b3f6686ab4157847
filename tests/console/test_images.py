"""Images in the playground: chosen, pasted, compared with the bounds, and sent, in a real browser."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from console_site import Visit, ensure_console, visiting
from image_base import make_image_base, picture, saved
from playwright.sync_api import Browser, FilePayload, Page, Route, expect
from running_server import running
from scripted_engine import FACTS, ScriptedEngine
from site_fixture import Site, make_keys, make_settings

from loramux.common.settings.serving import BaseSettings, EngineSettings, ImageSettings
from loramux_api.app import create_app

MAX_BYTES = 20_000
BOUNDS = ImageSettings(max_bytes=MAX_BYTES, max_request_bytes=30_000, max_per_request=3)
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 860}
PASTE = """async (area, data) => {
  const pasted = new DataTransfer()
  pasted.items.add(new File([Uint8Array.from(atob(data), c => c.charCodeAt(0))], 'pasted.png', {type: 'image/png'}))
  area.dispatchEvent(new ClipboardEvent('paste', {clipboardData: pasted, bubbles: true, cancelable: true}))
}"""


@pytest.fixture(scope="module")
def image_site(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with a base that reads images, `eyes`, and one that reads text, `plain`."""
    ensure_console()
    folder = make_image_base(tmp_path_factory.mktemp("base"))
    engine = EngineSettings(in_process=True)
    settings = msgspec.structs.replace(
        make_settings(folder, tmp_path_factory.mktemp("site")),
        images=BOUNDS,
        bases=tuple(
            BaseSettings(name=name, path=str(path), engine=engine)
            for name, path in (("eyes", folder), ("plain", base_dir))
        ),
    )
    facts = msgspec.structs.replace(FACTS, vocab_size=261, images=True, max_model_len=1024)
    scripted = ScriptedEngine(facts=facts, script=lambda _: [*b"seen", 256])
    keys = make_keys(settings)
    with running(create_app(settings, scripted), "granian") as server:
        yield Site(server, scripted, settings, keys)


@pytest.fixture
def visit(image_site: Site, browser: Browser) -> Iterator[Visit]:
    # The site is a parameter before the browser, whose event loop would keep the site from making its keys.
    with visiting(browser, image_site.url, viewport=DESK) as visit:
        visit.sign_in(image_site.keys["all-scopes"])
        choose(visit.load("/playground", "Playground"), "First model", "eyes")
        yield visit


def choose(page: Page, side: str, model: str) -> None:
    box = page.get_by_label(side).first
    expect(box).not_to_have_value("")  # the model at first is drawn after its list, and would join what is typed
    box.fill(model)
    page.get_by_role("option", name=model, exact=True).click()


def image(name: str, content: bytes, kind: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": kind, "buffer": content}


def add(page: Page, *files: FilePayload) -> None:
    page.locator("input[type=file]").set_input_files(list(files))


def test_playground_sends_chosen_and_pasted_images_and_usage_shows_their_tokens(visit: Visit, image_site: Site) -> None:
    page, sent = visit.page, saved(picture(56, 56))
    expect(page.get_by_text("PNG, JPEG, WEBP, GIF, up to 3 images, 20.0 kB each and 30.0 kB together")).to_be_visible()
    with page.expect_file_chooser() as chooser:
        visit.press(page.get_by_role("button", name="Add images"))
    chooser.value.set_files([image("chosen.png", sent), image("wrong.png", saved(picture(28, 28)))])
    page.get_by_label("Prompt").first.evaluate(PASTE, base64.b64encode(sent).decode())
    shown = page.get_by_role("list", name="Images of the prompt").get_by_role("listitem")
    expect(shown).to_have_count(3)
    expect(shown.nth(2)).to_contain_text("pasted.png")
    expect(shown.nth(2)).to_contain_text(f"{len(sent) / 1000:.1f} kB")
    expect(shown.nth(2).locator("img")).to_have_js_property("naturalWidth", 56)
    visit.faults += visit.barriers()
    page.set_viewport_size(PHONE)
    visit.faults += visit.misplaced()
    page.set_viewport_size(DESK)
    visit.press(page.get_by_role("button", name="Remove wrong.png"))
    page.get_by_label("Prompt").first.fill("what?")
    page.get_by_role("button", name="Run both").click()
    for side in ("first", "second"):
        expect(page.get_by_label(f"Answer of the {side} model")).to_contain_text("seen")
    expect(page.get_by_text("8 of images")).to_have_count(2)
    for request in image_site.engine.requests[-2:]:
        assert [one.num_tokens for one in request.images] == [4, 4]
        assert len({one.digest for one in request.images}) == 1
    page = visit.go("/usage", "Usage and cost")
    expect(page.get_by_text("16 of images")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Of images")).to_be_visible()
    expect(page.get_by_role("row", name="eyes").get_by_role("cell", name="16", exact=True)).to_be_visible()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([image("notes.txt", b"text", "text/plain")], "notes.txt is none of PNG, JPEG, WEBP, GIF"),
        ([image("large.png", bytes(MAX_BYTES + 1))], "large.png has 20,001 bytes, and the maximum is 20,000"),
        ([image("a.png", saved(picture()))] * 4, "at most 3 images, and these are 4"),
        ([image("a.png", bytes(MAX_BYTES))] * 2, "40,000 bytes together, and the maximum is 30,000"),
    ],
)
def test_playground_refuses_images_beyond_the_bounds_until_they_are_removed(
    visit: Visit, files: list[FilePayload], reason: str
) -> None:
    page = visit.page
    add(page, *files)
    expect(page.get_by_role("alert")).to_contain_text(reason)
    page.get_by_label("Prompt").first.fill("what?")
    expect(page.get_by_role("button", name="Run both")).to_be_disabled()
    page.get_by_role("button", name="Remove").first.click()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Run both")).to_be_enabled()


def test_playground_shows_the_servers_refusal_with_the_name_of_the_image(visit: Visit) -> None:
    add(visit.page, image("good.png", saved(picture())), image("damaged.png", saved(picture())[:100]))
    visit.page.get_by_role("button", name="Run both").click()
    expect(visit.page.get_by_text("damaged.png: 'messages[0].content[1]' is no image that can be read")).to_have_count(
        2
    )


def test_playground_takes_a_models_name_once_the_names_are_known(visit: Visit) -> None:
    """The model at first comes with the names, and would replace what is typed before."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    visit.page.route("**/v1/models?*", hold)
    page = visit.load("/playground", "Playground")
    expect(page.get_by_label("First model").first).to_be_disabled()
    for route in held:
        route.continue_()
    page.unroute("**/v1/models?*")
    choose(page, "First model", "plain")
    choose(page, "Second model", "eyes")
    expect(page.get_by_label("First model").first).to_have_value("plain")


def test_playground_offers_images_only_if_both_models_read_them(visit: Visit) -> None:
    page, offer = visit.page, visit.page.get_by_role("button", name="Add images")
    add(page, image("a.png", saved(picture())))
    choose(page, "Second model", "plain")
    expect(offer).to_have_count(0)
    expect(page.get_by_role("alert")).to_contain_text("plain reads text only")
    expect(page.get_by_role("button", name="Run both")).to_be_disabled()
    page.get_by_role("button", name="Remove a.png").click()
    expect(page.get_by_role("alert")).to_have_count(0)
    choose(page, "Second model", "eyes")
    expect(offer).to_be_visible()
