"""Prompts to policy at tiny size through the real stages, in this process or, by `on_ranks`, in several."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from pipelines.crews.local import free_port
from schemas.artifacts import AdvantagesTable, ConditioningTable, PolicyRef, PromptsTable, TrajectoryTable
from schemas.contracts import (
    EncodeConfig,
    EncodeInputs,
    SampleConfig,
    SampleInputs,
    SampleOutputs,
    UpdateConfig,
    UpdateInputs,
    UpdateOutputs,
)
from schemas.engine import Resources
from schemas.errors import RewardflowError
from schemas.models import Sd3Model
from schemas.seeds import seed_of
from schemas.tables import advantages_schema, prompts_schema, trajectory_schema
from stages import encode, sample, update
from stages.context import StageContext
from stages.engine import checkpoint
from stages.engine.mesh import barrier, join
from stages.engine.policy import Engine, resident
from stages.models import Conditioning
from stages.store import tables, tensors
from stages.store.tables import TableWriter

PROMPTS = ("two", "a b c", "one")
SDE = {"kind": "flow_sde", "steps": 4, "eta": 0.7}
ODE = {"kind": "ode", "steps": 3}


@dataclass(frozen=True)
class Chain:
    """One small run; plain values, so that other ranks can be told as JSON."""

    folder: str  # the model
    directory: str
    lora: int | None = 2
    adapter: dict[str, Any] = field(default_factory=dict)  # more of `model.lora`
    dtype: str = "float32"
    sampler: dict[str, Any] = field(default_factory=lambda: dict(SDE))
    weights: str = "raw"
    per_prompt: int = 4
    micro_batch: int = 2
    shard_micro_batches: int = 2
    update: dict[str, Any] = field(default_factory=lambda: {"loss": {"kind": "grpo", "clip": 1e-3}})
    iterations: int = 1
    flat: tuple[str, ...] = ()  # prompts whose samples all have advantage 0
    first: int = 0  # iteration
    checkpoint_steps: int | None = None
    stop_after: int | None = None  # optimizer steps, after which the update is stopped
    resources: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)  # refs made elsewhere: policy, conditioning, trajectory
    measured: dict[str, dict[str, float]] = field(default_factory=dict)  # by iteration/node, filled as it runs

    @property
    def model(self) -> Sd3Model:
        lora = None if self.lora is None else {"rank": self.lora, **self.adapter}
        settings = {"path": self.folder, "max_sequence_length": 8, "lora": lora, "dtype": self.dtype}
        return Sd3Model.model_validate(settings)

    @property
    def all_resources(self) -> Resources:
        world = int(os.environ.get("WORLD_SIZE", "1"))
        cut = {"shard_micro_batches": self.shard_micro_batches, "checkpoint_steps": self.checkpoint_steps}
        return Resources.model_validate({"processes": world, **cut, **self.resources})

    def context(self, node: str, iteration: int, residents: dict[str, object] | None = None) -> StageContext:
        join("cpu")
        directory = Path(self.directory) / f"{iteration:04d}" / node
        directory.mkdir(parents=True, exist_ok=True)
        return StageContext(
            directory=directory,
            node=node,
            seed=7,
            iteration=iteration,
            resources=self.all_resources,
            micro_batch=self.micro_batch,
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            residents={} if residents is None else residents,
            progress=self.progress,
            measured=self.measured.setdefault(f"{iteration}/{node}", {}),
        )

    def progress(self, done: int, total: int, unit: str) -> None:
        if unit == "optimizer steps" and done == self.stop_after:
            raise KeyboardInterrupt

    def prompts(self) -> PromptsTable:
        ctx = self.context("prompts", 0)
        writer = TableWriter(ctx.directory, "chosen", prompts_schema())
        ids = [f"p{i}" for i in range(len(PROMPTS))]
        if ctx.rank == 0:
            writer.write(0, {"prompt_id": ids, "prompt": PROMPTS, "metadata": ["{}"] * len(ids)})
        barrier()
        return writer.ref(PromptsTable, 1).under(ctx.directory)

    def conditioning(self, prompts: PromptsTable) -> ConditioningTable:
        if "conditioning" in self.given:
            return ConditioningTable.model_validate(self.given["conditioning"])
        ctx = self.context("encode", 0)
        out = encode.run(EncodeConfig(model=self.model), EncodeInputs(prompts=prompts), ctx)
        return out.embeddings.under(ctx.directory)

    def sample_config(self, **changes: Any) -> SampleConfig:
        given = {"model": self.model, "sampler": self.sampler, "per_prompt": self.per_prompt, "weights": self.weights}
        return SampleConfig.model_validate({**given, **changes})

    def sample(
        self, ctx: StageContext, policy: PolicyRef | None = None, config: SampleConfig | None = None
    ) -> SampleOutputs:
        prompts = self.prompts()
        inputs = SampleInputs(prompts=prompts, conditioning=self.conditioning(prompts), policy=policy)
        out = sample.run(config or self.sample_config(), inputs, ctx)
        moved = {"samples": out.samples.under(ctx.directory), "trajectory": out.trajectory.under(ctx.directory)}
        return out.model_copy(update=moved)

    def advantages(self, trajectory: TrajectoryTable, ctx: StageContext) -> AdvantagesTable:
        """Any numbers of mean 0 or so, from the sample's id."""
        table = tables.read(trajectory)
        ids, prompts = table.column("sample_id").to_pylist(), table.column("prompt_id").to_pylist()
        values = [
            0.0 if prompt in self.flat else (seed_of(i) % 2001 - 1000) / 500
            for i, prompt in zip(ids, prompts, strict=True)
        ]
        return written_advantages(ids, values, ctx)

    def update_config(self, **changes: Any) -> UpdateConfig:
        optimizer = {"learning_rate": {"start": 1e-3}}
        return UpdateConfig.model_validate({"model": self.model, "optimizer": optimizer, **self.update, **changes})

    def update_once(
        self,
        trajectory: TrajectoryTable,
        advantages: AdvantagesTable | None,
        ctx: StageContext,
        policy: PolicyRef | None = None,
        config: UpdateConfig | None = None,
    ) -> UpdateOutputs:
        conditioning = self.conditioning(self.prompts())
        inputs = UpdateInputs(trajectory=trajectory, conditioning=conditioning, advantages=advantages, policy=policy)
        out = update.run(config or self.update_config(), inputs, ctx)
        return out.model_copy(update={"policy": out.policy.under(ctx.directory)})

    def run(self, residents: dict[str, object] | None = None) -> list[UpdateOutputs]:
        """sample and update from iteration `first` on, until there are `iterations`."""
        outs: list[UpdateOutputs] = []
        policy = PolicyRef.model_validate(self.given["policy"]) if "policy" in self.given else None
        for iteration in range(self.first, self.iterations):
            if "trajectory" in self.given:
                trajectory = TrajectoryTable.model_validate(self.given["trajectory"])
            else:
                trajectory = self.sample(self.context("sample", iteration, residents), policy).trajectory
            judged = self.advantages(trajectory, self.context("advantage", iteration))
            outs.append(self.update_once(trajectory, judged, self.context("update", iteration, residents), policy))
            policy = outs[-1].policy
        return outs

    def engine(self, policy: PolicyRef | None = None) -> Engine:
        engine = resident(self.context("engine", 0), self.model, None)
        engine.load(policy)
        return engine


