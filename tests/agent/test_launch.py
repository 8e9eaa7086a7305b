from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.commands.launch import _registered as registered_at
from spark_agent.launch import TOOLS, Endpoint, cloud_variables, launch_of
from spark_agent.running import RunningAgents

FOLDER = Path("/state/launch")
ENDPOINT = Endpoint("http://127.0.0.1:11711", "nano-q4_0", "a key", 32768)
UNKNOWN = Endpoint("http://127.0.0.1:11711", "nano-q4_0", "a key", None)
CLOUD = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_BEDROCK_BASE_URL",
    "ANTHROPIC_VERTEX_PROJECT_ID",
    "AWS_ACCESS_KEY_ID",
    "AWS_BEARER_TOKEN_BEDROCK",
    "AWS_PROFILE",
    "AWS_SECRET_ACCESS_KEY",
    "AZURE_OPENAI_ENDPOINT",
    "BRAND_NEW_CLOUD_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_VERTEX",
    "GEMINI_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_GENERATIVE_AI_API_KEY",
    "MISTRAL_API_KEY",
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "OPENROUTER_API_KEY",
    "VERTEX_LOCATION",
    "anthropic_api_key",
)
KEPT = ("AWS_REGION", "CODEX_HOME", "EDITOR", "GITHUB_TOKEN", "HOME", "PATH", "SPARKMOE_LAUNCH_KEY", "TERM")


def test_every_way_to_a_cloud_is_taken_out():
    assert cloud_variables([*CLOUD, *KEPT]) == tuple(sorted(CLOUD))
    assert cloud_variables(CLOUD, keep=["AWS_PROFILE", "OPENAI_API_KEY"]) == tuple(
        sorted(set(CLOUD) - {"AWS_PROFILE", "OPENAI_API_KEY"})
    )


@pytest.mark.parametrize("name", TOOLS)
def test_no_cloud_is_left_whatever_the_tool(name):
    secrets = {variable: f"secret of {variable}" for variable in CLOUD}
    variables = {**secrets, **dict.fromkeys(KEPT, "kept")}
    launch = launch_of(TOOLS[name], ENDPOINT, ["--resume", "a b"], variables, folder=FOLDER)
    child = launch.environment_of(variables)
    assert not set(child.values()) & set(secrets.values())
    assert all(child[variable] for variable in KEPT)
    assert launch.arguments[0] == TOOLS[name].program
    assert launch.arguments[-2:] == ("--resume", "a b")
    told = json.dumps([launch.arguments, launch.environment])
    assert "127.0.0.1:11711" in told
    assert "nano-q4_0" in told
    assert "a key" not in " ".join(launch.arguments), "a list of processes shows no key"


