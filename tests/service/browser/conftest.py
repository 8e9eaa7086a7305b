"""A real Chromium against a real server, over stores in every state that a page may have to show."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from spark_runtime.placement import Interval
from spark_service.app import create_app
from spark_service.db.drift import save_state
from spark_service.db.store import Store
from spark_service.drift import State
from spark_service.local_only import LocalOnly
from spark_service.server import bind

SCREENSHOTS = Path(__file__).with_name("screenshots")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
HOSTILE_NAME = (
    '"><script>document.title="owned"</script><img src=x onerror=alert(1)> \u202etxt.exe\u202c \'&amp; ' + "wide" * 20
)
HOSTILE_VERSION = "<b onmouseover=alert(1)>1.0</b>"
DEADLINE_S = 120.0
_EPOCH = dt.date(1970, 1, 1)


@dataclass
class Site:
    """A running service."""

    url: str
    store: Store


@dataclass
class Watched:
    """A browser's page, and all that went wrong on it."""

    page: Page
    site: Site
    faults: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        """Go to a page and wait until nothing more is loaded or being computed."""
        self.page.goto(self.site.url + path, wait_until="networkidle")
        deadline = time.monotonic() + DEADLINE_S
        while self.page.locator('meta[http-equiv="refresh"]').count():
            assert time.monotonic() < deadline, f"{path}: still being computed"
            self.page.wait_for_timeout(100)
            self.page.goto(self.site.url + path, wait_until="networkidle")


def chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: while it is open its event loop runs in this thread, where other tests run theirs."""
    path = chromium()
    if path is None:
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail("found no Chromium, and REQUIRE_BROWSER is set")
        pytest.skip("needs Chromium: apt-get install chromium, or its path in CHROMIUM")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(OPTIONS), timeout=1000 * DEADLINE_S)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """Start a service over a store that ``fill`` prepares."""
    running: list[tuple[uvicorn.Server, threading.Thread, Any, Store]] = []

    def start(fill: Callable[[Store], None], **how: Any) -> Site:
        store = Store.open(tmp_path_factory.mktemp("site") / "service.duckdb", memory="256MB", threads=1)
        fill(store)
        app = create_app(store, **{"open_access": True, "min_sessions": 3, **how})
        if how.get("open_access", True):
            app.add_middleware(LocalOnly)
        listener = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread, app, store))
        while not server.started:
            assert thread.is_alive(), "it did not start"
            time.sleep(0.01)
        return Site(f"http://127.0.0.1:{listener.getsockname()[1]}", store)

    yield start
    for server, thread, app, store in running:
        server.should_exit = True
        thread.join()
        app.state.dashboard.close()
        store.close()


def spread(store: Store, days: int) -> None:
    """Let what was uploaded have come over some days."""
    with store.writing() as cursor:
        cursor.execute("UPDATE parts SET received_day = current_date - CAST(number % ? AS INTEGER)", [days])


def fill_one(store: Store, make: Any) -> None:
    shape = make.shape()
    store.add_upload(make.upload(shape, [make.session(shape, make.hash(0))]), "one", "one")


def fill_many(store: Store, make: Any, calibration: int = 1600, held_out: int = 400) -> None:
    """Thousands of sessions: a workload whose profile was followed, one that moved, one of too few sessions."""
    shape = make.shape(((32, 4, 3_000_000), (32, 4, 3_000_000), (32, 4, 2_000_000)), name="Qwen3-30B-A3B Q4_K_M")
    other = make.shape(
        fingerprint="mf1-" + "0" * 31 + "2", sibling="ms1-" + "0" * 31 + "b", name="gpt-oss-20b MXFP4",
        architecture="gpt-oss",
    )  # fmt: skip
    how = {"workload": "code-heavy", "decode": 20}
    sessions = [make.session(shape, make.hash(index), seed=index, **how) for index in range(calibration)]
    for index in range(held_out):
        one = make.session(shape, make.hash(index, "held_out"), seed=5000 + index, **how)
        profile = make.profile("code-heavy") if index % 2 else None
        sessions.append(make.live(shape, one, 0.06 if profile else 0.11, residency=0.6, profile=profile))
    sessions += make.sessions(shape, 30, 12, workload="chat", decode=40, taste=3)
    sessions += make.sessions(shape, 4, 1, workload="review", decode=40, taste=5)
    sessions += make.sessions(shape, 10, 6, workload="flat", decode=40, skew=0.0)
    for start in range(0, len(sessions), 200):
        key = f"many-{start}"
        store.add_upload(make.upload(shape, sessions[start : start + 200]), key, key)
    store.add_upload(make.upload(other, make.sessions(other, 8, 5, workload="maths", decode=100)), "other", "other")
    spread(store, 40)
    today = (dt.datetime.now(dt.UTC).date() - _EPOCH).days
    moved = State(
        state="moved", since_day=today - 5, rebuilt=False, after_sequence=-1, n_sessions=20,
        promised=Interval(0.08, 0.07, 0.09), measured=Interval(0.21, 0.18, 0.24),
    )  # fmt: skip
    steady = State(
        state="steady", since_day=None, rebuilt=False, after_sequence=-1, n_sessions=20,
        promised=Interval(0.10, 0.09, 0.11), measured=Interval(0.102, 0.09, 0.115),
    )  # fmt: skip
    with store.writing() as cursor:
        save_state(cursor, shape.fingerprint, "chat", moved)
        save_state(cursor, shape.fingerprint, "code-heavy", steady)


def fill_hostile(store: Store, make: Any) -> None:
    """Names that try to be markup, to turn text around, or to be wider than a phone."""
    shape = make.shape(name=HOSTILE_NAME, architecture="</td><svg/onload=alert(1)>")
    long = "a" + "-very" * 12 + "-z"
    for name in (long, "x"):
        upload = make.upload(shape, make.sessions(shape, 4, 4, workload=name))
        store.add_upload(upload.model_copy(update={"agent_version": HOSTILE_VERSION}), name, name)


STATES: dict[str, Callable[[Store, Any], None]] = {
    "empty": lambda _store, _make: None,
    "one": fill_one,
    "many": fill_many,
    "hostile": fill_hostile,
}


@pytest.fixture(scope="session")
def sites(serving: Callable[..., Site], make: Any) -> Callable[[str], Site]:
    """The service in a state, started at its first use."""
    started: dict[str, Site] = {}

    def site(state: str) -> Site:
        if state not in started:
            started[state] = serving(lambda store: STATES[state](store, make))
        return started[state]

    return site


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Open a browser's page on a site; at the end of the test nothing may have gone wrong on it."""
    contexts: list[BrowserContext] = []
    watched: list[Watched] = []

    def start(site: Site, **how: Any) -> Watched:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
        context.set_default_timeout(1000 * DEADLINE_S)
        contexts.append(context)
        found = Watched(context.new_page(), site)
        watched.append(found)
        host = urlsplit(site.url).netloc

        def on_request(request: Any) -> None:
            if urlsplit(request.url).netloc != host:
                found.faults.append(f"request to {request.url}")

        found.page.on("request", on_request)

        def on_failure(request: Any) -> None:
            # Aborted is what a page still loaded when it was left, or looked again by itself.
            if request.failure != "net::ERR_ABORTED":
                found.faults.append(f"failed: {request.url} {request.failure}")

        found.page.on("requestfailed", on_failure)
        found.page.on(
            "console",
            lambda message: found.faults.append(message.text) if message.type in ("error", "warning") else None,
        )
        found.page.on("pageerror", lambda error: found.faults.append(str(error)))
        found.page.on("dialog", lambda dialog: found.faults.append(f"dialog {dialog.message}"))
        return found

    yield start
    for context in contexts:
        context.close()
    assert [fault for one in watched for fault in one.faults] == []
