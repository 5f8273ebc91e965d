"""What a model call keeps in memory for one sample."""

from typing import NamedTuple


class Activations(NamedTuple):
    """Bytes of one sample in one branch of a model call.

    `forward` is the most that a forward without gradient holds at once. `saved` is what all blocks keep for the
    backward, `block` the most that one of them keeps, `inputs` what is left of them when blocks are computed again
    (activation checkpointing), and `backward` what the backward holds besides, with `again` more after a recompute.
    """

    forward: int
    saved: int
    block: int
    inputs: int
    backward: int
    again: int

    def shared(self, ranks: int) -> "Activations":
        """What is left of it on each of the ranks that share the tokens."""
        return Activations(*(-(-size // ranks) for size in self))

    def trained(self, checkpointing: bool) -> int:
        """The most that a forward with its backward holds at once."""
        return self.backward + (self.inputs + self.block + self.again if checkpointing else self.saved)
