"""The mathematics: one folder an op, each with its public function, a reference in plain PyTorch, and kernels where
they exist.

>>> from fast_llm_ssm.ops import ssd
"""

# A folder and its function may share a name (ssd/ holds ssd). Python sets a submodule as an attribute of its parent
# once, when the submodule is first loaded, and none can be loaded before this file runs. Each line below loads a folder
# and then binds the function over it, so `ops.ssd` is the function whatever is imported later.
from .attention import attention
from .causal_conv1d import causal_conv1d, causal_conv1d_update
from .cross_entropy import linear_cross_entropy
from .gated_norm import gated_rms_norm
from .selective_scan import selective_scan
from .ssd import ssd
from .state_update import selective_state_update

__all__ = [
    "attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "gated_rms_norm",
    "linear_cross_entropy",
    "selective_scan",
    "selective_state_update",
    "ssd",
]
