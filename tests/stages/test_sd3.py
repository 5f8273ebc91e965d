"""The adapter against the public pipeline: the same pictures to the last bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from schemas.artifacts import PipelineRef
from schemas.errors import InputError
from schemas.models import Sd3Model
from stages.models import Conditioning, adapter
from stages.models.sd3 import Sd3

CPU = torch.device("cpu")
PROMPTS = ["two red circles", "a b c", "one"]


def sd3(folder: Path, resolution: int | None = None) -> Sd3:
    config = Sd3Model(path=str(folder), max_sequence_length=8, resolution=resolution)
    made = adapter(config, None)
    assert isinstance(made, Sd3)
    return made


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def ours(model: Sd3, noise: Tensor, guidance: float, steps: int) -> Tensor:
    transformer = model.transformer()
    positive = stacked(model.encode(PROMPTS, CPU))
    negative = stacked(model.encode(["no"] * len(PROMPTS), CPU))
    schedule, latents = model.schedule(steps), noise
    with torch.no_grad():
        for i in range(steps):
            times = schedule.timesteps[i].expand(len(noise))
            velocity = model.velocity(transformer, latents, times, Conditioning(positive, negative), guidance)
            latents = latents + (schedule.sigmas[i + 1] - schedule.sigmas[i]) * velocity
    return model.decode(latents, CPU)


def loaded(folder: Path) -> Any:
    # Plain diffusers wants to be told that there is no T5.
    absent = {} if (folder / "text_encoder_3").is_dir() else {"text_encoder_3": None, "tokenizer_3": None}
    return StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, **absent)


def public(folder: Path, noise: Tensor, guidance: float, steps: int, size: int) -> np.ndarray:
    pipeline = loaded(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=PROMPTS,
        negative_prompt=["no"] * len(PROMPTS),
        height=size,
        width=size,
        latents=noise,
        guidance_scale=guidance,
        num_inference_steps=steps,
        max_sequence_length=8,
        output_type="np",
    ).images


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(("folder", "size"), [("sd3_folder", None), ("sd3_t5_folder", None), ("sd3_t5_folder", 8)])
def test_pictures_equal_the_public_pipeline(
    folder: str, size: int | None, guidance: float, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(folder)
    model = sd3(path, size)
    noise = torch.randn(3, *model.latent_shape(), generator=torch.Generator().manual_seed(1))
    pictures = ours(model, noise, guidance, 3)
    assert pictures.shape == (3, 3, model.resolution(), model.resolution())
    expected = public(path, noise, guidance, 3, model.resolution()).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(pictures.numpy(), expected, atol=2e-6)
    assert np.array_equal((pictures.numpy() * 255).round(), (expected * 255).round())
    assert expected.std() > 0.01


@pytest.mark.parametrize("folder", ["sd3_folder", "sd3_t5_folder"])
def test_embeddings_equal_the_public_pipeline(folder: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(folder)
    pipeline = loaded(path)
    for prompt in (*PROMPTS, ""):
        with torch.no_grad():
            embeds, negative, pooled, _ = pipeline.encode_prompt(
                prompt, None, None, device=CPU, negative_prompt=prompt, max_sequence_length=8
            )
        (row,) = sd3(path).encode([prompt], CPU)
        assert torch.equal(row["embeds"], embeds[0])
        assert torch.equal(row["pooled"], pooled[0])
        assert torch.equal(row["embeds"], negative[0])


def test_embeddings_do_not_depend_on_the_batch(sd3_t5_folder: Path) -> None:
    model = sd3(sd3_t5_folder)
    together = model.encode(PROMPTS, CPU)
    for prompt, row in zip(PROMPTS, together, strict=True):
        (alone,) = model.encode([prompt], CPU)
        assert all(torch.equal(row[name], alone[name]) for name in row)


def test_guidance_of_one_needs_no_negative_branch(sd3_folder: Path) -> None:
    model = sd3(sd3_folder)
    transformer, given = model.transformer(), stacked(model.encode(["one"], CPU))
    latents, times = torch.ones(1, *model.latent_shape()), torch.tensor([500.0])
    plain = model.velocity(transformer, latents, times, Conditioning(given), 1.0)
    same = model.velocity(transformer, latents, times, Conditioning(given, given), 7.0)
    torch.testing.assert_close(plain, same, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="negative"):
        model.velocity(transformer, latents, times, Conditioning(given), 2.0)


def test_encoded_pictures_are_the_posterior_mean(sd3_folder: Path) -> None:
    model = sd3(sd3_folder)
    pictures = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    vae = loaded(sd3_folder).vae
    with torch.no_grad():
        mean = vae.encode(pictures * 2 - 1).latent_dist.mode()
        torch.testing.assert_close(model.encode_pictures(pictures, CPU), (mean - 0.0609) * 1.5035)
        decoded = (vae.decode(mean).sample / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(model.decode((mean - 0.0609) * 1.5035, CPU), decoded, atol=1e-5, rtol=0)


def test_facts_of_the_layout(sd3_folder: Path) -> None:
    model = sd3(sd3_folder)
    transformer = model.transformer()
    assert model.latent_shape() == (4, 8, 8)
    assert model.resolution() == 16
    assert [type(block).__name__ for block in model.blocks(transformer)] == ["JointTransformerBlock"] * 2
    assert not any(p.requires_grad for p in transformer.parameters())
    assert not transformer.training
    assert torch.equal(model.timesteps(torch.tensor([0.25])), torch.tensor([250.0]))
    modules = dict(transformer.named_modules())
    assert all(any(name.endswith(target) for name in modules) for target in model.lora_targets)


def test_a_resolution_that_does_not_fit(sd3_folder: Path) -> None:
    with pytest.raises(InputError, match=r"model\.resolution.*18.*multiple of 4"):
        sd3(sd3_folder, 18).latent_shape()


@pytest.mark.parametrize("part", ["transformer", "vae", "tokenizer_2", "scheduler"])
def test_a_folder_that_lacks_a_part(sd3_folder: Path, tmp_path: Path, part: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sd3_folder, broken)
    shutil.rmtree(broken / part)
    with pytest.raises(InputError, match=rf"broken.*{part}.*model\.path"):
        sd3(broken)


def test_a_folder_that_is_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model_index\.json"):
        sd3(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    with pytest.raises(InputError, match="transformer"):
        sd3(tmp_path)
    with pytest.raises(InputError, match="gone"):
        adapter(Sd3Model(), PipelineRef(path=str(tmp_path / "nowhere"), digest=""))


def test_broken_weights_name_the_part(sd3_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sd3_folder, broken)
    (broken / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot load transformer"):
        sd3(broken).transformer()


def test_attention_is_computed_by_the_kernel_that_is_named(sd3_folder: Path) -> None:
    used: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            used.add(str(func))
            return func(*args, **(kwargs or {}))

    found = {}
    for name in ("native", "_native_math"):
        model = adapter(Sd3Model(path=str(sd3_folder), max_sequence_length=8, attention=name), None)
        transformer, given = model.transformer(), stacked(model.encode(["one"], CPU))
        transformer.requires_grad_(True)
        model.checkpoint_activations(transformer)
        used.clear()
        latents = torch.ones(1, *model.latent_shape())
        with Watch():
            velocity = model.velocity(transformer, latents, torch.tensor([500.0]), Conditioning(given), 1.0)
            velocity.square().sum().backward()  # what is computed again uses the same kernel
        found[name] = velocity.detach()
        assert any("flash_attention_for_cpu" in op for op in used) == (name == "native")
    torch.testing.assert_close(found["native"], found["_native_math"], atol=1e-5, rtol=1e-5)


def test_a_kernel_that_this_machine_lacks_is_an_error(sd3_folder: Path) -> None:
    model = adapter(Sd3Model(path=str(sd3_folder), max_sequence_length=8, attention="_native_cudnn"), None)
    given = Conditioning(stacked(model.encode(["one"], CPU)))
    with pytest.raises(InputError, match=r"`model\.attention` '_native_cudnn' cannot compute this model on cpu"):
        model.velocity(model.transformer(), torch.ones(1, *model.latent_shape()), torch.tensor([500.0]), given, 1.0)


def test_tiles_and_whole_pictures_are_nearly_the_same(sd3_folder: Path) -> None:
    pictures = []
    for tiling in (False, True):
        model = adapter(Sd3Model(path=str(sd3_folder), max_sequence_length=8, tiling=tiling, resolution=32), None)
        noise = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(1))
        pictures.append(model.decode(noise, CPU))
        model.rest()
        assert torch.equal(model.decode(noise, CPU), pictures[-1])
    assert pictures[0].shape == pictures[1].shape
    off = (pictures[0] - pictures[1]).abs()
    assert 0 < off.mean() < 0.2
