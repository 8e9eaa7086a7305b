"""Requests in the shapes that coding tools send, as seen on the wire; their words are ours."""

from __future__ import annotations

import json
from functools import partial

import pytest

from spark_agent.dialogue.events import Call
from spark_agent.server import responses_requests
from spark_agent.server.anthropic_requests import CountRequest, MessagesRequest
from spark_agent.server.api_error import ApiError
from spark_agent.server.openai_requests import ChatRequest
from spark_agent.server.responses_requests import ResponsesRequest, messages_of
from spark_agent.server.responses_tools import ResponsesTools
from spark_runtime.sampling import Sampling

PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
EXEC = {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": PARAMETERS}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patch files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "patch"'},
}


def member(name: str) -> dict[str, object]:
    return {"type": "function", "name": name, "description": f"Does {name}.", "parameters": {"type": "object"}}


AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [member("spawn")]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": PARAMETERS}
CODEX_TOOLS = [EXEC, PATCH, AGENTS, {"type": "web_search", "external_web_access": False}]


def item(role: str, text: str) -> dict[str, object]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX = {
    "input": [item("developer", "Be brief."), item("developer", "Skills."), item("user", "<env/>"), item("user", "Hi")],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"x": "y"},
}


def tools_of(*declared: object, later: tuple[object, ...] = ()) -> ResponsesTools:
    return ResponsesTools([(f"tools[{at}]", each) for at, each in enumerate(declared)], [("later", x) for x in later])


def test_groups_of_tools_are_told_by_their_own_names():
    tools = tools_of(*CODEX_TOOLS)
    assert [tool.name for tool in tools.tools] == ["exec_command", "apply_patch", "spawn"]
    assert tools.tools[2].description == "agents: Other agents.\n\nDoes spawn."
    item = tools.item(Call("spawn", '{"a": 1}'), "1", "call_1")
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn", "agents")
    assert "namespace" not in tools.item(Call("exec_command", "{}"), "1", "call_1")
    assert tools.item(Call("unknown", "{}"), "1", "call_1")["name"] == "unknown"


def test_the_same_name_in_two_groups_is_told_apart():
    mcp = {"type": "namespace", "name": "mcp__files__", "tools": [member("read")]}
    other = {"type": "namespace", "name": "web", "tools": [member("read")]}
    tools = tools_of(mcp, other)
    assert tools.names() == {"mcp__files__read", "web__read"}
    item = tools.item(Call("web__read", "{}"), "1", "call_1")
    assert (item["name"], item["namespace"]) == ("read", "web")
    assert tools.told("mcp__files__", "read") == "mcp__files__read"
    assert tools.told("gone", "read") == "gone__read", "a call to a tool that is not offered any more keeps its name"


def test_a_tool_that_takes_a_text():
    tools = tools_of(PATCH)
    (tool,) = tools.tools
    assert 'start: "patch"' in json.dumps(tool.parameters).replace('\\"', '"')
    item = tools.item(Call("apply_patch", '{"input": "*** Begin"}'), "1", "call_1")
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")
    assert tools.item(Call("apply_patch", '{"patch": 1}'), "1", "call_1")["input"] == '{"patch": 1}'


def test_tools_that_came_in_the_conversation():
    found = {"type": "tool_search_output", "call_id": "c1", "tools": [AGENTS, EXEC]}
    call = {"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "agents"}}
    body = ResponsesRequest.model_validate({"input": [item("user", "Hi"), call, found], "tools": [EXEC, SEARCH]})
    tools = body.declared()
    assert [tool.name for tool in tools.tools] == ["exec_command", "tool_search", "spawn"]
    asked, calling, result = messages_of(body.items(), tools)
    assert (asked.text, calling.calls[0].name, result.text) == ("Hi", "tool_search", '["agents", "exec_command"]')
    item_ = tools.item(Call("tool_search", '{"query": "x"}'), "1", "call_1")
    assert (item_["type"], item_["execution"], item_["arguments"]) == ("tool_search_call", "client", {"query": "x"})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type": "namespace", "name": "a"}, "expected a name, and tools as a list"),
        ({"type": "namespace", "name": "a", "tools": [{"type": "teleport"}]}, "tools[0].tools[0].type"),
        ({"type": "local_shell"}, "'local_shell'"),
        ({"type": "custom", "name": "a", "format": {"type": "smoke"}}, "tools[0].format"),
        ({"type": "custom"}, "tools[0].name"),
        ({"type": "function", "name": "a b"}, "tools[0] (a b)"),
        (5, "tools[0].type"),
    ],
)
def test_tools_that_make_no_sense_are_named(wrong, said):
    with pytest.raises(ApiError) as raised:
        tools_of(wrong)
    assert said in str(raised.value)


