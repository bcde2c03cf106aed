"""The statistics of hybrid reward + on-policy distillation: K_DR(n) four ways, kappa and Phi, the [VLS] diagnostics.

    python ntk.py               # measures them on rollouts of the toy model, and draws a token heat map

K_DR(n) = <J^n delta_D, J^n delta_R> [M3 eq 9], J^n = dz^n/dtheta as [d_par, V], says whether the teacher's push at token n
helps (>= 0) or fights (< 0: a conflict) the reward's. Four kernels with one signature; the tests hold them to each other:
    exact       2 vector-Jacobian products per position: the definition
    hutchinson  random signs, 2 vjp + 2 jvp per probe: unbiased, noisy
    local       every parameter's position-local path, streamed: one forward + backward of a doubled batch
    logit       isotropic kernel delta_D . delta_R: free

Beside the papers: (1) none says how to compute K_DR: all four ways are ours. (2) `local` leaves out the paths through keys
and values: on toy models its sign is exact's on 93 to 99 % of the tokens and its cos correlates at .99, but sum |K| is .5
to .9 of it, and .3 on a real model of 30 layers. So take it for the sign and the cosine, not for the size. (3) Biases,
norms, (tied) embeddings count like any weight; frozen parameters never do. [M3] = arXiv 2609.34849, [VLS] = arXiv
2610.11247. Needs torch alone (local: a transformers model); models come back as they were. Shapes: B rows, L columns, N
response positions (the last N columns), P = L-N-1 columns before the first that predicts a response token, V vocabulary.
"""
import inspect, math
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

import m3
from torch.nn.attention import SDPBackend, sdpa_kernel

# ----------------------------------------------------------------------------------------------- K_DR(n), four ways
def kdr(model, input_ids, attention_mask, delta_D, delta_R, kernel="local", **options):
    """K_DR(n) [M3 eq 9] and cos phi_n [M3 eq 14] -> K [B,N] (squared gradient units), cos [B,N] in [-1, 1].
    input_ids, attention_mask [B,L]: prompts padded on the left, responses the last N columns, padded on the right.
    delta_D, delta_R [B,N,V]: residuals; position n's logits come from column L-N-1+n. Where either is 0: K = cos = 0.
    options, cost: see kdr_<kernel>. ValueError: unknown kernel, wrong shapes, a model that `local` cannot cut."""
    kernels = dict(logit=kdr_logit, local=kdr_local, exact=kdr_exact, hutchinson=kdr_hutchinson)
    if kernel not in kernels:
        raise ValueError(f"--kernel {kernel}: unknown, choose from {', '.join(kernels)}")
    ids, mask, D, R = (tuple(x.shape) for x in (input_ids, attention_mask, delta_D, delta_R))
    if not (D == R and ids == mask and D[0] == ids[0] and D[1] < ids[1]):
        raise ValueError(f"want ids and mask [B,L], residuals [B,N,V], N < L; got {ids}, {mask}, {D}, {R}")
    return kernels[kernel](model, input_ids, attention_mask, delta_D.detach(), delta_R.detach(), **options)

def kdr_logit(model, input_ids, attention_mask, delta_D, delta_R):
    """Isotropic kernel J^T J ~ 1: delta_D . delta_R [M3 App. I, AA], the head's own part of K_DR over ||h_n||^2 > 0.
    No model call; O(BNV) time. Good for the sign, not for the size."""
    dots = _gram(delta_D, delta_R)
    return finish(dots, dots)

def kdr_exact(model, input_ids, attention_mask, delta_D, delta_R, chunk=8):
    """The definition: parameter gradients J^n delta_D and J^n delta_R of every position, multiplied.
    `chunk` positions of a row share a forward pass and one vmapped backward of 2*chunk seeds. Time: 2N backward passes
    per row. Memory: 2*chunk copies of the trainable parameters. Wants eager or sdpa attention (math backend)."""
    (B, N, _), L, dots = delta_D.shape, input_ids.shape[1], _gram(delta_D, delta_R)
    params, terms = [p for p in model.parameters() if p.requires_grad], torch.zeros_like(dots)     # tied weights once
    with _evaluation(model), sdpa_kernel(SDPBackend.MATH):
        for b in range(B):
            start = int(attention_mask[b].argmax())                             # neither left padding ...
            for part in filter(len, (dots[1, b] * dots[2, b]).nonzero()[:, 0].split(chunk)):                 # [c]
                end, keep = L - N + int(part[-1]), int(part[-1] - part[0]) + 1  # ... nor later columns change anything
                mask = attention_mask[b:b + 1, start:end]
                z = model(input_ids=input_ids[b:b + 1, start:end], attention_mask=mask, position_ids=_positions(mask),
                          use_cache=False, logits_to_keep=keep).logits[0, part - part[0]]                    # [c,V]
                pair = torch.cat([(z * delta_D[b, part]).sum(-1), (z * delta_R[b, part]).sum(-1)])           # [2c]
                one_hot = pair.new_ones(len(pair)).diag()
                for g in torch.autograd.grad(pair, params, one_hot, is_grads_batched=True, allow_unused=True):
                    if g is not None:                                                               # [2c, *parameter]
                        terms[:, b, part] += _gram(*g.flatten(1).chunk(2))
    return finish(terms, dots)

