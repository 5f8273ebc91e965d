"""Randomness from identity: a seed is a hash of what the number is for, never of a rank."""

import hashlib
import json


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed from the identity of a draw, e.g. ``seed_of(run_seed, iteration, prompt_id, index)``.

    Python's own ``hash`` is salted per process and so is no seed.
    """
    text = json.dumps(parts, separators=(",", ":"), ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
