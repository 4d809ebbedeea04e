"""Scalars and pointers: integers that report overflow and divide as C does, and byte addresses.

A kernel under the simulator computes with Python objects: ``Int32``, ``Int64`` and ``Bit`` for run-time scalars,
``Tensor`` (tensors.py) for register tensors and float scalars, ``Pointer``; plain Python numbers are compile-time
constants. ``Literal`` is an integer that stands in the kernel's source: it may be a constant or the start of a variable
that a loop carries, which the GPU would keep in 32 bits. (Python 3.14 hides small ones in its instructions: they stay
plain integers there.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from .errors import SimError

TORCH_DTYPES = {
    gl.float8e4nv: torch.float8_e4m3fn,
    gl.float8e5: torch.float8_e5m2,
    gl.bfloat16: torch.bfloat16,
    gl.float16: torch.float16,
    gl.float32: torch.float32,
    gl.float64: torch.float64,
    gl.int8: torch.int8,
    gl.int16: torch.int16,
    gl.int32: torch.int32,
    gl.int64: torch.int64,
    gl.uint8: torch.uint8,
    gl.uint16: torch.uint16,
    gl.uint32: torch.uint32,
    gl.uint64: torch.uint64,
    gl.int1: torch.bool,
}
GL_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_BY_NAME = {gl_type.name: dtype for gl_type, dtype in TORCH_DTYPES.items()}


def torch_dtype(gl_type) -> torch.dtype:
    """``TORCH_DTYPES`` without the slow hash of a Gluon type."""
    return _BY_NAME[gl_type.name]


def unwrap(x):
    """The value of a ``constexpr``; anything else as it is."""
    return x.value if type(x).__name__ == "constexpr" else x


def fits_int32(x: int) -> bool:
    return -0x80000000 <= x <= 0x7FFFFFFF


def divide_towards_zero(a: int, b: int) -> int:
    if b == 0:
        raise SimError("integer division by zero")
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


class Literal(int):
    """An integer of the source. % of a negative is an error: a constant follows Python, a loop-carried variable C."""

    def _mod(a: int, b: int) -> int:
        if a < 0:
            raise SimError(
                f"{int(a)} % {int(b)}: negative on the GPU if a loop carries the left side, positive if it is constant"
            )
        return int(a) % int(b)

    def _operators(name: str, f: Callable[[int, int], int]):
        def plain(x) -> bool:
            return type(x) in (int, Literal)

        def forward(self, other):
            return Literal(f(int(self), int(other))) if plain(other) else getattr(int, name)(self, other)

        def backward(self, other):
            return Literal(f(int(other), int(self))) if plain(other) else NotImplemented

        return forward, backward

    __add__, __radd__ = _operators("__add__", lambda a, b: a + b)
    __sub__, __rsub__ = _operators("__sub__", lambda a, b: a - b)
    __mul__, __rmul__ = _operators("__mul__", lambda a, b: a * b)
    __mod__, __rmod__ = _operators("__mod__", _mod)


class Int32(Literal):
    """A run-time integer scalar. With an ``Int64`` or a constant beyond 32 bits the result is an ``Int64``."""

    bits = 32

    @classmethod
    def make(cls, value: int, *operands) -> Int32:
        """``value`` as the result of an operation on ``operands``; overflow is an error."""
        for x in operands:
            kind = type(x)
            if kind is Int64 or ((kind is int or kind is Literal) and not fits_int32(x)):
                cls = Int64
        if not -(1 << cls.bits - 1) <= value < 1 << cls.bits - 1:
            raise SimError(f"int{cls.bits} overflow: {value}")
        return int.__new__(cls, value)

    def _operators(name: str, f: Callable[[int, int], int]):
        def forward(self, other):
            other = unwrap(other)
            if isinstance(other, int):
                return type(self).make(f(int(self), int(other)), self, other)
            return getattr(self.to(gl.float32), name)(other) if isinstance(other, float) else NotImplemented

        def backward(self, other):
            other = unwrap(other)
            if isinstance(other, int):
                return type(self).make(f(int(other), int(self)), self, other)
            name_r = name.replace("__", "__r", 1)
            return getattr(self.to(gl.float32), name_r)(other) if isinstance(other, float) else NotImplemented

        return forward, backward

    __add__, __radd__ = _operators("__add__", lambda a, b: a + b)
    __sub__, __rsub__ = _operators("__sub__", lambda a, b: a - b)
    __mul__, __rmul__ = _operators("__mul__", lambda a, b: a * b)
    __floordiv__, __rfloordiv__ = _operators("__floordiv__", divide_towards_zero)
    __mod__, __rmod__ = _operators("__mod__", lambda a, b: a - divide_towards_zero(a, b) * b)
    __and__, __rand__ = _operators("__and__", lambda a, b: a & b)
    __or__, __ror__ = _operators("__or__", lambda a, b: a | b)
    __xor__, __rxor__ = _operators("__xor__", lambda a, b: a ^ b)
    __lshift__, __rlshift__ = _operators("__lshift__", lambda a, b: a << b)
    __rshift__, __rrshift__ = _operators("__rshift__", lambda a, b: a >> b)

    def __truediv__(self, other):
        return self.to(gl.float32) / other

    def __rtruediv__(self, other):
        return other / self.to(gl.float32)

    def __neg__(self):
        return type(self).make(-int(self))

    def __invert__(self):
        return type(self).make(~int(self))

    def to(self, dtype, bitcast: bool = False, **_):
        from .tensors import Tensor, value

        dtype = unwrap(dtype)
        if dtype.is_ptr():
            return Pointer(int(self), dtype.element_ty)
        if bitcast:
            return Tensor(torch.tensor(int(self), dtype=torch.int64 if self.bits == 64 else torch.int32)).to(
                dtype, bitcast=True
            )
        if dtype.is_int() and dtype.primitive_bitwidth >= 32:
            return (Int64 if dtype.primitive_bitwidth == 64 else Int32).make(int(self))
        return value(torch.tensor(int(self)).to(TORCH_DTYPES[dtype]))

    cast = to


class Int64(Int32):
    """A run-time 64-bit integer scalar."""

    bits = 64


class Bit(int):
    """What a comparison of scalars gives."""

    def to(self, dtype, bitcast: bool = False, **_):
        return Int32.make(int(self)).to(dtype)

    def _operator(name: str, f: Callable[[int, int], int]):
        def operator(self, other):
            other = unwrap(other)
            return Bit(f(int(self), int(bool(other)))) if isinstance(other, int) else NotImplemented

        return operator

    __and__ = __rand__ = _operator("__and__", lambda a, b: a & b)
    __or__ = __ror__ = _operator("__or__", lambda a, b: a | b)

    def __invert__(self):
        return Bit(not self)


def _comparison(name: str):
    compare = getattr(int, name)

    def operator(self, other):
        result = compare(self, unwrap(other))
        return result if result is NotImplemented else Bit(result)

    return operator


for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
    setattr(Int32, _name, _comparison(_name))
Int32.__hash__ = int.__hash__


class Pointer:
    """Byte address(es), an int or an int64 array, and the Gluon type of the elements, of ``size`` bytes."""

    __slots__ = ("address", "type", "size")

    def __init__(self, address: int | np.ndarray, type, size: int | None = None):
        self.address, self.type = address, type
        self.size = size or max(1, type.primitive_bitwidth // 8)

    @property
    def shape(self) -> list[int]:
        return list(self.address.shape) if isinstance(self.address, np.ndarray) else []

    @property
    def dtype(self):
        return gl.pointer_type(self.type)

    def __add__(self, offset):
        offset = unwrap(offset)
        steps = int(offset) if isinstance(offset, int) else offset.v.numpy().astype(np.int64)
        return Pointer(self.address + steps * self.size, self.type, self.size)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + (-offset)

    def __getitem__(self, index):
        return Pointer(self.address[index], self.type, self.size)

    def to(self, dtype, bitcast: bool = False, **_):
        from .tensors import value

        dtype = unwrap(dtype)
        return Pointer(self.address, dtype.element_ty) if dtype.is_ptr() else value(torch.as_tensor(self.address))
