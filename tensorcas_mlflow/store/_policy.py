"""Policies: what a save spends its time on."""

from __future__ import annotations

from enum import Enum

from tensorcas_mlflow import config


class Policy(Enum):
    """What a save spends its time on. What is stored loads the same, whatever it was."""

    FAST = "fast"
    """Tensors are stored as they are, and can be mapped; text is compressed."""
    BALANCED = "balanced"
    """What shrinks at the speed of a disk is compressed."""
    SMALL = "small"
    """As `BALANCED`, and more time for fewer bytes where there is something to gain."""

    @classmethod
    def of(cls, given: str | Policy | None) -> Policy:
        """Say which policy is meant; unless given, the environment says it (TENSORCAS_POLICY).

        Raises:
            ValueError: There is no policy of that name.
        """
        name = given.value if isinstance(given, Policy) else given or config.policy()
        for policy in cls:
            if policy.value == name:
                return policy
        raise ValueError(f"a policy is {', '.join(policy.value for policy in cls)}, not {name!r}")
