"""Process-wide settings. The SM count reaches the kernels; the others are kept, and change nothing."""

from __future__ import annotations

import torch

from megamoe.errors import check_int, fail_type, fail_value
from megamoe.kernels import gemm

_settings = {"num_sms": 0, "tc_util": 0, "pdl": False, "ignore_compile_dims": False, "block_size_multiple_of": (1, 1)}


def _device_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 0


def set_num_sms(new_num_sms: int) -> None:
    """SMs that GEMMs use; 0 = all of the device."""
    check_int("new_num_sms", new_num_sms, 0)
    available = _device_sms()
    if available and new_num_sms > available:
        fail_value("new_num_sms", new_num_sms, f"must be at most {available}, the SMs of the device", "Pass 0 for all.")
    gemm.set_num_sms(new_num_sms or None)
    _settings["num_sms"] = new_num_sms


def get_num_sms() -> int:
    """SMs that GEMMs use; without a GPU as set, 0 by default."""
    return gemm.get_num_sms() if torch.cuda.is_available() else _settings["num_sms"]


def set_tc_util(new_tc_util: int) -> None:
    """Tensor core utilisation in percent, 0 to 100; 0 = 100. Only kept."""
    check_int("new_tc_util", new_tc_util, 0)
    if new_tc_util > 100:
        fail_value("new_tc_util", new_tc_util, "must be at most 100", "Pass a percentage.")
    _settings["tc_util"] = new_tc_util


def get_tc_util() -> int:
    """Percent as set, 100 by default."""
    return _settings["tc_util"] or 100


def _check_bool(argument: str, value: bool) -> None:
    if not isinstance(value, bool):
        fail_type(argument, value, "must be a bool", "Pass True or False.")


def set_pdl(new_enable_pdl: bool) -> None:
    """Programmatic dependent launch. Only kept."""
    _check_bool("new_enable_pdl", new_enable_pdl)
    _settings["pdl"] = new_enable_pdl


def get_pdl() -> bool:
    """As set, False by default."""
    return _settings["pdl"]


def set_ignore_compile_dims(new_value: bool) -> None:
    """Whether kernels are compiled for any shape. Only kept."""
    _check_bool("new_value", new_value)
    _settings["ignore_compile_dims"] = new_value


def set_block_size_multiple_of(new_value: int | tuple[int, int]) -> None:
    """Multiple of tile sizes, of M and N alike or each. Only kept."""
    pair = new_value if isinstance(new_value, tuple) else (new_value, new_value)
    if len(pair) != 2:
        fail_value("new_value", new_value, "must be an int or two", "Pass (multiple of M, multiple of N).")
    for value in pair:
        check_int("new_value", value, 1)
    _settings["block_size_multiple_of"] = pair