def test_claude_code():
    launch = launch_of(TOOLS["claude"], ENDPOINT, [], [], folder=FOLDER)
    child = launch.environment
    assert (child["ANTHROPIC_BASE_URL"], child["ANTHROPIC_AUTH_TOKEN"]) == ("http://127.0.0.1:11711", "a key")
    assert {child[name] for name in child if name.endswith("_MODEL")} == {"nano-q4_0"}
    told = json.loads(launch.arguments[launch.arguments.index("--settings") + 1])
    # What only Anthropic's servers do, and would be asked for.
    assert (told["skipWebFetchPreflight"], told["permissions"]) == (True, {"deny": ["WebSearch"]})
    settings = told["env"]
    assert settings["ANTHROPIC_BASE_URL"] == child["ANTHROPIC_BASE_URL"]
    assert settings["CLAUDE_CODE_USE_BEDROCK"] == ""
    for told in (child, settings):
        # It takes 200,000 tokens for granted otherwise, and never shortens a conversation.
        assert told["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
        assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in told, "its own prompt would already be too long"
        assert told["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
        assert told["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
        assert told["CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL"] == "1"
        assert told["CLAUDE_CODE_DISABLE_1M_CONTEXT"] == "1"
    unknown = launch_of(TOOLS["claude"], UNKNOWN, [], [], folder=FOLDER)
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in unknown.environment


@pytest.mark.parametrize("n_ctx", [57_344, 65_536, 131_072, 262_144, 1_000_000])
def test_claude_code_shortens_a_conversation_when_just_an_answer_has_room(n_ctx):
    endpoint = Endpoint("http://127.0.0.1:1", "m", "k", n_ctx)
    child = launch_of(TOOLS["claude"], endpoint, [], [], folder=FOLDER).environment
    assert 100_000 <= int(child["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]) <= 1_000_000
    told, answer = (int(child[f"CLAUDE_CODE_MAX_{name}_TOKENS"]) for name in ("CONTEXT", "OUTPUT"))
    # Its own arithmetic, as of 2.1.197.
    shortens_at = told - min(answer, 20_000) - 13_000
    assert shortens_at + answer < n_ctx, "the answer after it has room"
    assert shortens_at >= n_ctx - answer - 1_000 >= 0.6 * n_ctx, "a conversation has most of the context"
    assert told - 3_000 > shortens_at, "it shortens before it refuses to go on"


def overrides_of(arguments) -> dict:
    assert arguments[::2] == ("-c",) * (len(arguments) // 2)
    return tomllib.loads("\n".join(arguments[1::2]))


def test_codex():
    launch = launch_of(TOOLS["codex"], ENDPOINT, [], [], folder=FOLDER)
    config = overrides_of(launch.arguments[1:])
    assert (config["model"], config["model_provider"], config["model_context_window"]) == ("nano-q4_0", "spark", 32768)
    assert config["model_auto_compact_token_limit"] == 24576, "an answer has room when it shortens a conversation"
    provider = config["model_providers"]["spark"]
    assert provider["base_url"] == "http://127.0.0.1:11711/v1"
    assert provider["wire_api"] == "responses"
    assert launch.environment == {provider["env_key"]: "a key"}
    assert config["check_for_update_on_startup"] is False
    small = Endpoint("http://127.0.0.1:1", "m", "k", 16_384)
    cramped = overrides_of(launch_of(TOOLS["codex"], small, [], [], folder=FOLDER).arguments[1:])
    assert "model_auto_compact_token_limit" not in cramped, "its own prompt would already be too long"
    assert (config["analytics"], config["features"]) == ({"enabled": False}, {"apps": False, "plugins": False})


@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1))
def test_any_model_name_survives_toml_and_json(model):
    endpoint = Endpoint("http://127.0.0.1:1", model, "k")
    codex, opencode = (launch_of(TOOLS[name], endpoint, [], [], folder=FOLDER) for name in ("codex", "opencode"))
    assert overrides_of(codex.arguments[1:])["model"] == model
    config = json.loads(opencode.environment["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == f"spark/{model}"


def test_opencode():
    launch = launch_of(TOOLS["opencode"], ENDPOINT, [], ["OPENCODE_CONFIG_CONTENT"], folder=FOLDER)
    config = json.loads(launch.environment["OPENCODE_CONFIG_CONTENT"])
    assert config["enabled_providers"] == ["spark"]
    assert config["model"] == config["small_model"] == "spark/nano-q4_0"
    provider = config["provider"]["spark"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:11711/v1"
    assert provider["models"]["nano-q4_0"]["limit"] == {"context": 32768, "output": 8192}, (
        "an answer's room is taken off the context: what is left must hold a conversation"
    )
    assert launch.environment["OPENCODE_DISABLE_MODELS_FETCH"] == "1"


def test_aider():
    launch = launch_of(TOOLS["aider"], ENDPOINT, [], ["OPENAI_API_KEY"], folder=FOLDER)
    assert launch.environment["OPENAI_API_KEY"] == "a key"
    assert launch.removed == ()
    assert launch.arguments[launch.arguments.index("--weak-model") + 1] == "openai/nano-q4_0"
    described = Path(launch.arguments[launch.arguments.index("--model-metadata-file") + 1])
    about = json.loads(launch.files[described])["openai/nano-q4_0"]
    assert (about["max_input_tokens"], about["max_output_tokens"]) == (32768, 8192)
    assert launch.environment["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    unknown = launch_of(TOOLS["aider"], UNKNOWN, [], [], folder=FOLDER)
    assert unknown.files == {}
    assert "--model-metadata-file" not in unknown.arguments


def test_a_context_that_a_tool_fills_by_itself_is_told():
    assert TOOLS["claude"].cramped(32768)
    assert not TOOLS["claude"].cramped(65536)
    assert not TOOLS["aider"].cramped(8192)
    assert not any(tool.cramped(None) for tool in TOOLS.values())


def test_an_agent_that_listens_everywhere_is_not_meant_by_another_machines_address(monkeypatch):
    class Known:
        def listening_on(self, host: str, port: int) -> str:
            return f"{host}:{port}"

    monkeypatch.setattr(RunningAgents, "of_this_machine", Known)
    assert [registered_at(host, 11711) for host in ("127.0.0.1", "localhost", "0.0.0.0")] == [
        "127.0.0.1:11711", "localhost:11711", "0.0.0.0:11711"
    ]  # fmt: skip
    assert [registered_at(host, 11711) for host in ("192.0.2.7", "gpu.example.com")] == [None, None]
