"""Train a small language model by hybrid reward + on-policy self-distillation. One job, one command:

    python train.py                 # toy world: no download, CPU or GPU, a few minutes
    python train.py --help          # every knob, by stage

Top to bottom, this file is the run: flags, the toy world, saving, and one long loop

    sample -> reward -> score -> conflict -> seed -> backward -> step -> log

whose mathematics lives in m3.py and whose statistics live in ntk.py. Departures from the textbook, and why:
  1. Every random draw is a function of (seed, step). A resumed run needs no saved generator, and evaluating, logging
     or splitting the batch cannot shift what is sampled next.
  2. The head is run on chunks of response tokens, outside the graph of the transformer. Each seed goes back through
     the chunk's logits into the hidden states: no [B, N, V] (but for --kernel exact, hutchinson); one backward does the rest.
  3. AdamW, although the papers write plain steps. It is free of the gradient's scale, so s_bar matters only through
     the clip and the moments' memory.
"""

import argparse, contextlib, copy, csv, functools, hashlib, inspect, io, json, math, os, pathlib, random
import itertools, re, shutil, signal, subprocess, sys, tempfile, threading, time, zlib

import torch, transformers
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import m3, ntk

METRICS = """step reward accuracy loss_R loss_D grad_norm kappa phi conflict conflict_deadband alpha_eff zero_advantage
clipped entropy length truncated mu lr tokens_per_second seconds collapsed""".split()

# What tells the methods apart. One seed: (1 - alpha) delta_R + alpha delta_D with a fixed alpha ...
SHARE = {"grpo": 0.0, "opd": 1.0, "rlsd": 0.0, "sdpo": 1.0}  # hybrid: --alpha; the last two for the log alone
# ... or a gate's alpha_n on normalised residuals ...
GATE = {"m3-norm": lambda K, cos, f: torch.full_like(K, f.alpha_max),  # no gate: the reference
        "m3-select": lambda K, cos, f: m3.gate_select(K, f.alpha_max),
        "m3-soft": lambda K, cos, f: m3.gate_soft(cos, f.alpha_max, f.beta),
        "m3-eg": lambda K, cos, f: m3.gate_soft(cos, f.alpha_max, f.beta)}
# ... or two backward passes, and weights (w_R, w_D) that depend on both. rlsd and sdpo have seeds of their own, in step 3.
MIX = {"gradnorm": lambda g: m3.gradnorm_weights(g["norm_R"], g["norm_D"]),
       "pcgrad": lambda g: m3.pcgrad_weights(g["norm_R"], g["norm_D"], g["phi"]),
       "minnorm": lambda g: (1 - (a := ntk.min_norm_alpha(g["norm_R"], g["norm_D"], g["phi"])), a)}
FIELDS = ["prompt", "answer", "solution"]
METHODS = ["grpo", "opd", "hybrid", *MIX, "rlsd", "sdpo", *GATE]
TOY_TEACHERS, CACHE = ["self-rl", "larger"], pathlib.Path("runs/cache")  # of what the toy world makes
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun

# Named sets of flags, read before the command line's own: those win.
PAPER = ("--method m3-soft --lora-rank 64 --lr 5e-5 --group-size 8 --steps 500 --alpha-max 0.15 "  # [M3]: alpha 128 = 2r
         "--stats-every 10 --kdr-every 10 --eval-every 50 --save-every 50 ")  # what only the log needs, rarely
PRESETS = {
    "table-calm": "--compare grpo opd hybrid gradnorm pcgrad minnorm rlsd sdpo m3-norm m3-select m3-soft m3-eg "
                  "--steps 60 --lr 1e-4 --stats-every 5 --kdr-every 5 --eval-every 10",
    # Ten times the learning rate: the policy can run off the format of the answers, and what anchors it decides.
    "table-stress": "--compare grpo opd hybrid gradnorm pcgrad minnorm rlsd sdpo m3-norm m3-select m3-soft m3-eg "
                    "--steps 240 --lr 1e-3 --kernel logit --stats-every 20 --kdr-every 5 --eval-every 80",
    # The teacher's loss a thousandth of itself: kappa in the thousands, which a normalised residual does not notice.
    "table-high-kappa": "--compare grpo hybrid gradnorm m3-select m3-soft --steps 60 --lr 1e-4 --distill-scale 1e-3 "
                        "--eps 1e-4 --stats-every 5 --kdr-every 5 --eval-every 10",
    # Pure distillation from three kinds of teacher: where does the loss stop falling, and does its gradient say so? [VLS]
    "table-teachers": "--compare-teachers --divergence rkl-topk --steps 150 --eval-every 10 --kdr-every 0 --occupancy-every 10",
    # Real models. Memory is an estimate by arithmetic (weights, adapter with moments and gradients, activations of one
    # micro-batch, one chunk of logits), not a measurement.
    "cpu-smollm2-svamp": "--model HuggingFaceTB/SmolLM2-135M-Instruct --dataset svamp --method m3-soft "  # 2 cores, 6 GB measured
                         "--few-shot 2 --lora-rank 16 --lr 5e-4 --steps 30 --prompts-per-step 2 --group-size 4 --kernel logit "
                         "--max-new-tokens 40 --eval-limit 40 --eval-every 15 --stats-every 10 --vocab-chunk 256",
    "qwen3-0.6b-gsm8k": PAPER + "--model Qwen/Qwen3-0.6B --dataset gsm8k "  # ~14 GB
                        "--max-new-tokens 512 --micro-batch 16 --vocab-chunk 1024",
    "qwen3-1.7b-gsm8k": PAPER + "--model Qwen/Qwen3-1.7B --dataset gsm8k "  # the paper's main model; ~22 GB
                        "--max-new-tokens 512 --micro-batch 8 --vocab-chunk 1024",
    "llama-3.2-1b-svamp": PAPER + "--model meta-llama/Llama-3.2-1B-Instruct --dataset svamp "  # short problems; ~14 GB
                          "--max-new-tokens 256 --micro-batch 16 --vocab-chunk 1024",
    "qwen2.5-1.5b-arc": PAPER + "--model Qwen/Qwen2.5-1.5B-Instruct --dataset arc "  # four options; ~18 GB
                        "--max-new-tokens 256 --micro-batch 16 --vocab-chunk 1024",
}

# A saved run is what its config.json says. What may change on the way decides how far, how fast and where it
# goes on, and how often it is looked at; anything else would make a log that no one set of flags describes.
NEUTRAL = ["out", "threads", "device", "micro_batch", "sample_batch", "vocab_chunk", "gradient_checkpointing",
           "save_every"]  # these do not even change a result
MAY_CHANGE = [*NEUTRAL, "steps", "lr", "weight_decay", "clip", "eval_every", "stats_every", "kdr_every",
              "occupancy_every", "stop_on_collapse", "swa"]
