"""Statistics of hybrid reward + on-policy distillation: K_DR(n) four ways, kappa, Phi, [VLS]'s diagnostics.

    python ntk.py                           # measures rollouts of the toy model, draws a token heat map
    python ntk.py --vls [RUN_FOLDER ...]    # the learning signal in [VLS]'s training logs, beside your runs

K_DR(n) = <J^n delta_D, J^n delta_R> [M3 eq 9], J^n = dz^n/dtheta as [d_par, V], says whether the teacher's
push at token n helps the reward's (>= 0) or fights it (< 0: a conflict). Four kernels with one signature:
    exact       two vector-Jacobian products per position: the definition
    hutchinson  random signs, 2 vjp + 2 jvp per probe: unbiased, noisy
    local       every parameter's paths inside the position: one forward and backward pass of a doubled batch
    logit       J^T J taken to be 1, so delta_D . delta_R: free
Beside the papers: (1) none says how to compute K_DR: all four ways are ours. (2) `local` leaves out the paths
through keys and values. On toy models its sign is exact's on 93 to 99 % of the tokens, its cos correlates at
.99, but sum |K| is .5 to .9 of exact's, .3 on a real model of 30 layers: use the sign and the cosine only.
(3) Biases, norms and (tied) embeddings count like any weight; frozen parameters never do.

[M3] = arXiv 2609.34849, [VLS] = arXiv 2610.11247. Models come back as they were; `local` wants
a transformers model. Shapes: B rows, L columns, N response positions (the last ones), V vocabulary, d hidden.
"""
import argparse
import csv
import html
import json
import math
import pathlib
import statistics
import textwrap
import time
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import m3

# --- K_DR(n), four ways -------------------------------------------------------------------------------------
def kdr(model, input_ids, attention_mask, delta_D, delta_R, kernel="local", **options):
    """K_DR(n) [M3 eq 9] and cos phi_n [M3 eq 14] -> K [B,N] (squared gradient units), cos [B,N] in [-1, 1].
    input_ids, attention_mask [B,L]: prompts padded on the left, responses the last N columns, padded on the
    right. delta_D, delta_R [B,N,V]: residuals; position n's logits come from column L-N-1+n. Where one is 0,
    so are K and cos. options, cost: see kdr_<kernel>. ValueError: wrong shapes, a model it cannot run on."""
    kernels = {"logit": kdr_logit, "local": kdr_local, "exact": kdr_exact, "hutchinson": kdr_hutchinson}
    if kernel not in kernels:
        raise ValueError(f"--kernel {kernel}: unknown, choose from {', '.join(kernels)}")
    ids, mask, D, R = (tuple(x.shape) for x in (input_ids, attention_mask, delta_D, delta_R))
    if D != R or ids != mask or D[0] != ids[0] or D[1] >= ids[1]:
        raise ValueError(f"want ids and mask [B,L], residuals [B,N,V], N < L; got {ids}, {mask}, {D}, {R}")
    return kernels[kernel](model, input_ids, attention_mask, delta_D.detach(), delta_R.detach(), **options)

def kdr_logit(model, input_ids, attention_mask, delta_D, delta_R):
    """The head's own part of K_DR but for ||h_n||^2 > 0: good for the sign, not for the size. O(BNV) time."""
    return m3.isotropic_kernel(delta_D, delta_R)

def kdr_exact(model, input_ids, attention_mask, delta_D, delta_R, chunk=8):
    """The definition: the parameter gradients J^n delta_D and J^n delta_R of every position, multiplied.
    `chunk` positions of a row share a forward pass and one vmapped backward pass of 2*chunk seeds. Time: 2N
    backward passes a row. Memory: 2*chunk copies of the trainable weights. Wants eager or sdpa attention."""
    dots, before = _gram(delta_D, delta_R), input_ids.shape[1] - delta_D.shape[1]
    terms = torch.zeros_like(dots)
    params = [p for p in model.parameters() if p.requires_grad]  # tied weights once
    with _evaluation(model), sdpa_kernel(SDPBackend.MATH):  # the attention that vmap can differentiate
        for b, live in enumerate(dots[1] * dots[2] > 0):
            for part in live.nonzero()[:, 0].split(chunk) if live.any() else ():  # [c]
                end = before + int(part[-1])  # later columns change nothing
                batch = _batch(input_ids[b:b + 1, :end], attention_mask[b:b + 1, :end], end)
                z = model(**batch).logits[0, before - 1 + part]  # [c,V]
                pulls = torch.cat([(z * delta_D[b, part]).sum(-1), (z * delta_R[b, part]).sum(-1)])  # [2c]
                one_hot = pulls.new_ones(len(pulls)).diag()
                grads = torch.autograd.grad(pulls, params, one_hot, is_grads_batched=True, allow_unused=True)
                for g in grads:
                    if g is not None:  # [2c, *parameter]
                        terms[:, b, part] += _gram(*g.flatten(1).chunk(2))
    return finish(terms, dots)

def kdr_hutchinson(model, input_ids, attention_mask, delta_D, delta_R, probes=16, generator=None, signs=None):
    """Diagonal of J_D^T J_R by random signs: s_n <J^n delta_D^n, sum_m s_m J^m delta_R^m> has mean K_DR(n),
    as E[s_n s_m] = 1{n=m}. On normalised residuals (else big tokens drown small ones), both ways round,
    averaged. signs [P,B,N] of +-1 replace the random ones; a Hadamard matrix of order >= N gives K exactly.
    cos uses estimated norms: rough below some 16 probes. Time per row: P x (2 vjp + 2 jvp). Memory:
    activations of a row, 3 copies of the trainable parameters. Wants eager or sdpa attention."""
    (B, N, _), dots = delta_D.shape, _gram(delta_D, delta_R)
    if signs is None:
        device = getattr(generator, "device", None)
        signs = 1 - 2 * torch.randint(2, (probes, B, N), generator=generator, device=device)
    signs, norms, terms = signs.to(delta_D)[..., None], dots[1:].sqrt(), torch.zeros_like(dots)
    units = [x / norm.clamp_min(1e-37)[..., None] for x, norm in zip((delta_D, delta_R), norms, strict=True)]
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    def logits_of(batch):  # as a function of the weights
        return lambda w: torch.func.functional_call(model, w, kwargs=batch).logits[0, -N - 1:-1].to(delta_D)
    with _evaluation(model), sdpa_kernel(SDPBackend.MATH):
        for b in range(B):
            logits = logits_of(_batch(input_ids[b:b + 1], attention_mask[b:b + 1], N + 1))
            _, pull = torch.func.vjp(logits, params)
            u_D, u_R = units[0][b], units[1][b]  # [N,V]
            for s in signs[:, b]:
                z_D, z_R = (s * torch.func.jvp(logits, (params,), pull(s * u))[1] for u in (u_D, u_R))
                products = (u_D * z_R + u_R * z_D) / 2, u_D * z_D, u_R * z_R  # DR, DD, RR
                terms[:, b] += torch.stack(products).sum(-1) / len(signs)
    return finish(terms * torch.stack([norms[0] * norms[1], dots[1], dots[2]]), dots)

