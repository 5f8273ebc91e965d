"""The little HTML that the report needs. Text is always escaped; only `Html` goes in as it is."""

from collections.abc import Iterable, Sequence
from html import escape

_VOID = ("img", "meta")


class Html(str):
    """Text that is HTML already."""


def tag(name: str, text: str = "", /, css: str = "", **attributes: str) -> Html:
    """An element around a text, which is escaped unless it is Html."""
    given = {**({"class": css} if css else {}), **attributes}
    inside = "".join(f' {key}="{escape(value, quote=True)}"' for key, value in given.items())
    if name in _VOID:
        return Html(f"<{name}{inside}>")
    return Html(f"<{name}{inside}>{text if isinstance(text, Html) else escape(text)}</{name}>")


def element(name: str, parts: Iterable[Html], /, css: str = "", **attributes: str) -> Html:
    """An element around others."""
    return tag(name, Html("".join(parts)), css, **attributes)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """The first column names its row; the others are right-aligned when they are numbers."""
    lines = [element("tr", [tag("th", name) for name in head])] if head else []
    for first, *rest in rows:
        cells = [tag("td", cell, css="number" if _numeric(cell) else "") for cell in rest]
        lines.append(element("tr", [tag("th", first, scope="row"), *cells]))
    return element("table", lines)


def folded(summary: str, content: Html) -> Html:
    """Shown when it is clicked."""
    return element("details", [tag("summary", summary), content])


def _numeric(text: str) -> bool:
    return text[:1].isdigit() or (text[:1] in "+-" and text[1:2].isdigit())
