"""What the rows stand on: a flow of flows.yaml, its prompts and embeddings, and contexts for its stages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import diffusers
import numpy as np
import torch
import transformers
from torch import Tensor

from pipelines.compile import compile_flow
from pipelines.load import load
from pipelines.plan import Plan
from schemas.artifacts import AdvantagesTable, ConditioningTable, PromptsTable, TrajectoryTable
from schemas.contracts import (
    EncodeConfig,
    EncodeInputs,
    PromptsConfig,
    PromptsInputs,
    SampleConfig,
    SampleInputs,
    UpdateConfig,
    UpdateInputs,
)
from schemas.seeds import seed_of
from schemas.tables import advantages_schema
from stages import encode, prompts, sample
from stages.context import StageContext
from stages.engine.mesh import join
from stages.store import tables

ROOT = Path(__file__).resolve().parents[2]
FLOWS = ROOT / "flows.yaml"
ITERATION = 3  # whose noise is drawn, every time


@dataclass
class Ground:
    """A compiled flow in a folder of its own; `residents` keep the engine warm."""

    plan: Plan
    folder: Path
    residents: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for library in (diffusers, transformers):
            library.utils.logging.disable_progress_bar()
        choosing = cast(PromptsConfig, self.plan.nodes["prompts"].config)
        self.prompts = self._prompts("prompts", choosing)
        self.everyone = self._prompts("everyone", choosing.model_copy(update={"choose": None}))
        ctx = self.context("encode")
        config = cast(EncodeConfig, self.plan.nodes["encode"].config)
        out = encode.run(config, EncodeInputs(prompts=self.everyone), ctx)
        self.conditioning: ConditioningTable = out.embeddings.under(ctx.directory)

    @property
    def sampling(self) -> SampleConfig:
        return cast(SampleConfig, self.plan.nodes["sample"].config)

    @property
    def updating(self) -> UpdateConfig:
        return cast(UpdateConfig, self.plan.nodes["update"].config)

    @property
    def sample_inputs(self) -> SampleInputs:
        return SampleInputs(prompts=self.prompts, conditioning=self.conditioning)

    def emptied(self, name: str) -> Path:
        """An empty folder of this name."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def context(self, node: str, folder: str = "", *, rehearsal: bool = False) -> StageContext:
        """A stage run in an empty folder, by default the node's."""
        join("cpu")
        stage = self.plan.nodes[node].stage if node in self.plan.nodes else node
        return StageContext(
            directory=self.emptied(folder or node),
            node=node,
            seed=self.plan.seed,
            iteration=ITERATION,
            resources=self.plan.resources,
            micro_batch=self.plan.resources.micro_batch_of(node, stage),
            rehearsal=rehearsal,
            residents=self.residents,
        )

    def trajectory(self) -> TrajectoryTable:
        """One sampling of the base, kept."""
        ctx = self.context("sample")
        out = sample.run(self.sampling, self.sample_inputs, ctx)
        kept = self.folder / "kept"
        shutil.move(ctx.directory, kept)
        return out.trajectory.under(kept)

    def update_inputs(self, trajectory: TrajectoryTable, flat: int = 0) -> UpdateInputs:
        """With advantages by sample; those of the `flat` first prompts are 0."""
        table = tables.read(trajectory)
        ids, groups = table.column("sample_id").to_pylist(), table.column("prompt_id").to_pylist()
        without = list(dict.fromkeys(groups))[:flat]
        values = [0.0 if g in without else seed_of(i) % 2001 / 500 - 2 for i, g in zip(ids, groups, strict=True)]
        ctx = self.context("advantage")
        writer = tables.TableWriter(ctx.directory, "advantages", advantages_schema())
        writer.write(0, {"sample_id": ids, "prompt_id": groups, "reward": values, "advantage": values})
        advantages = writer.ref(AdvantagesTable, 1).under(ctx.directory)
        return UpdateInputs(trajectory=trajectory, conditioning=self.conditioning, advantages=advantages)

    def embeddings(self) -> dict[str, tuple[Tensor, Tensor]]:
        """`embeds` and `pooled` by prompt id, in memory."""
        table = tables.read(self.conditioning)
        ids = table.column("prompt_id").to_pylist()
        embeds, pooled = (tables.ragged(table, name) for name in ("embeds", "pooled"))
        tensors = [
            (torch.from_numpy(np.copy(e)), torch.from_numpy(np.copy(p))) for e, p in zip(embeds, pooled, strict=True)
        ]
        return dict(zip(ids, tensors, strict=True))

    def _prompts(self, name: str, config: PromptsConfig) -> PromptsTable:
        ctx = self.context(name)
        return prompts.run(config, PromptsInputs(), ctx).chosen.under(ctx.directory)


@contextmanager
def ground(flow: str, sets: tuple[str, ...]) -> Iterator[Ground]:
    """A flow of flows.yaml in a temporary folder."""
    with TemporaryDirectory(prefix="rewardflow-bench-") as folder:
        yield Ground(compile_flow(load(FLOWS, flow, sets), flow), Path(folder))