NOT_A_RUN = ["plot", "compare", "seeds", "preset", "resume", "probe"]  # of the program, not of one run
ABOUT = {
    "grpo": "the verifier's reward alone [eq 2]", "opd": "the teacher's distribution alone [eq 1]",
    "hybrid": "(1 - alpha) reward + alpha teacher", "gradnorm": "both, at gradients of equal norm",
    "pcgrad": "both, each projected off the other", "minnorm": "the shortest mix of both gradients",
    "rlsd": "the teacher scales the advantage", "sdpo": "the teacher reads a sibling's right reply",
    "m3-norm": "both, normalised per token, no gate", "m3-select": "the teacher only where K_DR >= 0 [eq 12]",
    "m3-soft": "the teacher by a sigmoid of cos K_DR", "m3-eg": "the reward after the teacher's step [eq 15]",
    "m3-random": "the control: closes as many tokens as m3-select, at random"}

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults behind every flag, line breaks of the list of methods kept."""

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message.replace("argument ", "") + " (see --help)")

def number(kind, words, rule):
    """How argparse reads a number that obeys `rule`; `words` say which those are."""
    def read(text):
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            if math.isfinite(value) and rule(value):
                return value
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {words}")
    return read

def parse_flags(argv=None, methods=None):
    """Every knob; methods: {name: a line of help}. A resumed run starts from the flags it was saved with."""
    methods = methods or {name: ABOUT.get(name, "") for name in METHODS}
    listed = "\n".join(f"  {name:<12}{text}" for name, text in methods.items())
    parser = Parser(usage="python train.py [FLAG ...]", formatter_class=Help, allow_abbrev=False,
                    description="Train a small language model by hybrid reward and on-policy distillation.",
                    epilog=f"methods:\n{listed}")
    switch = {"action": argparse.BooleanOptionalAction, "default": False}
    at_least_1 = number(int, "a whole number, at least 1", lambda value: value >= 1)
    not_negative = number(int, "a whole number, at least 0", lambda value: value >= 0)
    any_number = number(float, "a number", lambda value: True)
    above_0 = number(float, "above 0", lambda value: value > 0)
    unit = number(float, "in [0, 1]", lambda value: 0 <= value <= 1)

    def flag(stage, name, default, text, kind=str, **more):
        if "choices" not in more:
            more["metavar"] = "X"
        stage.add_argument(name, default=default, help=text, type=kind, **more)

    g = parser.add_argument_group("what to train")
    flag(g, "--method", "m3-soft", "how the two signals are combined, see below", choices=list(methods))
    flag(g, "--model", "toy", "toy, or a causal language model: a folder or a hub id")
    flag(g, "--dataset", "toy", "toy, gsm8k, svamp, arc, math, a json, jsonl, csv, parquet file or folder")
    flag(g, "--teacher", "privileged", "the frozen initial model, shown the gold solution; or a folder or hub"
         " id; or in the toy world self-rl (the base model after GRPO) or larger (4 x, another style)")
    flag(g, "--lora-rank", 0, "rank of adapters on linear layers, alpha is twice it; 0: none", not_negative)
    flag(g, "--few-shot", 0, "worked examples in front of every problem, for base models", not_negative)
    for name in FIELDS:
        flag(g, f"--{name}-field", "", f"column of a local file that holds the {name}")
    flag(g, "--eval-split", "validation", "which rows are evaluated", choices=["validation", "test"])
    flag(g, "--preset", "", "a named set of flags, see PRESETS in this file", choices=["", *PRESETS])
    flag(g, "--steps", 100, "optimizer steps", at_least_1)
    g = parser.add_argument_group("rollouts (never with a checkpoint's own sampling settings)")
    flag(g, "--prompts-per-step", 8, "P: distinct prompts a step", at_least_1)
    flag(g, "--group-size", 8, "G: responses per prompt; one alone has no spread",
         number(int, "a whole number, at least 2", lambda value: value >= 2))
    flag(g, "--max-new-tokens", 24, "longest response", at_least_1)
    flag(g, "--temperature", 1.0, "of sampling and of scoring alike", above_0)
    flag(g, "--top-p", 1.0, "nucleus; 1 is off", number(float, "in (0, 1]", lambda value: 0 < value <= 1))
    flag(g, "--top-k", 0, "0 is off", not_negative)
    g = parser.add_argument_group("signals")
    flag(g, "--std", "unbiased", "divides the advantages", choices=["unbiased", "population", "none"])
    flag(g, "--divergence", "jsd", "of eq 1; M3 takes fkl", choices=["jsd", "fkl", "rkl", "rkl-topk"])
    flag(g, "--lam", 0.5, "lambda of the jsd", number(
        float, "in [0.01, 0.99]: the jsd is lam (1 - lam) of the KL near agreement and at most the entropy of"
        " (lam, 1 - lam), 0.056 at 0.01; further out it fades, and fkl and rkl are its ends",
        lambda value: 0.01 <= value <= 0.99))
    flag(g, "--tau", None, "clip of a token's divergence in nats: beyond it the teacher is silent", above_0)
    flag(g, "--distill-scale", 1.0, "factor on the teacher's loss and residuals: the lever on kappa", above_0)
    flag(g, "--hint", "solution", "what the privileged teacher sees", choices=["solution", "answer"])
    flag(g, "--hint-error", 0.0, "toy world: share of problems whose teacher reads a wrong solution", unit)
    flag(g, "--reduction", "response", "mean of response means, or tokens", choices=["response", "token"])
    g = parser.add_argument_group("method")
    flag(g, "--alpha", 0.5, "hybrid: weight of distillation", unit)
    flag(g, "--alpha-max", 0.15, "M3: the teacher's largest share of a token", unit)
    flag(g, "--beta", 1.0, "M3-Soft, and M3-EG with the soft gate: sharpness of the gate", any_number)
    flag(g, "--eps", 0.1, "M3: eps of the normalised residual, in units of its norm", above_0)
    flag(g, "--eta-in", 1000.0, "M3-EG: inner (plain) step as a multiple of --lr", any_number)
    flag(g, "--eg-gate", "select", "M3-EG: whose gate", choices=["select", "soft"])
    flag(g, "--zero-advantage", "teacher", "M3 tokens without a reward signal", choices=["teacher", "skip"])
    flag(g, "--kernel", "local", "how K_DR(n) is computed", choices=["logit", "local", "hutchinson", "exact"])
    g = parser.add_argument_group("optimizer")
    flag(g, "--lr", 1e-4, "AdamW learning rate", unit)
    flag(g, "--weight-decay", 0.0, "AdamW's", unit)
    flag(g, "--clip", 1.0, "largest gradient norm", above_0)
    flag(g, "--micro-batch", 0, "rows per training pass, sorted by length; 0 is all", not_negative)
    flag(g, "--sample-batch", 0, "prompts sampled at a time; 0 is all", not_negative)
    g.add_argument("--gradient-checkpointing", help="recompute activations: less memory, more time", **switch)
    flag(g, "--vocab-chunk", 4096, "response tokens whose logits exist at one time", at_least_1)
    g = parser.add_argument_group("run")
    flag(g, "--seed", 0, "governs every random draw",
         number(int, "a whole number from 0 to 2^32 - 1", lambda value: 0 <= value < 2**32))
    flag(g, "--device", "auto", "cpu, cuda, cuda:1, mps; auto takes a GPU where there is one")
    flag(g, "--dtype", "auto", "auto: bfloat16 on cuda, if not toy", choices=["auto", "float32", "bfloat16"])
    flag(g, "--threads", 0, "CPU threads; 0 leaves torch's choice", not_negative)
    flag(g, "--eval-every", 20, "steps between greedy evaluations", at_least_1)
    flag(g, "--eval-limit", 200, "held-out problems per evaluation", at_least_1)
    flag(g, "--stats-every", 1, "steps between kappa and phi (2 backward passes); 0 is never", not_negative)
    flag(g, "--kdr-every", 1, "steps between conflict shares in the log; 0 is never", not_negative)
    flag(g, "--save-every", 50, "steps between checkpoints; the last step is always saved", at_least_1)
    flag(g, "--occupancy-every", 0, "steps between occupancies (4 backward passes); 0 is never", not_negative)
    g.add_argument("--stop-on-collapse", help="end when reward stays below 0.05 for ten steps", **switch)
    g.add_argument("--swa", help="at the end, also evaluate the mean of the last two checkpoints", **switch)
    flag(g, "--out", "", "folder of this run; by default runs/<time>-<method>")
    flag(g, "--resume", "", "go on with the run in this folder from its last checkpoint")
    g = parser.add_argument_group("instead of one run")
    g.add_argument("--probe", action="store_true", help="ten steps of hybrid, then the paper's advice")
    g.add_argument("--compare", nargs="+", choices=list(methods), metavar="METHOD",
                   help="train each METHOD on the same seeds, one process a core; table and picture in --out")
    g.add_argument("--compare-teachers", dest="compare", action="store_const",
                   const=["privileged", *TOY_TEACHERS], help="the same: opd under each toy teacher")
    flag(g, "--seeds", 3, "seeds 0, 1, ... of a comparison", at_least_1)
    g.add_argument("--plot", nargs="+", metavar="FOLDER", help="draw curves.png into the first FOLDER")

    argv = [*(sys.argv[1:] if argv is None else argv)]
    given = parser.parse_args(argv)
    argv = PRESETS.get(given.preset, "").split() + argv  # the command line's own flags win
    if not given.resume:
        return check_flags(parser.parse_args(argv))
    config = as_argv(read_config(given.resume, vars(given)))
    saved, flags = (check_flags(parser.parse_args(one)) for one in (config, config + argv))
    return check_resume(given, saved, flags)

def check_flags(flags):
    """`flags` with "auto" decided; what is wrong only together ends here."""
    if WORLD > 1 and flags.compare:
        fail("--compare starts its own processes: leave out torchrun")
    if flags.prompts_per_step % WORLD:
        fail(f"--prompts-per-step must be a multiple of the {WORLD} processes")
    if flags.model == "toy" != flags.dataset:
        fail("--dataset: the toy model only knows the toy world; give a --model")
    if flags.model != "toy" and {flags.teacher, *(flags.compare or ())} & {*TOY_TEACHERS}:
        fail(f"--compare-teachers, --teacher {' and '.join(TOY_TEACHERS)} are the toy world's; give a folder")
    if flags.method in ("rlsd", "sdpo") and (flags.lora_rank or flags.teacher != "privileged"):
        fail(f"--method {flags.method} moves its teacher: it needs --lora-rank 0 and --teacher privileged")
    if flags.hint_error and (flags.dataset != "toy" or flags.teacher != "privileged"):
        fail("--hint-error misleads the toy world's privileged teacher: leave out --dataset and --teacher")
    if flags.probe:
        flags.method, flags.steps, flags.stats_every, flags.kdr_every = "hybrid", 10, 1, 1
    if flags.device == "auto":
        flags.device = "cuda" if torch.cuda.is_available() else "cpu"
    if flags.dtype == "auto":
        flags.dtype = "bfloat16" if "cuda" in flags.device and flags.model != "toy" else "float32"
    if flags.method == "m3-eg" and flags.dtype == "bfloat16" and not flags.lora_rank:
        fail("--method m3-eg: its inner step is lost in bfloat16; take --dtype float32 or --lora-rank")
    return flags

def check_resume(given, saved, flags):
    """`flags` of a run that goes on in its folder. given: the command line alone; saved: what the run was."""
    if given.compare or flags.compare:
        fail("--resume is for one run; a --compare goes on when the same command is given again")
    if given.out and pathlib.Path(given.out).resolve() != pathlib.Path(given.resume).resolve():
        fail(f"--out {given.out}: a run goes on in its own folder, leave it out with --resume")
    if not newest_checkpoint(pathlib.Path(given.resume)):
        fail(f"--resume {given.resume}: no checkpoint yet: give its first command again, or delete it")
    for key in differing(saved, flags, MAY_CHANGE):
        fail(f"{dashed(key)} {vars(flags)[key]}: the run in {given.resume} has {vars(saved)[key]!r}, it"
             " cannot change on the way; leave it out, or start another run with --out")
    flags.out = given.resume
    return flags

def differing(one, two, free):
    """Names of the flags in which two runs differ, but for those that are `free` to."""
    return [key for key in vars(one) if key not in [*free, *NOT_A_RUN] and vars(one)[key] != vars(two)[key]]

def dashed(key):
    return "--" + key.replace("_", "-")

def as_argv(config):
    """A config.json as a command line, so that it is read by the same rules."""
    argv = []
    for key, value in config.items():
        if isinstance(value, bool):
            argv += [dashed(key)] if value else []
        elif value is not None:
            argv.append(f"{dashed(key)}={value}")
    return argv

def read_config(folder, known):
    """config.json of a run, with the flags that are `known` here."""
    path = pathlib.Path(folder).resolve()
    with or_fail(f"--resume: cannot read {folder}/config.json"):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if "method" not in config and (path.parent / "metrics.jsonl").exists():  # a checkpoint's own
            newest = newest_checkpoint(path.parent)
            fail(f"--resume {folder} is a checkpoint; --resume {path.parent}, its run, goes on from {newest}")
        return {key: value for key, value in config.items() if key in known and key not in NOT_A_RUN}

def fail(message, code=2):
    """A user's mistake: one line that names the mend, exit code 2, no traceback."""
    print(f"train.py: error: {message}", file=sys.stderr)
    sys.exit(code)

