"""`make bench`: what the framework costs beside the bare work. Every ratio is of one run, both sides in turn.

    python -m tests.bench.run [ROWS] [--json FILE] [--check]

Sizes are those of flows.yaml. Output goes to temporary folders; run it on a machine with nothing else to do.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench.measure import Row, Scale
from tests.bench.report import header, line, titles, write

# By name, so that torch is imported after its threads are set.
ROWS = {
    "sample": "sampling:rows",
    "update": "updating:rows",
    "fsdp_sample": "sampling:fsdp_rows",
    "fsdp_update": "updating:fsdp_rows",
    "skip": "updating:skip_rows",
    "iteration": "iteration:rows",
    "orchestration_prefect": "iteration:prefect_rows",
    "startup": "startup:rows",
    "long": "long:rows",
    "long_prefect": "long:prefect_rows",
}
_ON_REQUEST = ("long_prefect",)
_TINY = ("prompts.choose=2", "sample.per_prompt=3", "resources.micro_batch={sample: 2}")


def main(words: Sequence[str] | None = None) -> int:
    """Measures; 1 with --check when a row missed its bound."""
    arguments = _parser().parse_args(words)
    names = [name for word in arguments.rows for name in word.split(",") if name]
    chosen = names or [name for name in ROWS if name not in _ON_REQUEST]
    unknown = sorted(set(chosen) - ROWS.keys())
    if unknown:
        print(f"bench: no row {unknown[0]!r}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    if arguments.iterations < 20 or min(arguments.repetitions, arguments.threads) < 1:
        print("bench: wants --iterations of 20 or more, --repetitions and --threads of 1 or more", file=sys.stderr)
        return 2
    scale = _scale(arguments)
    _set_threads(scale.threads)
    facts, done = header(scale), list[Row]()
    print(f"{facts['machine']}, {scale.threads} threads, {scale.repetitions} repetitions\n{titles()}", flush=True)
    for name in chosen:
        begun = time.monotonic()
        for row in _rows(name)(scale):
            done.append(row)
            write(arguments.json, facts, done)
            print(line(row), flush=True)
        print(f"    ({time.monotonic() - begun:.0f} s)", flush=True)
    missed = [row.name for row in done if not row.within]
    print(
        f"{arguments.json}: {len(done)} rows, {'missed: ' + ', '.join(missed) if missed else 'all within their bounds'}"
    )
    return 1 if missed and arguments.check else 0


def _set_threads(number: int) -> None:
    """Of this process, before and after torch is there."""
    os.environ["OMP_NUM_THREADS"] = str(number)
    importlib.import_module("torch").set_num_threads(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", help=f"rows, all by default but {', '.join(_ON_REQUEST)}: {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where figures go (%(default)s)")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a row misses its bound")
    parser.add_argument("--repetitions", type=int, default=5, help="of both sides, after a warm-up (%(default)s)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of a computing process (%(default)s, all cores)")
    parser.add_argument("--iterations", type=int, default=500, help="of the long run (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tries the benchmark; its figures mean nothing")
    return parser


def _scale(arguments: argparse.Namespace) -> Scale:
    sets = _TINY if arguments.tiny else ()
    return Scale(arguments.repetitions, sets, arguments.iterations, arguments.threads)


def _rows(name: str) -> Callable[[Scale], Iterator[Row]]:
    module, _, function = ROWS[name].partition(":")
    return getattr(importlib.import_module(f"tests.bench.{module}"), function)


if __name__ == "__main__":
    sys.exit(main())
