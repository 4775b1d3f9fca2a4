"""Docstrings of a model's fields, read from its source when someone asks: an import pays nothing for them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


@cache
def field_docs(cls: type[BaseModel]) -> dict[str, str]:
    """Field: the text below it in the source, in one line; fields without one are left out."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError):  # no source at hand: a frozen application
        return {}
    found: dict[str, str] = {}
    lines = body.body if isinstance(body, ast.ClassDef) else []
    for field, text in pairwise(lines):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = " ".join(text.value.value.split())
    return found


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values that an annotation names one by one.

    >>> choices(Literal["none", "full"] | None)
    ('none', 'full')
    """
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for part in get_args(annotation) for value in choices(part))


class Described(BaseModel):
    """Base of models whose JSON Schema describes their fields."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        properties = handler.resolve_ref_schema(found).get("properties", {})
        for name, text in field_docs(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return found
