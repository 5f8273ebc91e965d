"""The engine of one model: built once, kept warm, and told which policy to hold."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from schemas.artifacts import PipelineRef, PolicyRef
from schemas.engine import Resources
from schemas.errors import InputError
from schemas.losses import OptimizerConfig, WeightSet
from schemas.models import ModelConfig
from stages.context import StageContext
from stages.engine import checkpoint
from stages.engine.flops import FlopMeter
from stages.engine.loading import fill
from stages.engine.lora import make_trainable
from stages.engine.lora_file import started
from stages.engine.mesh import mesh
from stages.engine.optim import Optimizer
from stages.engine.sequence import share_tokens
from stages.engine.shard import Timed, free_after_forward, frees_blocks, shard
from stages.engine.weights import Weights
from stages.engine.work import Work
from stages.models import Adapter, Conditioning, adapter

BASE = ""  # the digest of no policy


class Form(NamedTuple):
    """How the model lies in memory: what of the resources an engine is built by."""

    replicas: int = 1
    context_parallel: int = 1
    offload: tuple[str, ...] = ()
    activation_checkpointing: bool = False
    compile: bool = False

    @classmethod
    def of(cls, resources: Resources) -> "Form":
        """The form that the resources name."""
        return cls(*(getattr(resources, name) for name in cls._fields))


class Engine:
    """A sharded transformer and the policy in it. `digest` is None while memory holds what no checkpoint holds."""

    def __init__(self, config: ModelConfig, pipeline: PipelineRef | None, device: str, form: Form) -> None:
        self.config, self.device, self.form = config, torch.device(device), form
        self.adapter: Adapter = adapter(config, pipeline)
        self.mesh = mesh(device, form.replicas)
        self.timed: Timed = lambda name: nullcontext()
        self.compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.module: nn.Module = self._built()
        self.weights = Weights(self.module, form.replicas)
        if config.lora is not None and config.lora.start is not None:
            self.weights.begin(started(config.lora, self.adapter.lora_targets, self.weights.parameters))
        self.optimizer: Optimizer | None = None
        self.digest: str | None = BASE
        self.updates = 0
        self.flops = FlopMeter(self.adapter, lambda: nn.Module.to(self._shell(), "meta", self.compute))

    def _built(self) -> nn.Module:
        """The transformer: its shell with adapters, blocks compiled, sharded, and only then filled."""
        module = self._shell()
        blocks = self.adapter.blocks(module)
        if self.form.compile:
            for block in blocks:
                block.compile()
        if self.form.context_parallel > 1:
            share_tokens(module, self.adapter, self.form.context_parallel, self.device.type)
        offload = "parameters" in self.form.offload
        rest = torch.device("cpu") if offload else self.device
        shard(module, blocks, self.mesh, self.compute, lambda name: self.timed(name), offload)
        fill(module, self.adapter.weights(), self.config.lora, self.device, rest)
        return module.eval()

    def _shell(self) -> nn.Module:
        module = self.adapter.shell()
        make_trainable(module, self.config.lora, self.adapter.lora_targets)
        if self.form.activation_checkpointing:
            self.adapter.checkpoint_activations(module)
        return module

    def load(self, policy: PolicyRef | None) -> None:
        """Holds this policy's raw, old and ema weights; nothing is read when memory holds it already."""
        wanted = BASE if policy is None else policy.digest
        if self.digest == wanted:
            return
        self.digest, self.optimizer, self.weights.sets = None, None, {}
        self.module.zero_grad(set_to_none=True)
        if policy is None:
            self.weights.put(self.weights.start)
            self.updates = 0
        else:
            checkpoint.check(policy, self.config)
            self.weights.put(checkpoint.load_set(policy, "raw", self.weights))
            others: list[WeightSet] = [name for name in policy.sets if name != "raw"]
            self.weights.sets = {name: checkpoint.load_set(policy, name, self.weights) for name in others}
            self.updates = policy.updates
        self.digest = wanted

    def resume(self, halfway: PolicyRef) -> None:
        """Takes up an unfinished update: its weights, sets and count; the optimizer is prepared from the same."""
        self.load(halfway)
        self.digest = None

    def hold(self, policy: PolicyRef) -> None:
        """Notes that memory holds this policy, which was just saved from it."""
        self.digest, self.updates = policy.digest, policy.updates

    def choose(self, name: str) -> str:
        """The set to compute with: all sets of the base are the base; a policy must have the set."""
        if name in ("raw", "base") or name in self.weights.sets:
            return name
        if self.digest == BASE:
            return "raw"
        have = ", ".join(["raw", *sorted(self.weights.sets)])
        raise InputError(f"the policy has no {name!r} weights, only {have}; configure them in the update stage")

    def prepare_optimizer(self, config: OptimizerConfig, policy: PolicyRef | None) -> Optimizer:
        """The optimizer with the policy's moments; warm when it is the one that made the policy."""
        if self.optimizer is None or self.optimizer.config != config:
            optimizer = Optimizer(self.weights, config, self.updates)
            if policy is not None:
                optimizer.restore(checkpoint.load_moments(policy, self.weights))
            self.optimizer = optimizer
        return self.optimizer

    def velocity(self, latents: Tensor, timesteps: Tensor, given: Conditioning, guidance_scale: float) -> Tensor:
        """Guided velocity under the weights in use, float32, shaped as `latents`."""
        self.flops.forward(latents, given, guidance_scale)
        with self.timed("forward"):
            return self.adapter.velocity(self.module, latents, timesteps, given, guidance_scale)

    def backward(self, loss: Tensor, samples: int) -> None:
        """Gradients of a loss on the newest velocity, of so many samples."""
        self.flops.backward(samples)
        with self.timed("backward"):
            loss.backward()

    def work(self, ctx: StageContext) -> Work:
        """Measures a stage's computing from here on."""
        return Work(ctx, self.flops, self.compute)


def resident(ctx: StageContext, config: ModelConfig, pipeline: PipelineRef | None) -> Engine:
    """The engine of this process for this model, made anew when the model or its form in memory is another."""
    form = Form.of(ctx.resources)
    key = (config.model_dump_json(), None if pipeline is None else pipeline.digest, form)
    held = ctx.residents.get("engine")
    if not (isinstance(held, tuple) and held[0] == key):
        ctx.residents.pop("engine", None)
        del held  # two models would not fit
        held = (key, Engine(config, pipeline, ctx.device, form))
        ctx.residents["engine"] = held
    engine: Engine = held[1]
    engine.timed = ctx.timed
    free_after_forward(engine.module, frees_blocks(engine.mesh) if ctx.gathered is None else not ctx.gathered)
    return engine


@contextmanager
def changing(ctx: StageContext, engine: Engine) -> Iterator[None]:
    """Inside, memory holds what no checkpoint holds; after an error the engine is dropped, gradients and all."""
    engine.digest = None
    try:
        yield
    except BaseException:
        ctx.residents.pop("engine", None)
        raise
