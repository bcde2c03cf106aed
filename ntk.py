"""Statistics of hybrid reward + on-policy distillation: K_DR(n) four ways, kappa, Phi, [VLS]'s diagnostics.

    python ntk.py    # measures a batch of the toy model, colours two responses

K_DR(n) = <J^n delta_D, J^n delta_R> [M3 eq 9], J^n = dz^n/dtheta as [d_par, V], says whether the teacher's
push at token n helps the reward's (>= 0) or fights it (< 0: a conflict). Four kernels with one signature:
    exact       two vector-Jacobian products per position: the definition
    hutchinson  random signs, 2 vjp + 2 jvp per probe: unbiased, noisy
    local       every parameter's paths inside the position: one forward and backward pass of a doubled batch
    logit       J^T J taken to be 1, so delta_D . delta_R: free
Beside the papers: (1) none says how to compute K_DR: all four ways are ours. (2) `local` leaves out the paths
through keys and values. On toy models its sign is exact's on 93 to 99 % of the tokens, its cos correlates at
.99, but sum |K| is .4 to .9 of exact's, .4 on a real model of 30 layers: use the sign and the cosine only.
(3) Biases, norms and (tied) embeddings count like any weight; frozen parameters never do.

[M3] = arXiv 2609.34849, [VLS] = arXiv 2610.11247. `local` wants a transformers model.
Shapes: B rows, L columns, N response positions (the last ones), V vocabulary, d hidden.
"""
import contextlib, functools, html, math, statistics, time

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import m3

# --- K_DR(n), four ways -------------------------------------------------------------------------------------
def kdr(model, input_ids, attention_mask, delta_D, delta_R, kernel="local", **options):
    """K_DR(n) [M3 eq 9] and cos phi_n [M3 eq 14] -> K [B,N] (squared gradient units), cos [B,N] in [-1, 1].
    input_ids, attention_mask [B,L]: prompts padded on the left, responses the last N columns, padded on the
    right. delta_D, delta_R [B,N,V]: residuals, 0 at padded positions; position n's logits come from column
    L-N-1+n. Where one is 0, so are K and cos. model: in eval mode, comes back as it was. options, cost: see
    kdr_exact, kdr_hutchinson, local_terms. ValueError: wrong shapes, a model the kernel cannot run on."""
    if kernel not in ("logit", "local", "exact", "hutchinson"):
        raise ValueError(f"--kernel {kernel}: unknown, choose from logit, local, exact, hutchinson")
    ids, mask, D, R = (tuple(x.shape) for x in (input_ids, attention_mask, delta_D, delta_R))
    if D != R or ids != mask or len(D) != 3 or len(ids) != 2 or D[0] != ids[0] or not 0 < D[1] < ids[1]:
        raise ValueError(f"want ids and mask [B,L], residuals [B,N,V], N < L; got {ids}, {mask}, {D}, {R}")
    if options and kernel in ("logit", "local"):
        raise ValueError(f"--kernel {kernel} has no options, got {', '.join(options)}")
    delta_D, delta_R = delta_D.detach(), delta_R.detach()
    if kernel == "logit":
        return m3.isotropic_kernel(delta_D, delta_R)
    if kernel == "local":
        of_head = head_terms(model, delta_D, delta_R, input_ids[:, -D[1] - 1:-1])
        return local_terms(model, input_ids, attention_mask, of_head)
    way = kdr_exact if kernel == "exact" else kdr_hutchinson
    return way(model, input_ids, attention_mask, delta_D, delta_R, **options)

