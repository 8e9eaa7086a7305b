"""Chat templates of our own with the markers of model families, as small as shows what their templates do."""

from __future__ import annotations

CHATML = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
CHATML_TOOLS = """
{%- if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
REASONING{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
CALL
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
SHOWN_THOUGHT = (
    "{% if m.reasoning_content and m.tool_calls %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
)
HERMES_CALL = '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
PAIRS = "{% for k, v in f.arguments | items %}PAIR{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"


def chatml(call: str, reasoning: str = "", ending: str = "") -> str:
    return CHATML_TOOLS.replace("CALL", call).replace("REASONING", reasoning) + ending


QWEN3 = chatml(
    "{% if f.arguments is string %}"
    '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}\n</tool_call>'
    f"{{% else %}}{HERMES_CALL}{{% endif %}}",
    SHOWN_THOUGHT,
)
QWEN_CODER = chatml(
    "<tool_call>\n<function={{ f.name }}>\n"
    + PAIRS.replace("PAIR", f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n")
    + "</function>\n</tool_call>"
)
NEMOTRON_3 = chatml(
    "<tool_call>\n<function={{ f.name }}>\n"
    + PAIRS.replace("PAIR", f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n")
    + "</function>\n</tool_call>",
    ending="<think>\n",
)
GLM = """[gMASK]<sop>{% if tools %}<|system|>
{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>
{%- else %}<|{{ m.role }}|>
{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
<tool_call>{{ f.name }}
{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}<|assistant|>
"""
MINIMAX = """]~b]system
{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>{% endfor %}[e~[
{% for m in messages %}
{%- if m.role == 'tool' %}]~b]tool
<response>{{ m.content }}</response>[e~[
{% else %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}
{{ m.content }}
{%- if m.tool_calls %}
<minimax:tool_call>
{% for call in m.tool_calls %}{% set f = call.function %}<invoke name="{{ f.name }}">
{% if f.arguments is mapping %}{% for k, v in f.arguments | items %}<parameter name="{{ k }}">
{{- v if v is string else v | tojson }}</parameter>
{% endfor %}{% endif %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% endif %}{% endfor %}]~b]ai
<think>
"""
_MISTRAL = """{{ bos_token }}
{%- set spoken = messages | rejectattr('role', 'in', ['tool', 'system']) | rejectattr('tool_calls') | list %}
{%- for m in spoken %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}
{%- elif m.tool_calls %}CALLS</s>
{%- else %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}
{%- endif %}{% endfor %}"""
MISTRAL_NEMO = _MISTRAL.replace(
    "CALLS",
    "[TOOL_CALLS][{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}{{ (call.function | tojson)[:-1] }}, "
    '"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]',
)
MISTRAL_SMALL = _MISTRAL.replace(
    "CALLS",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{% endfor %}",
)
MAGISTRAL = _MISTRAL.replace(
    "CALLS",
    "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{% endfor %}",
).replace("{{ bos_token }}", "{{ bos_token }}[SYSTEM_PROMPT]Draft in [THINK][/THINK].[/SYSTEM_PROMPT]")
_DEEPSEEK = """{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- elif m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for call in m.tool_calls %}CALL{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>
{%- endif %}{% endfor %}<｜Assistant｜>"""
DEEPSEEK_R1 = (
    _DEEPSEEK.replace(
        "CALL",
        "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n'"
        " + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}",
    ).removesuffix("<｜Assistant｜>")
    + "{{ '<｜Assistant｜><think>\\n' }}"
)
DEEPSEEK_V3_1 = (
    _DEEPSEEK.replace(
        "CALL",
        "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments"
        " + '<｜tool▁call▁end｜>' }}",
    )
    + "{{ '<think>' if thinking else '</think>' }}"
)
DEEPSEEK_R1_BARE = DEEPSEEK_R1.replace("{%- elif m.tool_calls %}", "{%- elif m.tool_calls and m.content is none %}")
LLAMA_3 = """{{ bos_token }}{% for m in messages %}
{%- if loop.first and tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython
{% for t in tools %}{{ t | tojson }}{% endfor %}<|eot_id|>{% endif %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content }}<|eot_id|>
{%- endif %}{% endfor %}<|start_header_id|>assistant<|end_header_id|>

"""
GRANITE_4 = (
    """{% if tools %}<|start_of_role|>system<|end_of_role|><tools>
{% for t in tools %}{{ t | tojson }}
{% endfor %}</tools><|end_of_text|>
{% endif %}{% for m in messages %}<|start_of_role|>{{ 'user' if m.role == 'tool' else m.role }}<|end_of_role|>
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
"""
    + HERMES_CALL
    + """{% endfor %}<|end_of_text|>
{% endfor %}<|start_of_role|>assistant<|end_of_role|>"""
)
ERNIE = GRANITE_4 + "<think>\n"
KIMI = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ 'system' if m.role == 'tool' else m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}
{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}<|im_assistant|>assistant<|im_middle|>"""
# Its later ones number calls themselves, and keep the numbers in a list until the results come.
KIMI_LISTING = "{%- set queue = namespace(ids=[], next=0) %}" + KIMI.replace(
    "{{ m.tool_call_id }}", "{{ queue.ids.pop(0) }}"
).replace(
    "<|tool_call_begin|>{{ call.id }}",
    "{%- set id = 'functions.' ~ call.function.name ~ ':' ~ queue.next %}{% set queue.next = queue.next + 1 %}"
    "{%- set _ = queue.ids.append(id) %}<|tool_call_begin|>{{ id }}",
)
NEMOTRON_NANO = chatml(
    '<TOOLCALL>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]</TOOLCALL>', ending="<think>\n"
)
PHI_4_MINI = chatml("<|tool_call|>{{ f | tojson }}<|/tool_call|>")
GRANITE_3 = chatml("<|tool_call|>[{{ f | tojson }}]")
JAMBA = chatml("<tool_calls>[{{ f | tojson }}]</tool_calls>")
MINIMAX_M1 = chatml("<tool_calls>\n{{ f | tojson }}\n</tool_calls>")
GIGACHAT = (
    CHATML_TOOLS.replace("{{ m.content }}", "")
    .replace("REASONING", "{{ m.content }}")
    .replace(
        "CALL",
        '<|message_sep|>function call<|role_sep|>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
    )
)
SEED = chatml(
    "<seed:tool_call>\n<function={{ f.name }}>\n"
    + PAIRS.replace("PAIR", f"<parameter={{{{ k }}}}>{VALUE}</parameter>\n")
    + "</function>\n</seed:tool_call>",
    "{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>{% endif %}",
)
GPT_OSS = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t.function | tojson }}{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}
{{- '<|end|>' }}
{%- elif m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}{% endfor %}<|start|>assistant"""
PYTHONIC = chatml("<|tool_call_start|>[{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v }}{% endfor %})]")
MIXTRAL = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"""
PHI_3_5 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
