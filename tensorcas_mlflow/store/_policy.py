"""Policies: the encoding effort of a save."""

from __future__ import annotations

from enum import Enum

from tensorcas_mlflow import config


class Policy(Enum):
    """Encoding effort of a save. It does not change the loaded data."""

    FAST = "fast"
    """Tensors are stored raw, and can be memory-mapped; text is compressed."""
    BALANCED = "balanced"
    """Data that shrinks at the speed of a disk is compressed."""
    SMALL = "small"
    """Like `BALANCED`, with more time for fewer bytes if there is something to gain."""

    @classmethod
    def of(cls, given: str | Policy | None) -> Policy:
        """Return the policy of a name; by default the environment's (TENSORCAS_POLICY).

        Raises:
            ValueError: No policy has this name.
        """
        name = given.value if isinstance(given, Policy) else given or config.policy()
        for policy in cls:
            if policy.value == name:
                return policy
        raise ValueError(f"a policy is {', '.join(policy.value for policy in cls)}, not {name!r}")
