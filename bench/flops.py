"""The number of floating-point operations of a step or a prompt: two for each multiply-add."""

from minirt.modeling.config import ModelConfig


def linear_flops(config: ModelConfig, tokens: int, rows: int) -> int:
    """Count all linear layers for `tokens` tokens, but the last MLP and the LM head only for `rows` of them."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    attention, mlp = config.head_dim * heads, 3 * config.intermediate_size
    of_all = config.num_layers * attention + (config.num_layers - 1) * mlp
    return 2 * config.hidden_size * (tokens * of_all + rows * (mlp + config.vocab_size))


def prompt_flops(config: ModelConfig, tokens: int) -> int:
    """Count a prompt: causal attention and the linear layers for all tokens, the last MLP and the LM head for the last token."""
    scores = 4 * config.num_heads * config.head_dim * (tokens * (tokens + 1) // 2)
    return linear_flops(config, tokens, 1) + config.num_layers * scores
