"""M3 as pure functions: hybrid reward + on-policy distillation, one logit seed, one backward pass.

Copy these functions; this is not a library: arguments in, tensors out, the loop is train.py's. Needs torch alone.

A student samples G responses per prompt. A verifier pays each 0 or 1. A teacher that sees more (the frozen initial
policy, reading the gold solution too) gives a distribution at every token. Both signals are written as "residuals",
their exact gradients in the student's logits, so any weighted sum of them is ONE backward pass: logits.backward(seed).

Papers: [M3] arXiv 2609.34849, [VLS] arXiv 2610.11247. Equation numbers are theirs.

Departures from the textbook, and why:
  1. No loss is ever differentiated by autograd. The residuals are closed form (tests check them against float64
     autograd), because M3 re-weights and normalises them token by token, which no scalar loss expresses.
  2. No ratio clip and no reference KL: one update per batch, so the ratio is 1; the frozen teacher is the anchor.
  3. Eq 1 is clipped on the token's SUM. Clipping each vocabulary entry, as OPSD's code does under the same letter
     tau, pushes the clipped entries down instead of leaving the token alone.
  4. The sampler draws by inverse CDF from uniforms fixed per (row, position), however rows are dropped or batches split.

Shapes: P prompts, G responses per prompt, B = P*G rows, N response positions, V vocabulary, d hidden size,
T = number of real (unmasked) response tokens of a batch, laid out flat. p_S student, p_T teacher, y sampled token.
"""

import contextlib, functools, inspect, math, random, re
from fractions import Fraction

import torch
import torch.nn.functional as F

# --- 1. Prompts and problems -----------------------------------------------------------------------------------------

# How a reply of each kind ends, and the word that stands for the answer in the instruction.
FINISH = {"toy": ("#### {}", "number"), "gsm8k": ("#### {}", "number"), "svamp": ("#### {}", "number"),
          "math": (r"\boxed{{{}}}", "answer"), "arc": ("Answer: {}", "letter")}

def reference_text(row, hint):
    """The worked solution (hint "solution") or nothing but the answer ("answer"), closed as replies are to close."""
    last, solution = FINISH[row["kind"]][0].format(row["answer"]), row["solution"] if hint == "solution" else ""
    return solution if last in solution else f"{solution}\n{last}".strip()

def prompt_text(tokenizer, row, shots=(), reference=""):
    """What the student reads; with `reference`, its privileged teacher. Both end in the same instruction and prefix."""
    if row["kind"] == "toy":
        return row["question"] + (f" Hint : {reference}\nAnswer :" if reference else " Answer :")
    finish, word = FINISH[row["kind"]]
    ask = f'\n\nReason step by step, then finish with "{finish.format(word)}".'
    hint = f"\n\nReference solution:\n{reference}\n\nNow derive the answer in your own words." if reference else ""
    turns = [turn for shot in shots for turn in (shot["question"] + ask, reference_text(shot, "solution"))]
    turns.append(row["question"] + hint + ask)
    if tokenizer.chat_template:  # enable_thinking: for Qwen3 and its like, others ignore it
        turns = [dict(role="assistant" if i % 2 else "user", content=turn) for i, turn in enumerate(turns)]
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    return "".join(turn + "\n\n" if i % 2 else f"Question: {turn}\nSolution: " for i, turn in enumerate(turns)).strip()

def encode(tokenizer, texts):
    """Ids with exactly one start token where the tokenizer knows one: a template writes it, plain text gets it here."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokenizer.chat_template and tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]:
        ids = [[tokenizer.bos_token_id, *x] for x in ids]
    return ids

def encode_rows(tokenizer, rows, shots, hint):
    """Problems {question, solution, answer, kind} + prompt, prompt_ids, teacher_ids. hint: of the privileged teacher's
    prompt, see reference_text; "none" gives the teacher the student's. shots: solved problems put in front of each."""
    reads = lambda reference: encode(tokenizer, [prompt_text(tokenizer, row, shots, reference(row)) for row in rows])
    ids = reads(lambda row: "")
    hinted = ids if hint == "none" else reads(lambda row: reference_text(row, hint))
    return [row | dict(prompt=row["question"], prompt_ids=a, teacher_ids=b) for row, a, b in zip(rows, ids, hinted)]

def check_teacher(tokenizer, teacher_tokenizer, names, widths):
    """The teacher reads the student's ids, logit against logit: same token maps, same widths. names, widths: pairs."""
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    odd = sorted(token for token in ours | theirs if ours.get(token) != theirs.get(token))
    if odd:
        raise ValueError(f"{names[0]} and {names[1]} have different token maps: {len(odd)} tokens, such as {odd[0]!r},"
                         f" id {ours.get(odd[0])} and id {theirs.get(odd[0])}; use a teacher of the same family")
    if widths[0] != widths[1]:
        raise ValueError(f"the logits of {names[0]} are {widths[0]} wide, those of {names[1]} {widths[1]}")

@functools.lru_cache(2)
def epoch(n, seed, number):
    order = list(range(n))
    random.Random(f"{seed} {number}").shuffle(order)
    return order

