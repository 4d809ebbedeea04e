"""Inline asm of fp32 arithmetic, executed instruction by instruction: the text itself is tested, constants and all."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import torch

_OPERATION = re.compile(r"([a-z0-9]+)((?:\.[a-z0-9]+)*)\.f32 (.*)")

# The approximate instructions of the hardware are within a few units in the last place of these.
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mov": lambda a: a,
    "abs": torch.abs,
    "neg": torch.neg,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    "min": torch.fmin,
    "max": torch.fmax,
    "copysign": lambda sign, magnitude: torch.copysign(magnitude, sign),
    "rcp": torch.reciprocal,
    "ex2": torch.exp2,
    "tanh": torch.tanh,
}


def parse(text: str) -> list[tuple[str, str, list[str]]] | None:
    """[(operation, destination, sources)], or None if the text is anything but fp32 arithmetic."""
    program = []
    for instruction in re.sub(r"[{}]", ";", text).replace("\n", " ").split(";"):
        instruction = re.sub(r"\s+", " ", instruction).strip()
        if not instruction or instruction.startswith(".reg .f32"):
            continue
        found = _OPERATION.fullmatch(instruction)
        if not found or found[1] not in OPERATIONS:
            return None
        destination, *sources = [operand.strip() for operand in found[3].split(",")]
        program.append((found[1], destination, sources))
    return program


def run(program: list[tuple[str, str, list[str]]], inputs: list[torch.Tensor]) -> torch.Tensor:
    """The value of ``$0``; ``$1`` on are the inputs."""
    registers = {f"${i + 1}": x.float() for i, x in enumerate(inputs)}

    def value(operand: str) -> torch.Tensor:
        if operand.startswith("0f"):
            return torch.tensor(struct.unpack(">f", bytes.fromhex(operand[2:]))[0])
        return registers[operand]

    for operation, destination, sources in program:
        registers[destination] = OPERATIONS[operation](*map(value, sources))
    return registers["$0"]
