"""What a plan says of ranks that share tokens before anything runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import InputError
from stages.models.sd3_attention import must_divide
from tests.pipelines.test_compile_lora import TO_NFT, lora
from tests.pipelines.test_compile_rules import compiled, refused

Write = Callable[..., Path]
RESOURCES = "resources: {"


def shared(settings: str = "processes: 4, context_parallel: 2") -> tuple[str, str]:
    return RESOURCES, f"{RESOURCES}{settings}, "


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("processes: 3, context_parallel: 2", "context_parallel (2) must divide processes / replicas (3)"),
        ("processes: 4, replicas: 2, context_parallel: 4", "must divide processes / replicas (2)"),
        ("processes: 2, context_parallel: 2, compile: true", "compile cannot be used with context_parallel"),
    ],
)
def test_ranks_that_cannot_share_are_refused(flow_file: Write, settings: str, words: str) -> None:
    assert words in refused(flow_file(shared(settings)))


def test_kernels_and_dropout_that_would_be_others_are_refused(flow_file: Write) -> None:
    message = refused(flow_file(shared(), ("path: model}", "path: model, attention: _native_math}")))
    assert "attention: _native_math is not used in the backward pass of resources.context_parallel 2" in message
    message = refused(flow_file(shared(), *TO_NFT, lora("dropout: 0.1")))
    assert "lora.dropout: resources.context_parallel 2 would drop the same inputs" in message
    assert compiled(flow_file(shared())).resources.context_parallel == 2


@pytest.mark.parametrize(
    ("count", "words"),
    [
        ({"heads of attention": 3}, "`resources.context_parallel` 2 does not divide the 3 heads of attention"),
        ({"tokens of the text": 333}, "with T5 they are 77 more than `model.max_sequence_length`"),
    ],
)
def test_what_cannot_be_shared_out_is_named(count: dict[str, int], words: str) -> None:
    must_divide(2, {"tokens of a picture": 16})
    with pytest.raises(InputError) as caught:
        must_divide(2, count)
    assert words in str(caught.value)
