"""Every operator, one declaration each. Importing this package fills the registry `fluidx.ir.OPS`.

Its modules are found, not listed: a new module anywhere below this folder is imported with the others, in the order of the names.
"""

from importlib import import_module as _import_module
from pkgutil import walk_packages as _walk_packages

for _found in _walk_packages(__path__, f"{__name__}."):
    _import_module(_found.name)
