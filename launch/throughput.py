"""What serving shows while it runs: prompts done and tokens per second, live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Throughput:
    """Context manager that counts this rank's prompts and tokens. Silent unless `enabled`, so that one rank speaks.

    of: appended to what is shown, such as " on rank 0 of 2".
    """

    def __init__(self, enabled: bool, total_prompts: int, of: str = "") -> None:
        self.tokens = 0
        self._enabled, self._of, self._prompts, self._total = enabled, of, 0, total_prompts
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts  {task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total_prompts)

    def __enter__(self) -> Throughput:
        self._start = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def add_tokens(self, count: int) -> None:
        """So many new tokens exist."""
        self.tokens += count
        self._bar.update(self._task, description=self._rate())

    def add_prompts(self, count: int) -> None:
        """So many prompts are done."""
        self._prompts += count
        self._bar.update(self._task, completed=self._prompts)
        if not self._console.is_terminal:
            self.show(f"{self._prompts}/{self._total} prompts  {self._rate()}")

    def show(self, text: str) -> None:
        """A line of its own."""
        if self._enabled:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _rate(self) -> str:
        return f"{self.tokens / self.seconds:,.1f} tokens/s{self._of}"
