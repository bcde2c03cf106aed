"""M3 as pure functions: hybrid reward + on-policy distillation, one logit seed, one backward pass.

Copy these functions; this is not a library. m3_step (section 7) is the training step. Needs torch alone.

A student samples G responses per prompt. A verifier pays each 0 or 1. A teacher that sees more (the frozen
initial policy, reading the gold solution too) gives a distribution at every token. Both signals are
residuals, their exact gradients in the student's logits: any weighted sum of them, the seed, needs ONE
vector-Jacobian product (backward, section 7).

Papers: [M3] arXiv 2609.34849, [VLS] arXiv 2610.11247; equation numbers are theirs. Departures:
  1. No loss is differentiated by autograd. M3 re-weights and normalises residuals token by token, which no
     scalar loss expresses; they are closed form, and tests check them against float64 autograd.
  2. No ratio clip and no reference KL: one update per batch, so the ratio is 1.
  3. Eq 1 is clipped on the token's SUM. Clipping each vocabulary entry, as OPSD's code does,
     pushes the clipped entries down instead of leaving the token alone.
  4. Tokens are drawn by inverse CDF from uniforms fixed per (row, position), however rows are split.

Shapes: P prompts, G responses per prompt, B = P*G rows, N response positions, V vocabulary, d hidden size, T
real (unmasked) response tokens, laid out flat. p_S = softmax(z_S) student, p_T teacher, y sampled token,
A advantage, s the Signals and f the Settings of a method.
"""

import collections, contextlib, datetime, functools, inspect, math, random, re, unicodedata
from fractions import Fraction
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F

# --- 1. Prompts and problems --------------------------------------------------------------------------------

# A problem is a row {question, solution, answer, kind}. Its kind decides how the prompt reads, how a reply is
# to end and which rule of `verify` grades it. Here: the end, and the instruction's word for the answer.
FINISH = {"toy": ("#### {}", "number"), "gsm8k": ("#### {}", "number"), "svamp": ("#### {}", "number"),
          "math": (r"\boxed{{{}}}", "answer"), "arc": ("Answer: {}", "letter")}

def reference_text(row, hint):
    """What the teacher is shown: the worked solution (hint "solution") or the answer alone ("answer"), closed
    as replies are to close. Where a row has "misled", a wrong {solution, answer, kind}, that is shown."""
    shown = row.get("misled", row)
    last = FINISH[shown["kind"]][0].format(shown["answer"])
    solution = shown["solution"] if hint == "solution" else ""
    return solution if last in solution else f"{solution}\n{last}".strip()

def prompt_text(tokenizer, row, shots=(), reference="", date=None):
    """What the student reads; with `reference`, its privileged teacher. Both end in the same words.

    shots: solved problems put in front. date: the day that a chat template may write, "2026-12-31", or today.
    """
    if row["kind"] == "toy":
        hint = f" Hint : {reference}\n" if reference else " "
        return f"{row['question']}{hint}Answer :"
    finish, word = FINISH[row["kind"]]

    def ask(question, reference):
        hint = ""
        if reference:
            hint = f"\n\nReference solution:\n{reference}\n\nNow derive the answer in your own words."
        return f'{question}{hint}\n\nReason step by step, then finish with "{finish.format(word)}".'

    turns = []
    for shot in shots:  # the student reads these too: never a misled one
        worked = reference_text({name: value for name, value in shot.items() if name != "misled"}, "solution")
        # To a teacher, each shot also shows how a reference is used: a small one copies it far more often.
        turns += [ask(shot["question"], reference and worked), worked]
    turns.append(ask(row["question"], reference))
    if tokenizer.chat_template:
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        day = datetime.date.fromisoformat(date) if date else datetime.date.today()
        template = re.sub(r"""strftime_now\(\s*(?:format=)?(["'])(.*?)\1\s*\)""",
                          lambda call: f'"{day.strftime(call[2])}"', tokenizer.get_chat_template())
        return tokenizer.apply_chat_template(  # enable_thinking: for Qwen3 and its like, others ignore it
            messages, chat_template=template, tokenize=False, add_generation_prompt=True,
            enable_thinking=False)
    text = [turn + "\n\n" if i % 2 else f"Question: {turn}\nSolution: " for i, turn in enumerate(turns)]
    return "".join(text).strip()