def kdr_exact(model, input_ids, attention_mask, delta_D, delta_R, chunk=8):
    """The definition: the parameter gradients J^n delta_D and J^n delta_R of every position, multiplied.
    `chunk` positions of a row share a forward pass and one vmapped backward pass of 2*chunk seeds. Time: 2N
    backward passes a row. Memory: 2*chunk copies of the trainable weights. Wants eager or sdpa attention."""
    dots, before = _gram(delta_D, delta_R), input_ids.shape[1] - delta_D.shape[1]
    terms, params = torch.zeros_like(dots), [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the attention that vmap can differentiate
        for b, live in enumerate((dots[1:] > 0).all(0)):
            places = live.nonzero()[:, 0]
            for start in range(0, len(places), chunk):
                part = places[start:start + chunk]  # [c]
                end = before + int(part[-1])  # later columns change nothing
                batch = _batch(input_ids[b:b + 1, :end], attention_mask[b:b + 1, :end], end)
                z = model(**batch).logits[0, before - 1 + part]  # [c,V]
                pulls = torch.cat([(z * delta_D[b, part]).sum(-1), (z * delta_R[b, part]).sum(-1)])  # [2c]
                one_hot = pulls.new_ones(len(pulls)).diag()
                grads = torch.autograd.grad(pulls, params, one_hot, is_grads_batched=True, allow_unused=True)
                for g in grads:
                    if g is not None:  # [2c, *parameter]
                        terms[:, b, part] += _gram(*g.flatten(1).chunk(2))
    return to_cosine(terms, dots)

def kdr_hutchinson(model, input_ids, attention_mask, delta_D, delta_R, probes=16, generator=None, signs=None):
    """Diagonal of J_D^T J_R by random signs: s_n <J^n delta_D^n, sum_m s_m J^m delta_R^m> has mean K_DR(n),
    as E[s_n s_m] = 1{n=m}. On normalised residuals (else big tokens drown small ones), both ways round.
    signs [P,B,N] of +-1 replace the random ones; a Hadamard matrix of order >= N gives K exactly. cos uses
    estimated norms: rough below 16 probes. Time per row: P x (2 vjp + 2 jvp). Memory: activations of a row,
    3 copies of the trainable parameters. Wants eager or sdpa attention."""
    (B, N, _), dots = delta_D.shape, _gram(delta_D, delta_R)
    if signs is None:
        device = getattr(generator, "device", None)
        signs = 1 - 2 * torch.randint(2, (probes, B, N), generator=generator, device=device)
    signs = signs.to(delta_D).reshape(-1, B, N, 1)
    norms, terms = dots[1:].sqrt(), torch.zeros_like(dots)
    units = [x / norm.clamp_min(1e-37)[..., None] for x, norm in zip((delta_D, delta_R), norms)]
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def logits_of(batch, weights):  # -> [N,V]
        return torch.func.functional_call(model, weights, kwargs=batch).logits[0, -N - 1:-1].to(delta_D)

    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        for b in range(B):
            logits = functools.partial(logits_of, _batch(input_ids[b:b + 1], attention_mask[b:b + 1], N + 1))
            _, pull = torch.func.vjp(logits, params)
            u_D, u_R = units[0][b], units[1][b]  # [N,V]
            for s in signs[:, b]:
                z_D, z_R = (s * torch.func.jvp(logits, (params,), pull(s * u))[1] for u in (u_D, u_R))
                products = (u_D * z_R + u_R * z_D) / 2, u_D * z_D, u_R * z_R  # DR, DD, RR
                terms[:, b] += torch.stack(products).sum(-1) / len(signs)
    return to_cosine(terms * torch.stack([norms[0] * norms[1], dots[1], dots[2]]), dots)

def kdr_flat(model, input_ids, attention_mask, real, residuals, kernel="local", **options):
    """kdr() for a training loop: K [T], cos [T] of the T real tokens alone, laid out flat. real [B,N] bool.
    residuals: an iterable of (delta_D, delta_R) [t,V] by consecutive chunks of t of these tokens. `local`
    keeps [t,d] of each (head_terms) and runs only rows with a reward signal; others hold [B,N,V]."""
    def spread(parts):  # T flat rows -> [B,N,x], zeros elsewhere
        flat = torch.cat(parts)
        return flat.new_zeros(*real.shape, flat.shape[-1]).masked_scatter_(real[..., None], flat)

    def terms_of_chunks(read):  # read: the input tokens [T]. A generator, so that no [t,V] outlives it
        start = 0
        for delta_D, delta_R in residuals:
            yield head_terms(model, delta_D, delta_R, read[start:start + len(delta_D)])
            start += len(delta_D)

    if kernel != "local":
        deltas = [spread(parts) for parts in zip(*residuals)]
        if kernel != "hutchinson":  # a training loop gives all kernels its generator
            options.pop("generator", None)
        return [x[real] for x in kdr(model, input_ids, attention_mask, *deltas, kernel, **options)]
    parts = list(terms_of_chunks(input_ids[:, -real.shape[1] - 1:-1][real]))
    head = {name: spread([part[name] for part in parts]) for name in parts[0]}
    rows = (head["dots"][..., 1:] > 0).all(-1).any(1)  # elsewhere K = cos = 0
    K, cos = head["dots"].new_zeros(2, *real.shape)
    if rows.any():
        head = {name: x[rows] for name, x in head.items()}
        K[rows], cos[rows] = local_terms(model, input_ids[rows], attention_mask[rows], head)
    return K[real], cos[real]

def try_kernel(model, kernel):
    """ValueError, one line, where this kernel cannot run on this model: tried on two random positions.
    `local` must also equal exact under the same cut, so no use of a weight can go unseen. Give it the model
    as it will be trained, adapters and checkpointing included. Memory: 4 gradients."""
    try:
        weight, draw = model.get_output_embeddings().weight, torch.Generator().manual_seed(0)
        ids = torch.randint(model.get_input_embeddings().num_embeddings, (1, 4), generator=draw)
        delta = torch.randn(1, 2, len(weight), generator=draw) / len(weight) ** 0.5
        # The same residual twice: K = ||J^n delta||^2 is a sum of squares, so no share can hide another.
        data = [x.to(weight.device) for x in (ids, torch.ones_like(ids), delta, delta)]
        K, _ = kdr(model, *data, kernel, **({"probes": 1} if kernel == "hutchinson" else {}))
        if kernel == "local":
            with _cut_attention(model.get_decoder(), set()):
                want, _ = kdr_exact(model, *data)
            if not ((K - want).abs() <= (0.01 if weight.dtype.itemsize > 2 else 0.15) * want).all():
                raise ValueError(f"{K.tolist()[0]}, but exact under the same cut gives {want.tolist()[0]}")
    except Exception as error:  # whatever a foreign model raises
        reason = str(error).strip().split("\n")[0][:160]
        name = type(model).__name__
        raise ValueError(f"--kernel {kernel} cannot run on {name}, use --kernel logit: {reason}") from error

def to_cosine(terms, dots):
    """K and cos of (DR, DD, RR) [3,B,N]; exactly 0 where a residual is 0. dots: of the residuals alone."""
    live, norm = (dots[1:] > 0).all(0), terms[1].clamp_min(0).sqrt() * terms[2].clamp_min(0).sqrt()
    K = torch.where(live, terms[0], 0.0)
    return K, (K / torch.where(live, norm, 1.0).clamp_min(1e-37)).clamp(-1, 1)

def _wide(x): return x if x.dtype == torch.float64 else x.float()
def _flat(x): return torch.cat([_wide(t.detach()).flatten() for t in ([x] if torch.is_tensor(x) else x)])

def _gram(a, b):  # (a.b, a.a, b.b) over the last dimension, in float32 or better: [..., x] twice -> [3, ...]
    a, b = _wide(a), _wide(b)
    return torch.stack([(a * b).sum(-1), a.square().sum(-1), b.square().sum(-1)])

def _batch(ids, mask, keep):  # a model's arguments; only the last `keep` columns need logits
    return {"input_ids": ids, "attention_mask": mask, "position_ids": m3.positions_of(mask),
            "use_cache": False, "logits_to_keep": keep}

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

def _hook(names, terms, ran, ends):
    """Forward hook: the module will add its share to terms [3,B,N]. Filled: ran, the set of modules that did;
    ends, what embeddings gave."""
    def forward_hook(module, args, out):
        embeds, rows = isinstance(module, nn.Embedding), terms.shape[1]
        # Nothing to add: the pass over the distinct prompts (at most B rows), frozen parts, norm_share's own.
        if len(out) <= rows or not (embeds or out.requires_grad):
            return None
        if module in ran or out.shape[:2] != (2 * rows, terms.shape[2]):
            raise ValueError(f"{type(module).__name__} does not run once per position: use --kernel logit")
        ran.add(module)
        if embeds:  # the backward pass ends here. A copy goes on: CTRL scales its embeddings in place
            end = ends[module] = out.detach().requires_grad_()
            padding = args[0][..., None] == (-1 if module.padding_idx is None else module.padding_idx)
            return torch.where(padding, out.detach(), end)  # torch gives the padding's row no gradient
        rule = functools.partial(norm_share, module) if module.weight.ndim == 1 else linear_share
        x = args[0].detach()[::2]  # rows 2i and 2i+1 are the same

        def add(b):  # [2B,N,(heads),features]
            with torch.no_grad():
                terms.add_(rule(x, b[::2], b[1::2], names))

        out.register_hook(add)
        return None
    return forward_hook

def head_terms(model, delta_D, delta_R, tokens):
    """What `local` needs of the residuals [B,n,V], without their last dimension; O(BndV) time, as the head.
    tokens [B,n]: each position's INPUT token (column L-N-1+n). -> dict: grad_D, grad_R [B,n,d] at the head's
    input; dots [B,n,3] = D.R, D.D, R.R; token [B,n,2], the residuals at the input token, for tied embeddings.
    By chunks of positions, results may be joined along n."""
    weight, at = _parts(model)[1].weight.detach(), tokens[..., None]
    return {"grad_D": delta_D.to(weight.dtype) @ weight, "grad_R": delta_R.to(weight.dtype) @ weight,
            "dots": _gram(delta_D, delta_R).movedim(0, -1),
            "token": torch.cat([_wide(delta_D.gather(-1, at)), _wide(delta_R.gather(-1, at))], -1)}

def local_terms(model, input_ids, attention_mask, of_head):
    """K [B,N] and cos [B,N] of J^n cut to its paths inside the position, all keys and values held constant.
    (To let a position's own key and value through was tried: right, dearer, no nearer to exact.) of_head: see
    head_terms. Time: 1 forward pass of the distinct prompts, 1 forward and 1 activation-only backward pass of
    2B rows x N columns. Memory: those activations. ValueError unless attention goes through transformers'
    interface (no soft cap, no sinks) and what is trained sits in Linear, Conv1D, Embedding or norms."""
    (backbone, head, embedding), N = _parts(model), of_head["dots"].shape[1]
    dots = _wide(of_head["dots"]).movedim(-1, 0)  # [3,B,N]
    terms, ran, ends, layers = torch.zeros_like(dots), set(), {}, set()
    trained = _trained_modules(model, head, embedding)
    ids, real = input_ids.repeat_interleave(2, 0), attention_mask.repeat_interleave(2, 0).bool()
    prompts = [row[mask].tolist() for row, mask in zip(ids[:, :-N], real[:, :-N])]
    with torch.enable_grad(), contextlib.ExitStack() as stack:
        for module, names in trained.items():
            if module is not head:
                stack.enter_context(module.register_forward_hook(_hook(names, terms, ran, ends)))
        stack.enter_context(_cut_attention(backbone, layers))
        h = m3.hidden_states(backbone, prompts, ids[:, -N:])  # [2B,N,d]
        if len(layers) < model.config.num_hidden_layers:
            raise ValueError(f"{type(model).__name__}: only {len(layers)} of its layers use transformers' "
                             "attention interface, the others cannot be cut: use --kernel logit")
        seeds = torch.stack([of_head["grad_D"], of_head["grad_R"]], 1).flatten(0, 1).to(h)
        b = dict(zip(ends, torch.autograd.grad(h, list(ends.values()), seeds)))  # runs all hooks
    h, names = _wide(h.detach()[::2]), trained[head]
    terms += dots * (("weight" in names) * h.square().sum(-1) + ("bias" in names))  # linear_share, b = delta
    terms += sum(_gram(g[::2], g[1::2]) for module, g in b.items() if trained[module])
    if "weight" in names and head.weight is embedding.weight:
        # Tied: the gradient is delta h^T + e_token b^T; its square has cross terms delta[token] (h . b).
        at_D, at_R = of_head["token"].unbind(-1)
        hb_D, hb_R = ((h * _wide(b[embedding][i::2])).sum(-1) for i in (0, 1))
        terms += torch.stack([at_D * hb_R + at_R * hb_D, 2 * at_D * hb_D, 2 * at_R * hb_R])
    return to_cosine(terms, dots)

def _parts(model):
    """Backbone (ids -> hidden states), output head, input embedding; ValueError unless logits = head(h)."""
    head, embedding = (getattr(model, f"get_{x}_embeddings", lambda: None)() for x in ("output", "input"))
    bent = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    if type(head) is not nn.Linear or type(embedding) is not nn.Embedding or any(
            getattr(model.config, name, None) not in (None, 1) for name in bent):
        raise ValueError(f"{type(model).__name__}: logits are no linear head's: use --kernel logit")
    return model.get_decoder(), head, embedding

def _trained_modules(model, head, embedding):
    """{module: names of its own trainable parameters}; ValueError for a parameter without a rule."""
    modules, owner = {head: [], embedding: []}, {}
    for path, module in model.named_modules():
        known = isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__ == "Conv1D"
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                shared = owner.setdefault(p, module) is not module and {owner[p], module} != {head, embedding}
                if name not in ("weight", "bias") or not (known or p.ndim == 1) or shared:
                    raise ValueError(f"no local rule for parameter {path}.{name}: use --kernel logit")
                modules.setdefault(module, []).append(name)
    if not owner:
        raise ValueError("no parameter of the model is trainable: K_DR would be 0 everywhere")
    return modules

@contextlib.contextmanager
def _cut_attention(backbone, layers):
    """Within: keys and values are constants. `layers` collects the attention layers that run, in a set."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, key, value, attention_mask, **kwargs):
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise ValueError(f"{type(module).__name__}: attention with cap, sinks, bias: use --kernel logit")
        layers.add(module)
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
    """True if a small Hybrid step raises L_D: phi < -alpha/((1-alpha) kappa) [M3 3.4]. phi, kappa: as
    m3.geometry gives them; None, where there is no reward gradient, hurts nothing."""
    return bool(phi) and alpha + (1 - alpha) * kappa * phi < 0

def conflict_share(K, cos, mask, rewarded, deadband=1e-3):
    """C_NTK -> dict of shares in [0, 1]. K, cos and the masks: of one shape, mask: the real tokens. Over all
    of them (also where A = 0, so K = 0), conflict: K < 0, conflict_deadband: cos < -deadband; 0 without a
    token. Over those in `rewarded` (A != 0) alone, conflict_rewarded: K < 0; None if there are none."""
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
    not count; NaN where none is left, and where L_1 is 0."""
    mu = [learning_signal(G, L) for G, L in zip(grad_norms, losses, strict=True)]
    before, after = median(mu[:split]), median(mu[split:split + 30])
    remaining = median(losses[max(split - 5, 0):split + 4]) / losses[0] if losses[0] else math.nan
    return {"before": before, "after": after, "drop": before / after if after else math.nan,
            "remaining": remaining, "last50": median(mu[-50:])}

def median(values):  # of the known ones
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
    """occupancy() of one batch, keys occupancy_*; the folds are the even and the odd responses of each group.
    add_up: sums tensors over processes. memory: see m3.backward. Cost: 4 backward and 2 forward passes."""
    fold = torch.arange(len(batch.tokens), device=batch.tokens.device) % group_size % 2  # [B]
    whole_over_fold = group_size / (group_size - group_size // 2), group_size / (group_size // 2)
    loss = batch.weights.new_zeros(len(fold))  # L of each response, added up by seeds_g

    def by_fold(name, residual, row):
        return {f"{name}{k}": residual * (whole_over_fold[k] * (fold[row] == k))[:, None] for k in (0, 1)}

    def seeds_g(s):
        loss.index_add_(0, s.row, s.weights * s.token_loss)
        return by_fold("g", s.loss_gradient, s.row)

    def seeds_h(s):
        return by_fold("h", s.delta_R, s.row)

    gradients = m3.backward(student, teacher, batch, seeds_g, params, settings, **memory)
    L = loss.view(-1, group_size)  # [P,G]
    baseline = torch.stack([L[:, 1::2].mean(1), L[:, ::2].mean(1)], 1)  # [P,2], of the OTHER fold
    # The seed that is wanted is (L - baseline) grad log pi; delta_R gives it with A = baseline - L.
    advantages = (baseline[:, fold[:group_size]] - L).flatten()
    moved = batch._replace(advantages=advantages, weights=batch.mask.float())
    gradients |= m3.backward(student, teacher, moved, seeds_h, params, settings, **memory)
    for tensors in gradients.values():
        add_up(tensors)
    return {f"occupancy_{name}": value for name, value in occupancy(*gradients.values()).items()}

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
        rows = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            out = model.base_model(input_ids=ids, output_hidden_states=True, use_cache=False)
            rows.append([h[0].double().mean(0) for h in out.hidden_states])
        return [torch.stack(layer) for layer in zip(*rows)]

    known = [(step, x) for step, x in enumerate(losses) if x is not None] or [(0, 0.0)]  # None: not finite
    state = {name.replace(".base.", "."): p for name, p in start.state_dict().items()}  # no adapters
    cka = [linear_cka(X, Y) for X, Y in zip(read(start), read(end))]
    (before, first), (after, last), least = known[0], known[-1], min(x for _, x in known)
    gamma = math.log(first / last) / (2 * max(after - before, 1)) if min(first, last) > 0 else None
    return {"loss_reduction_max": 1 - least / first if first else None,
            "loss_reduction_final": 1 - last / first if first else None,
            "gamma": gamma, "cka": cka, "cka_min": min(cka),
            "d_par": parameter_change(end, state) if end.dtype.itemsize > 2 else None}

# --- python ntk.py ------------------------------------------------------------------------------------------
def print_table(title, header, rows):
    print(f"\n{title}", flush=True)
    for name, *cells in [header, *rows]:
        print(f"  {name:<24}" + "".join(f"{x:>14.3f}" if isinstance(x, float) else f"{x:>14}" for x in cells))

def compare_kernels(step, model, few, generator):
    """1. Every kernel against exact, and its time in training steps -> exact's columns, see m3.Signals."""
    def timed(call, *args, **how):  # -> seconds, result
        start = time.perf_counter()
        result = call(*args, **how)
        result[0][0].sum().item()  # waits for a GPU
        return time.perf_counter() - start, result

    def watched(name, *args):  # of several micro-batches the times add up
        more = {"probes": int(name.split("=")[1])} if "=" in name else {}
        seconds, result = timed(kdr_flat, model, *args, name.split(",")[0], generator=generator, **more)
        spent[name] = spent.get(name, 0.0) + seconds
        return result

    unit, spent, found, rows = min(timed(step, few, "hybrid")[0] for _ in range(3)), {}, {}, []
    for name in ("logit", "local", "hutchinson, P=1", "hutchinson, P=4", "hutchinson, P=16", "exact"):
        try:
            try_kernel(model, name.split(",")[0])
        except ValueError as error:
            print(f"{name} is left out: {error}")
            continue
        found[name] = step(few, "hybrid", kdr=functools.partial(watched, name), look=True).seen
    exact = found["exact"]
    live = exact["K"] != 0
    for name, seen in found.items():
        same = ((seen["K"] < 0) == (exact["K"] < 0))[live].float().mean().item()
        correlation = torch.stack([seen["cos"][live], exact["cos"][live]]).corrcoef()[0, 1].item()
        share = (seen["K"].abs().sum() / exact["K"].abs().sum()).item()
        rows.append([name, same, correlation, share, spent[name], spent[name] / unit])
    size = f"{int(live.sum())} tokens with A != 0; a step on {len(few.tokens)} rows: {unit:.3f} s"
    print_table(f"1. Token level: {size}",
                ["kernel", "sign as exact", "corr. of cos", "sum of |K|", "seconds", "x step"], rows)
    return exact

def compare_steps(step, params, batch, few, seen):
    """2. One plain step of each method, all of one length, so that only directions differ."""
    changes, rows, A = {}, [], seen["advantage"]
    for name, method in (("OPD", "opd"), ("GRPO", "grpo"), ("Hybrid", "hybrid")):
        update = step(batch, method).update
        size = 0.01 / max(m3.geometry(update, update)["norm_R"], 1e-37)
        with m3.extragradient(params, update, size):
            changes[name] = 1000 * (step(few, "grpo").seen["logp"] - seen["logp"])
    for region, inside in (("conflict", seen["K"] < 0), ("compatible", seen["K"] > 0)):
        for sign, side in ((">", A > 0), ("<", A < 0), ("!=", A != 0)):
            means = [change[inside & side].mean().item() for change in changes.values()]
            rows.append([f"{region}, A {sign} 0", int((inside & side).sum()), *means])
    print_table("2. Token level: 1000 x mean change of log p_S(y), one plain step of length 0.01",
                ["region by exact K_DR", "tokens", *changes], rows)

def heat_html(tokens):
    """Spans of (text, cos, tooltip): red where cos < 0, a conflict, blue where > 0, pale near 0."""
    spans = []
    for text, cos, tooltip in tokens:
        full, ink = (30, 90, 200) if cos > 0 else (200, 30, 30), "white" if abs(cos) > 0.5 else "black"
        fill = "#{:02x}{:02x}{:02x}".format(*(round(243 + abs(cos) * (colour - 243)) for colour in full))
        style = f'style="background:{fill};color:{ink}" title="{html.escape(tooltip)}"'
        spans.append(f"<span {style}>{html.escape(text)}</span>")
    return "\n".join(spans)

def heat_map(out, panels):
    """OUT/heatmap.html of panels [(title, [(token, cos phi_n), ...]), ...]."""
    page = ['<!DOCTYPE html><meta charset="utf-8">',
            "<style>body{font:15px/2.2 monospace} span{padding:5px 8px}</style>"]
    for title, tokens in panels:
        page.append(f"<p>{html.escape(title)}</p>")
        page.append(heat_html([(text, cos, f"{cos:+.3f}") for text, cos in tokens]))
    (out / "heatmap.html").write_text("\n".join(page), encoding="utf-8")

def main(argv=None):
    """Measure one batch of rollouts, token by token and as a whole. train.py's flags for model, adapters,
    teacher, data, rollouts, signals, kernel, seed, threads, device and --out work here as well."""
    import train
    parser = train.Parser("ntk.py", allow_abbrev=False, description=main.__doc__)
    parser.add_argument("--checkpoint", default="", help="the student, of a run from --model, which teaches")
    parser.add_argument("--rows-exact", default=16, type=int, help="responses for the kernels [16]")
    own, rest = parser.parse_known_args(argv)
    other = [word for word in rest if word.startswith(("--compare", "--plot", "--probe", "--resume"))]
    if other:
        train.fail(f"{other[0]} is train.py's: leave it out")
    flags = train.parse_flags(["--out", "runs/ntk", "--dtype", "float32", *rest])
    if flags.compare or flags.gradient_checkpointing:
        train.fail("--gradient-checkpointing, --preset of a table: train.py's, leave them out")
    if train.WORLD > 1:
        train.fail("ntk.py is one process: leave out torchrun")
    out, group = train.make_folder(flags.out), flags.group_size
    device = train.find_device(flags)
    world = train.load(flags, device)
    if own.checkpoint:
        student, *_ = train.load_model(own.checkpoint, world.base.dtype, device, "--checkpoint")
        world = world._replace(base=student, other=world.other or world.base)
    run = train.set_up(flags, world, device)
    with train.or_fail("ntk.py compares all kernels with exact: take another --model", ValueError):
        try_kernel(run.model, "exact")
    generator = torch.Generator().manual_seed(flags.seed)
    rollouts = train.roll_out(run, world, flags, world.problems[:flags.prompts_per_step], generator)
    batch = train.to_batch(rollouts, train.grade(rollouts, device), world, flags)
    if not batch.advantages.any():
        train.fail("every group is all right or all wrong: raise --prompts-per-step or --group-size", 1)
    step = functools.partial(m3.m3_step, run.student, run.teacher, params=run.params,
                             settings=train.settings_of(flags),
                             micro_batch=flags.micro_batch, chunk=flags.vocab_chunk)
    mixed = batch.advantages.nonzero()[:, 0].tolist()  # whole groups: all of one or none
    rows = mixed[:max(1, own.rows_exact // group) * group]
    prompts, hints = ([texts[b] for b in rows] for texts in (batch.prompts, batch.hints))
    few = m3.Batch(prompts, hints, *(column[rows] for column in batch[2:]))
    exact = compare_kernels(step, run.model, few, generator)
    compare_steps(step, run.params, batch, few, exact)
    kernel = functools.partial(kdr_flat, run.model, kernel=flags.kernel, generator=generator)
    whole = step(batch, "grpo", kdr=kernel, statistics=True, look=True)
    K, rewarded = whole.seen["K"], whole.seen["advantage"] != 0
    found = whole.geometry | conflict_share(K, whole.seen["cos"], torch.ones_like(K), rewarded)
    print(f"\nBatch level, {flags.kernel} kernel: " + ", ".join(f"{key} {x:.4g}" for key, x in found.items()))
    panels = []
    for word, some in (("correct", few.advantages > 0), ("wrong", few.advantages < 0)):
        b = some.tolist().index(True)
        words = [world.tokenizer.decode([token]) for token in few.tokens[b][few.mask[b]].tolist()]
        title = f"{word} (A = {few.advantages[b]:+.2f}): {rollouts.asked[rows[b]]['prompt']}"
        panels.append((title, list(zip(words, exact["cos"][exact["row"] == b].tolist()))))
    heat_map(out, panels)
    print(f"\n3. {out}/heatmap.html: a correct and a wrong response by the exact kernel's cos phi_n")

if __name__ == "__main__":
    from train import no_traceback
    with no_traceback():
        main()
