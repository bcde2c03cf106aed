"""Train a small language model by hybrid reward + on-policy self-distillation. One job, one command:

    python train.py                 # toy world: no download, CPU or GPU, a few minutes
    python train.py --help          # every knob, by stage

Top to bottom, this file is the run: flags, data, models, and one loop

    sample -> reward -> score -> conflict -> seed -> backward -> step -> log

whose mathematics is in m3.py and whose statistics are in ntk.py. Departures from the textbook, and why:
  1. Every random draw is a function of (seed, step). A resumed run needs no saved generator, and evaluating,
     logging or splitting the batch cannot shift what is sampled next.
  2. AdamW, although the papers write plain steps. It is free of the gradient's scale, so s_bar matters only
     through the clip and the moments' memory.
"""

import argparse, ast, base64, contextlib, copy, csv, datetime, decimal, functools, hashlib, html, inspect, io
import itertools, json, math, os, pathlib, random, re, shutil, signal, subprocess, sys, tempfile, textwrap
import threading, time, unicodedata, zlib
from typing import Callable, NamedTuple, Sequence

import torch, transformers
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import m3, ntk

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
TOY_TEACHERS = ["self-rl", "larger"]

# --- Flags ----------------------------------------------------------------------------------------

# Named sets of flags, read before the command line's own: those win. First, the tables of the README.
TWELVE = "--compare grpo opd hybrid gradnorm pcgrad minnorm rlsd sdpo m3-norm m3-select m3-soft m3-eg "
EIGHT = "--compare grpo opd hybrid m3-norm m3-random m3-select m3-soft m3-eg --seeds 5 --alpha-max 0.5 "
RARE = "--kernel logit --stats-every 20 --kdr-every 5 "
MISLED = EIGHT + RARE + "--beta 10 --eval-every 1000 --save-every 1000 "
CALM = "--steps 60 --lr 1e-4 --stats-every 5 --kdr-every 5 --eval-every 10 "
# Real models: [M3]'s settings, alpha 128 = 2r [Table 10]; what only the log needs, rarely.
PAPER = ("--dataset gsm8k --method m3-soft --lora-rank 64 --lr 5e-5 --steps 500 --alpha-max 0.05 "
         "--stats-every 10 --kdr-every 10 --eval-every 50 --max-new-tokens 512 --vocab-chunk 1024 ")
PRESETS = {
    "table-calm": TWELVE + CALM,
    # Ten times the learning rate: the policy can forget how an answer is to be written.
    "table-stress": TWELVE + RARE + "--steps 240 --lr 1e-3 --eval-every 80",
    # The teacher's loss a thousandth of itself: kappa in the thousands; normalised residuals do not notice.
    "table-high-kappa": CALM + "--distill-scale 1e-3 --eps 1e-4 --compare grpo hybrid gradnorm m3-select "
                              "m3-soft",
    # The teacher's hint is wrong on a share of the problems.
    "table-misled": MISLED + "--hint-error 0.8 --lr 3e-4 --steps 100",
    "table-misled-fast": MISLED + "--hint-error 0.5 --lr 1e-3 --steps 160",
    "map-misled": MISLED + "--seeds 3",  # of one cell: give --hint-error, --lr and --steps
    # Three kinds of teacher [VLS E.2], there with 64 x 1 responses; the occupancy needs two of each prompt.
    "table-teachers": "--compare-teachers --divergence rkl-topk --steps 150 --eval-every 10 --kdr-every 0 "
                      "--weight-decay 0.01 --prompts-per-step 32 --group-size 2 --reduction token "
                      "--occupancy-every 10",
    # Many problems and few tokens a step; mostly the teacher, as rewards are rare.
    "cpu-smollm2-svamp": "--model HuggingFaceTB/SmolLM2-135M-Instruct --dataset svamp --few-shot 1 --lr 1e-4 "
                         "--method hybrid --alpha 0.9 --temperature 0.7 --steps 24 --prompts-per-step 16 "
                         "--group-size 2 --max-new-tokens 24 --vocab-chunk 512 --stats-every 0 "
                         "--kdr-every 0 --eval-every 8 --dtype bfloat16",  # two cores, 10 GB measured
    "qwen3-0.6b-gsm8k": PAPER + "--model Qwen/Qwen3-0.6B --micro-batch 16",  # ~14 GB, by arithmetic
    "qwen3-1.7b-gsm8k": PAPER + "--model Qwen/Qwen3-1.7B --micro-batch 8"}  # the paper's main model; ~22 GB

# What may change on the way decides how far, how fast and where a run goes on, and how often it is looked at;
# anything else would make a log that no one set of flags describes.
NEUTRAL = ["out", "threads", "device", "micro_batch", "vocab_chunk", "gradient_checkpointing",
           "save_every", "date"]  # nor do these change a result, but for m3-random's draws, a template's day
MAY_CHANGE = [*NEUTRAL, "steps", "lr", "weight_decay", "clip", "eval_every", "stats_every", "kdr_every",
              "occupancy_every", "stop_on_collapse", "swa"]
NOT_A_RUN = ["plot", "compare", "seeds", "preset", "resume", "probe"]  # of the program, not of one run
FIELDS = ["prompt", "answer", "solution"]

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(message.replace("argument ", "") + " (see --help)")

def number(kind, least=-math.inf, most=math.inf, why=""):
    """How argparse reads a finite number of this range."""
    def read(text):
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            if math.isfinite(value) and least <= value <= most:
                return value
        what = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text} is not a {what} from {least} to {most}{why}")
    return read

