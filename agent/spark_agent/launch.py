"""How each coding tool is started against an agent: its arguments and its environment. Pure.

A tool must not fall back to a paid endpoint, whatever is set on this machine: every variable that leads to one is taken
out of its environment, and what it reads from its own settings files is overruled where it allows that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["TOOLS", "Configured", "Endpoint", "Launch", "Tool", "cloud_variables", "launch_of"]

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
_CODEX_PROMPT = 14_000
"""About what Codex's own prompt takes with all its tools, tokens."""
_CODEX_QUIET = (
    # These look up and fetch from GitHub and ChatGPT, also where another provider is used.
    "check_for_update_on_startup=false",
    "analytics.enabled=false",
    "features.apps=false",
    "features.plugins=false",
)
_LONGEST_ANSWER = 32_000
"""Tokens: what Claude Code and OpenCode plan for where nobody says, however large a context is."""
_CLAUDE_PROMPT = 26_000
"""About what Claude Code's own prompt takes with all its tools, tokens."""
_CLAUDE_BUFFER = 13_000
_CLAUDE_COUNTED = 20_000
"""Claude Code shortens a conversation when its buffer's tokens are left beside an answer's, of which it counts so many
at most: seen in 2.1.197."""
_CLAUDE_WINDOWS = (100_000, 1_000_000)
"""What it takes as the window to shorten a conversation by; its context is the limit below that."""
_SUMMARY_REQUEST = 1_000
"""About what Claude Code's request for a summary adds to a conversation, tokens."""
_OPENCODE_QUIET = (
    "OPENCODE_DISABLE_AUTOUPDATE",
    "OPENCODE_DISABLE_LSP_DOWNLOAD",
    "OPENCODE_DISABLE_MODELS_FETCH",
    "OPENCODE_DISABLE_SHARE",
)
"""What it fetches, or sends, without being asked."""


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
    trusted: Path | None = None
    """File of those whom it must trust beyond whom this machine does, PEM: a certificate authority of one's own."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is run: arguments, and what changes in the environment."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Set."""
    removed: tuple[str, ...]
    """Taken out, by name."""
    files: dict[Path, str] = field(default_factory=dict)
    """Written before it starts: what a tool reads from a file alone."""

    def environment_of(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment of the tool, from this process's."""
        kept = {name: value for name, value in variables.items() if name not in self.removed}
        return kept | self.environment


@dataclass(frozen=True, slots=True)
class Configured:
    """How a tool is told of an agent."""

    arguments: tuple[str, ...]
    """Before the person's own."""
    environment: dict[str, str]
    files: dict[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tool:
    """A coding tool."""

    program: str
    install: str
    """How to get it."""
    prompt_tokens: int
    """About what its own prompt takes with all its tools, tokens: measured, with a vocabulary of 8192."""
    configure: Callable[[Endpoint, Path], Configured]
    """From where an agent is, and a folder for files."""
    trust_variables: tuple[str, ...]
    """That name a file of certificates to trust."""

    def cramped(self, n_ctx: int | None) -> bool:
        """Whether a context is known, and leaves less than as much again for work as the tool's own prompt takes."""
        return n_ctx is not None and n_ctx < 2 * self.prompt_tokens


def cloud_variables(variables: Iterable[str], keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of variables that may lead a tool to somebody's cloud, but those to ``keep``."""
    return tuple(sorted(name for name in variables if name not in keep and _CLOUD.fullmatch(name.upper())))


def launch_of(
    tool: Tool,
    endpoint: Endpoint,
    arguments: Sequence[str],
    variables: Iterable[str],
    keep: Sequence[str] = (),
    *,
    folder: Path,
) -> Launch:
    """A tool's start against ``endpoint`` with a person's ``arguments``, in a process with these ``variables``.

    ``folder`` is where files are that a tool reads.
    """
    told = tool.configure(endpoint, folder)
    if endpoint.trusted is not None:
        told.environment.update(dict.fromkeys(tool.trust_variables, str(endpoint.trusted)))
    removed = [name for name in cloud_variables(variables, keep) if name not in told.environment]
    return Launch((tool.program, *told.arguments, *arguments), told.environment, tuple(removed), told.files)


def _answer_limit(n_ctx: int) -> int:
    """Tokens of one answer that a tool plans for: a conversation is shortened so that they have room."""
    return max(min(n_ctx // 4, _LONGEST_ANSWER), 1)


def _claude(endpoint: Endpoint, _folder: Path) -> Configured:
    """Claude Code: code.claude.com/docs/en/env-vars and cli-reference.

    Variables in its settings files come before the process's own; ``--settings`` comes before those.
    """
    environment = {
        "ANTHROPIC_BASE_URL": endpoint.base_url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.key,
        **dict.fromkeys(_CLAUDE_MODELS, endpoint.model),
        # Else it reports, updates itself and asks for features over the network.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Else its first interactive turn fetches a list of plugins from Anthropic and GitHub.
        "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
        # Else its list of models offers this one with a context of a million tokens, as the default.
        "CLAUDE_CODE_DISABLE_1M_CONTEXT": "1",
        # Else the system prompt begins with a line that differs between conversations, and none can be reused.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    if endpoint.n_ctx is not None:
        environment |= _claude_limits(endpoint.n_ctx)
    # The key is no secret of a cloud's, but it need not show in a list of processes.
    settings = {name: value for name, value in environment.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    off = dict.fromkeys(("ANTHROPIC_API_KEY", *_CLAUDE_SWITCHES), "")
    told = {
        "env": settings | off,
        # Else it asks Anthropic about the host of every page that it is to fetch.
        "skipWebFetchPreflight": True,
        # Only Anthropic's servers search; a model that asked would get an error.
        "permissions": {"deny": ["WebSearch"]},
    }
    return Configured(("--settings", _json(told)), environment)


def _claude_limits(n_ctx: int) -> dict[str, str]:
    """What Claude Code is told of a context, so that it shortens a conversation while an answer still has room.

    It takes 200,000 tokens for granted; it believes another number of models whose names do not begin with claude-.
    Left alone it shortens only what was refused, so that answers before that are cut by the context's end, and the work
    stops. Given a window it shortens in time, but keeps a buffer made for 200,000 tokens: that is added here. Where its
    own prompt takes half of the context there is no such room, and it shortens what was refused.
    """
    answer = _answer_limit(n_ctx)
    limits = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": n_ctx, "CLAUDE_CODE_MAX_OUTPUT_TOKENS": answer}
    if n_ctx >= 2 * _CLAUDE_PROMPT:
        shortens_at = n_ctx - answer - _SUMMARY_REQUEST
        told = shortens_at + min(answer, _CLAUDE_COUNTED) + _CLAUDE_BUFFER
        least, most = _CLAUDE_WINDOWS
        limits["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = told
        limits["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = max(least, min(told, most))
    return {name: str(tokens) for name, tokens in limits.items()}


def _codex(endpoint: Endpoint, _folder: Path) -> Configured:
    """Codex: developers.openai.com/codex/config-advanced; ``-c`` comes before every file."""
    base = _json(f"{endpoint.base_url}/v1")
    provider = f'{{name="Spark", base_url={base}, env_key="{_KEY_VARIABLE}", wire_api="responses"}}'
    overrides = [f"model_providers.spark={provider}", 'model_provider="spark"', f"model={_json(endpoint.model)}"]
    if endpoint.n_ctx is not None:
        overrides.append(f"model_context_window={endpoint.n_ctx}")
        if endpoint.n_ctx >= 2 * _CODEX_PROMPT:
            # Else it shortens a conversation when a tenth is left, and an answer that is cut ends the turn.
            overrides.append(f"model_auto_compact_token_limit={endpoint.n_ctx - _answer_limit(endpoint.n_ctx)}")
    overrides += _CODEX_QUIET
    return Configured(tuple(part for each in overrides for part in ("-c", each)), {_KEY_VARIABLE: endpoint.key})


def _opencode(endpoint: Endpoint, _folder: Path) -> Configured:
    """OpenCode: opencode.ai/docs/config; the variable's text is merged over its files."""
    model: dict[str, object] = {"name": endpoint.model}
    if endpoint.n_ctx is not None:
        model["limit"] = {"context": endpoint.n_ctx, "output": _answer_limit(endpoint.n_ctx)}
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
    environment = {"OPENCODE_CONFIG_CONTENT": _json(config), _KEY_VARIABLE: endpoint.key}
    return Configured((), environment | dict.fromkeys(_OPENCODE_QUIET, "1"))


def _aider(endpoint: Endpoint, folder: Path) -> Configured:
    """Aider: aider.chat/docs/llms/openai-compat.html.

    A project's ``.env`` comes before variables, arguments come before that.
    """
    base = f"{endpoint.base_url}/v1"
    model = f"openai/{endpoint.model}"
    models = ("--model", model, "--weak-model", model, "--editor-model", model)
    quiet = ("--no-show-model-warnings", "--no-check-update", "--no-show-release-notes", "--no-analytics")
    arguments: tuple[str, ...] = ("--openai-api-base", base, *models, *quiet)
    # LiteLLM's own table of models comes from the network otherwise.
    environment = {"OPENAI_API_BASE": base, "OPENAI_API_KEY": endpoint.key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if endpoint.n_ctx is None:
        return Configured(arguments, environment)
    about: dict[str, object] = {"max_input_tokens": endpoint.n_ctx, "max_output_tokens": _answer_limit(endpoint.n_ctx)}
    about |= {"max_tokens": endpoint.n_ctx, "input_cost_per_token": 0, "output_cost_per_token": 0}
    about |= {"litellm_provider": "openai", "mode": "chat"}
    # It asks the network about a model that no such file describes.
    described = folder / "aider.model.metadata.json"
    return Configured(
        (*arguments, "--model-metadata-file", str(described)), environment, {described: _json({model: about}) + "\n"}
    )


def _json(value: object) -> str:
    """Text whose strings are TOML's as well: no surrogate pairs, no DEL."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace("\x7f", r"\u007f")


TOOLS: dict[str, Tool] = {
    "claude": Tool(
        "claude", "npm install -g @anthropic-ai/claude-code", _CLAUDE_PROMPT, _claude, ("NODE_EXTRA_CA_CERTS",)
    ),
    "codex": Tool(
        "codex", "npm install -g @openai/codex", _CODEX_PROMPT, _codex, ("CODEX_CA_CERTIFICATE", "SSL_CERT_FILE")
    ),
    "opencode": Tool("opencode", "npm install -g opencode-ai", 8_400, _opencode, ("NODE_EXTRA_CA_CERTS",)),
    "aider": Tool(
        "aider",
        "python -m pip install aider-install && aider-install",
        1_000,
        _aider,
        ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
    ),
}
