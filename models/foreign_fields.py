"""Fields of other architectures that would change what a model computes. Every architecture refuses them by name.

A field that nobody reads gives a wrong result without an error: a Llama with `no_rope_layers`, for example, is a SmolLM3. The
table was made from the configuration classes of decoders in transformers, and from fields of other runtimes. It has no fields
of training, of token ids, and of sizes that a decoder reads. A warning lists fields that are in no table and that no code reads.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from minirt.errors import ConfigError, UnsupportedError, printable, shortened
from minirt.modeling.config import ACTIVATIONS, Fields, ModelConfig, shown
from minirt.wording import warn

_OFF = (False, 0)
_ONE = (1,)
_ON = (True, 1)
_NOTHING = ()

# What the fields would do → field → the values with which it changes nothing. For every field, these are also null, an empty
# list, an empty object, and a list of such values. Fields of which an architecture has its own value: `_stated`.
FOREIGN_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "another position embedding in some or all layers": {
        "no_rope_layers": _ON, "no_rope_layer_interval": _OFF, "layer_rope_theta": _NOTHING, "rope_local_base_freq": _NOTHING,
        "local_rope_theta": _NOTHING, "global_rope_theta": _NOTHING, "swa_rope_theta": _NOTHING, "compress_rope_theta": _NOTHING,
        "rotary_emb_base": _NOTHING, "rotary_pct": _ONE, "rope_pct": _ONE, "rope_percent": _ONE, "rotary_emb_fraction": _ONE,
        "rotary_dim": _NOTHING, "rope_scaling_factor": _ONE, "rope_interleave": _OFF, "rope_interleaved": _OFF,
        "rotary_emb_interleaved": _OFF, "use_dynamic_ntk": _OFF, "use_rope": _ON, "use_rotary": _ON, "use_rotary_emb": _ON,
        "position_embedding_type": ("rope", "rotary"), "alibi": _OFF, "use_alibi": _OFF, "learned_pos_emb": _OFF,
        "use_learned_position_embeddings": _OFF, "sinusoidal_embeddings": _OFF,
        "d_rel": _OFF,
    },
    "other scores of attention": {
        "query_pre_attn_scalar": _NOTHING, "attention_multiplier": _NOTHING, "attn_logit_softcapping": _OFF,
        "attn_logit_softcap": _OFF, "attention_logit_cap": _OFF, "attention_in_multiplier": _ONE,
        "attention_out_multiplier": _ONE,
        "key_multiplier": _ONE, "qk_scale_factor": _ONE, "attention_value_scale": _ONE, "attn_temperature_tuning": _OFF,
        "llama_4_scaling": _NOTHING, "llama_4_scaling_beta": _OFF, "log_scaling_alpha": _OFF, "use_logn_attn": _OFF,
        "scale_attn_by_inverse_layer_idx": _OFF, "scale_attn_weights": _ON, "lambda_std_dev": _NOTHING, "clip_qkv": _NOTHING,
        "qk_l2_clip_threshold": _NOTHING, "qk_clip": _OFF,
    },
    "attention sinks": {
        "attention_sinks": _OFF, "attention_sink": _OFF, "use_attention_sinks": _OFF, "use_sinks": _OFF,
        "add_swa_attention_sink_bias": _OFF, "add_full_attention_sink_bias": _OFF, "learnable_sink_init": _NOTHING,
    },
    "attention to other tokens": {
        "use_bidirectional_attention": _OFF, "prefix_lm": _OFF, "is_encoder_decoder": _OFF, "add_cross_attention": _OFF,
        "cross_attention_layers": _NOTHING, "cross_attention_hidden_size": _NOTHING, "attention_chunk_size": _NOTHING,
        "sliding_window_size": _NOTHING, "attention_window_size": _NOTHING, "window_size": _NOTHING, "local_attention": _NOTHING,
        "local_attention_window_len": _NOTHING, "attention_types": _NOTHING, "attention_layers": _NOTHING,
        "index_topk": _OFF, "index_topk_blocks": _OFF, "index_n_heads": _OFF, "indexer_types": _NOTHING,
        "indexer_n_heads": _OFF, "compress_rates": _NOTHING, "sparse_attention_config": _NOTHING, "use_sparse_attention": _OFF,
        "keep_window_size": _NOTHING,
        "num_kv_shared_layers": _OFF, "use_cla": _OFF, "cla_share_factor": _ONE, "attention_k_eq_v": _OFF,
    },
    "a gate on the output of attention": {
        "attn_output_gate": _OFF, "use_attention_gate": _OFF, "headwise_attn_output_gate": _OFF,
        "elementwise_attn_output_gate": _OFF, "gating": _OFF,
    },
    "latent attention (MLA)": {
        "kv_lora_rank": _OFF, "q_lora_rank": _OFF, "o_lora_rank": _OFF, "qk_nope_head_dim": _OFF, "qk_rope_head_dim": _OFF,
        "qk_head_dim": _OFF, "v_head_dim": _OFF, "use_mla": _OFF,
    },
    "layers of other kinds": {
        "layers_block_type": ("attention", "full_attention"), "block_types": ("attention",), "hybrid_layer_ids": _NOTHING,
        "attn_layer_period": _ONE, "attn_layer_indices": _NOTHING, "full_attn_idxs": _NOTHING, "local_layer_ids": _NOTHING,
        "full_attention_interval": _ONE, "layer_group_size": _ONE, "global_attn_every_n_layers": _ONE,
        "linear_num_key_heads": _OFF, "linear_num_value_heads": _OFF, "linear_num_heads": _OFF, "linear_conv_kernel_dim": _OFF,
        "mamba_d_state": _OFF, "mamba_d_ssm": _OFF, "mamba_n_heads": _OFF, "mamba_num_heads": _OFF, "ssm_state_size": _OFF,
        "conv_L_cache": _OFF, "lru_width": _OFF, "cca_time0": _OFF, "short_conv_kernel_size": _OFF, "conv_kernel_size": _OFF,
        "per_layer_config": _NOTHING, "block_configs": _NOTHING, "num_attention_heads_per_layer": _NOTHING,
        "swa_head_dim": _NOTHING, "swa_num_attention_heads": _NOTHING, "swa_num_key_value_heads": _NOTHING,
        "hidden_size_per_layer_input": _OFF, "laurel_rank": _OFF, "altup_num_inputs": _ONE, "hc_mult": _ONE, "hc_count": _ONE,
        "ngram_vocab_size_base": _OFF, "n_recurrent_loops": _ONE, "loop_num_passes": _ONE, "H_cycles": _ONE, "L_cycles": _ONE,
        "num_nextn_predict_layers": _OFF, "text_config": _NOTHING,
    },
    "other norms, or norms at other places": {
        "norm_type": ("rms", "rmsnorm", "rms_norm", "RMSNorm"), "rms_norm": _ON, "use_rms_norm": _ON, "norm_bias": _OFF,
        "apply_layernorm_1p": _OFF, "zero_centered_gamma": _OFF, "use_post_norm": _OFF, "use_sandwich_norm": _OFF,
        "post_norm": _OFF, "post_norm_eps": _NOTHING,
        "norm_after": _OFF, "do_layer_norm_before": _ON, "apply_residual_connection_post_layernorm": _OFF,
        "parallel_residual": _OFF, "use_parallel_residual": _OFF, "parallel_attn": _OFF, "new_decoder_architecture": _OFF,
        "gated_norm_rank": _OFF, "ngpt_alpha_init": _NOTHING, "_remove_final_layer_norm": _OFF,
    },
    "a factor or a bound of activations or logits": {
        "embedding_multiplier": _ONE, "embedding_multiplier_scale": _ONE, "embedding_scale": _ONE, "embed_scale": _ONE,
        "scale_emb": _ONE, "scale_embedding": _OFF, "scale_embeddings": _OFF, "rescale_embeddings": _OFF, "mup_enabled": _OFF,
        "use_mup": _OFF, "mup_attn_multiplier": _ONE, "mup_embedding_multiplier": _ONE, "residual_multiplier": _ONE,
        "scale_depth": _NOTHING, "dim_model_base": _NOTHING, "mlp_multipliers": _ONE, "logits_scaling": _ONE,
        "logit_scale": _ONE, "lm_head_multiplier": _ONE, "output_multiplier": _ONE, "output_multiplier_scale": _ONE,
        "logits_mup_width_multiplier": _ONE, "final_logit_softcapping": _OFF, "final_logit_softcap": _OFF,
        "output_logit_soft_cap": _OFF, "logits_soft_cap": _OFF, "unpadded_vocab_size": _NOTHING, "full_attn_alpha_factor": _ONE,
        "full_attn_beta_factor": _ONE, "mlp_alpha_factor": _ONE, "mlp_beta_factor": _ONE,
    },
    "biases": {
        "use_bias": _OFF, "bias": _OFF, "add_bias_linear": _OFF, "no_bias": _ON, "lm_head_bias": _OFF, "decoder_bias": _OFF,
    },
    "another MLP": {
        "use_double_wide_mlp": _OFF, "swiglu_limit": _NOTHING, "swiglu_alpha": _ONE, "mlp_gate_softcap": _NOTHING,
        "mlp_up_softcap": _NOTHING, "activation_sparsity_pattern": _OFF, "intermediate_size_mlp": _NOTHING, "gated_mlp": _ON,
    },
    "a mixture of experts of another kind": {
        "n_routed_experts": _OFF, "moe_num_experts": _OFF, "enable_moe_block": _OFF, "is_moe": _OFF, "ffn_config": _NOTHING,
        "n_shared_experts": _OFF, "num_shared_experts": _OFF, "moe_num_shared_experts": _OFF,
        "shared_expert_intermediate_size": _OFF, "shared_experts_intermediate_size": _OFF, "shared_intermediate_size": _OFF,
        "moe_shared_expert_intermediate_size": _OFF, "first_k_dense_replace": _OFF, "num_dense_layers": _OFF,
        "interleave_moe_layer_step": _NOTHING, "moe_layers": _NOTHING, "moe_layer_interval": _ONE, "mlp_layer_types": _NOTHING,
        "expert_layer_period": _NOTHING, "routed_scaling_factor": _ONE, "moe_routed_scaling_factor": _ONE,
        "router_scaling_factor": _ONE, "route_scale": _ONE, "n_group": _ONE, "num_expert_group": _ONE, "topk_group": _ONE,
        "topk_method": ("greedy",), "scoring_func": ("softmax",), "expert_selection_fn": ("softmax",),
        "moe_router_activation_func": ("softmax",), "use_expert_bias": _OFF, "moe_apply_router_weight_on_input": _OFF,
        "moe_router_logit_softcapping": _OFF, "zero_expert_num": _OFF, "moe_latent_size": _OFF,
    },
}  # fmt: skip


# Fields that no code reads, and that do not change logits: where a file comes from, how its model was trained, what a call of
# transformers returns, and all that belongs to images. Names with a leading underscore are transformers' own notes.
_HARMLESS = re.compile(
    r"_.*|model_type|architectures|transformers_version|transformers\.js_config|tokenizer_class|is_llama_config|unsloth_.*"
    r"|initializer_range|.*dropout|.*_pdrop|pretraining_tp|router_aux_loss_coef|gradient_checkpointing|is_decoder|use_bfloat16"
    r"|use_cache|output_(hidden_states|attentions|router_logits|scores)|return_dict(_in_generate)?|torchscript|tf_legacy_loss"
    r"|chunk_size_feed_forward|id2label|label2id|problem_type|finetuning_task|attn_implementation|.*_token_id"
    r"|tie_encoder_decoder|mtp_.*|trust_remote_code|remove_invalid_values|max_sequence_length|max_window_layers|use_mrope"
    r"|(image|video|vision|audio|multimodal|projector|spatial)_.*"
)
# Settings of `generate` that older versions of transformers wrote here, with the value that changes nothing.
_GENERATION = {
    "temperature": 1, "top_k": 50, "top_p": 1, "typical_p": 1, "repetition_penalty": 1, "length_penalty": 1,
    "diversity_penalty": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "max_length": 20, "min_length": 0,
    "do_sample": False, "early_stopping": False, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1,
}  # fmt: skip
# Other names of fields that have a default: a file with such a name and without ours does not mean the default.
_OTHER_NAMES = {
    "rms_norm_eps": {
        "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_epsilon",
        "rmsnorm_eps",
    },
    "rope_theta": {"rope_base", "rope_freq_base", "rotary_base"},
    "num_key_value_heads": {"num_kv_heads", "n_kv_heads", "multi_query_group_num"},
}  # fmt: skip


def refuse_other_names(fields: Fields) -> None:
    """Raise ConfigError if a field that is absent stands in the file under the name of another runtime."""
    ropes = [fields.nested(name).raw for name in ("rope_parameters", "rope_scaling")]
    for name, others in _OTHER_NAMES.items():
        stated = any(level.get(name) is not None for level in ((fields.raw, *ropes) if name == "rope_theta" else (fields.raw,)))
        for other in sorted(fields.raw.keys() & others):
            if not stated:
                what, hint = "the field has another name here", f"rename it to {name}"
                raise ConfigError(what, where=fields.place(other), expected=name, found=shown(fields.raw[other]), hint=hint)


def warn_of_unread_fields(fields: Fields) -> None:
    """Warn of fields of a config.json that nobody has read, unless they are known to change nothing.

    `fields`: those of the top level, after an architecture has read them.
    """
    levels: dict[str, Mapping[str, Any]] = {"": fields.raw}
    inner = fields.raw.get("text_config")
    if isinstance(inner, Mapping):
        levels["text_config."] = inner
    unread = [
        f"{prefix}{name}"
        for prefix, level in levels.items()
        for name, value in level.items()
        if f"{prefix}{name}" not in fields.read
        and value not in (None, [], {})
        and not _HARMLESS.fullmatch(name)
        and not (name in _GENERATION and value == _GENERATION[name])
    ]
    if unread:
        shown_names = printable(shortened(", ".join(unread)))
        names = f"fields {shown_names} are" if len(unread) > 1 else f"field {shown_names} is"
        what = "unknown, and ignored: if it changes what the model computes, the output is wrong"
        warn(f"{fields.where}: {names} {what}")


def refuse_foreign_fields(fields: Fields, config: ModelConfig, handled: Collection[str] = ()) -> None:
    """Raise UnsupportedError for a field of FOREIGN_FIELDS, or of `_stated`, with a value that would change the model.

    `handled`: names of fields that the architecture reads itself.
    """
    stated = _stated(config)
    tables: dict[str, Mapping[str, tuple[Any, ...]]] = {**FOREIGN_FIELDS, "another value than that of the architecture": stated}
    for what, table in tables.items():
        for name in (fields.raw.keys() & table.keys()).difference(handled):
            value, neutral = fields.raw[name], stated.get(name, table[name])
            if not _is_neutral(value, neutral):
                raise UnsupportedError(
                    f"the field means {what}, which model_type {config.model_type!r} does not compute", where=fields.place(name),
                    expected=" or ".join(["no field", *dict.fromkeys(map(shown, neutral))]), found=shown(value),
                    hint="correct model_type if it is wrong",
                )  # fmt: skip


def _stated(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Fields for which this model has a value of its own, with the values that mean the same.

    Qwen2 has biases on q, k and v and none on o: for `attention_bias`, which is all four, transformers takes either value.
    """
    qkv, moe = (config.qkv_bias,), config.moe
    act = tuple(name for name, same in ACTIVATIONS.items() if same == config.hidden_act)
    own: dict[str, tuple[Any, ...]] = {
        "attention_bias": (config.qkv_bias, config.o_bias), "mlp_bias": (config.mlp_bias,), "qkv_bias": qkv, "use_qkv_bias": qkv,
        "add_qkv_bias": qkv, "attention_qkv_bias": qkv, "attention_out_bias": (config.o_bias,),
        **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"), (config.qk_norm,)),
        **dict.fromkeys(("hidden_activation", "activation_function", "mlp_hidden_act"), act),
        **dict.fromkeys(("query_pre_attn_scalar", "rotary_dim", "kv_channels", "attention_head_dim"), (config.head_dim,)),
        "attention_multiplier": (config.head_dim**-0.5,), "dim_model_base": (config.hidden_size,),
        "unpadded_vocab_size": (config.vocab_size,),
        "rotary_emb_base": (config.rope.theta,),
    }  # fmt: skip
    if moe is not None and moe.shared_intermediate_size:
        own["shared_expert_intermediate_size"] = (moe.shared_intermediate_size,)
    return own


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None:
        return True
    if isinstance(value, Mapping):
        return not value
    if isinstance(value, list | tuple):
        return all(_is_neutral(item, neutral) for item in value)
    return any(value == own and isinstance(value, bool) == isinstance(own, bool) for own in neutral)