def kdr_local(model, input_ids, attention_mask, delta_D, delta_R):
    """All paths from a parameter to z^n inside position n: cost and conditions under local_terms."""
    head = head_terms(model, delta_D, delta_R, input_ids[:, -delta_D.shape[1] - 1:-1])
    return finish(local_terms(model, input_ids, attention_mask, head), head["dots"].movedim(-1, 0))

def kdr_flat(model, input_ids, attention_mask, real, residuals, kernel="local", chunk=4096, generator=None):
    """kdr() for a training loop: K [T], cos [T] of the T real tokens alone, laid out flat. real [B,N] bool.
    residuals: an iterable of (delta_D, delta_R) [chunk,V] by consecutive chunks of these tokens. `local`
    keeps [chunk,d] of each (head_terms) and runs only rows with a reward signal; others hold [B,N,V]."""
    def spread(parts):  # T flat rows -> [B,N,x], zeros elsewhere
        flat = torch.cat(parts)
        return flat.new_zeros(*real.shape, flat.shape[-1]).masked_scatter_(real[..., None], flat)
    if kernel != "local":
        deltas = [spread(parts) for parts in zip(*residuals, strict=True)]
        options = {"generator": generator} if kernel == "hutchinson" else {}
        return [x[real] for x in kdr(model, input_ids, attention_mask, *deltas, kernel, **options)]
    read = input_ids[:, -real.shape[1] - 1:-1][real].split(chunk)
    parts = [head_terms(model, *pair, tokens) for pair, tokens in zip(residuals, read, strict=True)]
    head = {name: spread([part[name] for part in parts]) for name in parts[0]}
    rows = (head["dots"][..., 1:].prod(-1) > 0).any(1)  # elsewhere K = cos = 0
    K, cos = head["dots"].new_zeros(2, *real.shape)
    if rows.any():
        head = {name: x[rows] for name, x in head.items()}
        terms = local_terms(model, input_ids[rows], attention_mask[rows], head)
        K[rows], cos[rows] = finish(terms, head["dots"].movedim(-1, 0))
    return K[real], cos[real]

def try_kernel(model, kernel):
    """ValueError, one line, where this kernel cannot run on this model: tried on two random positions.
    `local` must also equal exact under the same cut: unforeseen uses of a weight are refused. Give it the
    model as it will be trained, adapters and checkpointing included. Memory: 2 gradients."""
    weight, draw = model.get_output_embeddings().weight, torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (1, 4), generator=draw).to(weight.device)
    delta = torch.randn(1, 2, len(weight), generator=draw).to(weight.device) / len(weight) ** 0.5
    data = ids, torch.ones_like(ids), delta, delta  # K = ||J^n delta||^2, a sum of squares: no share can hide
    options = {"hutchinson": {"probes": 1}, "exact": {"chunk": 1}}.get(kernel, {})
    try:
        K, _ = kdr(model, *data, kernel, **options)
        if kernel == "local":
            with _cut_attention(model.get_decoder(), []):
                want, _ = kdr(model, *data, "exact", chunk=1)
            if not ((K - want).abs() <= (0.01 if weight.dtype.itemsize > 2 else 0.15) * want).all():
                raise ValueError(f"{K.tolist()[0]}, but exact under the same cut gives {want.tolist()[0]}")
    except Exception as error:  # whatever a foreign model raises
        reason = str(error).strip().split("\n")[0][:160]
        if "--kernel" not in reason:
            reason = f"--kernel {kernel} cannot run on {type(model).__name__}, use --kernel logit: {reason}"
        raise ValueError(reason) from error

def finish(terms, dots):
    """K and cos of (DR, DD, RR) [3,B,N]; exactly 0 where a residual is 0. dots: of the residuals alone."""
    live, norm = (dots[1:] > 0).all(0), terms[1].clamp_min(0).sqrt() * terms[2].clamp_min(0).sqrt()
    K = torch.where(live, terms[0], 0.0)
    return K, (K / torch.where(live, norm, 1.0).clamp_min(1e-37)).clamp(-1, 1)

def _wide(x): return x if x.dtype == torch.float64 else x.float()
def _flat(x): return torch.cat([_wide(t.detach()).flatten() for t in ([x] if torch.is_tensor(x) else x)])
def _positions(mask): return (mask.long().cumsum(-1) - 1).clamp_min(0)

def _gram(a, b):  # (a.b, a.a, b.b) over the last dimension, in float32 or better: [..., x] twice -> [3, ...]
    a, b = _wide(a), _wide(b)
    return torch.stack([(a * b).sum(-1), a.square().sum(-1), b.square().sum(-1)])

def _batch(ids, mask, keep):  # a model's arguments; only the last `keep` columns need logits
    return {"input_ids": ids, "attention_mask": mask, "position_ids": _positions(mask), "use_cache": False,
            "logits_to_keep": keep}

@contextmanager
def _evaluation(model):  # no dropout; gradients whatever the caller's mode; flags come back as they were
    training = [module for module in model.modules() if module.training]
    try:
        with torch.enable_grad():
            yield model.eval()
    finally:
        for module in training:
            module.training = True