def test_what_happened_elsewhere_is_no_message():
    items = [
        item("user", "Hi"),
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "sealed"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        {"type": "function_call", "call_id": "c2", "namespace": "agents", "name": "spawn", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "data:"}]},
    ]
    hi, patching, patched, spawning, shown = messages_of(items, tools_of(*CODEX_TOOLS))
    assert hi.text == "Hi"
    assert (patching.calls[0].name, json.loads(patching.calls[0].arguments)) == ("apply_patch", {"input": "*** Begin"})
    assert (patched.text, patched.name) == ("Done.", "apply_patch")
    assert spawning.calls[0].name == "spawn"
    assert shown.text == "[image: not shown, as this server reads text only]"
    with pytest.raises(ApiError, match="input_image is not supported"):
        messages_of([{"role": "user", "content": [{"type": "input_image"}]}], tools_of())
    with pytest.raises(ApiError, match="expected a text"):
        messages_of([{"type": "custom_tool_call", "call_id": "c", "name": "a"}], tools_of())


def events_of(reply) -> list[dict]:
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]


def test_codex_is_answered(agent):
    reply = agent.client.post("/v1/responses", json={**CODEX, "stream": True, "max_output_tokens": 4})
    assert reply.status_code == 200
    assert events_of(reply)[-1]["type"] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "member"),
    [("exec_command", "function_call", "arguments"), ("apply_patch", "custom_tool_call", "input")],
)
def test_a_call_comes_as_the_kind_of_its_tool(agent, monkeypatch, stream, name, kind, member):
    # The demo model would write some texts to the end of its context: every other token here ends them.
    closing = tuple((token, 4.0) for token in range(agent.engine.n_vocab) if b'"' in agent.engine.piece(token))
    monkeypatch.setattr(responses_requests, "Sampling", partial(Sampling, seed=1, logit_bias=closing))
    choice = {"type": "custom" if kind.startswith("custom") else "function", "name": name}
    body = {**CODEX, "tool_choice": choice, "stream": stream, "max_output_tokens": 200}
    reply = agent.client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    if not stream:
        (called,) = reply.json()["output"]
        assert (called["type"], called["name"]) == (kind, name)
        return
    events = events_of(reply)
    added, done = (
        next(each for each in events if each["type"] == f"response.output_item.{step}") for step in ("added", "done")
    )
    assert (added["item"]["type"], added["item"][member]) == (kind, "")
    said = next(each for each in events if each["type"].endswith("_call_input.done" if member == "input" else "s.done"))
    assert said[member] == done["item"][member]
    assert said["item_id"] == added["item"]["id"] == done["item"]["id"]


CLAUDE = {
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=cli;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nx\n</system-reminder>\n"},
            {"type": "text", "text": "Hi"},
        ]},
        {"role": "system", "content": "There are agents."},
    ],
    "tools": [{"name": "Write", "description": "Writes.", "input_schema": {"type": "object"}}],
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}  # fmt: skip


def test_claude_code_is_asked_about_as_it_asks():
    ask = MessagesRequest.model_validate(CLAUDE).ask()
    assert [(each.role, each.text) for each in ask.messages] == [
        ("system", "Be brief."),
        ("user", "<system-reminder>\nx\n</system-reminder>\nHi"),
        ("system", "There are agents."),
    ]
    assert (ask.reasoning.options["enable_thinking"], ask.reasoning.effort) == (True, "high")
    most = MessagesRequest.model_validate({**CLAUDE, "output_config": {"effort": "max"}}).ask()
    assert most.reasoning.effort == "max"


def test_claude_code_is_answered(agent):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
    assert agent.client.head("/").status_code == 200
    body = {**CLAUDE, "stream": True, "max_tokens": 4}
    reply = agent.client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert reply.status_code == 200
    assert events_of(reply)[-1]["type"] == "message_stop"
    count = agent.client.post("/v1/messages/count_tokens?beta=true", json={**CLAUDE, "max_tokens": None})
    assert count.json()["input_tokens"] == events_of(reply)[0]["message"]["usage"]["input_tokens"]


def test_what_a_tool_returned_cannot_be_refused():
    returned = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "tool_reference", "tool_name": "Read"}]
    calling = {"type": "tool_use", "id": "t1", "name": "Read", "input": {}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "server_tool_use"}, {"type": "web_search_tool_result"}, calling]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": returned}]},
    ]  # fmt: skip
    _, called, result = CountRequest.model_validate({"messages": messages}).ask().messages
    assert (called.text, called.calls[0].name) == ("", "Read")
    assert result.text == "[image: not shown, as this server reads text only]and[tool: Read]"
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "They greeted."}]}
    later = CountRequest.model_validate({"messages": [summary, messages[0]]}).ask()
    assert later.messages[0].text == "They greeted."


NOT_SHOWN = "[image: not shown, as this server reads text only]"
FILES = {
    "/v1/messages": ("messages", {"type": "image", "source": {"type": "base64", "data": "iVBO"}}),
    "/v1/chat/completions": ("messages", {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}),
    "/v1/responses": ("input", {"type": "input_image", "image_url": "data:image/png;base64,iVBO"}),
}


