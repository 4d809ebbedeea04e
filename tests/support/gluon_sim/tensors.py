"""Register tensors and the functions of the language that only compute.

Results are those of torch on the CPU. int32 overflow of a sum, difference or product is an error. ``exp``, ``tanh`` and
the like are exact where the GPU approximates.
"""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable

import torch
from triton.experimental.gluon import language as gl

from .errors import SimError, Unsupported
from .values import GL_DTYPES, Bit, Int32, Int64, Pointer, fits_int32, torch_dtype, unwrap

_SCALAR_DTYPES = {Int32: torch.int32, Int64: torch.int64, Bit: torch.bool, bool: torch.bool}


def _strong_dtype(x) -> torch.dtype | None:
    """The dtype that an operand imposes; None for constants."""
    return x.v.dtype if type(x) is Tensor else _SCALAR_DTYPES.get(type(x))


@functools.lru_cache(maxsize=1 << 14)
def _integer(x: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(x, dtype=dtype)


def _as(x, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(x, Tensor):
        return x.v if x.v.dtype is dtype else x.v.to(dtype)
    return _integer(int(x), dtype) if isinstance(x, int) else torch.tensor(x, dtype=dtype)


def promote(*operands) -> list[torch.Tensor]:
    """The operands as torch tensors of one dtype. Constants take the dtype of the others, if of the same kind."""
    operands = [unwrap(x) for x in operands]
    dtype, weak = None, []
    for x in operands:
        strong = _strong_dtype(x)
        if strong is None:
            weak.append(x)
        elif dtype is None:
            dtype = strong
        elif strong is not dtype:
            dtype = torch.promote_types(dtype, strong)
    for x in weak:
        if isinstance(x, float) and (dtype is None or not dtype.is_floating_point):
            dtype = torch.float32
    for x in weak:
        if isinstance(x, int):
            if dtype is None or (dtype == torch.bool and x not in (0, 1)):
                dtype = torch.int32
            if not fits_int32(x) and dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
                dtype = torch.int64
    return [_as(x, dtype) for x in operands]


def value(v: torch.Tensor):
    """A torch tensor as the kernel sees it: integers without dimensions become scalars."""
    if v.dim() or v.dtype.is_floating_point:
        return Tensor(v)
    if v.dtype == torch.bool:
        return Bit(bool(v))
    return (Int64 if v.dtype in (torch.int64, torch.uint64) else Int32).make(int(v))


class Tensor:
    """A register tensor or a float scalar. Immutable: in-place operators bind a new one, as in Gluon."""

    __slots__ = ("v",)

    def __init__(self, v: torch.Tensor):
        self.v = v

    @property
    def shape(self) -> list[int]:
        return list(self.v.shape)

    @property
    def dtype(self):
        return GL_DTYPES[self.v.dtype]

    @property
    def type(self):
        return types.SimpleNamespace(layout=gl.AutoLayout(), shape=self.shape, element_ty=self.dtype)

    def __bool__(self) -> bool:
        return bool(self.v.item())

    def _operators(f: Callable, may_overflow: bool = False):
        def apply(a, b):
            a, b = promote(a, b)
            result = f(a, b)
            if may_overflow and result.dtype == torch.int32:
                wide = f(a.long(), b.long())
                if not torch.equal(wide, result.long()):
                    raise SimError(f"int32 overflow in a tensor operation (reaches {int(wide.abs().max())})")
            return value(result)

        def forward(self, other):
            return NotImplemented if isinstance(other, Pointer) else apply(self, other)

        def backward(self, other):
            return NotImplemented if isinstance(other, Pointer) else apply(other, self)

        return forward, backward

    __add__, __radd__ = _operators(torch.add, may_overflow=True)
    __sub__, __rsub__ = _operators(torch.sub, may_overflow=True)
    __mul__, __rmul__ = _operators(torch.mul, may_overflow=True)
    __truediv__, __rtruediv__ = _operators(torch.true_divide)
    __floordiv__, __rfloordiv__ = _operators(lambda a, b: torch.div(a, b, rounding_mode="trunc"))
    __mod__, __rmod__ = _operators(torch.fmod)
    __and__, __rand__ = _operators(lambda a, b: a & b)
    __or__, __ror__ = _operators(lambda a, b: a | b)
    __xor__, __rxor__ = _operators(lambda a, b: a ^ b)
    __lshift__, __rlshift__ = _operators(lambda a, b: a << b)
    __rshift__, __rrshift__ = _operators(lambda a, b: a >> b)
    __lt__, _ = _operators(torch.lt)
    __le__, _ = _operators(torch.le)
    __gt__, _ = _operators(torch.gt)
    __ge__, _ = _operators(torch.ge)
    __eq__, _ = _operators(torch.eq)
    __ne__, _ = _operators(torch.ne)
    __hash__ = None

    def __neg__(self):
        return Tensor(-self.v)

    def __invert__(self):
        return Tensor(~self.v)

    def __getitem__(self, index):
        return Tensor(self.v[index])

    def to(self, dtype, bitcast: bool = False, **_):
        dtype = unwrap(dtype)
        if dtype.is_ptr():
            return Pointer(self.v.long().numpy(), dtype.element_ty)
        target = torch_dtype(dtype)
        if bitcast:
            return value(self.v.view(target))
        if self.v.dtype.is_floating_point and target in (torch.float8_e4m3fn, torch.float8_e5m2):
            largest = torch.finfo(target).max  # cvt.rn.satfinite
            return Tensor(self.v.float().clamp(-largest, largest).to(target))
        return value(self.v.to(target))

    cast = to

    def reshape(self, *shape):
        return Tensor(self.v.reshape(_ints(shape)))

    view = reshape

    def trans(self, *dims):
        return Tensor(self.v.permute(_ints(dims)) if dims else self.v.t())

    def permute(self, *dims):
        return Tensor(self.v.permute(_ints(dims)))

    def expand_dims(self, axis):
        return Tensor(self.v.unsqueeze(int(unwrap(axis))))

    def broadcast_to(self, *shape):
        return Tensor(self.v.expand(_ints(shape)))

    def split(self):
        return Tensor(self.v[..., 0]), Tensor(self.v[..., 1])

    def item(self):
        """The scalar of a one-element tensor."""
        return value(self.v.reshape(()))

    def sum(self, axis=None, keep_dims=False, dtype=None, **_):
        return reduce_sum(self, axis, keep_dims, dtype)

    def max(self, axis=None, keep_dims=False, **_):
        return reduce_extreme(self, axis, keep_dims, largest=True)

    def min(self, axis=None, keep_dims=False, **_):
        return reduce_extreme(self, axis, keep_dims, largest=False)


def _ints(numbers) -> list[int]:
    """Both f(1, 2) and f([1, 2])."""
    numbers = unwrap(numbers[0]) if len(numbers) == 1 and not isinstance(numbers[0], int) else numbers
    return [int(unwrap(n)) for n in (numbers if isinstance(numbers, (list, tuple)) else [numbers])]


def reduce_sum(x: Tensor, axis=None, keep_dims=False, dtype=None, **_):
    """Integers narrower than 32 bits are summed in 32; overflow is an error."""
    v = x.v if dtype is None else x.v.to(torch_dtype(unwrap(dtype)))
    if not v.dtype.is_floating_point and v.dtype.itemsize < 4:
        v = v.to(torch.int32)
    dims = tuple(range(v.dim())) if axis is None else int(unwrap(axis))
    result = v.sum(dims, keepdim=bool(unwrap(keep_dims)), dtype=v.dtype)
    if v.dtype == torch.int32 and not torch.equal(v.sum(dims, keepdim=bool(unwrap(keep_dims))), result.long()):
        raise SimError("int32 overflow in a sum")
    return value(result)


def reduce_extreme(x: Tensor, axis, keep_dims, largest: bool):
    """As on the GPU, a NaN loses against any number."""
    reduce, v = (torch.amax if largest else torch.amin), x.v
    dims = tuple(range(v.dim())) if axis is None else int(unwrap(axis))
    keep = bool(unwrap(keep_dims))
    if not v.dtype.is_floating_point:
        return value(reduce(v, dims, keepdim=keep))
    result = reduce(v.masked_fill(v.isnan(), -math.inf if largest else math.inf), dims, keepdim=keep)
    return value(result.masked_fill(v.isnan().all(dims, keepdim=keep), math.nan))


def elementwise(f: Callable) -> Callable:
    """A model of a function of any number of operands that broadcast."""

    def model(*operands, **_):
        return value(f(*promote(*operands)))

    return model


def _extreme(of_floats: Callable, keeping_nan: Callable, of_scalars: Callable) -> Callable:
    def model(a, b, propagate_nan=None, **_):
        a, b = unwrap(a), unwrap(b)
        if isinstance(a, int) and isinstance(b, int):
            return Int32.make(of_scalars(int(a), int(b)), a, b)
        a, b = promote(a, b)
        keep = not a.dtype.is_floating_point or getattr(unwrap(propagate_nan), "name", "NONE") == "ALL"
        return value((keeping_nan if keep else of_floats)(a, b))

    return model


def where(condition, a, b, **_):
    condition = unwrap(condition)
    if isinstance(a, Pointer):
        if a.type != b.type or a.shape or b.shape or isinstance(condition, Tensor):
            raise Unsupported("gluon_sim chooses between scalar pointers to one type, by a scalar")
        return a if condition else b
    mask = condition.v.to(torch.bool) if isinstance(condition, Tensor) else torch.tensor(bool(condition))
    return value(torch.where(mask, *promote(a, b)))


def fma(a, b, c, **_):
    """Rounded once."""
    dtype = promote(a, b, c)[0].dtype
    a, b, c = (v.double() for v in promote(a, b, c))
    return value((a * b + c).to(dtype))


maximum = _extreme(torch.fmax, torch.maximum, builtins.max)
minimum = _extreme(torch.fmin, torch.minimum, builtins.min)


@functools.lru_cache(maxsize=1 << 10)
def _numbers(start: int, end: int) -> Tensor:
    return Tensor(torch.arange(start, end, dtype=torch.int32))


def arange(start, end, layout=None) -> Tensor:
    return _numbers(int(unwrap(start)), int(unwrap(end)))


def full(shape, fill, dtype, layout=None):
    shape, fill, dtype = tuple(int(unwrap(s)) for s in unwrap(shape)), unwrap(fill), torch_dtype(unwrap(dtype))
    if isinstance(fill, int):
        return _filled(shape, int(fill), dtype)
    fill = fill.v if isinstance(fill, Tensor) else torch.tensor(fill)
    return value(fill.to(dtype).expand(shape).clone())


@functools.lru_cache(maxsize=1 << 8)
def _filled(shape: tuple[int, ...], fill: int, dtype: torch.dtype):
    return value(torch.tensor(fill).to(dtype).expand(shape).clone())


def cdiv(a, b):
    return (a + (b - 1)) // b


COMPUTE = dict(
    abs=elementwise(torch.abs),
    exp=elementwise(torch.exp),
    exp2=elementwise(torch.exp2),
    log=elementwise(torch.log),
    log2=elementwise(torch.log2),
    sqrt=elementwise(torch.sqrt),
    sqrt_rn=elementwise(torch.sqrt),
    rsqrt=elementwise(torch.rsqrt),
    sin=elementwise(torch.sin),
    cos=elementwise(torch.cos),
    erf=elementwise(torch.erf),
    floor=elementwise(torch.floor),
    ceil=elementwise(torch.ceil),
    sigmoid=elementwise(torch.sigmoid),
    fdiv=elementwise(torch.true_divide),
    div_rn=elementwise(torch.true_divide),
    fma=fma,
    where=where,
    maximum=maximum,
    minimum=minimum,
    arange=arange,
    full=full,
    zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
    full_like=lambda x, fill, **_: full(x.shape, fill, x.dtype),
    zeros_like=lambda x, **_: full(x.shape, 0, x.dtype),
    cdiv=cdiv,
    sum=lambda x, axis=None, keep_dims=False, dtype=None, **_: reduce_sum(x, axis, keep_dims, dtype),
    max=lambda x, axis=None, keep_dims=False, **_: reduce_extreme(x, axis, keep_dims, True),
    min=lambda x, axis=None, keep_dims=False, **_: reduce_extreme(x, axis, keep_dims, False),
    cast=lambda x, dtype, *_, bitcast=False, **__: x.to(dtype, bitcast=bitcast),
    permute=lambda x, *dims: x.permute(*dims),
    reshape=lambda x, *shape, **_: x.reshape(*shape),
    expand_dims=lambda x, axis: x.expand_dims(axis),
    split=lambda x: x.split(),
    join=lambda a, b: Tensor(torch.stack(torch.broadcast_tensors(*promote(a, b)), -1)),
    broadcast=lambda a, b: tuple(map(Tensor, torch.broadcast_tensors(a.v, b.v))),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    set_auto_layout=lambda x, layout: x,
)
"""Name in ``gl`` and ``tl`` -> model."""