# --- The local kernel ---------------------------------------------------------------------------------------
# Keys and values are held constant. Then z^n depends on a weight only through position n's own activations,
# and ONE backward pass, seeded at all positions, brings each position's own gradient b to every layer.
#
# A linear layer, out = W a. At one position its gradient is b a^T, so its share of K_DR(n) is
# <b_D a^T, b_R a^T> = (b_D . b_R) ||a||^2. By hand, W of 2 x 2 and two positions:
#               a        b_D       b_R       b_D . b_R   ||a||^2   share
#   position 0  (1, 2)   (1, -1)   (2, 1)        1          5         5   agreement
#   position 1  (0, 3)   (0, 1)    (1, -2)      -2          9       -18   conflict
# and the long way, at position 0: <[[1, 2], [-1, -2]], [[2, 4], [1, 2]]> = 2 + 8 - 1 - 4 = 5.
# A norm, out = w x_hat + bias entry by entry. The gradient of w is b x_hat: share (b_D x_hat) . (b_R x_hat).
#
# Rows stand twice in the batch, 2i seeded with delta_D and 2i+1 with delta_R. So b_D and b_R reach a layer
# together; a hook on its output adds the share to (DR, DD, RR) at once, and nothing is stored.
def linear_share(a, b_D, b_R, names):
    """[3,B,N]: (b_D . b_R) ||a||^2, and b_D . b_R for a bias. a [B,N,in], b [B,N,out]; names: the trained."""
    return _gram(b_D, b_R) * (("weight" in names) * _wide(a).square().sum(-1) + ("bias" in names))

def norm_share(module, x, b_D, b_R, names):
    """[3,B,N] of a norm with input x [B,N,(heads),features]."""
    # Norms differ in how they make x_hat (RMS or variance) and in what scales it (w or 1 + w). All are linear
    # in w, so x_hat is out(w = 1) - out(w = 0) by the module's own code, whatever that is; a bias cancels.
    ones = torch.ones_like(module.weight)
    out_1, out_0 = (torch.func.functional_call(module, {"weight": w}, (x,)) for w in (ones, 0 * ones))
    total = 0.0
    for name in names:
        pair = [_wide(b * (out_1 - out_0) if name == "weight" else b) for b in (b_D, b_R)]
        if x.ndim > 3:  # one weight serves all heads: its gradient is their sum, and only then the product
            pair = [g.flatten(2, -2).sum(2) for g in pair]
        total = total + _gram(*pair)
    return total

