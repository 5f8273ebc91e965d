"""The base of every model: closed, frozen, and no silent conversion of a misspelt field."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown fields are refused; values cannot be changed after the check."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)