@contextlib.contextmanager
def or_fail(message, kinds=Exception, code=2):
    """What fails inside ends the program with this message and the error's first line."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # main has advice for that
    except kinds as error:
        fail(f"{message} ({type(error).__name__}: {str(error).strip().split(chr(10))[0][:200]})", code)

# --- The toy world: word problems a 0.9M model learns in a minute, and one bad habit for reward and teacher to cure --

TOY_WORDS = ["<pad>", "<eos>", "<unk>", "\n", *"has gets loses doubles them , . ? How many Answer Hint : + - * = ####".split(),
             *(TOY_NAMES := "Ann Bob Cem Dua Eli Fay Gus Hana Ivo Jun".split()),
             *(TOY_THINGS := "pens cups figs nuts keys eggs hats coins".split()), *map(str, range(100))]

def toy_problem(rng, heldout):
    """One question: its text, the starting number and the operations [(sign, k), ...]; values stay in 1..20, but for the last."""
    while True:
        start, steps = rng.randint(2, 16), rng.randint(1, 3)
        ops = [(rng.choice("+-"), rng.randint(1, 6)) for _ in range(steps)]
        if rng.random() < 0.42:  # one doubling at most, and at the end: what follows it would need sums of large numbers,
            ops[-1] = ("*", 2)  # which the base model, with its habit, has hardly ever seen
        values = [*itertools.accumulate(ops, lambda v, op: {"+": v + op[1], "-": v - op[1], "*": v * op[1]}[op[0]], initial=start)]
        # A hash of the numbers and operations decides which side a problem is on: one in eight is held out, under all its
        # names and things and whatever the seed. Not hash(): that changes from process to process.
        if 1 <= min(values) and max(values[:-1]) <= 20 and (zlib.crc32(repr((start, ops)).encode()) % 8 == 0) == heldout:
            break
    told = {"+": "gets {}", "-": "loses {}", "*": "doubles them"}  # equally long: a prompt's length follows from `steps`
    clauses = [f"{rng.choice(TOY_NAMES)} has {start} {rng.choice(TOY_THINGS)}", *(told[s].format(k) for s, k in ops)]
    return " , ".join(clauses) + " . How many ?", start, ops

def toy_solution(start, ops, rng=None, swapped=False):
    """Worked steps and "#### answer". With `rng`: as the base model's corpus has them, bad habit and slips included.
    swapped: another style, that of the larger teacher: "3 + 12" for "12 + 3", "12 + 12" for "12 * 2"."""
    lines, value = [], start
    for sign, k in ops:
        if rng and sign == "*" and rng.random() < 0.6:
            sign = "+"  # the misconception: "doubles" worked as + 2
        result = {"+": value + k, "-": value - k, "*": value * k}[sign]
        if rng and sign != "*" and rng.random() < 0.03:
            result += rng.choice((-1, 1))
        result = max(result, 0)  # a wrong value may be too small for the next "loses", and there is no token for -1
        lines.append(f"{value} {sign} {k} = {result}" if not swapped or sign == "-" else
                     f"{k if sign == '+' else value} + {value} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])

def toy_rows(n, seed, heldout=False):
    """n different problems [{question, solution, answer, kind}]; no held-out one equals any other, whatever the two seeds."""
    rng, rows = random.Random(f"rows {seed}"), {}
    while len(rows) < n:
        question, start, ops = toy_problem(rng, heldout)
        rows[question] = dict(question=question, solution=(text := toy_solution(start, ops)), answer=text.split()[-1], kind="toy")
    return list(rows.values())

def toy_tokenizer():
    """One token per word, number and line break; decode(m3.encode(text)) == text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(TOY_WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(*x) for x in ((" ", "removed"), ("\n", "isolated"))])
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(prefix="<none>", cleanup=False), decoders.Fuse(),
                                           decoders.Replace(Regex(" ?\n ?"), "\n")])  # " " before each word, "\n" bare
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   padding_side="left", clean_up_tokenization_spaces=False)

