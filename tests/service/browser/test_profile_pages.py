"""The pages about profiles, in every state: read, drawn, moved through by pointer and keyboard."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe

from spark_schemas.histogram import LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.split import split_of
from spark_service.db.store import Store

pytestmark = pytest.mark.browser

SCREENSHOTS = Path(__file__).with_name("screenshots")
STATES = ("empty", "one", "many", "hostile")
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}
WORKLOADS = {"one": "code", "many": "code-heavy", "hostile": "x"}


def places(make: Any, state: str) -> dict[str, str]:
    """Pages by what their screenshots are called."""
    found = {"profiles": "/profiles", "compare": "/compare", "budget": "/budget"}
    if state in WORKLOADS:
        found["profile"] = f"/profiles/{make.fingerprint}/{WORKLOADS[state]}"
    if state == "many":
        found["layer"] = f"{found['profile']}/layers/2"
        found["no-verdict"] = f"/profiles/{make.fingerprint}/review"
        found["no-gain"] = f"/profiles/{make.fingerprint}/flat"
        found["moved"] = f"/profiles/{make.fingerprint}/chat"
        found["mixed"] = "/compare?mix=chat:1%2Bcode-heavy:3&a=chat&b=chat&b_days=30"
        found["too-little"] = "/budget?vram_bytes=1000"
    return found


def violations(page: Any) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:200]} {node['failureSummary']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize(("state", "look"), [*itertools.product(STATES, LOOKS)])
def test_every_page(sites: Callable[..., Any], watch: Callable[..., Any], make: Any, state: str, look: str) -> None:
    watched = watch(sites(state), **LOOKS[look])
    SCREENSHOTS.mkdir(exist_ok=True)
    for name, path in places(make, state).items():
        watched.open(path)
        watched.page.screenshot(path=SCREENSHOTS / f"{name}-{state}-{look}.png", full_page=True)
        assert violations(watched.page) == [], path
        assert watched.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert watched.page.title().endswith("· Spark")


@pytest.mark.parametrize("state", STATES)
def test_without_scripts_all_numbers_are_tables(
    sites: Callable[..., Any], watch: Callable[..., Any], make: Any, state: str
) -> None:
    watched = watch(sites(state), java_script_enabled=False)
    for path in places(make, state).values():
        watched.open(path)
        assert watched.page.locator("h1").is_visible()
        assert watched.page.locator("canvas:visible").count() == 0
        for table in watched.page.locator("figure table").all():
            assert table.is_visible(), path


def test_the_budget_is_a_form_without_scripts(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    page = (watched := watch(sites("many"), java_script_enabled=False)).page
    watched.open("/budget")
    before = page.locator("#command").inner_text()
    page.locator("#vram_bytes").press("End")
    page.get_by_role("button", name="Show").click()
    assert page.locator("#command").inner_text() != before
    assert page.locator(".facts .value").first.inner_text() == "0.0%"
    page.select_option("#model", index=1)
    page.get_by_role("button", name="Show").click()
    watched.open(page.url.removeprefix(watched.site.url))
    assert "spark pull-profile maths " in page.locator("#command").inner_text()


def test_an_empty_page_says_what_is_missing(sites: Callable[..., Any], watch: Callable[..., Any], make: Any) -> None:
    watched = watch(sites("empty"))
    for path, words in {"/profiles": "the first needs 3", "/compare": "no sessions", "/budget": "no sessions"}.items():
        watched.open(path)
        assert words in watched.page.locator(".empty").inner_text()
    watched = watch(sites("one"))
    for name, path in places(make, "one").items():
        watched.open(path)
        text = watched.page.locator("main").inner_text()
        assert "2 more calibration sessions needed (1 of 3)" in text, name
        assert watched.page.locator("figure").count() == 0


def test_curves_are_drawn_with_what_agents_measured(
    sites: Callable[..., Any], watch: Callable[..., Any], make: Any
) -> None:
    watched = watch(sites("many"))
    watched.open(places(make, "many")["profile"])
    names = watched.page.locator(".u-legend .u-label").all_inner_texts()
    assert {"uniform", "LRU", "calibrated", "calibrated + ring", "oracle"} <= set(names)
    assert watched.page.locator("figure.chart canvas").count() == 1
    assert not watched.page.locator("figure.chart details table").is_visible()
    # Drawing again must not trip over what was drawn before.
    watched.page.get_by_role("button", name="Dark theme").click()
    assert watched.page.locator("figure.chart canvas").count() == 1


def test_the_heat_map_tells_numbers_and_opens_layers(
    sites: Callable[..., Any], watch: Callable[..., Any], make: Any
) -> None:
    watched = watch(sites("many"))
    page = watched.page
    watched.open(places(make, "many")["profile"])
    canvas, note = page.locator("[data-heat-canvas]"), page.locator("[data-heat-note]")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 0.99, "y": box["height"] * 0.99})
    assert note.inner_text().startswith("Block 3, expert 31: ")
    assert page.locator(".heat-cursor").is_visible()
    canvas.click(position={"x": 2, "y": 2})
    page.locator("#layer h2").wait_for()
    assert page.locator("#layer h2").inner_text() == "Block 1"
    assert page.locator("#layer tbody tr").count() == 32
    assert page.evaluate("document.activeElement.textContent") == "Block 1"
    assert page.url.endswith("/code-heavy")
    # Canvas and table say the same of the hottest expert.
    page.get_by_label("hottest first").check()
    canvas.focus()
    page.keyboard.press("Home")
    expert = page.locator("#layer tbody tr").first.locator("th").inner_text()
    assert note.inner_text().startswith(f"Block 1, expert {expert}: ")


def test_the_heat_map_by_keyboard(sites: Callable[..., Any], watch: Callable[..., Any], make: Any) -> None:
    watched = watch(sites("many"))
    page = watched.page
    watched.open(places(make, "many")["profile"])
    page.locator("[data-heat-canvas]").focus()
    said = []
    for key in ("ArrowRight", "ArrowDown", "End", "ArrowRight", "PageUp", "ArrowUp", "ArrowUp", "Home", "ArrowLeft"):
        page.keyboard.press(key)
        said.append(re.match(r"Block (\d+), expert (\d+)", page.locator("[data-heat-note]").inner_text()).groups())
    assert said == [
        ("1", "1"),
        ("2", "1"),
        ("2", "31"),
        ("2", "31"),
        ("2", "28"),
        ("1", "28"),
        ("1", "28"),
        ("1", "0"),
        ("1", "0"),
    ]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("#layer h2").wait_for()
    assert page.locator("#layer h2").inner_text() == "Block 2"
    assert violations(page) == []


def test_the_slider_answers_while_it_moves(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("many"))
    page = watched.page
    watched.open("/budget")
    assert not page.get_by_role("button", name="Show").is_visible()
    slider = page.locator("#vram_bytes")
    commands = [page.locator("#command").inner_text()]
    slider.focus()
    for key in ("ArrowRight", "PageUp", "Home"):
        page.keyboard.press(key)
        page.wait_for_function("before => document.getElementById('command')?.textContent !== before", arg=commands[-1])
        commands.append(page.locator("#command").inner_text())
        assert page.evaluate("document.activeElement.id") == "vram_bytes"
    assert len(set(commands)) == 4
    # The address is that of what is shown.
    shown = commands[-1]
    watched.open(page.url.removeprefix(watched.site.url))
    assert page.locator("#command").inner_text() == shown
    page.select_option("#gpu", "h200")
    page.get_by_text("from a measured card").wait_for()
    assert violations(page) == []


def test_the_command_can_be_copied(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("many"), permissions=["clipboard-read", "clipboard-write"])
    watched.open("/budget")
    watched.page.get_by_role("button", name="Copy").click()
    watched.page.get_by_role("button", name="Copied").wait_for()
    assert watched.page.evaluate("navigator.clipboard.readText()") == watched.page.locator("#command").inner_text()


def test_hostile_names_stay_text(sites: Callable[..., Any], watch: Callable[..., Any], make: Any) -> None:
    watched = watch(sites("hostile"))
    for path in places(make, "hostile").values():
        watched.open(path)
        assert "owned" not in watched.page.title()
        assert watched.page.locator("main script, main img").count() == 0


def fill_large(store: Store, make: Any) -> None:
    """60 layers of 512 experts, and what an agent with reuse distances would have sent."""
    shape = make.shape([(512, 10, 1_000_000)] * 60, name="Large MoE Q4_K_M")
    sides = [("calibration", 3), ("held_out", 3)]
    sessions = []
    for number, session_hash in enumerate(make.hash(index, side) for side, n in sides for index in range(n)):
        rng, layers, reuse = np.random.default_rng(number), [], []
        for layer in shape.layers:
            most = (2000 / np.sqrt(1 + np.random.default_rng(layer.block).permutation(512))).astype(np.int64)
            counts = rng.multivariate_hypergeometric(most, 20_000)
            first = int(np.count_nonzero(counts))
            again = rng.multinomial(20_000 - first, np.full(512, 1 / 512))
            layers.append(LayerCounts(block=layer.block, tokens=2000, counts=tuple(counts.tolist())))
            reuse.append(LayerReuse(block=layer.block, distances=(*again.tolist(), first)))
        sessions.append(
            SessionHistogram(
                session_hash=session_hash,
                split=split_of(session_hash),
                workload="code",
                decode=PhaseHistogram(tokens=2000, layers=tuple(layers)),
                reuse=tuple(reuse),
            )
        )
    store.add_upload(make.upload(shape, sessions), "large", "large")


def test_a_large_model_is_small_on_the_wire(serving: Callable[..., Any], watch: Callable[..., Any], make: Any) -> None:
    """Everything that a page of 60 layers of 512 experts loads, scripts and styles included: below 150 kB."""
    watched = watch(serving(lambda store: fill_large(store, make)))
    path = f"/profiles/{make.fingerprint}/code"
    watched.open(path)
    sent: list[Any] = []
    cold = watched.page.context.browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    cold.on("requestfinished", lambda one: sent.append(one))
    cold.goto(watched.site.url + path, wait_until="networkidle")
    total = sum(one.sizes()["responseBodySize"] + one.sizes()["responseHeadersSize"] for one in sent)
    cold.screenshot(path=SCREENSHOTS / "profile-large-light.png", full_page=True)
    cold.context.close()
    assert len(sent) >= 5
    assert total < 150_000
