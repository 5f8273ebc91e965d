"""Resources: how a run is computed. None of it is identity; all of it is recorded."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.strict import Strict


class RayResources(Strict):
    """What each rank asks of Ray, for `launcher: ray`. Like all resources it is not identity."""

    address: str | None = Field(
        default=None,
        description="HOST:PORT of a cluster, or 'auto' for the one this machine belongs to; none: a local one is "
        "started. Not identity.",
    )
    gpus_per_worker: Literal[0, 1] | None = Field(
        default=None,
        description="None: 1 with device 'cuda', 0 with 'cpu', and with 'auto' 1 where the cluster has enough. "
        "Not identity.",
    )
    cpus_per_worker: int = Field(
        default=1, ge=1, description="Cores a rank; also its threads where resources.threads is none. Not identity."
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="Ranks together on few nodes, or one on each, as Ray's placement groups say it."
    )


class Profile(Strict):
    """Traces of what the ranks compute, for chrome://tracing or Perfetto: STAGE/profile/rank0.json.gz in the run."""

    kind: Literal["torch"] = Field(default="torch", description="torch.profiler, with CUDA's events on a GPU.")
    iterations: tuple[int, ...] = Field(min_length=1, description="Of the loop, from 0; traces are large.")


class Resources(Strict):
    """Processes, threads and batch sizes. Changing them never makes a committed stage stale."""

    launcher: Literal["inline", "local", "ray", "torchrun"] = Field(
        default="local",
        description="Where stages are computed: this process, worker processes on this machine, actors of a Ray "
        "cluster, or workers that torchrun started. Not identity.",
    )
    processes: int = Field(default=1, ge=1, description="Ranks that share the model (FSDP).")
    threads: int | None = Field(
        default=None, ge=1, description="Threads a rank; the machine's cores shared out when none."
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    replicas: int = Field(
        default=1,
        ge=1,
        description="Groups of ranks that each hold the whole model (HSDP); 1: all ranks share it.",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        description="Neighbouring ranks that share the tokens of each sample (Ulysses): less memory for "
        "activations of long sequences.",
    )
    gathered: dict[str, bool] = Field(
        default_factory=dict,
        description="Whether blocks stay gathered between model calls, by node or stage name: faster, more memory. "
        "Where not named: on one CPU rank.",
    )
    offload: tuple[Literal["parameters", "autoencoder"], ...] = Field(
        default=(), description="What waits in the machine's memory until it is used: sharded weights, the autoencoder."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Blocks' activations are computed again in the backward pass: less memory, slower."
    )
    compile: bool = Field(default=False, description="Blocks run through torch.compile.")
    decode_batch: int | None = Field(
        default=None, ge=1, description="Pictures that the autoencoder decodes at once; a micro-batch when none."
    )
    micro_batch: dict[str, int] = Field(
        default_factory=dict, description="Samples in one model call, by node or stage name; 8 where not named."
    )
    shard_micro_batches: int = Field(default=4, ge=1, description="Micro-batches in one Arrow shard.")
    overlap: bool = Field(
        default=False, description="Shards of samples are scored as they commit, beside sampling: for a core to spare."
    )
    checkpoint_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps between checkpoints within an update; none: it starts over."
    )
    timeout: float = Field(
        default=3600.0, gt=0, description="Seconds without progress after which a worker counts as lost."
    )
    memory: float | None = Field(
        default=None, gt=0, description="GiB that a rank may use; a run that would need more by estimate is refused."
    )
    heartbeat: float = Field(
        default=60.0,
        gt=0,
        description="Seconds without a sign of life after which a worker counts as lost, and a worker that torchrun "
        "started gives its foreman up. Not identity.",
    )
    start_timeout: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that workers may take until they are there: to load their code, to be placed by Ray, to "
        "be started by torchrun. Not identity.",
    )
    ray: RayResources = Field(
        default_factory=RayResources, description="What each rank asks of Ray, for launcher 'ray'. Not identity."
    )
    check_disk: bool = Field(default=True, description="Refuse a run that would not fit the disk, by estimate.")
    preflight: bool = Field(
        default=True,
        description="Before iteration 1 one prompt goes through the whole flow, so that nothing breaks late.",
    )
    profile: Profile | None = Field(default=None, description="Iterations whose computing stages write a trace.")
    retries: int = Field(default=1, ge=0, description="Fresh starts after lost workers.")

    def gathered_in(self, node: str, stage: str) -> bool | None:
        """Whether blocks stay gathered in this node; none where nothing is said."""
        return self.gathered.get(node, self.gathered.get(stage))

    def micro_batch_of(self, node: str, stage: str) -> int:
        """Samples in one model call of this node."""
        return self.micro_batch.get(node, self.micro_batch.get(stage, 8))

    @model_validator(mode="after")
    def _whole_replicas(self) -> "Resources":
        if self.processes % self.replicas:
            raise ValueError(
                f"processes ({self.processes}) must be a multiple of replicas ({self.replicas}): each is shared by "
                "equally many ranks"
            )
        if self.processes // self.replicas % self.context_parallel:
            raise ValueError(
                f"context_parallel ({self.context_parallel}) must divide processes / replicas "
                f"({self.processes // self.replicas}): a sample's tokens are shared within a replica"
            )
        if self.context_parallel > 1 and self.compile:
            raise ValueError("compile cannot be used with context_parallel above 1: diffusers' hooks are not compiled")
        return self
