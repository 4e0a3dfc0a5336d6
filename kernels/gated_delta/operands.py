"""The operands of one gated DeltaNet layer's step: `GatedDeltaInput`, and the records that kernels read by name.

This file imports no Triton.

**The state of a slot.** `recurrent` is the fp32 matrix of each value head. `conv` is a ring of raw inputs of the convolution:
that of position p is in row p mod R. A step of one token reads the rows of the three positions before it and writes another
row, so its programs need no order. Hence R is 4 at least. A sequence whose first token is at position 0 has no state yet.

**Drafts.** A step of up to n tokens can be undone to any of them, if the state also has `gates` and `folded`, and R is 3 + 2n.
Such a step computes its outputs, but leaves its tokens out of `recurrent`: it stores only their inputs (`conv`) and gates, a few
percent of a matrix for each token. `folded` is the number of tokens that `recurrent` holds. The next step begins at position p:
it first folds the tokens from `folded` to p − 1 into `recurrent`, from their inputs. So undoing is to begin the next step at an
earlier position, with other tokens; nothing is copied, and the matrix is still read and written once for a step. A step of more
tokens (a part of a prompt) folds all its tokens at once and cannot be undone.
"""

from typing import NamedTuple

from torch import Tensor

WIDTH = 4  # of the convolution: a token and the three before it
CHUNK = 64  # tokens of a chunk
L2_EPS = 1e-6
HEAD_DIMS = (16, 32, 64, 128)  # of keys and of values, in Triton kernels


class GatedDeltaState(NamedTuple):
    """The states of a layer's slots. See the module's docstring.

    Attributes:
        conv: [slots, R, C] of x's dtype; C channels: those of q, k and v.
        recurrent: [slots, Hv, Dk, Dv] fp32.
        gates: [slots, R, 2, Hv] fp32, g and beta of the tokens in `conv`. None: steps cannot be undone.
        folded: [slots, Hv] int32, the number of tokens in `recurrent`, for each value head. None with `gates`.
    """

    conv: Tensor
    recurrent: Tensor
    gates: Tensor | None = None
    folded: Tensor | None = None

    @property
    def drafts(self) -> int:
        """n, the most tokens of a step that can be undone; 0: none can."""
        return 0 if self.gates is None else (self.conv.shape[1] - WIDTH + 1) // 2


class GatedDeltaWeights(NamedTuple):
    """The weights of a layer, without its projections.

    Attributes:
        conv: [C, 4] of x's dtype, the current token's last.
        A_log, dt_bias: [Hv] fp32.
        norm: [Dv] of x's dtype.
        eps: of the norm.
    """

    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


class GatedDeltaSequences(NamedTuple):
    """The sequences of a step, all int32 on the device.

    Attributes:
        query_starts: [B + 1], the first row of each sequence; last, the number of rows that are no padding.
        seq_lens: [B], tokens of each sequence, the new ones included.
        slots: [B], rows of the state; −1: padding.
        snapshots: [B, MAX_SNAPSHOTS, 2], of each snapshot that is stored within the step: the row of the state that gets it, and
            how many of the sequence's new tokens it has, a multiple of CHUNK, fewer than all. In order; −1: no more of them.
            None: no sequence has one.
    """

    query_starts: Tensor
    seq_lens: Tensor
    slots: Tensor
    snapshots: Tensor | None = None


class GatedDeltaInput(NamedTuple):
    """A step of a layer, after its projections.

    Attributes:
        qkvz: [T, 2·Hk·Dk + 2·Hv·Dv], heads of q, of k, of v and of z; rows may be apart.
        ba: [T, 2·Hv], b and a of each value head, of the same dtype; rows may be apart.
        out: [T, Hv·Dv].
        max_query_len: upper bound of a sequence's new tokens.
        pdl: see `minirt.kernels.pdl`.
    """

    qkvz: Tensor
    ba: Tensor
    weights: GatedDeltaWeights
    state: GatedDeltaState
    sequences: GatedDeltaSequences
    out: Tensor
    max_query_len: int
    pdl: bool = False

    @property
    def head_shape(self) -> tuple[int, int, int, int]:
        """(Hk, Hv, Dk, Dv)."""
        _, Hv, Dk, Dv = self.state.recurrent.shape
        return (self.state.conv.shape[2] - Hv * Dv) // (2 * Dk), Hv, Dk, Dv