def draw_problems(n, count, seed, step):
    """Indices of this step's problems: shuffled epochs, one after the other, without replacement in each."""
    return [epoch(n, seed, i // n)[i % n] for i in range((step - 1) * count, step * count)]

# --- 2. Rollouts -----------------------------------------------------------------------------------------------------

def left_pad(prompts, pad_id, device=None):
    """Prompts on the right edge, so that position n of every response sits in the same column.

    prompts: P lists of ids. Returns ids [P, L] long, mask [P, L] long (1 = real), positions [P, L] (pads at 0).
    """
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], dtype=torch.long, device=device)
    # From lengths, never from `ids != pad_id`: with pad == eos that would also hide real end tokens.
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.long, device=device)
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)

def cache_name(model):
    """What this transformers release calls the key/value cache, as an argument and in the output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

@contextlib.contextmanager
def packed(model):
    """For sampling on a CPU: inside, large float32 linear layers read a second copy of their weights, laid out by oneDNN. In a
    decoding step few rows meet all weights, which torch's own product may read at a third of the memory's speed. No gradients
    inside; adapters that are on when it begins are added up and stay on."""
    dnn, layers = torch.ops.mkldnn, {}
    for m in model.modules() if hasattr(dnn, "_linear_pointwise") else ():  # a torch without oneDNN: nothing happens
        base = m.base if isinstance(m, LoRA) and m.on else m
        if type(base) is torch.nn.Linear and base.weight.numel() > 1e5 and "forward" not in vars(m) and (
                base.weight.device.type, base.weight.dtype) == ("cpu", torch.float32):
            layers.setdefault(base, m)  # modules() has an adapter before its base
    try:
        for base, m in layers.items():
            blocks = dnn._reorder_linear_weight(base.weight.detach() if m is base else m.merged(), 8)  # 8 rows: a hint
            m.forward = lambda x, w=blocks, b=base.bias: dnn._linear_pointwise(x, w, b, "none", [], "")
        yield
    finally:
        [vars(m).pop("forward", None) for m in layers.values()]

def filter_logits(logits, top_p=1.0, top_k=0):
    """Nucleus and top-k filters. logits [..., V], already divided by the temperature -> the same with -inf outside."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    if top_p < 1:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True)
        outside = probs.cumsum(-1) - probs >= top_p  # the mass BEFORE a token: the likeliest one always stays
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -math.inf)
    return logits

