"""Pictures of a finished stage beside their rewards and advantages. Bytes of a picture are read when it is shown."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipelines.prune import pruned
from pipelines.rundir import Address
from pipelines.saved import Saved
from schemas.artifacts import AdvantagesTable, RewardsTable, SamplesTable, TableRef
from schemas.contracts import CONTRACTS
from schemas.errors import InputError, UserError, closest

if TYPE_CHECKING:  # half a second that `runs` and `show` need not wait
    import pyarrow as pa

Thing = TypeVar("Thing")
_KEYS = ("sample_id", "prompt_id", "prompt", "index", "seed")


@dataclass(frozen=True)
class Picture:
    """One sample. `score` is the weighted sum of its rewards, by which groups are sorted; `row` is its place."""

    row: int
    sample_id: str
    prompt_id: str
    prompt: str
    index: int
    seed: int
    rewards: Mapping[str, float | None]
    score: float | None
    advantage: float | None


class Group(NamedTuple):
    """All pictures of one prompt, best first; those without a score come last."""

    prompt_id: str
    prompt: str
    pictures: Sequence[Picture]

    @property
    def scores(self) -> list[float]:
        """Of those that have one, best first."""
        return [picture.score for picture in self.pictures if picture.score is not None]

    @property
    def mean(self) -> float | None:
        """Of the scores; none without any."""
        return sum(self.scores) / len(self.scores) if self.scores else None


@dataclass(frozen=True)
class Gallery:
    """The pictures of one stage run."""

    run: Saved
    address: Address
    place: Path
    ref: SamplesTable

    @property
    def there(self) -> bool:
        """Whether the pictures are still on disk."""
        return _there(self.place, self.ref)

    @cached_property
    def table(self) -> "pa.Table":
        """Memory-mapped."""
        return opened(self.place, self.ref)

    def png(self, picture: Picture) -> bytes:
        """The file of one picture."""
        return self.table.column("image")[picture.row].as_py()["bytes"]

    def firsts(self) -> frozenset[tuple[str, int]]:
        """Prompt and seed of the first picture of each prompt; rewards are not looked at."""
        columns = (self.table.column(name).to_pylist() for name in ("prompt_id", "seed", "index"))
        return frozenset((prompt, seed) for prompt, seed, index in zip(*columns, strict=True) if index == 0)

    @cached_property
    def pictures(self) -> list[Picture]:
        """All of them, in the order of the table."""
        rewards, scores, advantages = self._judged()
        columns = [self.table.column(name).to_pylist() for name in _KEYS]
        rows = enumerate(zip(*columns, strict=True))
        return [
            Picture(
                row,
                *keys,
                rewards=rewards.get(keys[0], {}),
                score=scores.get(keys[0]),
                advantage=advantages.get(keys[0]),
            )
            for row, keys in rows
        ]

    def groups(self) -> list[Group]:
        """By prompt, the best group first; prompts of no score come last, in their own order."""
        by_prompt: dict[str, list[Picture]] = defaultdict(list)
        for picture in self.pictures:
            by_prompt[picture.prompt_id].append(picture)
        groups = [Group(key, group[0].prompt, sorted(group, key=_best_first)) for key, group in by_prompt.items()]
        return sorted(groups, key=lambda group: (group.mean is None, -(group.mean or 0.0)))

    def _judged(self) -> tuple[dict[str, dict[str, float | None]], dict[str, float], dict[str, float | None]]:
        """Rewards, weighted sums and advantages by sample id, of all stages of the run that read these samples."""
        rewards: dict[str, dict[str, float | None]] = defaultdict(dict)
        advantages: dict[str, float | None] = {}
        weights: dict[str, float] = {}
        for scorer, place, ref in _readers(self.run, self.address, RewardsTable):
            table, before = opened(place, ref), set(weights)
            ids = table.column("sample_id").to_pylist()
            for name, weight in ref.weights.items():
                shown = f"{scorer.node}.{name}" if name in before else name
                weights[shown] = weight
                for sample_id, value in zip(ids, table.column(name).to_pylist(), strict=True):
                    rewards[sample_id][shown] = value
            for _, where, found in _readers(self.run, scorer, AdvantagesTable):
                judged = opened(where, found)
                pairs = zip(judged.column("sample_id").to_pylist(), judged.column("advantage").to_pylist(), strict=True)
                advantages.update(pairs)
        return rewards, dict(_sums(rewards, weights)), advantages


def gallery(run: Saved, folder: str, node: str | None = None) -> Gallery:
    """The pictures of an iteration, `before` or `after`: of `node`, else of the first stage whose samples were judged.

    UserError when there are none, or when they were pruned.
    """
    there = galleries(run, folder)
    if not there:
        folders = sorted({a.folder for a in run.records if any(_tables(run, a, SamplesTable))})
        have = f"there are some in {_few(folders)}" if folders else "no stage of the run makes any"
        have = next(iter(run.damaged.values()), have)
        raise UserError(f"{run.run.path.name}/{folder} has no pictures; {have}")
    names = [found.address.node for found in there]
    if node is not None and node not in names:
        raise UserError(f"--stage: {run.run.path.name}/{folder} has no pictures of {node!r}. {closest(node, names)}")
    chosen = there[names.index(node)] if node else max(there, key=lambda found: _judges(run, found.address))
    if not chosen.there:
        why = "were pruned (keep)" if pruned(chosen.place) else "are gone"
        kept = sorted({g.address.folder for g in galleries(run) if g.address.node == chosen.address.node and g.there})
        have = f"those of {_few(kept)} are there" if kept else "rewards and metrics are still there: see `show`"
        raise UserError(f"the pictures of {run.run.path.name}/{chosen.address.path} {why}; {have}")
    return chosen


def galleries(run: Saved, folder: str | None = None) -> list[Gallery]:
    """Every stage run that made pictures, whether or not they are still there."""
    return [
        Gallery(run, address, run.run.place(address), ref)
        for address in run.records
        if folder in (None, address.folder)
        for ref in _tables(run, address, SamplesTable)
    ]


class Spread(NamedTuple):
    """Of the rewards within a group, as a mean over the groups: largest - smallest, and std with ddof 0."""

    reach: float
    std: float


def spread(run: Saved, address: Address) -> Spread | None:
    """Of the weighted rewards that a stage gave; none when its table is gone or holds no score."""
    for ref in _tables(run, address, RewardsTable):
        if not _there(run.run.place(address), ref):
            continue
        table = opened(run.run.place(address), ref)
        ids, prompts = (table.column(name).to_pylist() for name in ("sample_id", "prompt_id"))
        columns = {name: table.column(name).to_pylist() for name in ref.weights}
        rewards = {key: {n: column[i] for n, column in columns.items()} for i, key in enumerate(ids)}
        groups: dict[str, list[float]] = defaultdict(list)
        prompt_of = dict(zip(ids, prompts, strict=True))
        for sample_id, score in _sums(rewards, ref.weights):
            groups[prompt_of[sample_id]].append(score)
        if groups:
            reach = [max(scores) - min(scores) for scores in groups.values()]
            return Spread(sum(reach) / len(reach), sum(map(deviation, groups.values())) / len(groups))
    return None


def evenly(things: Sequence[Thing], most: int) -> list[Thing]:
    """An even choice of at most so many, first and last among them; all of them when `most` is 0."""
    if most == 0 or len(things) <= most:
        return list(things)
    if most == 1:
        return [things[0]]
    return [things[round(i * (len(things) - 1) / (most - 1))] for i in range(most)]


def deviation(values: Sequence[float]) -> float:
    """Standard deviation, ddof 0."""
    mean = sum(values) / len(values)
    return (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def _tables(run: Saved, address: Address, kind: type[Any]) -> Iterator[Any]:
    record = run.records[address]
    if record.status == "done" and record.stage in CONTRACTS:
        yield from (value for _, value in run.outputs(address) if isinstance(value, kind))


def _readers(run: Saved, address: Address, kind: type[Any]) -> Iterator[tuple[Address, Path, Any]]:
    """Stage runs that read an output of this one and made a table of this kind."""
    for reader in run.readers(address):
        for ref in _tables(run, reader, kind):
            yield reader, run.run.place(reader), ref


def _judges(run: Saved, address: Address) -> int:
    """2 when rewards and advantages were computed from these pictures, 1 when only rewards were."""
    scorers = [scorer for scorer, _, _ in _readers(run, address, RewardsTable)]
    return bool(scorers) + any(True for scorer in scorers for _ in _readers(run, scorer, AdvantagesTable))


def _there(place: Path, ref: TableRef) -> bool:
    return bool(ref.shards) and (place / ref.path).exists()


def opened(place: Path, ref: TableRef) -> "pa.Table":
    """A table of a stage's directory, memory-mapped; InputError names the shard that is missing or not whole."""
    import pyarrow as pa

    parts = []
    for shard in ref.shards:
        file = place / ref.path / shard.file
        try:
            part = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"{file} cannot be read: {error}; move {place} away and run again to make it") from error
        if part.num_rows != shard.rows:
            wrong = f"wanted {shard.rows} rows, got {part.num_rows}"
            raise InputError(f"{file} is not whole: {wrong}; move {place} away and run again to make it")
        parts.append(part)
    return pa.concat_tables(parts)


def _sums(
    rewards: Mapping[str, Mapping[str, float | None]], weights: Mapping[str, float]
) -> Iterator[tuple[str, float]]:
    """Weighted sums; of the first reward alone where every weight is 0. A sample that lacks one has no sum."""
    used = {name: weight for name, weight in weights.items() if weight} or dict.fromkeys(list(weights)[:1], 1.0)
    for sample_id, values in rewards.items():
        parts = [None if (value := values.get(name)) is None else weight * value for name, weight in used.items()]
        if None not in parts:
            yield sample_id, sum(part for part in parts if part is not None)


def _best_first(picture: Picture) -> tuple[bool, float, int]:
    return picture.score is None, -(picture.score or 0.0), picture.index


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:4])} ... {', '.join(names[-3:])}"
