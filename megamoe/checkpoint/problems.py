"""All that is wrong with a checkpoint, in one error; the same fault of many experts takes one line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megamoe.errors import fail_value

EXPERT_ID = re.compile(r"(?<=experts\.)\d+(?=\.)")


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as "0-3,7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


@dataclass
class Problems:
    """Collects faults of tensors by kind."""

    _found: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)

    def add(self, kind: str, name: str, detail: str) -> None:
        """``kind``: "missing", "unexpected" or "wrong"; ``detail``: the shape and the rule."""
        expert = EXPERT_ID.search(name)
        template = EXPERT_ID.sub("{}", name, count=1)
        self._found.setdefault((kind, template, detail), []).extend([int(expert[0])] if expert else [])

    def raise_any(self, folder: object) -> None:
        """Raises a MegaMoEError that lists everything found, if there is anything."""
        if not self._found:
            return
        lines = []
        in_order = sorted(self._found.items(), key=lambda item: (item[0][:2], min(item[1], default=0), item[0][2]))
        for (kind, template, detail), experts in in_order:
            ids = _ranges(experts)
            name = template.replace("{}", ids if len(experts) == 1 else f"{{{ids}}}", 1) if experts else template
            lines.append(f"\n  {kind}: {name} {detail}")
        rule = f"its tensors do not match the layer:{''.join(lines)}\n"
        fail_value("checkpoint", str(folder), rule, "Compare config.json (or MoEConfig) with the checkpoint.")