@torch.no_grad()
def sample(model, prompts, group_size, max_new_tokens, temperature=1.0, *, eos_ids, pad_id, generator=None,
           uniforms=None, top_p=1.0, top_k=0):
    """Sample `group_size` responses for each prompt. Temperature 0 is greedy.

    model: any transformers causal LM in eval mode. prompts: P lists of ids. eos_ids: every id that ends a response.
    uniforms [B, N] in [0, 1): row b, position n is drawn with uniforms[b, n]; made from `generator` when not given.
    Returns tokens [B, N] long (pad_id after the end), mask [B, N] bool (the first end token is in, all after it is
    out; a row without one is truncated), logprobs [B, N] float32 of the distribution sampled from (0 where masked).
    Group i is rows i*G .. i*G+G-1. N <= max_new_tokens: the longest response decides.
    Settings are arguments on purpose: a checkpoint's own generation defaults must not slip in.
    """
    device, rows = next(model.parameters()).device, len(prompts) * group_size
    if uniforms is None:  # greedy draws none: an evaluation leaves the caller's random state as it was
        uniforms = torch.rand(rows, max_new_tokens, generator=generator) if temperature else torch.zeros(rows, 1)
    uniforms, eos = uniforms.to(device), torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
    tokens = torch.full((rows, max_new_tokens), pad_id, dtype=torch.long, device=device)
    mask = torch.zeros(rows, max_new_tokens, dtype=torch.bool, device=device)
    logprobs = torch.zeros(rows, max_new_tokens, device=device)

    # Each prompt is read once; its key/value cache is then repeated for the G responses.
    ids, attention, positions = left_pad(prompts, pad_id, device)  # [P, L]
    run = torch.inference_mode()(lambda **kw: model(**kw))  # not all of this function: its tokens go into graphs later
    out = run(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache, width = out[kv := cache_name(model)], ids.shape[1]
    cache.batch_repeat_interleave(group_size)
    logits = out.logits[:, -1].repeat_interleave(group_size, 0)  # [B, V]; [:, -1] also suits a model that gave all
    attention = F.pad(attention, (0, max_new_tokens), value=1).repeat_interleave(group_size, 0)  # [B, L+N]
    positions = positions[:, -1:].repeat_interleave(group_size, 0)  # [B, 1]
    alive = torch.arange(rows, device=device)  # rows of the output that are still being written

    for n in range(max_new_tokens):
        if temperature == 0:
            y = logits.argmax(-1)
            logp = logits.float().log_softmax(-1)
        else:
            logp = filter_logits(logits.float() / temperature, top_p, top_k).log_softmax(-1)
            cdf = logp.exp().cumsum(-1)
            # right=True: the first id whose CDF is strictly above u, so an id of probability 0 is never drawn.
            y = torch.searchsorted(cdf, uniforms[alive, n, None] * cdf[:, -1:], right=True)[:, 0].clamp(max=cdf.shape[1] - 1)
        tokens[alive, n], mask[alive, n] = y, True
        logprobs[alive, n] = logp.gather(-1, y[:, None]).squeeze(-1)
        going = torch.isin(y, eos, invert=True)
        if n + 1 == max_new_tokens or not going.any():
            break
        if not going.all():  # finished rows leave the batch: the forward pass shrinks with them
            keep = going.nonzero().squeeze(-1)
            cache.batch_select_indices(keep)
            alive, y, attention, positions = alive[keep], y[keep], attention[keep], positions[keep]
        positions = positions + 1
        logits = run(input_ids=y[:, None], attention_mask=attention[:, : width + n + 1], position_ids=positions,
                     use_cache=True, **{kv: cache}).logits[:, -1]
    return tokens[:, : n + 1], mask[:, : n + 1], logprobs[:, : n + 1]

def decode(tokenizer, tokens, mask):
    """Text of each row, cut by the mask (the first end token), never by looking for pad ids."""
    return [tokenizer.decode(t[m].tolist(), skip_special_tokens=True) for t, m in zip(tokens.cpu(), mask.cpu())]

# --- 3. Reward -------------------------------------------------------------------------------------------------------

# A number: groups of exactly three digits (so `3,8` stays a list), decimals, exponent; then `/b`, a whole part before
# the fraction, `\cdot10^n`. Exponents stop at three digits because 1e999999999 would fill the memory.
DIGITS = r"(?:(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
NUMBER = re.compile(rf"((?<![\w)\]}}])[-+])?(?:(\d{{1,9}}) (?=\d{{1,9}}/\d))?({DIGITS})(?: ?/ ?(-?{DIGITS}))?"
                    r"(?: ?\\cdot ?10\^\{?([-+]?\d{1,3})\}?)?")
# A number with one of these beside it is only a piece of something, or denied: 5\sqrt{3}, 10-12, 5 or 7, not 40.
BEFORE = re.compile(r"(?:\d[ .,]?|[*/^_+×÷±] ?|- |\d ?-|\d,? (?:and|or) |\bnot |\\\w+ ?\{?)$")
AFTER = re.compile(r"[\s,]*(?:(?:or|and|to|by|x|times)\b|[-+*/^×÷:.])?\s*[-+]?\.?\d|\s*[\\^_]|[eE][-+]?\d")
QUESTION = re.compile(r"^[# \t]*(?:next |new )?(?:question|problem|q|human|user)[ #\d]*:", re.M | re.I)
STATED = re.compile(r"\banswer(?:\s+(?:is|was|equals|(?:should|must|would|will) be)\b(?!\s+not\b)|\s*[:=])[:\s]*"
                    r"|^A:(?=\s*\W{0,3}\d)", re.M | re.I)  # bare `A:` only before a number: in arc it labels an option
CLAUSE_END = re.compile(r"[;!?]|\.(?!\d)|,(?!\s*(?:-?\d|\(?(?:[A-E]|or|and)\b))")
HEDGE = re.compile(r"\?|\bI (?:can(?:not|.t)|don.t|do not)\b|\b(?:not |un)sure\b|\d,? or -?\$?\d|\b(?:either|maybe|"
                   r"perhaps|possibly|guess|candidates|so far)\b|\b(?:and|or|plus|minus|times|of|to|for)$", re.I)
CHOICE = re.compile(r"^(?i:(?:the )?(?:option|choice|letter) )?\W{0,5}(?:([A-E1-5])(?![\w'])|([a-e])(?=[).:]|\W{0,5}$))"
                    r"(?!\)?[\s,/&]*(?:or|and)\W+[A-E1-5]\b|[\s,/&]+[A-E1-5]\b|.*\([A-E1-5]\))")  # not `A or B`
LABEL = re.compile(r"\(([A-E1-5])\)|^[^\w\n]{0,5}([A-E1-5])(?:[).:]|[^\w\n]*$)", re.M)
EXTRAS = re.compile(r"^\\?[a-zA-Z]\w{0,20}(?:\(\w\))? ?= ?(?=[^=]+$)|"  # `x =` in front, unit behind
                    r"(?<=[\d}]) (?:[a-zA-Z]{2,20}(?: [a-zA-Z]{2,20}){0,2}|[mgsLJNVWC])(?:/[a-z]+)?(?:\^\d)?$")
LATEX = [(re.compile(pattern), new) for pattern, new in (
    (r"[−–]", "-"), (r"\\[dt]frac", r"\\frac"), (r"\\times", r"\\cdot"), (r"\{,\}", ","),
    (r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf|mbox) ?\{([^{}]*)\}", r" \1"),
    (r"\\(?:left|right|boxed)(?![a-zA-Z])|\\! ?|\\?[$%]|(?<!\\)\\[()\[\]]|\^\{?\\circ\}?|°", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad\b", " "), (r"\s+", " "), (r"([\^_])\{(\w)\}", r"\1\2"),
    (r"\\(frac|sqrt) ?(\d)", r"\\\1{\2}"), (r"(\\frac\{[^{}]*\}) ?(\d)", r"\1{\2}"), (r"(?<=\d) ?\\frac", r" \\frac"),
    (rf"\\frac\{{(-?{DIGITS})\}}\{{(-?{DIGITS})\}}", r"\1/\2"))]

def verify(completion: str, gold: str, kind: str) -> int:
    r"""1 if the reply's final answer is the gold one, else 0; linear time, never raises. kind: a key of FINISH.

    1. <think> blocks are dropped. A `Question:` line that opens the reply is an echo, dropped; a later one is an
       invented next question, and the text ends there.
    2. The LAST `####` counts, else the last \boxed{}, else the last <answer>, else the last "answer is", "Answer:"
       or "A:" line. If it is empty, cut off or undecided (5 or 7), nothing earlier is tried instead.
    3. Without any: gsm8k and svamp take the last number of the closing sentence unless that hedges, asks or breaks off;
       arc takes the only option label in the reply. math always wants a box.
    4. Numbers are compared as exact fractions: 48.0 = 48, 3/4 = 0.75, 35% = 35, but 0.33 is not 1/3.
    5. math: equal numbers, else equal normalised LaTeX; `x =` and units are ignored where one side lacks them.
    6. A gold that cannot be read (empty, or words for gsm8k) gives 0 to every reply.
    """
    judge = {"toy": _same_number, "gsm8k": _same_number, "svamp": _same_number, "math": _same_math, "arc": _same_choice}[kind]
    return int(judge(_own_words(str(completion)), str(gold).strip()))

def _own_words(text):
    """The reply without reasoning, bold marks, echoed question and invented next question."""
    text = re.sub(r"(?is)<think>.*?(?:</think>|\Z)|\A(?:(?!<think>).)*?</think>", "", text)
    first, *later = QUESTION.split(re.sub(r"(?<!\d)\*\*|\*\*(?!\d)", "", text))  # 2**3 is a power, not bold
    return first if first.strip() or not later else re.split(r"[?\n]", later[0] + "\n", maxsplit=1)[1]

def _box(text):
    r"""Content of the last \boxed{} with balanced braces; "" if cut off, None without a box."""
    _, box, text = text.rpartition(r"\boxed{")
    depth = 1
    for brace in re.finditer(r"(?s)\\.|[{}]", text if box else ""):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[:brace.start()]
    return "" if box else None

def _marked(text):
    """First clause behind the mark that counts (rule 2), None without: `12 pears`, not `which is 3 more than 9`."""
    if "####" in text:
        phrase = text.rpartition("####")[2]
    elif (phrase := _box(text)) is None:
        tags = re.findall(r"(?i)<answer>([^<]*)</answer>", text)
        ends = [match.end() for match in STATED.finditer(text)]
        phrase = tags[-1] if tags else text[ends[-1]:] if ends else None
    return phrase and CLAUSE_END.split(_latex(phrase.strip().split("\n", 1)[0]), maxsplit=1)[0].strip()

def _closing(text):
    """Last sentence of a reply; "" if it hedges, or ends neither in a stop nor in the number and its unit."""
    sentence = re.split(r"(?<=[.!?])\s+|\n+", text.strip())[-1]
    ended = re.search(r"(?:[.!]|\d\S*(?: \w+)?)\W*$", sentence[-60:])  # searching all of it would take quadratic time
    return _latex(sentence) if ended and not HEDGE.search(sentence) else ""

def _same_number(text, gold):
    """gsm8k, svamp: the first number behind the mark, or else the last one of the closing sentence."""
    marked = _marked(text)
    clause = (_closing(text) if marked is None else marked).rpartition("=")[2]
    found = list(NUMBER.finditer(clause))[slice(-1, None) if marked is None else slice(1)]
    alone = [m[0] for m in found if not (BEFORE.search(clause[:m.start()][-20:]) or AFTER.match(clause, m.end()))]
    value = _value(_latex(gold))
    return value is not None and [value] == [_value(number) for number in alone]

def _value(text):
    """Exact value of a number, else None; also for x/0 and for lengths that int() refuses or takes seconds over."""
    if len(text) > 1000 or not (match := NUMBER.fullmatch(text)):
        return None
    sign, whole, *parts, power = match.groups()
    top, bottom = (Fraction(re.sub("[, ]", "", part or "1")) for part in parts)
    size = bottom and (int(whole or 0) + top / bottom) * Fraction(10) ** int(power or 0)
    return None if bottom == 0 else -size if sign == "-" else size

def _latex(text):
    """One spelling where LaTeX has several; currency, percent and degree signs and the full stop are dropped."""
    for pattern, new in LATEX:
        text = pattern.sub(new, text)
    return text.strip().rstrip(" .")

def _same_math(text, gold):
    """math: the box holds the same number, else the same text; spaces count only between digits."""
    sides = [_latex(_box(text) or ""), _latex(gold)]
    bare = [EXTRAS.sub("", side) for side in sides]
    if bare[0] == sides[0] or bare[1] == sides[1]:  # where both name a variable or a unit, it must be the same one
        sides = bare
    values = [_value(side) for side in sides]
    reply, gold = (re.sub(r"(?<!\d) | (?!\d)", "", side) for side in sides)
    return reply == gold != "" if values[1] is None else values[0] == values[1]

def _same_choice(text, gold):
    """arc: the label behind the mark, or else the only label of the reply; digits where the gold is a digit."""
    marked = _marked(text)
    found = LABEL.findall(text) if marked is None else CHOICE.findall(marked)
    return {(a or b).upper() for a, b in found if (a or b).isdigit() == gold.isdigit()} == {gold.upper()}

def group_advantages(rewards, group_size, std="unbiased", eps=1e-4):
    """A_i = (r_i - mean) / (std + eps) within each group of `group_size` consecutive rows [M3 eq 2].

    rewards [B] -> [B] float32. std: "unbiased" (the paper's printed advantages fit only this), "population", "none"
    (centre only, as Dr. GRPO). An all-equal group gets exactly 0, never 0/eps. |A| stays below sqrt(G).
    Errors: ValueError for G < 2 (a group of one has no spread), B not a multiple of G, or a reward that is not finite.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not make groups of {group_size} (at least 2)")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"reward of row {int((~torch.isfinite(rewards)).nonzero()[0])} is not a finite number")
    r = rewards.float().view(-1, group_size)  # [P, G]
    advantages = r - r.mean(1, keepdim=True)
    if std != "none":
        advantages = advantages / (r.std(1, keepdim=True, correction=1 if std == "unbiased" else 0) + eps)
    equal = (r == r[:, :1]).all(1, keepdim=True)
    return torch.where(equal, 0.0, advantages).flatten()

# --- 4. Scores: the same response tokens, read after the student's prompt and after the teacher's --------------------

def split_head(model):
    """(backbone, head): head(backbone(ids).last_hidden_state) is model(ids).logits; tried here on 8 random ids. head is
    the output layer itself, or for soft-capped (Gemma-2) and scaled (Cohere, Granite) logits a function around it."""
    config, backbone, layer = model.config.get_text_config(), model.base_model, model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    head = layer if scale == 1 and not cap else lambda h: (
        cap * torch.tanh(layer(h) * scale / cap) if cap else layer(h) * scale)
    ids = torch.randint(config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        want, ours = model(input_ids=ids).logits.float(), head(backbone(input_ids=ids).last_hidden_state).float()
    if want.shape != ours.shape or (want - ours).abs().max() > 8 * torch.finfo(model.dtype).eps * want.abs().max():
        raise ValueError(f"{type(model).__name__}: its logits are not its output layer's, nor those soft-capped or scaled")
    return backbone, head

def hidden_states(backbone, prompts, tokens, pad_id, share=True):
    """Hidden states h [B, N, d] from which the head predicts tokens[b, n], given prompts[b] + tokens[b, :n].

    backbone: the transformer without its output head. prompts: B lists of ids, in any order. tokens [B, N], right-padded.
    Only `prompts` differs between student and teacher, so no two tokens can slip out of step. share=False reads the
    prompt once per row, without a cache: slower, equal, and what gradient checkpointing needs.
    """
    # Each distinct prompt is read once; its cache is copied to its rows, and gradients flow back through the copies. All
    # but its last id goes into the cache; that one predicts response position 0: the N columns from it on are those wanted.
    order, kv, cache = {}, cache_name(backbone), None
    which = torch.tensor([order.setdefault(tuple(p), len(order)) for p in prompts], device=tokens.device)  # [B]
    ids, attention, positions = left_pad(list(order), pad_id, tokens.device)  # [P, L]
    if share and ids.shape[1] > 1:
        cache = backbone(input_ids=ids[:, :-1], attention_mask=attention[:, :-1], position_ids=positions[:, :-1],
                         use_cache=True)[kv]
        for layer in cache.layers:  # not by [which]: on a CPU its gradient adds up in any order, and no run is like the next
            layer.keys, layer.values = (x.index_select(0, which) for x in (layer.keys, layer.values))
    ids, positions = ids[which], positions[which]  # [B, L]
    # Right padding needs no mask: attention is causal, and padded positions are thrown away by the caller.
    attention = F.pad(attention[which], (0, tokens.shape[1] - 1), value=1)  # [B, L-1+N]
    inputs = torch.cat([ids[:, -1:], tokens[:, :-1]], 1)  # [B, N]
    if not share:
        return backbone(input_ids=torch.cat([ids[:, :-1], inputs], 1), attention_mask=attention,
                        position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
                        use_cache=False).last_hidden_state[:, -tokens.shape[1]:]
    positions = positions[:, -1:] + torch.arange(tokens.shape[1], device=tokens.device)
    return backbone(input_ids=inputs, attention_mask=attention, position_ids=positions, use_cache=cache is not None,
                    **{kv: cache}).last_hidden_state

def token_weights(mask, total_rows, total_tokens=None):
    """What every token's residual is multiplied by, so that plain sums are the means of eqs 1 and 2.

    mask [B, N] bool -> [B, N] float32. Default: 1/N_i per response, then the mean over total_rows responses. With
    total_tokens: one mean over all tokens. Totals are the whole step's: a micro-batch that divided by its own count
    would weigh its tokens differently from its neighbour's.
    """
    weights = mask.float()
    if total_tokens is not None:
        return weights / max(total_tokens, 1)
    return weights / weights.sum(1, keepdim=True).clamp(min=1) / total_rows

# --- 5. Residuals: exact gradients in the student's logits -----------------------------------------------------------

def log_ratio(log_p, log_q):
    """log p - log q, and 0 where p = 0: a padded vocabulary holds -inf on both sides, and -inf + inf is NaN."""
    return torch.where(log_p > -math.inf, log_p - log_q, 0.0)

def kl(log_p, log_q):
    """KL(p||q) = sum_v p (log p - log q) in nats. log_p, log_q [..., V] -> [...]."""
    return (log_p.exp() * log_ratio(log_p, log_q)).sum(-1)

def log_mixture(log_ps, log_pt, lam):
    """log m of m = lam p_T + (1 - lam) p_S: a mixture of probabilities, never of log-probabilities."""
    return torch.logaddexp(log_pt + math.log(lam), log_ps + math.log1p(-lam))

def divergence(student_logits, teacher_logits, kind="jsd", lam=0.5, k=16):
    """Divergence of teacher and student per position, in nats. logits [..., V] -> [...] float32 (float64 stays).

    kind: "fkl"  KL(p_T||p_S)
          "rkl"  KL(p_S||p_T)
          "jsd"  D_lam = lam KL(p_T||m) + (1-lam) KL(p_S||m), m = lam p_T + (1-lam) p_S   [M3 eq 1], 0 < lam < 1.
                 Equals TRL's beta = lam inside (0, 1); D_lam -> 0 at both ends, TRL's ends are fkl and rkl instead.
          "rkl-topk"  [VLS eq 3.2]: the student's k likeliest tokens, its weights renormalised there, the log-ratio
                 not. This is no KL and can be negative; it is reported raw.
    """
    log_ps, log_pt = log_softmax(student_logits), log_softmax(teacher_logits)
    if kind == "fkl":
        return kl(log_pt, log_ps)
    if kind == "rkl":
        return kl(log_ps, log_pt)
    if kind == "jsd":
        log_m = log_mixture(log_ps, log_pt, lam)
        return lam * kl(log_pt, log_m) + (1 - lam) * kl(log_ps, log_m)
    if kind == "rkl-topk":
        top, index = log_ps.topk(min(k, log_ps.shape[-1]))
        return (top.softmax(-1) * log_ratio(top, log_pt.gather(-1, index))).sum(-1)
    raise ValueError(f"unknown divergence {kind!r}")

def distill_residual(student_logits, teacher_logits, kind="fkl", lam=0.5, tau=None, k=16):
    """delta_D = d divergence / d student_logits, in closed form. logits [..., V] -> [..., V]; rows sum to 0.

    Near agreement the jsd residual is lam (1-lam) times the fkl one: a quarter of it at lam = 1/2.
    tau: positions whose divergence (the sum over V) is above tau give exactly 0, the gradient of min(D, tau) [eq 1].
    """
    log_ps, log_pt = log_softmax(student_logits), log_softmax(teacher_logits)
    p_s = log_ps.exp()
    if kind == "fkl":
        delta = p_s - log_pt.exp()  # eq 5
    elif kind == "rkl":
        delta = p_s * (log_ratio(log_ps, log_pt) - kl(log_ps, log_pt)[..., None])
    elif kind == "jsd":
        log_m = log_mixture(log_ps, log_pt, lam)
        delta = (1 - lam) * p_s * (log_ratio(log_ps, log_m) - kl(log_ps, log_m)[..., None])
    elif kind == "rkl-topk":  # the support is held fixed; only p_s reaches entries outside it
        top, index = log_ps.topk(min(k, log_ps.shape[-1]))
        q, ratio = top.softmax(-1), log_ratio(top, log_pt.gather(-1, index))
        delta = (-p_s).scatter_add(-1, index, q * (1 + ratio - (q * ratio).sum(-1, keepdim=True)))
    else:
        raise ValueError(f"unknown divergence {kind!r}")
    if tau is not None:
        delta = delta * (divergence(student_logits, teacher_logits, kind, lam, k) < tau)[..., None]
    return delta

def reward_residual(student_logits, tokens, advantages):
    """delta_R = -A (e_y - p_S) [eq 5]: descending it lifts the sampled token when A > 0.

    student_logits [B, N, V], tokens [B, N], advantages [B] (one per response) or [B, N] (one per token) -> [B, N, V].
    """
    # Axes are added on the right by hand: with B == N, plain broadcasting would weigh columns instead of rows.
    a = advantages.reshape(advantages.shape + (1,) * (student_logits.dim() - advantages.dim()))
    p_s, y = log_softmax(student_logits).exp(), tokens[..., None]
    return a * p_s.scatter_add(-1, y, torch.full_like(y, -1, dtype=p_s.dtype))  # no one-hot: it would be a third [.., V]

def log_softmax(logits):
    """In float32 at least: bf16 log-probabilities are off by up to 0.1 per token."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)

# --- 6. The M3 family: gates on normalised residuals; and from seeds to gradients ------------------------------------

def normalize(residual, eps):
    """delta / (||delta|| + eps) over the vocabulary [eq 10]. [..., V] -> [..., V], norms in [0, 1); 0 stays 0.

    eps is a real hyper-parameter, in units of a residual's norm (fkl's: 0 .. sqrt 2, the reward's: times |A|): far below
    it residuals stay small, far above it they become unit vectors. 1e-8 lifts a token with ||delta|| = 1e-4 to the force of one with 1.
    """
    return residual / (residual.norm(dim=-1, keepdim=True) + eps)

def gate_select(K, alpha_max):
    """M3-Select [eq 12]: the teacher speaks where K_DR(n) >= 0, and is silent on conflict. K [...] -> [...].

    K = 0 counts as agreement, so tokens with A = 0 (no reward signal at all) do listen to the teacher.
    """
    return alpha_max * (K >= 0).float()

def gate_soft(cos, alpha_max, beta):
    """M3-Soft [eq 14]: alpha_max sigmoid(beta cos phi_n). beta = 0: alpha_max/2; beta -> inf: Select, except at cos = 0."""
    return alpha_max * torch.sigmoid(beta * cos)

def m3_seed(delta_D, delta_R, alpha, eps):
    """Eq 11 per token: alpha_n delta_D^ + (1 - alpha_n) delta_R^. [T, V], [T, V], [T] -> [T, V].

    Token weights (1/N) and s_bar are the caller's: a factor of the whole gradient can wait for the batch that defines it.
    """
    return alpha[..., None] * normalize(delta_D, eps) + (1 - alpha[..., None]) * normalize(delta_R, eps)

def accumulate(into, outputs, inputs, seed):
    """Add the vector-Jacobian product seed . d outputs / d inputs to the tensors `into`, one per input. outputs and seed: any
    equal shape. The graph is kept, so that several seeds can share one forward pass."""
    grads = torch.autograd.grad(outputs, inputs, seed, retain_graph=True, allow_unused=True)
    for total, grad in zip(into, grads):
        if grad is not None:
            total += grad

def join(prompts, replies, mask):
    """Prompts and replies as one batch: prompts end in one column, replies are the last N columns.

    prompts: B lists of ids. replies, mask [B, N] -> ids, attention (1 = real), positions, all [B, L] long. The fill in
    front of a prompt is id 0, which nobody reads.
    """
    ids, attention, _ = left_pad(prompts, 0, replies.device)
    ids = torch.cat([ids, replies], 1)
    attention = torch.cat([attention, mask.long()], 1)
    return ids, attention, (attention.cumsum(-1) - 1).clamp(min=0)

def isotropic_kernel(delta_D, delta_R):
    """K_DR(n) where J^T J is taken to be 1: delta_D . delta_R [M3 App. I, AA]; and its cosine in [-1, 1].

    delta_D, delta_R [..., V] -> K, cos [...], float32 or better; exactly 0 where a residual is 0.
    """
    wide = torch.promote_types(delta_D.dtype, torch.float32)
    delta_D, delta_R = delta_D.to(wide), delta_R.to(wide)
    K = (delta_D * delta_R).sum(-1)
    norms = delta_D.norm(dim=-1) * delta_R.norm(dim=-1)
    return K, (K / norms.clamp(min=1e-37)).clamp(-1, 1)

def dot(a, b):
    """Sum over all entries of a * b, as a float, in float32 or better; 0 where one of them is None."""
    if a is None or b is None:
        return 0.0
    wide = torch.promote_types(a.dtype, torch.float32)
    return float(a.to(wide).flatten() @ b.to(wide).flatten())

def ratios(DR, DD, RR):
    """geometry() from the three inner products <g_D, g_R>, ||g_D||^2, ||g_R||^2."""
    norm_R, norm_D = RR**0.5, DD**0.5
    if norm_R == 0:
        return dict(norm_R=norm_R, norm_D=norm_D, kappa=None, phi=None)
    if norm_D == 0:
        return dict(norm_R=norm_R, norm_D=norm_D, kappa=math.inf, phi=0.0)
    phi = max(-1.0, min(1.0, DR / norm_R / norm_D))
    return dict(norm_R=norm_R, norm_D=norm_D, kappa=norm_R / norm_D, phi=phi)

def geometry(g_R, g_D):
    """Floats dict(norm_R, norm_D, kappa = ||g_R||/||g_D|| [M3 eq 8], phi = cos) of two lists of gradients (or None).

    g_R = 0, a step without a reward signal: kappa and phi are None, so that no mean counts them. Only g_D = 0: kappa is
    inf and phi 0. <g_R, g_D> N^2 = the sum over all pairs of positions [M3 eq 7]; sum_n K_DR(n) is its diagonal [eq 72].
    """
    pairs = list(zip(g_D, g_R, strict=True))
    return ratios(sum(dot(d, r) for d, r in pairs), sum(dot(d, d) for d in g_D), sum(dot(r, r) for r in g_R))

def min_norm_alpha(norm_R, norm_D, phi):
    """The alpha in [0, 1] with the shortest alpha g_D + (1-alpha) g_R [M3 eq 111]; 1/2 where all are equally long."""
    product = (phi or 0.0) * norm_R * norm_D  # phi is None where g_R = 0
    apart = norm_R**2 + norm_D**2 - 2 * product  # ||g_D - g_R||^2
    return max(0.0, min(1.0, (norm_R**2 - product) / apart)) if apart > 0 else 0.5

# --- 7. Baselines: other ways to combine the same two gradients, or the same two signals -----------------------------

def gradnorm_weights(norm_R, norm_D):
    """(w_R, w_D) = (1, kappa) / (1 + kappa): GradNorm's fixed point at equal target rates, both norms equal [Prop. 5].

    Written with the norms, so nothing divides by 0. No reward gradient: (1, 0), its partner is to shrink too; none: (1/2, 1/2).
    """
    total = norm_R + norm_D
    return (norm_D / total, norm_R / total) if total > 0 else (0.5, 0.5)

def pcgrad_weights(norm_R, norm_D, phi):
    """(w_R, w_D) of PCGrad's sum: under conflict each gradient loses its component along the ORIGINAL other one.

    g_R - (g_R.g_D / ||g_D||^2) g_D + g_D - (g_R.g_D / ||g_R||^2) g_R: still a combination of the two, so no projection
    is carried out. Each part shrinks by sqrt(1 - Phi^2), their ratio stays [Prop. 19]. phi >= 0: the plain sum.
    """
    if phi >= 0:
        return 1.0, 1.0
    return 1 - phi * norm_D / norm_R, 1 - phi * norm_R / norm_D

def rlsd_advantages(advantages, logp_T, logp_S, lam, clip=0.2):
    """RLSD: A_n = A [(1 - lam) + lam clip(w, 1 - clip, 1 + clip)], w = (p_T(y)/p_S(y))^sign(A). All [T] -> [T].

    The teacher scales the size of the reward's push, by at most lam*clip, and never touches its sign.
    """
    w = (advantages.sign() * (logp_T - logp_S)).exp()
    return advantages * ((1 - lam) + lam * w.clamp(1 - clip, 1 + clip))

def rlsd_residual(student_logits, teacher_logits, tokens, advantages, lam):
    """The reward residual of these advantages. logits [T, V], tokens and advantages [T] -> [T, V]."""
    at = lambda logits: log_softmax(logits).gather(-1, tokens[..., None])[..., 0]
    return reward_residual(student_logits, tokens, rlsd_advantages(advantages, at(teacher_logits), at(student_logits), lam))

def sdpo_siblings(rewards, group_size):
    """SDPO: for each row the first OTHER row of its group with reward 1, or -1. rewards [B] -> list of B ints."""
    group = lambda i: range(i - i % group_size, i - i % group_size + group_size)
    return [next((j for j in group(i) if j != i and rewards[j] > 0), -1) for i in range(len(rewards))]

def sdpo_residual(student_logits, teacher_logits, k=100):
    """SDPO: gradient of the JSD (lam = 1/2) over the student's k likeliest tokens and one bucket for all others.

    logits [..., V] -> [..., V]. In bucket space this is distill_residual; a bucket's push is shared among its tokens
    in proportion to p_S, because d log(sum of p) / dz_v = p_v / sum for the tokens inside.
    """
    log_ps, log_pt = log_softmax(student_logits), log_softmax(teacher_logits)
    top = log_ps.topk(min(k, log_ps.shape[-1]), dim=-1).indices
    inside = torch.zeros_like(log_ps, dtype=torch.bool).scatter(-1, top, True)
    buckets = []
    for log_p in (log_ps, log_pt):
        tail = log_p.masked_fill(inside, -math.inf).logsumexp(-1, keepdim=True)
        buckets.append(torch.cat([log_p.gather(-1, top), tail], -1))  # [..., k+1], sums to 1
    delta = distill_residual(*buckets, "jsd", 0.5)
    tail_share = log_ps.exp().masked_fill(inside, 0.0)
    tail_share = tail_share / tail_share.sum(-1, keepdim=True).clamp(min=1e-30)
    return (tail_share * delta[..., -1:]).scatter_add(-1, top, delta[..., :-1])

# --- 8. LoRA: few trainable weights, and a frozen teacher for free ---------------------------------------------------

class LoRA(torch.nn.Module):
    """base(x) + 2 B A x, base frozen. alpha = 2 rank, so alpha / rank is 2. A and B are float32, under bf16 too."""

    def __init__(self, base, rank):
        super().__init__()
        self.base, self.on, self.turned = base, True, type(base).__name__ == "Conv1D"  # GPT-2 keeps [in, out]
        n_out, n_in = base.weight.shape[::-1] if self.turned else base.weight.shape
        self.lora_A = torch.nn.Linear(n_in, rank, bias=False).to(base.weight.device, torch.float32)  # kaiming uniform
        self.lora_B = torch.nn.Linear(rank, n_out, bias=False).to(base.weight.device, torch.float32)
        torch.nn.init.zeros_(self.lora_B.weight)  # so that the first step starts exactly at the base model

    def forward(self, x):  # the sum is taken in float32 and rounded once
        y = self.base(x)
        return (y + self.lora_B(2 * self.lora_A(x.to(self.lora_A.weight.dtype)))).to(y.dtype) if self.on else y

    def merged(self):  # W + 2 B A, rounded once
        weight, delta = self.base.weight.detach(), 2 * self.lora_B.weight.detach() @ self.lora_A.weight.detach()
        return (weight + (delta.T if self.turned else delta)).to(weight.dtype)

def add_lora(model, rank, seed):
    """Freeze the model; put an adapter on every linear layer of its blocks (".0." in the name), not on the head."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # drawn on the CPU: the same adapter on every device
        for name, layer in list(model.requires_grad_(False).named_modules()):
            if re.search(r"\.\d+\.", name) and (isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"):
                model.set_submodule(name, LoRA(layer, rank))
    return model

@contextlib.contextmanager
def lora_off(model):
    """Inside, the model is the frozen base to the bit: the privileged teacher, without a second copy."""
    switch = lambda on: [setattr(layer, "on", on) for layer in model.modules() if isinstance(layer, LoRA)]
    try:
        yield switch(False)
    finally:
        switch(True)

def lora_state(model):  # model.load_state_dict(it, strict=False) puts it back
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}

def merged_state(model):
    """W + 2 B A under the base's own names, for save_pretrained(folder, state_dict=...). The model is not touched."""
    state = {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    return state | {f"{name}.weight": layer.merged() for name, layer in model.named_modules() if isinstance(layer, LoRA)}
