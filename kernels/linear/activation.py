"""The gate activations of gated MLPs, computed in a kernel's epilogue."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU or GELU (erf or tanh form) of an fp32 tensor."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 · (1 + tanh(y)) is sigmoid(2y)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
