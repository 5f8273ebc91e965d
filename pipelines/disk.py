"""The disk that a run needs, estimated before it starts: pictures as PNG, latents and states, weights and moments."""

import shutil
from collections.abc import Collection, Iterator
from typing import NamedTuple

from pipelines.checks import model_of
from pipelines.describe import num_prompts, num_samples
from pipelines.model_size import ModelSize, model_size
from pipelines.plan import Plan, PlanNode, due
from pipelines.rundir import Address
from pipelines.terminal import size
from pipelines.unroll import Unrolled
from schemas.contracts import EncodeConfig, EncodeImagesConfig, ExportConfig, SampleConfig, UpdateConfig
from schemas.errors import UserError
from schemas.sampling import StochasticSampler

_LIGHT = 20_000  # bytes of a stage's small files: request, record, ids, scores
_PIXEL = 2  # bytes of a pixel as PNG: 3 of noise, 0.7 of a flat drawing
_ROW = 400  # bytes of ids, prompt and metadata


class Need(NamedTuple):
    """Bytes of a stage run that stay (`light`) and that retention may let go (`heavy`); `known` says if it is whole."""

    light: int
    heavy: int
    known: bool = True


def need(plan: Plan, node: PlanNode) -> Need:
    """Of one run of a node."""
    config, model = node.config, model_of(node)
    shape = model_size(model) if model is not None else None
    if model is None:
        return Need(_LIGHT, 0)
    if shape is None:
        return Need(_LIGHT, 0, known=isinstance(config, ExportConfig) and config.format == "lora")
    if isinstance(config, UpdateConfig):
        sets = 1 + config.loss.needs.old_policy + (config.ema is not None) + 2  # and two moments
        return Need(_LIGHT, 4 * shape.trained * sets)
    if isinstance(config, ExportConfig):
        return Need(_LIGHT + (4 * shape.trained if config.format == "lora" else shape.bytes), 0)
    rows = num_prompts(plan, node) if isinstance(config, EncodeConfig) else num_samples(plan, node)
    if rows is None:
        return Need(_LIGHT, 0, known=False)
    return Need(_LIGHT, rows * _row(plan, node, shape))


def _row(plan: Plan, node: PlanNode, shape: ModelSize) -> int:
    """Bytes of a sample, or of a prompt."""
    config = node.config
    if isinstance(config, EncodeConfig):
        return _ROW + 4 * shape.embeddings
    if isinstance(config, EncodeImagesConfig):
        return _ROW + 4 * shape.latents
    assert isinstance(config, SampleConfig)
    sampler, states = config.sampler, 0
    if isinstance(sampler, StochasticSampler):
        width = 2 if sampler.states == "float16" else 4
        states = (len(sampler.window.steps(sampler.steps, plan.seed, 0)) + 1) * width
    return _ROW + _PIXEL * shape.pixels + (4 + states) * shape.latents


def as_lines(plan: Plan) -> Iterator[str]:
    """What `plan` says: heavy nodes, an iteration, and the run."""
    needs = {node.name: need(plan, node) for node in plan.nodes.values()}
    unknown = [name for name, one in needs.items() if not one.known]
    for node in plan.section("body" if plan.times else "before"):
        one = needs[node.name]
        if one.heavy:
            yield f"{node.name}: {size(one.heavy)}{f', every {node.every} iterations' if node.every else ''}"
    kept = "" if plan.keep is None else f", with what `keep` keeps of {plan.times} iterations"
    yield f"the run: {size(_total(plan))}{kept}"
    if unknown:
        yield f"not known before the model and the prompts are: {', '.join(unknown)}"


def check_space(world: Unrolled, only: Collection[Address] | None) -> None:
    """UserError when what is still to be made cannot fit the disk of the run's folder."""
    if not world.plan.resources.check_disk:
        return
    wanted, free = _total(world.plan, world, only), shutil.disk_usage(world.run.path).free
    if wanted > free:
        keep = "" if world.plan.keep else " let old iterations go (keep: {last: 2, every: 20}),"
        raise UserError(
            f"the run still needs about {size(wanted)} (`rewardflow plan` shows of what) and the disk of "
            f"{world.run.path} has {size(free)} free. Make space,{keep} choose another disk with --runs, or set "
            "resources.check_disk=false to try all the same"
        )


def _total(plan: Plan, world: Unrolled | None = None, only: Collection[Address] | None = None) -> int:
    """Bytes of the stage runs that are not there yet, at the most at any one time."""
    needs = {node.name: need(plan, node) for node in plan.nodes.values()}

    def missing(address: Address) -> bool:
        if only is not None and address not in only:
            return False
        return world is None or (address.path not in world.run.adopted and not world.run.place(address).is_dir())

    out = sum(
        needs[node.name].light + needs[node.name].heavy
        for node in [*plan.section("before"), *plan.section("after")]
        if missing(Address(node.section, node.name))
    )
    for iteration in range(plan.times):
        for node in plan.section("body"):
            if due(node.every, iteration, plan.times) and missing(Address("body", node.name, iteration)):
                one = needs[node.name]
                out += one.light + (one.heavy if _stays(plan, iteration) else 0)
    return out


def _stays(plan: Plan, iteration: int) -> bool:
    """Kept to the end, or there while the last ones are made: one more for the iteration at work, one for the best."""
    keep = plan.keep
    if keep is None:
        return True
    return iteration >= plan.times - keep.last - 2 or (keep.every is not None and iteration % keep.every == 0)
