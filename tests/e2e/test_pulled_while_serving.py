"""A manifest on its whole way: from a real service into a real agent that is serving, without a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from between import standing_between
from synthetic_sessions import Make

from spark_runtime.model_shape import read_model_shape
from spark_runtime.models import demo_model_path
from spark_schemas.model import ModelShape

pytestmark = pytest.mark.e2e

SERVICE, AGENT, SPARK = "spark_service.cli", "spark_agent.cli", "spark_agent.cli_spark"
PULL = ("pull-profile", "code", "--vram", "7M", "--ctx", "256")
SERVE = ("run", "-p", "0", "--json", "--residency", "0.8", "--ctx", "256", "--no-profile", "--threads", "1")
TEXTS = ("Tell me of the sea.", "How are you today?", "A story of an old house, please.")


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return read_model_shape(demo_model_path())


@pytest.fixture
def service(machine: Any, make: Make, shape: ModelShape, tmp_path: Path) -> Iterator[str]:
    """A service with sessions of one workload; its address."""
    data = str(tmp_path / "service")
    with machine.serving(SERVICE, "run", "--open", "-p", "0", "--json", "--data-dir", data) as (started, _):
        url = started["base_url"]
        upload(url, make, shape, 1)
        machine.environment["SPARKMOE_SERVICE_URL"] = url
        yield url


def upload(url: str, make: Make, shape: ModelShape, taste: int, first: int = 0) -> None:
    sessions = [
        make.session(shape, make.hash(number, side), seed=number, decode=64, taste=taste)
        for side in ("calibration", "held_out")
        for number in range(first, first + 6)
    ]
    headers = {"Idempotency-Key": f"upload-{first}", "Content-Type": "application/json"}
    answer = httpx.post(f"{url}/api/v1/histograms", content=make.body(shape, sessions), headers=headers, timeout=120)
    assert answer.status_code == 202, answer.text


def answers(start: Any) -> list[str]:
    found = []
    for text in TEXTS:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}
        reply = httpx.post(f"{start['base_url']}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        found.append(reply.json()["choices"][0]["message"]["content"])
    return found


def placement(start: Any) -> dict[str, Any]:
    found = httpx.get(f"{start['base_url']}/spark/placement", timeout=120, trust_env=False).json()
    assert isinstance(found, dict)
    return found


def pull(machine: Any, *more: str) -> tuple[dict[str, Any], str]:
    done = machine.run(SPARK, *PULL, "--json", *more)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found, done.stderr


def test_what_is_pulled_reaches_a_running_agent(machine: Any, service: str, make: Make, shape: ModelShape) -> None:
    with machine.serving(AGENT, *SERVE) as (start, process):
        before = answers(start)
        assert placement(start)["source"] == "none"
        _, said = pull(machine, "--no-apply")
        assert "applied" not in said
        assert placement(start)["source"] == "none"

        first, said = pull(machine)
        assert f"applied to the agent at {start['base_url']}" in said
        now = placement(start)
        manifest = first["manifest"]
        assert (now["source"], now["workload"]) == ("pulled", "code")
        assert now["profile_revision"] == manifest["profile_revision"]
        assert now["expected_cold_hit_rate"] == manifest["expected"]["cold_hit_rate"]
        assert answers(start) == before, "placement changes no token"
        assert placement(start)["live_cold_hit_rate"] > 0

        (shown,) = machine.agents()
        assert (shown["pid"], shown["problem"]) == (process.pid, None)
        live = shown["stats"]["live"]
        assert (live["placement"], live["promised_cold_hit_rate"]) == ("code", manifest["expected"]["cold_hit_rate"])

        upload(service, make, shape, taste=2, first=6)
        second, said = pull(machine)
        assert second["manifest"]["profile_revision"] != manifest["profile_revision"]
        assert "applied to the agent" in said
        assert placement(start)["profile_revision"] == second["manifest"]["profile_revision"]
        assert answers(start) == before
        (again,) = machine.agents()
        assert again["pid"] == process.pid, "without a restart"


def test_forged_and_stale_manifests_reach_nobody(machine: Any, service: str, make: Make, shape: ModelShape) -> None:
    """Whoever stands between may keep an old answer, signature and all, and change a new one: the agent goes on."""
    old: dict[str, tuple[dict[str, str], bytes]] = {}

    def keep(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        if "/manifests/" in path and body:
            old[path] = dict(headers), body
        return headers, body

    def stale(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        return old.get(path, (headers, body))

    def stale_and_pinned(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        if path not in old:
            return headers, body
        kept, content = old[path]
        return {**kept, "spark-pinned": json.loads(content)["profile_revision"]}, content

    def forged(path: str, headers: dict[str, str], body: bytes) -> tuple[dict[str, str], bytes]:
        return headers, body.replace(b'"n_calibration":', b'"n_calibration":1') if "/manifests/" in path else body

    with machine.serving(AGENT, *SERVE) as (start, _), standing_between(service) as between:
        machine.environment["SPARKMOE_SERVICE_URL"] = between.url
        before = answers(start)
        between.change = keep
        pull(machine)
        between.change = lambda path, headers, body: (headers, body)
        upload(service, make, shape, taste=2, first=6)
        newest, _ = pull(machine)
        in_force = placement(start)
        assert in_force["profile_revision"] == newest["manifest"]["profile_revision"]

        for change, word in ((stale, "had replaced"), (stale_and_pinned, "not proven"), (forged, "altered")):
            between.change, between.wants_bodies = change, True
            done = machine.run(SPARK, *PULL)
            assert (done.returncode, word in done.stderr) == (3, True), done.stderr
            assert "applied" not in done.stderr
            assert placement(start)["profile_revision"] == in_force["profile_revision"]
        # Past the commands, straight at the agent.
        kept = json.loads(next((machine.home / "data").rglob("code.json")).read_text())
        changed = kept["content"].replace('"n_calibration":', '"n_calibration":1')
        order = {"content": changed, "signed": kept["signed"]}
        refused = httpx.post(f"{start['base_url']}/spark/placement", json=order, timeout=120, trust_env=False)
        assert (refused.status_code, "altered" in refused.text) == (403, True)
        assert placement(start)["since"] == in_force["since"]
        assert answers(start) == before
