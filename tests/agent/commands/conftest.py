"""Commands as a person types them, in this process; and files that are almost models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from spark_agent import cli, cli_spark
from spark_agent.output import run_app
from spark_agent.paths import spool_path
from spark_agent.spool import Spool
from spark_runtime.models import demo_model_path
from spark_schemas.manifest import PRIOR_SCALE, Expectation, LayerPlacement, PlacementManifest, TierBytes
from spark_schemas.model import ModelShape


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        (line,) = self.out.splitlines()
        return json.loads(line)

    def failed(self, code: int, *words: str, hint: bool = True) -> None:
        """Check an expected failure: its code, its words, and no traceback."""
        assert self.code == code, (self.out, self.err)
        assert "Traceback" not in self.err
        assert "\nerror: " in "\n" + self.err
        assert "\nhint: " in self.err or not hint
        for word in words:
            assert word in self.err


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, an agent that answers is heard."""
    monkeypatch.setattr("spark_agent.asking.ask_all.__defaults__", (60.0,))
    monkeypatch.setattr("spark_agent.running_agent._TIMEOUT_S", 60.0)


@pytest.fixture
def agent_cli(capfd) -> Command:
    """Run ``spark-agent``."""
    return lambda *arguments: _run(cli.app, arguments, capfd)


@pytest.fixture
def spark_cli(capfd) -> Command:
    """Run ``spark``."""
    return lambda *arguments: _run(cli_spark.app, arguments, capfd)


def _run(app, arguments, capfd) -> Result:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_app(app, [str(argument) for argument in arguments])
    shown = capfd.readouterr()
    return Result(int(ended.value.code or 0), shown.out, shown.err)


@pytest.fixture
def kept() -> Callable[[], list]:
    """Rows of the person's spool; none when there is no spool."""

    def rows() -> list:
        if not spool_path().exists():
            return []
        with Spool.open(spool_path()) as spool:
            return spool.pending()

    return rows


BROKEN_MODELS = {
    "missing": "no such file",
    "folder": "is a directory",
    "not_gguf": "not a GGUF",
    "truncated": "",
    "dense": "no routed experts",
    "unknown_architecture": "unknown model architecture",
}


@pytest.fixture
def broken_model(tmp_path: Path) -> Callable[[str], Path]:
    """Write a file that cannot be used as a model, by its fault."""

    def make(fault: str) -> Path:
        path = tmp_path / f"{fault}.gguf"
        if fault == "folder":
            path.mkdir()
        elif fault == "not_gguf":
            path.write_text("I am a text.\n" * 100)
        elif fault == "truncated":
            path.write_bytes(demo_model_path().read_bytes()[:-1_000_000])
        elif fault == "dense":
            _write_dense(path)
        elif fault == "unknown_architecture":
            path.write_bytes(demo_model_path().read_bytes().replace(b"qwen3moe", b"qwen0moe"))
        return path

    return make


def _write_dense(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    for name, shape in {"token_embd.weight": (64, 32), "blk.0.ffn_up.weight": (32, 32)}.items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def make_manifest() -> Callable[..., PlacementManifest]:
    """Build a manifest for a model's shape that holds all experts of all layers."""

    def make(shape: ModelShape, **changes: object) -> PlacementManifest:
        slots = shape.expert_bytes_total
        n_ctx = min(shape.context_length, 8192)
        kv_bytes = n_ctx * shape.kv_bytes_per_token
        total = shape.core_bytes + kv_bytes + slots
        layers = tuple(
            LayerPlacement(
                block=layer.block,
                n_experts=layer.n_experts,
                top_k=layer.top_k,
                slots=layer.n_experts,
                expert_bytes=layer.expert_bytes,
                prior=(PRIOR_SCALE, *range(layer.n_experts - 1)),
                total_share=1.0,
            )
            for layer in shape.layers
        )
        found = PlacementManifest(
            fingerprint=shape.fingerprint,
            sibling=shape.sibling,
            workload="chat",
            phase="decode",
            profile_revision="c" * 64,
            vram_budget_bytes=total,
            n_ctx=n_ctx,
            layers=layers,
            bytes=TierBytes(
                vram_core=shape.core_bytes,
                vram_kv=kv_bytes,
                vram_slots=slots,
                vram_reserve=0,
                vram_total=total,
                host_experts=slots,
                disk=0,
            ),
            expected=Expectation(cold_hit_rate=0.25, low=0.2, high=0.3, uniform_cold_hit_rate=0.5),
            verdict="profile",
            verdict_reason="better on all sessions",
            n_calibration=12,
            n_held_out=4,
        )
        return found.model_copy(update=changes)

    return make
