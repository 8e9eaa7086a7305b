"""Every page in every state: nothing fails, nothing comes from elsewhere, everybody can read it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.browser

SCREENSHOTS = Path(__file__).with_name("screenshots")
PAGES = ("/", "/profiles", "/compare", "/budget", "/privacy", "/privacy/audit", "/privacy/tokens")
MODEL = "/profiles/mf1-" + "0" * 31 + "1"
OF_STATE = {
    "empty": ("/login",),
    "one": (f"{MODEL}/code",),
    "many": (f"{MODEL}/code-heavy", f"{MODEL}/code-heavy/layers/1", f"{MODEL}/review", f"{MODEL}/flat"),
    "hostile": (f"{MODEL}/x", f"{MODEL}/a" + "-very" * 12 + "-z"),
}
STATES = tuple(OF_STATE)
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
}


def violations(page: Any) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:200]} {node['failureSummary']}" for one in found for node in one["nodes"]]


def screenshot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name.strip('-')}.png", full_page=True)


@pytest.mark.parametrize(("state", "look"), [*itertools.product(STATES, LOOKS)])
def test_every_page(sites: Callable[..., Any], watch: Callable[..., Any], state: str, look: str) -> None:
    watched = watch(sites(state), **LOOKS[look])
    for path in (*PAGES, *OF_STATE[state]):
        watched.open(path)
        name = path.replace(MODEL, "profile").replace("/", "-").strip("-")[:40] or "team"
        screenshot(watched.page, f"{name}-{state}-{look}")
        assert violations(watched.page) == [], path
        # Nothing reaches over the edge: wide tables scroll in themselves.
        assert watched.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
        assert watched.page.title().endswith("· Spark")


@pytest.mark.parametrize("state", STATES)
def test_without_scripts(sites: Callable[..., Any], watch: Callable[..., Any], state: str) -> None:
    watched = watch(sites(state), java_script_enabled=False)
    for path in (*PAGES, *OF_STATE[state]):
        watched.open(path)
        assert watched.page.locator("h1").is_visible()
        # What an element that opens without scripts holds is a click away.
        for table in watched.page.locator("table:not(details:not([open]) table)").all():
            assert table.is_visible(), path
    screenshot(watched.page, f"no-scripts-{state}")


def test_charts_are_drawn_over_their_tables(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("many"))
    watched.open("/")
    assert watched.page.locator("figure canvas").count() == 2
    assert not watched.page.locator("figure details table").first.is_visible()
    watched.page.locator("figure summary").first.click()
    assert watched.page.locator("figure details table").first.is_visible()


def test_the_theme_is_kept(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("many"), color_scheme="light")
    watched.open("/")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = watched.page.evaluate(ground)
    watched.page.get_by_role("button", name="Dark theme").click()
    dark = watched.page.evaluate(ground)
    assert dark != light
    watched.open("/privacy")
    assert watched.page.evaluate(ground) == dark
    assert violations(watched.page) == []
    watched.page.get_by_role("button", name="Light theme").click()
    assert watched.page.evaluate(ground) == light


def test_everything_is_reached_by_keyboard(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("many"))
    watched.open("/")
    page = watched.page
    wanted = page.locator("a:visible, button:visible, summary:visible, input:visible, [tabindex='0']:visible").count()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    seen = set()
    for _ in range(wanted + 5):
        seen.add(page.evaluate("document.activeElement.outerHTML"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement.tagName") == "BODY"
        page.keyboard.press("Tab")
    reachable = page.locator("a:visible, button:visible, summary:visible, [tabindex='0']:visible").all()
    assert {one.evaluate("element => element.outerHTML") for one in reachable} - seen == set()


def test_hostile_names_stay_text(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("hostile"))
    watched.open("/")
    assert "owned" not in watched.page.title()
    assert watched.page.locator("main script, main img, main svg").count() == 0
    assert '<script>document.title="owned"</script>' in watched.page.locator("main").inner_text()


def test_nothing_inline_would_run(sites: Callable[..., Any], watch: Callable[..., Any]) -> None:
    watched = watch(sites("one"))
    watched.open("/")
    watched.page.evaluate(
        """() => {
            const script = document.createElement('script');
            script.textContent = 'window.ran = 1';
            document.body.append(script);
        }"""
    )
    assert watched.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in fault for fault in watched.faults)
    watched.faults.clear()
