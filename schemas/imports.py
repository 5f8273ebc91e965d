"""The doors of `import_samples`: pictures that were not made here."""

from typing import Annotated

from pydantic import Field

from schemas.artifacts import PromptsTable, SamplesTable
from schemas.assets import Asset
from schemas.doors import StageConfig, StageInputs, StageOutputs


class ImportSamplesConfig(StageConfig):
    """Takes pictures in, with their prompts: from a folder, a saved `datasets` dataset or the hub.

    A folder holds one of three things: metadata.jsonl or metadata.csv with the columns `file_name` and
    `prompt_column`; or beside each picture its prompt in a .txt file of the same stem; or for each prompt a sub-folder
    of pictures, named like the prompt with '_' for spaces.
    """

    path: Annotated[str, Asset()] = Field(description="Folder of pictures, folder of a saved dataset, or hub id.")
    revision: str | None = Field(default=None, description="Commit of the hub dataset.")
    split: str = Field(default="train", description="Split of a dataset.")
    prompt_column: str = Field(
        default="prompt", description="Column of the prompt in metadata files and datasets; others become metadata."
    )
    image_column: str = Field(default="image", description="Column of the picture in a dataset.")
    resolution: int | None = Field(
        default=None, ge=1, le=16384, description="Height and width in pixels after a centre crop; unchanged when none."
    )


class ImportSamplesInputs(StageInputs):
    """Nothing."""


class ImportSamplesOutputs(StageOutputs):
    """The pictures, and their distinct prompts in the order in which they come first."""

    samples: SamplesTable
    prompts: PromptsTable
