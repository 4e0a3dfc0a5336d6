"""How many floating-point operations a step or a prompt needs, two for each product."""

from minirt.modeling.config import ModelConfig


def linear_flops(config: ModelConfig, tokens: int, rows: int) -> int:
    """All linear layers for `tokens`, the last MLP and the LM head for `rows` of them."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    attention, mlp = config.head_dim * heads, 3 * config.intermediate_size
    of_all = config.num_layers * attention + (config.num_layers - 1) * mlp
    return 2 * config.hidden_size * (tokens * of_all + rows * (mlp + config.vocab_size))


def prompt_flops(config: ModelConfig, tokens: int) -> int:
    """The linear layers, attention of each token on those before it and itself, the last MLP and the LM head for the last."""
    scores = 4 * config.num_heads * config.head_dim * (tokens * (tokens + 1) // 2)
    return linear_flops(config, tokens, 1) + config.num_layers * scores
