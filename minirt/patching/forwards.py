"""The forward functions of patched modules. Each has the arguments and the result of the one that it replaces.

A patched decoder layer calls its attention and its MLP with `norm`, the norm before them. They then return the new residual
stream: the norm is computed with their first product, and the residual is added by the last. `_minirt` has the module's record
(`minirt.patching.rules.Patched`).
"""

from typing import Any

import torch
from torch import Tensor

from minirt.errors import InputError
from minirt.nn import functional
from minirt.patching.weights import HINT, Weights

Norm = tuple[Tensor, float]  # weight, epsilon


def current(module: Any, x: Tensor, whole: bool = True) -> Any:
    """The record of a patched module that is called with x. It is made again if the module has changed since the last call.

    Args:
        whole: False: the decoder layer calls the module, and has checked gradients and autocast for all its submodules.
    Raises:
        InputError: the module is in training mode; the kernels cannot compute what it has become; autocast is on; its input or a
            parameter needs a gradient while the grad mode is on.
    """
    if module.training:
        what, hint = "a patched model is for inference only", "call model.eval()"
        raise InputError(what, where="model.training", expected="False", found="True", hint=hint)
    patched, tracing = module._minirt, torch.compiler.is_compiling()
    if (tracing or not patched.is_current()) and (fault := patched.renew()) is not None:
        if tracing:
            # fullgraph=True shows no other error
            torch._dynamo.graph_break(f"{patched.name}: changed after minirt.patch: {fault}")
        raise InputError(f"changed after minirt.patch: {fault}", where=patched.name or "model", hint=HINT)
    if tracing:
        for modules, name, part, *_ in patched.watched:  # the compiled graph is guarded by what is read here
            if modules[name] is not part:
                raise InputError("was replaced while the model was compiled", where=name)
    if whole and x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        hint = "cast the model instead, such as model.bfloat16(), or unpatch it"
        raise InputError("has no effect on the kernels of a patched model", where="torch.autocast", hint=hint)
    if whole and torch.is_grad_enabled():
        needing = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
        if (name := "hidden_states" if x.requires_grad else next(needing, None)) is not None:
            hint = "call the model under torch.inference_mode() or torch.no_grad(), or unpatch it"
            raise InputError("needs a gradient, and a patched model computes none", where=name, hint=hint)
    return patched.record


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    current(self, hidden_states)
    return functional.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _linear(x: Tensor, weights: Weights, residual: Tensor | None) -> Tensor:
    weight, bias, scale = weights.tensors(x)
    if residual is None:
        return functional.linear(x, weight, bias, scale)
    return functional.linear_residual(x, weight, residual, bias, scale)


def mlp(self: Any, x: Tensor, norm: Norm | None = None) -> Tensor:
    record = current(self, x, norm is None)
    (gate_up, down), (norm_weight, eps) = record.weights, norm or (None, 0.0)
    weight, bias, scale = gate_up.tensors(x)
    h = functional.norm_gate_up(x, norm_weight, eps, weight, record.activation, bias, scale)
    return _linear(h, down, None if norm is None else x)


def attention(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
    cache: Any = None, norm: Norm | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    record = current(self, hidden_states, norm is None)
    qkv, o = record.weights
    shape, (norm_weight, eps) = hidden_states.shape[:-1], norm or (None, 0.0)
    heads = functional.norm_linear(hidden_states, norm_weight, eps, *qkv.tensors(hidden_states))
    parts = heads.split([linear._parameters["weight"].shape[0] for linear in qkv.linears], -1)
    q, k, v = (part.view(*shape, -1, self.head_dim).transpose(1, 2) for part in parts)
    q, k = record.rotate(self, q, k, *position_embeddings)
    cache = kwargs.pop("past_key_values", None) if cache is None else cache
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx, **({"kwargs": kwargs} if record.cache == "cache" else {}))
    attend, kwargs = record.interface(self.config), record.options(self) | kwargs
    out, probabilities = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
    return _linear(out.reshape(*shape, -1), o, None if norm is None else hidden_states), probabilities


def rotate(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding in one kernel."""
    return functional.qk_norm_rope(q, k, cos, sin)


def norm_rotate(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """QK-norm and rotary embedding in one kernel."""
    eps = self.q_norm.variance_epsilon
    if self.k_norm.variance_epsilon != eps:
        other, hint = self.k_norm.variance_epsilon, "unpatch the model, or patch it without the part 'rope'"
        raise InputError("two epsilons", where="k_norm.variance_epsilon", expected=eps, found=other, hint=hint)
    return functional.qk_norm_rope(q, k, cos, sin, self.q_norm.weight, self.k_norm.weight, eps)


def mixture(self: Any, hidden_states: Tensor, norm: Norm | None = None) -> Tensor:
    record, experts = current(self, hidden_states, norm is None), self.experts
    residual = torch.zeros_like(hidden_states) if norm is None else hidden_states
    h = hidden_states if norm is None else functional.rms_norm(hidden_states, *norm)
    logits = self.gate(h.flatten(0, -2))[0].unflatten(0, h.shape[:-1])  # the module itself: transformers records its output
    return functional.mixture_residual(
        h, logits, experts.gate_up_proj, experts.down_proj, residual, self.gate.top_k, self.gate.norm_topk_prob,
        record.activation,
    )


def decoder_layer(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, cache: Any = None,
    use_cache: bool | None = False, position_embeddings: tuple[Tensor, Tensor] | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    record = current(self, hidden_states)
    before, after = self.input_layernorm, self.post_attention_layernorm
    older = kwargs.pop("past_key_values", None)
    kwargs |= {
        record.cache: older if cache is None else cache, "attention_mask": attention_mask, "position_ids": position_ids,
        "use_cache": use_cache, "position_embeddings": position_embeddings,
    }  # fmt: skip
    if record.attention:
        norm = before.weight, before.variance_epsilon
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, norm=norm, **kwargs)
    else:
        hidden_states = hidden_states + self.self_attn(hidden_states=before(hidden_states), **kwargs)[0]
    if record.mlp:
        return self.mlp(hidden_states, norm=(after.weight, after.variance_epsilon))
    return hidden_states + self.mlp(after(hidden_states))
