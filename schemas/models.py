"""Which diffusion model is trained, and which of its weights. One class per family."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.assets import Asset
from schemas.strict import Strict

Dtype = Literal["float32", "bfloat16"]
# `native` lets torch choose. Kernels of other packages need attention that diffusers dispatches; SD3's is not.
Attention = Literal["native", "_native_math", "_native_flash", "_native_efficient", "_native_cudnn"]


class LoraConfig(Strict):
    """Low-rank adapters through PEFT; without this block all weights of the transformer are trained.

    The reference of a KL term is the model without adapters, wherever the training starts.
    """

    rank: int = Field(default=16, ge=1, le=4096, description="Rank of the adapters.")
    alpha: float | None = Field(default=None, gt=0, description="Scale numerator; twice the rank when not given.")
    targets: tuple[str, ...] = Field(default=(), description="Module names; the family's default when empty.")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the adapters' inputs set to 0 in the gradient's forward."
    )
    init: Literal["kaiming", "gaussian"] = Field(
        default="kaiming", description="How lora_A is drawn: uniform in 1/sqrt(width), or normal of std 1/rank."
    )
    dora: bool = Field(
        default=False, description="Trains the length of each row of the weights apart (DoRA, arXiv 2402.09353)."
    )
    start: Annotated[str | None, Asset()] = Field(
        default=None,
        description="LoRA to start from: file, folder or hub id, in the form of diffusers or of PEFT.",
    )
    start_revision: str | None = Field(default=None, description="Commit of the hub repository of `start`.")

    @property
    def scale_alpha(self) -> float:
        """The alpha that is used."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def form(self) -> dict[str, object]:
        """What gives the tensors of a trained LoRA their meaning; where it started does not."""
        return self.model_dump(mode="json", include={"rank", "alpha", "targets", *(["dora"] * self.dora)})

    @model_validator(mode="after")
    def _start_is_drawn_from_nothing(self) -> "LoraConfig":
        if self.start is not None and self.init != "kaiming":
            raise ValueError(f"init {self.init!r} has no use beside start {self.start!r}; leave one of them out")
        return self


class Sd3Model(Strict):
    """Stable Diffusion 3 and 3.5: a ``StableDiffusion3Pipeline`` folder or hub id."""

    lora_targets: ClassVar[tuple[str, ...]] = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )

    kind: Literal["sd3"] = "sd3"
    path: Annotated[str | None, Asset()] = Field(
        default=None, description="Folder, hub id or package:MODULE/FOLDER; none when a node gives `pipeline`."
    )
    revision: str | None = Field(default=None, description="Commit of the hub repository.")
    lora: LoraConfig | None = None
    dtype: Dtype = Field(default="float32", description="Compute dtype; trainable weights are float32 always.")
    attention: Attention = Field(
        default="native", description="Attention kernel, by diffusers' names; one that the machine lacks is an error."
    )
    tiling: bool = Field(
        default=False, description="The autoencoder works on overlapping tiles: less memory, slightly other pictures."
    )
    max_sequence_length: int = Field(
        default=256, ge=1, description="Text tokens of the T5 branch, as the pipeline's argument."
    )
    resolution: int | None = Field(
        default=None, ge=8, description="Height and width in pixels; the model's own when none."
    )


# A union discriminated by `kind` as soon as there is a second family.
ModelConfig = Sd3Model
