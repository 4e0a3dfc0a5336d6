"""`patch` and `unpatch`: replace the forward of a model's modules by minirt's kernels, and restore it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from minirt.errors import InputError, UnsupportedError, shortened
from minirt.modeling.formats import FP8
from minirt.patching.rules import FAMILIES, PARTS, Options, Patched, Record, Rule, rule_of
from minirt.patching.table import Change, PatchTable
from minirt.patching.weights import SCALE, is_changed, quantize, quantize_loaded, restore

# Why modules with weights that have no rule are left alone, by the class. Others: there is no rule.
_LEFT_ALONE = {
    "Linear": "one product with nothing to fuse: nothing to gain",
    "TopKRouter": "the logits of the experts, which transformers can return",
    "RotaryEmbedding": "computes cos and sin once for all layers", "Embedding": "one lookup for each token: nothing to gain",
}  # fmt: skip


def patch(model: nn.Module, fp8: bool = False, keep_original: bool = False, parts: Sequence[str] = PARTS) -> PatchTable:
    """Compute a model of transformers with minirt's kernels, in place: norms, attention's projections and rope, and MLPs.

    Inference only. Parameters stay the same objects with the same names. Weights that one kernel multiplies (q, k and v; gate and
    up) are packed into one storage, of which the parameters become views, so no memory is needed and the `state_dict` does not
    change. On a GPU the Triton kernels run, on a CPU the PyTorch code that defines them.

    Args:
        model: of the families Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE, or with modules of theirs, such as a multimodal model.
        fp8: replace the weights of attention's and the MLPs' products by FP8 weights with a scale for each output. Not those of
            experts, embeddings and the LM head. The parameters become e4m3, with a buffer `weight_scale` beside each.
        keep_original: with `fp8`: keep the original weights, so that `unpatch` can restore them. The table says how many bytes.
        parts: what to replace, of "norms", "attention", "rope" (needs "attention") and "mlp".
    Returns:
        what was replaced, what not, and why.
    Raises:
        InputError: an argument is wrong, the model is patched already, or it is in training mode.
        UnsupportedError: nothing in the model can be replaced; the error says why.
    """
    _check(model, fp8, keep_original, parts)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    options = Options(fp8, keep_original, tuple(parts), frozenset(key for key, count in uses.items() if count > 1))
    changes: dict[str, Change] = {}
    covered: set[int] = set()
    try:
        for name, module in reversed(list(model.named_modules())):  # a decoder layer after its attention and its MLP
            rule = rule_of(module)
            if rule is None:
                continue
            record = rule.record(module, options)
            if isinstance(record, Record):
                _install(module, name, rule, record, options)
                covered.update(id(linear) for product in record.linears for linear in product.values())
                covered.update(map(id, record.covers))
            what = record if isinstance(record, str) else record.how
            changes[name] = Change(name, type(module).__name__, isinstance(record, Record), what)
    except BaseException:
        _restore(model)
        raise
    for name, module in model.named_modules():
        if name not in changes and id(module) not in covered and (why := _why(module)) is not None:
            changes[name] = Change(name, type(module).__name__, False, why)
    if fp8 and model not in (module for module, _ in _patched(model)):
        model._apply = partial(_check_and_apply, model)  # type: ignore[method-assign]
    linears = [linear for module, _ in _patched(model) for linear in _linears(module).values() if SCALE in linear._buffers]
    table = PatchTable(
        tuple(changes[name] for name, module in model.named_modules() if name in changes and id(module) not in covered), fp8,
        sum(linear.weight.nbytes + linear.get_buffer(SCALE).nbytes for linear in linears),
        sum(original.nbytes for _, patched in _patched(model) for original in patched.originals.values() if original is not None),
    )  # fmt: skip
    if not table.replaced:
        expected = f"modules of transformers' {', '.join(FAMILIES.values())}"
        kept = shortened("; ".join(dict.fromkeys(f"{change.kind}: {change.what}" for change in table.kept)), 600)
        raise UnsupportedError("nothing in this model can be replaced", where="model", expected=expected, found=kept)
    return table


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: the original forward functions, and the original weights bit for bit, each in separate storage.

    Raises:
        InputError: the model is not patched, or it was patched with `fp8` and without `keep_original`. Then nothing changes.
    """
    if not isinstance(model, nn.Module) or not any(True for _ in _patched(model)):
        raise InputError("the model is not patched", where="model", found=type(model).__name__)
    for module, patched in _patched(model):
        if not patched.is_called():
            what, hint = "another library has replaced the forward since minirt.patch", "undo that first"
            raise InputError(what, where=patched.name or "model", hint=hint)
        for name, original in patched.originals.items():
            if original is None:
                hint = "patch with keep_original=True, or load the model again"
                raise InputError("the original weights were replaced by FP8 weights", where="model", hint=hint)
            if is_changed(_linears(module).get(name), original):
                what, hint = "changed after minirt.patch, and the original weight did not", "load the model again"
                raise InputError(what, where=f"{patched.name}.{name}.weight", hint=hint)
    _restore(model)


