"""Stage `import_samples`: pictures that were not made here, as samples that can be scored and learnt from. No torch.

Pictures are read one at a time, a shard of them is kept, and a shard that is there is not read again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.artifacts import PromptsTable, SamplesTable
from schemas.imports import ImportSamplesConfig, ImportSamplesInputs, ImportSamplesOutputs
from schemas.tables import prompts_schema, samples_schema
from stages.context import StageContext
from stages.pictures import found
from stages.pictures.decode import rgb
from stages.pictures.entries import Entry, Found
from stages.prompts import Prompt, identified
from stages.store import images
from stages.store.tables import TableWriter

_SHARD = 32  # pictures: what is held in memory


@dataclass(frozen=True)
class Row:
    """A picture's place among those of its prompt."""

    entry: Entry
    prompt: Prompt
    index: int

    @property
    def sample_id(self) -> str:
        """As `sample` makes it."""
        return f"{self.prompt.prompt_id}/{self.index}"


def run(config: ImportSamplesConfig, inputs: ImportSamplesInputs, ctx: StageContext) -> ImportSamplesOutputs:
    """Writes the pictures as PNG and their distinct prompts; shards that are there already are kept."""
    source = found(config)
    prompts, rows = _rows(source.entries)
    writer = TableWriter(ctx.directory, "samples", samples_schema())
    num_shards = -(-len(rows) // _SHARD)
    finished = writer.finished()
    for k in range(num_shards):
        if k not in finished:
            _write(writer, k, rows, source, config, ctx)
        ctx.progress(min((k + 1) * _SHARD, len(rows)), len(rows), "pictures")
    samples = writer.ref(SamplesTable, num_shards)
    table = TableWriter(ctx.directory, "prompts", prompts_schema())
    ids, texts, metadata = zip(*prompts, strict=True)
    table.write(0, {"prompt_id": list(ids), "prompt": list(texts), "metadata": list(metadata)})
    metrics = {"pictures": float(len(rows)), "prompts": float(len(prompts)), "unused": float(source.unused)}
    return ImportSamplesOutputs(samples=samples, prompts=table.ref(PromptsTable, 1), metrics=metrics)


def _rows(entries: Sequence[Entry]) -> tuple[list[Prompt], list[Row]]:
    """Distinct prompts, and the pictures counted within each.

    A prompt is its text alone, with the id that `prompts` gives to a line of a text file: pictures of one prompt are
    one group, whatever their metadata.
    """
    texts = list(dict.fromkeys(entry.prompt for entry in entries))
    prompts = dict(zip(texts, identified((text, {}) for text in texts), strict=True))
    count: Counter[str] = Counter()
    rows = []
    for entry in entries:
        rows.append(Row(entry, prompts[entry.prompt], count[entry.prompt]))
        count[entry.prompt] += 1
    return list(prompts.values()), rows


def _write(
    writer: TableWriter, k: int, rows: Sequence[Row], source: Found, config: ImportSamplesConfig, ctx: StageContext
) -> None:
    """One shard. `seed` is 0: no noise of ours became these pictures."""
    here, pictures = rows[k * _SHARD : (k + 1) * _SHARD], []
    for number, row in enumerate(here, start=k * _SHARD):
        place = f"{row.entry.place} (sample {row.sample_id!r})"
        value = images.png(rgb(source.content(number), place, config.resolution))
        pictures.append({**value, "path": row.entry.file})
        ctx.progress(number + 1, len(rows), "pictures")
    columns = {
        "sample_id": [row.sample_id for row in here],
        "prompt_id": [row.prompt.prompt_id for row in here],
        "prompt": [row.prompt.text for row in here],
        "metadata": [row.entry.metadata for row in here],
        "index": [row.index for row in here],
        "seed": [0] * len(here),
        "image": pictures,
    }
    writer.write(k, columns)