@pytest.mark.parametrize("path", FILES)
def test_a_file_is_refused_once_and_the_conversation_goes_on(agent, path):
    member, file = FILES[path]
    text = {"type": "input_text" if path == "/v1/responses" else "text", "text": "What is this?"}
    asked = {"role": "user", "content": [file, text]}
    body = {"max_tokens": 4} if path != "/v1/responses" else {"max_output_tokens": 16}
    refused = agent.client.post(path, json={**body, member: [{"role": "user", "content": "Hi"}, asked]})
    assert refused.status_code == 400
    assert "this server reads text only" in refused.json()["error"]["message"]
    # Tools repeat the question that was refused before the next one; an answer may stand between them, from elsewhere.
    for between in ([], [{"role": "assistant", "content": "A cat."}]):
        reply = agent.client.post(path, json={**body, member: [asked, *between, {"role": "user", "content": "Go on."}]})
        assert reply.status_code == 200, reply.text


def test_a_file_of_an_earlier_question_is_told_of():
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    on = {"role": "user", "content": "Go on."}
    told = CountRequest.model_validate({"messages": [asked, on]}).ask().messages[0]
    assert told.text == f"{NOT_SHOWN}What is this?"
    asked["content"][0] = {"type": "image_url", "image_url": {"url": "data:"}}
    told = ChatRequest.model_validate({"messages": [asked, on]}).ask().messages[0]
    assert told.text == f"{NOT_SHOWN}What is this?"
    asked["content"] = [{"type": "input_image"}, {"type": "input_text", "text": "What is this?"}]
    assert messages_of([asked, on], tools_of())[0].text == f"{NOT_SHOWN}What is this?"


def test_a_refused_file_is_named_by_the_place_that_claude_code_looks_for():
    # It joins the next question to the refused one, and leaves the file out only if the error says which block it was.
    content = [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    with pytest.raises(ApiError, match=r"^messages\.1\.content\.1\.image: image is not supported"):
        CountRequest.model_validate(
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]}
        ).ask()


def test_a_file_that_a_function_returned_is_told_of():
    call = {"id": "c1", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    shown = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "pic.png"}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": shown},
    ]
    assert ChatRequest.model_validate({"messages": messages}).ask().messages[2].text == f"{NOT_SHOWN}pic.png"


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_a_schema_for_the_answer_is_kept(agent, where):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "schema": schema}
    body = {"max_tokens": 60, "messages": [{"role": "user", "content": "Is it?"}]}
    body[where] = {"format": form} if where == "output_config" else form
    reply = agent.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert set(json.loads(reply.json()["content"][0]["text"])) == {"ok"}
    body[where] = {"format": {"type": "json_schema"}} if where == "output_config" else {"type": "json_schema"}
    assert agent.client.post("/v1/messages", json=body).status_code == 400


LONG = "word " * 3000


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_tools_look_for(agent):
    n_ctx = agent.engine.n_ctx
    reply = agent.client.post("/v1/messages", json={"max_tokens": 5, "messages": [{"role": "user", "content": LONG}]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    count = agent.client.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": LONG}]})
    tokens = count.json()["input_tokens"]
    assert error["message"].startswith(f"prompt is too long: {tokens} tokens > {n_ctx - 1} maximum")
    reply = agent.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": LONG}]})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith(f"This model's maximum context length is {n_ctx} tokens")
    for path, body in (("/v1/responses", {"input": LONG}), ("/v1/completions", {"prompt": LONG, "stream": True})):
        whole = agent.client.post(path, json=body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_stream_of_responses_tells_it_as_an_event(agent):
    reply = agent.client.post("/v1/responses", json={"input": LONG, "stream": True})
    assert reply.status_code == 200
    events = events_of(reply)
    assert [each["type"] for each in events] == ["response.created", "response.in_progress", "error", "response.failed"]
    assert [each["sequence_number"] for each in events] == [0, 1, 2, 3]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    wrong = agent.client.post("/v1/responses", json={"input": [5], "stream": True})
    assert wrong.status_code == 400, "other failures keep their status"


def test_an_answer_that_fills_the_context_says_so(serve, monkeypatch):
    with serve(n_ctx=64) as agent:
        agent.never_ends(monkeypatch)
        body = {"messages": [{"role": "user", "content": "Once upon a time"}], "stop_sequences": [], "top_k": 1}
        ends = {
            limit: agent.client.post("/v1/messages", json={**body, "max_tokens": limit}).json()["stop_reason"]
            for limit in (2, 32000)
        }
    assert ends[2] == "max_tokens"
    assert ends[32000] == "model_context_window_exceeded"


def test_the_context_is_told(agent):
    for path in ("/v1/models", f"/v1/models/{agent.client.get('/v1/models').json()['first_id']}"):
        found = agent.client.get(path).json()
        entry = found["data"][0] if "data" in found else found
        assert entry["meta"]["n_ctx"] == entry["context_length"] == entry["max_model_len"] == agent.engine.n_ctx
