"""Types whose values JSON cannot always tell apart, and values that do not come back from it as they were.

The types are pydantic's schemas (``pydantic_core.core_schema``). Those that leave no room are listed here: anything
else may change a value on its way, such as functions, ``Any``, or a union whose members look alike in JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias, cast

Schema: TypeAlias = Mapping[str, Any]

SCALARS = {"none", "bool", "int", "float", "str", "decimal", "bytes", "uuid", "date", "time", "datetime", "timedelta"}
KEYS = {"str", "int", "uuid", "date", "datetime"}
KINDS = {  # of JSON, by type of schema: members of a union that are of one kind may be taken for each other
    **{plain: plain for plain in ("none", "bool", "int", "float", "str")},
    **dict.fromkeys(("list", "tuple", "set", "frozenset"), "array"),
    **dict.fromkeys(("dict", "typed-dict", "model", "dataclass", "tagged-union"), "object"),
}
HOLDERS = {"default", "nullable", "definitions", "union", "model-fields", "dataclass-args", *KINDS} - SCALARS
FIELDS = {"model-field", "typed-dict-field", "dataclass-field"}
BELOW = (  # the parts of a schema that are schemas
    *("schema", "definitions", "choices", "fields", "items_schema", "keys_schema", "values_schema"),
    *("extras_schema", "json_schema", "python_schema", "lax_schema", "strict_schema", "steps"),
)
HOOKS = (  # with which anything may happen
    *("serialization", "serialization_exclude", "serialization_exclude_if", "post_init", "custom_init", "init_only"),
    *("extras_schema", "on_error", "missing"),
)
PLAIN = {str, int, float, bool, type(None)}
LISTS, SETS = (list, tuple, deque), (set, frozenset)
JSON_REF = "pydantic.types.JsonValue:"


class RoundTrip:
    """Tells if values of a type may come back from JSON as others, and if one did."""

    def __init__(self, schema: Schema) -> None:
        self._definitions: dict[str, Schema] = {}
        self._classes = set[object]()  # that the schema names
        self.renames_keys = False  # of a TypedDict: those that are given by an alias are no keys of it
        self._note(schema)
        self.leaves_room = not self._is_exact(schema)

    def _note(self, schema: Schema) -> None:
        self._classes.add(schema.get("cls"))
        if "ref" in schema:
            self._definitions[schema["ref"]] = schema
        self.renames_keys |= schema["type"] == "typed-dict-field" and "validation_alias" in schema
        for each in _below(schema):
            self._note(each)

    def _is_exact(self, schema: Schema) -> bool:
        kind = schema["type"]
        if kind == "definition-ref" or schema.get("ref", "").startswith(JSON_REF):
            return True  # what is referred to is looked at where it is defined
        if any(schema.get(hook) for hook in HOOKS) or not _is_plain(schema):
            return False
        match kind:
            case "literal" | "enum":
                return self._kinds(schema) != [""]
            case "union":
                kinds = self._kinds(schema)
                is_clear = len(kinds) == len({*kinds, ""}) - 1 and schema.get("mode") != "left_to_right"
            case "tagged-union":
                is_clear = not callable(schema["discriminator"])
            case "dict":
                is_clear = schema.get("keys_schema", schema)["type"] in KEYS and "values_schema" in schema
            case "list" | "set" | "frozenset":
                is_clear = "items_schema" in schema
            case "typed-dict-field" | "dataclass-field":
                is_clear = "validation_alias" not in schema and schema.get("init", True)
            case _:
                is_clear = kind in SCALARS | HOLDERS | FIELDS
        return bool(is_clear) and all(map(self._is_exact, _below(schema)))

    def _kinds(self, schema: Schema) -> list[str]:
        """Return the kinds of JSON that values are: '' if there is no telling."""
        match schema["type"]:
            case "definition-ref":
                return self._kinds(self._definitions[schema["schema_ref"]])
            case "nullable":
                return ["none", *self._kinds(schema["schema"])]
            case "literal" | "enum":
                values = schema.get("expected") or [each.value for each in schema["members"]]
                names = {type(value).__name__ for value in values}
                return [*names] if len(names) == 1 and names <= {"str", "int"} else [""]
            case "union":
                return [kind for each in _below(schema) for kind in self._kinds(each)]
            case kind:
                return ["" if schema.get("root_model") else KINDS.get(kind, "")]

    def change(self, value: object, back: object) -> str:
        """Describe how a value differs from what came back; '' if it does not."""
        kind, came = cast("list[type[Any]]", [type(value), type(back)])
        if kind is came and kind in PLAIN and value == back:
            return ""
        if not (kind is came or self._is_subclass(kind, came) or (kind is int and came is float)):
            return f"{kind.__name__} would come back as {came.__name__}"
        if not _is_same(came, value, back):
            return f"{kind.__name__} would come back changed"
        for one, other in _parts(came, value, back):
            if change := self.change(one, other):
                return change
        return ""

    def _is_subclass(self, kind: type[Any], came: type) -> bool:
        """True for a subclass that the schema does not name, whose additions are left out on purpose."""
        return issubclass(kind, came) and kind not in self._classes and not issubclass(kind, (Enum, bool))


def _is_same(kind: type[Any], value: Any, back: Any) -> bool:
    """Compare a value with what came back, but for what they hold."""
    if issubclass(kind, LISTS):
        return len(value) == len(back)
    if issubclass(kind, dict):
        return bool(value.keys() == back.keys())
    if _fields(kind) or hasattr(kind, "get_secret_value") or kind.__eq__ is object.__eq__:
        return True
    return bool(value == back or (value != value and back != back))


def _parts(kind: type[Any], value: Any, back: Any) -> list[tuple[Any, Any]]:
    """Return what a value holds, and what came back of it."""
    if issubclass(kind, LISTS):
        return list(zip(value, back, strict=True))
    if issubclass(kind, (dict, *SETS)):
        keys = {key: key for key in value}
        parts = [(keys[key], key) for key in back]
        return parts + [(value[key], back[key]) for key in back] if issubclass(kind, dict) else parts
    names = [name for name, field in _fields(kind).items() if not _is_left_out(field)]
    names += ["__pydantic_extra__"] if hasattr(kind, "__pydantic_extra__") else []
    return [(getattr(value, name), getattr(back, name)) for name in names]


def _fields(kind: type[Any]) -> Mapping[str, object]:
    """Return the fields of a model or dataclass."""
    return getattr(kind, "__pydantic_fields__", None) or getattr(kind, "__dataclass_fields__", {})


def _is_left_out(field: object) -> bool:
    return bool(getattr(field, "exclude", None) or getattr(field, "exclude_if", None))


def _below(schema: Schema) -> Iterator[Schema]:
    for key in BELOW:
        found: Any = schema.get(key, ())
        if hasattr(found, "values"):
            found = [found] if isinstance(found.get("type"), str) else list(found.values())
        for each in cast("list[Any]", found):
            if hasattr(each, "items"):
                yield each
            elif not hasattr(each, "join"):  # which is the name of a field: this is a member of a union with its label
                yield each[0]


def _is_plain(schema: Schema) -> bool:
    """True if its configuration changes no way to write or read values (but for nan), and allows no more fields."""
    config: dict[str, object] = schema.get("config") or {}
    writes = {key for key in config if key.startswith(("ser_json", "val_json"))} - {"ser_json_inf_nan"}
    return not writes and "allow" not in (config.get("extra_fields_behavior"), schema.get("extra_behavior"))
