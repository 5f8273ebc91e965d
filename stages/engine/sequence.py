"""Context parallelism: neighbouring ranks share the tokens of each sample, through diffusers' hooks (Ulysses).

`enable_parallelism` of diffusers 0.42 sets the same hooks, but fails on a machine without an accelerator.
"""

from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stages.models import Adapter


def share_tokens(module: nn.Module, adapter: Adapter, ranks: int, device: str) -> None:
    """From now on each model call is made by `ranks` ranks, whose inputs are equal and whose outputs are whole.

    A rank's gradient is that of its own tokens: their sum over the ranks is the gradient.
    """
    plan = adapter.share_tokens(module, ranks)
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world // ranks, 1, ranks), mesh_dim_names=("lane", "ring", "ulysses"))
    config = ContextParallelConfig(ulysses_degree=ranks)
    config.setup(dist.get_rank(), world, torch.device(device), mesh)
    for part in module.modules():
        processor: Any = getattr(part, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = ParallelConfig(context_parallel_config=config)
    apply_context_parallel(module, config, dict(plan))
