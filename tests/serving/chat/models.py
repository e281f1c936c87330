# SPDX-License-Identifier: Apache-2.0
"""Chat models without weights: templates in the manner of each family, short, and their special tokens."""

from collections.abc import Mapping

from metrale_jax.text.chat_template import ChatTemplate
from serving.chat.model import ChatModel
from serving.chat.tools import Tool

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "<|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n"
    "{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Of a model that does not think.
TOOLS_ONLY = QWEN.replace("<think>", "").replace("</think>", "")
# It opens the reasoning itself, whatever is asked.
OPENED = QWEN.rpartition("{%- if enable_thinking")[0] + "<think>\n{% endif %}"
# The same of a template that knows no other tag.
BARE = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CODER = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.parameters | tojson }}\n{% endfor %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{%- for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{%- endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
LLAMA = (
    "<|begin_of_text|>{%- for message in messages %}"
    "{%- if message.tool_calls and message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{%- if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{%- else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{%- elif message.role == 'tool' %}"
    "{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ call.function | tojson }}{% endfor %}]{{ eos_token }}"
    "{%- else %}{{ message.content }}{% endif %}{% endfor %}"
)
MISTRAL_NEW = MISTRAL.replace("[TOOL_CALLS][{% for", "{% for").replace(
    "{{ call.function | tojson }}{% endfor %}]",
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
)
GEMMA_FUNCTION = (
    "{%- for tool in tools or [] %}<start_function_declaration>declaration:{{ tool.function.name }}"
    "<end_function_declaration>{% endfor %}"
    "{%- for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}{{ '{' }}"
    "{%- for key, value in call.function.arguments | dictsort %}{{ key }}:<escape>{{ value }}<escape>{% endfor %}"
    "{{ '}' }}"
    "<end_function_call>{% endfor %}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
GEMMA = (
    "{{ bos_token }}{%- for message in messages %}"
    "{%- if message.role not in ('user', 'assistant') or (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}\n{{ message.content }}<end_of_turn>\n"
    "{%- endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = {
    "hermes": TOOLS_ONLY,
    "qwen3_coder": CODER,
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA_FUNCTION,
    "fenced": GEMMA,
}

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "wet": {"type": "boolean"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
SUM = {
    "type": "object",
    "properties": {
        "of": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
        "options": {
            "type": "object",
            "properties": {"round": {"type": "boolean"}},
            "required": ["round"],
            "additionalProperties": False,
        },
    },
    "required": ["of", "options"],
    "additionalProperties": False,
}


def chat_model(template: str, special_tokens: Mapping[str, int] | None = None) -> ChatModel:
    """A model with this template."""
    strings = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatModel(template, ChatTemplate({"default": template}, strings).render, special_tokens or {})


def openai_tool(name: str, parameters: dict, **more) -> dict:
    """A tool as OpenAI's bodies have it."""
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **more}}


TOOLS = [openai_tool("weather", CITY), openai_tool("sum", SUM)]
BY_NAME = {
    name: Tool.of({"name": name, "parameters": schema}, "t") for name, schema in (("weather", CITY), ("sum", SUM))
}