def day(text):
    """How argparse reads a date."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a day, such as 2026-12-31") from None

def parse_flags(argv=None):
    """Every knob, by stage. A resumed run starts from the flags it was saved with."""
    docs = {name: str((method.seed or method.mix).__doc__) for name, method in m3.METHODS.items()}
    listed = "\n".join(f"  {name:<12}{text.splitlines()[0]}" for name, text in docs.items())
    parser = Parser(usage="python train.py [FLAG ...]", allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    description="Train a small language model by hybrid reward and on-policy distillation.",
                    epilog=f"methods:\n{listed}")
    some, count, many = number(int, 1, 10**9), number(int, 0, 10**9), number(int, 1, 10**5)
    unit, positive = number(float, 0, 1), number(float, 1e-12, 1e12)
    lam = number(float, .01, .99, ": beyond, the jsd, at most the entropy of (lam, 1 - lam), is under 0.056")

    def flag(name, default, text, kind=str):
        more = {"type": kind, "metavar": "X"}
        if isinstance(kind, list):
            more = {"choices": kind, "metavar": "X" if len(kind) > 4 else None}
        if isinstance(default, bool):
            more = {"action": argparse.BooleanOptionalAction}
        known = "" if default in ("", None) else f" [{default}]"
        group.add_argument(name, default=default, help=text + known, **more)

    group = parser.add_argument_group("what to train")
    flag("--method", "m3-soft", "how the two signals are combined, see below", list(docs))
    flag("--model", "toy", "toy, or a causal language model: a folder or a hub id")
    flag("--dataset", "toy", f"toy, {', '.join(HUB)}, a json, jsonl, csv, parquet file or folder")
    flag("--teacher", "privileged", "the initial model, shown the gold solution; or a folder or hub id; in"
         " the toy world also self-rl (the base model after GRPO), larger (4 x, another style)")
    flag("--lora-rank", 0, "rank of adapters on linear layers, alpha is twice it; 0: none",
         number(int, 0, 10**4))
    flag("--few-shot", 0, "worked examples in front of every problem, for base models", count)
    for name in FIELDS:
        flag(f"--{name}-field", "", f"column of a local file that holds the {name}")
    flag("--eval-split", "validation", "which rows are evaluated", ["validation", "test"])
    flag("--preset", "", f"a named set of flags: {', '.join(PRESETS)}", ["", *PRESETS])
    flag("--steps", 100, "optimizer steps", some)
    group = parser.add_argument_group("rollouts (never with a checkpoint's own sampling settings)")
    flag("--prompts-per-step", 8, "P: distinct prompts a step", many)
    flag("--group-size", 8, "G: responses per prompt; one alone has no spread", number(int, 2, 10**5))
    flag("--max-new-tokens", 24, "longest response", many)
    flag("--temperature", 1.0, "of sampling and of scoring alike", positive)
    group = parser.add_argument_group("signals")
    flag("--std", "unbiased", "divides the advantages", list(m3.STD))
    flag("--divergence", "jsd", "of eq 1; M3 takes fkl", list(m3.DIVERGENCES))
    flag("--lam", 0.5, "lambda of the jsd", lam)
    flag("--tau", None, "clip of a token's divergence in nats: beyond it the teacher is silent; not sdpo's",
         positive)
    flag("--distill-scale", 1.0, "factor on the teacher's loss and residuals: the lever on kappa; not sdpo's",
         positive)
    flag("--hint", "solution", "what the privileged teacher sees", ["solution", "answer"])
    flag("--hint-error", 0.0, "toy world: share of problems whose teacher reads a wrong solution", unit)
    flag("--reduction", "response", "mean of response means, or of tokens", ["response", "token"])
    group = parser.add_argument_group("method")
    flag("--alpha", 0.5, "hybrid: weight of distillation", unit)
    flag("--alpha-max", 0.15, "M3: the teacher's largest share of a token", unit)
    flag("--beta", 1.0, "M3-Soft, and M3-EG with the soft gate: sharpness of the gate",
         number(float, -1e6, 1e6))
    flag("--eps", 0.1, "M3: eps of the normalised residual, in units of its norm", positive)
    flag("--eta-in", 10.0, "M3-EG: inner (plain) step as a multiple of --lr", number(float))
    flag("--eg-gate", "select", "M3-EG: whose gate", ["select", "soft"])
    flag("--zero-advantage", "teacher", "M3 tokens without a reward signal", ["teacher", "skip"])
    flag("--kernel", "local", "how K_DR(n) is computed", ["logit", "local", "hutchinson", "exact"])
    group = parser.add_argument_group("optimizer")
    flag("--lr", 1e-4, "AdamW's learning rate", unit)
    flag("--weight-decay", 0.0, "AdamW's", unit)
    flag("--clip", 1.0, "largest gradient norm", positive)
    flag("--micro-batch", 0, "rows per training pass, sorted by length; 0 is all", count)
    flag("--gradient-checkpointing", False, "recompute activations: less memory, more time")
    flag("--vocab-chunk", 4096, "response tokens whose logits exist at one time", some)
    group = parser.add_argument_group("run")
    flag("--seed", 0, "governs every random draw", number(int, 0, 2**32 - 1))
    flag("--device", "auto", "cpu, cuda, cuda:1, mps; auto takes a GPU where there is one")
    flag("--dtype", "auto", "auto: bfloat16 on cuda, if not toy", ["auto", "float32", "bfloat16"])
    flag("--date", datetime.date.today().isoformat(), "the day that a chat template may write into prompts",
         day)
    flag("--threads", 0, "CPU threads; 0 leaves torch's choice", number(int, 0, 1024))
    flag("--eval-every", 20, "steps between greedy evaluations", some)
    flag("--eval-limit", 200, "held-out problems per evaluation", many)
    flag("--stats-every", 1, "steps between kappa and phi (2 backward passes); 0 is never", count)
    flag("--kdr-every", 1, "steps between conflict shares in the log; 0 is never", count)
    flag("--occupancy-every", 0, "steps between occupancies (4 backward passes); 0 is never", count)
    flag("--save-every", 50, "steps between checkpoints; the last step is always saved", some)
    flag("--stop-on-collapse", False, "end when the reward stays below 0.05 for ten steps")
    flag("--swa", False, "at the end, also evaluate the mean of the last two checkpoints")
    flag("--out", "", "folder of this run; by default runs/<time>-<method>")
    flag("--resume", "", "go on with the run in this folder from its last checkpoint")
    group = parser.add_argument_group("instead of one run")
    group.add_argument("--probe", action="store_true", help="ten steps of hybrid, then the paper's advice")
    group.add_argument("--compare", nargs="+", choices=list(docs), metavar="METHOD",
                       help="train each METHOD on the same seeds, one process a core; a table in --out")
    group.add_argument("--compare-teachers", dest="compare", action="store_const",
                       const=["privileged", *TOY_TEACHERS], help="the same: opd under each toy teacher")
    flag("--seeds", 3, "seeds 0, 1, ... of a comparison", some)
    group.add_argument("--plot", nargs="*", metavar="FOLDER", help="draw curves.png of these, or of the last")

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
    own = flags.model in TASKS
    if WORLD > 1 and flags.compare:
        fail("--compare starts its own processes: leave out torchrun")
    if flags.probe and flags.compare:
        fail("--probe is one run: leave out --compare")
    if flags.prompts_per_step % WORLD:
        fail(f"--prompts-per-step must be a multiple of the {WORLD} processes")
    if own and flags.model != flags.dataset:
        fail("--dataset: the toy model only knows the toy world; give a --model")
    if own and flags.few_shot:
        fail(f"--few-shot {flags.few_shot}: a toy model's prompt has no examples; leave it out")
    if not own and {flags.teacher, *(flags.compare or ())} & {*TOY_TEACHERS}:
        fail(f"--compare-teachers, --teacher {' and '.join(TOY_TEACHERS)} are the toy world's; give a folder")
    if m3.METHODS[flags.method].move_teacher and (flags.lora_rank or flags.teacher != "privileged"):
        fail(f"--method {flags.method} moves its teacher: it needs --lora-rank 0 and --teacher privileged")
    if flags.hint_error and (flags.dataset not in TASKS or flags.teacher != "privileged"):
        fail("--hint-error misleads the toy world's privileged teacher: leave out --dataset and --teacher")
    if flags.probe:
        flags.method, flags.steps, flags.stats_every, flags.kdr_every = "hybrid", 10, 1, 1
    if flags.device == "auto":
        flags.device = "cuda" if torch.cuda.is_available() else "cpu"
    if flags.dtype == "auto":
        flags.dtype = "bfloat16" if "cuda" in flags.device and not own else "float32"
    if flags.method == "m3-eg" and flags.dtype == "bfloat16" and not flags.lora_rank:
        fail("--method m3-eg: its inner step is lost in bfloat16; take --dtype float32 or --lora-rank")
    if flags.method == "sdpo" and flags.dtype == "bfloat16":
        fail("--method sdpo: its teacher's small steps are lost in bfloat16; take --dtype float32")
    return flags

def check_resume(given, saved, flags):
    """`flags` of a run that goes on in its folder. given: the command line alone; saved: what the run was."""
    if flags.compare:
        fail("--resume is for one run; a --compare goes on when the same command is given again")
    if given.out and pathlib.Path(given.out).resolve() != pathlib.Path(given.resume).resolve():
        fail(f"--out {given.out}: a run goes on in its own folder, leave it out with --resume")
    if not newest_checkpoint(pathlib.Path(given.resume)):
        fail(f"--resume {given.resume}: no checkpoint yet: give its first command again, or delete it")
    must_equal(saved, flags, MAY_CHANGE, given.resume)
    flags.out = given.resume
    return flags

def must_equal(saved, flags, free, folder):
    """Ends the program where flags are not those of the run in `folder`, unless they are `free` to differ."""
    for key, value in config_of(flags).items():
        if key not in free and value != vars(saved)[key]:
            fail(f"{dashed(key)} {value}: the run in {folder} has {vars(saved)[key]!r}; leave it out, or give"
                 " another --out")

def dashed(key):
    return "--" + key.replace("_", "-")

def as_argv(config):
    """A config.json as a command line, so that it is read by the same rules."""
    flags = {dashed(key): value for key, value in config.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={value}" for name, value in flags.items()]

def config_of(flags):
    return {key: value for key, value in vars(flags).items() if key not in NOT_A_RUN}

def read_config(folder, known):
    """config.json of a run, with the flags that are `known` here."""
    path = pathlib.Path(folder).resolve()
    with or_fail(f"--resume: cannot read {folder}/config.json"):
        config = read_json(path / "config.json")
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

# --- The toy world: word problems for a model of 0.9M parameters, and one bad habit to cure -------

TOY_NAMES = ["Ann", "Bob", "Cem", "Dua", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jun"]
TOY_THINGS = ["pens", "cups", "figs", "nuts", "keys", "eggs", "hats", "coins"]
TOY_WORDS = ["<pad>", "<eos>", "<unk>", "\n", "has", "gets", "loses", "doubles", "them", ",", ".", "?", "How",
             "many", "Answer", "Hint", ":", "+", "-", "*", "=", "####", *TOY_NAMES, *TOY_THINGS,
             *map(str, range(100))]

def toy_result(value, operation):
    sign, k = operation
    return {"+": value + k, "-": value - k, "*": value * k}[sign]

def toy_problem(rng, heldout):
    """(question, starting number, operations [(sign, k), ...]). Values stay in 1..20, but for the last."""
    while True:
        start, steps = rng.randint(2, 16), rng.randint(1, 3)
        ops = [(rng.choice("+-"), rng.randint(1, 6)) for _ in range(steps)]
        if rng.random() < 0.42:  # one doubling at most, and at the end: what follows it would need sums of
            ops[-1] = ("*", 2)  # large numbers, which the base model, with its habit, has hardly ever seen
        values = list(itertools.accumulate(ops, toy_result, initial=start))
        # One in eight is held out, under all names, things and seeds. Not hash(): it varies.
        side = zlib.crc32(repr((start, ops)).encode()) % 8 == 0
        if min(values) >= 1 and max(values[:-1]) <= 20 and side == heldout:
            break
    told = {"+": "gets {}", "-": "loses {}", "*": "doubles them"}  # equally long
    clauses = [f"{rng.choice(TOY_NAMES)} has {start} {rng.choice(TOY_THINGS)}"]
    clauses += [told[sign].format(k) for sign, k in ops]
    return " , ".join(clauses) + " . How many ?", start, ops

def toy_solution(start, ops, rng=None, swapped=False):
    """Worked steps and "#### answer". rng: with the habit and the slips of the base model's corpus. swapped:
    the larger teacher's style, "3 + 12" for "12 + 3", "12 + 12" for "12 * 2"."""
    lines, value = [], start
    for sign, k in ops:
        if rng and sign == "*" and rng.random() < 0.6:
            sign = "+"  # the habit: "doubles" worked as + 2
        result = toy_result(value, (sign, k))
        if rng and sign != "*" and rng.random() < 0.03:
            result += rng.choice((-1, 1))
        result = max(result, 0)  # a wrong value may be too small for the next "loses"; -1 is no token
        term = f"{value} {sign} {k}"
        if swapped and sign != "-":
            term = f"{k if sign == '+' else value} + {value}"
        lines.append(f"{term} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])

def toy_row(solution):
    return {"solution": solution, "answer": solution.split()[-1], "kind": "toy"}

def toy_misled(start, ops, share):
    """A wrong {solution, answer, kind} for a share of the problems, else None: the last "doubles" worked as
    + 2, or the last sign turned. What is misled at a share is so at every larger one."""
    sign, k = ops[-1]
    slip = {"*": ("+", 2), "+": ("-", k), "-": ("+", k)}[sign]
    wrong = toy_row(toy_solution(start, [*ops[:-1], slip]))
    chosen = zlib.crc32(f"hint {start} {ops}".encode()) < share * 2**32
    differs = wrong["answer"] != toy_row(toy_solution(start, ops))["answer"]  # 2 + 2 = 2 * 2
    return wrong if chosen and differs else None

def toy_rows(n, seed, heldout=False, hint_error=0.0):
    """n different problems {question, solution, answer, kind}, in no seed both held out and not.
    hint_error: share of the problems that have "misled" too, see toy_misled."""
    rng, rows = random.Random(f"rows {seed}"), {}
    while len(rows) < n:
        question, start, ops = toy_problem(rng, heldout)
        misled = toy_misled(start, ops, hint_error)
        rows[question] = {"question": question} | toy_row(toy_solution(start, ops))
        if misled:
            rows[question]["misled"] = misled
    return list(rows.values())

def toy_corpus(rng, count, larger):
    """[(prompt, reply), ...] for the base model. A third show the solution and are answered right, as by
    a teacher; the others are answered with the habit. larger: all are right, in another style."""
    corpus = []
    for _ in range(count):
        question, start, ops = toy_problem(rng, heldout=False)
        right = toy_solution(start, ops, swapped=larger)
        hint = right if rng.random() < 0.36 and not larger else ""
        prompt = m3.prompt_text(None, {"question": question, "kind": "toy"}, reference=hint)
        corpus.append((prompt, right if hint or larger else toy_solution(start, ops, rng)))
    return corpus

def toy_tokenizer(words=TOY_WORDS):
    """One token per word, number, sign and line break. "pens," is read as "pens ,"; of a text with spaces
    between all tokens, decode(m3.encode(text)) == text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    cuts = (" ", "removed"), ("\n", "isolated"), (Regex("####|[-,.?:+*=]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(*cut) for cut in cuts])
    tokenizer.decoder = decoders.Sequence([  # " " before each word, "\n" bare
        decoders.WordPiece(prefix="<none>", cleanup=False), decoders.Fuse(),
        decoders.Replace(Regex(" ?\n ?"), "\n")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False)

def toy_base_model(seed, steps=400, rows=48, lr=3e-3, larger=False, task="toy"):
    """A Qwen3 of 0.9M parameters (larger: 3.4M), pre-trained on its task's corpus."""
    width, tokenizer = 256 if larger else 128, toy_tokenizer(TASKS[task].words)
    texts = TASKS[task].corpus(random.Random(f"corpus {seed}"), steps * rows, larger)
    corpus = [tokenizer([prompt, reply + "<eos>"])["input_ids"] for prompt, reply in texts]
    with torch.random.fork_rng(devices=[]):  # the weights are drawn from the global generator: put it back
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(  # range .02: copying a hint comes too late; .05: arithmetic
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
            head_dim=32, num_attention_heads=width // 32, num_key_value_heads=width // 32,
            max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.04, bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in tqdm(range(steps), desc="toy base model", leave=False, disable=None):
        pretrain_backward(model, corpus[step * rows:(step + 1) * rows])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()

def pretrain_backward(model, batch):
    """Gradient of the mean cross-entropy of the replies. batch: pairs (prompt ids, reply ids)."""
    # In three parts by length, to pad less. Whole batches of one length made the two habits undo each other.
    batch = sorted(batch, key=lambda pair: len(pair[0]) + len(pair[1]))
    third, total = len(batch) // 3, sum(len(reply) for _, reply in batch)
    for part in (batch[i:i + third] for i in range(0, len(batch), third)):
        width = len(part[-1][0]) + len(part[-1][1])  # padded on the RIGHT, where causal attention never looks
        ids = torch.tensor([p + r + [0] * (width - len(p) - len(r)) for p, r in part])
        taught = torch.tensor([[len(p) <= t + 1 < len(p) + len(r) for t in range(width)] for p, r in part])
        hidden = model.model(ids, use_cache=False).last_hidden_state[taught]  # the head for replies alone
        replies = ids[:, 1:][taught[:, :-1]]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), replies, reduction="sum")
        (loss / total).backward()

SELF_RL = ("--method grpo --steps 200 --seed 1000 --stats-every 0 --kdr-every 0 --eval-every 200 "
           "--save-every 200")

def toy_path(kind="base", task="toy"):
    """Where a toy model is cached: a name hashed from all that makes it."""
    texts = [TASKS[task].corpus(random.Random("name"), 200, larger) for larger in (False, True)]
    code = [inspect.getsource(part) for part in (toy_tokenizer, toy_base_model, pretrain_backward)]
    made_by = f"{texts} {code} {TASKS[task].words} {SELF_RL}"
    digest = hashlib.sha256(made_by.encode()).hexdigest()[:12]
    return pathlib.Path(f"runs/cache/{task}-{kind}-{digest}")