def written_advantages(ids: Sequence[str], values: Sequence[float | None], ctx: StageContext) -> AdvantagesTable:
    writer = TableWriter(ctx.directory, "advantages", advantages_schema())
    if ctx.rank == 0:
        columns = {"sample_id": ids, "prompt_id": ["p"] * len(ids), "reward": values, "advantage": values}
        writer.write(0, columns)
    barrier()
    return writer.ref(AdvantagesTable, 1).under(ctx.directory)


def rewritten(
    trajectory: TrajectoryTable, directory: Path, order: Sequence[int] = (), **columns: Any
) -> TrajectoryTable:
    """The same samples in another order or with other columns."""
    table = tables.read(trajectory)
    rows = list(order) or list(range(len(table)))
    schema = trajectory_schema(trajectory.latent_shape, trajectory.num_steps)
    shaped = {"latents", "states", "step_index", "sigma", "sigma_next", "sigma_max", "timestep", "log_prob"}
    given: dict[str, Any] = {
        name: tables.tensors(table, name, rows) if name in shaped else table.column(name).take(rows).to_pylist()
        for name in schema.names
    }
    writer = TableWriter(directory, "rewritten", schema)
    writer.write(0, {**given, **columns})
    facts = {name: getattr(trajectory, name) for name in ("latent_shape", "num_steps", "sampler", "policy", "weights")}
    return writer.ref(TrajectoryTable, 1, **facts).under(directory)


