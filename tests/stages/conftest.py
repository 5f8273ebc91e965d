"""A real StableDiffusion3Pipeline of a few thousand weights, made without any download."""

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)


def _clip_tokenizer() -> CLIPTokenizer:
    words = ["<bos>", "<eos>", "<pad>", "<unk>", *string.ascii_lowercase, *(c + "</w>" for c in string.ascii_lowercase)]
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return CLIPTokenizer({word: i for i, word in enumerate(words)}, [], model_max_length=8, **special)


def _t5_tokenizer() -> PreTrainedTokenizerFast:
    pieces = [(piece, -1.0) for piece in ["<pad>", "</s>", "<unk>", "\u2581", *string.ascii_lowercase]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=12, **special)


def _clip() -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=56,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        hidden_act="gelu",
    )
    return CLIPTextModelWithProjection(config).eval()


def _t5() -> T5EncoderModel:
    config = T5Config(vocab_size=30, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return T5EncoderModel(config).eval()


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).eval()


def _vae() -> AutoencoderKL:
    # Typed by diffusers as if there were one block.
    blocks: dict[str, Any] = {
        "block_out_channels": (4, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    return AutoencoderKL(
        **blocks,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    ).eval()


def _pipeline(t5: bool, **scheduler: Any) -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    return StableDiffusion3Pipeline(
        transformer=_transformer(),
        vae=_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler or {"shift": 3.0})),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5() if t5 else None,  # type: ignore[arg-type]
        tokenizer_3=_t5_tokenizer() if t5 else None,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="session")
def sd3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without T5: 16x16 pixels, latents (4, 8, 8), shift 3."""
    folder = tmp_path_factory.mktemp("sd3")
    _pipeline(t5=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sd3_t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With T5 and dynamic shifting, as SD3.5 may have."""
    folder = tmp_path_factory.mktemp("sd3_t5")
    _pipeline(t5=True, use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64).save_pretrained(folder)
    return folder
