"""Pictures of the report: the same noise over the iterations, and best and worst of the newest training samples."""

import base64
import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from pipelines.saved import Saved
from pipelines.views.gallery import Gallery, Group, Picture, evenly, gallery
from pipelines.views.html import Html, element, tag
from pipelines.views.samples import ends, thumbnail
from schemas.errors import InputError, UserError

T = TypeVar("T")
_ROWS, _COLUMNS, _EACH = 6, 8, 4
_PIXELS = 192
_SMALL = 64  # pictures up to this size stay lossless


class Strip(NamedTuple):
    """Stage runs that drew the same prompts from the same noise, oldest first."""

    runs: Sequence[Gallery]


def strips(there: Sequence[Gallery]) -> list[Strip]:
    """Of the pictures that are still there."""
    alike: dict[frozenset[tuple[str, int]], list[Gallery]] = defaultdict(list)
    for found in there:
        if (firsts := _noted(found, Gallery.firsts)) is not None:
            alike[firsts].append(found)
    return [Strip(runs) for runs in alike.values() if len(runs) > 1]


def over_iterations(strip: Strip) -> Html:
    """A row a prompt, a block of columns a stage run. The first pictures of each prompt are shown, not the best."""
    runs = [found for found in evenly(strip.runs, _COLUMNS) if _noted(found, _pictures) is not None]
    if not runs:
        return _table([], [])
    each = max(_COLUMNS // len(runs), 1)
    blocks = [{(p.prompt_id, p.index): p for p in found.pictures if p.index < each} for found in runs]
    prompts = {picture.prompt_id: picture.prompt for picture in blocks[0].values()}
    head = [tag("th", ""), *(tag("th", _where(found), colspan=str(each + (each > 1))) for found in runs)]
    rows = []
    for key, prompt in list(prompts.items())[:_ROWS]:
        cells = [tag("th", prompt, scope="row")]
        for found, block in zip(runs, blocks, strict=True):
            cells += [_cell(found, block.get((key, i))) for i in range(each)]
            cells += [tag("td", "", css="gap")] if each > 1 else []
        rows.append(cells)
    return _table(head, rows)


def _pictures(found: Gallery) -> list[Picture]:
    return found.pictures


def _noted(found: Gallery, read: Callable[[Gallery], T]) -> T | None:
    """None for what is damaged: that is noted, and the others are shown."""
    try:
        return read(found)
    except InputError as error:
        found.run.damaged[found.address.path] = str(error)
        return None


def best_and_worst(run: Saved, there: Sequence[Gallery]) -> tuple[str, Html] | None:
    """Of the newest iteration whose pictures are there: the title, and a row a prompt."""
    folders = sorted({found.address.folder for found in there}, reverse=True)
    for folder in (name for name in folders if name.isdigit()):
        try:
            found = gallery(run, folder)
            return found.address.path, _table([], list(_rows(found, evenly(found.groups(), _ROWS))))
        except UserError:  # those that advantages came from are pruned, or damaged
            continue
    return None


def _rows(found: Gallery, groups: Sequence[Group]) -> Iterator[list[Html]]:
    for group in groups:
        best, worst = ends(group, _EACH)
        gap = [tag("td", "", css="gap")]
        yield [
            tag("th", group.prompt, scope="row"),
            *(_cell(found, picture) for picture in best),
            *gap,
            *(_cell(found, picture) for picture in worst),
        ]


def _cell(found: Gallery, picture: Picture | None) -> Html:
    if picture is None:
        return tag("td", "")
    score = "" if picture.score is None else f"{picture.score:.3g}"
    caption = score if picture.advantage is None else f"{score} ({picture.advantage:+.2f})"
    data = _noted(found, lambda _: _data(found, picture))
    if data is None:
        return tag("td", "damaged", css="caption")
    image = tag("img", src=data, alt=picture.prompt, title=f"{picture.sample_id}, seed {picture.seed}")
    return element("td", [image, tag("div", caption, css="caption")])


def _data(found: Gallery, picture: Picture) -> str:
    small = thumbnail(found, picture, _PIXELS)
    lossless = max(small.size) <= _SMALL
    buffer = io.BytesIO()
    if lossless:
        small.save(buffer, format="PNG")
    else:
        small.save(buffer, format="JPEG", quality=88)
    kind = "png" if lossless else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _where(found: Gallery) -> str:
    iteration = found.address.iteration
    return found.address.node if iteration is None else f"{found.address.node} {iteration}"


def _table(head: Sequence[Html], rows: Sequence[Sequence[Html]]) -> Html:
    lines = [element("tr", head)] if head else []
    return element("table", [*lines, *(element("tr", row) for row in rows)], css="pictures")
