"""``spark-agent doctor``: what is installed, found and possible, and how to mend what is not."""

from __future__ import annotations

import datetime as dt
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from spark_agent import __version__, machine_checks, tier_checks
from spark_agent.context import AgentContext
from spark_agent.output import Fault, counted
from spark_agent.sizes import format_size

__all__ = ["doctor_command"]


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    reason: str = ""
    fix: str = ""


def doctor_command(
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file to check; the bundled demo model if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: versions, native code, tiers, memory, model, spool, service, consent, running agents, port.

    Exit code 1 if something must be mended.
    """
    context = AgentContext.create(json_mode=json)
    checks = [
        _Check("spark", "ok", f"{__version__}, Python {platform.python_version()}"),
        _run("llama-cpp-python", "fail", _llama),
        _run("native", "warn", _native),
        _run("tiers", "warn", tier_checks.proxies),
        _run("tier-engine", "warn", tier_checks.tier_engine),
        _run("prefetch", "warn", lambda: tier_checks.prefetch(context.model_path(model))),
        _run("nvrtc", "warn", tier_checks.nvrtc),
        _run("cuda-driver", "warn", tier_checks.cuda_driver),
        _run("video-memory", "warn", machine_checks.video_memory),
        _run("host-memory", "warn", tier_checks.host_memory_line),
        _run("link", "warn", machine_checks.link_rate),
        _run("llama-server", "warn", tier_checks.llama_server),
        _run("model", "fail", lambda: _model(context.model_path(model))),
        _run("spool", "fail", lambda: _spool(context)),
        *_service(context),
        _consent(context),
        _run("agents", "warn", machine_checks.agents_line),
        _run("port", "warn", lambda: machine_checks.port_line(context.environment.host, context.environment.port)),
    ]
    context.output.result({"checks": [asdict(check) for check in checks]}, "\n".join(map(_line, checks)))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _run(name: str, on_fault: Literal["warn", "fail"], look: Callable[[], str]) -> _Check:
    try:
        return _Check(name, "ok", look())
    except Exception as error:
        if not isinstance(error, Fault):
            raise
        return _Check(name, on_fault, "", str(error), error.hint or "")


def _llama() -> str:
    from spark_runtime.ggml import LLAMA_CPP_PYTHON_VERSION
    from spark_runtime.llama import bindings

    gpu = "with GPU offload" if bindings().llama_supports_gpu_offload() else "CPU only"
    return f"{LLAMA_CPP_PYTHON_VERSION}, {gpu}"


def _native() -> str:
    from spark_runtime.native.build import library_path
    from spark_runtime.native_tap import native_library

    native_library()
    _, stamp = library_path()
    return f"counting in native code, built as {stamp}"


def _model(path: Path) -> str:
    from spark_runtime.model_shape import read_model_shape

    shape = read_model_shape(path)
    experts = sorted({layer.n_experts for layer in shape.layers})
    chosen = sorted({layer.top_k for layer in shape.layers})
    return (
        f"{path.name}: {shape.architecture}, {len(shape.layers)} of {shape.n_blocks} blocks with "
        f"{'/'.join(map(str, experts))} experts, {'/'.join(map(str, chosen))} of them for a token "
        f"({format_size(shape.expert_bytes_total)} beside {format_size(shape.core_bytes)}), {shape.fingerprint}"
    )


def _spool(context: AgentContext) -> str:
    with context.spool() as spool:
        stats = spool.stats()
    return f"{stats.pending} waiting, {stats.rejected} rejected, {stats.dropped} dropped"


def _service(context: AgentContext) -> list[_Check]:
    """Whether the service answers, and what it thinks of this machine's clock."""
    dates: list[str | None] = []

    def look() -> str:
        with context.client() as client:
            count = len(client.profiles().profiles)
            dates.append(client.last_date)
            return f"{client.base_url}: {counted(count, 'profile')}"

    def clock() -> str:
        return machine_checks.skew_line(dates[0], dt.datetime.now(dt.UTC))

    service = _run("service", "warn", look)
    return [service, _run("clock", "warn", clock)] if dates else [service]


def _consent(context: AgentContext) -> _Check:
    consent = context.config.consent
    if consent is not None and consent.granted:
        return _Check("consent", "ok", f"granted for {consent.service_url}")
    state = "never asked" if consent is None else "refused"
    return _Check("consent", "warn", state, "nothing is uploaded, profiles stay local", "spark-agent upload consent")


def _line(check: _Check) -> str:
    text = f"{check.status:4}  {check.name:16}  {check.value or check.reason}"
    if check.value and check.reason:
        text += f" ({check.reason})"
    return text + (f"\n      {'':16}  fix: {check.fix}" if check.fix else "")
