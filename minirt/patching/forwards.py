"""The forward functions of patched modules. Each has the arguments and the result of the one that it replaces.

A patched decoder layer calls its attention and its MLP with `norm`, the norm before them. They then return the new residual
stream: the norm is computed with their first product, and the residual is added by the last. `_minirt` is the module's record
(`minirt.patching.rules`).
"""

from typing import Any

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.nn import functional

Norm = tuple[Tensor, float]  # weight, epsilon


def check_inference(module: Any, x: Tensor) -> None:
    """Refuse training mode and gradients, for which the kernels have no backward, and autocast.

    Raises:
        InputError: the module is in training mode; autocast is on; its input or a parameter needs a gradient while the grad mode
            is on.
    """
    if module.training:
        what, hint = "a patched model is for inference only", "call model.eval()"
        raise InputError(what, where="model.training", expected="False", found="True", hint=hint)
    if torch.is_autocast_enabled(x.device.type):
        hint = "cast the model instead, such as model.bfloat16(), or unpatch it"
        raise InputError("has no effect on the kernels of a patched model", where="torch.autocast", hint=hint)
    if torch.is_grad_enabled():
        names = ["hidden_states"] if x.requires_grad else [name for name, own in module.named_parameters() if own.requires_grad]
        if names:
            hint = "call the model under torch.inference_mode() or torch.no_grad(), or unpatch it"
            raise InputError("needs a gradient, and a patched model computes none", where=names[0], hint=hint)


def check_weights(module: Any) -> None:
    """Refuse linears or weights that another library has replaced, which would have no effect.

    Raises:
        InputError: a linear or its weight is another object than when the model was patched.
    """
    if torch.compiler.is_exporting():
        return  # an export replaces the parameters by fake ones
    for weights in module._minirt.weights:
        for name, linear, weight in weights.sources:
            # Attributes of modules are slow to get, and this runs for each step.
            if module._modules[name] is not linear or linear._parameters["weight"] is not weight:
                hint = "unpatch the model before another library changes it, then patch it again"
                raise InputError("was replaced after minirt.patch, and would have no effect", where=name, hint=hint)


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    check_inference(self, hidden_states)
    return functional.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def mlp(self: Any, x: Tensor, norm: Norm | None = None) -> Tensor:
    if norm is None:  # else the decoder layer has checked it
        check_inference(self, x)
    check_weights(self)
    own = self._minirt
    weight, eps = norm or (None, 0.0)
    gate_up, down = own.weights
    h = functional.norm_gate_up(x, weight, eps, gate_up.weight, own.activation, gate_up.bias, gate_up.scale)
    if norm is None:
        return functional.linear(h, down.weight, down.bias, down.scale)
    return functional.linear_residual(h, down.weight, x, down.bias, down.scale)


def attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    norm: Norm | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if norm is None:
        check_inference(self, hidden_states)
    check_weights(self)
    own = self._minirt
    weight, eps = norm or (None, 0.0)
    qkv, o = own.weights
    shape = hidden_states.shape[:-1]
    heads = functional.norm_linear(hidden_states, weight, eps, qkv.weight, qkv.bias, qkv.scale)
    q, k, v = heads.view(*shape, -1, self.head_dim).transpose(1, 2).split(own.heads, dim=1)
    q, k = own.rotate(self, q, k, *position_embeddings)
    cache = kwargs.pop("past_key_values", None) if cache is None else cache
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx, **({"kwargs": kwargs} if own.cache == "cache" else {}))
    attend = own.interface(self.config)
    out, probabilities = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **own.options(self), **kwargs)
    out = out.reshape(*shape, -1)
    if norm is None:
        return functional.linear(out, o.weight, o.bias, o.scale), probabilities
    return functional.linear_residual(out, o.weight, hidden_states, o.bias, o.scale), probabilities


def fused_rotate(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """QK-norm, if the model has it, and rotary embedding in one kernel."""
    if not hasattr(self, "q_norm"):
        return functional.qk_norm_rope(q, k, cos, sin)
    return functional.qk_norm_rope(q, k, cos, sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon)


def mixture(self: Any, hidden_states: Tensor, norm: Norm | None = None) -> Tensor:
    if norm is None:
        check_inference(self, hidden_states)
    own, experts = self._minirt, self.experts
    residual = torch.zeros_like(hidden_states) if norm is None else hidden_states
    h = hidden_states if norm is None else functional.rms_norm(hidden_states, *norm)
    logits = self.gate(h.flatten(0, -2))[0].unflatten(0, h.shape[:-1])  # the module itself: transformers records its output
    return functional.mixture_residual(
        h, logits, experts.gate_up_proj, experts.down_proj, residual, self.gate.top_k, self.gate.norm_topk_prob, own.activation
    )


def decoder_layer(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    check_inference(self, hidden_states)
    own = self._minirt
    before, after = self.input_layernorm, self.post_attention_layernorm
    older = kwargs.pop("past_key_values", None)
    kwargs[own.cache] = older if cache is None else cache
    kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
    kwargs["position_embeddings"] = position_embeddings
    if own.attention:
        norm = before.weight, before.variance_epsilon
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, norm=norm, **kwargs)
    else:
        hidden_states = hidden_states + self.self_attn(hidden_states=before(hidden_states), **kwargs)[0]
    if own.mlp:
        return self.mlp(hidden_states, norm=(after.weight, after.variance_epsilon))
    return hidden_states + self.mlp(after(hidden_states))