def encode(tokenizer, texts):
    """Ids with one start token where the tokenizer knows one: a template writes it, else it is added."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    if not tokenizer.chat_template and tokenizer.bos_token_id in tokenizer("a")["input_ids"][:1]:
        ids = [[tokenizer.bos_token_id, *x] for x in ids]
    return ids

def check_teacher(tokenizer, teacher_tokenizer, names, widths):
    """The teacher reads the student's ids: same token maps, same widths of the logits. names, widths: pairs.
    Errors: ValueError."""
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    odd = sorted(token for token in ours | theirs if ours.get(token) != theirs.get(token))
    if odd:
        raise ValueError(
            f"{names[0]} and {names[1]} have different token maps: {len(odd)} tokens, such as {odd[0]!r}, id"
            f" {ours.get(odd[0])} and id {theirs.get(odd[0])}; use a teacher of the same family")
    if widths[0] != widths[1]:
        raise ValueError(f"the logits of {names[0]} are {widths[0]} wide, those of {names[1]} {widths[1]}")

@functools.lru_cache(2)
def epoch(n, seed, number):
    """The order of epoch `number` over n problems: a list of n indices."""
    order = list(range(n))
    random.Random(f"{seed} {number}").shuffle(order)
    return order

def draw_problems(n, count, seed, step):
    """Indices of this step's problems: shuffled epochs, one after the other, without replacement in each."""
    return [epoch(n, seed, i // n)[i % n] for i in range((step - 1) * count, step * count)]

# --- 2. Rollouts --------------------------------------------------------------------------------------------

def left_pad(prompts, pad_id=0, device=None):
    """P prompts (lists of ids) on one right edge -> ids, mask (1: real), positions, each [P, L] long."""
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    # From lengths, never from `ids != pad_id`: with pad == eos that would also hide real end tokens.
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask = torch.tensor(ids, device=device), torch.tensor(mask, device=device)
    return ids, mask, positions_of(mask)

def positions_of(mask):
    """Positions [.., L] of a mask of real tokens: each row counts from its own first one, pads stand at 0."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)

def cache_name(model):
    """What this transformers release calls the key/value cache, as an argument and in the output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

@contextlib.contextmanager
def packed(model):
    """For sampling on a CPU: inside, large float32 linear layers read weights laid out by oneDNN. torch's own
    product of few rows may read them at a third of the memory's speed. No gradients; adapters stay on.
    """
    onednn, layers = torch.ops.mkldnn, {}
    for module in model.modules() if hasattr(onednn, "_linear_pointwise") else []:
        base = module.base if isinstance(module, LoRA) and module.on else module
        large = type(base) is torch.nn.Linear and base.weight.numel() > 1e5 and "forward" not in vars(module)
        if large and base.weight.device.type == "cpu" and base.weight.dtype == torch.float32:
            layers.setdefault(base, module)  # modules() has an adapter before its base
    try:
        for base, module in layers.items():
            weight = base.weight.detach() if module is base else module.merged()
            blocks = onednn._reorder_linear_weight(weight, 8)  # 8 rows: a hint
            module.forward = functools.partial(onednn._linear_pointwise, W=blocks, B=base.bias, attr="none",
                                               scalars=[], algorithm="")
        yield
    finally:
        for module in layers.values():
            vars(module).pop("forward", None)

def draw(logits, temperature, uniforms):
    """A token per row by inverse CDF, the likeliest at temperature 0. logits [b, V] -> ids, log-probs [b]."""
    logp = (logits.float() / (temperature or 1)).log_softmax(-1)
    if temperature == 0:
        y = logits.argmax(-1)
    else:
        cdf = logp.exp().cumsum(-1)
        # right=True: the first id whose CDF is strictly above u, so an id of probability 0 is never drawn.
        y = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
        y = y[:, 0].clamp(max=cdf.shape[1] - 1)
    return y, logp.gather(-1, y[:, None])[:, 0]

@torch.no_grad()
def sample(model, prompts, group_size, max_new_tokens, temperature=1.0, *, eos_ids, pad_id, generator=None,
           uniforms=None):
    """`group_size` responses to each of P prompts (lists of ids); temperature 0 is greedy.

    model: a causal LM in eval mode; its own generation defaults are never read. eos_ids: every id that ends a
    response. uniforms [B, N] in [0, 1), one per (row, position): made from `generator` when not given.
    Returns tokens [B, N] long (pad_id after the end), mask [B, N] bool (True up to the first end token),
    logprobs [B, N] float32 of the distribution sampled from (0 where masked; greedy: of temperature 1).
    Group i is rows i*G .. i*G+G-1. ValueError: an empty prompt, no room for a token, a negative temperature.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError(f"max_new_tokens {max_new_tokens}, temperature {temperature}: want >= 1 and >= 0")
    if not all(prompts):
        raise ValueError("an empty prompt: it would be read as one pad token")
    device, shape = next(model.parameters()).device, (len(prompts) * group_size, max_new_tokens)
    if uniforms is None:  # greedy draws none: an evaluation leaves the caller's random state as it was
        uniforms = torch.rand(shape, generator=generator) if temperature else torch.zeros(shape)
    uniforms, eos = uniforms.to(device), torch.tensor(sorted(eos_ids), device=device)
    tokens = torch.full(shape, pad_id, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    logprobs = torch.zeros(shape, device=device)

    # Each prompt is read once; its key/value cache is then repeated for the G responses.
    ids, attention, positions = left_pad(prompts, pad_id, device)  # [P, L]
    # Inference mode for the model alone: the tokens that are made here go into graphs later.
    run = functools.partial(torch.inference_mode()(model.__call__), use_cache=True)
    out = run(input_ids=ids, attention_mask=attention, position_ids=positions, logits_to_keep=1)
    name, width = cache_name(model), ids.shape[1]
    cache = out[name]
    cache.batch_repeat_interleave(group_size)
    logits = out.logits[:, -1].repeat_interleave(group_size, 0)  # [B, V]; -1 also where a model gave all
    attention = F.pad(attention, (0, max_new_tokens), value=1).repeat_interleave(group_size, 0)  # [B, L+N]
    positions = positions[:, -1:].repeat_interleave(group_size, 0)  # [B, 1]
    alive = torch.arange(shape[0], device=device)  # rows of the output that are still being written

    for n in range(max_new_tokens):
        y, logprobs[alive, n] = draw(logits, temperature, uniforms[alive, n])
        tokens[alive, n], mask[alive, n] = y, True
        going = torch.isin(y, eos, invert=True)
        if n + 1 == max_new_tokens or not going.any():
            break
        if not going.all():  # finished rows leave the batch: the forward pass shrinks with them
            keep = going.nonzero().squeeze(-1)
            cache.batch_select_indices(keep)
            alive, y, attention, positions = alive[keep], y[keep], attention[keep], positions[keep]
        positions = positions + 1
        seen = attention[:, :width + n + 1]
        out = run(input_ids=y[:, None], attention_mask=seen, position_ids=positions, **{name: cache})
        logits = out.logits[:, -1]
    return tokens[:, :n + 1], mask[:, :n + 1], logprobs[:, :n + 1]

def decode(tokenizer, tokens, mask):
    """Text of each row, cut by the mask (the first end token), never by looking for pad ids."""
    rows = [row[real].tolist() for row, real in zip(tokens.cpu(), mask.cpu())]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]

# --- 3. Reward ----------------------------------------------------------------------------------------------

# A number: groups of exactly three digits (`3,8` is a list), no long exponent (it would fill the memory);
# whole part before a fraction, fraction or power, power of ten. As in 1,250.5, -3 1/2, 5^2, 4.5\cdot10^3
DIGITS = r"(?:(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+])?(?:(?P<whole>\d{{1,9}}) (?=\d{{1,9}}/\d))?(?P<top>(?<![a-z]\^){DIGITS})"
    rf"(?: ?/ ?(?P<bottom>-?{DIGITS})|\^\{{?(?P<power>[-+]?\d\d?(?!\d))\}}?)?"
    r"(?: ?\\cdot ?10\^\{?(?P<tens>[-+]?\d{1,3}(?!\d))\}?)?")
SIZES = {"hundred": 2, "thousand": 3, "grand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9,
         "trillion": 12}
# Behind one of these a number is a piece, a bound or denied. As in 10-12, > 18, half of 40, not 40, Step 2
BEFORE = (r"(?i)(?:\d[ .,]?|[*/^_+×÷±√|<>] ?|- |-\(|\d ?-|\d,? (?:and|or) |\\\w+ ?\{?|\b(?:not(?: \w+)?|minus"
          r"|negative|over|under|above|below|almost|nearly|step|part|than|(?:half|twice|double|third|quarter"
          r"|square|root)(?: of)?(?: the)?|(?:thousand|million|billion)s?(?: is|:)?) )$")
# In front of one of these too. As in 12-10, 5 or 7, 5 * (2 + 1), 5\pi, 3 hundredths, 3 hours 20, 2.4M
AFTER = (r"[\s,]*(?:(?:and|to|by|x|times)\b|[-+*/^×÷:.])?\s*[-+]?\.?\d|[)\]}]*\s*\^|\s*[\\_+*÷±√<>₀-₉]"
         r"|\)?\(-?\d|\s*[-/] ?\(|\W{0,2}(?:or|squared|cubed)\b|[eE][-+]?\d|(?:[xy]|st|nd|rd|th)\b"
         r"| ?(?:[kKMBT]|mil|bn|mn)\b(?![-&'])| and (?:an?|one|two|three)\b|' ?\d|\s*(?:->|[&|≈→])"
         r"|[\s-]*(?:hal(?:f|ves)|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred)ths?)\b"
         r"| (?:plus|minus|divided|multiplied|less than|more than|over|vs|pi|sqrt|repeating)\b"
         r"| (?:of|in|per|through) \d"
         r"| ?(?:hour|hr|h|minute|min|m|day|week|year|dollar|pound|kg|feet|ft|yard|out of)s? (?:and )?\d"
         rf"|[\s(-]*(?:[a-z]+ )?(?!grand[a-z])(?i:{'|'.join(SIZES)})")
# A line that opens an echoed or an invented question. As in Question 2: How many; Example 2; user
QUESTION = (r"(?im)^[# \t]*(?:(?:next|new|another|follow-up|bonus|similar|practice|extra) )?"
            r"(?:(?:question|problem|exercise|q|human|user)[ #\d]*:|(?:question|user)[ \t]*$"
            r"|(?:question|problem|exercise|example) ?#?\d+[:.]?[ \t]*$)")
# What may stand before an echoed question. As in Sure! Let's solve it
PREAMBLE = (r"(?is)\W*(?:sure|certainly|of course|ok|okay|alright|let's|let us|let me|here|to solve)\b"
            r"(?!.*(?:\d|\b[B-E]\b|answer))")
# A mark, not a heading: no word, no `2.` with a word, but in the last line. As in #### 28, #### Total: 28
HASHES = (r"(?<!#)#{4,}(?:(?!#|\s*(?:[A-Za-z]{2}|[A-Za-z] [a-z]|\d\d? ?(?:[.)-]\s+[A-Za-z]|:)))|"
          r"(?!\s*(?i:note|check|verif|step))[^\d\n#:=]{0,60}(?:[:=]|\b(?i:is|number|answer))"
          r"(?=\W{0,4}\d[^\n#]{0,60}\s*\Z))")
BOX = r"\\(?:boxed|fbox)\s*\{"  # what opens a box, as in \boxed {28}
TAG = r"(?i)<answer>(?=[^<]*</answer>)"  # a tag that is closed, as in <answer>28</answer>
# A statement; bare `A:` only before a number: in arc it labels an option. As in The answer should be 28
STATED = (r"(?im)\b%s(?:,? (?:therefore|thus|then|hence),?| (?:to|for) [^.,:;!?\n]{1,50}?)?"
          r"(?:\s+(?:is|was|equals|(?:should|must|will) be)\b:?|\s*[:=])"
          r"(?!\s*(?:(?:not|correct|right|reasonable|consistent|valid|verified|in|rounded|given|expressed"
          r"|written|found|obtained|based|calculated)\b|(?-i:an? [a-z])|the (?!letter|option|choice)))"
          r"|^A:(?=\s*\W{0,3}\d)")
# A statement in doubt, by its clause so far. As in I don't think the answer is 28; the wrong answer is 28
DOUBT = (r"(?i)(?:(?:n't|\b(?:not|never|cannot)) (?:\w+ )?(?:think|believe|sure|certain|true|say|clear|know"
         r"|convinced|agree|that|choose|pick|be)\b|\b(?:doubt|wonder|whether|unclear|false|wrong|incorrect"
         r"|worst|suppose|assum(?:e|ing)|let's say|may|might|could|tempting|at first(?: glance)?,?"
         r"|if(?![^.,:;!?\n]* then )|(?:first|previous|earlier|initial|least)(?= (?:\w+ )?\Z)"
         r"|(?:some|many|others) (?:say|think|claim))) [^.,:;!?\n]*\Z")
# A statement that only speaks of an answer, by what stands in front. As in To check the answer: 18 / 2 = 9
SPOKEN = (r"(?i)\b(?:check|verify|confirm|to (?:find|get|determine|calculate)|choose|select|pick|identify"
          r"|each|every|following|next|test|evaluate|analy[sz]e|consider)(?: \w+){0,3} \Z")
# A mark is taken back by one of these behind it. As in Wait, that is wrong; Correction
WITHDRAWN = (r"(?im)(?:^|[.!?] )\W{0,4}(?:(?:wait|hold on|hmm+|sorry|actually|I apologi[sz]e)\b"
             r"[^\n]{0,80}\b(?:wrong|mistake|error|incorrect|not (?:right|correct)|it is|should be|no)\b"
             r"|correction\b|oops\b|I made an? (?:mistake|error)\b)")
# The end of the clause that answers. As in 12 pears, which is 3 more
CLAUSE_END = r"[;!?]|\.(?!\d)|,(?!\s*(?:-?\d|\(?(?:[A-E]|or|and|but so)\b))"
# A closing sentence with one of these decides nothing. As in Perhaps it is 28
HEDGE = (r"(?i)\?|^\W*if\b|\bI (?:can(?:not|.t)|don.t|do not)\b|\b(?:not |un)sure\b|\d,? or -?\$?\d|\b"
         r"(?:either|maybe|perhaps|possibly|guess|so far)\b|\b(?:and|or|plus|minus|times|of|to|for)$")
# arc: an option chosen in other words. As in I would pick (D); so D.; option D is correct
CHOSEN = (r"(?im)\b(?:I|we)(?:'d|'ll| would| will)? (?:choose|chose|pick|select|go with) (?-i:(?!a\b))"
          r"|\b(?:so|therefore|thus|hence|leaves|it(?: is|'s| must be))[,:]? (?:it(?: is|'s| must be) )?"
          r"(?=(?:option |choice )?\W{0,2}(?-i:[A-E])\W{0,2}?(?:[.!\n]|\Z))"
          r"|(?:^|[.!?:;,] |\b(?:so|that|means|thus|hence|therefore|but|only|I think),? )(?:option |answer )?"
          r"(?=\(?(?-i:[A-E])\)? (?:is|must be) (?:the )?"
          r"(?:correct|right|answer|best (?:choice|option|answer))\b"
          r"(?! (?:in|only|about|for|if|when|that)\b)(?!,? but (?:it|that|this)\b[^.\n]{0,99}\b"
          r"(?:wrong|incorrect|false|not (?:correct|right|true))\b))")
# The chosen option, not `A or B`. As in the option (D); therefore D; d)
CHOICE = (r"^(?i:(?:(?:therefore|thus|hence|clearly|(?:most )?likely),?\s+)?"
          r"(?:(?:the )?(?:option|choice|letter) )?)\W{0,5}"
          r"(?:([A-E1-5])(?![\w']|-\w|\.\d| ?=|(?<=[A1-5]) (?!(?:because|since|as|and|or|is|not|but|for|in"
          r"|rather|instead|due|which|if|unless)\b)[a-z])"  # not A magnet, 5 meters
          r"|([a-e])(?=[).:]|\W{0,5}$))(?!\)?[\s,/&-]*(?:or|and|to|through)\W+[A-E1-5]\b"
          r"|[\s,/&-]+[A-E1-5]\b|\)? (?:if|unless|is (?:not|wrong|incorrect))\b"
          r"|.*(?:\([A-E1-5]\)|\bso is\b))")
# An option without a statement, as in which leaves (D); and what forbids to take it, as in not (D)
LABEL = r"(?m)\(([A-E1-5])\)|^[^\w\n]{0,5}(?:Option |Choice )?([A-E1-5])(?:[).:]|[^\w\n]*$)"
DENIED = (r"(?i)n't|(?:each|every|the|through) (?:of the )?(?:options?|choices?)[^.:\n]*[.:]\n"
          r"|\b(?:consider|not|nor|neither|never|cannot|except|but|wrong|incorrect|false|fails)\b")
# `x =` in front and a unit behind. As in f(x) = 5 cm^2
EXTRAS = (r"^\\?[a-zA-Z]\w{0,20}(?:\(\w\)|(?: ?\+ ?[a-z])+)? ?= ?(?=[^=]+$)|(?<=[\d}]) "
          r"(?!.*\b(?:pi|or|to|of|is|not|sure|plus|squared|cubed|factorial|root|sqrt|log|dozen|halves|thirds"
          r"|quarters|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths)\b)(?:[a-zA-Z]{2,20}"
          r"(?: [a-zA-Z]{2,20}){0,2}|[mgsLJNVWC])(?:/[a-z]+)?(?:\^\d)?$")
SIGNS = {"×": "cdot", "·": "cdot", "⋅": "cdot", "≤": "le", "≥": "ge", "≠": "ne", "π": "pi", "∞": "infty",
         "∪": "cup", "∩": "cap", "∈": "in", "±": "pm", "…": "ldots"}
# One spelling where LaTeX and prose have several, in this order. As in \dfrac12 and ½, which are 1/2
LATEX = [(re.compile(pattern), new) for pattern, new in (
    (r"([⁰¹²³⁴-⁹⁻]+)", r"^{\1}"), (r"(?<=\d)(?=[½⅓⅔¼¾⅕⅛])", " "), (r"(?<=\d) and (?:a|one) half\b", " 1/2"),
    (r"[⁰¹²³⁴-⁹⁻½⅓⅔¼¾⅕⅛]", lambda sign: unicodedata.normalize("NFKC", sign[0])), (r"[−–]", "-"), (r"⁄", "/"),
    (r"[$€£] ?([\d.,]*\d) ?m\b(?! ?[-+*/^=$])", r"\1 million"), (r"\{,\}", ","), (r"\\times", r"\\cdot"),
    (r"(?<![\w)*_])[*_]([-+$\d.,%]+)[*_](?![\w*_])", r"\1"), (r">=", "≥"), (r"<=", "≤"), (r"!=", "≠"),
    (f"[{''.join(SIGNS)}]", lambda sign: rf"\{SIGNS[sign[0]]} "), (r"\\[dtc](frac|binom)", r"\\\1"),
    (r"\\(le|ge|ne)q(?:slant|q)?(?![a-zA-Z])", r"\\\1 "), (r"\\[cl]?dots[cbm]?(?![a-zA-Z])", r"\\ldots"),
    (r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox) ?\{([^{}]*)\}", r" \1"),
    (r"\\(?:(?:display|text)style|limits|[bB]igg?[lr]?|left|right|boxed)(?![a-zA-Z])|\\! ?|\\?[$%€£]"
     r"|(?<!\\)\\[()\[\]]|\^\{?\\(?:circ|degree)\}?|°", ""), (r"(?<!\\)\\[,;: ]|~|\\q?quad\b", " "),
    (r"\s+", " "), (r"(?<=\{) | (?=\})", ""), (r"([\^_])\{(\w)\}", r"\1\2"), (r"(?<=[\^_]\w) (?=\d)", ""),
    (r"(?<=\d) ?(?:\\cdot|[xX*]) ?(?=10\^)", r"\\cdot"), (r"\\(frac|sqrt) ?(\d)", r"\\\1{\2}"),
    (r"(\\frac\{[^{}]*\}) ?(\d)", r"\1{\2}"), (r"(?<=\d) ?\\frac", r" \\frac"),
    (rf"\\frac\{{(-?{DIGITS})\}}\{{(-?{DIGITS})\}}", r"\1/\2"),
    (rf"(?<=\d)(?:-| ?\(?)((?i:{'|'.join(SIZES)}))s?\b\)?",
     lambda size: rf"\cdot10^{SIZES[size[1].lower()]}"))]

def verify(completion: str, gold: str, kind: str) -> int:
    r"""1 if the reply's final answer is the gold one, else 0; linear time. Only error: KeyError for a kind
    that is not in FINISH.

    The LAST mark counts: `####` (no heading), \boxed{}, <answer>, "The answer is", in arc "I choose"; but not
    one in doubt, nor words that only speak of an answer ("to check the answer"). If it is empty, cut off
    or undecided (5 or 7), nothing earlier is tried instead. Without any, or if it is taken back ("Wait, that
    is wrong"), gsm8k and svamp take the last number of the closing sentence unless that hedges, asks or
    breaks off; arc the only option label of the reply; math always wants a box. Numbers are exact: 48.0 = 48,
    35% = 35, 18k = 18000, but 0.33 is not 1/3. math: equal numbers, else equal LaTeX in one spelling; `x =`
    and units may lack on one side. A gold that cannot be read (empty, or words for gsm8k) pays no reply.
    """
    judges = dict.fromkeys(FINISH, _same_number) | {"math": _same_math, "arc": _same_choice}
    return int(judges[kind](_own_words(str(completion)), str(gold).strip()))

def _own_words(text):
    """The reply without reasoning, calculator marks, bold, echoed question and invented next question."""
    text = re.sub(r"(?is)<think>.*?(?:</think>|\Z)|\A(?:(?!<think>).)*?</think>", "", text)
    text = re.sub(r"<<[^<>\n]*>>|</?(?:b|strong|i|em|code)>", "", text.replace("’", "'"))
    text = re.sub(r"(?<!\d)\*\*|\*\*(?!\d)", "", text)  # 2**3 is a power, not bold
    first, *later = re.split(QUESTION, text)
    if re.match(PREAMBLE, first):
        first = ""
    return first if first.strip() or not later else re.split(r"[?\n]", later[0] + "\n", maxsplit=1)[1]

def _box(text):
    """What stands before the brace that closes a box; "" if cut off."""
    depth = 1
    for brace in re.finditer(r"(?s)\\.|[{}]", text):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[:brace.start()]
    return ""

def _marked(text, *patterns):
    """First clause behind the last mark, None without: `12 pears`, not `which is 3 more than 9`."""
    numbers = re.findall(r"####\s*(\d+)", text)
    if len(numbers) < 2 or numbers != [str(n + 1) for n in range(len(numbers))]:  # 1, 2, 3 are headings
        patterns = (HASHES, *patterns)
    marks = [mark for pattern in (BOX, TAG, *patterns) for mark in re.finditer(pattern, text)]
    marks.sort(key=re.Match.end, reverse=True)
    marks = [mark for mark in marks if not _spoken_of(mark)]
    last = next((mark for mark in marks if not _doubted(mark)), None)
    if last is None:
        return "" if marks else None
    rest = text[last.end():]
    if re.search(WITHDRAWN, rest):
        return None
    step = re.search(r"(?im)^\W{0,6}(?:step|part) (\d\d?)", rest)
    if step and step[1] != "1":  # Step 2 withdraws the mark before it
        return None
    rest = _box(rest) if last.re.pattern == BOX else rest.partition("</answer>")[0]
    rest = re.sub(r"\A\s*(?:```\w*\n|\\\[|\$\$|\n[-*] )", "", rest)  # a fence, display or list opens
    line = _latex(rest.strip().split("\n", 1)[0])
    clause = re.split(CLAUSE_END, line, maxsplit=1)[0]
    return "" if line[len(clause):].startswith("?") else clause.strip()

def _front(mark):
    """What stands in front of a mark, and whether it is a statement: no box, no tag, no ####."""
    return mark.string[max(0, mark.start() - 60):mark.start()], mark.re.pattern not in (BOX, TAG, HASHES)

def _spoken_of(mark):
    """Does a statement only name an answer?"""
    before, stated = _front(mark)
    return stated and re.search(SPOKEN, before) is not None

def _doubted(mark):
    """Is it denied or doubted? Of `the number who did not pass is \\boxed{28}` only the number's name is."""
    before, stated = _front(mark)
    doubt = re.search(DOUBT, before)
    if stated:
        return doubt is not None
    about = doubt is not None and "answer" in doubt[0].lower()
    return about or re.search(r"(?i)(?:n't|\b(?:not|never))[^\w\n.]{0,3}\Z", before) is not None

def _closing(text):
    """Last sentence; "" if it hedges, is a heading, or ends neither in a stop nor a number with unit."""
    line = re.split(r"(?im)^#+\s*(?:check|verif)", text)[0].strip().rsplit("\n", 1)[-1]
    sentence = re.sub(r"^\W{0,9}\d{1,2}\)\s", "", re.split(r"(?<=[.!?])\s+", line)[-1])  # 2) numbers a list
    ended = re.search(r"(?:[.!]|\d\S*(?: \w+)?)\W*$", sentence[-60:])  # all of it: quadratic time
    return "" if line.startswith("#") or not ended or re.search(HEDGE, sentence) else _latex(sentence)

def _same_number(text, gold):
    """gsm8k, svamp: the first number behind the mark, or else the last one of the closing sentence."""
    marked = _marked(text, STATED % "answer")
    clause = _closing(text) if marked is None else marked
    why = r"(?i)(?<=[\w%]) \((?!or\b|to\b)[^()]*\d[^()]*\)\W*$"  # 48 (4 at 12 each)
    if marked is not None:
        why += r"|(?<=[\w%]) (?:because|since)\b.*$"
    short = re.sub(why, "", clause)
    clause = (short if re.search(r"\d", short) else clause).rpartition("=")[2]
    for letters, tens in ("kK", 3), ("M", 6), ("B", 9):  # 18k; in math k is a variable
        clause = re.sub(rf"(?<=\d)[{letters}]\b", rf"\\cdot10^{tens}", clause)
    found = list(NUMBER.finditer(clause))
    if not found:
        return False
    number, value = found[-1 if marked is None else 0], _value(_latex(gold))
    piece = re.match(AFTER, clause[number.end():]) or re.search(BEFORE, clause[:number.start()][-30:])
    return not piece and value is not None and value == _value(number[0])

def _value(text):
    """Exact value of a number, else None; also for x/0 and lengths that take int() seconds."""
    match = NUMBER.fullmatch(text) if len(text) <= 1000 else None
    if match is None:
        return None
    top, bottom = (Fraction(re.sub("[, ]", "", match[part] or "1")) for part in ("top", "bottom"))
    power = int(match["power"] or 1)
    if bottom == 0 or (top == 0 and power < 0):
        return None
    size = (int(match["whole"] or 0) + top**power / bottom) * Fraction(10) ** int(match["tens"] or 0)
    return -size if match["sign"] == "-" else size

def _latex(text):
    """One spelling where LaTeX has several; currency, percent, degree signs and the full stop are dropped."""
    for pattern, new in LATEX:
        text = pattern.sub(new, text)
    return text.strip().rstrip(" .")

def _same_math(text, gold):
    """math: the last box holds the same number, else the same text; spaces count only between digits."""
    *before, box = re.split(BOX, text)
    sides = [_latex(_box(box)) if before else "", _latex(gold)]
    sides = [re.sub(r"^\(([A-F])\)$", r"\1", side) for side in sides]
    other = re.match(r"([^{}]{1,60})\}[\s$]*(?:,|and|or)[\s,$]*$", before[-1][:99]) if before[1:] else None
    if other:  # \boxed{2} and \boxed{3}
        sides[0] = f"{_latex(other[1])}, {sides[0]}"
    bare = [re.sub(EXTRAS, "", side) for side in sides]
    if bare[0] == sides[0] or bare[1] == sides[1]:  # else both name a variable or unit: it must be the same
        sides = bare
    values = [_value(side) for side in sides]
    reply, gold = (re.sub(r"(?<!\d) | (?!\d)", "", side) for side in sides)
    return reply == gold != "" if values[1] is None else values[0] == values[1]

def _same_choice(text, gold):
    """arc: the label behind the mark, or else the only one of the reply; digits where the gold is a digit."""
    marked = _marked(text, STATED % "(?:answer|ans|option|choice|letter)", CHOSEN)
    called = set(re.findall(r"\b([A-E])\)? is (?:also )?(?:correct|right)\b", text))
    undecided = len(called) > 1 and not re.search(STATED % "answer", text)
    if undecided or (marked is None and re.search(DENIED, text)):
        return False
    found = re.findall(LABEL, text) if marked is None else re.findall(CHOICE, marked)
    return {(a or b).upper() for a, b in found if (a or b).isdigit() == gold.isdigit()} == {gold.upper()}

STD = {"unbiased": 1, "population": 0, "none": None}  # divides the advantages: what is subtracted from G

def group_advantages(rewards, group_size, std="unbiased", eps=1e-4):
    """A_i = (r_i - mean) / (std + eps) within each group of `group_size` consecutive rows [M3 eq 2].

    rewards [B] -> [B] float32, |A| < sqrt(G) if divided. std: "unbiased" (the only one that fits the
    paper's printed advantages), "population", "none" (centre only, as Dr. GRPO). An all-equal group gets 0.
    ValueError: G < 2 (a group of one has no spread), B not a multiple of G, a reward that is not finite.
    """
    if std not in STD:
        raise ValueError(f"std {std}: unknown, choose from {', '.join(STD)}")
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"{len(rewards)} rewards do not make groups of {group_size} (at least 2)")
    odd = (~torch.isfinite(rewards)).nonzero()
    if len(odd):
        raise ValueError(f"reward of row {int(odd[0])} is not a finite number")
    r = rewards.float().view(-1, group_size)  # [P, G]
    advantages = r - r.mean(1, keepdim=True)
    if std != "none":
        advantages = advantages / (r.std(1, keepdim=True, correction=STD[std]) + eps)
    return torch.where((r == r[:, :1]).all(1, keepdim=True), 0.0, advantages).flatten()

# --- 4. Scores: the same response tokens, read after the student's prompt and after the teacher's -----------

def split_head(model):
    """(backbone, head) of a causal LM: head(backbone(ids).last_hidden_state) is model(ids).logits.

    head: the output layer, or it and the soft cap (Gemma-2) or scale (Cohere, Granite). Tried out on 8 random
    ids; ValueError where the logits are something else.
    """
    config, layer = model.config.get_text_config(), model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)

    def bent(hidden):
        logits = layer(hidden) * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    backbone, head = model.base_model, bent if cap or scale != 1 else layer
    ids = torch.randint(config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    with torch.no_grad():
        want = model(input_ids=ids).logits.float()
        ours = head(backbone(input_ids=ids).last_hidden_state).float()
    close = 8 * torch.finfo(model.dtype).eps * want.abs().max()
    if want.shape != ours.shape or (want - ours).abs().max() > close:
        raise ValueError(f"{type(model).__name__}: its logits are not its output layer's, capped or scaled;"
                         " or it is in training mode, with dropout")
    return backbone, head

def join(prompts, tokens, mask, pad_id=0):
    """B prompts (lists of ids) and replies [B, N] side by side -> ids, attention, positions [B, L+N] long.
    The logits that predict reply token n stand in column L-1+n."""
    ids, attention, _ = left_pad(prompts, pad_id, tokens.device)
    attention = torch.cat([attention, mask.long()], 1)
    return torch.cat([ids, tokens], 1), attention, positions_of(attention)

def hidden_states(backbone, prompts, tokens, pad_id=0, share=True):
    """Hidden states h [B, N, d] from which the head predicts tokens[b, n], given prompts[b] + tokens[b, :n].

    tokens [B, N], right-padded. Only `prompts` (B lists of ids) differs between student and teacher: no two
    tokens slip out of step. share=False reads a prompt once per row, without a cache, for checkpointing.
    """
    if not share:
        joined = join(prompts, tokens, torch.ones_like(tokens), pad_id)
        ids, attention, positions = (x[:, :-1] for x in joined)
        out = backbone(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False)
        return out.last_hidden_state[:, -tokens.shape[1]:]
    # Each distinct prompt is read once, up to its last id, which predicts response position 0. Its cache is
    # copied to its rows, and gradients flow back through the copies.
    place = {}
    which = [place.setdefault(tuple(prompt), len(place)) for prompt in prompts]
    which = torch.tensor(which, device=tokens.device)  # [B]
    ids, attention, positions = left_pad(list(place), pad_id, tokens.device)  # [P, L]
    name, cache = cache_name(backbone), None
    if ids.shape[1] > 1:
        cache = backbone(input_ids=ids[:, :-1], attention_mask=attention[:, :-1],
                         position_ids=positions[:, :-1], use_cache=True)[name]
        for layer in cache.layers:  # not [which]: on a CPU its gradient adds up in any order
            layer.keys, layer.values = (x.index_select(0, which) for x in (layer.keys, layer.values))
    # Right padding needs no mask: attention is causal, and padded positions are thrown away by the caller.
    attention = F.pad(attention[which], (0, tokens.shape[1] - 1), value=1)  # [B, L-1+N]
    positions = positions[which, -1:] + torch.arange(tokens.shape[1], device=tokens.device)  # [B, N]
    ids = torch.cat([ids[which, -1:], tokens[:, :-1]], 1)
    out = backbone(input_ids=ids, attention_mask=attention, position_ids=positions,
                   use_cache=cache is not None, **{name: cache})
    return out.last_hidden_state

def token_weights(mask, total_rows, total_tokens=None):
    """What every token's residual is multiplied by, so that plain sums are the means of eqs 1 and 2: [B, N].

    1/N_i per response over total_rows; with total_tokens one mean over all tokens. Totals are the step's:
    a micro-batch that divided by its own would weigh its tokens differently.
    """
    weights = mask.float()
    if total_tokens is not None:
        return weights / max(total_tokens, 1)
    return weights / weights.sum(1, keepdim=True).clamp(min=1) / total_rows

# --- 5. Residuals: gradients in the student's logits, in closed form ----------------------------------------

def log_softmax(logits):
    """In float32 at least: bf16 log-probabilities are off by up to 0.1 per token."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)

def log_ratio(log_p, log_q):
    """log p - log q, and 0 where p = 0: a padded vocabulary has -inf on both sides, and -inf + inf is NaN."""
    return torch.where(log_p > -math.inf, log_p - log_q, 0.0)

def kl(log_p, log_q):
    """KL(p||q) = sum_v p (log p - log q) in nats. log_p, log_q [..., V] -> [...]."""
    return (log_p.exp() * log_ratio(log_p, log_q)).sum(-1)

# A divergence is two functions of log p_S, log p_T [..., V], lam and k: its value [...] and its residual.

def fkl(log_ps, log_pt, lam, k):  # KL(p_T||p_S)
    return kl(log_pt, log_ps)

def fkl_residual(log_ps, log_pt, lam, k):
    return log_ps.exp() - log_pt.exp()  # eq 5

def rkl(log_ps, log_pt, lam, k):  # KL(p_S||p_T)
    return kl(log_ps, log_pt)

def rkl_residual(log_ps, log_pt, lam, k):
    return log_ps.exp() * (log_ratio(log_ps, log_pt) - kl(log_ps, log_pt)[..., None])

def log_mixture(log_ps, log_pt, lam):  # log m, a mixture of probabilities, never of log-probabilities
    return torch.logaddexp(log_pt + math.log(lam), log_ps + math.log1p(-lam))

def jsd(log_ps, log_pt, lam, k):  # lam KL(p_T||m) + (1-lam) KL(p_S||m), m = lam p_T + (1-lam) p_S [M3 eq 1]
    log_m = log_mixture(log_ps, log_pt, lam)
    return lam * kl(log_pt, log_m) + (1 - lam) * kl(log_ps, log_m)

def jsd_residual(log_ps, log_pt, lam, k):  # of KL(p_S||m), m held fixed: all that comes by way of m cancels
    return (1 - lam) * rkl_residual(log_ps, log_mixture(log_ps, log_pt, lam), lam, k)

def likeliest(log_ps, log_pt, k):
    """q log(p_S / p_T) of the student's k likeliest tokens, q its weights renormalised there; their ids."""
    top, index = log_ps.topk(min(k, log_ps.shape[-1]))
    return top.softmax(-1) * log_ratio(top, log_pt.gather(-1, index)), index

def rkl_topk(log_ps, log_pt, lam, k):  # [VLS eq 3.2]: no KL, it can be negative
    return likeliest(log_ps, log_pt, k)[0].sum(-1)

def rkl_topk_residual(log_ps, log_pt, lam, k):  # q is held fixed [VLS App. E, H.2], so it is 0 at agreement
    terms, index = likeliest(log_ps, log_pt, k)
    return (-terms.sum(-1, keepdim=True) * log_ps.exp()).scatter_add(-1, index, terms)

DIVERGENCES = {"jsd": (jsd, jsd_residual), "fkl": (fkl, fkl_residual), "rkl": (rkl, rkl_residual),
               "rkl-topk": (rkl_topk, rkl_topk_residual)}  # the one place where a divergence is registered

def divergence(student_logits, teacher_logits, kind="jsd", lam=0.5, k=16):
    """Divergence of teacher and student per position, in nats. logits [..., V] -> [...] float32 (or float64).

    kind: of DIVERGENCES, else KeyError. lam of the jsd, strictly between 0 and 1: there it is TRL's with
    beta = lam; towards both ends it vanishes, where TRL switches to fkl and rkl. k of rkl-topk.
    """
    return DIVERGENCES[kind][0](log_softmax(student_logits), log_softmax(teacher_logits), lam, k)

def distill_residual(student_logits, teacher_logits, kind="fkl", lam=0.5, tau=None, k=16):
    """delta_D = d divergence / d student_logits, in closed form. logits [..., V] -> [..., V]; rows sum to 0.

    rkl-topk: with its weights held fixed, as its source has it; of all others the exact gradient.
    Near agreement the jsd residual is lam (1-lam) times fkl's: a quarter of it at lam = 1/2. tau: positions
    whose divergence of this kind (the sum over V) is tau or more give exactly 0, the gradient of min(D, tau)
    [eq 1]. M3 clips fkl's residual [eq 9] by the divergence of eq 1 instead, see Signals.clipped.
    """
    delta = DIVERGENCES[kind][1](log_softmax(student_logits), log_softmax(teacher_logits), lam, k)
    if tau is not None:
        clipped = divergence(student_logits, teacher_logits, kind, lam, k) >= tau
        delta = delta.masked_fill(clipped[..., None], 0.0)  # not a product: 0 times NaN is NaN
    return delta

def reward_residual(student_logits, tokens, advantages):
    """delta_R = -A (e_y - p_S) [eq 5]: descending it lifts the sampled token when A > 0.

    student_logits [B, N, V], tokens [B, N], advantages [B] (per response) or [B, N] (per token) -> [B, N, V].
    """
    # Axes are added on the right by hand: with B == N, plain broadcasting would weigh columns, not rows.
    advantage = advantages.reshape(advantages.shape + (1,) * (student_logits.dim() - advantages.dim()))
    p_s, y = log_softmax(student_logits).exp(), tokens[..., None]
    # No one-hot e_y: it would be a third [B, N, V].
    return advantage * p_s.scatter_add(-1, y, torch.full_like(y, -1, dtype=p_s.dtype))

def normalize(residual, eps):
    """delta / (||delta|| + eps) over the vocabulary [eq 10]. [..., V] -> [..., V], norms below 1; 0 stays 0.

    eps > 0 is a real hyper-parameter, in units of a residual's norm (fkl's, reward's / |A|: up to sqrt 2).
    A residual far longer than eps becomes a unit vector: with eps = 1e-8 one of norm 1e-4 counts as much as
    one of norm 1.
    """
    return residual / (residual.norm(dim=-1, keepdim=True) + eps)

def isotropic_kernel(delta_D, delta_R):
    """K_DR(n), cos phi_n for J^T J ~ 1 [M3 App. I, AA]: the head's own part up to ||h_n||^2.
    delta_D, delta_R [..., V] -> [...], [...] in [-1, 1]; 0 where a residual is 0."""
    K, norm_D, norm_R = (delta_D * delta_R).sum(-1), delta_D.norm(dim=-1), delta_R.norm(dim=-1)
    # Nothing is added below, as eq 14 does: conflicts of settled tokens (small residuals) would look mild.
    return K, (K / (norm_D * norm_R).clamp(min=1e-37)).clamp(-1, 1)

# --- 6. Methods: one function each, (signals, settings) -> seed [T, V], alpha [T] or a number ---------------

class Settings(NamedTuple):
    """What a method may be told, by the papers' letters. train.py has a flag for all but the last two."""
    alpha: float = 0.5  # Hybrid: weight of distillation, in [0, 1]
    alpha_max: float = 0.15  # M3: the teacher's largest share of a token, in [0, 1]
    beta: float = 1.0  # M3-Soft: sharpness of the gate [eq 14]
    eps: float = 0.1  # see normalize
    eta_in: float = 0.001  # M3-EG: step size of the inner step [eq 15], not a multiple of --lr
    eg_gate: str = "select"  # M3-EG keeps the boundary gate [App. E.1]; or "soft"
    zero_advantage: str = "teacher"  # who speaks where A = 0, so K = 0 (all-equal groups); or "skip"
    divergence: str = "jsd"  # of eq 1; M3's own residual is always fkl's [eq 9]
    lam: float = 0.5  # of the jsd
    tau: float | None = None  # clip of a token's divergence in nats [eq 1]
    distill_scale: float = 1.0  # factor on the teacher's loss and residuals: the lever on kappa
    temperature: float = 1.0  # of scoring, above 0; give `sample` the same
    step: int = 1  # RLSD fades with it
    generator: torch.Generator | None = None  # m3-random draws from it

DEFAULTS = Settings()

class Signals:
    """What is known of T response tokens, computed when first asked for: GRPO never runs the teacher."""
    def __init__(self, micro, part):  # part: a slice of the micro-batch's tokens
        self.micro, self.part, self.settings = micro, part, micro.settings
        self.tau = math.inf if micro.settings.tau is None else micro.settings.tau
        self.tokens, self.row = micro.tokens[part], micro.row[part]  # y [T]; the token's row in the batch
        self.advantages, self.weights = micro.advantages[part], micro.weights[part]  # A; see token_weights
        self.logits = self.tempered(micro.student[1](micro.leaf[part]))  # [T, V], with a graph
        self.z_S = self.logits.detach()
    def tempered(self, logits):  # no copy at temperature 1
        temperature, logits = self.settings.temperature, logits.float()
        return logits if temperature == 1 else logits / temperature
    @functools.cached_property
    def z_T(self):
        with torch.no_grad():
            return self.tempered(self.micro.teacher[1](self.micro.teacher_hidden[self.part]))
    @functools.cached_property
    def delta_R(self):  # eq 5
        return reward_residual(self.z_S, self.tokens, self.advantages)
    @functools.cached_property
    def delta_D(self):  # eq 9: p_S - p_T
        return self.teacher_residual("fkl")
    @functools.cached_property
    def loss_gradient(self):  # of eq 1 itself, with its own divergence
        return self.teacher_residual(self.settings.divergence)
    def teacher_residual(self, kind):
        residual = self.settings.distill_scale * distill_residual(self.z_S, self.z_T, kind, self.settings.lam)
        residual[self.clipped] = 0.0  # exactly 0, and not a product: there it may be NaN
        return residual
    @functools.cached_property
    def unclipped(self):  # [T]: D of eq 1
        return divergence(self.z_S, self.z_T, self.settings.divergence, self.settings.lam)
    @functools.cached_property
    def clipped(self):  # [T] bool; an infinite D is clipped even without tau
        return self.unclipped >= self.tau
    @functools.cached_property
    def token_loss(self):  # [T]: min(D, tau), scaled
        return self.settings.distill_scale * self.unclipped.clamp(max=self.tau)
    @functools.cached_property
    def conflict(self):  # K_DR(n) of the tempered logits, cos phi_n [T]
        if self.micro.kdr is None:
            return isotropic_kernel(self.delta_D, self.delta_R)
        return [x[self.part] for x in self.micro.conflict]  # ntk.py's kernels run once a micro-batch
    def columns(self, alpha, look):
        """For a log: name -> [T]; of teacher and conflict what was asked for. look: K_DR in any case."""
        log_ps = log_softmax(self.z_S)
        seen = dict(row=self.row, weight=self.weights, advantage=self.advantages,
                    norm_R=self.delta_R.norm(dim=-1), alpha=torch.zeros_like(self.weights) + alpha,
                    logp=log_ps.gather(-1, self.tokens[:, None])[:, 0],
                    entropy=torch.special.entr(log_ps.exp()).sum(-1))
        if look or "conflict" in vars(self):
            seen["K"], seen["cos"] = self.conflict
        if "z_T" in vars(self) or "K" in seen:  # a kernel asks the teacher, perhaps for all chunks
            seen |= dict(token_loss=self.token_loss, clipped=self.clipped)
        return seen

def grpo(s, f):
    """the reward alone [M3 eq 2]"""
    return s.delta_R, 0.0

def opd(s, f):
    """distillation alone [M3 eq 1]"""
    return s.loss_gradient, 1.0

def hybrid(s, f):
    """(1 - alpha) reward + alpha distillation"""
    return (1 - f.alpha) * s.delta_R + f.alpha * s.loss_gradient, f.alpha

def rlsd(s, f):
    """reward, its size scaled per token by the teacher: by 10 % at most, fading out over 60 steps"""
    # A_n = A [(1 - lam) + lam clip(w, 0.8, 1.2)], w = (p_T(y) / p_S(y))^sign(A): A keeps its sign
    lam = 0.5 * max(0.0, 1 - (f.step - 1) / 60)
    logp_T, logp_S = (log_softmax(z).gather(-1, s.tokens[:, None])[:, 0] for z in (s.z_T, s.z_S))
    ratio = (s.advantages.sign() * (logp_T - logp_S)).exp().clamp(0.8, 1.2)
    return reward_residual(s.z_S, s.tokens, s.advantages * ((1 - lam) + lam * ratio)), 0.0

def sdpo(s, f):
    """no reward loss: the teacher reads a successful other response of the group"""
    return sdpo_residual(s.z_S, s.z_T), 1.0

def m3_norm(s, f):
    """normalised residuals without a gate: the reference of the M3 family"""
    return m3_seed(s, f, torch.full_like(s.weights, f.alpha_max))

def m3_select(s, f):
    """the teacher speaks only where it does not fight the reward [M3 eq 12]"""
    K, _ = s.conflict
    return m3_seed(s, f, gate_select(K, f.alpha_max))

def m3_soft(s, f):
    """the teacher's share falls smoothly with the conflict [M3 eq 14]"""
    _, cos = s.conflict
    return m3_seed(s, f, gate_soft(cos, f.alpha_max, f.beta))

def m3_random(s, f):
    """control: closes as many tokens as m3-select, drawn at random among those with a reward signal"""
    K = s.conflict[0].clone()
    live = (K != 0).nonzero()[:, 0]
    K[live] = K[live[torch.randperm(len(live), generator=f.generator).to(live.device)]]
    return m3_seed(s, f, gate_select(K, f.alpha_max))

def m3_eg(s, f):
    """the reward's gradient where the gated teacher would lead [M3 eq 15]"""
    _, alpha = {"select": m3_select, "soft": m3_soft}[f.eg_gate](s, f)
    return alpha[:, None] * normalize(s.delta_D, f.eps), alpha  # m_D, see extragradient

def gate_select(K, alpha_max):
    """M3-Select [eq 12]: alpha_max where K_DR(n) >= 0, else 0. Tokens with A = 0 have K = 0: they listen."""
    return alpha_max * (K >= 0).float()

def gate_soft(cos, alpha_max, beta):
    """M3-Soft [eq 14]: alpha_max sigmoid(beta cos phi_n). beta 0: half; large: Select, but for cos 0."""
    return alpha_max * torch.sigmoid(beta * cos)

def m3_seed(s, f, alpha):
    """Eq 11 per token: alpha_n delta_D^ + (1 - alpha_n) delta_R^, and alpha_n. s_bar follows in m3_step."""
    if {"teacher": False, "skip": True}[f.zero_advantage]:
        alpha = alpha * (s.advantages != 0)
    share = alpha[:, None]
    return share * normalize(s.delta_D, f.eps) + (1 - share) * normalize(s.delta_R, f.eps), alpha

# Three methods mix whole gradients: two backward passes, then (norm_R, norm_D, phi) -> weights (w_R, w_D).

def gradnorm(norm_R, norm_D, phi):
    """both gradients at one length: weights kappa and 1 over 1 + kappa [M3 Prop. 5]"""
    # By the norms: nothing divides by 0. Without a reward gradient the weights are (1, 0): a gradient of 0.
    total = norm_R + norm_D
    return (norm_D / total, norm_R / total) if total > 0 else (0.5, 0.5)

def pcgrad(norm_R, norm_D, phi):
    """under conflict each gradient loses its part along the other [M3 Prop. 19]"""
    # g_R - (g_R.g_D / ||g_D||^2) g_D + g_D - (g_R.g_D / ||g_R||^2) g_R: two weights on the ORIGINAL gradients
    # do both projections. Each part is shorter by sqrt(1 - Phi^2); their ratio stays.
    return (1.0, 1.0) if phi >= 0 else (1 - phi * norm_D / norm_R, 1 - phi * norm_R / norm_D)

def minnorm(norm_R, norm_D, phi):
    """the shortest alpha g_D + (1 - alpha) g_R, alpha in [0, 1] [M3 eq 111]"""
    apart = norm_R ** 2 + norm_D ** 2 - 2 * phi * norm_R * norm_D  # ||g_D - g_R||^2
    alpha = max(0.0, min(1.0, (norm_R ** 2 - phi * norm_R * norm_D) / apart)) if apart > 0 else 0.5
    return 1 - alpha, alpha

def resynchronise(teacher_params, params, step):  # RLSD's teacher: the student of every 20th step
    if step % 20 == 0:
        torch._foreach_copy_(teacher_params, params)

def moving_average(teacher_params, params, step):  # SDPO's teacher: an EMA of the student
    torch._foreach_lerp_(teacher_params, params, 0.05)

class Method(NamedTuple):
    seed: Callable | None = None  # (signals, settings) -> (seed, alpha): one backward pass; or
    mix: Callable | None = None  # (norm_R, norm_D, phi) -> (w_R, w_D): two, of either loss
    scaled: bool = False  # times s_bar [eq 11]
    peek: bool = False  # M3-EG: what the seed gives is m_D
    move_teacher: Callable | None = None  # (teacher's parameters, student's, step), after each step

# The one place where a method is registered. Its docstring's first line is its line in `train.py --help`.
METHODS = {
    "grpo": Method(grpo), "opd": Method(opd), "hybrid": Method(hybrid),
    "gradnorm": Method(mix=gradnorm), "pcgrad": Method(mix=pcgrad), "minnorm": Method(mix=minnorm),
    "rlsd": Method(rlsd, move_teacher=resynchronise), "sdpo": Method(sdpo, move_teacher=moving_average),
    "m3-norm": Method(m3_norm, scaled=True), "m3-select": Method(m3_select, scaled=True),
    "m3-soft": Method(m3_soft, scaled=True), "m3-random": Method(m3_random, scaled=True),
    "m3-eg": Method(m3_eg, peek=True)}

def sdpo_siblings(rewards, group_size):
    """SDPO: for each row the first OTHER row of its group with a reward, or None. List of B -> list of B."""
    siblings = []
    for row in range(len(rewards)):
        first = row - row % group_size
        right = (other for other in range(first, first + group_size) if other != row and rewards[other] > 0)
        siblings.append(next(right, None))
    return siblings

def sdpo_residual(student_logits, teacher_logits, k=100):
    """SDPO: gradient of the JSD (lam = 1/2) over the student's k likeliest tokens and a bucket of all others.

    logits [..., V] -> [..., V]. In bucket space this is distill_residual; the last bucket's push is shared
    among its tokens in proportion to p_S, because d log(sum of p) / dz_v = p_v / sum for the tokens inside.
    """
    log_ps, log_pt = log_softmax(student_logits), log_softmax(teacher_logits)
    top = log_ps.topk(min(k, log_ps.shape[-1]), dim=-1).indices
    inside = torch.zeros_like(log_ps, dtype=torch.bool).scatter(-1, top, True)
    buckets = []
    for log_p in (log_ps, log_pt):
        tail = log_p.masked_fill(inside, -math.inf).logsumexp(-1, keepdim=True)
        buckets.append(torch.cat([log_p.gather(-1, top), tail], -1))  # [..., k+1], sums to 1
    delta = distill_residual(*buckets, "jsd", 0.5)
    share = log_ps.exp().masked_fill(inside, 0.0)
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-30)
    return (share * delta[..., -1:]).scatter_add(-1, top, delta[..., :-1])

# --- 7. The step: from a batch to the gradient that the optimizer is given ----------------------------------

class Batch(NamedTuple):
    """What was sampled and paid."""
    prompts: list  # B lists of ids: what the student read
    hints: list  # B lists of ids: what the teacher reads instead
    tokens: torch.Tensor  # [B, N] long, right-padded
    mask: torch.Tensor  # [B, N] bool
    advantages: torch.Tensor  # [B], see group_advantages
    weights: torch.Tensor  # [B, N], see token_weights

class MicroBatch:
    """Some rows of a batch on their way through student and teacher; their T real tokens lie flat.
    It runs the backbones; its Signals, one for each chunk of tokens, run the heads."""
    def __init__(self, student, teacher, batch, rows, settings, kdr, chunk, checkpointing):
        self.student, self.teacher, self.settings = student, teacher, settings
        self.kdr, self.chunk = kdr, chunk
        self.prompts, self.hints = ([ids[b] for b in rows.tolist()] for ids in (batch.prompts, batch.hints))
        length = max(1, int(batch.mask[rows].sum(1).max()))  # nothing is run beyond the longest reply
        self.real, self.replies = batch.mask[rows, :length], batch.tokens[rows, :length]  # [b, n]
        self.tokens, self.weights = self.replies[self.real], batch.weights[rows, :length][self.real]  # [T]
        self.row = rows[:, None].expand_as(self.real)[self.real]
        self.advantages = batch.advantages[self.row]
        student[0].train(checkpointing)  # transformers checkpoints in training mode only; dropout must be 0
        hidden = hidden_states(student[0], self.prompts, self.replies, share=not checkpointing)
        student[0].eval()
        self.hidden = hidden[self.real]  # [T, d]
        # Cut here: the seeds of all chunks add up in this leaf's gradient and then enter `hidden` at once.
        self.leaf = self.hidden.detach().requires_grad_()
        self.only = Signals(self, slice(None)) if len(self.tokens) <= chunk else None  # one chunk: kept
    @functools.cached_property
    def teacher_hidden(self):  # [T, d]: the same tokens; only what stands before them differs
        with torch.inference_mode(), lora_off(self.teacher[0]):
            return hidden_states(self.teacher[0], self.hints, self.replies)[self.real]
    @functools.cached_property
    def conflict(self):  # K_DR(n), cos phi_n of all T tokens
        ids, attention, _ = join(self.prompts, self.replies, self.real)
        return self.kdr(ids, attention, self.real, ((s.delta_D, s.delta_R) for s in self.signals()))
    def signals(self):
        """Signals of one chunk of tokens after the other. Several are not kept: logits fill the memory."""
        if self.only is not None:
            yield self.only
            return
        for start in range(0, len(self.tokens), self.chunk):
            yield Signals(self, slice(start, start + self.chunk))

def accumulate(into, outputs, inputs, seed):
    """into += seed . d outputs / d inputs, a tensor per input; seed: shaped like outputs. Keeps the graph."""
    grads = torch.autograd.grad(outputs, inputs, seed, retain_graph=True, allow_unused=True)
    for total, grad in zip(into, grads):
        if grad is not None:
            total += grad

def backward(student, teacher, batch, seeds_of, params, settings=DEFAULTS, kdr=None, micro_batch=0,
             chunk=4096, checkpointing=False):
    """{name: [float32 gradient per parameter]} of a batch, through micro-batches and chunks of tokens.

    student, teacher: (backbone, head), see split_head. seeds_of(signals) -> {name: seed [T, V]}; each is
    multiplied by the tokens' weights. kdr(ids, attention, mask, residuals) -> K, cos: ntk.kdr_flat with its
    model; None: isotropic. micro_batch: rows per pass, 0 is all. chunk: tokens whose logits exist at one
    time. Neither changes the result, but for methods that draw per chunk (m3-random). Of a token, d numbers
    and not V wait for the backward pass.
    """
    gradients = collections.defaultdict(lambda: [torch.zeros_like(p, dtype=torch.float32) for p in params])
    rows = torch.arange(len(batch.mask), device=batch.mask.device)
    if micro_batch:  # rows of like length together; the longest first: memory runs out at once or never
        rows = batch.mask.sum(1).argsort(descending=True, stable=True)
    for part in rows.split(micro_batch or len(rows)):
        micro = MicroBatch(student, teacher, batch, part, settings, kdr, chunk, checkpointing)
        leaf_grads = collections.defaultdict(functools.partial(torch.zeros_like, micro.leaf))
        for signals in micro.signals():
            for name, seed in seeds_of(signals).items():
                seed = seed * signals.weights[:, None]
                accumulate([leaf_grads[name], *gradients[name]], signals.logits, [micro.leaf, *params], seed)
        for name, grad in leaf_grads.items():
            accumulate(gradients[name], micro.hidden, params, grad)
        micro.only = None  # it knows its micro-batch: such a circle keeps its memory until a later collection
    return dict(gradients)

def geometry(g_R, g_D):
    """dict(norm_R, norm_D, kappa = ||g_R|| / ||g_D|| [eq 8], phi = cos(g_R, g_D)) of two lists of gradients.

    kappa and phi are None without a reward gradient; kappa is inf and phi 0 where only g_D is 0. <g_R, g_D>
    N^2 is the sum over all pairs of positions [eq 7]; sum_n K_DR(n) is its diagonal part [eq 72].
    """
    def inner(one, other):
        pairs = ((a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None)
        return sum(float(a.flatten().float() @ b.flatten().float()) for a, b in pairs)

    norm_R, norm_D = inner(g_R, g_R) ** 0.5, inner(g_D, g_D) ** 0.5
    kappa = phi = None
    if norm_R:
        kappa = norm_R / norm_D if norm_D else math.inf
        phi = min(max(inner(g_R, g_D) / norm_R / norm_D, -1.0), 1.0) if norm_D else 0.0  # NaN stays
    return dict(norm_R=norm_R, norm_D=norm_D, kappa=kappa, phi=phi)

def update_scale(norms, advantages, s_bar, add_up):
    """s_bar: EMA (0.9) of the mean ||delta_R|| over tokens with A != 0; None until a step has one. norms and
    advantages [T]."""
    live = advantages != 0
    total = torch.stack([norms[live].sum(), live.sum().to(norms)])
    add_up([total])
    if total[1] == 0 or not total.isfinite().all():
        return s_bar
    now = (total[0] / total[1]).item()
    return now if s_bar is None else 0.9 * s_bar + 0.1 * now

@contextlib.contextmanager
def extragradient(params, m_D, eta_in):
    """M3-EG [eq 15]: inside, params are theta~ = theta - eta_in m_D; afterwards they are back bit for bit."""
    home = [p.detach().clone() for p in params]
    with torch.no_grad():  # nothing is differentiated through the inner step
        torch._foreach_sub_(params, [eta_in * g for g in m_D])
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(params, home)

class Step(NamedTuple):
    update: list  # the gradient that the optimizer descends: float32, one tensor per parameter
    seen: dict  # what a log needs: name -> [T], see Signals.columns; "row" tells whose token it is
    geometry: dict | None  # norm_R, norm_D, kappa, phi, where they were computed
    s_bar: float | None  # for the next step

def m3_step(student, teacher, batch, method, params, settings=DEFAULTS, s_bar=None, kdr=None,
            statistics=False, look=False, add_up=lambda tensors: None, **memory):
    """One step of any method: signals, conflicts, seeds [eq 11], gradients, their combination -> Step.

    student, teacher: in eval mode, and the student comes back so. s_bar: of the step before. statistics:
    kappa and Phi for a log, two more backward passes. look: K_DR for a log, also where no gate asks.
    add_up(tensors): replaces each by its sum over processes. kdr (None: logit), memory: see backward.
    KeyError for an unknown method. Two need more of their caller: after each step rlsd and sdpo move the
    teacher, by METHODS[method].move_teacher; rlsd wants settings.step; the hints of sdpo show the replies
    that sdpo_siblings names, with weight 0 for a row without one. Of 16-bit params the optimizer needs
    float32 copies: rounding would swallow small steps.
    """
    chosen, seen = METHODS[method], collections.defaultdict(list)

    def seeds_of(signals):
        seeds, alpha = {}, 0.0
        if chosen.seed:
            seeds["update"], alpha = chosen.seed(signals, settings)
        if chosen.mix or statistics:
            seeds |= {"R": signals.delta_R, "D": signals.loss_gradient}
        for name, column in signals.columns(alpha, look).items():
            seen[name].append(column)
        return seeds

    def reward_alone(signals):
        return {"update": normalize(signals.delta_R, settings.eps)}

    def gradients_of(seeds):
        gradients = backward(student, teacher, batch, seeds, params, settings, kdr, **memory)
        for tensors in gradients.values():
            add_up(tensors)
        return gradients

    gradients = gradients_of(seeds_of)
    columns = {name: torch.cat(parts) for name, parts in seen.items()}
    measured = geometry(gradients["R"], gradients["D"]) if "R" in gradients else None
    if chosen.peek:  # so far "update" is m_D; at the inner point it becomes the reward's gradient
        with extragradient(params, gradients["update"], settings.eta_in):
            gradients |= gradients_of(reward_alone)
    if chosen.mix:
        w_R, w_D = chosen.mix(measured["norm_R"], measured["norm_D"], measured["phi"] or 0.0)
        gradients["update"] = [w_R * g_R + w_D * g_D for g_R, g_D in zip(gradients["R"], gradients["D"])]
        columns["alpha"].fill_(w_D / (w_R + w_D))
    if chosen.scaled:
        s_bar = update_scale(columns["norm_R"], columns["advantage"], s_bar, add_up)
        torch._foreach_mul_(gradients["update"], s_bar or 1.0)
    return Step(gradients["update"], columns, measured, s_bar)

# --- 8. LoRA: few trainable weights, and a frozen teacher for free ------------------------------------------

class LoRA(torch.nn.Module):
    """base(x) + 2 B A x, base frozen (alpha = 2 rank, so alpha / rank is 2); A and B always float32."""
    def __init__(self, base, rank):
        super().__init__()
        self.base, self.on, self.turned = base, True, type(base).__name__ == "Conv1D"  # GPT-2 keeps [in, out]
        n_out, n_in = base.weight.shape[::-1] if self.turned else base.weight.shape
        self.lora_A = torch.nn.Linear(n_in, rank, bias=False, dtype=torch.float32)  # kaiming uniform
        self.lora_B = torch.nn.Linear(rank, n_out, bias=False, dtype=torch.float32)
        torch.nn.init.zeros_(self.lora_B.weight)  # so that the first step starts exactly at the base model
        self.to(device=base.weight.device)
    def forward(self, x):  # the sum is taken in float32 and rounded once
        y = self.base(x)
        if not self.on:
            return y
        return (y + self.lora_B(2 * self.lora_A(x.to(self.lora_A.weight.dtype)))).to(y.dtype)
    def merged(self):  # W + 2 B A, rounded once
        weight = self.base.weight.detach()
        delta = 2 * self.lora_B.weight.detach() @ self.lora_A.weight.detach()
        return (weight + (delta.T if self.turned else delta)).to(weight.dtype)

def add_lora(model, rank, seed):
    """Freeze the model; adapt every linear layer of its blocks (".0." in the name), not the head."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # drawn on the CPU: the same adapter on every device
        for name, layer in list(model.requires_grad_(False).named_modules()):
            # A router of experts is often a Linear that returns more than one tensor: left alone.
            linear = getattr(type(layer), "forward", None) is torch.nn.Linear.forward
            if re.search(r"\.\d+\.", name) and (linear or type(layer).__name__ in ("Conv1D", "FalconLinear")):
                model.set_submodule(name, LoRA(layer, rank))
    return model

def lora_share(model):
    """(adapted, all) numbers of the blocks' weight matrices. Experts fused into one tensor stay frozen."""
    sizes = {name: p.numel() for name, p in model.named_parameters()
             if re.search(r"\.\d+\.", name) and p.ndim > 1 and ".lora_" not in name}
    return sum(size for name, size in sizes.items() if name.endswith(".base.weight")), sum(sizes.values())

@contextlib.contextmanager
def lora_off(model):
    """Inside, the model is the frozen base to the bit: the privileged teacher, without a second copy."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoRA)]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True

def lora_state(model):  # model.load_state_dict(it, strict=False) puts it back
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}

def merged_state(model):
    """W + 2 B A under the base's own names, for save_pretrained(folder, state_dict=...)."""
    state = {name.replace(".base.", "."): x for name, x in model.state_dict().items() if ".lora_" not in name}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoRA)]
    return state | {f"{name}.weight": layer.merged() for name, layer in layers}