def _check(model: Any, fp8: Any, keep_original: Any, parts: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("not a model", where="model", expected="a torch.nn.Module", found=type(model).__name__)
    for name, value in (("fp8", fp8), ("keep_original", keep_original)):
        if not isinstance(value, bool):
            raise InputError("not a bool", where=name, found=type(value).__name__)
    if keep_original and not fp8:
        raise InputError("has no meaning without fp8: the weights are the original ones", where="keep_original", expected="False")
    if isinstance(parts, str) or not parts or set(parts) - set(PARTS):
        raise InputError("unknown parts", where="parts", expected=f"some of {', '.join(PARTS)}", found=parts)
    if "rope" in parts and "attention" not in parts:
        raise InputError("'rope' needs 'attention'", where="parts", found=parts)
    if any(True for _ in _patched(model)):
        raise InputError("the model is patched already", where="model", hint="call minirt.unpatch(model) first")
    if model.training:
        what, hint = "the model is in training mode, and the kernels have no backward", "call model.eval()"
        raise InputError(what, where="model.training", expected="False", found="True", hint=hint)


def _why(module: nn.Module) -> str | None:
    """Why a module without a rule is left alone; None: it has nothing to replace."""
    kind = type(module).__name__
    known = next((why for ending, why in _LEFT_ALONE.items() if kind.endswith(ending)), None)
    return known or (f"no rule for {kind}" if module._parameters else None)


def _patched(model: nn.Module) -> Iterator[tuple[nn.Module, Patched]]:
    for module in model.modules():
        if isinstance(patched := vars(module).get("_minirt"), Patched):
            yield module, patched


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    """The linears that a patched module has now."""
    return {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _install(module: Any, name: str, rule: Rule, record: Record, options: Options) -> None:
    """Replace a module's forward; with FP8 weights also what casts and loads them."""
    patched = Patched(module, name, options)
    # Functions with the module as an argument can be pickled, and copied with the module. Bound methods cannot.
    module._minirt, module.forward = patched, partial(rule.forward, module)
    if options.fp8 and record.linears:
        for product in record.linears:
            for linear_name, linear in product.items():
                original = quantize(linear)
                patched.originals[linear_name] = original if options.keep_original else None
        module._apply = partial(_check_and_apply, module)
        module.register_load_state_dict_pre_hook(_before_load)
    patched.use(record)
    patched.renew()


def _restore(model: nn.Module) -> None:
    """Undo `_install` wherever the original weights are still there."""
    if getattr(vars(model).get("_apply"), "func", None) is _check_and_apply:
        del model._apply
    for module, patched in list(_patched(model)):
        if any(original is None for original in patched.originals.values()):
            continue
        for name, linear in _linears(module).items():
            restore(linear, patched.originals.get(name))
        for key, hook in list(module._load_state_dict_pre_hooks.items()):
            if getattr(hook, "hook", None) is _before_load:
                del module._load_state_dict_pre_hooks[key]
        for name in ("_minirt", "forward", "_apply"):
            vars(module).pop(name, None)


def _check_and_apply(self: Any, convert: Any, recurse: bool = True) -> nn.Module:
    """`Module._apply`, which moves and casts parameters: a cast of FP8 weights is refused before any parameter is cast."""
    for module, _ in _patched(self):
        for name, linear in _linears(module).items():
            if linear.weight.dtype == FP8 and convert(linear.weight.new_empty(0)).dtype != FP8:
                raise InputError("FP8 weights cannot be cast", where=f"{name}.weight", hint="cast the model before minirt.patch")
    return type(self)._apply(self, convert, recurse)


def _before_load(module: Any, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    for name, linear in _linears(module).items():
        original = quantize_loaded(f"{prefix}{name}", state_dict, linear.weight.device)
        if original is not None and module._minirt.originals.get(name) is not None:
            module._minirt.originals[name] = original