def _hook(names, terms, ends):
    """Forward hook: the module will add its share to terms [3,B,N]. ends: what embeddings gave, else None."""
    def forward_hook(module, args, out):
        embeds = isinstance(module, nn.Embedding)
        if not (embeds or out.requires_grad):  # nothing to add, or norm_share's own call
            return None
        if module in ends or (out.shape[0] // 2, out.shape[1]) != terms.shape[1:]:
            raise ValueError(f"{type(module).__name__} does not run once per position: use --kernel logit")
        ends[module] = out.detach().requires_grad_() if embeds else None
        if embeds:  # the backward pass ends here. A copy goes on: CTRL scales its embeddings in place
            return ends[module].clone()
        x = args[0].detach()[::2]  # rows 2i and 2i+1 are the same
        def add(b):  # [2B,N,(heads),features]
            with torch.no_grad():
                if module.weight.ndim == 2:  # Linear, Conv1D, LoRA's A and B
                    terms.add_(linear_share(x, b[::2], b[1::2], names))
                else:
                    terms.add_(norm_share(module, x, b[::2], b[1::2], names))
        out.register_hook(add)
        return None
    return forward_hook

def head_terms(model, delta_D, delta_R, tokens):
    """What `local` needs of the residuals [B,n,V], without their last dimension; O(BndV) time, as the head.
    tokens [B,n]: each position's INPUT token (column L-N-1+n). By chunks of positions, results may be joined
    along n. -> dict: grad_D, grad_R [B,n,d] at the head's input; dots [B,n,3] = D.R, D.D, R.R; token [B,n,2],
    the residuals at the input token, for tied embeddings."""
    weight, at = _parts(model)[1].weight.detach(), tokens[..., None]
    return {"grad_D": delta_D.to(weight.dtype) @ weight, "grad_R": delta_R.to(weight.dtype) @ weight,
            "dots": _gram(delta_D, delta_R).movedim(0, -1),
            "token": torch.cat([_wide(delta_D.gather(-1, at)), _wide(delta_R.gather(-1, at))], -1)}

def local_terms(model, input_ids, attention_mask, of_head):
    """<J^n d_D, J^n d_R>, ||J^n d_D||^2, ||J^n d_R||^2 as [3,B,N], J^n cut to its paths inside the position.
    To let a position's own key and value through was tried: right, dearer, no nearer to exact. of_head: see
    head_terms. Time: 1 forward pass of the distinct prompts, 1 forward and 1 activation-only backward pass of
    2B rows x N columns. Memory: those activations. ValueError unless attention goes through transformers'
    interface (no soft cap, no sinks) and what is trained sits in Linear, Conv1D, Embedding or norms."""
    (backbone, head, embedding), N = _parts(model), of_head["dots"].shape[1]
    modules, dots = _local_modules(model, head, embedding), _wide(of_head["dots"]).movedim(-1, 0)  # [3,B,N]
    inputs = [x[:, :-1].long() for x in (input_ids, attention_mask, _positions(attention_mask))]
    terms, ends, layers = torch.zeros_like(dots), {}, []
    with _evaluation(model), ExitStack() as stack:
        cache = _read_prompts(backbone, *(x[:, :-N] for x in inputs))
        for module, names in modules.items():
            stack.enter_context(module.register_forward_hook(_hook(names, terms, ends)))
        stack.enter_context(_cut_attention(backbone, layers))
        ids, mask, positions = (x.repeat_interleave(2, 0) for x in inputs)
        h = _run(backbone, cache, ids[:, -N:], mask, positions[:, -N:])  # [2B,N,d]
        if len(layers) < model.config.num_hidden_layers:
            raise ValueError(f"{type(model).__name__}: only {len(layers)} of its layers use transformers' "
                             "attention interface, the others cannot be cut: use --kernel logit")
        ends = {module: end for module, end in ends.items() if end is not None}
        seeds = torch.stack([of_head["grad_D"], of_head["grad_R"]], 1).flatten(0, 1).to(h)
        b = dict(zip(ends, torch.autograd.grad(h, list(ends.values()), seeds), strict=True))  # runs all hooks
    h, names = _wide(h.detach()[::2]), [name for name, p in head.named_parameters() if p.requires_grad]
    terms += dots * (("weight" in names) * h.square().sum(-1) + ("bias" in names))  # linear_share, b = delta
    terms += sum(_gram(g[::2], g[1::2]) for module, g in b.items() if "weight" in modules[module])
    if "weight" in names and head.weight is embedding.weight:
        # Tied: the gradient is delta h^T + e_token b^T; its square has cross terms delta[token] (h . b).
        at_D, at_R = of_head["token"].unbind(-1)
        hb_D, hb_R = ((h * _wide(b[embedding][i::2])).sum(-1) for i in (0, 1))
        terms += torch.stack([at_D * hb_R + at_R * hb_D, 2 * at_D * hb_D, 2 * at_R * hb_R])
    return terms

def _run(backbone, cache, ids, mask, positions):  # -> hidden states
    return backbone(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True,
                    **{m3.cache_name(backbone): cache})[0]

def _read_prompts(backbone, *columns):
    """Cache of these columns of ids, mask and positions [B,P], two copies a row; equal rows run once."""
    from transformers import DynamicCache
    cache = DynamicCache(config=backbone.config)
    if columns[0].shape[1] > 0:
        rows, which = torch.cat(columns, 1).unique(dim=0, return_inverse=True)  # [U,3P], [B]
        with torch.no_grad():
            _run(backbone, cache, *rows.chunk(3, 1))
        cache.batch_select_indices(which.repeat_interleave(2))
    return cache

def _parts(model):
    """Backbone (ids -> hidden states), output head, input embedding; ValueError unless logits = head(h)."""
    head, embedding = (getattr(model, f"get_{x}_embeddings", lambda: None)() for x in ("output", "input"))
    bent = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    if type(head) is not nn.Linear or type(embedding) is not nn.Embedding or any(
            getattr(model.config, name, None) not in (None, 1) for name in bent):
        raise ValueError(f"{type(model).__name__}: logits are no linear head's: use --kernel logit")
    return model.get_decoder(), head, embedding

def _local_modules(model, head, embedding):
    """{module to hook: names of its own trainable parameters}; ValueError for a parameter without a rule."""
    modules, owner = {embedding: []}, {}
    for path, module in model.named_modules():
        trained = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        known = isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__ == "Conv1D"
        for name, p in trained.items():
            shared = owner.setdefault(p, module) is not module and {owner[p], module} != {head, embedding}
            if name not in ("weight", "bias") or not (known or p.ndim == 1) or shared:
                raise ValueError(f"no local rule for parameter {path}.{name}: use --kernel logit")
        if trained and module is not head:
            modules[module] = list(trained)
    return modules

@contextmanager
def _cut_attention(backbone, layers):
    """Within: keys and values are constants. `layers` collects the attention layers that run."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
    def attend(module, query, key, value, attention_mask, **kwargs):
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise ValueError(f"{type(module).__name__}: attention with cap, sinks, bias: use --kernel logit")
        layers.append(module)
        return sdpa_attention_forward(module, query, key.detach(), value.detach(), attention_mask, **kwargs)
    before, backbone.config._attn_implementation = backbone.config._attn_implementation, "ntk_cut"
    AttentionInterface.register("ntk_cut", attend)
    AttentionMaskInterface.register("ntk_cut", sdpa_mask)
    try:
        yield
    finally:
        backbone.config._attn_implementation = before
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("ntk_cut")

# --- Batch statistics of [M3] -------------------------------------------------------------------------------
def gradient_geometry(model, logits, seed_D, seed_R):
    """m3.geometry() of g_D = J seed_D and g_R = J seed_R; logits, seeds [B,N,V]; graph and `.grad` stay as
    they are. Time: 2 backward passes. Memory: 2 copies of the trainable parameters."""
    params = [p for p in model.parameters() if p.requires_grad]
    g_D, g_R = (torch.autograd.grad(logits, params, seed, retain_graph=True, allow_unused=True)
                for seed in (seed_D, seed_R))
    return m3.geometry(g_R, g_D)

def distillation_hurt(phi, kappa, alpha):
    """True if a small naive Hybrid step raises L_D: phi < -alpha/((1-alpha) kappa) [M3 3.4], without
    division. phi, kappa: as geometry() gives them; None, where there is no reward gradient, hurts nothing."""
    return bool(phi) and alpha + (1 - alpha) * kappa * phi < 0

def conflict_share(K, cos, mask, rewarded, deadband=1e-3):
    """C_NTK -> dict of shares in [0, 1]. K, cos and the masks: of one shape, mask: the real tokens.
    Over all of them, conflict: K < 0, and conflict_deadband: cos < -deadband; 0 without a token. Zero
    residuals (A = 0, clipped) have K = 0: no conflict, though counted below the line. Over those in
    `rewarded` (A != 0) alone, conflict_rewarded: K < 0; None if there are none."""
    mask = mask.bool()
    total, paid = max(int(mask.sum()), 1), mask & rewarded.bool()
    return {"conflict": int((K < 0)[mask].sum()) / total,
            "conflict_deadband": int((cos < -deadband)[mask].sum()) / total,
            "conflict_rewarded": int((K < 0)[paid].sum()) / int(paid.sum()) if paid.any() else None}

def gradient_folding(grads):
    """gamma = 1 - ||sum g_i||^2 / (G sum ||g_i||^2) [M3 eq 17]: 0 if all G responses pull alike (or not at
    all), 1 if they cancel. grads: one per response of a group, a tensor or a list of them, each the plain sum
    over the response's tokens, no factor 1/N_i [Def. 2]."""
    grads = [_flat(g) for g in grads]
    below = len(grads) * sum(float(g @ g) for g in grads)
    return 1 - float(sum(grads).square().sum()) / below if below > 0 else 0.0

def probe_verdict(kappa_mean, conflict):
    """Decision rule [M3 Remark 4] after a probe of naive Hybrid -> (method, sentence). conflict: C_NTK in
    0..1. kappa_mean: over the steps with a reward gradient; ValueError where there was none (None, NaN)."""
    if None in (kappa_mean, conflict) or math.isnan(kappa_mean + conflict):
        raise ValueError(f"probe: mean kappa {kappa_mean} and conflict {conflict} give no verdict")
    rules = [(kappa_mean > 5000, "m3-select", "kappa > 5000: admit the teacher only where it does not fight"),
             (conflict > 0.5, "m3-select", "over half of the tokens conflict; if that lasts, gate hard"),
             (kappa_mean > 1000, "m3-soft", "1000 < kappa <= 5000: a soft gate with beta about 1"),
             (True, "hybrid", "kappa <= 1000: plain Hybrid with alpha about 0.5 suffices")]
    _, method, why = next(rule for rule in rules if rule[0])
    return method, (f"kappa {kappa_mean:.4g}, conflict {conflict:.0%} -> {method} ({why}). Caveat: kappa "
                    "depends on the divergence's lambda, the reduction and LoRA's scaling; bounds as in M3.")

# --- Diagnostics of [VLS] -----------------------------------------------------------------------------------
def learning_signal(grad_norm, loss):
    """mu = G^2/(2L), the rate at which gradient flow lowers a loss L. G: the norm BEFORE clipping. NaN where
    one is None, and where L is not above 0 (a top-k loss may be)."""
    if grad_norm is None or loss is None or not loss > 0:
        return math.nan
    return grad_norm ** 2 / (2 * loss)

def signal_drop(losses, grad_norms, split):
    """How far mu falls while the loss stays [VLS Table E.3], of one run's steps 1, 2, ... -> dict of floats.
    before, after: median mu of steps 1..split and split+1..split+30; drop = before/after; remaining: L/L_1 at
    the split, a centred 9-step rolling median; last50: median mu of the last 50 steps. Steps without a mu do
    not count; NaN where none is left."""
    mu = [learning_signal(G, L) for G, L in zip(grad_norms, losses, strict=True)]
    before, after = _middle(mu[:split]), _middle(mu[split:split + 30])
    remaining = _middle(losses[max(split - 5, 0):split + 4]) / losses[0]
    return {"before": before, "after": after, "drop": before / after if after else math.nan,
            "remaining": remaining, "last50": _middle(mu[-50:])}

def _middle(values):
    known = [x for x in values if x is not None and not math.isnan(x)]
    return statistics.median(known) if known else math.nan

def occupancy(g0, g1, h0, h1):
    """Cross-fitted alpha = <h,g>/||g||^2 [VLS E.1] from two folds of each prompt's responses -> g2, X, alpha.
    g: loss gradients, responses held fixed; h: likelihood-ratio gradients whose baseline is the OTHER fold's;
    each a tensor or a list. g2 = <g0,g1> is unbiased, so it may be <= 0: never clip it. At 0 alpha is NaN."""
    g0, g1, h0, h1 = map(_flat, (g0, g1, h0, h1))
    g2, X = float(g0 @ g1), float(h0 @ g1 + h1 @ g0) / 2
    return {"g2": g2, "X": X, "alpha": X / g2 if g2 else math.nan}

def occupancy_step(student, teacher, batch, params, settings, group_size, add_up, **memory):
    """occupancy() of one batch, keys occupancy_*; the folds are the even and the odd responses of every group. add_up
    sums tensors over processes. Cost: 4 backward and 2 forward passes. memory: see m3.backward."""
    fold = torch.arange(len(batch.tokens), device=batch.tokens.device) % group_size % 2  # [B]
    whole_over_fold = group_size / (group_size - group_size // 2), group_size / (group_size // 2)
    largest = (settings.tau or math.inf) * settings.distill_scale
    loss = batch.weights.new_zeros(len(fold))  # L of each response

    def by_fold(residual, row):
        return [residual * (whole_over_fold[k] * (fold[row] == k))[:, None] for k in (0, 1)]

    def seeds_g(signals):
        loss.index_add_(0, signals.row, signals.weights * signals.divergence.clamp(max=largest))
        return dict(zip(("g0", "g1"), by_fold(signals.loss_gradient, signals.row)))

    def seeds_h(signals):
        return dict(zip(("h0", "h1"), by_fold(signals.delta_R, signals.row)))

    gradients = m3.backward(student, teacher, batch, seeds_g, params, settings, **memory)
    L = loss.view(-1, group_size)  # [P, G]
    baseline = torch.stack([L[:, 1::2].mean(1), L[:, ::2].mean(1)], 1)[:, fold[:group_size]]  # the OTHER fold's mean
    # What moving the visited prefixes does to the loss: (L - baseline) grad log pi, a reward loss with A = baseline - L.
    moved = batch._replace(advantages=(baseline - L).flatten(), weights=batch.mask.float())
    gradients |= m3.backward(student, teacher, moved, seeds_h, params, settings, **memory)
    for tensors in gradients.values():
        add_up(tensors)
    return {f"occupancy_{k}": v for k, v in occupancy(*(gradients[k] for k in ("g0", "g1", "h0", "h1"))).items()}

def linear_cka(X, Y):
    """||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of X [n,d], Y [n,e], centred over n prompts; in [0, 1].
    Rotation and scale of a side change nothing; 0 if one does not vary. In float64; O(n^2 d) time."""
    X, Y = (x @ x.T for x in (x.double() - x.double().mean(0) for x in (X, Y)))
    below = float(X.norm() * Y.norm())
    return float((X * Y).sum()) / below if below else 0.0  # tr(XX^T YY^T) = ||Y^T X||_F^2

def parameter_change(model, start_state):
    """d_par = ||theta_t - theta_0|| / ||theta_0|| [VLS] over ALL parameters, in float32, tied weights once.
    start_state: {name: tensor}, CLONED at the start (a state_dict follows the model). KeyError: not all."""
    change = size = 0.0
    for name, p in model.named_parameters():
        start = start_state[name].to(p.device).float()
        change += float((p.detach().float() - start).square().sum())
        size += float(start.square().sum())
    return (change / size) ** 0.5

@torch.no_grad()
def stall(start, end, prompts, losses):
    """What [VLS] tabulates of a run: loss reductions 1 - L/L_1 at the smallest and at the last loss, decay
    rate gamma = log(L_1/L_T)/2(T-1) per step, d_par (None where weights are rounded to 16 bits), and of every
    hidden state, the embedding's output first, linear CKA on prompts: lists of ids (mean over tokens)."""
    def read(model):  # -> hidden states [n,d]
        options = {"output_hidden_states": True, "use_cache": False}
        rows = []
        for prompt in prompts:
            out = model.base_model(input_ids=torch.tensor([prompt], device=model.device), **options)
            rows.append([h[0].double().mean(0) for h in out.hidden_states])
        return [torch.stack(layer) for layer in zip(*rows, strict=True)]
    state = {name.replace(".base.", "."): p for name, p in start.state_dict().items()}  # no adapters
    cka = [linear_cka(X, Y) for X, Y in zip(read(start), read(end), strict=True)]
    first, last = losses[0], losses[-1]
    gamma = math.log(first / last) / (2 * max(len(losses) - 1, 1)) if min(first, last) > 0 else None
    return {"loss_reduction_max": 1 - min(losses) / first if first else None,
            "loss_reduction_final": 1 - last / first if first else None,
            "gamma": gamma, "cka": cka, "cka_min": min(cka),
            "d_par": parameter_change(end, state) if end.dtype.itemsize > 2 else None}

# --- python ntk.py --vls ------------------------------------------------------------------------------------
def read_curves(folders):
    """{name: {split, training: (loss, gradient norm) of T steps, occupancy: (g2, X)}}: [VLS]'s, yours."""
    tables = {"training": ("opd_loss", "grad_norm_preclip"), "occupancy": ("g2_crossfit", "X_dot")}
    curves = {}
    for task, split in (("math", 30), ("code", 15)):
        for table, names in tables.items():
            path = pathlib.Path(__file__).parent / "assets" / "vls" / f"{task}_{table}.csv"
            for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
                curve = curves.setdefault(row["teacher"], {"split": split, "training": [], "occupancy": []})
                curve[table].append([float(row[name]) if row[name] else None for name in names])
    for folder in map(pathlib.Path, folders):
        if json.loads((folder / "config.json").read_text(encoding="utf-8"))["method"] != "opd":
            raise ValueError(f"{folder} is no run of --method opd: its gradient norm has other parts")
        lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1])
        lines = [line for line in lines if line["step"] > 0]
        pairs = [(line.get("occupancy_g2"), line.get("occupancy_X")) for line in lines]
        training = [(line["loss_D"], line["grad_norm"]) for line in lines]
        occupancy = [pair for pair in pairs if pair[0]]
        curves[str(folder)] = {"split": 30, "training": training, "occupancy": occupancy}
    return curves

