"""`gated_delta_net`: a gated DeltaNet layer's step after its projections, for any mix of prompts and single tokens.

A step of single tokens is one kernel, `decode`. In other steps, `decode` computes the sequences of one new token (of up to n, if
steps of n tokens can be undone), and the kernels of `chunk` the others. A sequence's result does not depend on the others. In an
invariant step, `tokens` computes all.
"""

from typing import Any

from torch import Tensor

from minirt.errors import InputError
from minirt.kernels.checks import check_arguments
from minirt.kernels.gated_delta.chunk import chunk
from minirt.kernels.gated_delta.decode import decode
from minirt.kernels.gated_delta.operands import WIDTH, GatedDeltaInput, GatedDeltaSequences, GatedDeltaState, GatedDeltaWeights
from minirt.kernels.gated_delta.tokens import tokens
from minirt.kernels.regimes import Limits, Regime, SumOrder

_LIMITS = Limits(("fp16", "fp32"))
DECODE = (
    Regime("gated_delta_decode", "sequences", 1, limits=_LIMITS, sums=SumOrder("threads")),
    Regime("gated_delta_tokens", "sequences", 1, limits=_LIMITS, sums=SumOrder("threads", invariant=True)),
)
CHUNK = (Regime("gated_delta_chunk", "tokens", 1, limits=_LIMITS, sums=SumOrder("steps")),)
# The number of prompts at which a configuration ends depends on the model and the GPU. The last is at least twice the first, so
# between them is a power of two.
CHUNK_PROMPTS = (Regime("gated_delta_chunk", "prompts", 1, variant=lambda prompts: 1 << (prompts - 1).bit_length()),)

CASES = [  # contexts: tokens of each sequence before its new ones
    {"Hk": 1, "Hv": 1, "Dk": 16, "Dv": 16, "lens": (1,), "contexts": (0,)},
    {"Hk": 2, "Hv": 4, "Dk": 32, "Dv": 16, "lens": (1, 1, 1), "contexts": (0, 5, 131)},
    {"Hk": 2, "Hv": 6, "Dk": 16, "Dv": 32, "lens": (3, 1, 65), "contexts": (2, 17, 0)},
    {"Hk": 1, "Hv": 4, "Dk": 16, "Dv": 16, "lens": (64, 2, 129), "contexts": (1, 0, 70)},
    {"Hk": 1, "Hv": 2, "Dk": 32, "Dv": 64, "lens": (70,), "contexts": (2,)},
    {"Hk": 1, "Hv": 2, "Dk": 128, "Dv": 128, "lens": (1, 70), "contexts": (3, 0)},
]


def gated_delta_net(
    qkvz: Tensor, ba: Tensor, weights: GatedDeltaWeights, state: GatedDeltaState, sequences: GatedDeltaSequences,
    max_query_len: int, out: Tensor | None = None, *, invariant: bool = False, pdl: bool = False, check: bool = True,
) -> Tensor:  # fmt: skip
    """Convolution, gates, gated delta rule and gated norm of new tokens; updates the state of the sequences' slots.

    Args:
        qkvz: [T, 2·Hk·Dk + 2·Hv·Dv], heads of q, of k, of v and of z. Rows may be apart. Dk and Dv are 16, 32, 64 or 128.
        ba: [T, 2·Hv], b and a of each value head. Rows may be apart.
        max_query_len: upper bound of a sequence's new tokens.
        invariant: whether a token's bits must not depend on the number of new tokens, see `SumOrder.invariant`.
        pdl: overlap with the kernel before it in the stream (sm_90 and later); only if `max_query_len` is 1.
    Returns:
        [T, Hv·Dv]. Rows of padding are not written.
    Raises:
        InputError: tensors do not fit each other.
    """
    if check:
        records: dict[str, Any] = {"weights": weights, "state": state, "sequences": sequences}
        fields = {f"{name}.{field}": x for name, record in records.items() for field, x in record._asdict().items()}
        check_arguments("gated_delta_net", qkvz=qkvz, ba=ba, out=out, **fields)
    _, Hv, _, Dv = state.recurrent.shape
    out = qkvz.new_empty(qkvz.shape[0], Hv * Dv) if out is None else out
    if not qkvz.shape[0] or not sequences.slots.shape[0]:
        return out
    alone = max_query_len <= max(1, state.drafts)
    a = GatedDeltaInput(qkvz, ba, weights, state, sequences, out, max_query_len, pdl and alone)
    if invariant:
        tokens(a)
        return out
    if not alone and not state.drafts:
        chunk(a)
    decode(a)
    if not alone and state.drafts:  # after `decode`, which folds tokens of earlier steps
        chunk(a)
    return out


def cost(
    tokens: int, sequences: int, Hk: int, Hv: int, Dk: int, Dv: int, itemsize: int, *, begins: bool = False
) -> tuple[int, int]:
    """(bytes read and written, floating-point operations) of `tokens` new tokens of `sequences` sequences.

    `begins`: no sequence has a state yet. The operations are those of the rule token by token; chunks take more.
    """
    values, matrix = Hv * Dv, 4 * Hv * Dk * Dv
    channels = 2 * Hk * Dk + values
    rows = tokens * (channels + 2 * values + 2 * Hv) * itemsize
    reads = 0 if begins else matrix + (WIDTH - 1) * channels * itemsize
    writes = matrix + min(WIDTH, -(-tokens // max(sequences, 1))) * channels * itemsize
    nbytes = rows + sequences * (reads + writes) + (channels * WIDTH + Dv) * itemsize + 8 * Hv
    return nbytes, tokens * (6 * Hv * Dk * Dv + 2 * WIDTH * channels)


def check_channels(sizes: dict[str, int], **values: Any) -> None:
    """What the declaration cannot say: that heads of q and k remain of the channels, and that the ring is long enough."""
    Hv, Dk, Dv, channels, ring = (sizes[axis] for axis in ("Hv", "Dk", "Dv", "C", "R"))
    keys = channels - Hv * Dv
    if keys <= 0 or keys % (2 * Dk) or Hv % (keys // (2 * Dk)):
        expected = f"2·Hk·{Dk} + {Hv}·{Dv} channels, Hk a divisor of {Hv}"
        raise InputError("wrong shape", where="state.conv", expected=expected, found=channels)
    undone = values["state.gates"] is not None
    if ring < WIDTH + undone or (undone and (ring - WIDTH + 1) % 2):
        expected = "3 + 2n rows, n from 1 on" if undone else f"{WIDTH} rows or more"
        raise InputError("wrong shape", where="state.conv", expected=expected, found=ring)
