"""For tests of the runner: a launcher that writes real outputs whose digests follow from the request, and a run."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import main
from pipelines.compile import compile_flow
from pipelines.decide import OnChange
from pipelines.launch import Begun, Progress, unheard
from pipelines.load import load
from pipelines.report import Report
from pipelines.run import ThreadCaller, run_in
from pipelines.rundir import Address, RunDirectory
from schemas.contracts import CONTRACTS
from schemas.fingerprint import fingerprint
from schemas.record import Answer, StageRecord, StageRequest

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

    def warm(self) -> None:
        """There is nothing to start."""

    def close(self) -> None:
        self.closed = True


def _digests(value: Any) -> Any:
    if isinstance(value, dict):
        return value["digest"] if "digest" in value else {key: _digests(item) for key, item in value.items()}
    return value


class Bench:
    """A run directory and the small flow."""

    def __init__(self, file: Path, directory: Path) -> None:
        self.file, self.run = file, RunDirectory(directory)
        self.said: list[str] = []

    def go(
        self,
        *sets: str,
        metrics: Metrics = no_metrics,
        on_change: OnChange = "stop",
        hook: Callable[[StageRequest], None] | None = None,
    ) -> BenchLauncher:
        launcher = BenchLauncher(metrics, hook)
        self.launch(launcher, sets, on_change)
        return launcher

    def launch(self, launcher: BenchLauncher, sets: Sequence[str] = (), on_change: OnChange = "stop") -> Report:
        plan = compile_flow(load(self.file, "small", sets), "small")
        self.said.clear()
        with ThreadPoolExecutor(4) as pool:
            return run_in(
                plan, self.run.path, ThreadCaller(pool), lambda: launcher, say=self.said.append, on_change=on_change
            )

    def record(self, path: str) -> StageRecord:
        folder, node = path.split("/")
        address = Address("body", node, int(folder)) if folder.isdigit() else Address("after", node)
        record = self.run.stage(address).record()
        assert record is not None
        return record

    def records(self) -> dict[str, object]:
        files = {p.parent.relative_to(self.run.path).as_posix(): p for p in self.run.path.glob("*/*/record.json")}
        return {
            name: {k: v for k, v in json.loads(file.read_bytes()).items() if k != "volatile"}
            for name, file in files.items()
            if ".stale-" not in name
        }


def sized(values: dict[int, float]) -> Metrics:
    """The metric of eval_score by iteration."""

    def metrics(request: StageRequest) -> dict[str, float]:
        if request.stage != "score":
            return {}
        return {"size": values.get(request.iteration or 0, 0.0) if request.node == "eval_score" else 1.0}

    return metrics


BEST = sized({0: 0.5, 2: 0.7, 3: 0.625})
Say = Callable[..., str]


def saying(runs: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """Says words to the command, of the runs in a folder; gives what it printed, or its error where `code` is one."""

    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words, "--runs", str(runs)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return said