def show_curves(curves, out):
    """The table [VLS E.3] of these runs, and OUT/vls.png."""
    from matplotlib.figure import Figure
    figure, rows = Figure(figsize=(9, 4.6), layout="constrained"), []
    axes = figure.subplots(1, 2)
    for name, curve in curves.items():
        losses, norms = zip(*curve["training"], strict=True)
        drop = signal_drop(losses, norms, curve["split"])
        falls = sum(1 + X / g2 > 0 for g2, X in curve["occupancy"])
        rows.append([name, curve["split"], *drop.values(), f"{falls} of {len(curve['occupancy'])}"])
        mu = [learning_signal(G, L) for G, L in zip(norms, losses, strict=True)]
        for axis, values in zip(axes, (mu, [L and L / losses[0] for L in losses]), strict=True):
            smooth = [_middle(values[max(i - 4, 0):i + 5]) for i in range(len(values))]  # over 9 steps
            axis.plot(range(1, len(smooth) + 1), smooth, label=pathlib.Path(name).name, linewidth=1.8)
    for axis, title in zip(axes, ("learning signal mu", "remaining loss L/L_1"), strict=True):
        axis.set(yscale="log")
        axis.set_title(f"{title}, by step", fontsize=14)
        axis.tick_params(labelsize=12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=12)
    figure.savefig(out / "vls.png", dpi=110)
    print_table("mu = G^2/(2L) before and after the split; 1 + X/g^2 > 0: checkpoints where the loss falls",
                ["run", "split", *drop, "1 + X/g^2 > 0"], rows)

