"""All operators, one declaration each. Importing this package fills the registry `fluidx.ir.OPS`.

The package imports every module below this folder, in the order of the names. A new module needs no entry in a list.
"""

from importlib import import_module as _import_module
from pkgutil import walk_packages as _walk_packages

for _found in _walk_packages(__path__, f"{__name__}."):
    _import_module(_found.name)
