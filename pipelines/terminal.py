"""Numbers, values and tables as people read them in a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their heads; the first is for names, the others for numbers."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Field paths and values of nested mappings."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def short(value: Any, longest: int = 72) -> str:
    """A value in one line of bounded length."""
    text = str(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."
