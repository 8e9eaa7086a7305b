from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_agent.launch import TOOLS, Endpoint, cloud_variables, launch_of

ENDPOINT = Endpoint("http://127.0.0.1:11711", "nano-q4_0", "a key", 32768)
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
    launch = launch_of(TOOLS[name], ENDPOINT, ["--resume", "a b"], variables)
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
    launch = launch_of(TOOLS["claude"], ENDPOINT, [], [])
    child = launch.environment
    assert (child["ANTHROPIC_BASE_URL"], child["ANTHROPIC_AUTH_TOKEN"]) == ("http://127.0.0.1:11711", "a key")
    assert {child[name] for name in child if name.endswith("_MODEL")} == {"nano-q4_0"}
    settings = json.loads(launch.arguments[launch.arguments.index("--settings") + 1])["env"]
    assert settings["ANTHROPIC_BASE_URL"] == child["ANTHROPIC_BASE_URL"]
    assert settings["CLAUDE_CODE_USE_BEDROCK"] == ""


def overrides_of(arguments) -> dict:
    assert arguments[::2] == ("-c",) * (len(arguments) // 2)
    return tomllib.loads("\n".join(arguments[1::2]))


def test_codex():
    launch = launch_of(TOOLS["codex"], ENDPOINT, [], [])
    config = overrides_of(launch.arguments[1:])
    assert (config["model"], config["model_provider"], config["model_context_window"]) == ("nano-q4_0", "spark", 32768)
    provider = config["model_providers"]["spark"]
    assert provider["base_url"] == "http://127.0.0.1:11711/v1"
    assert provider["wire_api"] == "responses"
    assert launch.environment == {provider["env_key"]: "a key"}


@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1))
def test_any_model_name_survives_toml_and_json(model):
    endpoint = Endpoint("http://127.0.0.1:1", model, "k")
    assert overrides_of(launch_of(TOOLS["codex"], endpoint, [], []).arguments[1:])["model"] == model
    config = json.loads(launch_of(TOOLS["opencode"], endpoint, [], []).environment["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == f"spark/{model}"


def test_opencode():
    launch = launch_of(TOOLS["opencode"], ENDPOINT, [], ["OPENCODE_CONFIG_CONTENT"])
    config = json.loads(launch.environment["OPENCODE_CONFIG_CONTENT"])
    assert config["enabled_providers"] == ["spark"]
    assert config["model"] == config["small_model"] == "spark/nano-q4_0"
    provider = config["provider"]["spark"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:11711/v1"
    assert provider["models"]["nano-q4_0"]["limit"]["context"] == 32768


def test_aider():
    launch = launch_of(TOOLS["aider"], ENDPOINT, [], ["OPENAI_API_KEY"])
    assert launch.environment["OPENAI_API_KEY"] == "a key"
    assert launch.removed == ()
    assert launch.arguments[launch.arguments.index("--weak-model") + 1] == "openai/nano-q4_0"
