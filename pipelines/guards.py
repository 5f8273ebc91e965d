"""Guards of the loop: when a metric has fallen below its best, the loop ends, and the decision is written down."""

from dataclasses import dataclass, field

from pipelines.plan import GuardPlan
from pipelines.rundir import Address, move_file_aside, write_text
from pipelines.unroll import Unrolled
from schemas.record import Decision


@dataclass
class Guards:
    """Watches the loop's metrics in the order of iterations; a resumed run comes to the same decisions."""

    world: Unrolled
    _best: dict[str, tuple[float, int]] = field(default_factory=dict)

    def decision(self, iteration: int) -> Decision | None:
        """Whether a guard ends the loop after this iteration; writes or clears the decision in its directory."""
        found = [d for name, guard in self.world.plan.guards.items() if (d := self._look(name, guard, iteration))]
        file = self.world.run.iteration(iteration) / "decision.json"
        if not found:
            move_file_aside(file)  # it was made with another margin
            return None
        text = found[0].model_dump_json(indent=2) + "\n"
        if not file.is_file() or file.read_text() != text:
            move_file_aside(file)
            write_text(file, text)
        return found[0]

    def _look(self, name: str, plan: GuardPlan, iteration: int) -> Decision | None:
        if not self.world.due(self.world.plan.nodes[plan.node], iteration):
            return None
        value = self.world.metric(Address("body", plan.node, iteration), plan.metric)
        if value is None:
            return None
        best, when = self._best.get(name, (value, iteration))
        if value > best:
            best, when = value, iteration
        self._best[name] = best, when
        if value >= best - plan.guard.falls:
            return None
        return Decision(
            guard=name,
            iteration=iteration,
            metric=f"{plan.node}.{plan.metric}",
            value=value,
            best=best,
            best_iteration=when,
            action=plan.guard.action,
        )


def sentence(decision: Decision, falls: float) -> str:
    """A decision for people."""
    return (
        f"guard {decision.guard!r}: {decision.metric} is {decision.value:.4g} in iteration {decision.iteration}, more "
        f"than {falls:g} below its best, {decision.best:.4g} in iteration {decision.best_iteration}"
    )