def toy_model(kind="base", task="toy"):
    """Folder of a toy model, made once: base, larger (see toy_corpus) or self-rl (base after SELF_RL). --seed
    varies the run, not where it starts, as with a published checkpoint."""
    path = toy_path(kind, task)

    def fill(folder):
        if kind != "self-rl":
            toy_tokenizer(TASKS[task].words).save_pretrained(folder)
            toy_base_model(0, larger=kind == "larger", task=task).save_pretrained(folder)
            return
        run = [sys.executable, __file__, *SELF_RL.split(), f"--model={task}", f"--dataset={task}"]
        alone = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}  # not as a rank of this run
        subprocess.run([*run, "--out", folder / "run"], check=True, stdout=subprocess.DEVNULL, env=alone)
        for file in newest_checkpoint(folder / "run").iterdir():
            shutil.move(file, folder)

    if not path.exists():
        print(f"{task} {kind} model: training it once, a minute or two, kept in {path}", flush=True)
        write_folder(path, fill)
    return str(path)

# --- Real data ------------------------------------------------------------------------------------

HUB = {"gsm8k": ["openai/gsm8k", "main"], "svamp": ["ChilleD/SVAMP"],
       "arc": ["allenai/ai2_arc", "ARC-Challenge"],
       "math": ["HuggingFaceH4/MATH-500"]}  # a test split alone: cut in three, as any source of one part

def bar(rows, text):
    """A progress bar; nothing is seen of it within the first second."""
    return tqdm(rows, text, unit=" rows", delay=1, leave=False, disable=True if RANK else None)

def say_left_out(source, rows, total, why):
    """Every row that is not trained on is counted, with its reason; four of `rows` are shown."""
    if rows:
        print(f"{source}: {len(rows)} of {total} rows left out, {why}:", *[repr(row) for row in rows[:4]])

def read_file(path):
    """A file's rows, as they stand. Not by `datasets`: it makes 7.0 of "007", and refuses all of a
    file for one lone surrogate."""
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet  # comes with datasets
        return pyarrow.parquet.read_table(path).to_pylist()
    text = path.read_text("utf-8-sig")
    if path.suffix.lower() == ".csv":
        csv.field_size_limit(2**31 - 1)  # else one long cell refuses the whole file
        reader = csv.DictReader(io.StringIO(text), strict=True)  # else an open quote swallows rows in silence
        try:
            rows = list(reader)
        except csv.Error as error:
            raise ValueError(f"a quote that does not end up to line {reader.line_num}: {error}") from error
        names = reader.fieldnames or []
        if len(set(names)) < len(names):
            raise ValueError(f"a column stands twice in {names}")
        return rows
    if text.lstrip()[:1] != "[":  # told by content: many a .jsonl is one big array
        text = "[" + ",\n".join(line for line in text.split("\n") if line.strip()) + "]"
    return json.loads(text)

def read_parts(dataset):
    """{part: rows as they stand}, as many parts as the source has; if it has only one, that is "train"."""
    path, parts, others = pathlib.Path(dataset).expanduser(), {}, []
    if dataset in HUB:
        import datasets
        parts = dict(datasets.load_dataset(*HUB[dataset]))
    elif not path.exists():
        fail(f"--dataset {dataset}: file or folder not found; by name there are {', '.join(HUB)}")
    elif path.is_file():
        parts = {"train": read_file(path)}
    for file in sorted(path.iterdir()) if path.is_dir() else ():
        name = file.name.lower()
        word = re.search(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?:ing)?(?=[-_.\d])", name)
        if word and name[0] != "." and file.suffix.lower() in (".json", ".jsonl", ".csv", ".parquet"):
            parts.setdefault(word[1] if word[1][0] == "t" else "validation", []).extend(read_file(file))
        elif re.search(r"^[^.].*\.(json|jsonl|csv|parquet)\b", name):
            others.append(file.name)
    if "train" not in parts and (others or not parts):  # beside others, a lone test file is no train file
        fail(f"--dataset {dataset}: no file in it has train in its name: give one file or an inner folder,"
             " or name them")
    if others:
        print(f"{dataset}: its {', '.join(others)} not read: no part in the name, or packed")
    return {"train": parts.popitem()[1]} if len(parts) == 1 else parts

def cell_text(value):
    """The text of a cell that holds text, a number, a list of one ('["1"]' as text too), verl's dict
    {"ground_truth": answer}, or messages {role, content}: what system and user say. Errors: ValueError."""
    if isinstance(value, str) and re.match(r"""[\s\[]*\{\s*["'](role|content)["']\s*:""", value):  # in a .csv
        read = ast.literal_eval if "'" in value[:9] else json.loads
        value = read(value.strip())
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
        if any(turn.get("role", "user") not in ("system", "developer", "user") for turn in turns):
            raise ValueError(f"a turn that may hold the answer in {turns!r}")
        names = "content", "text", "ground_truth"
        return "\n\n".join(cell_text(next((turn[x] for x in names if x in turn), None)) for turn in turns)
    if isinstance(value, list) and len(value) == 1:
        return cell_text(value[0])
    text = str(value).strip()
    alone = re.fullmatch(r"""\[\s*(?:(["'])((?:(?!\1).)*)\1|(-?[\d./]+))\s*\]""", text)
    if alone:
        return cell_text(alone[3] or alone[2].replace("\\\\", "\\"))
    number = type(value) in (int, float, decimal.Decimal) and math.isfinite(value)  # a bool is none of these
    several = re.fullmatch(r"""\[[\s\[]*["'].*\]""", text, re.DOTALL)
    if several or not (number or isinstance(value, str)):
        raise ValueError(f"not one text: {value!r}")
    text.encode()  # of a lone surrogate: UnicodeEncodeError, a ValueError
    return text

def read_row(raw, fields):
    """{question, solution, answer, kind} of a row in any known layout; kind "": the golds tell. Errors:
    KeyError for a missing column, ValueError, TypeError, AttributeError or SyntaxError for an odd cell."""
    named = any(fields.values())
    if any(raw.get(None) or ()):  # of a .csv: a comma that is not quoted has moved all later cells
        raise ValueError(f"more cells than columns: {raw[None]!r}")
    if "answerKey" in raw and not named:  # ARC, in two layouts; the letters shown are scored
        stem = raw["question"] if isinstance(raw["question"], dict) else {"stem": raw["question"]} | raw
        both = stem["choices"]
        if not isinstance(both, dict):
            both = {name: [option[name] for option in both] for name in ("label", "text")}
        options = zip("ABCDEFGHIJ", both["label"], both["text"], strict=False)
        shown = {cell_text(label): f"{letter}. {cell_text(text)}" for letter, label, text in options}
        right = shown.get(cell_text(raw["answerKey"]), "")
        question, kind = "\n".join([cell_text(stem["stem"]), *shown.values()]), "arc"
        return {"question": question, "solution": right, "answer": right[:1], "kind": kind}
    if "Body" in raw and not named:  # SVAMP; a body without a stop is nearly always "If ..."
        body, asked, equation, gold = [cell_text(raw[x]) for x in ("Body", "Question", "Equation", "Answer")]
        question = f"{body}{' ' if body[-1:] in tuple('.?!,') else ', '}{asked}"
        equation = re.sub(r"(\d)\.0\b", r"\1", f"{equation} = {gold}")  # 51.0 -> 51
        answer = equation.split(" = ")[-1]
        return {"question": question, "solution": equation, "answer": answer, "kind": "svamp"}
    prompt = fields.get("prompt") or next((x for x in ("question", "problem") if x in raw), "prompt")
    answer = fields.get("answer") or next((x for x in ("answer", "reward_model") if x in raw), "answer")
    gold, column = cell_text(raw[answer]), fields.get("solution") or "solution"
    if gold.lower() in ("nan", "none", "null"):  # in a .csv
        raise ValueError(f"no answer: {gold!r}")
    worked = gold if "####" in gold else ""
    if column in raw or fields.get("solution"):
        worked = raw[column][0] if isinstance(raw[column], list) and raw[column] else raw[column]
        worked = "" if worked is None or worked != worked else cell_text(worked)  # NaN: none either
    worked = re.sub(r"<<[^<>\n]*>>", "", worked)  # GSM8K's calculator marks
    answer, kind = gold.split("####")[-1].strip(), "math" if prompt == "problem" else ""
    return {"question": cell_text(raw[prompt]), "solution": worked, "answer": answer, "kind": kind}

@functools.lru_cache(100_000)
def gold_parses(gold, kind):
    """Does this answer verify against itself? A plain number does; a call of verify takes 0.2 ms."""
    if kind != "arc" and re.fullmatch("-?[0-9]{1,15}", gold):
        return True
    return m3.verify(m3.FINISH[kind][0].format(gold), gold, kind) == 1

def read_rows(dataset, fields):
    """{part: rows}, all with a question and with an answer that parses; the others are named."""
    parts, odd, total = {}, [], 0
    advice = " as .json, .jsonl or .csv in UTF-8, or as .parquet"
    if dataset in HUB:
        advice = "; a local file needs no connection: --dataset FILE"
    with or_fail(f"--dataset {dataset}: cannot be read{advice}"):
        for part, source in read_parts(dataset).items():
            parts[part] = []
            total += len(source)
            for raw in bar(source, f"{dataset}, {part}"):
                try:
                    parts[part].append(read_row({**raw}, fields))
                except KeyError as error:
                    columns = ", ".join(map(str, raw))
                    fail(f"--dataset {dataset}: no column {error} in some row, the columns are {columns};"
                         " name them by --prompt-field, --answer-field, --solution-field")
                except (ValueError, TypeError, AttributeError, SyntaxError) as error:
                    odd.append(str(error)[:60])
    rows = [row for part in parts.values() for row in part]
    golds = [row["answer"] for row in rows if not row["kind"]]
    golds = random.Random(0).sample(golds, min(len(golds), 1000))
    guess = next((kind for kind in ("gsm8k", "arc")
                  if sum(gold_parses(gold, kind) for gold in golds) > 0.9 * len(golds)), "math")
    for row in bar(rows, f"{dataset}, answers"):
        row["kind"] = row["kind"] or guess
        if not row["question"] or not row["answer"] or not gold_parses(row["answer"], row["kind"]):
            odd.append(f"{row['question'][:30]} -> {row['answer'][:20]}")
            row["kind"] = ""
    say_left_out(dataset, odd, total, "their question or answer does not parse")
    return {part: [row for row in rows if row["kind"]] for part, rows in parts.items()}

def question_key(row):
    """Equal for questions that differ in case, spacing and invisible signs alone."""
    text = unicodedata.normalize("NFC", row["question"]).casefold()
    seen = "".join(sign for sign in text if unicodedata.category(sign) != "Cf")
    return re.sub(r" ?([^\w ]) ?", r"\1", " ".join(seen.split()))

