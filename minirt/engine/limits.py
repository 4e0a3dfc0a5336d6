"""`EngineLimits`: how large an engine's steps, sequences and queue may be, for every part of the engine; `EngineOptions`."""

from dataclasses import dataclass

from minirt.kernels.attention.limits import KV_SPLIT

# The default token budget of a step on a CPU (on a GPU: `loading.memory`). A larger step is hardly faster, and an interrupt or
# another request waits for it.
CPU_NUM_BATCHED_TOKENS = 256
MAX_LOGITS_ROWS = 256  # rows of logits of a step, those of drafts included, unless more sequences run at once
MAX_SHARING = 2  # how often the KV pages of a cache count in a step: sequences with the same beginning share pages


@dataclass(frozen=True)
class EngineLimits:
    """Limits of an engine.

    Args:
        max_model_len: tokens of the longest sequence, prompt and generated tokens together.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of the largest step. A longer prompt is computed in chunks.
        max_waiting: requests that wait while a step computes others; further ones are refused. None: no limit.
        max_step_ms: milliseconds that a step's prompt tokens may take while sequences decode, by the times measured at warm-up on
            a GPU; 0: any number.
        max_drafts: proposed tokens of a sequence that a step verifies, at most.
        keeps_history: whether the device keeps all tokens of each sequence, for the proposer.
        model_len: tokens that the model itself allows in a sequence, for messages; None: not known.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = CPU_NUM_BATCHED_TOKENS
    max_waiting: int | None = None
    max_step_ms: float = 0.0
    max_drafts: int = 0
    keeps_history: bool = False
    model_len: int | None = None

    @property
    def max_logits_rows(self) -> int:
        """Rows of logits of the largest step."""
        return max(self.max_num_seqs, MAX_LOGITS_ROWS)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs its steps.

    Args:
        prefix_cache: whether requests share KV pages that hold the same beginning.
        cuda_graphs: run small steps as CUDA graphs. Needs a `Model` on a GPU whose layers can all be captured.
        lookahead: number of steps started before the tokens of an earlier step are read, 0 or 1. None: 0 if steps wait for the
            device (`Runner.waits`), else 1.
        adaptive_drafts: whether steps verify only as many drafts as are expected to pay (`DraftLengths`), not all.
    """

    prefix_cache: bool = True
    cuda_graphs: bool = False
    lookahead: int | None = None
    adaptive_drafts: bool = True


def max_splits(count: int, max_seq_len: int, capacity: int) -> int:
    """Maximum number of KV splits of a step's `count` sequences together, in a cache that holds `capacity` tokens.

    Kernels have room for this many. Sequences that share pages could have more, so the scheduler leaves some out of a step.
    """
    return min(count * -(-max_seq_len // KV_SPLIT), MAX_SHARING * (capacity // KV_SPLIT) + count)
