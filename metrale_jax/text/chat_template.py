# SPDX-License-Identifier: Apache-2.0
"""`ChatTemplate`: conversations rendered by the Jinja templates that come with checkpoints.

Templates are untrusted code and run in Jinja's immutable sandbox, in the environment that transformers gives them
(`transformers/utils/chat_template_utils.py`), so that one written for it renders the same here.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from metrale_jax.core.errors import RequestError, TextError, shown

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
# Stands behind the content that is gone on with. No tokenizer knows these characters, and no message has all of them.
_MARK = "\ue0c0\ue0de\ue0fa "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@final
class ChatTemplate:
    """The named templates of a tokenizer, compiled when first used.

    `templates` maps names to Jinja source; `default` serves unless tools are given and there is a `tool_use`.
    `special_strings` (`bos_token`, …) are visible to every template.
    """

    def __init__(self, templates: Mapping[str, str], special_strings: Mapping[str, str]):
        self._sources = dict(templates)
        self._special_strings = dict(special_strings)
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def exists(self) -> bool:
        """Whether there is any template."""
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The sources of all templates, one behind the other: what they mention, models know."""
        return "\n".join(self._sources.values())

    @property
    def default(self) -> str | None:
        """The source of the one that serves where nothing else is asked for, or nothing."""
        return self._sources.get("default")

    def save(self, directory: Path) -> None:
        """Nothing; `directory` holds the templates in the files that transformers gives them."""
        for name, source in self._sources.items():
            path = directory / "chat_template.jinja"
            if name != "default":
                path = directory / "additional_chat_templates" / f"{name}.jinja"
                path.parent.mkdir(exist_ok=True)
            path.write_text(source, encoding="utf-8")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text. With `continue_final_message` it ends where the content of the last message does, so that an
        answer goes on with that; there is no generation prompt then.

        `template_kwargs` are further template variables and may replace the special strings. A `chat_template` among
        them names another of the templates or is Jinja source itself.
        """
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(one, Mapping) for one in tools)
        ):
            raise RequestError(f"tools={shown(tools)} is no list of tools; give one of dicts.", "prompt")
        if continue_final_message not in (False, True):
            raise RequestError(
                f"continue_final_message={shown(continue_final_message)} is neither true nor false; give one.", "prompt"
            )
        checked = [_with_reasoning_aliases(_plain(message)) for message in checked_messages(messages)]
        content = checked[-1].get("content")
        if continue_final_message:
            if not isinstance(content, str):
                fault = "the last message has no content that could be gone on with; give it some."
                raise RequestError(fault, "messages")
            checked[-1]["content"] = content + _MARK
        source = self._source(template_kwargs.pop("chat_template", None), tools)
        variables = {
            **self._special_strings,
            "documents": None,
            **template_kwargs,
            "messages": checked,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._template(source).render(variables)
        except _TEMPLATE_FAULTS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TextError(
                f"the chat template refused the conversation: {reason}. "
                "Change the messages to what the template allows, or send a plain prompt."
            ) from error

        return _up_to_mark(text, content) if continue_final_message else text

    def _template(self, source: str) -> jinja2.Template:
        """`source` compiled. Only the tokenizer's own are kept, as a request may bring any number of others."""
        if source in self._compiled:
            return self._compiled[source]
        template = _environment().from_string(source)
        if source in self._sources.values():
            self._compiled[source] = template
        return template

    def _source(self, asked: str | None, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if asked is not None:
            return self._sources.get(asked, asked)
        if not self._sources:
            raise TextError(
                "the tokenizer has no chat template, so messages cannot be rendered. "
                "Send a plain prompt, or give a template."
            )
        if tools is not None and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" not in self._sources:
            raise TextError(
                f"the tokenizer has the chat templates {sorted(self._sources)} and no default; "
                "name one of them with chat_template=."
            )
        return self._sources["default"]


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """`messages` themselves, once each is a mapping with a `role` and, unless it calls tools, a `content`.

    That is a text, or a list of parts `{"type": "text", "text": ...}`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a {type(messages).__name__}; give a list of dicts with role and content.", "messages"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one dict with role and content.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{index}] is a {type(message).__name__}; give a dict with role and content.", "messages"
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] has role={shown(message.get('role'))}; give a text such as 'user' or 'assistant'.",
                "messages",
            )
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        parts = content if isinstance(content, list | tuple) else ()
        if not isinstance(content, str | list | tuple) or not all(map(_is_text_part, parts)):
            raise RequestError(
                f"messages[{index}] has content={shown(content)}; give a text, or parts of type text.", "messages"
            )
    return messages


def _up_to_mark(text: str, content: str) -> str:
    before, mark, behind = text.rpartition(_MARK.rstrip())
    if not mark:
        raise TextError(
            "the chat template does not show the last message, so nothing can go on with it; leave "
            "continue_final_message out."
        )
    # A template that trims contents would have trimmed this one's end.
    blanks = len(content) - len(content.rstrip()) if content.strip() and not behind.startswith(" ") else 0
    return before.removesuffix(content[len(content) - blanks :])


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `message` with the parts of its content joined: most templates read a text only."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in content)}


def _with_reasoning_aliases(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `message` whose reasoning, if any, stands under both names that templates read."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@final
class _GenerationTag(jinja2.ext.Extension):
    """Reads `{% generation %}…{% endgeneration %}`, which marks assistant text for training, as its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        """A block that prints what is between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


@final
class _PlainDict:
    """`dict` without its attributes, through which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


def _environment() -> ImmutableSandboxedEnvironment:
    """A fresh sandbox with the filters and functions that templates rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _PlainDict()
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
