"""Fields of other architectures that would change what a model computes. Every architecture refuses them by name.

A field that nobody reads gives a wrong result without an error: a Llama with `no_rope_layers`, for example, is a SmolLM3. The
table was made from the configuration classes of decoders in transformers, and from fields of other runtimes. It has no fields
of training, of token ids, and of sizes that a decoder reads. A warning lists fields that are in no table and that no code reads.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from minirt.errors import printable, shortened
from minirt.modeling.config import ACTIVATIONS, Fields, ModelConfig, same, shown
from minirt.wording import warn

# What the fields would do → their names, with the value that changes nothing: NAME is false or 0, NAME=true is true or 1. With
# every field, null, an empty list, an empty object, and a list of such values change nothing, and with NAME=null no other value.
# Fields of which an architecture has its own value: `_stated`.
_FIELDS = {
    "another position embedding in some or all layers": """
        no_rope_layer_interval rope_interleave rope_interleaved rotary_emb_interleaved use_dynamic_ntk alibi use_alibi
        learned_pos_emb use_learned_position_embeddings sinusoidal_embeddings d_rel no_rope_layers=true use_rope=true
        use_rotary=true use_rotary_emb=true rotary_pct=1 rope_pct=1 rope_percent=1 rotary_emb_fraction=1
        rope_scaling_factor=1 layer_rope_theta=null rope_local_base_freq=null local_rope_theta=null global_rope_theta=null
        swa_rope_theta=null compress_rope_theta=null rotary_emb_base=null rotary_dim=null
        position_embedding_type=rope|rotary""",
    "other scores of attention": """
        attn_logit_softcapping attn_logit_softcap attention_logit_cap attn_temperature_tuning llama_4_scaling_beta
        log_scaling_alpha use_logn_attn scale_attn_by_inverse_layer_idx qk_clip scale_attn_weights=true
        attention_in_multiplier=1 attention_out_multiplier=1 key_multiplier=1 qk_scale_factor=1 attention_value_scale=1
        query_pre_attn_scalar=null attention_multiplier=null llama_4_scaling=null lambda_std_dev=null clip_qkv=null
        qk_l2_clip_threshold=null""",
    "attention sinks": """
        attention_sinks attention_sink use_attention_sinks use_sinks add_swa_attention_sink_bias
        add_full_attention_sink_bias learnable_sink_init=null""",
    "attention to other tokens": """
        use_bidirectional_attention prefix_lm is_encoder_decoder add_cross_attention index_topk index_topk_blocks
        index_n_heads indexer_n_heads use_sparse_attention num_kv_shared_layers use_cla attention_k_eq_v cla_share_factor=1
        cross_attention_layers=null cross_attention_hidden_size=null attention_chunk_size=null sliding_window_size=null
        attention_window_size=null window_size=null local_attention=null local_attention_window_len=null
        attention_types=null attention_layers=null indexer_types=null compress_rates=null sparse_attention_config=null
        keep_window_size=null""",
    "a gate on the output of attention": """
        attn_output_gate use_attention_gate headwise_attn_output_gate elementwise_attn_output_gate gating""",
    "latent attention (MLA)": """
        kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim use_mla""",
    "layers of other kinds": """
        linear_num_key_heads linear_num_value_heads linear_num_heads linear_conv_kernel_dim mamba_d_state mamba_d_ssm
        mamba_n_heads mamba_num_heads ssm_state_size conv_L_cache lru_width cca_time0 short_conv_kernel_size
        conv_kernel_size hidden_size_per_layer_input laurel_rank ngram_vocab_size_base num_nextn_predict_layers
        attn_layer_period=1 full_attention_interval=1 layer_group_size=1 global_attn_every_n_layers=1 altup_num_inputs=1
        hc_mult=1 hc_count=1 n_recurrent_loops=1 loop_num_passes=1 H_cycles=1 L_cycles=1 hybrid_layer_ids=null
        attn_layer_indices=null full_attn_idxs=null local_layer_ids=null per_layer_config=null block_configs=null
        num_attention_heads_per_layer=null swa_head_dim=null swa_num_attention_heads=null swa_num_key_value_heads=null
        text_config=null layers_block_type=attention|full_attention block_types=attention""",
    "other norms, or norms at other places": """
        norm_bias apply_layernorm_1p zero_centered_gamma use_post_norm use_sandwich_norm post_norm norm_after
        apply_residual_connection_post_layernorm parallel_residual use_parallel_residual parallel_attn
        new_decoder_architecture gated_norm_rank _remove_final_layer_norm rms_norm=true use_rms_norm=true
        do_layer_norm_before=true post_norm_eps=null ngpt_alpha_init=null norm_type=rms|rmsnorm|rms_norm|RMSNorm""",
    "a factor or a bound of activations or logits": """
        scale_embedding scale_embeddings rescale_embeddings mup_enabled use_mup final_logit_softcapping final_logit_softcap
        output_logit_soft_cap logits_soft_cap embedding_multiplier=1 embedding_multiplier_scale=1 embedding_scale=1
        embed_scale=1 scale_emb=1 mup_attn_multiplier=1 mup_embedding_multiplier=1 residual_multiplier=1 mlp_multipliers=1
        logits_scaling=1 logit_scale=1 lm_head_multiplier=1 output_multiplier=1 output_multiplier_scale=1
        logits_mup_width_multiplier=1 full_attn_alpha_factor=1 full_attn_beta_factor=1 mlp_alpha_factor=1 mlp_beta_factor=1
        scale_depth=null dim_model_base=null unpadded_vocab_size=null""",
    "biases": """
        use_bias bias add_bias_linear lm_head_bias decoder_bias no_bias=true""",
    "another MLP": """
        use_double_wide_mlp activation_sparsity_pattern gated_mlp=true swiglu_alpha=1 swiglu_limit=null
        mlp_gate_softcap=null mlp_up_softcap=null intermediate_size_mlp=null""",
    "a mixture of experts of another kind": """
        n_routed_experts moe_num_experts enable_moe_block is_moe n_shared_experts num_shared_experts moe_num_shared_experts
        shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size
        moe_shared_expert_intermediate_size first_k_dense_replace num_dense_layers use_expert_bias
        moe_apply_router_weight_on_input moe_router_logit_softcapping zero_expert_num moe_latent_size moe_layer_interval=1
        routed_scaling_factor=1 moe_routed_scaling_factor=1 router_scaling_factor=1 route_scale=1 n_group=1
        num_expert_group=1 topk_group=1 ffn_config=null interleave_moe_layer_step=null moe_layers=null mlp_layer_types=null
        expert_layer_period=null topk_method=greedy scoring_func=softmax expert_selection_fn=softmax
        moe_router_activation_func=softmax""",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"": (False, 0), "true": (True, 1), "1": (1,), "null": ()}
FOREIGN_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    what: {name: _NEUTRAL.get(value, tuple(value.split("|"))) for name, _, value in (f.partition("=") for f in fields.split())}
    for what, fields in _FIELDS.items()
}


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
    "rms_norm_eps": "layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon rms_norm_epsilon rmsnorm_eps",
    "rope_theta": "rope_base rope_freq_base rotary_base",
    "num_key_value_heads": "num_kv_heads n_kv_heads multi_query_group_num",
}


def refuse_other_names(fields: Fields) -> None:
    """Raise ConfigError if a field that is absent stands in the file under the name of another runtime."""
    ropes = [fields.nested(name).raw for name in ("rope_parameters", "rope_scaling")]
    for name, others in _OTHER_NAMES.items():
        levels = (fields.raw, *ropes) if name == "rope_theta" else (fields.raw,)
        present = sorted(fields.raw.keys() & others.split())
        if present and all(level.get(name) is None for level in levels):
            raise fields.wrong(present[0], "the field has another name here", name, hint=f"rename it to {name}")


def warn_of_unread_fields(fields: Fields) -> None:
    """Warn of fields of a config.json that nobody has read, unless they are known to change nothing.

    `fields`: those of the top level, after an architecture has read them.
    """
    inner = fields.raw.get("text_config")
    levels = {"": fields.raw, "text_config.": inner if isinstance(inner, Mapping) else {}}
    unread = [
        f"{prefix}{name}"
        for prefix, level in levels.items()
        for name, value in level.items()
        if f"{prefix}{name}" not in fields.read
        and value not in (None, [], {}, _GENERATION.get(name))
        and not _HARMLESS.fullmatch(name)
    ]
    if unread:
        names = printable(shortened(", ".join(unread)))
        what = f"fields {names} are" if len(unread) > 1 else f"field {names} is"
        warn(f"{fields.file}: {what} unknown, and ignored: if it changes what the model computes, the output is wrong")


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
                meaning = f"the field means {what}, which model_type {config.model_type!r} does not compute"
                expected = " or ".join(["no field", *dict.fromkeys(map(shown, neutral))])
                raise fields.unsupported(name, meaning, expected, hint="correct model_type if it is wrong")


def _stated(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Fields for which this model has a value of its own, with the values that mean the same.

    Qwen2 has biases on q, k and v and none on o: for `attention_bias`, which is all four, transformers takes either value.
    """
    qkv, moe = (config.qkv_bias,), config.moe
    act = tuple(name for name, same in ACTIVATIONS.items() if same == config.hidden_act)
    fields: dict[str, tuple[Any, ...]] = {
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
        fields["shared_expert_intermediate_size"] = (moe.shared_intermediate_size,)
    return fields


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None:
        return True
    if isinstance(value, Mapping):
        return not value
    if isinstance(value, list | tuple):
        return all(_is_neutral(item, neutral) for item in value)
    return any(same(value, one) for one in neutral)
