"""What a run leaves for people: the summary's text and the paths of what it made."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from pipelines.rundir import Address
from pipelines.unroll import Unrolled
from schemas.artifacts import FileRef, PipelineRef, refs

_TEXTS = (".md", ".txt")


class Report(NamedTuple):
    """`text` is Markdown; `paths` are by node and output."""

    text: str
    paths: dict[str, Path]


def report(world: Unrolled, only: Collection[Address] | None = None) -> Report:
    """Files and folders of the stages outside the loop, or of those of them in `only`, from their records."""
    texts: list[str] = []
    paths: dict[str, Path] = {}
    for node in [*world.plan.section("before"), *world.plan.section("after")]:
        address = Address(node.section, node.name)
        if only is not None and address not in only:
            continue
        record = world.record(address)
        if record.status == "skipped":
            continue
        for name, value in world.outputs(address, record):
            for ref in refs(value):
                path = Path(os.path.normpath(world.run.place(address) / ref.path))
                if isinstance(ref, FileRef) and path.suffix in _TEXTS and path.is_file():
                    texts.append(path.read_text(encoding="utf-8").strip())
                if isinstance(ref, FileRef | PipelineRef):
                    paths[f"{node.name}.{name}"] = path
    return Report("\n\n".join(texts), paths)


def as_lines(result: Report) -> list[str]:
    """For the end of a run's log."""
    width = max((len(name) for name in result.paths), default=0)
    return [*result.text.splitlines(), *(f"{name:<{width}}  {path}" for name, path in result.paths.items())]
