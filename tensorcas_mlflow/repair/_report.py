"""What a repair has found and done, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorcas_mlflow.repair._needs import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A blob that is not as it should be. Printing it says so in words."""

    key: str
    reason: str
    remedy: str
    """What a repair makes of it, or what else helps."""
    is_mended: bool = True
    """Whether a repair does anything about it."""
    is_harmless: bool = False
    """Whether it goes by itself."""

    def __str__(self) -> str:
        return f"{self.key}: {self.reason} ({self.remedy})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair did. Printing it says so in words."""

    restored: tuple[str, ...]
    """Keys of manifests, refs and of ``format`` that are whole again."""
    abandoned: tuple[str, ...]
    """Keys of damaged condemned lists that were taken away."""
    packs_gone: tuple[str, ...]
    """Keys of damaged packs that were deleted, after what is good of them was copied."""
    n_quarantined: int
    """Stretches of damaged packs that were put aside."""
    n_healed: int
    """Chunks brought from other stores or out of quarantine."""
    n_fenced: int
    """Saves under way that relied on what is lost, and were made to begin again."""
    left: Mapping[str, str]
    """Keys of what was left as it is, and why."""
    losses: tuple[Loss, ...]
    """What does not load, or not whole, after the repair."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost or damaged any more."""
        return not self.losses and not self.left

    def __str__(self) -> str:
        lines = [f"restored {key}" for key in self.restored]
        lines += [f"took away {key}" for key in self.abandoned]
        lines += [f"left {key}: {reason}" for key, reason in self.left.items()]
        lines += listed("is lost", self.losses)
        fenced = f", made {self.n_fenced} saves begin again" if self.n_fenced else ""
        lines.append(
            f"replaced {len(self.packs_gone)} damaged packs, put {self.n_quarantined} stretches of them into "
            f"quarantine, healed {self.n_healed} chunks{fenced}"
        )
        return "\n".join(lines)


def listed(heading: str, losses: Sequence[Loss]) -> list[str]:
    """Write losses, a line each."""
    return [f"{heading}: {loss}" for loss in losses]
