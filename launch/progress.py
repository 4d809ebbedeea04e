"""What a run shows while it trains: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Context manager. Silent if `enabled` is False, so that one rank speaks for all."""

    def __init__(self, enabled: bool, total_steps: int, completed: int) -> None:
        self._enabled, self._total = enabled, total_steps
        self._console = Console()
        self._validation = ""
        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total_steps, completed=completed)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def train(self, step: int, values: dict[str, Any]) -> None:
        """Show a logged step."""
        entropy = values["expert_load_entropy"]
        text = (
            f"loss {values['loss_bits_per_byte']:.3f} bits/byte{self._validation}  "
            f"load entropy {sum(entropy) / len(entropy):.3f}  {values['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=step, description=text)
        if not self._console.is_terminal:
            self._line(f"step {step}/{self._total}  {text}")

    def validation(self, step: int, bits_per_byte: float) -> None:
        """Show a validation loss."""
        self._validation = f"  validation {bits_per_byte:.3f}"
        self._line(f"step {step}/{self._total}  validation loss {bits_per_byte:.4f} bits/byte")

    def _line(self, text: str) -> None:
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True)