def kdr_hutchinson(model, input_ids, attention_mask, delta_D, delta_R, probes=16, generator=None, signs=None, rows=1):
    """Diagonal of J_D^T J_R by random signs: E[s_n s_m] = 1{n=m}, so s_n <J^n delta_D^n, sum_m s_m J^m delta_R^m> is
    unbiased for all n at once. On NORMALISED residuals (else big tokens drown small ones), both ways round, averaged.
    signs [P,B,N] of +-1 replace the random ones (a Hadamard matrix of order >= rows*N gives K exactly). `rows` share a
    probe: more is faster on a GPU, but noisier. cos uses estimated norms: rough below some 16 probes. Time: P x (2 vjp
    + 2 jvp). Memory: activations of `rows` rows, 3 copies of trainable parameters. Wants eager or sdpa attention."""
    (B, N, _), dots = delta_D.shape, _gram(delta_D, delta_R)
    if signs is None:
        signs = 1 - 2 * torch.randint(2, (probes, B, N), generator=generator, device=getattr(generator, "device", None))
    signs, size, terms = signs.to(delta_D), dots[1:].sqrt(), torch.zeros_like(dots)
    unit_D, unit_R = (x / s.clamp_min(1e-37)[..., None] for x, s in zip((delta_D, delta_R), size))
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    with _evaluation(model), sdpa_kernel(SDPBackend.MATH):
        for part in torch.arange(B, device=input_ids.device).split(rows):
            u_D, u_R, mask = unit_D[part], unit_R[part], attention_mask[part]
            batch = dict(input_ids=input_ids[part], attention_mask=mask, position_ids=_positions(mask), use_cache=False,
                         logits_to_keep=N + 1)
            logits = lambda w: torch.func.functional_call(model, w, kwargs=batch).logits[:, :-1].to(u_D)  # [rows,N,V]
            pull = torch.func.vjp(logits, params)[1]
            for s in signs[:, part, :, None]:
                z_D, z_R = (s * torch.func.jvp(logits, (params,), pull(s * u))[1] for u in (u_D, u_R))
                DR = (u_D * z_R + u_R * z_D) / 2
                terms[:, part] += torch.stack([x.sum(-1) for x in (DR, u_D * z_D, u_R * z_R)]) / len(signs)
    return finish(terms * torch.stack([size[0] * size[1], dots[1], dots[2]]), dots)

def kdr_local(model, input_ids, attention_mask, delta_D, delta_R):
    """All paths from a parameter to z^n that stay inside position n: cost and conditions under local_terms."""
    N, terms = delta_D.shape[1], head_terms(model, delta_D, delta_R, input_ids[:, -delta_D.shape[1] - 1:-1])
    return finish(local_terms(model, input_ids, attention_mask, N, terms), terms["dots"].movedim(-1, 0))

def _wide(x): return x if x.dtype == torch.float64 else x.float()
def _flat(x): return torch.cat([_wide(t.detach()).flatten() for t in ([x] if torch.is_tensor(x) else x)])
def _dot(a, b): return 0.0 if a is None or b is None else float(_wide(a).flatten() @ _wide(b).flatten())
def _positions(mask): return (mask.long().cumsum(-1) - 1).clamp_min(0)

def _gram(a, b):
    """(a.b, a.a, b.b) over the last dimension, in float32 or better: [..., x] twice -> [3, ...]."""
    a, b = _wide(a), _wide(b)
    return torch.stack([(a * b).sum(-1), a.square().sum(-1), b.square().sum(-1)])

def finish(terms, dots):
    """K and cos from (DR, DD, RR) [3,B,N]; exactly 0 where a residual is 0 (dots: the residuals' own products)."""
    live, norm = (dots[1] > 0) & (dots[2] > 0), terms[1].clamp_min(0).sqrt() * terms[2].clamp_min(0).sqrt()
    K = torch.where(live, terms[0], 0.0)
    return K, (K / torch.where(live, norm, 1.0).clamp_min(1e-37)).clamp(-1, 1)

@contextmanager
def _evaluation(model):
    """No dropout; gradients whatever the caller's mode; training flags come back as they were."""
    training = [m for m in model.modules() if m.training]
    with torch.enable_grad(), ExitStack() as stack:
        stack.callback(lambda: [setattr(m, "training", True) for m in training])
        yield model.eval()

