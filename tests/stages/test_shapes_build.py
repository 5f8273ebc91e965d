from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

from stages.shapes.autoencoder import fit_autoencoder, to_signed
from stages.shapes.build import TEXT_TOKENS, build_pipeline, build_tokenizer
from stages.shapes.render import render_all
from stages.shapes.scenes import ALL, parse


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    return build_pipeline(0)


def draw(pipeline: StableDiffusion3Pipeline) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {"num_inference_steps": 2, "max_sequence_length": TEXT_TOKENS, "return_dict": False}
    return pipeline("two red circles", guidance_scale=1.0, generator=generator, output_type="np", **given)[0]


def test_every_word_is_one_token_and_fits() -> None:
    tokenizer = build_tokenizer()
    for text in ALL:
        assert tokenizer.tokenize(text) == [f"{word}</w>" for word in text.split()]
    assert tokenizer.model_max_length == TEXT_TOKENS
    assert len(tokenizer.tokenize("pink")) == 4


def test_a_seed_decides_the_weights_and_nothing_else(pipeline: StableDiffusion3Pipeline) -> None:
    before = torch.get_rng_state()
    again, other = build_pipeline(0), build_pipeline(1)
    assert torch.equal(before, torch.get_rng_state())
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        mine, same, others = (getattr(p, name).state_dict() for p in (pipeline, again, other))
        assert all(torch.equal(mine[key], same[key]) for key in mine)
        assert not all(torch.equal(mine[key], others[key]) for key in mine)


def test_it_is_loaded_and_run_by_plain_diffusers(pipeline: StableDiffusion3Pipeline, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    loaded = StableDiffusion3Pipeline.from_pretrained(tmp_path, text_encoder_3=None, tokenizer_3=None)
    assert loaded.tokenizer("two red circles").input_ids == pipeline.tokenizer("two red circles").input_ids
    assert loaded.tokenizer.model_max_length == TEXT_TOKENS
    images = draw(loaded)
    assert images.shape == (1, 32, 32, 3)
    assert np.array_equal(images, draw(pipeline))


def test_it_fits_into_eight_megabytes_as_float16(pipeline: StableDiffusion3Pipeline) -> None:
    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert 2 * sum(weight.numel() for module in modules for weight in module.state_dict().values()) < 7.5e6


def test_prompts_are_apart(pipeline: StableDiffusion3Pipeline) -> None:
    given: dict[str, Any] = {"prompt_2": None, "prompt_3": None, "max_sequence_length": TEXT_TOKENS}
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(prompt=list(ALL), do_classifier_free_guidance=False, **given)
    assert embeds is not None
    assert pooled is not None
    assert embeds.shape == (36, 2 * TEXT_TOKENS, 64)
    assert pooled.shape == (36, 64)
    own = 100.0 * torch.eye(36)  # a prompt's distance to itself does not count
    assert (torch.cdist(embeds.flatten(1), embeds.flatten(1)) + own).min() > 5.0
    assert (torch.cdist(pooled, pooled) + own).min() > 0.5


@pytest.mark.slow
def test_the_autoencoder_learns_and_normalises_its_latents() -> None:
    images = render_all([parse(text) for text in ALL], np.random.default_rng(0))
    seen: list[tuple[int, int, str]] = []
    start = fit_autoencoder(build_pipeline(0).vae, images, steps=1, seed=0, progress=lambda *_: None)
    vae = build_pipeline(0).vae
    metrics = fit_autoencoder(vae, images, steps=20, seed=0, progress=lambda *done: seen.append(done))
    assert metrics["error"] < 0.8 * start["error"]
    assert seen[-1] == (20, 20, "steps")
    with torch.no_grad():
        mean = vae.encode(to_signed(images), return_dict=False)[0].mean
    latents = (mean - vae.config["shift_factor"]) * vae.config["scaling_factor"]
    assert float(latents.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(latents.std()) == pytest.approx(1.0, abs=1e-3)
    assert not any(weight.requires_grad for weight in vae.parameters())


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0 steps and 1 pictures"):
        fit_autoencoder(build_pipeline(0).vae, np.zeros((1, 32, 32, 3), np.uint8), 0, 0, lambda *_: None)