# --- python ntk.py ------------------------------------------------------------------------------------------
class Rollouts(NamedTuple):
    """B responses, and who reads them."""
    student: nn.Module
    teacher: nn.Module
    temperature: float
    problems: list  # [B] with prompt_ids, teacher_ids, gold_ids
    tokens: torch.Tensor  # [B,N], and so is mask
    mask: torch.Tensor
    A: torch.Tensor  # [B], advantages: of a mixed group, above 0 for the right responses

    def rows(self, rows):
        parts = {name: getattr(self, name)[rows] for name in ("tokens", "mask", "A")}
        return self._replace(problems=[self.problems[b] for b in rows], **parts)

    def logits(self, model, prompt="prompt_ids"):  # -> [B,N,V]
        ids, attention, positions = m3.join([row[prompt] for row in self.problems], self.tokens, self.mask)
        z = model(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False).logits
        return z[:, -self.tokens.shape[1] - 1:-1].float() / self.temperature

    def residuals(self, z, kind):  # -> delta_D of this divergence, delta_R: [B,N,V]
        with torch.no_grad():
            delta_D = m3.distill_residual(z, self.logits(self.teacher, "teacher_ids"), kind)
            return [self.mask[..., None] * x for x in (delta_D, m3.reward_residual(z, self.tokens, self.A))]

    def gradients(self, weights):  # -> g_D of eq 1 (jsd), g_R of eq 2; weights [B,N] of the tokens
        z, params = self.logits(self.student), list(self.student.parameters())
        seeds = [weights[..., None] * x for x in self.residuals(z.detach(), "jsd")]
        return [torch.autograd.grad(z, params, x, retain_graph=True, materialize_grads=True) for x in seeds]

    def kernel_input(self):  # -> kdr()'s arguments, with eq 9's delta_D = p_S - p_T
        ids, attention, _ = m3.join([row["prompt_ids"] for row in self.problems], self.tokens, self.mask)
        with torch.no_grad():
            return [self.student, ids, attention, *self.residuals(self.logits(self.student), "fkl")]

