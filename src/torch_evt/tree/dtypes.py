"""The data types that a tree may name, and the three types that its values have."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import torch

ValueType = Literal["float", "int", "bool"]

DTYPES = MappingProxyType(
    {
        "f64": torch.float64,
        "f32": torch.float32,
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f8e4m3": torch.float8_e4m3fn,
        "f8e5m2": torch.float8_e5m2,
        "i64": torch.int64,
        "i32": torch.int32,
        "i16": torch.int16,
        "i8": torch.int8,
        "u8": torch.uint8,
        "bool": torch.bool,
    }
)
"""Every dtype of the language by its name in the text form."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in the text form; torch's own name for one that no tree may use."""
    return _NAMES.get(dtype, str(dtype))


def is_known(dtype: object) -> bool:
    """Whether the language has this dtype."""
    return dtype in _NAMES


def type_of_dtype(dtype: torch.dtype) -> ValueType:
    """The type of a value that comes from memory, or from a cast, as this dtype."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"
