import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor

from schemas.errors import InputError, NonFinite
from stages.store import images, tensors


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, 2, generator=generator),
        "a": torch.randn(4, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(3),
        "none": torch.zeros(0, 2),
    }


def test_tensors_come_back_bit_by_bit_with_the_same_digest(tmp_path: Path) -> None:
    weights = _weights()
    digest = tensors.save(tmp_path / "raw.safetensors", weights)
    loaded = tensors.load(tmp_path / "raw.safetensors")
    assert list(loaded) == sorted(weights)
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in weights.items())
    assert tensors.digest(loaded) == digest
    assert [p.name for p in tmp_path.iterdir()] == ["raw.safetensors"]


def test_digest_covers_name_dtype_shape_and_bytes_not_strides() -> None:
    b = _weights()["b"]
    assert tensors.digest({"b": b.t().contiguous().t()}) == tensors.digest({"b": b})
    others = [{"c": b}, {"b": b.reshape(2, 3)}, {"b": b.view(torch.int32)}, {"b": b + 1e-7}, {"b": -b}]
    assert len({tensors.digest(o) for o in [{"b": b}, *others]}) == 1 + len(others)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "raw.safetensors"
    tensors.save(path, {"a": torch.ones(2)})
    shared = torch.ones(2)
    with pytest.raises(RuntimeError):
        tensors.save(path, {"a": shared, "b": shared})
    assert torch.equal(tensors.load(path)["a"], torch.ones(2))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [None, b"", b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!"])
def test_a_missing_or_broken_file_is_named_with_its_remedy(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "update" / "policy" / "raw.safetensors"
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        tensors.load(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith(f"Delete the stage's directory {tmp_path / 'update'} and run again.")


def test_rounding_equals_diffusers() -> None:
    pictures = torch.rand(2, 3, 5, 7, generator=torch.Generator().manual_seed(1))
    pictures[0, 0, 0, :4] = torch.tensor([0.0, 1.0, 0.5, 2.5 / 255])
    wanted = VaeImageProcessor().postprocess(pictures, output_type="pil", do_denormalize=[False, False])
    assert isinstance(wanted, list)
    got = images.to_uint8(pictures)
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, np.asarray(theirs))
        np.testing.assert_array_equal(images.pixels(images.png(ours)), ours)


def test_bad_pictures_are_refused() -> None:
    pictures = np.zeros((2, 3, 4, 4), np.float32)
    pictures[1, 0, 0, 0] = np.nan
    with pytest.raises(NonFinite, match="number 1 of its batch"):
        images.to_uint8(pictures)
    with pytest.raises(InputError, match="does not decode"):
        images.pixels({"bytes": b"not a picture", "path": None})
    with pytest.raises(ValueError, match=r"wanted .*uint8"):
        images.png(np.zeros((4, 4, 3), np.float32))


def test_light_workers_read_tables_without_torch() -> None:
    code = "import sys, stages.store.tables, stages.store.images; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