def roll_out(flags, checkpoint):
    """Sample and grade one batch, as train.py does with these flags -> Rollouts, tokenizer."""
    import train
    with train.or_fail(f"--device {flags.device} cannot be used"):
        device = torch.empty(0, device=flags.device).device
    world = train.load(flags, device)
    tokenizer, student, teacher = world.tokenizer, world.base, world.other or world.base
    if checkpoint:
        student = train.load_model(checkpoint, torch.float32, device, "--checkpoint")[0]
    problems = world.problems[:flags.prompts_per_step]
    torch.manual_seed(flags.seed)
    tokens, mask, _ = m3.sample(
        student, [row["prompt_ids"] for row in problems], flags.group_size, flags.max_new_tokens,
        flags.temperature, eos_ids=world.eos_ids, pad_id=tokenizer.pad_token_id)
    for row in problems:
        solution = tokenizer.encode(m3.reference_text(row, "solution"), add_special_tokens=False)
        row["gold_ids"] = [*solution, min(world.eos_ids)]
    problems = [row for row in problems for _ in range(flags.group_size)]
    texts = m3.decode(tokenizer, tokens, mask)
    rewards = [m3.verify(text, row["answer"], row["kind"]) for text, row in zip(texts, problems, strict=True)]
    A = m3.group_advantages(torch.tensor(rewards, device=device), flags.group_size)
    if not A.any():
        train.fail("every group is all right or all wrong: raise --prompts-per-step or --group-size", 1)
    return Rollouts(student, teacher, flags.temperature, problems, tokens, mask, A), tokenizer

def print_table(title, header, rows):
    print(f"\n{title}", flush=True)
    for name, *cells in [header, *rows]:
        print(f"  {name:<24}" + "".join(f"{x:>14.3f}" if isinstance(x, float) else f"{x:>14}" for x in cells))

def clock(call, *args, **options):  # -> seconds, result
    start = time.perf_counter()
    result = call(*args, **options)
    result[0].sum().item()  # waits for a GPU
    return time.perf_counter() - start, result

def compare_kernels(few):
    """1. Every kernel against exact, and its time in training steps of the rows. -> exact's K, cos [b,N]."""
    batch, params = few.kernel_input(), list(few.student.parameters())
    def step():
        return torch.autograd.grad(few.logits(few.student), params, batch[-1], allow_unused=True)
    unit = min(clock(step)[0] for _ in range(3))
    ways = {f"hutchinson, P={P}": {"probes": P} for P in (1, 4, 16)}
    ways = {"logit": {}, "local": {}, **ways, "exact": {}}
    for name in ("logit", "local"):  # warm, as in training
        kdr(*batch, name)
    found = {name: clock(kdr, *batch, name.split(",")[0], **options) for name, options in ways.items()}
    K, cos = found["exact"][1]
    on, rows = K != 0, []
    for name, (seconds, (k, c)) in found.items():
        sign, size = ((k < 0) == (K < 0))[on].float().mean().item(), (k.abs().sum() / K.abs().sum()).item()
        correlation = torch.stack([c[on], cos[on]]).corrcoef()[0, 1].item()
        rows.append([name, sign, correlation, size, seconds, seconds / unit])
    print_table(f"1. Token level: {int(on.sum())} tokens with A != 0; a step on {len(K)} rows: {unit:.3f} s",
                ["kernel", "sign as exact", "corr. of cos", "sum of |K|", "seconds", "x step"], rows)
    return K, cos

def compare_steps(few, K, g_D, g_R):
    """2. One step of each method from the same point, all of one length, so that only directions differ."""
    params, logp, rows = list(few.student.parameters()), {}, []
    home = [p.detach().clone() for p in params]
    with torch.no_grad():
        for name, (a, b) in {"start": (0, 0), "OPD": (1, 0), "GRPO": (0, 1), "Hybrid": (0.5, 0.5)}.items():
            update = [a * d + b * r for d, r in zip(g_D, g_R, strict=True)]
            size = 0.01 / max(m3.geometry(update, update)["norm_R"], 1e-37)
            torch._foreach_copy_(params, [p - size * g for p, g in zip(home, update, strict=True)])
            logp[name] = m3.log_softmax(few.logits(few.student)).gather(-1, few.tokens[..., None])[..., 0]
        torch._foreach_copy_(params, home)
    start, A = logp.pop("start"), few.A[:, None]
    for region, inside in (("conflict", K < 0), ("compatible", K > 0)):
        for sign, side in ((">", A > 0), ("<", A < 0), ("!=", A != 0)):
            changes = [1000 * (after - start)[inside & side].mean().item() for after in logp.values()]
            rows.append([f"{region}, A {sign} 0", int((inside & side).sum()), *changes])
    print_table("2. Token level: 1000 x mean change of log p_S(y), one plain step of length 0.01",
                ["region by exact K_DR", "tokens", *logp], rows)

def compare_responses(batch, group):
    """3. Single responses, two gradients at a time -> mean folding of g_D, and of g_R in mixed groups."""
    phis, folding = {"on-policy, correct": [], "on-policy, wrong": [], "gold prefix, A = 1": []}, ([], [])
    def pull(one, kind):
        g_D, g_R = one.gradients(one.mask.float())  # plain sums over tokens
        phi = m3.geometry(g_R, g_D)["phi"]
        if phi is not None:  # A != 0
            phis[kind].append(phi)
        return g_D, g_R
    for i in range(0, len(batch.A), group):
        rows = [batch.rows([b]) for b in range(i, i + group)]
        pulls = [pull(one, "on-policy, correct" if one.A > 0 else "on-policy, wrong") for one in rows]
        all_D, all_R = zip(*pulls, strict=True)
        folding[0].append(gradient_folding(all_D))
        if batch.A[i]:
            folding[1].append(gradient_folding(all_R))
        gold = batch.tokens.new_tensor([batch.problems[i]["gold_ids"]])
        pull(rows[0]._replace(tokens=gold, mask=gold >= 0, A=batch.A.new_ones(1)), "gold prefix, A = 1")
    rows = [[kind, len(x), statistics.fmean(x), sum(c < 0 for c in x) / len(x)] for kind, x in phis.items()]
    print_table("3. Response level: cos(g_D, g_R) of single responses with A != 0",
                ["", "responses", "mean", "share < 0"], rows)
    return [statistics.fmean(values) for values in folding]

