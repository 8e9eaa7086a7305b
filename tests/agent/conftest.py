"""Shared by the agent's tests: small models with true histograms, and a real calibration service on loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zstandard

from spark_agent.spool import Spool
from spark_schemas.histogram import HistogramUpload, LayerCounts, LayerReuse, PhaseHistogram, SessionHistogram
from spark_schemas.invariants import check_upload
from spark_schemas.live import LiveMisses, LiveProfile
from spark_schemas.manifest import PRIOR_SCALE, LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.model import ExpertLayer, ModelShape
from spark_schemas.split import split_of

# The tests' helpers lie here.
sys.path.append(str(Path(__file__).resolve().parent))

ModelFactory = Callable[..., ModelShape]
SessionFactory = Callable[..., SessionHistogram]


@pytest.fixture(scope="session")
def make_model() -> ModelFactory:
    """Build a model of two blocks with experts; another ``seed`` is another model."""

    def make(seed: int = 0, n_experts: int = 4, top_k: int = 2) -> ModelShape:
        digest = hashlib.sha256(str(seed).encode()).hexdigest()
        return ModelShape(
            fingerprint=f"mf1-{digest[:32]}",
            sibling=f"ms1-{digest[32:]}",
            architecture="test",
            n_blocks=3,
            context_length=4096,
            core_bytes=1000,
            kv_bytes_per_token=10,
            layers=tuple(
                ExpertLayer(
                    block=block, n_experts=n_experts, top_k=top_k, expert_bytes=100, tensor_types={"up": "q8_0"}
                )
                for block in (1, 2)
            ),
        )

    return make


@pytest.fixture(scope="session")
def make_manifest() -> Callable[..., PlacementManifest]:
    """Build a manifest of ``(prior, top_k, slots)`` per layer, ten bytes an expert."""

    def make(*layers: tuple[tuple[int, ...], int, int], **changes: object) -> PlacementManifest:
        placed = tuple(
            LayerPlacement(
                block=block,
                n_experts=len(prior),
                top_k=top_k,
                slots=slots,
                expert_bytes=10,
                prior=prior,
                total_share=sum(prior) / PRIOR_SCALE,
            )
            for block, (prior, top_k, slots) in enumerate(layers or [((65535, 3, 2, 1), 2, 4)])
        )
        vram_slots = sum(layer.slots * layer.expert_bytes for layer in placed)
        made = PlacementManifest(
            fingerprint="mf1-" + "a" * 32,
            sibling="ms1-" + "b" * 32,
            workload="chat",
            phase="decode",
            profile_revision="c" * 64,
            vram_budget_bytes=1000,
            n_ctx=64,
            layers=placed,
            bytes=TierBytes(
                vram_core=1,
                vram_kv=1,
                vram_slots=vram_slots,
                vram_reserve=7,
                vram_total=vram_slots + 9,
                host_experts=sum(layer.n_experts * layer.expert_bytes for layer in placed),
                disk=0,
            ),
            expected=None,
            verdict=None,
            verdict_reason="no held-out sessions",
            n_calibration=1,
            n_held_out=0,
        )
        # Not validated again: tests want manifests that are wrong, too.
        return made.model_copy(update=changes)

    return make


@pytest.fixture(scope="session")
def make_session() -> SessionFactory:
    """Build a session whose counts could have happened: every token chooses ``top_k`` different experts."""

    def make(
        model: ModelShape, seed: int = 0, prefill: int = 30, decode: int = 20, workload: str = "chat", part: int = 0
    ) -> SessionHistogram:
        dice = random.Random(f"{seed}/{part}")
        session_hash = hashlib.sha256(f"session {seed}".encode()).hexdigest()
        layers, reuse = [], []
        for layer in model.layers:
            counts, distances = [0] * layer.n_experts, [0] * (layer.n_experts + 1)
            recent: list[int] = []
            for _ in range(decode):
                for expert in dice.sample(range(layer.n_experts), layer.top_k):
                    counts[expert] += 1
                    distances[recent.index(expert) if expert in recent else -1] += 1
                    recent = [expert, *(other for other in recent if other != expert)]
            layers.append(LayerCounts(block=layer.block, tokens=decode, counts=tuple(counts)))
            reuse.append(LayerReuse(block=layer.block, distances=tuple(distances)))
        prompt = []
        for layer in model.layers:
            routed = prefill if layer.block < model.n_blocks - 1 else min(prefill, 1)
            counts = [0] * layer.n_experts
            for _ in range(routed):
                for expert in dice.sample(range(layer.n_experts), layer.top_k):
                    counts[expert] += 1
            prompt.append(LayerCounts(block=layer.block, tokens=routed, counts=tuple(counts)))
        return SessionHistogram(
            session_hash=session_hash,
            split=split_of(session_hash),
            workload=workload,
            prefill=PhaseHistogram(tokens=prefill, layers=tuple(prompt)) if prefill else None,
            decode=PhaseHistogram(tokens=decode, layers=tuple(layers)) if decode else None,
            reuse=tuple(reuse) if decode else None,
        )

    return make


@pytest.fixture(scope="session")
def measured() -> Callable[..., SessionHistogram]:
    """A session that ran in tiers and missed a share of its decode selections."""

    def make(
        session: SessionHistogram, rate: float = 0.5, resident_bytes: int = 400, profile: LiveProfile | None = None
    ) -> SessionHistogram:
        assert session.decode is not None
        selections = sum(sum(layer.counts) for layer in session.decode.layers)
        live = LiveMisses(
            selections=selections,
            cold_hits=round(rate * selections),
            resident_bytes=resident_bytes,
            profile=profile,
        )
        return session.model_copy(update={"live": live})

    return make


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool.open(tmp_path / "spool.db") as opened:
        yield opened


@dataclass
class Reply:
    """A scripted answer; ``None`` for ``status`` closes the connection without one."""

    status: int | None = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    after: bool = False
    """Process the request first, as a service does whose answer is then lost."""


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class FakeService:
    """Takes uploads as the service does (checks them, counts each content id once), unless told to answer otherwise."""

    def __init__(self) -> None:
        self.url = ""
        self.stored: dict[str, SessionHistogram] = {}
        self.requests: list[Request] = []
        self.script: list[Reply] = []
        self.answers: dict[str, Reply] = {}
        """By path without query: answers to GET."""
        self.refuse: Callable[[HistogramUpload], Reply | None] = lambda upload: None

    @property
    def uploads(self) -> list[bytes]:
        """Uncompressed bodies of all upload requests."""
        return [
            zstandard.ZstdDecompressor().decompress(request.body)
            for request in self.requests
            if request.method == "POST"
        ]

    def handle(self, request: Request) -> Reply:
        self.requests.append(request)
        reply = self.script.pop(0) if self.script else None
        if reply is not None and not reply.after:
            return reply
        processed = self._process(request)
        return processed if reply is None else reply

    def _process(self, request: Request) -> Reply:
        path = request.path.partition("?")[0]
        if request.method == "GET":
            return self.answers.get(path, problem(404, "No such thing"))
        assert path == "/api/v1/histograms"
        assert request.headers["content-encoding"] == "zstd"
        body = zstandard.ZstdDecompressor().decompress(request.body)
        assert request.headers["idempotency-key"] == hashlib.sha256(body).hexdigest()
        upload = HistogramUpload.model_validate_json(body)
        check_upload(upload)
        if (refusal := self.refuse(upload)) is not None:
            return refusal
        ids = {session.content_id(upload.model.fingerprint): session for session in upload.sessions}
        new = {key: session for key, session in ids.items() if key not in self.stored}
        self.stored.update(new)
        receipt = {"accepted": len(new), "duplicates": len(upload.sessions) - len(new)}
        return Reply(202, json.dumps(receipt).encode())


def problem(status: int, title: str, headers: dict[str, str] | None = None, **members: str) -> Reply:
    body = {"title": title, "status": status, "detail": "as scripted", "code": "scripted", **members}
    return Reply(status, json.dumps(body).encode(), {"Content-Type": "application/problem+json", **(headers or {})})


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Reply]:
    return problem


@pytest.fixture(scope="session")
def make_reply() -> type[Reply]:
    return Reply


@pytest.fixture
def service() -> Iterator[FakeService]:
    """A real HTTP server on a thread; a hook decides its answers."""
    fake = FakeService()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = fake.handle(Request(self.command, self.path, headers, self.rfile.read(length)))
            self.close_connection = True
            if reply.status is None:
                return
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                self.wfile.write(reply.body)
            except ConnectionError:
                return  # The client had read enough.

        do_GET = do_POST = _serve  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()
