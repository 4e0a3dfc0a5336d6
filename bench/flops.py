"""The number of floating-point operations of a step or a prompt: two for each multiply-add."""

from minirt.modeling.config import ModelConfig


def linear_flops(config: ModelConfig, tokens: int, rows: int) -> int:
    """Count all linear layers for `tokens` tokens, but the last MLP and the LM head only for `rows` of them.

    In a mixture of experts, only the experts that a token uses are counted.
    """
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    *mlps, last = (config.mlp_weights(i, of_one_token=True) for i in range(config.num_layers))
    return 2 * (tokens * (config.num_layers * attention + sum(mlps)) + rows * (last + config.hidden_size * config.vocab_size))


def prompt_flops(config: ModelConfig, tokens: int) -> int:
    """Count a prompt: causal attention and the linear layers for all tokens, the last MLP and the LM head for the last token."""
    scores = 4 * config.num_heads * config.head_dim * (tokens * (tokens + 1) // 2)
    return linear_flops(config, tokens, 1) + config.num_layers * scores
