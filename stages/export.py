"""Stage `export`: a policy in the form that plain diffusers loads, as a LoRA file or as a whole pipeline folder."""

import json
import shutil
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from huggingface_hub import snapshot_download
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from schemas.artifacts import PipelineRef, PolicyRef
from schemas.assets import digest_of
from schemas.contracts import ExportConfig, ExportInputs, ExportOutputs
from schemas.errors import InputError
from stages.context import StageContext
from stages.engine import checkpoint
from stages.engine.lora import ADAPTER, is_lora, peft_config
from stages.engine.lora_file import started
from stages.models import Adapter, adapter

_FOLDER, _LORA_FILE = "export", "pytorch_lora_weights.safetensors"
_UNWANTED = (".*", "*.fp16*", "*.bin")  # hidden files, and the same weights in another form
_SAME_MODEL = "export with the `model` it was trained with"
_DTYPES = {"float32": torch.float32, "float16": torch.float16}


def run(config: ExportConfig, inputs: ExportInputs, ctx: StageContext) -> ExportOutputs:
    """Writes the folder. Rank 0 works, the others wait."""
    folder = ctx.directory / _FOLDER
    if ctx.rank == 0:
        # What a stopped export left is no whole folder.
        shutil.rmtree(folder, ignore_errors=True)
        (_lora if config.format == "lora" else _pipeline)(config, inputs, folder)
    if ctx.world_size > 1 and distributed.is_initialized():
        distributed.barrier()
    return ExportOutputs(folder=PipelineRef(path=_FOLDER, digest=digest_of(folder)))


def _lora(config: ExportConfig, inputs: ExportInputs, folder: Path) -> None:
    if inputs.policy is None or inputs.policy.trainable != "lora":
        kind = "the untrained model" if inputs.policy is None else "a policy of full weights"
        raise InputError(f"`format: lora` cannot export {kind}; set `format: pipeline`")
    weights = _weights(inputs.policy, config.weights)
    adapters: dict[str, nn.Module | Tensor] = {
        name.replace(f".{ADAPTER}.", "."): value.to(_DTYPES[config.dtype]) for name, value in weights.items()
    }
    # Without this metadata the loader takes alpha = rank, without a warning.
    metadata = _lora_config(config, adapter(config.model, inputs.pipeline)).to_dict()
    metadata = {name: sorted(value) if isinstance(value, set) else value for name, value in metadata.items()}
    StableDiffusion3Pipeline.save_lora_weights(
        folder,
        transformer_lora_layers=adapters,
        weight_name=_LORA_FILE,
        transformer_lora_adapter_metadata=metadata,
    )
    _order_metadata(folder / _LORA_FILE)


def _pipeline(config: ExportConfig, inputs: ExportInputs, folder: Path) -> None:
    model = adapter(config.model, inputs.pipeline)
    transformer = _updated(config, model, inputs.policy)
    source = _local(config, inputs)
    folder.mkdir(parents=True)
    shutil.copyfile(source / "model_index.json", folder / "model_index.json")
    for part in json.loads((source / "model_index.json").read_text(encoding="utf-8")):
        if part != "transformer" and (source / part).is_dir():
            shutil.copytree(source / part, folder / part, ignore=shutil.ignore_patterns(*_UNWANTED))
    transformer.save_pretrained(folder / "transformer")
    _forget_origin(folder / "transformer" / "config.json")
    for file in sorted(folder.rglob("*.safetensors")):
        _recast(file, _DTYPES[config.dtype])


def _forget_origin(file: Path) -> None:
    """An export is content: where its base lay on this machine is not part of it."""
    facts = json.loads(file.read_text(encoding="utf-8"))
    facts.pop("_name_or_path", None)
    file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _updated(config: ExportConfig, model: Adapter, policy: PolicyRef | None) -> SD3Transformer2DModel:
    """The transformer with the policy's weights, its LoRA merged; in float32."""
    transformer = model.transformer()
    assert isinstance(transformer, SD3Transformer2DModel)
    transformer.float()
    if policy is None:
        return _begun(config, model, transformer)
    if policy.trainable == "lora":
        transformer.add_adapter(_lora_config(config, model), ADAPTER)
    _put(transformer, _weights(policy, config.weights), policy)
    return _merged(transformer) if policy.trainable == "lora" else transformer


def _begun(config: ExportConfig, model: Adapter, transformer: SD3Transformer2DModel) -> SD3Transformer2DModel:
    """The untrained transformer: the base, with the LoRA that training starts from, if there is one."""
    lora = config.model.lora
    if lora is None or lora.start is None:
        return transformer
    transformer.add_adapter(_lora_config(config, model), ADAPTER)
    own = {name: parameter for name, parameter in transformer.named_parameters() if is_lora(name)}
    for name, value in started(lora, model.lora_targets, own).items():
        own[name].data.copy_(value)
    return _merged(transformer)


def _merged(transformer: SD3Transformer2DModel) -> SD3Transformer2DModel:
    transformer.fuse_lora(adapter_names=[ADAPTER])
    transformer.unload_lora()
    return transformer


def _put(transformer: nn.Module, weights: dict[str, Tensor], policy: PolicyRef) -> None:
    own = dict(transformer.named_parameters())
    trained = set(filter(is_lora, own)) if policy.trainable == "lora" else set(own)
    if weights.keys() != trained:
        odd = sorted(weights.keys() ^ trained)
        raise InputError(
            f"the policy {policy.path!r} does not fit the model: {len(odd)} names differ, such as {odd[0]!r}; "
            f"{_SAME_MODEL}"
        )
    for name, value in weights.items():
        own[name].data.copy_(value)


def _lora_config(config: ExportConfig, model: Adapter) -> LoraConfig:
    if config.model.lora is None:
        raise InputError(f"the policy is a LoRA, but `model.lora` is missing; {_SAME_MODEL}")
    return peft_config(config.model.lora, model.lora_targets)


def _weights(policy: PolicyRef, name: str) -> dict[str, Tensor]:
    if name not in policy.sets:
        known = ", ".join(policy.sets)
        raise InputError(f"the policy {policy.path!r} has no weights {name!r} (it has {known}); set `weights`")
    return checkpoint.load(policy, name)


def _local(config: ExportConfig, inputs: ExportInputs) -> Path:
    source = inputs.pipeline.path if inputs.pipeline is not None else str(config.model.path)
    if Path(source).is_dir():
        return Path(source)
    wanted = ["model_index.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.safetensors"]
    skipped = ["transformer/*.safetensors", *_UNWANTED]
    revision = config.model.revision
    return Path(snapshot_download(source, revision=revision, allow_patterns=wanted, ignore_patterns=skipped))


def _recast(file: Path, dtype: torch.dtype) -> None:
    """Rewrites a weights file with its floating tensors in `dtype`."""
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
        named = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in named.items()}
    save_file(cast, file, metadata=metadata)


def _order_metadata(file: Path) -> None:
    """Sorts the metadata in a safetensors header, which the library writes at random: same weights, same bytes."""
    stored = file.read_bytes()
    start = 8 + int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    told = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    told += b" " * (-len(told) % 8)
    file.write_bytes(len(told).to_bytes(8, "little") + told + stored[start:])
