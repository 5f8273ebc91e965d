"""A launcher for tests of the runner: it writes real outputs whose digests follow from the request."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.launch import Begun, Progress, unheard
from schemas.contracts import CONTRACTS
from schemas.fingerprint import fingerprint
from schemas.record import Answer, StageRequest

Metrics = Callable[[StageRequest], dict[str, float]]
TABLE: dict[str, Any] = {"rows": 2, "shards": []}
EXTRA: dict[str, dict[str, Any]] = {
    "chosen": TABLE,
    "samples": TABLE,
    "advantages": TABLE,
    "embeddings": {**TABLE, "names": ["text"]},
    "rewards": {**TABLE, "weights": {"size": 1.0}},
    "trajectory": {
        **TABLE,
        "latent_shape": [4],
        "num_steps": 1,
        "sampler": {},
        "weights": "raw",
    },
    "policy": {"trainable": "full", "sets": ["raw", "ema"], "updates": 1},
    "folder": {},
}


def no_metrics(request: StageRequest) -> dict[str, float]:
    return {"size": 1.0} if request.stage == "score" else {}


class BenchLauncher:
    """Each output is a folder; its digest covers what the stage was asked for and the digests of what it read."""

    def __init__(self, metrics: Metrics = no_metrics, hook: Callable[[StageRequest], None] | None = None) -> None:
        self.requests: list[StageRequest] = []
        self.closed = False
        self._metrics, self._hook = metrics, hook
        self._lock = threading.Lock()

    @property
    def ran(self) -> list[str]:
        return [r.node if r.iteration is None else f"{r.node}[{r.iteration}]" for r in self.requests]

    def request(self, label: str) -> StageRequest:
        return self.requests[self.ran.index(label)]

    def run(self, request: StageRequest, progress: Progress, begun: Begun = unheard) -> Answer:
        begun()
        if self._hook is not None:
            self._hook(request)
        with self._lock:
            self.requests.append(request)
        outputs: dict[str, Any] = {"metrics": self._metrics(request)}
        varies = CONTRACTS[request.stage].config.model_validate(request.config).varies()
        for name in CONTRACTS[request.stage].outputs.model_fields:
            if name not in EXTRA:
                continue
            basis = {
                "output": name,
                "config": request.config,
                "inputs": _digests(request.inputs),
                "iteration": request.iteration if "iteration" in varies else None,
                "seed": request.seed if "seed" in varies else None,
                "metrics": outputs["metrics"],
            }
            folder = Path(request.directory) / name
            folder.mkdir(exist_ok=True)
            (folder / "content").write_text(json.dumps(basis))
            outputs[name] = {"path": name, "digest": fingerprint(basis), **EXTRA[name]}
            if name == "trajectory":
                outputs[name]["policy"] = (request.inputs.get("policy") or {}).get("digest", "")
        return Answer(outputs, {"memory/peak_bytes": 1.0})

    def close(self) -> None:
        self.closed = True


def _digests(value: Any) -> Any:
    if isinstance(value, dict):
        return value["digest"] if "digest" in value else {key: _digests(item) for key, item in value.items()}
    return value
