"""fluid.core: the names that scripts use from fluid's C++ library: places, scopes, dtypes and EOFException."""

from __future__ import annotations

from .executor import CPUPlace, CUDAPinnedPlace, CUDAPlace, Scope
from .executor.places import cuda_device_count, is_compiled_with_cuda
from .fluid_names import module_getattr
from .ir import EOFException


class VarDesc:
    """fluid's record of a variable; fluidx has it only for `VarType`."""

    class VarType:
        """dtypes, and kinds of variables, by fluid's names.

        >>> VarDesc.VarType.FP32, VarDesc.VarType.INT64
        ('float32', 'int64')
        """

        BOOL, INT8, UINT8, INT16, INT32, INT64 = "bool", "int8", "uint8", "int16", "int32", "int64"
        FP16, FP32, FP64, BF16 = "float16", "float32", "float64", "bfloat16"
        LOD_TENSOR, LOD_TENSOR_ARRAY = "lod_tensor", "lod_tensor_array"


get_cuda_device_count = cuda_device_count

__all__ = ["CPUPlace", "CUDAPinnedPlace", "CUDAPlace", "EOFException", "Scope", "VarDesc", "get_cuda_device_count", "is_compiled_with_cuda"]
__getattr__ = module_getattr("core", __all__)
