"""How many floating-point operations a step or a prompt needs, two for each product."""

from minirt.config import ModelConfig


def linear_flops(config: ModelConfig, tokens: int, rows: int) -> int:
    """All linear layers for `tokens`, the LM head for `rows` of them."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    block = config.hidden_size * (config.head_dim * heads + 3 * config.intermediate_size)
    return 2 * (tokens * config.num_layers * block + rows * config.vocab_size * config.hidden_size)


def prompt_flops(config: ModelConfig, tokens: int) -> int:
    """The linear layers, attention of each token on those before it and itself, the LM head for the last."""
    scores = 4 * config.num_heads * config.head_dim * (tokens * (tokens + 1) // 2)
    return linear_flops(config, tokens, 1) + config.num_layers * scores