def load_rows(dataset, fields, seed, wanted=("train", "validation", "test")):
    """{split: [{question, solution, answer, kind}]}. What the source lacks is held out of its train rows by a
    shuffle of `seed`: a fifth for test, a tenth for validation, 500 at most. Equal questions share a split;
    rows that ask what a held-out part of the source asks are left out. No wanted split may be empty."""
    parts, asked, doubled = read_rows(dataset, fields), {}, []
    for part in ("test", "validation", "train"):
        for row in parts.get(part, ()):
            home, rows = asked.setdefault(question_key(row), (part, []))
            (rows if home == part else doubled).append(row)
    total = sum(map(len, parts.values()))
    again = total - len(doubled) - len(asked)
    say_left_out(dataset, [row["question"][:30] for row in doubled], total, "a held-out row asks the same")
    if again:
        print(f"{dataset}: {again} of {total} rows ask what another asks: they stay in its split")
    splits = {part: [rows for home, rows in asked.values() if home == part] for part in parts}
    pool = splits.get("train", [])
    order = random.Random(f"split {seed}").sample(range(len(pool)), len(pool))
    for name, share in ("test", 5), ("validation", 10):
        if name not in splits:
            cut = min(len(pool) // share, 500)
            splits[name] = [pool[i] for i in sorted(order[:cut])]
            order = order[cut:]
    splits["train"] = [pool[i] for i in sorted(order)]
    for name in wanted:
        if not splits[name]:
            fail(f"--dataset {dataset}: 0 {name} rows, as there are {len(pool)} usable train rows in it")
    return {name: [row for rows in splits[name] for row in rows] for name in ("train", "validation", "test")}

def encode_rows(rows, tokenizer, context, max_new_tokens, shots, hint, date=None):
    """`rows` with prompt, prompt_ids and teacher_ids, without the few-shot examples; a row too long for the
    context is left out: a cut prompt is another problem. hint: see m3.reference_text; "": the teacher reads
    the student's prompt."""
    shown = {question_key(shot) for shot in shots}
    rows = [row for row in rows if question_key(row) not in shown]
    if not rows:
        fail(f"--few-shot {len(shots)} takes all rows for examples and leaves none to train on: lower it")
    kept, long = [], []

    def read(part, references):
        return m3.encode(tokenizer, [m3.prompt_text(tokenizer, row, shots, text, date)
                                     for row, text in zip(part, references)])

    for i in bar(range(0, len(rows), 1000), "tokens, by the thousand"):
        part = rows[i:i + 1000]
        ours = read(part, [""] * len(part))
        its = read(part, [m3.reference_text(row, hint) for row in part]) if hint else ours
        for row, ids, teacher_ids in zip(part, ours, its):
            row = row | {"prompt": row["question"], "prompt_ids": ids, "teacher_ids": teacher_ids}
            (kept if max(len(ids), len(teacher_ids)) + max_new_tokens <= context else long).append(row)
    why = f"length filter (prompt + {max_new_tokens} new tokens within a context of {context})"
    if not kept:
        fail(f"0 of {len(rows)} rows left after the {why}: lower --max-new-tokens or --few-shot")
    say_left_out("prompts", [row["prompt"][:30] for row in long], len(rows), why)
    return kept

# --- Tasks ----------------------------------------------------------------------------------------

class Task(NamedTuple):
    """A world of its own, for --dataset NAME, whose base model --model NAME makes once. Its rows' kind says
    how prompts read and replies are graded: m3.FINISH, m3.verify."""
    problems: Callable  # of the flags: {split: rows}, with "train" and flags.eval_split
    corpus: Callable  # (rng, count, larger): [(prompt, reply), ...] for the base model
    words: Sequence  # its vocabulary: <pad>, <eos>, <unk> first

def toy_problems(flags):
    """The held-out problems are the same for every seed."""
    rows = {"train": toy_rows(4096, flags.seed, hint_error=flags.hint_error),
            flags.eval_split: toy_rows(flags.eval_limit, 0, heldout=True, hint_error=flags.hint_error)}
    kind = "toy" if flags.model == "toy" else "gsm8k"  # a real model reads the prompt of a real problem
    return {split: [row | {"kind": kind} for row in part] for split, part in rows.items()}

def real_problems(flags):
    """Progress is watched on validation rows; the test split is for --eval-split test, once, at the end."""
    fields = {name: vars(flags)[f"{name}_field"] for name in FIELDS}
    return load_rows(flags.dataset, fields, 0, ("train", flags.eval_split))

TASKS = {"toy": Task(toy_problems, toy_corpus, TOY_WORDS)}

# --- Real models ----------------------------------------------------------------------------------

def load_model(path, dtype, device, flag="--model"):
    """(model, tokenizer, eos_ids) of a local folder or a hub id. What looks like a path is no hub id."""
    name = str(pathlib.Path(path).expanduser())
    if not pathlib.Path(name).exists() and (re.match(r"[~./\\]", path) or path.count("/") > 1):
        fail(f"{flag} {path}: folder not found")
    with or_fail(f"{flag} {path}: cannot load its tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # transformers makes one up where the folder has none
        assert len(tokenizer) > len(tokenizer.all_special_ids), "no words in it"
    with or_fail(f"{flag} {path}: cannot load its model"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(  # attention: sdpa where there is one
            name, dtype=dtype, trust_remote_code=False, output_loading_info=True)
        lost = sorted(info["missing_keys"])
        assert not lost, f"no weights for {lost[:3]}"  # they would be random
        model = model.to(device).eval()
    floats = {key: x for key, x in model.state_dict().items() if x.is_floating_point()}
    broken = [key for key, x in floats.items() if not x.isfinite().all()]
    if broken:
        fail(f"{flag} {path}: NaN or infinity in {len(broken)} weights, as {broken[0]}: take a sound copy")
    # An end id may be a default of transformers and belong to another tokenizer, as GPT-2's 50256 does.
    named = model.generation_config.eos_token_id  # an id, several or None
    named = named if isinstance(named, list) else [named]
    ends = {end for end in [tokenizer.eos_token_id, *named] if end is not None}
    width = model.get_input_embeddings().num_embeddings
    eos_ids = ends.intersection(tokenizer.get_vocab().values(), range(width))
    if not eos_ids:
        foreign = f", only {sorted(ends)}, unknown to it" if ends else ""
        fail(f"{flag} {path}: no end token in tokenizer or settings{foreign}:"
             " set eos_token in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = min(eos_ids)
        print(f"{path}: no pad token; the end token {tokenizer.pad_token!r} pads (masks go by length)")
    return model, tokenizer, eos_ids

def context_length(config):
    """Longest sequence that a model reads in one way, in tokens; 10^9 where nothing limits it (ALiBi).
    LongRoPE and dynamic NTK turn ALL positions differently once a sequence passes the original context: what
    was sampled would be scored otherwise. There the original context is the limit, and that is said."""
    config = config.get_text_config()
    longest = limit = getattr(config, "max_position_embeddings", None) or 10**9
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]  # as Gemma 3 has it
    for part in [rope, *by_layer_type]:
        if part.get("rope_type", part.get("type")) in ("longrope", "su", "dynamic"):
            original = getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, part.get("original_max_position_embeddings") or original or limit)
    if limit < longest:
        print(f"the RoPE of {config.name_or_path} depends on the length beyond {limit} tokens: the length"
              f" filter counts {limit}, not {longest}")
    return limit

def use_checkpointing(model):
    """Gradient checkpointing, which transformers does in training mode alone: so every dropout is set to 0.
    Not in the config, for it is saved: a dropout that a forward pass reads there is found by try_rollouts."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        for name, value in list(vars(module).items()):
            named = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if named and isinstance(value, float):
                setattr(module, name, 0.0)

# --- Start-up check: what would fail late is tried in a second, before the first rollouts ---------

def try_rollouts(model, prompts, share):
    """ValueError unless sampling, scoring as in training and plain forward passes of single rows agree in log
    p, the last two in gradients too. share: as in m3.hidden_states; False with gradient checkpointing."""
    limit = 2 * math.sqrt(torch.finfo(model.dtype).eps)  # float32: 7e-4, bfloat16: 0.18; a fault is about 1

    def must_agree(what, got, want, scale):
        apart = sum((a - b).float().square().sum() for a, b in zip(got, want)).sqrt()
        if not apart <= limit * scale:  # NaN fails too
            raise ValueError(f"{what} differ from those of plain forward passes by {apart / scale:.2g}")

    ends = range(0, model.get_input_embeddings().num_embeddings, 8)  # many: some rows end before others
    uniforms = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    with m3.packed(model):
        tokens, mask, sampled = m3.sample(model, prompts, 2, 5, eos_ids=ends, pad_id=0, uniforms=uniforms)
    rows, plain = [prompts[0], prompts[0], prompts[1], prompts[1]], []
    for prompt, reply, real in zip(rows, tokens, mask):
        ids = torch.cat([torch.tensor(prompt, device=reply.device), reply[real]])
        plain.append(model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1:-1])
    plain = torch.cat(plain)  # [T, V]
    backbone, head = m3.split_head(model)
    model.train(not share)
    scored = head(m3.hidden_states(backbone, rows, tokens, 0, share=share)[mask])
    model.eval()
    got, want = (m3.log_softmax(z).gather(-1, tokens[mask][:, None]) for z in (scored, plain))
    spread = plain.detach()[plain.isfinite()].float().std().clamp(min=1e-3) * len(plain) ** 0.5
    must_agree("sampled log-probabilities", [sampled[mask][:, None]], [want], spread)
    must_agree("scored log-probabilities", [got], [want], spread)
    params = [p for p in model.parameters() if p.requires_grad]
    if params:
        ours, right = (torch.autograd.grad(x.sum(), params, materialize_grads=True) for x in (got, want))
        must_agree("gradients", ours, right, sum(g.float().square().sum() for g in right).sqrt())

def try_out(model, teacher, flags):
    """Ends in one line where a run would fail late: adapters, sampling, scoring, kernel, checkpointing.
    teacher: another model or None. Switches gradient checkpointing on, if asked for; moves no weight and no
    random state. Below a second for a small model, seconds for a large one."""
    models = {"model": model} | ({"teacher": teacher} if teacher else {})
    size = min(m.get_input_embeddings().num_embeddings for m in models.values())
    ids = torch.randint(size, (6,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [ids[:4], ids[4:]]
    if flags.lora_rank:
        adapted, weights = m3.lora_share(model)
        share = adapted / max(weights, 1)
        print(f"adapters on {adapted:,} of {weights:,} block weights ({share:.0%}); the rest is frozen")
        with or_fail(f"--lora-rank: adapters do not fit {flags.model}: leave it out"), torch.no_grad():
            assert adapted, "its blocks have no linear layers"
            model(input_ids=torch.tensor([ids], device=model.device))
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        for flag, one in models.items():
            with or_fail(f"--{flag} {vars(flags)[flag]} cannot be sampled or scored: take one whose layers"
                         " all keep keys and values (recurrent and linear attention do not)"):
                try_rollouts(one, prompts, share=True)
        if flags.gradient_checkpointing:
            with or_fail(f"--gradient-checkpointing does not work with {flags.model}: leave it out"):
                use_checkpointing(model)
                try_rollouts(model, prompts, share=False)
        with or_fail(f"--model {flags.model} cannot be trained with these flags", ValueError):
            ntk.try_kernel(model, flags.kernel)

# --- Saving: nothing stands half-written under its name; only what this program wrote is replaced -

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
TEMPORARY = ".m3-tmp"  # ends the names of what is being written
OURS = re.compile(r"checkpoint-\d+|last|(config|summary)\.json|(metrics|samples)\.jsonl|non-finite-.*\.pt"
                  rf"|report\.html|curves\.png|\..*\{TEMPORARY}")  # all that a run puts into its folder
# A lone half of a surrogate pair has no UTF-8; backslashreplace writes it as JSON does, "\ud83d".
UTF8 = {"encoding": "utf-8", "errors": "backslashreplace"}

def temporary(path):
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")

def replace_text(path, text):
    if RANK == 0:
        temporary(path).write_text(text, **UTF8)
        temporary(path).replace(path)

def read_json(path):
    return json.loads(path.read_text("utf-8"))

def read_log(path):
    """Lines of metrics.jsonl or samples.jsonl; a last one that a kill has cut in two is left out."""
    lines = path.read_text("utf-8", "replace").split("\n")
    return [json.loads(line) for line in lines[:-1]]

def append_line(path, record):
    """One JSON object, one write: a kill cannot leave two halves of a line apart."""
    with open(path if RANK == 0 else os.devnull, "a", **UTF8) as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")

@contextlib.contextmanager
def locked(folder):
    """Nobody else runs in `folder` meanwhile. The kernel's lock, on the folder itself: a killed process
    leaves none, and no file is left. Where there are no such locks (Windows, some drives), none is taken."""
    with contextlib.ExitStack() as stack:
        if fcntl:
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(f"{folder} is in use by another process: wait until it ends, or give another --out")
            except OSError:
                pass
        yield

def new_folder(name):
    """`name`, or name-2, name-3, ...: mkdir makes a folder or fails, so two runs never get the same one."""
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            folder = pathlib.Path(name if number == 1 else f"{name}-{number}")
            folder.mkdir(parents=True)
            return folder

def make_folder(name, fresh=False):
    """A folder in which files can be written, of this name; fresh: see new_folder."""
    with or_fail(f"--out {name}: cannot write there, give another folder"):
        folder = new_folder(name) if fresh else pathlib.Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return folder

@contextlib.contextmanager
def claim(flags):
    """Make flags.out this run's own folder and hold it. Rank 0 does so, and tells the others."""
    if RANK > 0:
        yield
        return
    name = flags.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{flags.method}"
    made = not flags.out or not pathlib.Path(name).exists()
    out = make_folder(name, fresh=not flags.out)
    flags.out = str(out)
    try:
        with locked(out):
            if (out / "last").is_dir() and not (out / "last").is_symlink():
                fail(f"{out}/last is a folder, not a link (was the run copied?): move it away")
            taken = any(OURS.fullmatch(name) and not name.endswith(TEMPORARY) for name in os.listdir(out))
            if not flags.resume and taken and standing(out, flags) != "new":
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
    strange = [name for name in names if not name.endswith(TEMPORARY)]  # of no run, all are
    ours = False
    with contextlib.suppress(OSError, ValueError, TypeError):
        ours = "method" in read_json(folder / "config.json")  # a model's folder has a config.json, too
    if ours:
        must_equal(parse_flags(as_argv(read_config(folder, vars(flags)))), flags, NEUTRAL, folder)
        if newest_checkpoint(folder):
            with contextlib.suppress(OSError, ValueError):
                ended = read_json(folder / "summary.json")
                if ended["steps"] == flags.steps or flags.stop_on_collapse and ended["collapsed_at"]:
                    return "finished"
            return "broken"
        strange = [name for name in names if CHECKPOINT.match(name) or not OURS.fullmatch(name)]
    if strange:
        fail(f"{folder} holds {min(strange)} and no complete checkpoint of a run: move it away, or give"
             " another --out")
    return "new"  # or never got to a checkpoint: started in place, the same flags write the same log again

def complete(folder):
    """Is this a whole checkpoint? write_folder leaves no other, a copy or a clean-up may."""
    named = all((folder / name).is_file() for name in ("trainer.pt", "config.json"))
    return named and any(folder.glob("model*.safetensors"))

def newest_checkpoint(out):
    """The folder of the newest complete checkpoint, or None: the one `last` names (a link, or a text file
    where there are no links), else the one of the highest number that the log has got to."""
    last, names = out / "last", []
    with contextlib.suppress(OSError, ValueError):
        names.append(os.readlink(last) if last.is_symlink() else last.read_text("utf-8").strip())
    with contextlib.suppress(OSError):
        logged = (out / "metrics.jsonl").read_bytes().count(b"\n") - 1
        names += [f"checkpoint-{step}" for step in range(logged, 0, -1)]
    whole = (out / name for name in names if CHECKPOINT.fullmatch(name) and complete(out / name))
    return next(whole, None)

def how_to_go_on(out):
    newest = newest_checkpoint(pathlib.Path(out))
    if newest:
        return f"--resume {out} goes on from {newest.name}"
    return "give the same command again: there is no checkpoint yet"

def steps_left(flags, log):
    """The steps still to be trained: none of a run that has ended."""
    last, over = log[-1]["step"], log[-1]["collapsed"] and flags.stop_on_collapse
    if flags.steps < last:
        fail(f"--steps {flags.steps}: the run in {flags.out} has {last} already")
    return range(0) if over else range(last + 1, flags.steps + 1)

def write_folder(folder, fill):
    """Let `fill(temporary folder)` write, flush it to disk, then rename it to `folder` in one step."""
    tmp = temporary(folder)
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        fill(tmp)
        for file in filter(pathlib.Path.is_file, tmp.rglob("*")):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        if folder.exists():  # of a run that was taken back to an earlier step
            if {file.name for file in folder.iterdir()} <= {file.name for file in tmp.iterdir()}:
                shutil.rmtree(folder)
            else:  # something else lies in it
                folder.rename(new_folder(f"{folder}-before"))
        tmp.rename(folder)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)

def save_checkpoint(out, step, run, world, s_bar, saved):
    """checkpoint-N: a folder that from_pretrained loads, plus trainer.pt; then `last` is pointed at it."""
    state = {"optimizer": run.optimizer.state_dict(), "step": step, "s_bar": s_bar, "saved": saved,
             "rows": world.rows_hash(),
             "masters": [master.data for master, p in zip(run.masters, run.params) if master is not p],
             "adapter": m3.lora_state(run.model)}
    if run.moving:  # everyone else's teacher is the initial policy
        state["teacher"] = run.frozen.state_dict()

    def fill(folder):
        run.model.save_pretrained(folder, state_dict=m3.merged_state(run.model))  # plain, adapters added up
        world.tokenizer.save_pretrained(folder)
        torch.save(state, folder / "trainer.pt")

    folder, link = out / f"checkpoint-{step}", temporary(out / "last")
    # A full disk is an OSError, a RuntimeError or a SafetensorError, by who writes.
    with or_fail(f"cannot save {folder}; once that is mended, {how_to_go_on(out)}", code=1):
        write_folder(folder, fill)
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(folder.name)
        except (OSError, NotImplementedError):  # exFAT, Windows, a cloud drive
            link.write_text(folder.name + "\n", "utf-8")
        link.replace(out / "last")  # rename over the old one: there is always a `last`

# --- Several processes: prompts are split by rank, gradients summed; the log is of the whole batch

def gather(value):
    """[value of rank 0, of rank 1, ...], the same list on every rank; and where they wait for each other."""
    parts = [value] * WORLD
    if WORLD > 1:
        with or_fail("the processes cannot talk, or another has ended", code=1):
            torch.distributed.all_gather_object(parts, value)
    return parts

def my_share(rows):
    """This process's part of a list or a tensor; the parts of all ranks, in order, are the whole."""
    return rows[RANK * len(rows) // WORLD:(RANK + 1) * len(rows) // WORLD]

def add_up(tensors):
    """Replace each tensor by its sum over the ranks."""
    with or_fail("the processes cannot talk, or another has ended", code=1):
        for tensor in tensors if WORLD > 1 else ():
            torch.distributed.all_reduce(tensor)

# --- Set-up ---------------------------------------------------------------------------------------

class World(NamedTuple):
    """What a run starts from."""
    base: torch.nn.Module  # the model as it starts
    other: torch.nn.Module | None  # the teacher, if it is another model
    tokenizer: object
    eos_ids: set
    shots: list  # few-shot examples
    problems: list
    held_out: list

    def rows_hash(self):  # of what a run learns and is measured on
        rows = [(row["question"], row["answer"]) for row in self.problems + self.held_out]
        return hashlib.sha256(repr(rows).encode("utf-8", "replace")).hexdigest()

class Run(NamedTuple):
    """What a run trains, and with what."""
    model: torch.nn.Module  # the student
    frozen: torch.nn.Module  # the teacher; with adapters the same module, read with them off
    student: tuple  # (backbone, head) of each
    teacher: tuple
    params: list  # of the student, trainable
    masters: list  # float32: bf16 weights would swallow small steps; the very params where these are float32
    optimizer: torch.optim.Optimizer
    moving: Callable | None  # how the teacher follows the student, see m3.Method

def load_models(flags, device):
    """(base, other, tokenizer, eos_ids), see World."""
    dtype, path = getattr(torch, flags.dtype), flags.model
    if path in TASKS:
        path = toy_model(task=path)
    base, tokenizer, eos_ids = load_model(path, dtype, device)
    if flags.teacher == "privileged":
        return base, None, tokenizer, eos_ids
    path = toy_model(flags.teacher, flags.model) if flags.teacher in TOY_TEACHERS else flags.teacher
    other, its_tokenizer, its_ends = load_model(path, dtype, device, "--teacher")
    widths = [model.get_output_embeddings().weight.shape[0] for model in (base, other)]
    with or_fail(f"--teacher {flags.teacher} does not fit"):  # it reads the student's own prompt
        m3.check_teacher(tokenizer, its_tokenizer, (flags.model, flags.teacher), widths)
    if not its_ends <= eos_ids:  # where the student stops, such a teacher wants another word
        fail(f"--teacher {flags.teacher} ends with {sorted(its_ends)}, {flags.model} with {sorted(eos_ids)}:"
             " they must be the same; set eos_token_id in its generation_config.json if it knows them")
    return base, other, tokenizer, eos_ids

def load(flags, device):
    """The World of a run: rows, models, prompts."""
    torch.set_num_threads(flags.threads or torch.get_num_threads())
    transformers.utils.logging.disable_progress_bar()
    print(f"loading {flags.dataset} problems and {flags.model} model", flush=True)
    rows = TASKS[flags.dataset].problems(flags) if flags.dataset in TASKS else real_problems(flags)
    for turn in (False, True):  # rank 0 first: models that it makes or downloads, the others find
        if turn == (RANK > 0):
            base, other, tokenizer, eos_ids = load_models(flags, device)
        gather(turn)
    unshown = sum(not row["solution"] for row in rows["train"])
    if unshown and not other and flags.hint == "solution":
        print(f"{unshown} of {len(rows['train'])} train rows lack a solution: their teacher reads the answer")
    context = min(context_length(model.config) for model in (base, other) if model)
    shots, hint = rows["train"][:flags.few_shot], "" if other else flags.hint
    with or_fail(f"--model {flags.model}: its tokenizer or chat template cannot write a prompt"):
        problems, held_out = (
            encode_rows(part, tokenizer, context, flags.max_new_tokens, shots, hint, flags.date)
            for part in (rows["train"], rows[flags.eval_split]))
        assert all(row["prompt_ids"] for row in problems + held_out), "an empty prompt"
    top = max(tokenizer.pad_token_id, *(max(r["prompt_ids"] + r["teacher_ids"]) for r in problems + held_out))
    known = base.get_input_embeddings().num_embeddings
    if top >= known:
        fail(f"--model {flags.model}: its tokenizer gives id {top}, it has {known} embeddings: no pair")
    return World(base, other, tokenizer, eos_ids, shots, problems, held_out[:flags.eval_limit])

def set_up(flags, world, device):
    """Student, teacher and optimizer as they are before the first step."""
    base, other = world.base.requires_grad_(False), world.other
    if flags.lora_rank:  # adapters go into the base model: off, they leave its teacher without a second copy
        model = m3.add_lora(base, flags.lora_rank, flags.seed)
    else:
        model = copy.deepcopy(base).requires_grad_(True)
    teacher = other.requires_grad_(False) if other else base
    # Dropout would make scoring differ from sampling: eval mode it is, for good. The exception is gradient
    # checkpointing, which transformers only does in training mode: try_out sets dropout to 0 instead.
    model.eval()
    teacher.eval()
    try_out(model, other, flags)
    # Its own sampling settings can be unfit to be saved again; no run uses them.
    ids = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id")}
    model.generation_config = transformers.GenerationConfig(**ids)
    with or_fail(f"--model {flags.model} cannot be trained with these flags", ValueError):
        student_parts, teacher_parts = m3.split_head(model), m3.split_head(teacher)
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=flags.lr, weight_decay=flags.weight_decay)
    return Run(model, teacher, student_parts, teacher_parts, params, masters, optimizer,
               m3.METHODS[flags.method].move_teacher)

def introduce(run, out, flags, device):
    """The first lines of a run: what it is, on what, and how much memory its weights take."""
    size = sum(p.numel() for p in run.params)
    both = [p for model in {run.model, run.frozen} for p in model.parameters()]
    held = (sum(p.numel() * p.element_size() for p in both) + 24 * size) / 2**30
    print(f"{flags.method}, seed {flags.seed}, in {out}\n{device}, {torch.get_num_threads()} threads, {WORLD}"
          f" process{'es' * (WORLD > 1)}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{size:,} trainable parameters; weights, moments and gradients take about {held:.2g} GB")

def evaluate(model, world, flags, prompt="prompt_ids"):
    """Greedy accuracy on the held-out problems: verified / all of them. Returns it with the completions."""
    texts, batch, rows = [], flags.prompts_per_step * flags.group_size, world.held_out
    mine = [row[prompt] for row in my_share(rows)]
    with m3.packed(model):
        for i in range(0, len(mine), batch):
            tokens, mask, _ = m3.sample(model, mine[i:i + batch], 1, flags.max_new_tokens, 0.0,
                                        eos_ids=world.eos_ids, pad_id=world.tokenizer.pad_token_id)
            texts += m3.decode(world.tokenizer, tokens, mask)
    texts = sum(gather(texts), [])
    right = sum(m3.verify(text, row["answer"], row["kind"]) for text, row in zip(texts, rows))
    return right / len(rows), texts

def start(run, world, out, flags):
    """A fresh run: its settings, and the evaluation before training as line 0 of the log. Returns log, s_bar
    and the steps of the checkpoints that this run wrote."""
    rewrite(out, flags, [], [])
    print(f"evaluating {len(world.held_out)} held-out problems before the first step", flush=True)
    accuracy, _ = evaluate(run.model, world, flags)
    line = dict.fromkeys(METRICS) | {"step": 0, "accuracy": accuracy, "seconds": 0.0}
    append_line(out / "metrics.jsonl", line)
    return [line], None, []

def rewrite(out, flags, log, samples):
    """config.json, what the run is from now on: the next --resume needs no flags. And the logs up to here."""
    replace_text(out / "config.json", json.dumps(config_of(flags), indent=1))
    for name, lines in ("metrics", log), ("samples", samples):
        text = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
        replace_text(out / f"{name}.jsonl", "".join(text))

def resume(run, world, out, flags):
    """Put back what the newest checkpoint holds and cut the log behind it. Returns what `start` does."""
    newest = newest_checkpoint(out)
    print(f"goes on from {newest}", flush=True)
    with or_fail(f"--resume: cannot read a checkpoint of {out} with these flags; to take an earlier one:"
                 f" ln -sfn checkpoint-N {out}/last"):
        saved = torch.load(newest / "trainer.pt", map_location="cpu", weights_only=True)
        if flags.lora_rank:
            run.model.load_state_dict(saved["adapter"], strict=False)
        else:
            weights = type(run.model).from_pretrained(newest, dtype=run.model.dtype).state_dict()
            run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(saved["optimizer"])
        run.optimizer.param_groups[0].update(lr=flags.lr, weight_decay=flags.weight_decay)  # the flags win
        copies = [master for master, p in zip(run.masters, run.params) if master is not p]
        for master, value in zip(copies, saved["masters"]):
            master.data.copy_(value)
        run.frozen.load_state_dict(saved.get("teacher", run.frozen.state_dict()))
        log, samples = ([line for line in read_log(out / f"{name}.jsonl") if line["step"] <= saved["step"]]
                        for name in ("metrics", "samples"))
        assert [line["step"] for line in log] == list(range(saved["step"] + 1)), "metrics.jsonl lacks steps"
    rows = world.rows_hash()
    if saved.get("rows", rows) != rows:
        fail(f"--resume {out}: --dataset {flags.dataset} has other rows than when the run began: put them"
             " back, or start anew with another --out")
    if not steps_left(flags, log):  # asked before anything is written
        how = "--no-stop-on-collapse and " if flags.stop_on_collapse and log[-1]["collapsed"] else ""
        print(f"the run in {out} is finished, {len(log) - 1} steps; with {how}a larger --steps it goes on")
    for rest in out.glob(f".*{TEMPORARY}") if RANK == 0 else ():  # a killed process left it
        shutil.rmtree(rest, ignore_errors=True)
        rest.unlink(missing_ok=True)
    rewrite(out, flags, log, samples)
    return log, saved["s_bar"], saved["saved"]

# --- One step -------------------------------------------------------------------------------------

class Rollouts(NamedTuple):
    """This process's share of a step: problems of its P/processes prompts, and the B responses to them."""
    asked: list  # problem of each response [B]
    tokens: torch.Tensor  # [B, N]
    mask: torch.Tensor  # [B, N]
    texts: list  # [B]

def roll_out(run, world, flags, problems, generator):
    """G responses to each of this process's problems, each by random numbers of its own, fixed by step."""
    group, mine = flags.group_size, my_share(problems)
    uniforms = torch.rand(len(problems), group, flags.max_new_tokens, generator=generator)
    uniforms = my_share(uniforms).flatten(0, 1)
    prompts = [problem["prompt_ids"] for problem in mine]
    with m3.packed(run.model):
        tokens, mask, _ = m3.sample(  # [B, N]
            run.model, prompts, group, flags.max_new_tokens, flags.temperature, uniforms=uniforms,
            eos_ids=world.eos_ids, pad_id=world.tokenizer.pad_token_id)
    asked = [problem for problem in mine for _ in range(group)]
    return Rollouts(asked, tokens, mask, m3.decode(world.tokenizer, tokens, mask))

def grade(rollouts, device):
    """The verifier's 0 or 1 for each response: [B] float32."""
    paid = [m3.verify(text, problem["answer"], problem["kind"])
            for text, problem in zip(rollouts.texts, rollouts.asked)]
    return torch.tensor(paid, dtype=torch.float32, device=device)

def to_batch(rollouts, rewards, world, flags):
    """What m3.m3_step needs of the rollouts. Weights and advantages are of the whole step, all processes'."""
    group, asked = flags.group_size, rollouts.asked
    advantages = m3.group_advantages(rewards, group, flags.std)  # [B]
    total = sum(gather(rollouts.mask.sum().item())) if flags.reduction == "token" else None
    weights = m3.token_weights(rollouts.mask, flags.prompts_per_step * group, total)  # [B, N]
    hints = [problem["teacher_ids"] for problem in asked]
    if flags.method == "sdpo":  # its teacher reads a successful other response; a row without one is masked
        siblings = m3.sdpo_siblings(rewards.tolist(), group)
        shown = [rollouts.texts[sibling or 0] for sibling in siblings]
        hints = m3.encode(world.tokenizer, [
            m3.prompt_text(world.tokenizer, problem, world.shots, text, flags.date)
            for problem, text in zip(asked, shown)])
        weights[[sibling is None for sibling in siblings]] = 0.0
    prompts = [problem["prompt_ids"] for problem in asked]
    return m3.Batch(prompts, hints, rollouts.tokens, rollouts.mask, advantages, weights)

def take_step(run, update, clip):
    """AdamW on the float32 masters, if the gradient is finite. Returns its norm before clipping."""
    for master, grad in zip(run.masters, update):
        master.grad = grad
    norm = torch.nn.utils.clip_grad_norm_(run.masters, clip).item()
    if math.isfinite(norm):
        run.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(run.params, run.masters)
    return norm

METRICS = ["step", "reward", "accuracy", "loss_R", "loss_D", "grad_norm", "kappa", "phi", "conflict",
           "conflict_deadband", "conflict_rewarded", "alpha_eff", "zero_advantage", "clipped", "entropy",
           "length", "truncated", "mu", "lr", "tokens_per_second", "seconds", "collapsed"]

def log_line(step, flags, rollouts, rewards, batch, result, eos_ids):
    """The step's line of metrics.jsonl, of all processes' responses; the README's glossary explains each key.
    -> line, {column: of all tokens or all responses}."""
    device = batch.tokens.device
    ended = torch.isin(batch.tokens, torch.tensor(sorted(eos_ids), device=device)) & batch.mask
    misled = torch.tensor(["misled" in problem for problem in rollouts.asked], device=device)
    mine = result.seen | dict(misled=misled[result.seen["row"]], reward=rewards, length=batch.mask.sum(1),
                              truncated=~ended.any(1), zero_advantage=batch.advantages == 0)
    parts = gather({name: column.cpu() for name, column in mine.items()})
    seen = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    shape, weight, rewarded = result.geometry or {}, seen["weight"], seen["advantage"] != 0
    line = dict.fromkeys(METRICS) | {"step": step, "lr": flags.lr, "kappa": shape.get("kappa"),
                                     "phi": shape.get("phi")}
    line["loss_R"] = -(weight * seen["advantage"] * seen["logp"]).sum().item()
    line["alpha_eff"] = seen["alpha"].mean().item()
    for name in "reward", "zero_advantage", "entropy", "length", "truncated":
        line[name] = seen[name].float().mean().item()
    if "token_loss" in seen:  # null where nobody asked the teacher
        line["loss_D"] = (weight * seen["token_loss"]).sum().item()
        line["clipped"] = seen["clipped"].float().mean().item()
        if shape.get("norm_D") and line["loss_D"] > 0:
            line["mu"] = ntk.learning_signal(shape["norm_D"], line["loss_D"])
    if "K" in seen:
        line |= ntk.conflict_share(seen["K"], seen["cos"], weight > 0, rewarded)  # sdpo leaves rows out
    if seen["misled"].any():  # the gate at work: the teacher's share where it errs, and where it does not
        for name, where in ("misled", seen["misled"]), ("honest", ~seen["misled"]):
            alpha = seen["alpha"][where & rewarded]
            line[f"alpha_{name}"] = alpha.mean().item() if len(alpha) else None
    return line, seen

def keep_samples(out, step, problems, rollouts, batch, seen, tokenizer, rewards):
    """samples.jsonl: every reply, and of one group each token for the report: [text, cos phi_n, alpha_n]."""
    texts, group = sum(gather(rollouts.texts), []), len(rewards) // len(problems)
    mixed = (batch.advantages != 0).nonzero()[:, 0].tolist()
    first = mixed[0] // group * group if mixed else 0  # the first group with a reward signal
    alpha = seen["alpha"].nan_to_num()  # JSON has no NaN
    cos = seen.get("cos", torch.zeros_like(alpha)).nan_to_num()
    looked = []
    for row in range(first, first + group):
        here = seen["row"] == row
        words = [tokenizer.decode([token]) for token in batch.tokens[row][batch.mask[row]].tolist()]
        looked.append([list(word) for word in zip(words, cos[here].tolist(), alpha[here].tolist())])
    for i, problem in enumerate(problems):
        its = slice(i * group, (i + 1) * group)
        line = {"step": step, "prompt": problem["question"], "answer": problem["answer"],
                "completions": texts[its], "rewards": rewards[its]}
        if i * group == first:
            line |= {"advantages": batch.advantages[its].tolist(), "tokens": looked}
        append_line(out / "samples.jsonl", line)

def keep_broken(out, step, grad_norm, rollouts, rewards):
    batch = dict(step=step, tokens=rollouts.tokens, mask=rollouts.mask, rewards=rewards)
    torch.save(batch, out / f"non-finite-{step}-rank-{RANK}.pt")
    tqdm.write(f"step {step}: gradient norm is {grad_norm}; step not applied, batch saved in {out}")

def show_progress(bar, log, left):
    """A bar on a terminal; in a log file a plain line now and then. left: the steps of this start."""
    line, steps = log[-1], left[-1]
    if line["step"] == left[0] and line["truncated"] == line["zero_advantage"] == 1:
        tqdm.write("every reply is cut at --max-new-tokens and none is paid more than another: raise it")
    accuracy = next(x["accuracy"] for x in reversed(log) if x["accuracy"] is not None)
    bar.set_postfix_str(f"reward {line['reward']:.2f} accuracy {accuracy:.2f}", refresh=False)
    bar.update()
    if bar.disable and RANK == 0 and (due(max(steps // 20, 1), line["step"]) or line["step"] == steps):
        print(f"step {line['step']} of {steps}: reward {line['reward']:.3f}, accuracy {accuracy:.3f},"
              f" {line['seconds']:.0f} s", flush=True)

def show_replies(step, problems, texts):
    for problem, text in zip(problems[:2], texts):
        tqdm.write(textwrap.shorten(f"[{step}] {problem['question']} (right: {problem['answer']})", 78))
        tqdm.write(textwrap.shorten(f"    {text!r}", 78, initial_indent="    "))

def due(every, step):
    return every > 0 and step % every == 0

# --- The run --------------------------------------------------------------------------------------

def settings_of(flags):
    """What the methods are told. --eta-in is a multiple of --lr, m3's eta_in is the product."""
    settings = m3.Settings(**{name: vars(flags)[name] for name in m3.Settings._fields if name in vars(flags)})
    return settings._replace(eta_in=flags.eta_in * flags.lr)

def find_device(flags):
    """The device of this process; with torchrun, the processes know each other from here on."""
    with or_fail(f"--device {flags.device} cannot be used"):
        if WORLD > 1:
            torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if "cuda" in flags.device else "gloo")
            if RANK > 0:
                sys.stdout = io.StringIO()
        here = f":{os.environ['LOCAL_RANK']}" if WORLD > 1 and flags.device == "cuda" else ""
        tried = torch.zeros(1, device=flags.device + here)
        tried.item()  # of a device without memory ("meta"): an error
        return tried.device

def train(flags):
    """sample -> reward -> score, conflict, seed, backward -> step -> log -> save. Returns the summary."""
    device = find_device(flags)
    out = pathlib.Path(gather(flags.out)[0])
    world = load(flags, device)
    run = set_up(flags, world, device)
    introduce(run, out, flags, device)
    interrupted = []  # from here on a signal ends the run after the step in hand, saved
    on_stop(lambda number, frame: interrupted.append(number))
    log, s_bar, saved = (resume if flags.resume else start)(run, world, out, flags)
    settings = settings_of(flags)
    memory = {"micro_batch": flags.micro_batch, "chunk": flags.vocab_chunk,
              "checkpointing": flags.gradient_checkpointing}
    broken = 0
    left = steps_left(flags, log)
    quiet = True if RANK else None  # None: no bar in a log file
    bar = tqdm(initial=len(log) - 1, total=flags.steps, ncols=78, disable=quiet)
    for step in left:
        tick = time.time()

        # --- 1. sample: G responses to each of P problems ---
        drawn = m3.draw_problems(len(world.problems), flags.prompts_per_step, flags.seed, step)
        problems = [world.problems[i] for i in drawn]
        generator = torch.Generator().manual_seed(flags.seed * 1_000_003 + step)
        rollouts = roll_out(run, world, flags, problems, generator)

        # --- 2. reward: the verifier pays 0 or 1; the group is its own baseline ---
        rewards = grade(rollouts, device)  # [B]
        batch = to_batch(rollouts, rewards, world, flags)

        # --- 3. score, find the conflicts, seed, go backward, combine ---
        kdr = None  # the isotropic kernel needs no model
        if flags.kernel != "logit":
            kdr = functools.partial(ntk.kdr_flat, run.model, kernel=flags.kernel, generator=generator)
        result = m3.m3_step(run.student, run.teacher, batch, flags.method, run.params,
                            settings._replace(step=step, generator=generator), s_bar, kdr,
                            due(flags.stats_every, step), due(flags.kdr_every, step), add_up, **memory)
        s_bar = result.s_bar
        extra = {}
        if due(flags.occupancy_every, step):
            extra = ntk.occupancy_step(run.student, run.teacher, batch, run.params, settings,
                                       flags.group_size, add_up, **memory)

        # --- 4. step ---
        grad_norm = take_step(run, result.update, flags.clip)
        broken = 0 if math.isfinite(grad_norm) else broken + 1
        if broken:
            keep_broken(out, step, grad_norm, rollouts, rewards)
        elif run.moving:
            with torch.no_grad():
                run.moving(list(run.frozen.parameters()), run.params, step)

        # --- 5. log ---
        line, seen = log_line(step, flags, rollouts, rewards, batch, result, world.eos_ids)
        line = without_infinities(line | extra | {"grad_norm": grad_norm})
        line["tokens_per_second"] = seen["length"].sum().item() / (time.time() - tick)  # without evaluation
        line["collapsed"] = step >= 10 and all(x["reward"] < 0.05 for x in [*log[-9:], line])
        done = step == flags.steps or (flags.stop_on_collapse and line["collapsed"])
        evaluated = due(flags.eval_every, step) or done
        if evaluated:
            line["accuracy"], texts = evaluate(run.model, world, flags)
            show_replies(step, world.held_out, texts)
        if evaluated or step in (1, flags.steps // 2):
            keep_samples(out, step, problems, rollouts, batch, result.seen, world.tokenizer,
                         seen["reward"].tolist())
        line["seconds"] = log[-1]["seconds"] + time.time() - tick
        log.append(line)
        append_line(out / "metrics.jsonl", line)
        show_progress(bar, log, left)
        if broken == 3:
            fail("three non-finite steps in a row: lower --lr, or start from the last checkpoint", code=1)

        # --- 6. save ---
        stop = max(gather(interrupted[0] if interrupted else 0))  # a signal to one is a signal to all
        if due(flags.save_every, step) or done or stop:
            saved.append(step)
            if RANK == 0:
                save_checkpoint(out, step, run, world, s_bar, saved)
            gather(None)  # nobody leaves before it is written
        if stop:
            bar.close()
            again = f"--resume {out}{' --probe' * flags.probe}"
            fail(f"stopped by signal {stop} after step {step}; saved. Go on with {again}", 128 + stop)
        if done:
            break
    bar.close()
    return end_run(run, world, out, flags, log, saved)

def without_infinities(line):
    odd = [name for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
    return line | dict.fromkeys(odd)

# --- After the last step: summary, picture, report ------------------------------------------------

def end_run(run, world, out, flags, log, saved):
    """What is left of a run. Returns its summary."""
    extra = measure_end(run, world, out, flags, log, saved)
    summary = summarize(out, flags, log, len(world.held_out), extra)
    if RANK == 0:
        with contextlib.suppress(ModuleNotFoundError):  # no matplotlib, no picture
            plot([out], out / "curves.png")
        report(out)
    return summary

def measure_end(run, world, out, flags, log, saved):
    """What is measured once: how a distillation stalled [VLS], and the mean of two checkpoints."""
    extra, base, other, prompts = {}, world.base, world.other, [row["prompt_ids"] for row in world.held_out]

    def load_checkpoint(folder):
        return type(base).from_pretrained(folder, dtype=base.dtype).to(base.device).eval()

    if flags.method == "opd":
        print("measuring how far the distillation came", flush=True)
        losses, norms = ([line[key] for line in log[1:]] for key in ("loss_D", "grad_norm"))
        extra["signal_drop"] = ntk.signal_drop(losses, norms, 30) if len(losses) > 30 else None
        with m3.lora_off(base):  # as it was before the first step
            extra["accuracy_teacher"], _ = evaluate(run.frozen, world, flags, "teacher_ids")
            extra |= ntk.stall(base, load_checkpoint(newest_checkpoint(out)), prompts, losses)
            if type(other) is type(base) and other.config.hidden_size == base.config.hidden_size:
                moved = ntk.stall(base, other, prompts, losses)  # how far RL moved the self-RL teacher
                extra |= {"d_par_teacher": moved["d_par"], "cka_min_teacher": moved["cka_min"]}
    if flags.swa:  # of merged weights: with LoRA, the mean of A times the mean of B would be another model
        folders = [out / f"checkpoint-{step}" for step in saved]  # this run's: none abandoned by going back
        whole = [folder for folder in folders if complete(folder)]
        if len(whole) < 2:
            print("--swa: only one checkpoint, nothing to average: lower --save-every")
            return extra
        both = [load_checkpoint(folder) for folder in whole[-2:]]
        for same in zip(*(model.parameters() for model in both)):
            same[0].data = torch.stack(same).detach().mean(0)
        extra["accuracy_swa"], _ = evaluate(both[0], world, flags)
    return extra

def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None

def summarize(out, flags, log, held_out, extra):
    """summary.json and the table a user sees at the end."""
    steps, accuracy = log[1:], [line["accuracy"] for line in log if line["accuracy"] is not None]
    before, after, count = accuracy[0], accuracy[-1], log[-1]["step"]
    if extra.get("accuracy_teacher", before) != before:
        extra["gap_recovery"] = (after - before) / (extra["accuracy_teacher"] - before)
    first, last = (mean(line["reward"] for line in part) for part in (steps[:20], steps[-20:]))
    at = next((line["step"] for line in steps if line["collapsed"]), None)
    summary = {"method": flags.method, "seed": flags.seed, "steps": count, "accuracy_start": before,
               "accuracy_end": after, "reward_first20": first, "reward_last20": last, "collapsed_at": at,
               "seconds": log[-1]["seconds"], **extra}
    for name in "kappa", "conflict", "conflict_rewarded":
        summary[f"{name}_mean"] = mean(line[name] for line in steps)
    replace_text(out / "summary.json", json.dumps(summary, indent=1))
    print(f"""
                  before   after
greedy accuracy   {before:6.3f}  {after:6.3f}  ({held_out} held-out problems)
sampled reward    {first:6.3f}  {last:6.3f}  (mean of the first and last {min(20, count)} steps)
collapsed         {'no' if at is None else f'at step {at}'}, {count} steps in {summary['seconds']:.0f} seconds
look at           {out}/report.html
beside it         summary.json, curves.png, metrics.jsonl, samples.jsonl, and
                  last/, the model: from_pretrained loads it""")
    return summary

PAGE = """<!DOCTYPE html><meta charset="utf-8"><title>M3 run</title>
<style>body{font:15px/1.5 sans-serif;max-width:1100px;margin:2em auto;padding:0 1em} img{width:100%}
.reply{font:14px/2.1 monospace} .reply span{padding:3px 5px} td{padding:0 1em 0 0}</style>"""
COLOURS = """<h2>Where teacher and reward agree (blue) and where they conflict (red)</h2>
<p>Colour: cos &phi;<sub>n</sub> of each sampled token; grey where there is no reward signal. Point at a token
for its numbers; &alpha;<sub>n</sub> is the teacher's share.</p>"""

def report(out):
    """OUT/report.html: a run as one page that loads nothing: curves, replies token by token, settings."""
    config, summary = read_json(out / "config.json"), read_json(out / "summary.json")
    looked = [line for line in read_log(out / "samples.jsonl") if "tokens" in line]
    before, after = summary["accuracy_start"], summary["accuracy_end"]
    page = [PAGE, f"<h1>{html.escape(config['method'])}, {summary['steps']} steps</h1>",
            f"<p>Greedy accuracy {before:.3f} before, {after:.3f} after.</p>"]
    if (out / "curves.png").exists():
        picture = base64.b64encode((out / "curves.png").read_bytes()).decode()
        page.append(f'<img alt="curves" src="data:image/png;base64,{picture}">')
    page.append(COLOURS)
    for i in sorted({0, len(looked) // 2, len(looked) - 1}) if looked else ():
        line = looked[i]
        title = html.escape(f"Step {line['step']}: {line['prompt']} (right: {line['answer']})")
        page.append(f"<h3>{title}</h3>")
        for tokens, paid, advantage in zip(line["tokens"], line["rewards"], line["advantages"]):
            share = mean(alpha for _, _, alpha in tokens)
            words = [(text.replace("\n", "\u21b5"), cos, f"cos {cos:+.3f}, alpha {alpha:.3f}")
                     for text, cos, alpha in tokens]
            page.append(f"<p>reward {paid:.0f}, A = {advantage:+.2f}, mean &alpha; {share:.3f}<br>"
                        f'<span class="reply">{ntk.heat_html(words)}</span></p>')
    rows = [f"<tr><td>{dashed(name)}<td>{html.escape(str(value))}" for name, value in config.items()]
    page.append(f"<details><summary>Settings</summary><table>{''.join(rows)}</table></details>")
    replace_text(out / "report.html", "\n".join(page))

# Panels of a picture: key in the log, title, over how many steps, scale; "against" in a title: another x.
PANELS = [("reward", "sampled reward, mean of 10 steps", 10, "linear"),
          ("accuracy", "greedy accuracy", 1, "linear"),
          ("kappa", r"$\kappa = |g_R|\,/\,|g_D|$, mean of 10; dotted: 5000", 10, "log"),
          ("conflict", "conflict share, mean of 10 steps", 10, "linear")]
TEACHER_PANELS = [("loss_D", "distillation loss L, median of 9 steps", 9, "log"), PANELS[1],  # those of [VLS]
                  ("mu", r"$\mu = |g|^2\,/\,2L$, median of 9 steps", 9, "log"),
                  ("mu", r"$\mu$ against the share of L that remains", 9, "log")]

def curve(runs, key, window, middle):
    """{step: [of each run, the mean (or median, if `middle`) of the last `window` known values]}."""
    points = {}
    for log in runs:
        recent = []
        for line in log:
            if line.get(key) is not None:
                recent = [*recent, line[key]][-window:]
                value = sorted(recent)[len(recent) // 2] if middle else mean(recent)
                points.setdefault(line["step"], []).append(value)
    return dict(sorted(points.items()))

def read_runs(folders):
    """{name of a setting: the logs of its seeds}, and the flags in which the settings differ."""
    configs, logs, named = [], [], {}
    for folder in map(pathlib.Path, folders):
        with or_fail(f"--plot: cannot read the config.json and metrics.jsonl of {folder}"):
            configs.append(read_json(folder / "config.json"))
            logs.append(read_log(folder / "metrics.jsonl"))
            assert all(type(line["step"]) is int for line in logs[-1]), "steps are no numbers"
    apart = [key for key in configs[0] if key not in (*NEUTRAL, "seed")
             and any(config.get(key) != configs[0][key] for config in configs)] or ["method"]
    for config, log in zip(configs, logs):
        words = [("" if key in ("method", "teacher") else f"{dashed(key)} ") + str(config.get(key))
                 for key in apart]
        named.setdefault(", ".join(words), []).append(log)
    return named, apart

def plot(folders, file):
    """Panels from logs alone, of what was measured, a line per method, teacher or other flag: mean and range
    over seeds. Of more than six lines, each half or third gets panels of its own."""
    from matplotlib.figure import Figure
    logs, apart = read_runs(folders)
    teachers = "teacher" in apart
    measured = {key for runs in logs.values() for log in runs for line in log
                for key, value in line.items() if value is not None}
    panels = [panel for panel in (TEACHER_PANELS if teachers else PANELS) if panel[0] in measured]
    blocks, rows = math.ceil(len(logs) / 6), max(math.ceil(len(panels) / 2), 1)  # rows of two in each block
    lines = math.ceil(len(logs) / blocks)
    figure = Figure(figsize=(11, 3.75 * rows * blocks), layout="tight")
    axes = figure.subplots(rows * blocks, 2).reshape(blocks, -1)
    for number, (name, runs) in enumerate(logs.items()):
        look = {"color": f"C{number % lines}", "linewidth": 1.8}
        for axis, (key, title, window, scale) in zip(axes[number // lines], panels):
            points = curve(runs, key, window, teachers)
            x, values = list(points), list(points.values())
            if "against" in title:
                loss = {step: mean(some) for step, some in curve(runs, "loss_D", window, teachers).items()}
                x = [loss[step] / (loss[min(loss)] or 1) for step in points]
            else:
                low, high = [min(some) for some in values], [max(some) for some in values]
                axis.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            axis.plot(x, [mean(some) for some in values], label=name, **look)
            axis.set_title(title, fontsize=14)
            axis.set_xlabel("L / L at step 1" if "against" in title else "step", fontsize=12)
            axis.set_yscale(scale)
            axis.tick_params(labelsize=11)
            axis.grid(alpha=0.25)
    for block in axes:
        block[0].legend(fontsize=11)
        for axis, (key, _, _, scale) in zip(block, panels):
            if scale == "linear":  # a share: of 1, where it is not a small one
                axis.set_ylim(0, 1 if axis.dataLim.y1 > 0.2 else None)
            elif key == "kappa":
                axis.axhline(5000, color="gray", linestyle=":")  # beyond it: M3-Select, says [M3]
        for spare in block[len(panels):]:
            spare.remove()
    figure.savefig(file, dpi=110)
    print(f"wrote {file}")

# --- Many runs ------------------------------------------------------------------------------------

def one_of(flags, name, seed, out):
    """The flags of one run of a comparison, checked as if they had been typed."""
    what = {"method": name} if name in m3.METHODS else {"method": "opd", "teacher": name}
    run = config_of(flags) | what | {"seed": seed, "threads": 1, "out": str(out / f"{name}-{seed}")}
    return parse_flags(as_argv(run))

def start_run(run):
    """A process for one run of a comparison, in a session of its own: Ctrl-C reaches it by way of us."""
    config = config_of(run)
    if standing(pathlib.Path(run.out), run) == "broken":
        del config["date"]  # it keeps its own day
        config["resume"] = run.out
    with open(f"{run.out}.log", "a", encoding="utf-8") as log:
        return subprocess.Popen([sys.executable, __file__, *as_argv(config)], stdout=log, stderr=log,
                                start_new_session=True, env=os.environ | {"M3_PARENT": str(os.getpid())})

def run_all(todo):
    """One process per core until all are done. A signal ends them, saved, and then this process."""
    waiting, running, failed, signals, begun = list(todo), {}, [], [], time.time()
    on_stop(lambda number, frame: signals.append(number))
    while running or (waiting and not signals):
        while waiting and not signals and len(running) < os.cpu_count():
            run = waiting.pop(0)
            running[start_run(run)] = run
        time.sleep(0.1)
        for child in list(running):
            if signals:
                child.terminate()  # again and again does no harm
            if child.poll() is None:
                continue
            run, code = running.pop(child), child.returncode
            done = len(todo) - len(waiting) - len(running)
            left = (time.time() - begun) / done * (len(todo) - done) / 60
            what = f"ended with {code}" if code else "is done"
            print(f"{run.out} {what}: {done} of {len(todo)} runs, {left:.0f} minutes left", flush=True)
            if code:
                said = pathlib.Path(f"{run.out}.log").read_text("utf-8", "replace").strip()
                failed.append((f"{run.out}.log: {said.splitlines()[-1] if said else code}", max(code, 1)))
            if code == 2:  # a user's mistake, and the others would make it as well
                waiting.clear()
    if signals:
        fail(f"stopped by signal {signals[0]}, all is saved: the same command goes on", 128 + signals[0])
    if failed:
        fail(*failed[0])

def compare(flags):
    """METHODS or TEACHERS x seeds, one table. Finished runs of these flags are kept, broken ones resumed."""
    out, names = make_folder(flags.out or f"runs/{flags.preset or 'compare'}"), list(flags.compare)
    with locked(out):
        runs, todo = {}, []
        for name in m3.METHODS if names[0] in m3.METHODS else ["privileged", *TOY_TEACHERS]:
            if name not in names and not (out / f"{name}-0" / "config.json").exists():
                continue
            some = [one_of(flags, name, seed, out) for seed in range(flags.seeds)]
            left = [run for run in some if standing(pathlib.Path(run.out), run) != "finished"]
            if name in names or not left:  # an earlier comparison's rows stay in the table
                runs[name] = some
                todo += left
        if flags.model in TASKS:  # made before the children start, so that it is made once
            for kind in sorted({"base", flags.teacher, *names} & {"base", *TOY_TEACHERS}):
                toy_model(kind, flags.model)
        count = len(runs) * flags.seeds
        print(f"{count} runs in {out}, {len(todo)} to train, {os.cpu_count()} at a time", flush=True)
        run_all(sorted(todo, key=lambda run: run.seed))
        text = tabulate(runs)
        replace_text(out / "table.md", text)
        spread = f"mean ± standard deviation over {flags.seeds} seeds, " if flags.seeds > 1 else ""
        print(f"{text}{spread}saved in {out}/table.md")
        plot([run.out for some in runs.values() for run in some], out / "curves.png")

def tabulate(runs):
    """Markdown, a row per method or teacher, mean ± deviation over seeds. runs: {name: [flags of a run]}."""
    methods = set(runs) <= set(m3.METHODS)
    columns = ["accuracy_start", "accuracy_end", *(
        "reward_first20 reward_last20 kappa_mean conflict_mean" if methods else
        "accuracy_teacher gap_recovery loss_reduction_max loss_reduction_final gamma d_par cka_min").split()]
    head = ["method" if methods else "teacher", *columns, "collapsed", "at step"]
    table = [head, ["---"] * len(head)]
    for name, some in runs.items():
        row, ended = [name], [read_json(pathlib.Path(run.out) / "summary.json") for run in some]
        for column in columns:
            known = [run[column] for run in ended if run.get(column) is not None]
            spread = f" ± {torch.tensor(known).std().item():.2g}" if len(known) > 1 else ""
            row.append(f"{mean(known):.3g}{spread}" if known else "-")
        at = [str(run["collapsed_at"]) for run in ended if run["collapsed_at"] is not None]
        table.append([*row, f"{len(at)} of {len(ended)}", ", ".join(at) or "-"])
    return "".join("| " + " | ".join(row) + " |\n" for row in table)

# --- python train.py ------------------------------------------------------------------------------

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
    with claim(flags):
        summary = train(flags)
    if flags.probe:
        kappa = summary["kappa_mean"]
        if kappa is None:
            fail("--probe: no step had a reward signal: raise --prompts-per-step or --group-size", code=1)
        print(ntk.probe_verdict(kappa, summary["conflict_mean"])[1])
    if WORLD > 1:
        torch.distributed.destroy_process_group()

@contextlib.contextmanager
def no_traceback():
    """A signal, a full memory, a missing package end the program in one line; what was begun is tidied up."""
    def stop(number, frame):
        raise KeyboardInterrupt

    with contextlib.redirect_stdout(Printer(sys.stdout)), contextlib.redirect_stderr(Printer(sys.stderr)):
        on_stop(stop)
        try:
            yield
        except torch.OutOfMemoryError:
            fail("out of memory: lower --micro-batch, --vocab-chunk or --max-new-tokens,"
                 " or add --gradient-checkpointing", code=1)
        except ModuleNotFoundError as error:
            fail(f"a package is missing: pip install {error.name.split('.')[0]}")
        except KeyboardInterrupt:  # from the first step on, Ctrl-C is train()'s: it saves
            fail("stopped before the first step: nothing to save", code=130)

def main(argv=None):
    end_with_parent()
    with no_traceback():
        flags = parse_flags(argv)
        try:
            if flags.plot is not None:
                logs = pathlib.Path("runs").glob("*/metrics.jsonl")
                newest = sorted((log.parent for log in logs), key=lambda run: run.stat().st_mtime)[-1:]
                folders = flags.plot or newest
                if not folders:
                    fail("--plot: there is no run in runs/ yet: name a FOLDER")
                among = os.path.commonpath([os.path.abspath(folder) for folder in folders])
                plot(folders, pathlib.Path(os.path.relpath(among)) / "curves.png")  # a run keeps its own
            elif flags.compare:
                compare(flags)
            else:
                one_run(flags)
        except OSError as error:
            fail(f"the disk failed ({error}); once that is mended, {how_to_go_on(flags.out)}", code=1)

if __name__ == "__main__":
    main()