def toy_base_model(seed, steps=400, rows=48, lr=3e-3, larger=False):
    """A Qwen3 of 0.9M parameters, pre-trained on the fly. A third of its corpus shows the gold solution as a hint and answers
    RIGHT, which makes the same frozen weights a competent teacher; the rest answers with the habit: the student to mend.
    larger: a teacher of 3.4M, which needs no hint and has no habit, but works in another style."""
    width = 256 if larger else 128
    rng, tokenizer, corpus = random.Random(f"corpus {seed}"), toy_tokenizer(), []
    for _ in range(steps * rows):
        prompt, start, ops = toy_problem(rng, heldout=False)
        right, hint = toy_solution(start, ops, swapped=larger), rng.random() < (0 if larger else 0.36)
        texts = (m3.prompt_text(tokenizer, dict(question=prompt, kind="toy"), reference=right * hint),
                 right if hint or larger else toy_solution(start, ops, rng))
        corpus.append(tokenizer([texts[0], texts[1] + "<eos>"])["input_ids"])
    with torch.random.fork_rng(devices=[]):  # the weights are drawn from the global generator: put it back afterwards
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(  # from 0.02 copying a hint, from 0.05 arithmetic is learned too late
            vocab_size=len(TOY_WORDS), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4, head_dim=32,
            num_attention_heads=width // 32, num_key_value_heads=width // 32, max_position_embeddings=256,
            tie_word_embeddings=True, bos_token_id=None, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, initializer_range=0.04))
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in tqdm(range(steps), desc="toy base model", leave=False):
        # Cut by length, for the longest rows are thrice the shortest and padding costs as much as text; but cut WITHIN the
        # batch: whole batches of one length (all hints, then none) made the two habits undo each other.
        batch = sorted(corpus[step * rows:(step + 1) * rows], key=lambda pair: len(pair[0]) + len(pair[1]))
        for part in (batch[i:i + rows // 3] for i in range(0, rows, rows // 3)):
            width = max(len(p) + len(r) for p, r in part)
            # padded on the RIGHT: causal attention never looks there, so no mask is needed
            ids = torch.tensor([p + r + [0] * (width - len(p) - len(r)) for p, r in part])
            taught = torch.tensor([[len(p) <= t + 1 < len(p) + len(r) for t in range(width)] for p, r in part])
            hidden = model.model(ids, use_cache=False).last_hidden_state[taught]  # the head only where a response is predicted
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), ids[:, 1:][taught[:, :-1]], reduction="sum")
            (loss / sum(len(r) for _, r in batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad(), schedule.step()
    return model.eval()

SELF_RL = "--method grpo --steps 200 --seed 1000 --stats-every 0 --kdr-every 0 --eval-every 200 --save-every 200"

def toy_path(kind="base"):
    """Where a toy model is cached: a name hashed from the code and words that make it."""
    made_by = [inspect.getsource(f) for f in (toy_problem, toy_solution, toy_tokenizer, toy_base_model, m3.prompt_text)]
    return CACHE / f"toy-{kind}-{hashlib.sha256(f'{made_by} {TOY_WORDS} {SELF_RL}'.encode()).hexdigest()[:12]}"

def toy_model(kind="base"):
    """Folder of a toy model, made once: base, larger (see toy_base_model) or self-rl (base after SELF_RL). --seed varies
    the run, not where it starts, just as runs on a published checkpoint do."""
    def fill(tmp):
        if kind != "self-rl":
            return toy_tokenizer().save_pretrained(tmp), toy_base_model(0, larger=kind == "larger").save_pretrained(tmp)
        subprocess.run([sys.executable, __file__, *SELF_RL.split(), "--out", tmp / "run"], check=True,  # alone, not as a rank
                       stdout=subprocess.DEVNULL, env=os.environ | {"RANK": "0", "WORLD_SIZE": "1"})
        return [shutil.move(file, tmp) for file in newest_checkpoint(tmp / "run").iterdir()]
    path = toy_path(kind)
    if not path.exists():
        print(f"toy {kind} model: training it once, a minute or two, then kept in {path}", flush=True)
        write_folder(path, fill)
    return str(path)

# --- Real data and real models ---------------------------------------------------------------------------------------

HUB = {"gsm8k": ["openai/gsm8k", "main"], "svamp": ["ChilleD/SVAMP"], "arc": ["allenai/ai2_arc", "ARC-Challenge"],
       "math": ["HuggingFaceH4/MATH-500"]}  # a test split alone: like any source without parts it is cut in three

def read_file(path):
    """A file's rows as dicts, as they stand: no cache, no network, no guessed column types."""
    if path.suffix == ".parquet":
        import pyarrow.parquet  # comes with datasets
        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_text("utf-8-sig").strip()
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    if text[:1] != "[":  # told by content: many a .jsonl is one big array
        text = "[" + ",\n".join(line for line in text.split("\n") if line.strip()) + "]"
    return [{**row} for row in json.loads(text)]

@functools.lru_cache(1)  # train() asks for two splits of it
def read_parts(dataset):
    """{"train" | "validation" | "test": rows}, as many as the source has; if it has only one, it counts as train."""
    path, parts = pathlib.Path(dataset).expanduser(), {}
    if dataset in HUB:
        import datasets
        parts = {name: list(part) for name, part in datasets.load_dataset(*HUB[dataset]).items()}
    elif not path.exists():
        fail(f"--dataset {dataset}: file or folder not found; by name there are {', '.join(HUB)}")
    elif path.is_file():
        parts = {"train": read_file(path)}
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        part = re.search(r"(?:^|[-_.])(train|test|validation|valid|val|dev)[-_.]", file.name)
        if part and file.suffix in (".json", ".jsonl", ".csv", ".parquet"):
            parts.setdefault(part[1] if part[1][0] == "t" else "validation", []).extend(read_file(file))
    return {"train": parts.popitem()[1]} if len(parts) == 1 else parts

def read_row(row, fields):
    """(question, solution, gold, kind) in any known layout; kind "": ask the golds. A missing column is a KeyError."""
    text = lambda name: "" if row[name] is None else str(row[name]).strip()
    if "answerKey" in row and not any(fields.values()):  # ARC, two layouts; the letters shown are the letters scored
        stem = row["question"] if isinstance(row["question"], dict) else {"stem": text("question")} | row
        both = stem["choices"]
        both = zip(both["label"], both["text"]) if isinstance(both, dict) else [(x["label"], x["text"]) for x in both]
        shown = {str(label): f"{letter}. {option}" for (label, option), letter in zip(both, "ABCDEFGHIJ")}
        right = shown.get(text("answerKey"), "")
        return "\n".join([stem["stem"], *shown.values()]), right, right[:1], "arc"
    if "Body" in row and not any(fields.values()):  # SVAMP: a body without a stop is nearly always an open "If ..."
        joint = " " if text("Body").endswith((".", "?", "!", ",")) else ", "
        equation = re.sub(r"(\d)\.0\b", r"\1", f"{text('Equation')} = {text('Answer')}")  # 51.0 -> 51
        return text("Body") + joint + text("Question"), equation, equation.split(" = ")[-1], "svamp"
    prompt = fields.get("prompt") or next((name for name in ("question", "problem") if name in row), "prompt")
    gold, worked = text(fields.get("answer") or "answer"), fields.get("solution") or "solution"
    solution = text(worked) if worked in row or fields.get("solution") else gold if "####" in gold else ""
    solution = re.sub(r"<<[^<>\n]*>>", "", solution)  # GSM8K's calculator marks: nothing to learn to write
    return text(prompt), solution, gold.split("####")[-1].strip(), "math" if prompt == "problem" else ""

def load_rows(dataset, split, fields, seed):
    """[{question, solution, answer, kind}] of a split. What the source lacks is held out of its train rows by a shuffle
    of `seed`: a fifth for test, a tenth for validation, 500 at most. No row is in two splits."""
    source = {}
    try:
        source = read_parts(dataset)
        parts = {name: [read_row(row, fields) for row in rows] for name, rows in source.items()}
    except KeyError as error:
        columns = dict.fromkeys(str(name) for rows in source.values() for row in rows for name in row)
        fail(f"--dataset {dataset}: no column {error} in some row, the columns are {', '.join(columns)};"
             " --prompt-field, --answer-field and --solution-field name them")
    except Exception as error:
        fail(f"--dataset {dataset}: cannot be read ({type(error).__name__}: {str(error).splitlines()[:1]})" + (
             "; a local file needs no connection: --dataset FILE (.json, .jsonl, .csv, .parquet)" * (dataset in HUB)))
    parses = lambda row, kind: row[2] != "" and m3.verify(m3.FINISH[kind][0].format(row[2]), row[2], kind)
    rows = [row for part in parts.values() for row in part]
    guess = next((k for k in ("gsm8k", "arc") if sum(parses(row, k) for row in rows) > 0.9 * len(rows)), "math")
    pool = parts.get("train", [])
    order = random.Random(f"split {seed}").sample(range(len(pool)), len(pool))
    for name, share in ("test", 5), ("validation", 10):
        if name not in parts:
            cut = min(len(pool) // share, 500)
            parts[name], order = [pool[i] for i in sorted(order[:cut])], order[cut:]
    parts["train"] = [pool[i] for i in sorted(order)]
    rows = parts[split] or fail(f"--dataset {dataset}: 0 {split} rows, as there are {len(pool)} train rows in it")
    good, bad = [], []
    for row in rows:
        problem = dict(question=row[0], solution=row[1], answer=row[2], kind=row[3] or guess)
        (good if row[0] and parses(row, problem["kind"]) else bad).append(problem)
    if bad:
        print(f"{dataset}, {split}: {len(bad)} of {len(rows)} rows left out, their answer or question does not parse:",
              [f"{row['question'][:30]} -> {row['answer'][:20]}" for row in bad[:4]])
    return good or fail(f"--dataset {dataset}: 0 of {len(rows)} {split} rows have an answer that parses")

def encode_rows(rows, tokenizer, context, max_new_tokens, shots, hint):
    """`rows` with prompt, prompt_ids and teacher_ids, without the few-shot examples; a row too long for the context is
    dropped and named: a cut prompt is another problem."""
    shown = [shot["question"] for shot in shots]
    rows = m3.encode_rows(tokenizer, [row for row in rows if row["question"] not in shown], shots, hint)
    kept, long, why = [], [], f"length filter (prompt + {max_new_tokens} new tokens within a context of {context})"
    for row in rows:
        (kept if max(len(row["prompt_ids"]), len(row["teacher_ids"])) + max_new_tokens <= context else long).append(row)
    if long and kept:
        print(f"{len(long)} of {len(rows)} rows dropped by the {why}:", [row["prompt"][:30] for row in long[:4]], "...")
    return kept or fail(f"0 of {len(rows)} rows left after the {why}: lower --max-new-tokens or --few-shot")

def load_model(path, dtype, device, flag="--model"):
    """(model, tokenizer, eos_ids) of a local folder or a hub id. Path-like values are never looked up on the hub."""
    name = str(pathlib.Path(path).expanduser())
    if not pathlib.Path(name).exists() and (re.match(r"[~./\\]", path) or path.count("/") > 1):
        fail(f"{flag} {path}: folder not found")
    with or_fail(f"{flag} {path}: cannot load its tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        assert len(tokenizer) > len(tokenizer.all_special_ids), "no words in it"  # transformers makes one up if need be
    with or_fail(f"{flag} {path}: cannot load its model"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, output_loading_info=True)  # attention: sdpa where there is one
        assert not info["missing_keys"], f"no weights for {sorted(info['missing_keys'])[:3]}"  # they would be random
    ends = [tokenizer.eos_token_id, *torch.tensor(model.generation_config.eos_token_id or []).view(-1).tolist()]
    eos_ids = {i for i in ends if i is not None} or fail(f"{flag} {path}: no end token in tokenizer or settings")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = min(eos_ids)
        print(f"{path}: no pad token; the end token {tokenizer.pad_token!r} pads (masks go by length, not by id)")
    return model.to(device).eval(), tokenizer, eos_ids

# --- Saving: nothing stands half-written under its name; only what this program wrote is replaced -----------

OURS = re.compile(r"checkpoint-\d+|last|(config|summary)\.json|(metrics|samples)\.jsonl|non-finite-.*\.pt"
                  r"|report\.html|curves\.png|\..*\.\d+\.tmp")  # all that a run puts into its folder

@contextlib.contextmanager
def locked(folder):
    """Nobody else runs in `folder` meanwhile. The kernel holds the lock: a killed process leaves none. It is
    on the folder itself: no file is left. Where there are no such locks (Windows), none is taken."""
    handle = None
    if fcntl:
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"{folder} is in use by another process: wait until it ends, or give another --out")
        except OSError:
            pass  # a network drive without locks
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)

def new_folder(name):
    """`name`, or name-2, name-3, ...: mkdir makes a folder or fails, so two runs never get the same one."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            folder = pathlib.Path(name if number == 1 else f"{name}-{number}")
            folder.mkdir(parents=True)
            return folder

@contextlib.contextmanager
def claim(flags):
    """Make flags.out this run's own folder and hold it. Rank 0 does so, and tells the others."""
    if RANK > 0:
        yield
        return
    name = flags.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{flags.method}"
    made = not flags.out or not pathlib.Path(name).exists()
    with or_fail(f"--out {name}: cannot write there, give another folder"):
        out = pathlib.Path(name) if flags.out else new_folder(name)
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    flags.out = str(out)
    try:
        with locked(out):
            if (out / "last").is_dir() and not (out / "last").is_symlink():
                fail(f"{out}/last is a folder, not a link (was the run copied?): move it away")
            if not flags.resume and (out / "metrics.jsonl").exists() and standing(out, flags) != "new":
                fail(f"--out {out} already holds a run: give another folder, or --resume {out}")
            yield
    finally:
        if made:  # and the run ended before it wrote anything: rmdir removes no folder that holds something
            with contextlib.suppress(OSError):
                out.rmdir()

def standing(folder, flags):
    """How far the run of these flags has come in its folder: "new", "broken" or "finished". Anything else
    in the folder ends the program."""
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    if "config.json" in names:
        saved = parse_flags(as_argv(read_config(folder, vars(flags))))
        for key in differing(saved, flags, NEUTRAL):
            fail(f"{folder} holds a run with {dashed(key)} {vars(saved)[key]}, not {vars(flags)[key]}:"
                 " give another --out")
        if newest_checkpoint(folder):
            with contextlib.suppress(OSError, ValueError):
                ended = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
                if ended["steps"] == flags.steps or flags.stop_on_collapse and ended["collapsed_at"]:
                    return "finished"
            return "broken"
    strange = sorted(name for name in names if not OURS.fullmatch(name) or name.startswith("checkpoint-"))
    if strange:
        fail(f"{folder} holds {strange[0]} and no complete checkpoint: move it away, or give another --out")
    return "new"  # or never got to a checkpoint: started in place, the same flags write the same log again

def complete(folder):
    """Is this a whole checkpoint? write_folder leaves no other, a copy or a clean-up may."""
    weights = [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return bool(weights) and (folder / "trainer.pt").is_file() and (folder / "config.json").is_file()

def newest_checkpoint(out):
    """The folder of the newest complete checkpoint, or None: the one `last` names (a link, or a text file
    where there are no links), else the one of the highest number that the log has got to."""
    last = out / "last"
    with contextlib.suppress(OSError, ValueError):
        name = os.readlink(last) if last.is_symlink() else last.read_text(encoding="utf-8").strip()
        if re.fullmatch(r"checkpoint-\d+", name) and complete(out / name):
            return out / name
    with contextlib.suppress(OSError):
        logged = (out / "metrics.jsonl").read_bytes().count(b"\n") - 1
        names = [folder.name for folder in out.iterdir() if re.fullmatch(r"checkpoint-\d+", folder.name)]
        for step in sorted((int(name[11:]) for name in names), reverse=True):  # as text, 1000 < 900
            if step <= logged and complete(out / f"checkpoint-{step}"):
                return out / f"checkpoint-{step}"
    return None

def steps_left(flags, log):
    """The steps still to be trained. Of a run that has ended there are none, and that is said."""
    last, over = (log[-1]["step"], log[-1]["collapsed"] and flags.stop_on_collapse) if log else (0, False)
    if flags.steps < last:
        fail(f"--steps {flags.steps}: the run in {flags.out} has {last} already")
    if over or flags.steps == last:
        print(f"the run in {flags.out} is finished, {last} steps; with a larger --steps it goes on")
        return range(0)
    return range(last + 1, flags.steps + 1)

def swa_folders(out, saved):
    """The last two checkpoints that this run wrote, at the steps `saved`: none abandoned by going back."""
    folders = [out / f"checkpoint-{step}" for step in saved]
    return [folder for folder in folders if complete(folder)][-2:]

def write_folder(folder, fill):
    """Let `fill(temporary folder)` write, flush it to disk, then rename it to `folder` in one step."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        fill(temporary)
        for file in filter(pathlib.Path.is_file, temporary.rglob("*")):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if folder.exists():  # of a run that was taken back to an earlier step
            if {file.name for file in folder.iterdir()} <= {file.name for file in temporary.iterdir()}:
                shutil.rmtree(folder)
            else:  # something else lies in it
                folder.rename(new_folder(f"{folder}-before"))
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

def save_checkpoint(out, step, model, tokenizer, state):
    """checkpoint-N: a folder that from_pretrained loads, plus trainer.pt; then `last` is pointed at it."""
    def fill(tmp):
        # The start model's own sampling settings can be unfit to be saved again; no run uses them.
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: getattr(model.generation_config, name, None) for name in names}
        model.generation_config = transformers.GenerationConfig(**ids)
        model.save_pretrained(tmp, state_dict=m3.merged_state(model))  # plain weights, adapter and all
        tokenizer.save_pretrained(tmp)
        torch.save(state, tmp / "trainer.pt")

    folder, link = out / f"checkpoint-{step}", out / f".last.{os.getpid()}.tmp"
    # A full disk is an OSError, a RuntimeError or a SafetensorError, by who writes.
    with or_fail(f"cannot save {folder}; once that is mended, {how_to_go_on(out)}", code=1):
        write_folder(folder, fill)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(folder.name)
        except (OSError, NotImplementedError):  # exFAT, Windows, a cloud drive
            link.write_text(folder.name + "\n", encoding="utf-8")
        link.replace(out / "last")  # rename over the old one: there is always a `last`

def how_to_go_on(out):
    newest = newest_checkpoint(pathlib.Path(out))
    return f"--resume {out} goes on from {newest.name}" if newest else (
        "give the same command again: there is no checkpoint yet")

def sweep(out):
    """Remove what a killed process left half-written; the folder is locked, so nobody is writing now."""
    for rest in out.iterdir():
        if re.fullmatch(r"\.(checkpoint-\d+|last|\w+\.jsonl?)\.\d+\.tmp", rest.name):
            if rest.is_dir() and not rest.is_symlink():
                shutil.rmtree(rest)
            else:
                rest.unlink()

def write_config(out, flags):
    """config.json: what the run is. A resume writes it again, so that the next one needs no flags."""
    replace_text(out / "config.json", json.dumps(config_of(flags), indent=1))

def config_of(flags):
    return {key: value for key, value in vars(flags).items() if key not in NOT_A_RUN}

# A lone half of a surrogate pair has no UTF-8; backslashreplace writes it as JSON does, "\ud83d".
UTF8 = {"encoding": "utf-8", "errors": "backslashreplace"}

def replace_text(path, text):
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if RANK == 0:
        temporary.write_text(text, **UTF8)
        temporary.replace(path)

def read_log(path):
    """Lines of metrics.jsonl or samples.jsonl; a last one that a kill has cut in two is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines[:-1]]

def append_line(path, record):
    """One JSON object, one write: a kill cannot leave two halves of a line apart."""
    with open(path if RANK == 0 else os.devnull, "a", **UTF8) as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")

# --- Several processes: prompts are split by rank, gradients summed; what is logged or decided is of the whole batch ---

def gather(value):
    """[value of rank 0, of rank 1, ...], the same list on every rank; and the place where they wait for each other."""
    parts = [value] * WORLD
    if WORLD > 1:
        with or_fail("the processes cannot talk, or another has ended", code=1):
            torch.distributed.all_gather_object(parts, value)
    return parts

def add_up(tensors):
    """Replace each tensor by its sum over the ranks."""
    with or_fail("the processes cannot talk, or another has ended", code=1):
        for tensor in tensors if WORLD > 1 else ():
            torch.distributed.all_reduce(tensor)

def evaluate(model, tokenizer, rows, flags, eos_ids, prompt="prompt_ids"):
    """Greedy accuracy on `rows`: verified / all of them. Returns it with the completions."""
    parts, batch = [], flags.prompts_per_step * flags.group_size
    with m3.packed(model):
        for i in range(RANK * batch, len(rows), WORLD * batch):
            tokens, mask, _ = m3.sample(model, [r[prompt] for r in rows[i:i + batch]], 1, flags.max_new_tokens, 0.0,
                                        eos_ids=eos_ids, pad_id=tokenizer.pad_token_id)
            parts.append((i, m3.decode(tokenizer, tokens, mask)))
    texts = [text for _, part in sorted(sum(gather(parts), [])) for text in part]
    return sum(m3.verify(t, r["answer"], r["kind"]) for t, r in zip(texts, rows)) / len(rows), texts

# --- The run ---------------------------------------------------------------------------------------------------------

def load(flags, device):
    """(model as it starts, other teacher or None, tokenizer, eos_ids, few-shot rows, problems, held-out problems)."""
    torch.set_num_threads(flags.threads or torch.get_num_threads()), transformers.utils.logging.disable_progress_bar()
    toy, dtype, other = flags.model == "toy", getattr(torch, flags.dtype), None
    if flags.dataset == "toy":  # the held-out problems are the same for every seed
        parts = [[row | {"kind": "toy" if toy else "gsm8k"} for row in rows]
                 for rows in (toy_rows(4096, flags.seed), toy_rows(flags.eval_limit, 0, heldout=True))]
    else:  # progress is watched on validation rows; the test split is for --eval-split test, once, at the end
        fields = {name: vars(flags)[f"{name}_field"] for name in FIELDS}
        parts = [load_rows(flags.dataset, split, fields, 0) for split in ("train", flags.eval_split)]
    for turn in (False, True):  # rank 0 first: models that it makes or downloads, the others find
        if turn == (RANK > 0):
            base, tokenizer, eos_ids = load_model(toy_model() if toy else flags.model, dtype, device)
            if flags.teacher != "privileged":  # another model, which reads the student's own prompt
                path = toy_model(flags.teacher) if flags.teacher in TOY_TEACHERS else flags.teacher
                other, its_tokenizer, _ = load_model(path, dtype, device, "--teacher")
                with or_fail(f"--teacher {flags.teacher} does not fit"):
                    m3.check_teacher(tokenizer, its_tokenizer, (flags.model, flags.teacher),
                                     [x.get_output_embeddings().weight.shape[0] for x in (base, other)])
        gather(turn)
    context = min(getattr(m.config.get_text_config(), "max_position_embeddings", None) or 10**9 for m in (base, other or base))
    shots = parts[0][:flags.few_shot]
    problems, held_out = (encode_rows(rows, tokenizer, context, flags.max_new_tokens, shots,
                                      "none" if other else flags.hint) for rows in parts)
    top = max(tokenizer.pad_token_id, *(max(r["prompt_ids"] + r["teacher_ids"]) for r in problems + held_out))
    if top >= (known := base.get_input_embeddings().num_embeddings):
        fail(f"--model {flags.model}: its tokenizer gives id {top}, it has {known} embeddings: not of one model")
    return base, other, tokenizer, eos_ids, shots, problems, held_out[:flags.eval_limit]

def train(flags):
    """sample -> reward -> score -> conflict -> seed -> backward -> step -> log. Returns the summary."""
    with or_fail(f"--device {flags.device} cannot be used"):
        if WORLD > 1:
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in flags.device else "gloo")
            sys.stdout = sys.stdout if RANK == 0 else open(os.devnull, "w")
        here = f":{os.environ['LOCAL_RANK']}" if WORLD > 1 and flags.device == "cuda" else ""
        device = torch.empty(0, device=flags.device + here).device
    out = pathlib.Path(gather(flags.out)[0])
    unread, resumed = (f"--resume: cannot read a checkpoint of {out} with these flags; to take an earlier one:"
                       f" ln -sfn checkpoint-N {out}/last"), None
    if flags.resume:
        newest = newest_checkpoint(out)
        print(f"goes on from {newest}")
        with or_fail(unread):
            resumed = torch.load(newest / "trainer.pt", map_location="cpu", weights_only=True)

    # --- problems, student, teacher ----------------------------------------------------------------------------------
    base, other, tokenizer, eos_ids, shots, problems, held_out = load(flags, device)
    base.requires_grad_(False)
    if flags.lora_rank:  # adapters go into the base model itself: switched off they leave its teacher, without a second copy
        model = m3.add_lora(base, flags.lora_rank, flags.seed)
    else:
        model = copy.deepcopy(base).requires_grad_(True)
    teacher = other.requires_grad_(False) if other else base
    with or_fail(unread):
        if resumed and flags.lora_rank:
            model.load_state_dict(resumed["adapter"], strict=False)
        elif resumed:
            model.load_state_dict(type(base).from_pretrained(newest, dtype=base.dtype).state_dict())
    with or_fail(f"--model {flags.model} cannot be trained with these flags", ValueError):
        (backbone, head), (teacher_backbone, teacher_head) = m3.split_head(model), m3.split_head(teacher)
        if flags.kernel == "local":  # refuses an architecture it does not know now, not after the first rollouts
            nothing = torch.zeros(1, 2, model.get_output_embeddings().weight.shape[0], device=device)
            ntk.kdr(model, torch.zeros(1, 4, dtype=torch.long, device=device), torch.ones(1, 4, device=device), nothing, nothing)
    # Dropout would make scoring differ from sampling, so eval mode it is, for good. The one exception is gradient
    # checkpointing, which transformers only does in training mode: there dropout is set to 0 instead.
    model.eval(), teacher.eval()
    if flags.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():
            module.__dict__.update({k: 0.0 for k in ("p", "attention_dropout") if k in module.__dict__})
    params = [p for p in model.parameters() if p.requires_grad]
    # bf16 weights would swallow small steps: the optimizer works on float32 copies, its moments are float32 with them.
    masters = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=flags.lr, weight_decay=flags.weight_decay)

    # Everything but weights and moments is read back from the log, whose lines after the checkpoint are dropped.
    first, s_bar, log, samples, broken, interrupted, saved = 1, None, [], [], 0, [], []
    if resumed:
        with or_fail(unread):
            optimizer.load_state_dict(resumed["optimizer"])
            optimizer.param_groups[0] |= {"lr": flags.lr, "weight_decay": flags.weight_decay}  # flags given again win
            for master, value in zip([m for m, p in zip(masters, params) if m is not p], resumed["masters"]):
                master.data.copy_(value)
            teacher.load_state_dict(resumed.get("teacher", teacher.state_dict()))
            first, s_bar = resumed["step"] + 1, resumed["s_bar"]
            saved = resumed.get("saved", [resumed["step"]])
            log, samples = ([line for line in read_log(out / f"{name}.jsonl") if line["step"] < first]
                            for name in ("metrics", "samples"))
            assert [line["step"] for line in log] == list(range(first)), "metrics.jsonl lacks steps"
    left = steps_left(flags, log)
    if RANK == 0:
        sweep(out)
    write_config(out, flags)
    for name, lines in ("metrics", log), ("samples", samples):
        replace_text(out / f"{name}.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    size = sum(p.numel() for p in params)
    held = sum(p.numel() * p.element_size() for m in {model, teacher} for p in m.parameters()) + 24 * size
    print(f"{flags.method} | seed {flags.seed} | {device}, {torch.get_num_threads()} threads | torch {torch.__version__},"
          f" transformers {transformers.__version__} | {size:,} trainable parameters, about {held / 2**30:.2g} GB for weights,"
          f" moments and gradients, activations not counted | {WORLD} process{'es' * (WORLD > 1)} | {out}")
    on_stop(lambda number, frame: interrupted.append(number))

    if first == 1:
        before, _ = evaluate(model, tokenizer, held_out, flags, eos_ids)
        log.append(dict.fromkeys(METRICS) | {"step": 0, "accuracy": before, "seconds": 0.0})
        append_line(out / "metrics.jsonl", log[-1])
    group, share, pad_id = flags.group_size, flags.prompts_per_step // WORLD, tokenizer.pad_token_id
    mine, rows_here = slice(RANK * share, RANK * share + share), share * group  # of this process
    chunks = lambda n: range(0, n, flags.vocab_chunk)
    tempered = lambda z: z.float() / flags.temperature if flags.temperature != 1 else z.float()  # [.., V]: no pass for nothing
    due = lambda every, step: every > 0 and step % every == 0
    bar = tqdm(left, initial=first - 1, total=flags.steps, dynamic_ncols=True, disable=RANK > 0)
    for step in bar:
        tick = time.time()

        # --- 1. sample: G responses to each of P problems ------------------------------------------------------------
        batch = [problems[i] for i in m3.draw_problems(len(problems), flags.prompts_per_step, flags.seed, step)]
        generator = torch.Generator().manual_seed(flags.seed * 1_000_003 + step)
        uniforms = torch.rand(len(batch), group, flags.max_new_tokens, generator=generator)[mine].flatten(0, 1)
        asked, at_once = batch[mine], flags.sample_batch or share
        with m3.packed(model):
            rollouts = [m3.sample(model, [p["prompt_ids"] for p in asked[i:i + at_once]], group, flags.max_new_tokens,
                                  flags.temperature, eos_ids=eos_ids, pad_id=pad_id, top_p=flags.top_p, top_k=flags.top_k,
                                  uniforms=uniforms[i * group:(i + at_once) * group]) for i in range(0, share, at_once)]
        longest = max(part[0].shape[1] for part in rollouts)
        tokens, mask = (torch.cat([torch.nn.functional.pad(part[k], (0, longest - part[k].shape[1]), value=fill)
                                   for part in rollouts]) for k, fill in ((0, pad_id), (1, False)))  # [B, N]

        # --- 2. reward: the verifier pays 0 or 1; the group is its own baseline --------------------------------------
        texts = m3.decode(tokenizer, tokens, mask)
        owner = [asked[i // group] for i in range(rows_here)]
        rewards = torch.tensor([float(m3.verify(text, problem["answer"], problem["kind"]))
                                for text, problem in zip(texts, owner)], device=device)  # [B]
        advantages = m3.group_advantages(rewards, group, flags.std)  # [B]
        weights = m3.token_weights(mask, len(batch) * group,  # of the whole step, all processes
                                   sum(gather(mask.sum().item())) if flags.reduction == "token" else None)  # [B, N]

        # --- 3. score, find the conflicts, seed, go backward: once per micro-batch -----------------------------------
        # R and D are the two gradients of eqs 1 and 2, for the log or to be mixed; "update" is a method's own seed.
        wanted = ["R", "D"] if flags.method in MIX or due(flags.stats_every, step) else []
        wanted += [] if flags.method in MIX else ["update"]
        wanted += ["g0", "g1"] if due(flags.occupancy_every, step) else []  # D of even and of odd responses alone
        grads = {name: [torch.zeros_like(p, dtype=torch.float32) for p in params] for name in wanted}
        seen = {name: [] for name in ["row", "w", "A", "logp", "entropy", "D", "clipped", "alpha", "norm_R", "K", "cos"]}
        fold = torch.arange(rows_here, device=device) % group % 2  # [B]
        whole_over_fold = group / (group - group // 2), group / (group // 2)
        siblings, hinted = [0] * rows_here, [problem["teacher_ids"] for problem in owner]
        if flags.method == "sdpo":  # its teacher reads a successful other response
            siblings = m3.sdpo_siblings(rewards.tolist(), group)
            hinted = m3.encode(tokenizer, [m3.prompt_text(tokenizer, owner[b], shots, texts[i]) for b, i in enumerate(siblings)])
        look = flags.method in GATE or due(flags.kdr_every, step)
        alone = flags.method == "grpo" and not look and wanted == ["update"]  # nobody asks the teacher: it is not run

        def micro_batches(of_row):
            """Rows and their replies; of their real tokens the row, h [T, d] with a graph, y, A and w [T]."""
            lengths = mask.sum(1)  # micro-batches hold rows of like length; longest first: if memory runs out, then at once
            order = lengths.argsort(descending=True, stable=True) if flags.micro_batch else torch.arange(rows_here, device=device)
            for rows in order.split(flags.micro_batch or rows_here):
                real, replies = (x[rows, :lengths[rows].max()] for x in (mask, tokens))  # [B, n]
                model.train(flags.gradient_checkpointing)
                h = m3.hidden_states(backbone, [owner[b]["prompt_ids"] for b in rows.tolist()], replies, pad_id,
                                     share=not flags.gradient_checkpointing)[real]
                model.eval()
                row = rows[:, None].expand_as(real)[real]
                yield rows, real, replies, row, h, replies[real], of_row[row], weights[rows, :real.shape[1]][real]

        for rows, real, replies, row, h, y, A, w in micro_batches(advantages):
            with torch.inference_mode(), m3.lora_off(teacher):  # the same tokens; only what stands before them differs
                h_T = h if alone else m3.hidden_states(teacher_backbone, [hinted[b] for b in rows.tolist()], replies, pad_id)[real]
            leaf = h.detach().requires_grad_()  # cut here: the seeds of all chunks add up in leaf_grads, then enter h at once
            leaf_grads = {name: torch.zeros_like(leaf) for name in wanted}
            taught = torch.tensor(siblings, device=device)[row] >= 0
            part = {name: w * (fold[row] == int(name[1])) * whole_over_fold[int(name[1])] if name[0] == "g" else w for name in wanted}

            @functools.lru_cache(int(len(y) <= flags.vocab_chunk))  # a single chunk is kept, of several each is run again
            def signals(i):
                """Logits z of the chunk at token i, with a graph, and all that follows in closed form."""
                c = slice(i, i + flags.vocab_chunk)
                z = tempered(head(leaf[c]))  # [chunk, V]
                with torch.no_grad():
                    z_S, delta_R = z.detach(), m3.reward_residual(z.detach(), y[c], A[c])
                    if alone:  # stand-ins that nobody reads
                        return c, z, z_S, z_S, torch.zeros_like(w[c]), w[c] < 0, 0.0, delta_R, delta_R
                    z_T = tempered(teacher_head(h_T[c]))  # no head has an adapter
                    D = m3.divergence(z_S, z_T, flags.divergence, flags.lam) * flags.distill_scale * taught[c]
                    clipped = D >= (flags.tau or math.inf) * flags.distill_scale
                    scale = flags.distill_scale * (~clipped & taught[c])[:, None]
                    delta_F = scale * m3.distill_residual(z_S, z_T, "fkl")  # what m3_seed and ntk.kdr call delta_D [eq 9]
                return c, z, z_S, z_T, D, clipped, scale, delta_F, delta_R

            K = cos = None if look else torch.zeros_like(w)  # if nobody looks, nothing reads them
            if look and flags.kernel != "logit":  # a pass of its own: the gate needs K before the seed can be formed
                ids, attention, _ = m3.left_pad([owner[b]["prompt_ids"] for b in rows.tolist()], pad_id, device)
                ids, attention = torch.cat([ids, replies], 1), torch.cat([attention, real.long()], 1)  # [B, L]
                K, cos = ntk.kdr_flat(model, ids, attention, real, (signals(i)[-2:] for i in chunks(len(y))), flags.vocab_chunk,
                                      flags.kernel, generator)
            for i in chunks(len(y)):
                c, z, z_S, z_T, D, clipped, scale, delta_F, delta_R = signals(i)
                with torch.no_grad():
                    delta_D = 0.0  # eq 1's gradient: M3's own seed needs delta_F alone, GRPO neither
                    if not alone and (flags.method not in GATE or len(wanted) > 1):
                        delta_D = scale * m3.distill_residual(z_S, z_T, flags.divergence, flags.lam)
                    K_c = (delta_F * delta_R).sum(-1) if K is None else K[c]  # None: --kernel logit
                    cos_c = K_c / (delta_F.norm(dim=-1) * delta_R.norm(dim=-1)).clamp(min=1e-12) if K is None else cos[c]
                    alpha = torch.full_like(K_c, SHARE.get(flags.method, flags.alpha))
                    if flags.method in GATE:
                        alpha = GATE[flags.method](K_c, cos_c, flags)
                        if flags.zero_advantage == "skip":
                            alpha = alpha * (A[c] != 0)
                        seed = m3.m3_seed(delta_F, delta_R, alpha, flags.eps)
                        if flags.method == "m3-eg":  # "update" is m_D for now, step 4 turns it into h_R(theta~)
                            seed = alpha[:, None] * m3.normalize(delta_F, flags.eps)
                    elif flags.method == "rlsd":  # the teacher scales A by at most lam * 0.2; lam fades out over 60 steps
                        seed = m3.rlsd_residual(z_S, z_T, y[c], A[c], 0.5 * max(0.0, 1 - (step - 1) / 60))
                    elif flags.method == "sdpo":  # no reward loss; rows without a successful sibling give nothing
                        seed = m3.sdpo_residual(z_S, z_T) * taught[c, None]
                    else:  # Hybrid = (1 - alpha) L_R + alpha L_D; GRPO and OPD are its ends
                        seed = (1 - alpha[:, None]) * delta_R + alpha[:, None] * delta_D
                    log_ps = m3.log_softmax(z_S)
                    for name, value in dict(row=row[c], w=w[c], A=A[c], D=D, clipped=clipped, alpha=alpha, K=K_c, cos=cos_c,
                                            logp=log_ps.gather(-1, y[c, None])[:, 0], norm_R=delta_R.norm(dim=-1),
                                            entropy=torch.special.entr(log_ps.exp()).sum(-1)).items():
                        seen[name].append(value)
                for name in wanted:
                    value = dict(update=seed, R=delta_R).get(name, delta_D) * part[name][c, None]
                    m3.accumulate([leaf_grads[name], *grads[name]], z, [leaf, *params], value)
            for name in wanted:
                m3.accumulate(grads[name], h, params, leaf_grads[name])

        def once_more(into, of_row, seed_of):
            """Add the gradient of one more pass over the batch, with the weights as they are now."""
            for *_, h, y, A, w in micro_batches(of_row):
                leaf, leaf_grad = h.detach().requires_grad_(), torch.zeros_like(h)
                for c in (slice(i, i + flags.vocab_chunk) for i in chunks(len(y))):
                    z = tempered(head(leaf[c]))
                    seed = seed_of(m3.reward_residual(z.detach(), y[c], A[c]), w[c, None])
                    m3.accumulate([leaf_grad, *into], z, [leaf, *params], seed)
                m3.accumulate(into, h, params, leaf_grad)

        if "g0" in wanted:  # h of [VLS E.1]: what moving the visited prefixes does to the loss, (L - baseline) grad log pi
            D = torch.cat(seen["w"]) * torch.cat(seen["D"]).clamp(max=(flags.tau or math.inf) * flags.distill_scale)
            L = torch.zeros(rows_here, device=device).index_add(0, torch.cat(seen["row"]), D).view(-1, group)  # [P, G]
            for k, other in (0, L[:, 1::2]), (1, L[:, ::2]):
                grads[f"h{k}"] = [torch.zeros_like(p, dtype=torch.float32) for p in params]
                centred = (L - other.mean(1, keepdim=True)).flatten() * (fold == k)  # the baseline is the other fold's mean
                once_more(grads[f"h{k}"], -centred * whole_over_fold[k], lambda delta, w: delta)
        add_up([g for gs in grads.values() for g in gs])

        # --- 4. M3-EG: peek at where the teacher's step leads, take the reward's gradient there, come back -----------
        if flags.method == "m3-eg":
            home = [p.detach().clone() for p in params]
            with torch.no_grad():  # theta~ = theta - eta_in m_D  [eq 15]
                torch._foreach_sub_(params, [flags.eta_in * flags.lr * m_D for m_D in grads["update"]])
            grads["update"] = [torch.zeros_like(p, dtype=torch.float32) for p in params]
            once_more(grads["update"], advantages, lambda delta, w: w * m3.normalize(delta, flags.eps))
            add_up(grads["update"])
            with torch.no_grad():
                torch._foreach_copy_(params, home)  # bit for bit: nothing is differentiated through the peek

        # --- 5. step -------------------------------------------------------------------------------------------------
        ended = torch.isin(tokens, torch.tensor(sorted(eos_ids), device=device)).logical_and(mask).any(1)
        seen |= {"reward": [rewards], "advantage": [advantages], "length": [mask.sum(1)], "ended": [ended]}
        everyones = gather({name: torch.cat(values).cpu() for name, values in seen.items()})
        seen = {name: torch.cat([part[name] for part in everyones]) for name in seen}  # [all tokens] or [all responses]
        geometry = ntk.geometry(grads["R"], grads["D"]) if "R" in wanted else dict.fromkeys(["norm_D", "kappa", "phi"])
        if flags.method in MIX:
            w_R, w_D = MIX[flags.method](geometry)
            grads["update"] = [w_R * g_R + w_D * g_D for g_R, g_D in zip(grads["R"], grads["D"])]
            seen["alpha"].fill_(w_D / (w_R + w_D))
        loss_D = (seen["w"] * seen["D"].clamp(max=(flags.tau or math.inf) * flags.distill_scale)).sum().item()
        rewarded = seen["A"] != 0
        if rewarded.any() and math.isfinite(loss_D):  # s_bar: EMA of the reward residual's mean norm over tokens with A != 0
            now = seen["norm_R"][rewarded].mean().item()
            s_bar = now if s_bar is None else 0.9 * s_bar + 0.1 * now
        if flags.method in GATE:
            torch._foreach_mul_(grads["update"], s_bar or 1.0)
        for master, grad in zip(masters, grads["update"]):
            master.grad = grad
        grad_norm = torch.nn.utils.clip_grad_norm_(masters, flags.clip).item()
        broken = 0 if math.isfinite(grad_norm) else broken + 1
        if broken == 0:
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
                if flags.method == "sdpo":  # its teacher: an EMA of the student
                    torch._foreach_lerp_(list(teacher.parameters()), params, 0.05)
                elif flags.method == "rlsd" and due(20, step):  # its teacher: the student of the last multiple of 20 steps
                    torch._foreach_copy_(list(teacher.parameters()), params)
        else:
            torch.save(dict(step=step, tokens=tokens, mask=mask, rewards=rewards), out / f"non-finite-{step}-rank-{RANK}.pt")
            tqdm.write(f"step {step}: gradient norm is {grad_norm}; step not applied, batch saved in {out}")

        # --- 6. log --------------------------------------------------------------------------------------------------
        line = dict.fromkeys(METRICS) | {
            "step": step, "reward": seen["reward"].mean().item(),
            "loss_R": -(seen["w"] * seen["A"] * seen["logp"]).sum().item(), "loss_D": None if alone else loss_D,
            "grad_norm": grad_norm, "kappa": geometry["kappa"], "phi": geometry["phi"], "alpha_eff": seen["alpha"].mean().item(),
            **(ntk.conflict_share(seen["K"], seen["cos"], torch.ones_like(rewarded)) if look else {}),
            "zero_advantage": (seen["advantage"] == 0).float().mean().item(), "entropy": seen["entropy"].mean().item(),
            "clipped": None if alone else seen["clipped"].float().mean().item(), "length": seen["length"].float().mean().item(),
            "truncated": (~seen["ended"]).float().mean().item(), "lr": flags.lr,
            "mu": ntk.learning_signal(geometry["norm_D"], loss_D) if geometry["norm_D"] and loss_D > 0 else None}
        if "g0" in wanted:
            line |= {f"occupancy_{k}": v for k, v in ntk.occupancy(*(grads[k] for k in ("g0", "g1", "h0", "h1"))).items()}
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        line["collapsed"] = step >= 10 and all(x["reward"] < 0.05 for x in [*log[-9:], line])
        done = step == flags.steps or (flags.stop_on_collapse and line["collapsed"])
        if due(flags.eval_every, step) or done:
            line["accuracy"], greedy = evaluate(model, tokenizer, held_out, flags, eos_ids)
            for problem, text in list(zip(held_out, greedy))[:2]:
                tqdm.write(f"[{step}] {problem['question']} -> {text!r} (right: {problem['answer']})")
            texts = sum(gather(texts), [])
            for i, problem in enumerate(batch):
                append_line(out / "samples.jsonl", {"step": step, "prompt": problem["question"], "answer": problem["answer"],
                                                    "completions": texts[i * group:(i + 1) * group],
                                                    "rewards": seen["reward"][i * group:(i + 1) * group].tolist()})
        line["seconds"] = log[-1]["seconds"] + time.time() - tick
        line["tokens_per_second"] = seen["length"].sum().item() / (time.time() - tick)
        log.append(line)
        append_line(out / "metrics.jsonl", line)
        if broken == 3:
            fail("three non-finite steps in a row: lower --lr, or start from the last checkpoint", code=1)
        if step == first and line["truncated"] == line["zero_advantage"] == 1:
            tqdm.write("every reply is cut at --max-new-tokens and none is paid more than another: raise it")
        shown = {"reward": line["reward"], "kappa": line["kappa"], "conflict": line["conflict"],
                 "accuracy": next(x["accuracy"] for x in reversed(log) if x["accuracy"] is not None)}
        bar.set_postfix({k: f"{v:.3g}" for k, v in shown.items() if v is not None})

        # --- 7. save -------------------------------------------------------------------------------------------------
        stop = max(gather(interrupted[0] if interrupted else 0))  # a signal to one is a signal to all
        if due(flags.save_every, step) or done or stop:
            saved.append(step)
            state = {"optimizer": optimizer.state_dict(), "step": step, "s_bar": s_bar, "saved": saved,
                     "adapter": m3.lora_state(model),
                     "masters": [m.data for m, p in zip(masters, params) if m is not p]}
            if flags.method in ("rlsd", "sdpo"):  # everyone else's teacher is the initial policy
                state["teacher"] = teacher.state_dict()
            gather(RANK or save_checkpoint(out, step, model, tokenizer, state))  # nobody leaves before it is written
        if stop:
            bar.close()
            fail(f"stopped by signal {stop} after step {step}; saved. Go on with --resume {out}", 128 + stop)
        if done:
            break
    extra = {}
    if flags.method == "opd":  # what [VLS] asks of a distillation that stalls
        ended = type(base).from_pretrained(newest_checkpoint(out), dtype=base.dtype).to(device).eval()
        with m3.lora_off(base):  # base: as it was before the first step
            extra["accuracy_teacher"], _ = evaluate(teacher, tokenizer, held_out, flags, eos_ids, "teacher_ids")
            extra |= ntk.stall(base, ended, [row["prompt_ids"] for row in held_out],
                               [line["loss_D"] for line in log[1:] if line["loss_D"] is not None])
    if flags.swa:  # of merged weights: with LoRA, the mean of A times the mean of B would be another model
        folders = swa_folders(out, saved)
        both = [type(base).from_pretrained(folder, dtype=base.dtype).to(device).eval() for folder in folders]
        for same in zip(*(m.parameters() for m in both)):
            same[0].data = torch.stack(same).detach().mean(0)
        extra["accuracy_swa"], _ = evaluate(both[0], tokenizer, held_out, flags, eos_ids)
    return summarize(out, flags, log, len(held_out), extra)

def mean(values):
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None

def summarize(out, flags, log, held_out, extra):
    """summary.json and the table a user sees at the end."""
    steps, accuracy = log[1:], [line["accuracy"] for line in log if line["accuracy"] is not None]
    at = next((line["step"] for line in steps if line["collapsed"]), None)
    if extra.get("accuracy_teacher", accuracy[0]) != accuracy[0]:
        extra["gap_recovery"] = (accuracy[-1] - accuracy[0]) / (extra["accuracy_teacher"] - accuracy[0])
    summary = {"method": flags.method, "seed": flags.seed, "steps": log[-1]["step"], "accuracy_start": accuracy[0],
               "accuracy_end": accuracy[-1], "reward_first20": mean(line["reward"] for line in steps[:20]),
               "reward_last20": mean(line["reward"] for line in steps[-20:]),
               "kappa_mean": mean(line["kappa"] for line in steps), "conflict_mean": mean(line["conflict"] for line in steps),
               "collapsed_at": at, "seconds": log[-1]["seconds"], **extra}
    replace_text(out / "summary.json", json.dumps(summary, indent=1))
    print(f"""
                      before    after
greedy accuracy       {summary['accuracy_start']:6.3f}   {summary['accuracy_end']:6.3f}   ({held_out} held-out problems)
sampled reward        {summary['reward_first20']:6.3f}   {summary['reward_last20']:6.3f}   (mean of the first and last 20 steps)
collapsed             {'no' if at is None else f'at step {at}'}, {summary['steps']} steps in {summary['seconds']:.0f} seconds
files                 {out}: metrics.jsonl, samples.jsonl, summary.json, last/ (from_pretrained loads it)""")
    return summary

def smooth(log, key, window, middle):
    """{step: mean (or median, if `middle`) of the last `window` known values}."""
    recent, curve = [], {}
    for line in log:
        if line.get(key) is not None:
            recent = [*recent, line[key]][-window:]
            curve[line["step"]] = sorted(recent)[len(recent) // 2] if middle else mean(recent)
    return curve

PANELS = [("reward", "sampled reward, mean of 10 steps", 10), ("accuracy", "greedy accuracy", 1),
          ("kappa", "kappa = |g_R| / |g_D|, mean of 10", 10), ("conflict", "conflict share, mean of 10", 10)]
TEACHER_PANELS = [("loss_D", "distillation loss, median of 9 steps", 9), ("accuracy", "greedy accuracy", 1),
                  ("mu", "mu = |g|^2 / 2L, median of 9 steps", 9)]  # those of [VLS]

def plot(folders, file):
    """Panels from logs alone: a line per method or, if they differ, teacher, mean and range over seeds."""
    with or_fail("--plot and --compare draw with matplotlib: pip install matplotlib"):
        from matplotlib.figure import Figure
    logs = {}
    for folder in map(pathlib.Path, folders):
        with or_fail(f"--plot: cannot read the config.json and metrics.jsonl of {folder}"):
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            runs = logs.setdefault((config["teacher"], config["method"]), [])
            runs.append(read_log(folder / "metrics.jsonl"))
    teachers = len({teacher for teacher, _ in logs}) > 1
    figure = Figure(figsize=(17, 3.8), layout="tight")
    axes = figure.subplots(1, 4)
    for number, ((teacher, method), runs) in enumerate(logs.items()):
        look = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--", "linewidth": 1.4}
        for axis, (key, title, window) in zip(axes, TEACHER_PANELS if teachers else PANELS, strict=False):
            curves = [smooth(log, key, window, teachers) for log in runs]
            steps = sorted(set().union(*curves)) or [0]
            values = [[curve[step] for curve in curves if step in curve] or [math.nan] for step in steps]
            axis.plot(steps, [mean(some) for some in values], label=teacher if teachers else method, **look)
            axis.fill_between(steps, [min(some) for some in values], [max(some) for some in values],
                              color=look["color"], alpha=0.12, linewidth=0)
            scale = {"yscale": "log"} if key in ("kappa", "loss_D", "mu") else {"ylim": (0, 1)}
            axis.set(title=title, xlabel="step", **scale)
        for log in runs if teachers else ():  # one curve per seed
            loss, mu = (smooth(log, key, 9, True) for key in ("loss_D", "mu"))
            axes[3].plot([loss[step] / (loss[min(loss)] or 1) for step in mu], list(mu.values()), **look)
            axes[3].set(title="mu against the loss that remains", xlabel="L / L_1", yscale="log")
    axes[1].legend(fontsize=8, loc="best", ncol=1 + len(logs) // 5)
    for axis in axes:
        axis.grid(alpha=0.25)
    if not teachers:
        rule = axes[2].axhline(5000, color="gray", linestyle=":", label="5000: the rule says M3-Select")
        axes[2].legend(handles=[rule], fontsize=7, loc="upper left")
    figure.savefig(file, dpi=110)
    print(f"wrote {file}")

def one_of(flags, name, seed, out):
    """The flags of one run of a comparison, checked as if they had been typed."""
    what = {"method": name} if name in METHODS else {"method": "opd", "teacher": name}
    run = config_of(flags) | what | {"seed": seed, "threads": 1, "out": str(out / f"{name}-{seed}")}
    return parse_flags(as_argv(run))

def start_run(run):
    """A process for one run of a comparison, in a session of its own: Ctrl-C reaches it by way of us."""
    argv = as_argv(config_of(run))
    if standing(pathlib.Path(run.out), run) == "broken":
        argv += ["--resume", run.out]
    with open(f"{run.out}.log", "a", encoding="utf-8") as log:
        own = {"start_new_session": True, "env": os.environ | {"M3_PARENT": str(os.getpid())}}
        return subprocess.Popen([sys.executable, __file__, *argv], stdout=log, stderr=log, **own)

def run_all(todo):
    """One process per core until all are done. A signal ends them, saved, and then this process."""
    waiting, running, failed, signals, begun = list(todo), {}, [], [], time.time()

    def pass_on(number, frame):
        signals.append(number)
        for child in running:
            child.terminate()
    on_stop(pass_on)
    while running or (waiting and not signals):
        while waiting and not signals and len(running) < os.cpu_count():
            run = waiting.pop(0)
            child = start_run(run)
            running[child] = run
            if signals:  # it came while the child was started
                child.terminate()
        time.sleep(0.1)
        for child in [child for child in running if child.poll() is not None]:
            run, code = running.pop(child), child.returncode
            done = len(todo) - len(waiting) - len(running)
            left = (time.time() - begun) / done * (len(todo) - done) / 60
            what = f"ended with {code}" if code else "is done"
            print(f"{run.out} {what}: {done} of {len(todo)} runs, {left:.0f} minutes left", flush=True)
            if code:
                said = pathlib.Path(f"{run.out}.log").read_text(encoding="utf-8", errors="replace").strip()
                failed.append((f"{run.out}.log: {said.splitlines()[-1] if said else code}", max(code, 1)))
            if code == 2:  # a user's mistake, and the others would make it as well
                waiting.clear()
    if signals:
        fail(f"stopped by signal {signals[0]}, all is saved: the same command goes on", 128 + signals[0])
    if failed:
        fail(*failed[0])

def compare(flags):
    """METHODS or TEACHERS x seeds, one table. Finished runs of these flags are kept, broken ones resumed."""
    out, names = pathlib.Path(flags.out or f"runs/{flags.preset or 'compare'}"), list(flags.compare)
    with or_fail(f"--out {out}: cannot write there, give another folder"):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        runs, finished, known = {}, set(), METHODS if names[0] in METHODS else ["privileged", *TOY_TEACHERS]
        for name in known:
            if name not in names and not (out / f"{name}-0" / "config.json").exists():
                continue
            some = {(name, seed): one_of(flags, name, seed, out) for seed in range(flags.seeds)}
            ended = {key for key, run in some.items() if standing(pathlib.Path(run.out), run) == "finished"}
            if name in names or len(ended) == flags.seeds:  # an earlier comparison's rows stay in the table
                runs |= some
                finished |= ended
        if flags.model == "toy":  # made before the children start, so that it is made once
            for kind in sorted({"base", flags.teacher, *names} & {"base", *TOY_TEACHERS}):
                toy_model(kind)
        by_seed = sorted(runs, key=lambda key: key[1])
        todo = [runs[key] for key in by_seed if key not in finished]
        print(f"{len(runs)} runs in {out}, {len(todo)} to train, {os.cpu_count()} at a time", flush=True)
        run_all(todo)
        text = tabulate(runs)
        replace_text(out / "table.md", text)
        spread = f"mean ± standard deviation over {flags.seeds} seeds, " if flags.seeds > 1 else ""
        print(f"{text}{spread}saved in {out}/table.md")
        plot([run.out for run in runs.values()], out / "curves.png")

def tabulate(runs):
    """Markdown, a row per method or teacher, mean ± deviation over seeds. runs: {(name, seed): flags}."""
    names = list(dict.fromkeys(name for name, _ in runs))
    methods = names[0] in METHODS
    columns = ["accuracy_start", "accuracy_end", *(
        "reward_first20 reward_last20 kappa_mean conflict_mean" if methods else
        "accuracy_teacher gap_recovery loss_reduction_max loss_reduction_final gamma d_par cka_min").split()]
    head = ["method" if methods else "teacher", *columns, "collapsed", "at step"]
    table = [head, ["---"] * len(head)]
    for name in names:
        row, ended = [name], []
        for key, run in runs.items():
            if key[0] == name:
                ended.append(json.loads((pathlib.Path(run.out) / "summary.json").read_text(encoding="utf-8")))
        for column in columns:
            known = [run[column] for run in ended if run.get(column) is not None]
            spread = f" ± {torch.tensor(known).std().item():.2g}" if len(known) > 1 else ""
            row.append(f"{mean(known):.3g}{spread}" if known else "-")
        at = [str(run["collapsed_at"]) for run in ended if run["collapsed_at"] is not None]
        table.append([*row, f"{len(at)} of {len(ended)}", ", ".join(at) or "-"])
    return "".join("| " + " | ".join(row) + " |\n" for row in table)

class Printer:
    """A stream on which printing ends no run: "?" for what it cannot encode, nothing to a closed terminal."""
    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name):
        return getattr(self.stream, name)

def on_stop(handler):
    """handler(number, frame) for Ctrl-C, kill and a closed terminal; but what nohup ignores stays ignored."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and (name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN):
            signal.signal(number, handler)

def end_with_parent():
    """If the comparison that started this run is killed outright, the run saves and ends too."""
    parent = int(os.environ.pop("M3_PARENT", 0))

    def watch():
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
    if parent:
        threading.Thread(target=watch, daemon=True).start()

def one_run(flags):
    if flags.top_k or flags.top_p < 1:
        print("--top-k and --top-p filter what is sampled. What is scored, trained and logged (log pi of eq"
              " 2, entropy) is the unfiltered policy; replies are not drawn from it: eq 2 is biased.")
    with claim(flags):
        summary = train(flags)
    if flags.probe:
        print(ntk.probe_verdict(summary["kappa_mean"], summary["conflict_mean"])[1])
    if WORLD > 1:
        torch.distributed.destroy_process_group()

def main(argv=None):
    end_with_parent()
    with contextlib.redirect_stdout(Printer(sys.stdout)), contextlib.redirect_stderr(Printer(sys.stderr)):
        flags = parse_flags(argv)
        try:
            if flags.plot:
                plot(flags.plot, pathlib.Path(flags.plot[0]) / "curves.png")
            elif flags.compare:
                compare(flags)
            else:
                one_run(flags)
        except torch.OutOfMemoryError:
            fail("out of memory: lower --micro-batch, --sample-batch, --vocab-chunk or --max-new-tokens,"
                 " or add --gradient-checkpointing", code=1)
        except OSError as error:
            fail(f"the disk failed ({error}); once that is mended, {how_to_go_on(flags.out)}", code=1)
        except KeyboardInterrupt:  # from the first step on, Ctrl-C is train()'s: it saves
            fail("stopped before the first step: nothing to save", code=130)

if __name__ == "__main__":
    main()
