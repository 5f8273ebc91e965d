"""Rewards: each scores finished pictures; the key in the mapping is the column's name."""

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.strict import Strict


class _Reward(Strict):
    weight: float = Field(default=1.0, description="Weight in the advantage; 0 scores without training on it.")


class ShapesReward(_Reward):
    """The built-in example's check of number, colour and shape in a picture drawn for 'two red circles'."""

    kind: Literal["shapes"] = "shapes"
    score: Literal["partial", "strict"] = Field(default="partial", description="Graded in [0, 1], or all-or-nothing.")


class JpegSizeReward(_Reward):
    """Size of the picture as JPEG in kilobytes: `small` rewards compressibility, `large` its opposite (DDPO)."""

    kind: Literal["jpeg_size"] = "jpeg_size"
    prefer: Literal["small", "large"] = "small"
    quality: int = Field(default=95, ge=1, le=100)


class ExternalReward(_Reward):
    """A reward from the user's own package, listed under `external` at the top of flows.yaml."""

    kind: Literal["external"] = "external"
    name: str = Field(description="Name of the entry under `external`.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Fields of the entry's own config class.")
    target: str = Field(default="", description="Filled from the entry; naming code here is refused.")
    code: str = Field(default="", description="Filled in: digest of the source of the target's module.")


RewardConfig = Annotated[ShapesReward | JpegSizeReward | ExternalReward, Field(discriminator="kind")]