def kdr_flat(model, input_ids, attention_mask, real, residuals, kernel, chunk, generator=None):
    """kdr() for a training loop: K and cos of the T tokens of real [B,N] alone, laid out flat -> [T], [T].
    residuals: (delta_D, delta_R) [chunk,V] by consecutive chunks of these T tokens. Of each, `local` keeps only [chunk,d]
    (head_terms), and it runs only the rows with a reward signal; the others put them together to [B,N,V]."""
    n, options = real.shape[1], dict(generator=generator) if kernel == "hutchinson" else {}
    spread = lambda flat: flat.new_zeros(*real.shape, flat.shape[-1]).masked_scatter_(real[..., None], flat)  # [B,N,x]
    if kernel == "local":
        read = input_ids[:, -n - 1:-1][real].split(chunk)
        parts = [head_terms(model, delta_D, delta_R, tokens) for (delta_D, delta_R), tokens in zip(residuals, read)]
        terms = {name: spread(torch.cat([part[name] for part in parts])) for name in parts[0]}
        rows = (terms["dots"][..., 1:].prod(-1) > 0).any(1)                                         # elsewhere K = cos = 0
        terms = {name: x[rows] for name, x in terms.items()}
        K, cos = terms["dots"].new_zeros(2, *real.shape)
        if rows.any():
            run = local_terms(model, input_ids[rows], attention_mask[rows], n, terms)
            K[rows], cos[rows] = finish(run, terms["dots"].movedim(-1, 0))
    else:
        K, cos = kdr(model, input_ids, attention_mask, *(spread(torch.cat(x)) for x in zip(*residuals)), kernel, **options)
    return K[real], cos[real]

# ----------------------------------------------------------------------------------------------- the local kernel
def head_terms(model, delta_D, delta_R, tokens):
    """What `local` needs of the residuals [B,n,V], without their last dimension; O(BndV) time, as the head itself.
    tokens [B,n]: each position's INPUT token (column L-N-1+n). A training loop may call this by chunks of positions and
    join the results along n. -> dict(grad_D, grad_R [B,n,d] at the head's input; dots [B,n,3] = D.R, D.D, R.R;
    token [B,n,2], the residuals at the input token, for tied embeddings)."""
    W, at = _parts(model)[1].weight.detach(), tokens[..., None]
    return dict(grad_D=delta_D.to(W.dtype) @ W, grad_R=delta_R.to(W.dtype) @ W, dots=_gram(delta_D, delta_R).movedim(0, -1),
                token=torch.cat([_wide(x.gather(-1, at)) for x in (delta_D, delta_R)], -1))

def local_terms(model, input_ids, attention_mask, N, head_terms):
    """<J^n d_D, J^n d_R>, ||J^n d_D||^2, ||J^n d_R||^2 as [3,B,N], with J^n cut to its position-local paths.
    Keys and values are held constant, so z^n depends on a weight only through n's own activations: ONE backward has all
    positions' gradients, and a linear layer's share is (b_D . b_R) ||a||^2 (a input, b output gradient). Rows stand twice,
    2i seeded with delta_D, 2i+1 with delta_R; hooks add up, nothing is stored. To let a position's own key and value
    through was tried: right, dearer, no nearer to exact. Rows with the same prompt columns share them: run once.
    Time: 1 forward of the distinct prompts without gradients, 1 forward + 1 activation-only backward of 2B rows x N columns.
    Memory: those activations. ValueError unless attention goes through transformers' attention interface (no soft cap, no
    sinks) and trainable parameters sit in Linear, Conv1D, Embedding or norms."""
    from transformers import DynamicCache
    (backbone, head, embedding), P = _parts(model), input_ids.shape[1] - N - 1
    modules = _local_modules(model, head, embedding)
    weight, bias = head.weight.requires_grad, head.bias is not None and head.bias.requires_grad
    inputs = [x[:, :-1] for x in (input_ids, attention_mask, _positions(attention_mask))]
    cache = DynamicCache(config=backbone.config)
    keyword = "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"
    run = lambda ids, mask, positions: backbone(input_ids=ids, attention_mask=mask, position_ids=positions,
                                                use_cache=True, **{keyword: cache})[0]
    dots, outs, calls = _wide(head_terms["dots"]).movedim(-1, 0), {}, []                                      # [3,B,N]
    terms = torch.zeros_like(dots)
    with _evaluation(model), ExitStack() as stack:
        if P > 0:
            prompts, which = torch.cat([x[:, :P].long() for x in inputs], 1).unique(dim=0, return_inverse=True)  # [U,3P], [B]
            with torch.no_grad():
                run(*prompts.chunk(3, 1))
            cache.batch_select_indices(which.repeat_interleave(2))
        for m, grads in modules.items():
            stack.enter_context(m.register_forward_hook(_adder(grads, terms, outs)))
        stack.enter_context(_cut_attention(backbone, calls))
        ids, mask, positions = (x.repeat_interleave(2, 0) for x in inputs)
        h = run(ids[:, P:], mask, positions[:, P:])                                                          # [2B,N,d]
        if len(calls) < model.config.num_hidden_layers:
            raise ValueError(f"{type(model).__name__}: {len(calls)} of {model.config.num_hidden_layers} layers use "
                             "transformers' attention interface, others cannot be cut: use --kernel logit")
        seeds = torch.stack([head_terms["grad_D"], head_terms["grad_R"]], 1).flatten(0, 1).to(h)
        ends = {m: out for m, out in outs.items() if out is not None}               # what the embeddings gave
        b = {m: _wide(g) for m, g in zip(ends, torch.autograd.grad(h, list(ends.values()), seeds))}          # [2B,N,d]
    h = _wide(h.detach()[::2])                                                                               # [B,N,d]
    terms += dots * (weight * h.square().sum(-1) + bias)
    terms += sum(_gram(g[::2], g[1::2]) for m, g in b.items() if "weight" in modules[m])
    if weight and head.weight is embedding.weight:      # tied: delta h^T + e_token b^T has cross terms delta[token] h.b
        (at_D, at_R), hb_D, hb_R = head_terms["token"].unbind(-1), *((h * b[embedding][i::2]).sum(-1) for i in (0, 1))
        terms += torch.stack([at_D * hb_R + at_R * hb_D, 2 * at_D * hb_D, 2 * at_R * hb_R])
    return terms

