"""Builds the example's pipeline at tiny size from the real classes, untrained, from a seed and with nothing downloaded.

A picture of 32 x 32 pixels is latents of (8, 8, 8) and 16 image tokens; a prompt is 8 CLIP tokens, and 8 zeros stand
where T5's tokens would: call the pipeline with `max_sequence_length=8`.
"""

import string
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from stages.shapes.render import SIZE
from stages.shapes.scenes import COLOURS, NUMBERS, SHAPES

TEXT_TOKENS = 8
_LATENT_CHANNELS = 8
_FACTOR = 4  # pixels a latent, each way
_TEXT_WIDTH = 32
_SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


def build_pipeline(seed: int) -> StableDiffusion3Pipeline:
    """The untrained pipeline in eval mode; its text encoders are never trained, the rest is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer, tokenizer_2 = build_tokenizer(), build_tokenizer()
        return StableDiffusion3Pipeline(
            transformer=_transformer(),
            vae=_autoencoder(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            text_encoder=_text_encoder(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_text_encoder(tokenizer_2),
            tokenizer_2=tokenizer_2,
            text_encoder_3=None,  # pyright: ignore[reportArgumentType]  # optional in the pipeline, not in its types
            tokenizer_3=None,  # pyright: ignore[reportArgumentType]
        )


def build_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-pair encoding with one token for each word of the vocabulary; other words fall into letters."""
    words = [*NUMBERS, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES)]
    tokens = [*_SPECIAL.values(), *string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    merges: list[tuple[str, str]] = []
    for word in words:
        left, *rest = _pieces(word, merges)
        for right in rest:
            merges.append((left, right))
            left += right
            tokens.append(left)
    given: dict[str, Any] = {  # wider than the tokenizer's own annotations
        "vocab": {token: i for i, token in enumerate(dict.fromkeys(tokens))},
        "merges": merges,
    }
    return CLIPTokenizer(**given, model_max_length=TEXT_TOKENS, **_SPECIAL)


def _pieces(word: str, merges: Sequence[tuple[str, str]]) -> list[str]:
    """The word as the merges so far leave it; later ones rank lower, so they change no earlier word."""
    pieces = [*word[:-1], f"{word[-1]}</w>"]
    for left, right in merges:
        at = 0
        while at < len(pieces) - 1:
            if pieces[at] == left and pieces[at + 1] == right:
                pieces[at : at + 2] = [left + right]
            at += 1
    return pieces


def _transformer() -> SD3Transformer2DModel:
    heads, head_width = 4, 32
    return SD3Transformer2DModel(
        sample_size=SIZE // _FACTOR,
        patch_size=2,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=head_width,
        num_attention_heads=heads,
        joint_attention_dim=2 * _TEXT_WIDTH,
        caption_projection_dim=heads * head_width,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=SIZE // _FACTOR // 2,
        qk_norm="rms_norm",
    ).eval()


def _autoencoder() -> AutoencoderKL:
    widths = (16, 32, 32)  # two halvings: factor 4
    blocks: dict[str, Any] = {  # the class annotates tuples of one
        "block_out_channels": widths,
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
    }
    return AutoencoderKL(
        **blocks,
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    ).eval()


def _text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Random weights at a scale at which words stay apart; CLIP's own start (std 0.02) makes all prompts alike."""
    ids: dict[str, Any] = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in _SPECIAL.items()}
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_TEXT_WIDTH,
        intermediate_size=2 * _TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        projection_dim=_TEXT_WIDTH,
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
        pad_token_id=ids["pad_token_id"],
    )
    encoder = CLIPTextModelWithProjection(config).eval()
    for module in encoder.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
    return encoder