def show_tokens(few, cos, tokenizer, out):
    """4. Heat map of a mixed group's first correct and first wrong response."""
    scale = [("conflict -1", -1), ("-0.5", -0.5), ("weak 0", 0), ("+0.5", 0.5), ("compatible +1", 1)]
    panels = [("cos phi_n:", scale)]
    for right, word in ((1, "correct"), (0, "wrong")):
        b = (few.A > 0).tolist().index(right)
        words = [tokenizer.decode([t]).replace("\n", "\\n") for t in few.tokens[b][few.mask[b]].tolist()]
        title = f"{word} (reward {right}, A = {few.A[b]:+.2f}): {few.problems[b]['prompt']}"
        panels.append((title, list(zip(words, cos[b].tolist(), strict=False))))
    heat_map(out, panels)
    print(f"\n4. {out}/heatmap.html and .png: a correct and a wrong response by the exact kernel's cos phi_n")

def heat_colours(cos):  # -> fill, ink
    full = (30, 90, 200) if cos > 0 else (200, 30, 30)
    fill = [round(243 + abs(cos) * (colour - 243)) for colour in full]
    return "#{:02x}{:02x}{:02x}".format(*fill), "white" if abs(cos) > 0.5 else "black"

def heat_html(tokens):
    """Spans of (text, cos, tooltip): red where cos < 0, a conflict, blue where > 0, pale near 0."""
    spans = []
    for text, cos, tooltip in tokens:
        fill, ink = heat_colours(cos)
        style = f'style="background:{fill};color:{ink}" title="{html.escape(tooltip)}"'
        spans.append(f"<span {style}>{html.escape(text)}</span>")
    return "\n".join(spans)

def heat_map(out, panels):
    """OUT/heatmap.html and OUT/heatmap.png of panels [(title, [(token, cos phi_n), ...]), ...]."""
    from matplotlib.figure import Figure
    page = ['<!DOCTYPE html><meta charset="utf-8">',
            "<style>body{font:15px/2.2 monospace} span{padding:5px 8px}</style>"]
    figure, width, y = Figure(), 90, 0.0  # x in characters, y in lines: fixed-width text cannot overlap
    axis, font = figure.add_axes((0, 0, 1, 1)), {"family": "monospace", "size": 9, "parse_math": False}
    for title, tokens in panels:
        page.append(f"<p>{html.escape(title)}</p>")
        page.append(heat_html([(text, cos, f"{cos:+.3f}") for text, cos in tokens]))
        lines = textwrap.wrap(title, width)
        axis.text(0, y, "\n".join(lines), va="top", **font)
        x, y = 0.0, y + 1.3 * len(lines) + 0.8
        for text, cos in tokens:
            if x + len(text) >= width:
                x, y = 0.0, y + 2
            fill, ink = heat_colours(cos)
            box = {"fc": fill, "ec": "none", "pad": 3}
            axis.text(x + 0.6, y, text, color=ink, va="center", bbox=box, **font)
            x += len(text) + 1.8
        y += 1.8
    axis.set(xlim=(-2, width + 2), ylim=(y - 0.4, -0.8))
    axis.axis("off")
    figure.set_size_inches((width + 4) * 0.0753, (y + 0.4) * 0.16)  # of 9 point characters
    figure.savefig(out / "heatmap.png", dpi=150)
    (out / "heatmap.html").write_text("\n".join(page), encoding="utf-8")

def main(argv=None):
    """Measure one batch of rollouts at token, response and batch level; all weights count, adapters merged.
    train.py's flags for model, teacher, data, rollouts, seed, threads, device and --out work here as well."""
    import train
    parser = argparse.ArgumentParser("ntk.py", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("--checkpoint", default="", help="the student, of a run from --model, which teaches")
    parser.add_argument("--rows-exact", default=16, type=int, help="responses for the kernels [16]")
    parser.add_argument("--vls", nargs="*", metavar="RUN", help="[VLS]'s logs beside runs of yours, no model")
    def refuse(message):
        train.fail(message.replace("argument ", "") + " (see --help)")
    parser.error = refuse
    own, rest = parser.parse_known_args(argv)
    flags = train.parse_flags(["--out", "runs/ntk", "--dtype", "float32", *rest])
    out, group = pathlib.Path(flags.out), flags.group_size
    if own.vls is not None:
        with train.or_fail("--vls wants folders of runs of train.py"):
            curves = read_curves(own.vls)
        out.mkdir(parents=True, exist_ok=True)
        return show_curves(curves, out)
    batch, tokenizer = roll_out(flags, own.checkpoint)
    mixed = [i for i in range(0, len(batch.A), group) if batch.A[i] != 0][:max(1, own.rows_exact // group)]
    few = batch.rows([i + j for i in mixed for j in range(group)])
    g_D, g_R = batch.gradients(m3.token_weights(batch.mask, len(batch.A)))
    K, cos = compare_kernels(few)
    compare_steps(few, K, g_D, g_R)
    folding = compare_responses(batch, group)
    share = conflict_share(*kdr(*batch.kernel_input()), batch.mask, batch.mask & (batch.A != 0)[:, None])
    norm_R, norm_D, kappa, phi = m3.geometry(g_R, g_D).values()
    print(f"""
Batch level: kappa {kappa:.4g}, Phi {phi:.3f}, min-norm alpha {m3.minnorm(norm_R, norm_D, phi or 0.0)[1]:.3f}
  alpha 0.5 hurts distillation: {distillation_hurt(phi, kappa, 0.5)}
  C_NTK (local) over all tokens: {share["conflict"]:.3f}, with dead band {share["conflict_deadband"]:.3f}
  C_NTK (local) over the tokens with A != 0: {share["conflict_rewarded"]:.3f}
  folding, mean of groups: g_D {folding[0]:.3f}, g_R {folding[1]:.3f} (where A != 0)""")
    out.mkdir(parents=True, exist_ok=True)
    show_tokens(few, cos, tokenizer, out)

if __name__ == "__main__":
    main()