def _parts(model):
    """Backbone (ids -> hidden states), output head, input embedding; ValueError unless logits = head(hidden)."""
    head, embedding = (getattr(model, f"get_{n}_embeddings", lambda: None)() for n in ("output", "input"))
    bent = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    if type(head) is not nn.Linear or type(embedding) is not nn.Embedding or any(
            getattr(model.config, n, None) not in (None, 1) for n in bent):
        raise ValueError(f"{type(model).__name__}: logits are no plain linear head over embeddings: use --kernel logit")
    return model.get_decoder(), head, embedding

def _local_modules(model, head, embedding):
    """{module to hook: names of its own trainable parameters}; ValueError for a parameter without a rule."""
    modules, owner = {embedding: []}, {}
    for name, module in model.named_modules():
        grads = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        for n, p in grads.items():
            known = isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__ == "Conv1D" or p.ndim == 1
            shared = owner.setdefault(p, module) is not module and {owner[p], module} != {head, embedding}
            if n not in ("weight", "bias") or not known or shared:
                raise ValueError(f"no local rule for the trainable parameter {name}.{n}: use --kernel logit")
        if grads and module is not head:
            modules[module] = list(grads)
    return modules

def _adder(grads, terms, outs):
    """A forward hook by which a module adds its share to terms [3,B,N] as soon as its output's gradient arrives."""
    def forward_hook(module, args, out):
        if isinstance(module, nn.Embedding):
            outs[module] = out.requires_grad_()                                     # the backward pass ends here
        if isinstance(module, nn.Embedding) or not out.requires_grad:               # no gradient: unit()'s own call, below
            return
        if module in outs or (out.shape[0] // 2, out.shape[1]) != terms.shape[1:]:
            raise ValueError(f"{type(module).__name__} does not run once per position: use --kernel logit")
        outs[module], x = None, args[0].detach()[::2]                               # rows 2i and 2i+1 are the same
        unit = lambda w: torch.func.functional_call(module, {"weight": torch.full_like(module.weight, w)}, (x,))
        @torch.no_grad()
        def add(g):                                                                 # [2B,N,(heads),features]
            if module.weight.ndim == 2:                                             # Linear, Conv1D, LoRA's A and B
                share = ("weight" in grads) * _wide(x).square().sum(-1) + ("bias" in grads)                  # [B,N]
                terms.add_(_gram(g[::2], g[1::2]) * share)
                return
            for name in grads:      # a q_norm's weight is shared over heads: sum over them BEFORE the product
                scale = unit(1.0) - unit(0.0) if name == "weight" else 1.0          # x_hat, also where 1 + w scales it
                terms.add_(_gram(*(_wide(b * scale).flatten(2, -2).sum(2) if b.ndim > 3 else b * scale
                                   for b in (g[::2], g[1::2]))))
        out.register_hook(add)
    return forward_hook

@contextmanager
def _cut_attention(backbone, calls):
    """Within: keys and values are constants. `calls` collects the attention layers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
    def attend(module, query, key, value, attention_mask, **kwargs):
        if any(kwargs.get(n) is not None for n in ("softcap", "s_aux", "position_bias")):
            raise ValueError(f"{type(module).__name__}: attention with cap, sinks or bias: use --kernel logit")
        calls.append(module)
        return sdpa_attention_forward(module, query, key.detach(), value.detach(), attention_mask, **kwargs)
    before, backbone.config._attn_implementation = backbone.config._attn_implementation, "ntk_cut"
    AttentionInterface.register("ntk_cut", attend), AttentionMaskInterface.register("ntk_cut", sdpa_mask)
    try:
        yield
    finally:
        backbone.config._attn_implementation = before
        AttentionInterface._global_mapping.pop("ntk_cut"), AttentionMaskInterface._global_mapping.pop("ntk_cut")

# ----------------------------------------------------------------------------------------------- batch statistics
def gradient_geometry(model, logits, seed_D, seed_R):
    """m3.geometry() of g_D = J seed_D and g_R = J seed_R; logits, seeds [B,N,V]; graph and `.grad` stay as they are.
    Time: 2 backward passes. Memory: ONE copy of the trainable parameters (g_R); g_D is used up parameter by parameter
    as it arrives. Not for wrappers with gradient hooks of their own (DDP, FSDP)."""
    params, products = [p for p in model.parameters() if p.requires_grad], [(0.0, 0.0, 0.0)]
    g_R = dict(zip(params, torch.autograd.grad(logits, params, seed_R, retain_graph=True, allow_unused=True)))
    def use_up(g, p):                                   # -> zeros of the same shape that take no memory
        products.append((_dot(g, g_R[p]), _dot(g, g), _dot(g_R[p], g_R[p])))
        return g.new_zeros(()).expand_as(g)
    with ExitStack() as stack:
        for p in params:
            stack.enter_context(p.register_hook(lambda g, p=p: use_up(g, p)))
        torch.autograd.grad(logits, params, seed_D, retain_graph=True, allow_unused=True)
    return m3.ratios(*map(sum, zip(*products)))

def distillation_hurt(phi, kappa, alpha):
    """True if a small naive Hybrid step raises L_D: phi < -alpha/((1-alpha) kappa) [M3 3.4], without division."""
    return alpha + (1 - alpha) * kappa * phi < 0

def conflict_share(K, cos, mask, rewarded, deadband=1e-3):
    """C_NTK over ALL tokens of mask [B,N]: dict(conflict: share with K < 0, conflict_deadband: with cos < -deadband).
    Tokens with a zero residual (A = 0, clipped) have K = 0: no conflict, though counted below the line. No token: 0."""
    mask, total = mask.bool(), max(int(mask.sum()), 1)
    paid = mask & rewarded
    return dict(conflict=int((K < 0)[mask].sum()) / total, conflict_deadband=int((cos < -deadband)[mask].sum()) / total,
                conflict_rewarded=int((K < 0)[paid].sum()) / int(paid.sum()) if paid.any() else None)

def gradient_folding(grads):
    """gamma = 1 - ||sum g_i||^2 / (G sum ||g_i||^2) [M3 eq 17]: 0 if all G responses pull alike (or not at all), 1 if
    they cancel. grads: one entry per response of a group, a tensor or a list of tensors."""
    grads = [_flat(g) for g in grads]
    below = len(grads) * sum(_dot(g, g) for g in grads)
    return 1 - _dot(sum(grads), sum(grads)) / below if below > 0 else 0.0

def probe_verdict(kappa_mean, conflict):
    """Decision rule [M3 Remark 4] after a probe of naive Hybrid -> (method, sentence). conflict: C_NTK in 0..1."""
    if kappa_mean != kappa_mean or conflict != conflict:
        raise ValueError(f"probe: mean kappa {kappa_mean} and conflict {conflict} give no verdict")
    method, why = (
        ("m3-select", "kappa > 5000: admit the teacher only where it does not fight reward") if kappa_mean > 5000 else
        ("m3-select", "over half of the tokens conflict; if that persists, gate them hard") if conflict > 0.5 else
        ("m3-soft", "1000 < kappa <= 5000: a soft gate with beta about 1") if kappa_mean > 1000 else
        ("hybrid", "kappa <= 1000: plain Hybrid with alpha about 0.5 suffices"))
    return method, (f"kappa {kappa_mean:.4g}, conflict {conflict:.0%} -> {method} ({why}). Caveat: kappa depends on "
                    "the divergence's lambda, the reduction and LoRA's scaling; the bounds are M3's, for its setting.")

# ----------------------------------------------------------------------------------------------- diagnostics of [VLS]
def learning_signal(grad_norm, loss):
    """mu = G^2/(2L), the rate at which gradient flow lowers a loss L; G is the norm BEFORE clipping. NaN at L = 0."""
    return grad_norm ** 2 / (2 * loss) if loss else float("nan")

def occupancy(g0, g1, h0, h1):
    """Cross-fitted alpha = <h,g>/||g||^2 [VLS E.1] from two folds of every prompt's responses -> dict(g2, X, alpha).
    g: loss gradients, responses held fixed; h: likelihood-ratio gradients whose baseline is the OTHER fold's; each a
    tensor or a list of them. g2 = <g0,g1> is unbiased, so it may be <= 0: never clip it. alpha is NaN at g2 = 0."""
    g0, g1, h0, h1 = map(_flat, (g0, g1, h0, h1))
    g2, X = _dot(g0, g1), (_dot(h0, g1) + _dot(h1, g0)) / 2
    return dict(g2=g2, X=X, alpha=X / g2 if g2 else float("nan"))

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
    """||Y^T X||_F^2 / (||X^T X||_F ||Y^T Y||_F) of X [n,d], Y [n,e], centred over the n prompts, in float64; in [0, 1].
    Rotation and scale of either side change nothing; 0 if one side does not vary. By Gram matrices: O(n^2 d) time."""
    X, Y = (x @ x.T for x in (x.double() - x.double().mean(0) for x in (X, Y)))
    below = float(X.norm() * Y.norm())
    return float((X * Y).sum()) / below if below else 0.0                           # tr(XX^T YY^T) = ||Y^T X||_F^2

def parameter_change(model, start_state):
    """d_par = ||theta_t - theta_0|| / ||theta_0|| [VLS] over ALL parameters, in float32, tied weights once.
    start_state: {name: tensor}, CLONED at the start (a state_dict follows the model). KeyError for a missing name."""
    pairs = ((p.detach().float(), start_state[name].to(p.device).float()) for name, p in model.named_parameters())
    change, start = map(sum, zip(*((_dot(p - q, p - q), _dot(q, q)) for p, q in pairs)))
    return (change / start) ** 0.5

@torch.no_grad()
def stall(start, end, prompts, losses):
    """What [VLS] tabulates of a run: loss reductions 1 - L/L_1 at the smallest and at the last loss, decay rate
    gamma = log(L_1/L_T)/2(T-1) per step, d_par (None where weights are rounded to 16 bits) and linear CKA per layer of
    the prompts, many lists of ids (mean over their tokens, one prompt at a time)."""
    state = {name.replace(".base.", "."): p for name, p in start.state_dict().items()}         # under adapters: the base
    read = lambda model, ids: [h.double().mean(1) for h in model.base_model(input_ids=torch.tensor(
        [ids], device=model.device), output_hidden_states=True, use_cache=False).hidden_states[1:]]
    seen = [[torch.cat(h) for h in zip(*(read(model, ids) for ids in prompts))] for model in (start, end)]       # of [n,d]
    cka, first, last = [linear_cka(*pair) for pair in zip(*seen)], losses[0], losses[-1]
    gamma = math.log(first / last) / (2 * max(len(losses) - 1, 1)) if min(first, last) > 0 else None
    reduction = lambda loss: 1 - loss / first if first else None
    return dict(loss_reduction_max=reduction(min(losses)), loss_reduction_final=reduction(last), gamma=gamma, cka=cka,
                cka_min=min(cka), d_par=parameter_change(end, state) if end.dtype.itemsize > 2 else None)

# ----------------------------------------------------------------------------------------------- python ntk.py
def heat_map(out, panels):
    """OUT/heatmap.html (loads nothing) and OUT/heatmap.png of panels [(title, [(token, cos phi_n), ...]), ...]."""
    import html, textwrap
    from matplotlib.figure import Figure
    figure, width, y = Figure(), 90, 0.0                # x in characters, y in lines: fixed-width text cannot overlap
    axis, font = figure.add_axes((0, 0, 1, 1)), dict(family="monospace", size=9, parse_math=False)
    page = ['<!DOCTYPE html><meta charset="utf-8"><style>body{font:15px/2.2 monospace} span{padding:5px 8px}</style>']
    for title, tokens in panels:
        axis.text(0, y, "\n".join(lines := textwrap.wrap(title, width)), va="top", **font)
        page.append(f"<p>{html.escape(title)}</p>")
        x, y = 0.0, y + 1.3 * len(lines) + 0.8
        for text, c in tokens:
            x, y = (x, y) if x + len(text) < width else (0.0, y + 2)
            ink, full = "white" if abs(c) > 0.5 else "black", (30, 90, 200) if c > 0 else (200, 30, 30)
            fill = "#%02x%02x%02x" % tuple(round(243 + abs(c) * (v - 243)) for v in full)
            axis.text(x + 0.6, y, text, color=ink, va="center", bbox=dict(fc=fill, ec="none", pad=3), **font)
            page.append(f'<span style="background:{fill};color:{ink}" title="{c:+.3f}">{html.escape(text)}</span>')
            x += len(text) + 1.8
        y += 1.8
    axis.set(xlim=(-2, width + 2), ylim=(y - 0.4, -0.8)), axis.axis("off")
    figure.set_size_inches((width + 4) * 0.0753, (y + 0.4) * 0.16)                              # of 9 point characters
    figure.savefig(out / "heatmap.png", dpi=150)
    (out / "heatmap.html").write_text("\n".join(page), encoding="utf-8")

def main(argv=None):
    """Measure one batch of rollouts at token, response and batch level; all weights count, of a run with adapters too. The
    flags of train.py that choose model, teacher, data, rollouts, seed, threads, device and --out work here as well."""
    import argparse, pathlib, time
    import train
    parser = argparse.ArgumentParser("ntk.py", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("--checkpoint", default="", help="a run's: the student; --model is where it started, and teaches")
    parser.add_argument("--rows-exact", default=16, type=int, help="responses for the kernels, in whole groups [16]")
    parser.error = lambda message: train.fail(message.replace("argument ", "") + " (see --help)")
    own, rest = parser.parse_known_args(argv)
    flags = train.parse_flags(["--out", "runs/ntk", "--dtype", "float32", *rest])
    with train.or_fail(f"--device {flags.device} cannot be used"):
        G, device = flags.group_size, torch.empty(0, device=flags.device).device
    base, other, tokenizer, eos_ids, _, problems, _ = train.load(flags, device)
    student = train.load_model(own.checkpoint, torch.float32, device, "--checkpoint")[0] if own.checkpoint else base
    teacher, problems, pad = other or base, problems[:flags.prompts_per_step], tokenizer.pad_token_id
    parts, params = dict(prompt_ids=m3.split_head(student), teacher_ids=m3.split_head(teacher)), list(student.parameters())
    torch.manual_seed(flags.seed)
    def score(asked, tokens, reads="prompt_ids"):                                               # -> logits [B,N,V]
        backbone, head = parts[reads]
        return head(m3.hidden_states(backbone, [p[reads] for p in asked], tokens, pad)).float() / flags.temperature
    def signals(asked, tokens, mask, A):
        """K_DR's residuals delta_R and p_S - p_T [eqs 5, 9] [B,N,V]; gradients g_R, g_D of eq 2 and of eq 1 (jsd)."""
        z, real, w = score(asked, tokens), mask[..., None], m3.token_weights(mask, len(mask))[..., None]
        with torch.no_grad():
            z_S, z_T = z.detach(), score(asked, tokens, "teacher_ids")
            both = (m3.distill_residual(z_S, z_T, kind) for kind in ("jsd", "fkl"))
            R, D, F = (real * x for x in (m3.reward_residual(z_S, tokens, A), *both))
        return R, F, *(torch.autograd.grad(z, params, w * x, retain_graph=True, materialize_grads=True) for x in (R, D))
    def clock(f):                                       # -> seconds, result
        start, result = time.perf_counter(), f()
        result[0].sum().item()                          # waits for a GPU
        return time.perf_counter() - start, result
    def table(title, *lines):
        print(f"\n{title}", flush=True)
        for name, *cells in lines:
            print(f"  {name:<24}" + "".join(f"{x:>14.3f}" if isinstance(x, float) else f"{x:>14}" for x in cells))
    # --- the batch ----------------------------------------------------------------------------------------------------
    tokens, mask, _ = m3.sample(student, [p["prompt_ids"] for p in problems], G, flags.max_new_tokens,
                                flags.temperature, eos_ids=eos_ids, pad_id=pad)                 # [B,N]
    asked, mean = [p for p in problems for _ in range(G)], lambda x: sum(x) / len(x)
    rewards = torch.tensor([float(m3.verify(text, p["answer"], p["kind"])) for text, p in
                            zip(m3.decode(tokenizer, tokens, mask), asked)], device=device)                  # [B]
    A = m3.group_advantages(rewards, G)
    mixed = [i for i in range(len(problems)) if A[i * G] != 0] or train.fail(
        "every group is all right or all wrong: raise --prompts-per-step, --group-size or --few-shot", code=1)
    R, F, g_R, g_D = signals(asked, tokens, mask, A)
    ids, attention, _ = m3.left_pad([p["prompt_ids"] for p in asked], pad, device)
    ids, attention = torch.cat([ids, tokens], 1), torch.cat([attention, mask.long()], 1)        # [B,L]
    some = mixed[:max(1, own.rows_exact // G)]
    rows = torch.tensor([i * G + j for i in some for j in range(G)], device=device)
    few, y = [asked[b] for b in rows.tolist()], tokens[rows]                                    # y [b,N]
    # --- 1. the kernels; cheap ones are timed again when warm --------------------------------------------------------
    batch = student, ids[rows], attention[rows], F[rows], R[rows]
    step = min(clock(lambda: torch.autograd.grad(score(few, y), params, R[rows], allow_unused=True))[0] for _ in range(3))
    ways = {"logit": {}, "local": {}, **{f"hutchinson, P={P}": dict(probes=P) for P in (1, 4, 16)}, "exact": {}}
    found = {name: clock(lambda: kdr(*batch, name.split(",")[0], **ways[name])) for name in [*ways][:2] + [*ways]}
    K, cos = found["exact"][1]                                                                  # [b,N]
    on = K != 0
    table(f"1. Token level: {int(on.sum())} tokens with A != 0; training step of their {len(rows)} rows: {step:.3f} s",
          ["kernel", "sign as exact", "corr. of cos", "sum of |K|", "seconds", "x step"],
          *([name, (k < 0).eq(K < 0)[on].float().mean().item(), torch.stack([c[on], cos[on]]).corrcoef()[0, 1].item(),
             (k.abs().sum() / K.abs().sum()).item(), t, t / step] for name, (t, (k, c)) in found.items()))
    # --- 2. one step of each method from the same point; all are of one length: only directions differ ---------------
    home, logp = [p.detach().clone() for p in params], {}
    with torch.no_grad():
        for name, (a, b) in dict(start=(0, 0), OPD=(1, 0), GRPO=(0, 1), Hybrid=(0.5, 0.5)).items():
            g = [a * d + b * r for d, r in zip(g_D, g_R)]
            scale = 0.01 / max(sum(_dot(x, x) for x in g) ** 0.5, 1e-37)
            torch._foreach_copy_(params, [p - scale * x for p, x in zip(home, g)])
            logp[name] = m3.log_softmax(score(few, y)).gather(-1, y[..., None])[..., 0]
        torch._foreach_copy_(params, home)
    start, where = logp.pop("start"), A[rows, None]
    regions = [(f"{name}, A {sign} 0", inside & side) for name, inside in (("conflict", K < 0), ("compatible", K > 0))
               for sign, side in ((">", where > 0), ("<", where < 0), ("!=", where != 0))]
    table(f"2. Token level: 1000 x mean change of log p_S(y), one plain step of length 0.01 on the batch",
          ["region by exact K_DR", "tokens", *logp], *([name, int(here.sum()), *(
              1000 * (after - start)[here].mean().item() for after in logp.values())] for name, here in regions))
    # --- 3. single responses, two gradients at a time; only folding wants a group's 2G at once -----------------------
    phis, folding = {name: [] for name in ("on-policy, correct", "on-policy, wrong", "gold prefix, A = 1")}, []
    for i, p in enumerate(problems):
        pulls = [signals([p], *(x[j:j + 1] for x in (tokens, mask, A)))[2:] for j in range(i * G, i * G + G)]
        folding.append([gradient_folding(x) for x in zip(*pulls)])                              # of g_R, of g_D
        for right, pull in zip(rewards[i * G:], pulls if i in mixed else ()):
            phis[f"on-policy, {'correct' if right else 'wrong'}"].append(m3.geometry(*pull)["phi"])
        gold = ids.new_tensor([tokenizer.encode(m3.reference_text(p, "solution"), add_special_tokens=False) + [min(eos_ids)]])
        phis["gold prefix, A = 1"].append(m3.geometry(*signals([p], gold, gold >= 0, A[:1] * 0 + 1)[2:])["phi"])
    table("3. Response level: cos(g_D, g_R) of single responses with A != 0", ["", "responses", "mean", "share < 0"],
          *([name, len(x), mean(x), mean([float(c < 0) for c in x])] for name, x in phis.items()))
    share = conflict_share(*kdr(student, ids, attention, F, R), mask)
    norm_R, norm_D, kappa, phi = m3.geometry(g_R, g_D).values()
    print(f"\nBatch level: kappa {kappa:.4g}, Phi {phi:.3f}, min-norm alpha {m3.minnorm(norm_R, norm_D, phi)[1]:.3f}, "
          f"alpha 0.5 hurts distillation: {distillation_hurt(phi, kappa, 0.5)}\n  C_NTK over all tokens (local): "
          f"{share['conflict']:.3f}, with dead band {share['conflict_deadband']:.3f}\n  folding, mean of groups: "
          f"g_D {mean([x for _, x in folding]):.3f}, g_R {mean([folding[i][0] for i in mixed]):.3f} (where A != 0)")
    # --- 4. heat map: the first mixed group's first correct and first wrong response ---------------------------------
    panels = [("cos phi_n:", [("conflict -1", -1), ("-0.5", -0.5), ("weak 0", 0), ("+0.5", 0.5), ("compatible +1", 1)])]
    for right in (1, 0):
        b = (rewards[rows] == right).nonzero()[0, 0]
        words = [tokenizer.decode([t]).replace("\n", "\\n") for t in y[b][mask[rows][b]].tolist()]
        panels.append((f"{('wrong', 'correct')[right]} (reward {right}, A = {A[rows][b]:+.2f}): {few[0]['prompt']}",
                       list(zip(words, cos[b].tolist()))))
    (out := pathlib.Path(flags.out)).mkdir(parents=True, exist_ok=True)
    heat_map(out, panels)
    print(f"\n4. {out}/heatmap.html and .png: a correct and a wrong response, coloured by the exact kernel's cos phi_n")

if __name__ == "__main__":
    main()
