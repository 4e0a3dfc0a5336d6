"""The package `minirt` for a Python that finds this folder first: one that runs beside a clone named minirt.

Without this file, the folder would be a namespace package there, and hide the editable install, whose finder comes last.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from os.path import dirname

_spec = spec_from_file_location(__name__, f"{dirname(__file__)}/minirt/__init__.py")
sys.modules[__name__] = _package = module_from_spec(_spec)
_spec.loader.exec_module(_package)
