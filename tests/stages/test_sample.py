import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file

from schemas.artifacts import TableRef
from schemas.contracts import SampleInputs, SampleOutputs
from schemas.errors import InputError, NonFinite
from schemas.seeds import seed_of
from stages import sample
from stages.store import images, tables
from tests.stages.chain import ODE, PROMPTS, SDE, Chain


def chain(folder: Path, directory: Path, **changes: Any) -> Chain:
    return Chain(str(folder), str(directory), **changes)


def drawn(made: Chain, node: str = "sample", iteration: int = 0, **config: Any) -> SampleOutputs:
    return made.sample(made.context(node, iteration), config=made.sample_config(**config))


def column(ref: TableRef, name: str) -> Any:
    table = tables.read(ref)
    tensor = name in ("latents", "states", "log_prob", "sigma", "sigma_next", "timestep")
    return tables.tensors(table, name) if tensor else table.column(name).to_pylist()


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_ode_samples_are_the_pictures_of_the_public_pipeline(sd3_folder: Path, tmp_path: Path, guidance: float) -> None:
    made = chain(sd3_folder, tmp_path, sampler={**ODE, "guidance_scale": guidance})
    samples = drawn(made).samples
    seeds = [seed_of(7, 0, f"p{p}", i) for p in range(3) for i in range(4)]
    assert column(samples, "seed") == seeds
    assert column(samples, "sample_id") == [f"p{p}/{i}" for p in range(3) for i in range(4)]
    noise = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        sd3_folder, dtype=torch.float32, text_encoder_3=None, tokenizer_3=None
    )
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        prompt=[prompt for prompt in PROMPTS for _ in range(4)],
        negative_prompt=[""] * 12,
        height=16,
        width=16,
        latents=noise,  # pyright: ignore[reportArgumentType]
        guidance_scale=guidance,
        num_inference_steps=3,
        max_sequence_length=8,
        output_type="np",
    ).images  # type: ignore[union-attr]
    theirs = (np.asarray(pictures) * 255).round().astype(int)
    ours = np.stack([images.pixels(value) for value in column(samples, "image")]).astype(int)
    assert np.abs(ours - theirs).max() <= 1  # batches of another size round otherwise
    assert ours.std() > 2


def test_noise_comes_from_identity(sd3_folder: Path, tmp_path: Path) -> None:
    a = drawn(chain(sd3_folder, tmp_path, micro_batch=2)).trajectory
    b = drawn(chain(sd3_folder, tmp_path, micro_batch=3, shard_micro_batches=1), "other").trajectory
    np.testing.assert_array_equal(column(a, "states")[:, 0], column(b, "states")[:, 0])
    np.testing.assert_allclose(column(a, "latents"), column(b, "latents"), atol=1e-4)
    np.testing.assert_allclose(column(a, "log_prob"), column(b, "log_prob"), atol=1e-5)
    assert column(a, "micro_batch") == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert column(b, "micro_batch") == [0, 0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5]
    assert (len(a.shards), len(b.shards)) == (3, 6)


def test_shared_noise_and_window(sd3_folder: Path, tmp_path: Path) -> None:
    sampler = {**SDE, "steps": 6, "window": {"kind": "random", "size": 2, "range": [1, 5]}, "shared_noise": True}
    made = chain(sd3_folder, tmp_path, sampler=sampler)
    trajectory = drawn(made, iteration=3).trajectory
    states, steps = column(trajectory, "states"), column(trajectory, "step_index")
    first = made.sample_config().sampler.window.steps(6, 7, 3)  # type: ignore[union-attr]
    assert steps == [list(first)] * 12
    sigmas = made.engine().adapter.schedule(6).sigmas.numpy()
    np.testing.assert_array_equal(column(trajectory, "sigma")[0], sigmas[list(first)])
    np.testing.assert_array_equal(column(trajectory, "sigma_next")[0], sigmas[[step + 1 for step in first]])
    # Until the window samples of a prompt are one; in it they part. Prompts differ.
    np.testing.assert_allclose(states[0, 0], states[3, 0], atol=1e-5)
    assert np.abs(states[0, 1] - states[3, 1]).max() > 0.1
    assert np.abs(states[0, 0] - states[4, 0]).max() > 0.1


