"""`patch` and `unpatch`: minirt's kernels in a model of transformers, in place.

`RULES` says what is replaced in which modules. transformers is not imported: classes are known by their names.
"""

from minirt.patching.model import patch, unpatch
from minirt.patching.rules import FAMILIES, PARTS, RULES
from minirt.patching.table import Change, PatchTable

__all__ = ["FAMILIES", "PARTS", "RULES", "Change", "PatchTable", "patch", "unpatch"]
