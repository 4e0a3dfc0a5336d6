"""`Rules`: what a request asks of its logits before the draw, such as biases and penalties. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from minirt.errors import InputError
from minirt.kernels.sampling.limits import MOST_ENTRIES
from minirt.sampling_params import EffectiveSampling

_ALWAYS = 2**31 - 1


@dataclass(frozen=True)
class Rules:
    """What a request asks of its logits, in token ids.

    Args:
        presence, frequency, repetition: the penalties; 0, 0 and 1 are off.
        bias: token id → what is added to its logit.
        allowed: the tokens that may be drawn; None: all.
        bad_words: token sequences whose last token is forbidden where the generated tokens end with the others.
        min_tokens, end_ids: before this number of generated tokens, these tokens are forbidden.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampling: EffectiveSampling, eos_token_ids: Sequence[int], bad_words: Sequence[Sequence[int]]) -> "Rules | None":
        """The rules of a request; None if it has none. With `structured_outputs`, the masks apply `min_tokens`."""
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        others = bad_words or sampling.logit_bias or sampling.min_tokens or sampling.allowed_token_ids is not None
        if penalties == (0, 0, 1) and not others:
            return None
        bans_ends = sampling.min_tokens and sampling.structured_outputs is None
        ends = tuple({*eos_token_ids, *sampling.stop_token_ids}) if bans_ends else ()
        rules = cls(
            *penalties, sampling.logit_bias, sampling.allowed_token_ids, tuple(map(tuple, bad_words)),
            sampling.min_tokens if ends else 0, ends,
        )  # fmt: skip
        return None if rules == _NONE else rules

    @property
    def lasting(self) -> bool:
        """Whether they change the logits of every step: `min_tokens` alone ends."""
        return bool(self.penalizes or self.bias or self.allowed is not None or self.bad_words)

    @property
    def penalizes(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0, 0, 1)

    @property
    def bans(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(token, the step from which it is no longer forbidden, the tokens after which it is forbidden)."""
        words = [(word[-1], _ALWAYS, word[:-1]) for word in self.bad_words]
        return words + [(token, min(self.min_tokens, _ALWAYS), ()) for token in self.end_ids]

    def check_sizes(self) -> None:
        """Raise InputError if the device has no room for one of the lists."""
        bans = self.bans
        sizes = {
            ("logit_bias", "biases"): len(self.bias), ("bad_words", "tokens that bad_words and min_tokens forbid"): len(bans),
            ("bad_words", "tokens before the last ones of bad words"): sum(len(prefix) for _, _, prefix in bans),
        }  # fmt: skip
        for (option, what), size in sizes.items():
            if size > MOST_ENTRIES:
                raise InputError(f"too many {what}", where=option, expected=f"at most {MOST_ENTRIES:,}", found=f"{size:,}")

    def banned(self, generated: Sequence[int]) -> set[int]:
        """The tokens that `bans` forbid after the generated tokens. The host needs them for errors only."""
        count, known = len(generated), tuple(generated)
        return {token for token, until, prefix in self.bans if count < until and known[count - len(prefix) :] == prefix}


_NONE = Rules()