def test_every_iteration_draws_anew_unless_noise_is_fixed(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path, sampler={**SDE, "steps": 6, "window": {"kind": "random", "size": 1}})
    first, second = (drawn(made, iteration=i).trajectory for i in range(2))
    assert not np.array_equal(column(first, "states"), column(second, "states"))
    fixed = [drawn(made, "fixed", i, fixed_noise=True) for i in range(3)]
    assert len({out.trajectory.digest for out in fixed}) == 1
    assert len({out.samples.digest for out in fixed}) == 1


def test_finished_shards_are_kept_and_lost_ones_drawn_again(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    whole = drawn(made)
    kept = Path(whole.trajectory.path) / "shard-00001.arrow"
    written = kept.stat().st_mtime_ns
    (Path(whole.trajectory.path) / "shard-00000.json").unlink()
    (Path(whole.samples.path) / "shard-00002.arrow").write_bytes(b"cut")
    again = drawn(made)
    assert again == whole
    assert kept.stat().st_mtime_ns == written
    assert drawn(made) == whole
    tables.verify(again.samples)
    tables.verify(again.trajectory)


def test_shards_of_another_cut_are_drawn_again(sd3_folder: Path, tmp_path: Path) -> None:
    drawn(chain(sd3_folder, tmp_path, micro_batch=2, shard_micro_batches=2))
    other = chain(sd3_folder, tmp_path, micro_batch=4, shard_micro_batches=1)
    assert drawn(other) == drawn(other, "fresh").model_copy(
        update={name: getattr(drawn(other), name) for name in ("samples", "trajectory")}
    )
    assert drawn(other).trajectory.digest == drawn(other, "fresh").trajectory.digest


def test_datasets_opens_both_tables(sd3_folder: Path, tmp_path: Path) -> None:
    out = drawn(chain(sd3_folder, tmp_path))
    samples = datasets.Dataset.from_file(str(Path(out.samples.path) / out.samples.shards[0].file))
    assert samples[1]["image"].size == (16, 16)
    trajectory = datasets.Dataset.from_file(str(Path(out.trajectory.path) / out.trajectory.shards[0].file))
    assert np.shape(trajectory[0]["states"]) == (4 * 4 * 8 * 8,)
    assert len(trajectory[0]["log_prob"]) == 3


def test_prompts_without_embeddings_are_named(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path)
    prompts = made.prompts()
    given = tables.read(made.conditioning(prompts))
    columns = {name: given.column(name).to_pylist() for name in given.schema.names}
    kept = [row for row, prompt_id in enumerate(columns["prompt_id"]) if prompt_id not in ("", "p1")]
    writer = tables.TableWriter(tmp_path, "few", given.schema)
    writer.write(0, {name: [values[row] for row in kept] for name, values in columns.items()})
    conditioning = made.conditioning(prompts)
    few = writer.ref(type(conditioning), 1, names=conditioning.names).under(tmp_path)
    inputs = SampleInputs(prompts=prompts, conditioning=few)
    with pytest.raises(InputError, match=r"prompt 'p1' has no embeddings in .*few"):
        sample.run(made.sample_config(), inputs, made.context("sample", 0))
    guided = made.sample_config(sampler={**SDE, "guidance_scale": 2.0})
    with pytest.raises(InputError, match="p1"):
        sample.run(guided, inputs, made.context("sample", 0))


def test_latents_that_are_not_finite_name_the_samples(sd3_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(sd3_folder, broken)
    weights = broken / "transformer" / "diffusion_pytorch_model.safetensors"
    named = load_file(weights)
    named["proj_out.bias"][0] = torch.nan
    save_file(named, weights)
    with pytest.raises(NonFinite, match=r"sample\[2\].*'p0/0', 'p0/1'.*'two'"):
        drawn(chain(broken, tmp_path), iteration=2)


def test_a_set_of_the_base_is_the_base(sd3_folder: Path, tmp_path: Path) -> None:
    made = chain(sd3_folder, tmp_path, sampler=ODE)
    outs = [drawn(made, name, weights=name).trajectory.digest for name in ("raw", "old", "ema")]
    assert len(set(outs)) == 1
