# SPDX-License-Identifier: Apache-2.0
"""`check_schema`: whether a JSON schema's keywords have the form that they must have, whoever reads them then. And
`closed`: a strict schema, without properties that it does not name."""

from collections.abc import Callable, Mapping
from typing import Any

from metrale_jax.core.errors import RequestError, shown


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_some(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


_MAPS, _LISTS, _ONES = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "allOf"), ("items",)
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: (_is_object, "no object of schemas") for name in _MAPS},
    **{name: (_is_some, "no list of at least one schema") for name in _LISTS},
    **{name: (_is_count, "no count") for name in ("minLength", "maxLength", "minItems", "maxItems")},
    "required": (_is_texts, "no list of names"),
    "enum": (_is_some, "no list of at least one value"),
    "$ref": (lambda value: isinstance(value, str), "no text"),
    "type": (lambda value: isinstance(value, str) or (_is_some(value) and _is_texts(value)), "no name of a type"),
}


def check_schema(schema: Mapping[str, Any], place: str) -> None:
    """Nothing. Raises `RequestError` for a keyword without such a form; its field leads there from `place` on."""
    left: list[tuple[Any, str]] = [(schema, place)]
    while left:
        found, where = left.pop()
        if not isinstance(found, Mapping):
            if not isinstance(found, bool):
                raise RequestError(f"{where}={shown(found, 80)} is no schema; give an object.", where)
            continue
        for name, (holds, what) in _FORMS.items():
            if name in found and not holds(found[name]):
                path = f"{where}.{name}"
                raise RequestError(f"{path}={shown(found[name], 80)} is {what}; give one, or leave it out.", path)
        left += [(one, f"{where}.{name}.{key}") for name in _MAPS for key, one in found.get(name, {}).items()]
        left += [(one, f"{where}.{name}[{at}]") for name in _LISTS for at, one in enumerate(found.get(name, ()))]
        left += [(found[name], f"{where}.{name}") for name in _ONES if name in found]


def closed(schema: Any, place: str, all_required: bool) -> Any:
    """The schema with no properties but those it names, in each of its objects; `all_required` has it require them.

    Raises `RequestError` for one that allows others."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    kind = schema.get("type")
    if "properties" in schema or kind == "object" or (isinstance(kind, list) and "object" in kind):
        if schema.get("additionalProperties", False) is not False:
            path = f"{place}.additionalProperties"
            given = shown(schema["additionalProperties"], 80)
            raise RequestError(f"{path}={given} is not false, as strict has it; set it so, or leave strict out.", path)
        made["additionalProperties"] = False
        if all_required:
            made["required"] = list(dict.fromkeys((*schema.get("required", ()), *schema.get("properties", {}))))
    for name in _MAPS:
        if name in schema:
            made[name] = {key: closed(one, f"{place}.{name}.{key}", all_required) for key, one in schema[name].items()}
    for name in _LISTS:
        if name in schema:
            listed = enumerate(schema[name])
            made[name] = [closed(one, f"{place}.{name}[{at}]", all_required) for at, one in listed]
    for name in _ONES:
        if name in schema:
            made[name] = closed(schema[name], f"{place}.{name}", all_required)
    return made