def first_gradient(policy: PolicyRef) -> dict[str, Tensor]:
    """The gradient of the first optimizer step, by name: Adam's first moment after it is (1 - 0.9) g."""
    assert policy.updates == 1
    moments = checkpoint.load(policy, "optimizer")
    return {k.removeprefix("exp_avg."): v / 0.1 for k, v in moments.items() if k.startswith("exp_avg.")}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of `b`."""
    assert a.keys() == b.keys()
    off = torch.stack([(a[name].double() - b[name].double()).norm() for name in a]).norm()
    return float(off / torch.stack([b[name].double().norm() for name in b]).norm())


def fixed_velocity(engine: Engine, name: str = "raw") -> Tensor:
    """Velocity (6, ...) on inputs that are always the same."""
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(6, *engine.adapter.latent_shape(), generator=generator)
    embeds = torch.randn(6, 16, 32, generator=generator)
    pooled = torch.randn(6, 32, generator=generator)
    times = torch.linspace(100, 900, 6)
    with engine.weights.using(name), torch.no_grad():
        return engine.velocity(latents, times, Conditioning({"embeds": embeds, "pooled": pooled}), 1.0)


def on_ranks(chains: Sequence[Chain], world_size: int) -> None:
    """The chains, one after the other, on real processes over gloo; each leaves what `outcome` reads.

    As the launcher does, it tries once more when a process dies of a signal: CI once saw glibc abort one.
    """
    for last in (False, True):
        told = _on_ranks(chains, world_size)
        if last or all(code >= 0 for code, _ in told):
            break
        print("\n".join(f"a rank left with {code} and is tried again:\n{text}" for code, text in told))
        for chain in chains:
            shutil.rmtree(chain.directory, ignore_errors=True)
    assert [code for code, _ in told] == [0] * world_size, "\n".join(text for _, text in told)


def _on_ranks(chains: Sequence[Chain], world_size: int) -> list[tuple[int, str]]:
    """Exit code and stderr of each rank. Stderr goes to files: a full pipe would hold up all of them."""
    free = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    shared = {**free, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "tests.stages.chain", json.dumps([asdict(chain) for chain in chains])]
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in range(world_size)]
        ranks = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stderr=file) for rank, file in enumerate(files)
        ]
        try:
            codes = [rank.wait(timeout=240) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for file in files:
            file.seek(0)
        return [(code, file.read()) for code, file in zip(codes, files, strict=True)]


def outcome(chain: Chain, rank: int) -> list[UpdateOutputs] | str:
    """What `on_ranks` left of a chain on one rank: outputs, or the error that ended it."""
    written = json.loads((Path(chain.directory) / f"rank-{rank}.json").read_text())
    return written if isinstance(written, str) else [UpdateOutputs.model_validate(out) for out in written]


def main() -> None:
    torch.set_num_threads(1)
    for told in json.loads(sys.argv[1]):
        chain = Chain(**told)
        try:
            written: object = [out.model_dump(mode="json") for out in chain.run({})]
        except RewardflowError as error:
            written = f"{type(error).__name__}: {error}"
        rank = Path(chain.directory) / f"rank-{os.environ['RANK']}"
        rank.with_suffix(".json").write_text(json.dumps(written))
        if chain.lora is not None and chain.adapter:
            tensors.save(rank.with_suffix(".base"), {"base": fixed_velocity(chain.engine(), "base")})
        rank.with_suffix(".measured").write_text(json.dumps(chain.measured))
        barrier()


if __name__ == "__main__":
    main()
