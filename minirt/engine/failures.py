"""`DeviceErrors`: the error with which an engine ends itself. `no_token`: why a request has no next token."""

from types import TracebackType

import torch

from minirt.device import is_device_failure
from minirt.engine.logits_processors import unpacked
from minirt.engine.sequence import Sequence
from minirt.engine.token_constraints import ConstrainedRows, TokenConstraints
from minirt.errors import DeviceFailedError, InputError, MinirtError, NumericsError


class DeviceErrors:
    """Context that turns errors of the GPU or its driver into a `DeviceFailedError`, and raises it again at every later use."""

    failure: DeviceFailedError | None = None

    def __enter__(self) -> None:
        if self.failure is not None:
            raise self.failure

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and is_device_failure(error):
            hint = "start a new process; with CUDA_LAUNCH_BLOCKING=1 it names the call that failed"
            self.failure = DeviceFailedError("the GPU failed", found=str(error).strip().splitlines()[0], hint=hint)
            raise self.failure from error


def no_token(sequence: Sequence, constraints: TokenConstraints | None, vocab: int) -> MinirtError:
    """Why the sampler has drawn no token: the settings of the request leave none, or the logits are unusable.

    Args:
        constraints: of the engine.
        vocab: number of token ids.
    """
    rules = sequence.rules
    generated = sequence.tokens[sequence.prompt_len :].tolist()
    left = set(range(vocab) if rules is None or rules.allowed is None else rules.allowed)
    left -= set() if rules is None else rules.banned(generated)
    if sequence.constraint is not None and constraints is not None:
        mask = torch.zeros(1, -(-vocab // 32), dtype=torch.int32)
        if failed := constraints.fill(mask, [ConstrainedRows(sequence.constraint)]):
            return failed[0]
        left.intersection_update(unpacked(mask, vocab)[0].nonzero().flatten().tolist())
    place = f"generated token {len(generated)}"
    if left:
        remedy = "--check-weights finds damaged weights; --dtype float32 rules out overflow"
        return NumericsError("the logits are NaN or +inf, or only -inf", where=place, hint=remedy)
    masks = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
    names = [name for name in masks if getattr(sequence.sampling, name)]
    grammar = names[:2] == ["structured_outputs", "allowed_token_ids"]
    hint = "a grammar needs an end-of-sequence token, too" if grammar else None
    expected = f"a token that fits {' and '.join(names)}"
    return InputError("no token is left to draw", where=names[-1], expected=expected, found=f"none for {place}", hint=hint)
