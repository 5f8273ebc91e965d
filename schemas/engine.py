"""Resources: how a run is computed. None of it is identity; all of it is recorded."""

from typing import Literal

from pydantic import Field

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
    micro_batch: dict[str, int] = Field(
        default_factory=dict, description="Samples in one model call, by node or stage name; 8 where not named."
    )
    shard_micro_batches: int = Field(default=4, ge=1, description="Micro-batches in one Arrow shard.")
    checkpoint_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps between checkpoints within an update; none: it starts over."
    )
    timeout: float = Field(
        default=3600.0, gt=0, description="Seconds without progress after which a worker counts as lost."
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
    retries: int = Field(default=1, ge=0, description="Fresh starts after lost workers.")

    def micro_batch_of(self, node: str, stage: str) -> int:
        """Samples in one model call of this node."""
        return self.micro_batch.get(node, self.micro_batch.get(stage, 8))
