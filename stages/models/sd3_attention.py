"""SD3's joint attention: the kernels that compute it, and how several ranks share its tokens.

diffusers has no context parallelism for this family.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from schemas.errors import InputError

_KERNELS = {
    "_native_math": SDPBackend.MATH,
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
}
PLAN = {
    "transformer_blocks.0": {
        name: ContextParallelInput(split_dim=1, expected_dims=3) for name in ("hidden_states", "encoder_hidden_states")
    },
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}


def kernel(name: str) -> AbstractContextManager[Any]:
    """Inside, attention is computed by this kernel and by no other; by any for `native`."""
    found = _KERNELS.get(name)
    return nullcontext() if found is None else sdpa_kernel(found)


def must_divide(ranks: int, counts: Mapping[str, int]) -> None:
    """InputError unless as many ranks can share each of these."""
    for what, count in counts.items():
        if count % ranks:
            more = "; with T5 they are 77 more than `model.max_sequence_length`" if "text" in what else ""
            raise InputError(f"`resources.context_parallel` {ranks} does not divide the {count} {what}{more}")


class SharedAttention:
    """As diffusers' `JointAttnProcessor2_0`, but diffusers dispatches the attention itself.

    Each rank holds a part of the pictures' tokens and a part of the text's; without a mask their order is of no matter.
    """

    _attention_backend = None
    _parallel_config: Any = None

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: object
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Tokens (batch, tokens, width) of pictures, and of text where there is any."""
        mine: Any = attn
        query, key, value = (
            _heads(layer, norm, hidden_states, attn.heads)
            for layer, norm in ((mine.to_q, mine.norm_q), (mine.to_k, mine.norm_k), (mine.to_v, None))
        )
        if encoder_hidden_states is not None:
            added = (mine.add_q_proj, mine.norm_added_q), (mine.add_k_proj, mine.norm_added_k), (mine.add_v_proj, None)
            texts = [_heads(layer, norm, encoder_hidden_states, attn.heads) for layer, norm in added]
            query, key, value = (torch.cat(both, 1) for both in zip((query, key, value), texts, strict=True))
        out = dispatch_attention_fn(query, key, value, parallel_config=self._parallel_config).flatten(2)
        pictures = mine.to_out[1](mine.to_out[0](out[:, : hidden_states.shape[1]]))
        if encoder_hidden_states is None:
            return pictures
        text = out[:, hidden_states.shape[1] :]
        return pictures, text if attn.context_pre_only else mine.to_add_out(text)


def _heads(
    layer: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor] | None, tokens: Tensor, heads: int
) -> Tensor:
    """(batch, tokens, heads, width of a head)."""
    out = layer(tokens).unflatten(-1, (heads, -1))
    return out if norm is None else norm(out)
