"""The memory that a rank needs in each stage that computes with the model, and the largest micro-batch that fits.

Estimated from the model's headers and config.json. What libraries take for their own work (a convolution's workspace,
an allocator's gaps) is not in it.
"""

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.activations import Activations, family_of
from pipelines.checks import model_of, sets_of, source
from pipelines.describe import num_samples
from pipelines.model_size import ModelSize, count, model_size, tensor_shapes
from pipelines.plan import Plan, PlanNode
from schemas.contracts import EncodeConfig, EncodeImagesConfig, SampleConfig, UpdateConfig
from schemas.errors import UserError
from schemas.models import ModelConfig
from schemas.sampling import StochasticSampler

_GIB = 2**30
_PROCESS = _GIB // 2  # of Python with torch and diffusers, or of a CUDA context
_MOMENTS = {"adamw": 8, "adamw_8bit": 2}  # bytes of a trained number in the optimizer
_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_PICTURES = 64  # encoded into one shard


class Footprint(NamedTuple):
    """Bytes that a rank needs at the most: `fixed`, and `sample` for each sample of a micro-batch."""

    fixed: int
    sample: int

    def at(self, micro_batch: int) -> int:
        """With so many samples in a model call."""
        return self.fixed + self.sample * micro_batch

    def largest(self, limit: int) -> int | None:
        """The most samples that fit; none where their number makes no difference."""
        if not self.sample:
            return None
        return max(0, (limit - self.fixed) // self.sample)


class Limit(NamedTuple):
    """Bytes that a rank has, and who says so."""

    bytes: int
    said: str


class Held(NamedTuple):
    """The model of a node: its sizes, its activations, and the bytes of a number it computes in."""

    model: ModelConfig
    size: ModelSize
    activations: Activations
    width: int


def footprint(plan: Plan, node: PlanNode) -> Footprint | None:
    """Of a node that computes with a model; none when that is not known before the run."""
    held = _held(plan, node)
    if held is None:
        return None
    match node.config:
        case SampleConfig():
            own = _sample(plan, node.config, held)
        case UpdateConfig():
            own = _update(plan, node, node.config, held)
        case EncodeConfig():
            own = Footprint(_encoders(held), 0)
        case _:
            return Footprint(_PROCESS + _autoencoder(held) + 12 * _PICTURES * held.size.pixels, _encoding(held))
    return Footprint(_PROCESS + own.fixed + _engine(plan, node, held), own.sample)


def as_lines(plan: Plan) -> Iterator[str]:
    """What `plan` says of each node that computes with a model."""
    limit = limit_of(plan)
    known = _footprints(plan)
    for name, (found, micro_batch) in known.items():
        if found is not None:
            yield f"{name}: {_told(found.at(micro_batch))}{_fits(found, micro_batch, limit)}"
    unknown = [name for name, (found, _) in known.items() if found is None]
    if unknown:
        yield f"not known before the model is: {', '.join(unknown)}"
    if limit is None:
        yield "what a rank has is not known here; resources.memory (GiB) tells it"
    elif known:
        yield f"a rank has {_told(limit.bytes)} ({limit.said})"


def as_json(plan: Plan) -> dict[str, Any]:
    """The same in bytes: by node, and what a rank has; null where it is not known."""
    limit = limit_of(plan)
    nodes: dict[str, Any] = {}
    for name, (found, micro_batch) in _footprints(plan).items():
        nodes[name] = None
        if found is not None:
            largest = found.largest(limit.bytes) if limit else None
            nodes[name] = {"bytes": found.at(micro_batch), "micro_batch": micro_batch, "largest_micro_batch": largest}
    return {"nodes": nodes, "limit": None if limit is None else limit._asdict()}


def check_memory(plan: Plan) -> None:
    """UserError when a node would need more than `resources.memory`, where that is given."""
    if plan.resources.memory is None:
        return
    limit = round(plan.resources.memory * _GIB)
    for name, (found, micro_batch) in _footprints(plan).items():
        if found is None or found.at(micro_batch) <= limit:
            continue
        largest = found.largest(limit)
        remedy = "share it among more resources.processes, train a LoRA, or compute in bfloat16"
        if largest:
            remedy = f"set resources.micro_batch.{name}={largest}, the largest that fits"
        raise UserError(
            f"{name}: a rank needs about {_told(found.at(micro_batch))} with resources.micro_batch.{name}="
            f"{micro_batch}, more than resources.memory ({plan.resources.memory:g} GiB); {remedy}"
        )


def limit_of(plan: Plan) -> Limit | None:
    """What a rank has: as `resources.memory` says, or as the machine does."""
    resources = plan.resources
    if resources.memory is not None:
        return Limit(round(resources.memory * _GIB), "resources.memory")
    device = _cuda_memory() if resources.device != "cpu" else None
    if device is not None:
        return Limit(device, "the smallest GPU here, as nvidia-smi says")
    free = _free_memory() if resources.device != "cuda" else None
    return Limit(free // resources.processes, "this machine's free memory, shared out") if free is not None else None


def _footprints(plan: Plan) -> dict[str, tuple[Footprint | None, int]]:
    kinds = (SampleConfig, UpdateConfig, EncodeConfig, EncodeImagesConfig)
    nodes = [node for node in plan.nodes.values() if isinstance(node.config, kinds)]
    return {n.name: (footprint(plan, n), plan.resources.micro_batch_of(n.name, n.stage)) for n in nodes}


def _fits(found: Footprint, micro_batch: int, limit: Limit | None) -> str:
    if not found.sample:
        return ""
    text = f" with a micro-batch of {micro_batch}"
    if limit is None:
        return f"{text}, {_told(found.sample)} a sample"
    largest = found.largest(limit.bytes)
    return f"{text}; {largest} would fit" if largest else f"{text}; not even 1 would fit"


def _held(plan: Plan, node: PlanNode) -> Held | None:
    model = model_of(node)
    size = model_size(model) if model is not None else None
    if model is None or size is None:
        return None
    activations = family_of(model).activations(size.transformer, model, size.latent_side, size.text)
    activations = activations.shared(plan.resources.context_parallel)
    return Held(model, size, activations, 4 if model.dtype == "float32" else 2)


def _engine(plan: Plan, node: PlanNode, held: Held) -> int:
    """The sharded model with what it keeps between stages. Before the loop, `encode` runs without it."""
    if isinstance(node.config, EncodeConfig) and node.section == "before":
        return 0
    total, trained = count(held.size.shapes.values()), held.size.trained
    weights = 4 * total if held.model.lora is None else held.width * total + 4 * trained
    # One set makes room for another; the start of training waits on the CPU, a LoRA's base beside its weights.
    each = _kept(plan, node, held) + 4 + 4 * _on_cpu(plan) + 2 * (held.model.lora is not None)
    drawing = any(isinstance(other.config, SampleConfig) for other in plan.nodes.values())
    resources = plan.resources
    shards = (weights + round(each * trained)) * resources.replicas // resources.processes
    if "parameters" in resources.offload and not _on_cpu(plan):
        shards = 0
    return shards + _gathered(plan, node, held, total) + (_autoencoder(held) if drawing else 0)


def _kept(plan: Plan, node: PlanNode, held: Held) -> float:
    """Bytes of a trained number in the sets beside raw and in the optimizer, once an update has run."""
    if node.section == "before":
        return 0
    updates = [other.config for other in plan.nodes.values() if isinstance(other.config, UpdateConfig)]
    return max(
        (4 * (len(sets_of(c)) - 1) + _MOMENTS[c.optimizer.kind] for c in updates if c.model == held.model), default=0
    )


def _gathered(plan: Plan, node: PlanNode, held: Held, total: int) -> int:
    """Weights in compute dtype: all that stay gathered, else the root's and two blocks' (one is fetched ahead)."""
    said = plan.resources.gathered_in(node.name, node.stage)
    trained = 0 if held.model.lora is None else held.size.trained
    if said or (said is None and plan.resources.processes == 1 and _on_cpu(plan)):
        return held.width * (total + trained)
    prefix, blocks = family_of(held.model).blocks, dict[str, int]()
    for name, shape in held.size.shapes.items():
        if name.startswith(prefix):
            number = name.removeprefix(prefix).split(".")[0]
            blocks[number] = blocks.get(number, 0) + count([shape])
    root = total - sum(blocks.values())
    return held.width * (root + 2 * max(blocks.values(), default=0) + trained)


def _sample(plan: Plan, config: SampleConfig, held: Held) -> Footprint:
    """Model calls and pictures of one micro-batch; what was drawn waits until a shard is whole."""
    sampler, size = config.sampler, held.size
    window = len(sampler.window.steps(sampler.steps, plan.seed, 0)) + 1 if isinstance(sampler, StochasticSampler) else 0
    branches = 2 if sampler.guided else 1
    waiting = (4 * (window + 2) * size.latents + 3 * size.pixels) * plan.resources.shard_micro_batches
    call = branches * (held.activations.forward + _conditioning(held)) + 24 * size.latents
    return Footprint(0, waiting + max(call, _decoding(held)))


def _update(plan: Plan, node: PlanNode, config: UpdateConfig, held: Held) -> Footprint:
    """Gradients pile up whole on each rank until they are shared out; other policies predict before them."""
    drawn = source(plan, node, "trajectory")
    sampler = drawn.config.sampler if drawn and isinstance(drawn.config, SampleConfig) else None
    guided = config.loss.needs.states and sampler is not None and sampler.guided
    window = len(sampler.window.steps(sampler.steps, plan.seed, 0)) if isinstance(sampler, StochasticSampler) else 1
    resources, ranks, trained = plan.resources, plan.resources.processes, held.size.trained
    lanes = ranks // resources.context_parallel
    others = config.loss.needs.old_policy + (config.kl is not None)
    rows = (num_samples(plan, drawn) or 0) if drawn else 0
    predicted = others * rows * (window if config.loss.needs.states else 1) * 4 * held.size.latents
    gradients = 4 * trained + 4 * trained * resources.replicas // ranks
    call = (2 if guided else 1) * (held.activations.trained(resources.activation_checkpointing) + _conditioning(held))
    return Footprint(gradients + predicted // config.steps // lanes, call + 40 * held.size.latents)


def _conditioning(held: Held) -> int:
    """Embeddings of a sample in one branch, in float32 and in the compute dtype."""
    return (4 + held.width) * held.size.embeddings


def _encoders(held: Held) -> int:
    """All text encoders at once."""
    folder = Path(str(held.model.path))
    return held.width * sum(count(tensor_shapes(folder / name).values()) for name in _ENCODERS)


def _autoencoder(held: Held) -> int:
    return 4 * count(tensor_shapes(Path(str(held.model.path)) / "vae").values())


def _decoding(held: Held) -> int:
    """At full resolution the decoder's last but one width goes through a norm and its activation."""
    widths = held.size.vae["block_out_channels"]
    return 4 * held.size.pixels * (3 * widths[min(1, len(widths) - 1)] + 1)


def _encoding(held: Held) -> int:
    return 4 * held.size.pixels * (5 * held.size.vae["block_out_channels"][0] + 3)


def _on_cpu(plan: Plan) -> bool:
    device = plan.resources.device
    return device == "cpu" or (device == "auto" and _cuda_memory() is None)


@cache
def _cuda_memory() -> int | None:
    """Bytes of the smallest GPU; none without the NVIDIA tool or a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return min(int(number) for number in told) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):  # a driver that does not answer: there is no GPU to use
        return None


def _free_memory() -> int | None:
    """Bytes of memory that can be had without swapping, where Linux tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(free[0]) * 1024 if free else None


def _told(number: float) -> str:
    return f"{number / _GIB:.3g} GiB"
