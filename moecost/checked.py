"""Pydantic models whose errors are ours: one `InvalidInputError` in one line, however they are made."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ValidationError

from moecost.errors import InvalidInputError
from moecost.spec_files import explain


class Checked(BaseModel):
    """Base of models that users make: `Model(...)`, `model_validate` and `model_validate_json` raise our error."""

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise InvalidInputError(explain(error, type(self))) from None

    @classmethod
    def model_validate(cls, *args: Any, **kwargs: Any) -> Self:
        try:
            return super().model_validate(*args, **kwargs)
        except ValidationError as error:
            raise InvalidInputError(explain(error, cls)) from None

    @classmethod
    def model_validate_json(cls, *args: Any, **kwargs: Any) -> Self:
        try:
            return super().model_validate_json(*args, **kwargs)
        except ValidationError as error:
            raise InvalidInputError(explain(error, cls)) from None
