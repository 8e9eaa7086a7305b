"""How each coding tool is started against an agent: its arguments and its environment. Pure.

A tool must not fall back to a paid endpoint, whatever is set on this machine: every variable that leads to one is taken
out of its environment, and what it reads from its own settings files is overruled where it allows that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["TOOLS", "Endpoint", "Launch", "Tool", "cloud_variables", "launch_of"]

_KEY_VARIABLE = "SPARKMOE_LAUNCH_KEY"
"""Holds the agent's key for Codex, which is told a variable's name, not a key."""

_CLOUD = re.compile(
    # Keys, addresses, accounts and models of hosted models, by the names that these tools and their libraries read.
    r"(ANTHROPIC|OPENAI|AZURE_OPENAI|AZURE_API|AZURE_AI|AZURE_COGNITIVE_SERVICES|GEMINI|VERTEX|VERTEXAI|OPENROUTER"
    r"|MISTRAL|GROQ|XAI|DEEPSEEK|COHERE|TOGETHER|TOGETHERAI|TOGETHER_AI|FIREWORKS|FIREWORKS_AI|CEREBRAS|PERPLEXITY"
    r"|PERPLEXITYAI|REPLICATE)_.+"
    # Switches of Claude Code to other clouds, and its own sign-in.
    r"|CLAUDE_CODE_(USE|SKIP)_.+|CLAUDE_CODE_OAUTH_.+|CLAUDE_CODE_API_KEY.*|CLAUDE_CODE_SUBAGENT_MODEL"
    # Accounts by which Bedrock and Vertex are paid.
    r"|AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|PROFILE|DEFAULT_PROFILE|WEB_IDENTITY_TOKEN_FILE|ROLE_ARN)"
    r"|AWS_(BEARER_TOKEN_.+|CONTAINER_CREDENTIALS_.+)|BEDROCK_.+"
    r"|GOOGLE_(APPLICATION_CREDENTIALS|CLOUD_PROJECT|CLOUD_LOCATION|GENAI_.+|GENERATIVE_AI_.+|VERTEX_.+)"
    r"|CLOUD_ML_REGION|CODEX_ACCESS_TOKEN|AICORE_SERVICE_KEY"
    # Whatever else calls itself a key of an API.
    r"|.+_API_KEY|.+_API_KEYS"
)
_CLAUDE_SWITCHES = ("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""A tool's large, small and helping models are all the one that runs here."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running agent."""

    base_url: str
    """Without ``/v1``."""
    model: str
    """The name that it serves the model under."""
    key: str
    """Its token; any text where it asks for none, as tools want one."""
    n_ctx: int | None = None
    """Its context, tokens; ``None`` where it does not say."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is run: arguments, and what changes in the environment."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Set."""
    removed: tuple[str, ...]
    """Taken out, by name."""

    def environment_of(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of the tool, from this process's."""
        kept = {name: value for name, value in variables.items() if name not in self.removed}
        return kept | self.environment


@dataclass(frozen=True, slots=True)
class Tool:
    """A coding tool."""

    program: str
    install: str
    """How to get it."""
    configure: Callable[[Endpoint], tuple[tuple[str, ...], dict[str, str]]]
    """Arguments before the person's own, and variables."""


def cloud_variables(variables: Iterable[str], keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of variables that may lead a tool to somebody's cloud, but those to ``keep``."""
    return tuple(sorted(name for name in variables if name not in keep and _CLOUD.fullmatch(name.upper())))


def launch_of(
    tool: Tool, endpoint: Endpoint, arguments: Sequence[str], variables: Iterable[str], keep: Sequence[str] = ()
) -> Launch:
    """A tool's start against ``endpoint`` with a person's ``arguments``, in a process with these ``variables``."""
    before, environment = tool.configure(endpoint)
    removed = [name for name in cloud_variables(variables, keep) if name not in environment]
    return Launch((tool.program, *before, *arguments), environment, tuple(removed))


def _claude(endpoint: Endpoint) -> tuple[tuple[str, ...], dict[str, str]]:
    """Claude Code: code.claude.com/docs/en/env-vars and cli-reference.

    Variables in its settings files come before the process's own; ``--settings`` comes before those.
    """
    environment = {
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        **dict.fromkeys(_CLAUDE_MODELS, endpoint.model),
        # Else it reports, updates itself and asks for features over the network.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    # The key is no secret of a cloud's, but it need not show in a list of processes.
    settings = {name: value for name, value in environment.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    off = dict.fromkeys(("ANTHROPIC_API_KEY", *_CLAUDE_SWITCHES), "")
    return ("--settings", _json({"env": settings | off})), environment


def _codex(endpoint: Endpoint) -> tuple[tuple[str, ...], dict[str, str]]:
    """Codex: developers.openai.com/codex/config-advanced; ``-c`` comes before every file."""
    base = _json(f"{endpoint.base_url}/v1")
    provider = f'{{name="Spark", base_url={base}, env_key="{_KEY_VARIABLE}", wire_api="responses"}}'
    overrides = [f"model_providers.spark={provider}", 'model_provider="spark"', f"model={_json(endpoint.model)}"]
    if endpoint.n_ctx is not None:
        overrides.append(f"model_context_window={endpoint.n_ctx}")
    return tuple(part for each in overrides for part in ("-c", each)), {_KEY_VARIABLE: endpoint.key}


def _opencode(endpoint: Endpoint) -> tuple[tuple[str, ...], dict[str, str]]:
    """OpenCode: opencode.ai/docs/config; the variable's text is merged over its files."""
    model: dict[str, object] = {"name": endpoint.model}
    if endpoint.n_ctx is not None:
        model["limit"] = {"context": endpoint.n_ctx, "output": endpoint.n_ctx}
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"spark/{endpoint.model}",
        "small_model": f"spark/{endpoint.model}",
        # No other provider exists then, whatever it is signed in to.
        "enabled_providers": ["spark"],
        "provider": {
            "spark": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Spark",
                "options": {"baseURL": f"{endpoint.base_url}/v1", "apiKey": f"{{env:{_KEY_VARIABLE}}}"},
                "models": {endpoint.model: model},
            }
        },
    }
    return (), {"OPENCODE_CONFIG_CONTENT": _json(config), _KEY_VARIABLE: endpoint.key}


def _aider(endpoint: Endpoint) -> tuple[tuple[str, ...], dict[str, str]]:
    """Aider: aider.chat/docs/llms/openai-compat.html.

    A project's ``.env`` comes before variables, arguments come before that.
    """
    base = f"{endpoint.base_url}/v1"
    model = f"openai/{endpoint.model}"
    models = ("--model", model, "--weak-model", model, "--editor-model", model)
    return ("--openai-api-base", base, *models, "--no-show-model-warnings"), {
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": endpoint.key,
    }


def _json(value: object) -> str:
    """Text whose strings are TOML's as well: no surrogate pairs, no DEL."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("\x7f", r"\u007f")


TOOLS: dict[str, Tool] = {
    "claude": Tool("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Tool("codex", "npm install -g @openai/codex", _codex),
    "opencode": Tool("opencode", "npm install -g opencode-ai", _opencode),
    "aider": Tool("aider", "python -m pip install aider-install && aider-install", _aider),
}
