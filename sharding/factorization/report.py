"""What `factorize` did, for people to read."""

from dataclasses import dataclass, field


@dataclass
class Report:
    """What `factorize` did: the layers replaced (with N, n), those left whole (with the reason), and the sizes."""

    replaced: dict[str, tuple[int, int]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0

    def __str__(self) -> str:
        lines = [
            f"factorized {len(self.replaced)} layers, left {len(self.whole)} whole: "
            f"{self.parameters_before:,} -> {self.parameters_after:,} parameters"
        ]
        lines += [f"  {name}: {n} of {rank} terms" for name, (rank, n) in self.replaced.items()]
        lines += [f"  {name}: whole ({reason})" for name, reason in self.whole.items()]
        return "\n".join(lines)
