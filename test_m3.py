"""pytest                        everything that proves the mathematics; CPU, no download, some minutes
pytest -m benchmark -s        speed and memory, one JSON line each

Every formula is checked against something that does not share its code: float64 autograd, a plain loop, a
case worked by hand, an identity from the paper, or an invariance.
"""

import ast
import contextlib
import copy
import csv
import datetime
import functools
import gc
import html
import inspect
import io
import json
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types

os.environ["HF_HUB_OFFLINE"] = "1"
import pytest
import torch
import torch.nn.functional as F
from torch import nn
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, BloomConfig,
                          BloomForCausalLM, CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM,
                          GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM, LlamaConfig,
                          LlamaForCausalLM, MistralConfig, Phi3Config, PreTrainedTokenizerFast, Qwen2Config,
                          Qwen3Config, Qwen3ForCausalLM)
from transformers.masking_utils import eager_mask

import m3
import ntk
import train
from assets import phase_map, vls_table

HERE = pathlib.Path(__file__).parent
PAD, EOS = 0, 1


def tiny(kind="qwen3", seed=0, vocab=23, dtype=torch.float32, **kw):
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        model = GPT2LMHeadModel(config)
    else:
        config_class, model_class = {"qwen3": (Qwen3Config, Qwen3ForCausalLM),
                                     "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
        shape = dict(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                     initializer_range=0.3)
        if kind == "qwen3":
            shape["head_dim"] = 8
        model = model_class(config_class(**shape | kw))
    return model.eval().to(dtype)


def logits64(*shape, seed=0, scale=2.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


# --- residuals ----------------------------------------------------------------------------------------------


def topk_loss(student, teacher, k=16):
    """What [VLS App. E, H.2] descend: -sum_v sg(-q_v r_v) log p_S(v) over k likeliest words."""
    log_S, log_T = student.log_softmax(-1), teacher.log_softmax(-1)
    top = log_S.detach().topk(k).indices
    q, r = log_S.detach().gather(-1, top).softmax(-1), (log_S.detach() - log_T).gather(-1, top)
    return -(-(q * r) * log_S.gather(-1, top)).sum(-1)


@pytest.mark.parametrize("kind", ["fkl", "rkl", "jsd", "rkl-topk"])
@pytest.mark.parametrize("clip", [False, True])
def test_distill_residual_is_the_gradient(kind, clip):
    student, teacher = logits64(5, 7, 11).requires_grad_(), logits64(5, 7, 11, seed=1)
    D = m3.divergence(student, teacher, kind, lam=0.3, k=4)
    tau = D.median().item() + 1e-6 if clip else None
    loss = topk_loss(student, teacher, 4) if kind == "rkl-topk" else D
    if clip:
        loss = torch.where(tau > D, loss, 0.0)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    residual = m3.distill_residual(student.detach(), teacher, kind, lam=0.3, tau=tau, k=4)
    torch.testing.assert_close(residual, gradient, rtol=1e-10, atol=1e-12)
    if clip:  # a clipped token is left alone, wholly; some are, some are not
        assert (residual[D.detach() > tau] == 0).all()
        assert 0 < (tau < D).float().mean() < 1


def test_reward_residual_is_the_gradient_and_has_the_right_sign():
    z, y, A = logits64(3, 3, 5).requires_grad_(), torch.randint(0, 5, (3, 3)), torch.tensor([1.0, -2.0, 0.0])
    # B == N on purpose
    loss = -(A.double()[:, None] * z.log_softmax(-1).gather(-1, y[..., None])[..., 0]).sum()
    (gradient,) = torch.autograd.grad(loss, z)
    residual = m3.reward_residual(z.detach(), y, A.double())
    torch.testing.assert_close(residual, gradient, rtol=1e-10, atol=1e-12)
    before, after = (x.log_softmax(-1).gather(-1, y[..., None]) for x in (z, z - 0.01 * residual))
    moved = after - before
    assert (moved[0] > 0).all() and (moved[1] < 0).all() and (moved[2] == 0).all()
    per_token = m3.reward_residual(z.detach(), y, A.double()[:, None].expand(3, 3))
    assert torch.equal(per_token, residual)


def test_divergences_by_hand():
    T, S = torch.tensor([0.9, 0.1]).double().log(), torch.tensor([0.5, 0.5]).double().log()
    assert m3.divergence(S, T, "fkl").item() == pytest.approx(0.36806, abs=1e-5)
    # swapped weights: 0.32952
    assert m3.divergence(S, T, "jsd", lam=0.1).item() == pytest.approx(0.03360, abs=1e-5)
    # mixed logs: 0.21972
    assert m3.divergence(S, T, "jsd", lam=0.5).item() == pytest.approx(0.10175, abs=1e-5)
    teacher, student = torch.tensor([0.6, 0.2, 0.15, 0.05]).log(), torch.tensor([0.7, 0.25, 0.03, 0.02]).log()
    q = torch.tensor([0.7, 0.25]) / 0.95
    by_hand = (q * (torch.tensor([0.7, 0.25]) / torch.tensor([0.6, 0.2])).log()).sum()
    assert m3.divergence(student, teacher, "rkl-topk", k=2).item() == pytest.approx(by_hand.item(), abs=1e-6)
    lower = m3.divergence(torch.tensor([0.4, 0.3, 0.3]).log(), torch.tensor([0.8, 0.19, 0.01]).log(),
                          "rkl-topk", k=1)
    assert lower < 0  # no KL: reported raw
    whole = m3.divergence(student, teacher, "rkl").item()
    assert m3.divergence(student, teacher, "rkl-topk", k=99) == pytest.approx(whole)


def test_jsd_is_a_quarter_of_fkl_near_agreement_and_vanishes_at_the_ends():
    student = logits64(4, 9)
    teacher = student + 1e-4 * logits64(4, 9, seed=2)
    quarter = m3.distill_residual(student, teacher, "jsd") / m3.distill_residual(student, teacher, "fkl")
    torch.testing.assert_close(quarter, torch.full_like(quarter, 0.25), rtol=1e-2, atol=0)
    far = logits64(4, 9, seed=3)
    for lam, kind in ((1e-6, "fkl"), (1 - 1e-6, "rkl")):
        scaled = m3.divergence(student, far, "jsd", lam) / min(lam, 1 - lam)
        torch.testing.assert_close(scaled, m3.divergence(student, far, kind), rtol=1e-3, atol=0)


def test_padded_vocabulary_gives_no_nan():
    student, teacher = logits64(3, 8), logits64(3, 8, seed=1)
    cut = {"fkl", "rkl", "jsd", "rkl-topk"}
    for kind in cut:
        padded = [F.pad(x, (0, 2), value=-math.inf) for x in (student, teacher)]
        torch.testing.assert_close(m3.divergence(*padded, kind), m3.divergence(student, teacher, kind))
        torch.testing.assert_close(m3.distill_residual(*padded, kind)[:, :8],
                                   m3.distill_residual(student, teacher, kind))


def test_low_precision_logits_are_scored_in_float32():
    z = logits64(4, 300).bfloat16()
    assert m3.divergence(z, z.flip(-1)).dtype == torch.float32
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert m3.reward_residual(z[None], tokens, torch.ones(1)).dtype == torch.float32


# --- M3's own algebra ---------------------------------------------------------------------------------------


def test_normalize_keeps_zero_and_caps_the_norm():
    x = torch.stack([torch.zeros(6), torch.full((6,), 1e-3), torch.full((6,), 30.0)])
    n = m3.normalize(x, 0.1).norm(dim=-1)
    assert n[0] == 0 and n[1] == pytest.approx(math.sqrt(6) * 1e-3 / (math.sqrt(6) * 1e-3 + 0.1))
    assert 0.99 < n[2] < 1


def test_gates():
    K = torch.tensor([-1e-9, 0.0, 2.0])
    assert m3.gate_select(K, 0.15).tolist() == pytest.approx([0.0, 0.15, 0.15])
    signals = types.SimpleNamespace(weights=torch.ones(3), conflict=(K, K.sign()),
                                    delta_D=torch.randn(3, 5), delta_R=torch.randn(3, 5))
    settings = m3.Settings(alpha_max=0.15)
    assert m3.m3_norm(signals, settings)[1].tolist() == pytest.approx([0.15] * 3)  # whatever the conflict
    assert m3.m3_select(signals, settings)[1].tolist() == pytest.approx([0.0, 0.15, 0.15])
    cos = torch.tensor([-1.0, 0.0, 1.0])
    assert m3.gate_soft(cos, 0.2, 0.0).tolist() == pytest.approx([0.1] * 3)
    soft = m3.gate_soft(cos, 0.2, 2.0)
    assert soft[0] < soft[1] == 0.1 < soft[2] and soft[2].item() == pytest.approx(0.2 / (1 + math.exp(-2)))
    torch.testing.assert_close(m3.gate_soft(cos, 0.2, 1e4)[[0, 2]], m3.gate_select(cos, 0.2)[[0, 2]])


def test_m3_seed_mixes_unit_residuals():
    D, R = torch.tensor([[3.0, -3.0]]), torch.tensor([[0.0, 0.01]])
    signals = types.SimpleNamespace(delta_D=D, delta_R=R)
    seed, _ = m3.m3_seed(signals, m3.Settings(eps=1e-12), torch.tensor([0.25]))
    root = math.sqrt(0.5)
    torch.testing.assert_close(seed, torch.tensor([[0.25 * root, -0.25 * root + 0.75]]))


# --- advantages and weights ---------------------------------------------------------------------------------


def test_group_advantages():
    r = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    A = m3.group_advantages(r, 4)
    assert A[:4].tolist() == pytest.approx([0.75 / (0.5 + 1e-4)] + [-0.25 / (0.5 + 1e-4)] * 3)
    assert (A[4:] == 0).all() and A.abs().max() < 2
    population = m3.group_advantages(r, 4, "population")[0].item()
    assert population == pytest.approx(0.75 / (math.sqrt(3) / 4 + 1e-4))
    assert m3.group_advantages(r, 4, "none")[0].item() == 0.75
    assert (m3.group_advantages(torch.full((6,), 0.1), 3) == 0).all()  # a mean of 0.1s is not 0.1 in float32
    tiled = m3.group_advantages(torch.tensor([1.0, 1, 1, 0, 0, 0]), 3)
    # consecutive rows form a group; interleaved prompts would give means of 0.67 and 0.33
    assert (tiled == 0).all()
    for bad, size in ((torch.ones(1), 1), (torch.ones(5), 2), (torch.tensor([1.0, math.nan]), 2)):
        with pytest.raises(ValueError):
            m3.group_advantages(bad, size)
    with pytest.raises(ValueError, match="unbaised"):
        m3.group_advantages(r, 4, "unbaised")


def test_token_weights_pin_the_reduction():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    loss = torch.tensor([[0.5] * 6, [-0.25] * 6])
    assert (m3.token_weights(mask, 2) * loss).sum().item() == pytest.approx(0.125)
    assert (m3.token_weights(mask, 2, mask.sum()) * loss).sum().item() == pytest.approx(-0.0625)
    empty = torch.zeros(2, 3).bool()
    assert (m3.token_weights(empty, 2) == 0).all() and (m3.token_weights(empty, 2, empty.sum()) == 0).all()


# --- sampler ------------------------------------------------------------------------------------------------


PROMPTS = [[5, 6, 7, 8], [9, 4, 3, 2, 11, 12, 13], [14]]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_greedy_equals_generate_and_padding_does_not_matter(kind):
    model = tiny(kind)
    tokens, mask, logp = m3.sample(model, PROMPTS, 2, 12, 0.0, eos_ids=[EOS, 2], pad_id=PAD)
    for i, prompt in enumerate(PROMPTS):
        reference = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(),
                                   do_sample=False, max_new_tokens=12, eos_token_id=[EOS, 2],
                                   pad_token_id=PAD)[0, len(prompt):]
        for row in (2 * i, 2 * i + 1):
            assert tokens[row][mask[row]].tolist() == reference.tolist()


def test_sampler_mask_logprobs_and_uniforms():
    model = tiny()
    for count, temperature in ((0, 1.0), (4, -1.0)):
        with pytest.raises(ValueError, match="max_new_tokens"):
            m3.sample(model, PROMPTS, 2, count, temperature, eos_ids=[EOS], pad_id=PAD)
    with pytest.raises(ValueError, match="empty prompt"):
        m3.sample(model, [*PROMPTS, []], 2, 4, eos_ids=[EOS], pad_id=PAD)
    uniforms = torch.rand(12, 10, generator=torch.Generator().manual_seed(0))
    tokens, mask, logp = m3.sample(model, PROMPTS, 4, 10, 0.7, eos_ids=[EOS, 2, 3], pad_id=PAD,
                                   uniforms=uniforms)
    assert mask.any(1).all() and 0 < mask.float().mean() < 1
    for row in range(12):
        n = int(mask[row].sum())
        assert mask[row, :n].all() and not mask[row, n:].any() and (tokens[row, n:] == PAD).all()
        body = tokens[row, : n - 1]
        assert not torch.isin(body, torch.tensor([EOS, 2, 3])).any()  # the first end token is the last one in
        assert n == tokens.shape[1] or tokens[row, n - 1] in (EOS, 2, 3)
        full = torch.tensor([PROMPTS[row // 4] + tokens[row, :n].tolist()])
        reference = (model(full).logits[0, -n - 1:-1] / 0.7).log_softmax(-1)
        reference = reference.gather(-1, tokens[row, :n, None])[:, 0]
        torch.testing.assert_close(logp[row, :n], reference, rtol=1e-4, atol=1e-5)
    # a row's tokens depend on its own uniforms alone, not on who shares the batch
    alone, alone_mask, _ = m3.sample(model, PROMPTS[1:2], 4, 10, 0.7, eos_ids=[EOS, 2, 3], pad_id=PAD,
                                     uniforms=uniforms[4:8])
    for a, am, b, bm in zip(alone, alone_mask, tokens[4:8], mask[4:8]):
        assert a[am].tolist() == b[bm].tolist()
    assert len({tuple(t.tolist()) for t in tokens[4:8]}) > 1  # a group is not four copies

    def seeded(seed):
        generator = torch.Generator().manual_seed(seed)
        return m3.sample(model, PROMPTS, 2, 10, eos_ids=[EOS], pad_id=PAD, generator=generator)[0]

    assert torch.equal(seeded(1), seeded(1)) and not torch.equal(seeded(1), seeded(2))


@pytest.mark.parametrize("lora", [False, True])
def test_packed_weights_sample_the_same_and_leave_nothing_behind(lora):
    model = tiny(hidden_size=320, intermediate_size=640)
    if lora:
        m3.add_lora(model, 2, 0)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))

    def swapped():
        return [m for m in model.modules() if "forward" in vars(m)]

    def go():
        generator = torch.Generator().manual_seed(0)
        return m3.sample(model, PROMPTS, 2, 8, eos_ids=[EOS], pad_id=PAD, generator=generator)

    plain, before = go(), [p.clone() for p in model.parameters()]
    with m3.packed(model):
        if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            assert len(swapped()) == 2 * 3
            assert all(type(m) is (m3.LoRA if lora else torch.nn.Linear) for m in swapped())
        got = go()
        with m3.packed(model):  # once more changes no output
            again = go()
    assert not swapped()
    assert torch.equal(got[0], plain[0]) and torch.equal(again[2], got[2])
    torch.testing.assert_close(got[2], plain[2], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    for m in model.modules():  # the copies are of the weights as they are now
        if isinstance(m, torch.nn.Linear):
            m.weight.data.mul_(-1.5)
    turned = go()[2]
    with m3.lora_off(model):  # and of the base alone where its adapters are off
        base = go()[2]
        with m3.packed(model):
            torch.testing.assert_close(go()[2], base, rtol=1e-4, atol=1e-4)
    assert lora != torch.equal(base, turned)
    with pytest.raises(KeyError), m3.packed(model):
        torch.testing.assert_close(go()[2], turned, rtol=1e-4, atol=1e-4)
        raise KeyError
    assert not swapped()
    model.bfloat16()
    with m3.packed(model):
        assert not swapped()


def test_sampler_draws_from_the_model_and_not_from_its_generation_config():
    model = tiny()
    model.generation_config.temperature, model.generation_config.top_k = 0.01, 1
    tokens, _, _ = m3.sample(model, [[5, 6]], 4000, 1, eos_ids=[EOS], pad_id=PAD,
                             generator=torch.Generator().manual_seed(0))
    expected = model(torch.tensor([[5, 6]])).logits[0, -1].softmax(-1)
    observed = torch.bincount(tokens[:, 0], minlength=23) / 4000
    assert (observed - expected).abs().max() < 0.03


# --- scoring and gradients ----------------------------------------------------------------------------------


def each(prompts, G):
    """The prompt of every row: each G times."""
    return [p for p in prompts for _ in range(G)]


@contextlib.contextmanager
def shapes_read(backbone):
    """Collects the shapes of the ids that the backbone reads inside."""
    shapes = []
    hook = backbone.register_forward_pre_hook(lambda _, args, kw: shapes.append(tuple(kw["input_ids"].shape)),
                                              with_kwargs=True)
    yield shapes
    hook.remove()


def responses(model, G=3, N=9):
    return m3.sample(model, PROMPTS, G, N, eos_ids=[EOS, 2, 3], pad_id=PAD,
                     generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_hidden_states_equal_one_row_at_a_time(kind):
    model = tiny(kind)
    tokens, mask, logp = responses(model)
    h = m3.hidden_states(model.base_model, each(PROMPTS, 3), tokens, PAD)
    z = model.get_output_embeddings()(h)
    for row in range(len(tokens)):
        n = int(mask[row].sum())
        full = torch.tensor([PROMPTS[row // 3] + tokens[row, :n].tolist()])
        torch.testing.assert_close(z[row, :n], model(full).logits[0, -n - 1:-1], rtol=1e-4, atol=1e-4)
    scored = m3.log_softmax(z).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(scored[mask], logp[mask], rtol=1e-4, atol=1e-4)


def test_rows_in_any_order_read_each_distinct_prompt_once():
    model = tiny()
    tokens, mask, _ = responses(model)
    order = torch.tensor([7, 0, 3, 8, 1, 4, 2])  # 5 and 6 left out
    with shapes_read(model.base_model) as read:
        h = m3.hidden_states(model.base_model, each(PROMPTS, 3), tokens, PAD)
        some = m3.hidden_states(model.base_model, [PROMPTS[b // 3] for b in order], tokens[order], PAD)
    assert read == [(3, 6), (9, tokens.shape[1]), (3, 6), (7, tokens.shape[1])]
    torch.testing.assert_close(some[mask[order]], h[order][mask[order]], rtol=1e-5, atol=1e-5)


def test_gradients_through_shared_prompts_are_the_same_bits_with_two_threads():
    """Where rows of one prompt add up, a sum in the order of the threads would differ from run to run."""
    model, threads = tiny(hidden_size=64), torch.get_num_threads()
    prompts, tokens = each(torch.randint(3, 23, (2, 300)).tolist(), 16) * 2, torch.randint(3, 23, (64, 4))
    torch.set_num_threads(2)
    try:
        h = [m3.hidden_states(model.base_model, prompts, tokens, PAD) for _ in range(6)]
        grads = [torch.autograd.grad(x.sum(), list(model.base_model.parameters())) for x in h]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(p, q) for other in grads[1:] for p, q in zip(grads[0], other))


def plain_gradient(model, tokens, mask, advantages, G):
    """The reward loss of eq 2 by autograd, one row at a time, mean over responses of the mean over tokens."""
    loss = 0.0
    for row in range(len(tokens)):
        n = int(mask[row].sum())
        full = torch.tensor([PROMPTS[row // G] + tokens[row, :n].tolist()])
        logp = model(full).logits[0, -n - 1:-1].log_softmax(-1).gather(-1, tokens[row, :n, None])
        loss = loss - advantages[row] * logp.mean() / len(tokens)
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_seeded_backward_through_shared_prompts_and_chunks_equals_autograd(tied):
    model = tiny(dtype=torch.float64, tie_word_embeddings=tied)
    tokens, mask, _ = responses(model)
    A = torch.linspace(-1, 2, len(tokens), dtype=torch.float64)
    params, weights = list(model.parameters()), m3.token_weights(mask, len(tokens)).double()
    h = m3.hidden_states(model.base_model, each(PROMPTS, 3), tokens, PAD)[mask]
    leaf = h.detach().requires_grad_()
    into, leaf_grad = [torch.zeros_like(p) for p in params], torch.zeros_like(leaf)
    for c in (slice(0, 5), slice(5, 6), slice(6, len(leaf))):
        z = model.get_output_embeddings()(leaf[c])
        seed = m3.reward_residual(z.detach(), tokens[mask][c], A[:, None].expand_as(mask)[mask][c])
        m3.accumulate([leaf_grad, *into], z, [leaf, *params], seed * weights[mask][c, None])
    m3.accumulate(into, h, params, leaf_grad)
    for got, expected in zip(into, plain_gradient(model, tokens, mask, A, 3)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)  # norms and 1/N are float32


def test_masked_positions_have_no_effect():
    model = tiny()
    tokens, mask, _ = responses(model)
    junk = torch.where(mask, tokens, torch.randint(3, 23, tokens.shape))
    a, b = (m3.hidden_states(model.base_model, each(PROMPTS, 3), t, PAD)[mask] for t in (tokens, junk))
    assert torch.equal(a, b)


# --- the step -----------------------------------------------------------------------------------------------


def step_batch(model, G=3, seed=5):
    """Sampled replies to PROMPTS; every group has a reward signal; the teacher reads two more ids."""
    tokens, mask, _ = responses(model, G)
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1, 0])
    hints = each([prompt + [6, 2] for prompt in PROMPTS], G)
    return m3.Batch(each(PROMPTS, G), hints, tokens, mask, m3.group_advantages(rewards, G),
                    m3.token_weights(mask, len(mask)))


def plain_signals(model, teacher, batch, row):
    """Of one response, by a full forward pass in float64: logits with a graph, and both raw residuals."""
    n = int(batch.mask[row].sum())
    reply = batch.tokens[row, :n]
    z, z_T = (net(torch.tensor([list(prompt) + reply.tolist()])).logits[0, -n - 1:-1]
              for net, prompt in ((model, batch.prompts[row]), (teacher, batch.hints[row])))
    p_S, p_T = z.detach().softmax(-1), z_T.detach().softmax(-1)
    delta_R = -batch.advantages[row].double() * (F.one_hot(reply, z.shape[-1]) - p_S)
    return z, p_S - p_T, delta_R


def unit(delta, eps=0.1):
    return delta / (delta.norm(dim=-1, keepdim=True) + eps)


def plain_update(model, teacher, batch, seed_of):
    """Sum over responses of (1/N) J seed / B by plain autograd. seed_of(delta_D, delta_R) -> [n, V]."""
    total = 0.0
    for row in range(len(batch.tokens)):
        z, delta_D, delta_R = plain_signals(model, teacher, batch, row)
        total = total + (z * seed_of(delta_D, delta_R)).sum() / len(z) / len(batch.tokens)
    return torch.autograd.grad(total, list(model.parameters()))


def select(delta_D, delta_R, alpha_max=0.4):
    return alpha_max * ((delta_D * delta_R).sum(-1, keepdim=True) >= 0)


@pytest.mark.parametrize("memory", [{}, {"micro_batch": 4, "chunk": 5}])
def test_m3_select_step_equals_a_plain_one(memory):
    model, teacher = tiny(dtype=torch.float64), tiny(seed=1, dtype=torch.float64)
    batch = step_batch(model)
    want = plain_update(model, teacher, batch,
                        lambda D, R: select(D, R) * unit(D) + (1 - select(D, R)) * unit(R))
    got = m3.m3_step(m3.split_head(model), m3.split_head(teacher), batch, "m3-select",
                     list(model.parameters()), m3.Settings(alpha_max=0.4), **memory)
    norms = [plain_signals(model, teacher, batch, row)[2].norm(dim=-1) for row in range(len(batch.tokens))]
    assert got.s_bar == pytest.approx(torch.cat(norms).mean().item(), rel=1e-5)
    for ours, theirs in zip(got.update, want):
        torch.testing.assert_close(ours, (got.s_bar * theirs).float(), rtol=1e-4, atol=1e-6)


def test_a_step_frees_its_logits_without_the_garbage_collector():
    """[T, V] tensors that wait for it filled the memory: 22 GB after six steps of a model of 135M weights."""
    model, teacher = tiny(), tiny(seed=1)
    gc.collect()
    gc.disable()
    try:
        m3.m3_step(m3.split_head(model), m3.split_head(teacher), step_batch(model), "m3-soft",
                   list(model.parameters()), statistics=True)
        assert not any(type(x) in (m3.Signals, m3.MicroBatch) for x in gc.get_objects())
    finally:
        gc.enable()


def test_columns_of_a_log_do_not_depend_on_chunks():
    """A kernel asks the teacher for all chunks at once: of some micro-batches with several, of others not."""
    model, teacher = tiny(), tiny(seed=1)
    batch, kdr = step_batch(model), functools.partial(ntk.kdr_flat, model, kernel="local")
    lengths = batch.mask.sum(1).sort(descending=True).values
    chunk = int(lengths[:4].sum()) - 1  # the first of the micro-batches needs two chunks, the others one
    assert chunk > lengths[4:8].sum()
    seen = [m3.m3_step(m3.split_head(model), m3.split_head(teacher), batch, "grpo", list(model.parameters()),
                       kdr=kdr, look=True, micro_batch=4, chunk=size).seen
            for size in (chunk, 4096)]
    assert seen[0].keys() == seen[1].keys() >= {"K", "token_loss"}
    for name, column in seen[0].items():
        torch.testing.assert_close(column, seen[1][name])


@pytest.mark.parametrize("gate", ["select", "soft"])
def test_eg_step_equals_a_plain_one_and_peeks_in_the_teachers_direction(gate):
    """eq 15: theta~ = theta - eta m_D, the reward's gradient there, no s_bar; with + it is another."""
    model, teacher = tiny(dtype=torch.float64), tiny(seed=1, dtype=torch.float64)
    batch, eta, params = step_batch(model), 0.5, list(model.parameters())
    before = [p.detach().clone() for p in params]

    def m_D_seed(delta_D, delta_R):
        cos = F.cosine_similarity(delta_D, delta_R, dim=-1)[:, None]
        alpha = select(delta_D, delta_R) if gate == "select" else 0.4 * torch.sigmoid(3 * cos)
        return alpha * unit(delta_D)

    m_D = plain_update(model, teacher, batch, m_D_seed)
    there = {}
    for sign in (-1, 1):
        with torch.no_grad():
            torch._foreach_copy_(params, [p + sign * eta * g for p, g in zip(before, m_D)])
        there[sign] = plain_update(model, teacher, batch, lambda D, R: unit(R))
    with torch.no_grad():
        torch._foreach_copy_(params, before)
    settings = m3.Settings(alpha_max=0.4, beta=3.0, eta_in=eta, eg_gate=gate)
    got = m3.m3_step(m3.split_head(model), m3.split_head(teacher), batch, "m3-eg", params, settings)
    assert got.s_bar is None and all(torch.equal(p, q) for p, q in zip(params, before))
    far = sum((ours - other).norm() for ours, other in zip(got.update, there[1]))
    near = sum((ours - theirs).norm() for ours, theirs in zip(got.update, there[-1]))
    assert near < 1e-4 < 0.01 < far


@pytest.mark.parametrize("method", ["opd", "hybrid", "gradnorm", "m3-soft"])
@pytest.mark.parametrize("kind", ["rkl", "rkl-topk"])
def test_a_teacher_that_rules_words_out_clips_its_tokens(method, kind):
    """p_T = 0 where p_S > 0: D is infinite, its residual is no number, and the token's gradient is 0."""
    model, teacher = tiny(), tiny(seed=1)
    batch, (backbone, head) = step_batch(model), m3.split_head(teacher)

    def narrow(hidden):
        logits = head(hidden)
        ruled_out = logits[..., :1] > logits[..., 1:2]  # at some tokens, not at all
        return torch.cat([logits[..., :2], logits[..., 2:].masked_fill(ruled_out, -math.inf)], -1)

    got = m3.m3_step(m3.split_head(model), (backbone, narrow), batch, method, list(model.parameters()),
                     m3.Settings(divergence=kind))
    assert 0 < got.seen["clipped"].float().mean() < 1
    assert all(g.isfinite().all() for g in got.update) and any(g.any() for g in got.update)
    z_S, z_T = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, -math.inf], [0.0, 1.0, 2.0]])
    alone = m3.distill_residual(z_S, z_T, kind, tau=5.0)
    assert not alone[0].any() and alone[1].any() and alone.isfinite().all()


def test_micro_batches_without_a_token():
    model, teacher = tiny(), tiny(seed=1)
    batch = step_batch(model)
    mask = batch.mask.clone()
    mask[[1, 5]] = False
    batch = batch._replace(mask=mask, weights=m3.token_weights(mask, len(mask)))
    one, whole = (m3.m3_step(m3.split_head(model), m3.split_head(teacher), batch, "m3-select",
                             list(model.parameters()), micro_batch=size) for size in (1, 0))
    for a, b in zip(one.update, whole.update):
        torch.testing.assert_close(a, b)
    nothing = batch._replace(mask=mask & False, weights=0 * batch.weights)
    empty = m3.m3_step(m3.split_head(model), m3.split_head(teacher), nothing, "m3-select",
                       list(model.parameters()))
    assert not any(g.any() for g in empty.update)


@pytest.mark.parametrize("typo", [{"eg_gate": "Soft"}, {"zero_advantage": "skp"}, {"divergence": "kl"}])
def test_a_misspelt_setting_is_no_default(typo):
    model, teacher = tiny(), tiny(seed=1)
    with pytest.raises(KeyError, match=next(iter(typo.values()))):
        m3.m3_step(m3.split_head(model), m3.split_head(teacher), step_batch(model), "m3-eg",
                   list(model.parameters()), m3.Settings(**typo))


def test_rkl_topk_residual_holds_its_weights_fixed():
    """Exactly 0 where both models agree."""
    z_S, z_T = logits64(7, 40, seed=1).requires_grad_(), logits64(7, 40, seed=2)
    (want,) = torch.autograd.grad(topk_loss(z_S, z_T).sum(), z_S)
    torch.testing.assert_close(m3.distill_residual(z_S.detach(), z_T, "rkl-topk"), want)
    assert not m3.distill_residual(z_T, z_T, "rkl-topk").any()


def test_kappa_knows_only_steps_with_a_reward_signal(world, monkeypatch):
    broken = m3.geometry([torch.tensor([1.0, math.nan])], [torch.ones(2)])
    assert math.isnan(broken["kappa"]) and math.isnan(broken["phi"])
    nothing = dict(norm_R=0.0, norm_D=2 ** 0.5, kappa=None, phi=None)
    assert m3.geometry([torch.zeros(2)], [torch.ones(2)]) == nothing
    replies = iter([0, 1] * 8 + [1] * 16 + [0, 1] * 8)  # the second of three steps has no reward signal
    monkeypatch.setattr(train, "evaluate", lambda *args: (0.0, []))
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: next(replies))
    log = run(world, "--method", "hybrid", "--out", "kappa")[1:]
    alive = [log[0]["kappa"], log[2]["kappa"]]
    assert log[1]["kappa"] is log[1]["phi"] is log[1]["conflict_rewarded"] is None and min(alive) > 0
    summary = json.loads((world / "kappa/summary.json").read_text())
    assert summary["kappa_mean"] == pytest.approx(sum(alive) / 2)


def test_a_method_from_outside_is_one_entry(world, rewarded, monkeypatch):
    """A gate that listens to the teacher on conflict alone: not wise, but one function and one line."""

    def contrary(s, f):
        """the teacher on conflict alone"""
        K, _ = s.conflict
        return m3.m3_seed(s, f, f.alpha_max * (K < 0).float())

    monkeypatch.setitem(m3.METHODS, "contrary", m3.Method(contrary, scaled=True))
    ours = run(world, "--method", "contrary", "--out", "contrary")
    select = run(world, "--method", "m3-select", "--out", "contrary-not")
    assert ours[1]["conflict"] == select[1]["conflict"] > 0  # the same first batch
    assert ours[1]["alpha_eff"] == pytest.approx(0.15 * ours[1]["conflict"])
    assert select[1]["alpha_eff"] == pytest.approx(0.15 * (1 - ours[1]["conflict"]))
    with pytest.raises(KeyError):
        m3.m3_step((), (), None, "m3-sleect", [])


def test_a_divergence_from_outside_is_one_entry(world, rewarded, monkeypatch):
    monkeypatch.setitem(m3.DIVERGENCES, "mine", (m3.fkl, m3.fkl_residual))
    argv = ["--method", "opd", "--steps", "1"]
    mine, theirs = (run(world, *argv, "--divergence", kind, "--out", f"kl-{kind}")[1]
                    for kind in ("mine", "fkl"))
    assert mine == theirs and mine["loss_D"] > 0
    with pytest.raises(KeyError):
        m3.divergence(torch.zeros(2, 3), torch.zeros(2, 3), "tv")


def test_random_gate_closes_as_many_tokens_as_select(world, rewarded):
    both = [run(world, "--method", method, "--out", f"gate-{method}")[1]
            for method in ("m3-select", "m3-random")]
    assert both[0]["alpha_eff"] == pytest.approx(both[1]["alpha_eff"]) and both[0]["conflict"] > 0
    assert both[0]["grad_norm"] != both[1]["grad_norm"]


def readme_script():
    """The README's trainer without train.py, from its first import to its end."""
    blocks = (HERE / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    return next(block.split("```")[0] for block in blocks if "m3.m3_step(" in block)


def test_readme_script_agrees_with_the_program(world, rewarded, monkeypatch):
    script = readme_script()
    assert len([line for line in script.splitlines() if line.strip()]) <= 40
    assert not any("train" in line for line in script.splitlines() if "import" in line)
    rows = [row | {"kind": "toy"} for row in few_rows(4096, 0)]
    model = str(world / train.toy_path())
    for name, value in {"MODEL": repr(model), "ROWS": "rows", "STEPS": "3", "P, G": "4, 6"}.items():
        line = next(line for line in script.splitlines() if line.startswith(f"{name} = "))
        script = script.replace(line, f"{name} = {value}")
    shown = []
    exec(script, {"rows": rows, "print": lambda *values: shown.append(values)})
    log = run(world, "--prompts-per-step", "4", "--group-size", "6", "--max-new-tokens", "24",
              "--kernel", "local", "--micro-batch", "16", "--vocab-chunk", "256", "--out", "script")[1:]
    for (step, reward, norm), line in zip(shown, log, strict=True):
        assert step == line["step"] and reward == pytest.approx(line["reward"], abs=1e-6)
        assert norm == pytest.approx(line["grad_norm"], rel=1e-6)


def test_readme_lines_load_a_checkpoint_and_ask_it(world, capsys):
    blocks = (HERE / "README.md").read_text(encoding="utf-8").split("```python\n")[1:]
    lines = next(block.split("```")[0] for block in blocks if "from_pretrained(folder)" in block)
    assert '"runs/NAME/last"' in lines
    exec(lines.replace("runs/NAME/last", str(world / train.toy_path())), {})
    assert capsys.readouterr().out.startswith("Ann has 3 pens , gets 4 . How many ? Answer :")


# --- the program --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder to run in. Its cached toy base model is a small untrained one: no learning is tested here."""
    folder = tmp_path_factory.mktemp("world")
    model = tiny(vocab=len(train.TOY_WORDS), hidden_size=64, intermediate_size=128, head_dim=16,
                 max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, pad_token_id=PAD,
                 eos_token_id=EOS, initializer_range=0.1)
    model.save_pretrained(folder / train.toy_path())
    train.toy_tokenizer().save_pretrained(folder / train.toy_path())
    return folder


FAST = ["--steps", "3", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8",
        "--eval-limit", "4", "--eval-every", "2", "--save-every", "1", "--device", "cpu", "--threads", "1",
        "--kernel", "logit"]


def few_rows(n, *rest, toy_rows=train.toy_rows, **kw):
    """The first 256 problems of the toy world: enough for a few steps, and soon made and encoded."""
    return toy_rows(min(n, 256), *rest, **kw)


def run(world, *argv, code=0, read=True, pictures=False):
    """train.py in this process, as `python train.py` would run it. Its metrics without the time fields.

    To save time it has fewer problems, and draws its curves only if `pictures` says so.
    """
    here = os.getcwd()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    os.chdir(world)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "toy_rows", few_rows)
            if not pictures and not {"--plot", "--compare", "--compare-teachers"} & set(argv):
                patch.setattr(train, "plot", lambda folders, file: None)
            train.main([*FAST, *argv])
        assert code == 0
    except SystemExit as end:
        assert end.code == code, f"exit code {end.code}"
        return None
    finally:
        os.chdir(here)
        for number, handler in signals.items():  # a run's own would keep Ctrl-C from ending pytest
            signal.signal(number, handler)
    if not read:
        return None
    return records(world / argv[argv.index("--out" if "--out" in argv else "--resume") + 1])


def weights(world, out):
    from safetensors.torch import load_file
    return load_file(world / out / "last" / "model.safetensors")


@pytest.fixture
def rewarded(monkeypatch):
    """An untrained model never answers right. Paid by the length, the replies of a group differ in reward."""
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: len(text) % 2)


def keep_results(monkeypatch, module, name, kept):
    """Every result of module.name is appended to `kept` from now on."""
    original = getattr(module, name)

    def keeping(*args, **kw):
        kept.append(original(*args, **kw))
        return kept[-1]
    monkeypatch.setattr(module, name, keeping)


@pytest.fixture
def untried(monkeypatch):
    """No start-up check: for tests that count a run's own calls, or replace what it tries."""
    monkeypatch.setattr(train, "try_out", lambda *args: None)


def drawn_without_a_model(model, prompts, group_size, max_new_tokens, temperature=1.0, *, eos_ids, pad_id,
                          uniforms=None, **settings):
    """In place of m3.sample where runs of unlike arithmetic are compared. AdamW turns a rounding error in a
    gradient of about 0 into a whole step; sooner or later that turns a draw, on one processor or another, and
    every number after it differs. These replies depend on prompt and uniforms; the rest is the program's.
    """
    asked = torch.tensor([[sum(prompt) % 97] for prompt in prompts for _ in range(group_size)])
    if uniforms is None:  # greedy
        uniforms = torch.full((len(asked), max_new_tokens), 0.5)
    size = model.get_input_embeddings().num_embeddings
    tokens = 4 + (asked + uniforms * size).long() % (size - 4)
    lengths = 1 + (asked + uniforms[:, :1] * max_new_tokens).long() % max_new_tokens
    column = torch.arange(max_new_tokens)
    tokens = torch.where(column == lengths - 1, min(eos_ids), tokens)
    mask = column < lengths
    longest = int(lengths.max())
    return tokens.where(mask, pad_id)[:, :longest], mask[:, :longest], torch.zeros(len(asked), longest)


@pytest.mark.parametrize("method", list(m3.METHODS))
def test_every_method_trains_and_does_not_depend_on_the_batch_split(
        world, method, rewarded, untried, monkeypatch):
    monkeypatch.setattr(m3, "sample", drawn_without_a_model)
    a = run(world, "--method", method, "--steps", "2", "--out", f"{method}-a")
    named = set(train.METRICS) - {"seconds", "tokens_per_second"}
    assert [line["step"] for line in a] == [0, 1, 2] and all(set(line) >= named for line in a)
    assert all(line["grad_norm"] > 0 for line in a[1:])
    if method == "m3-random":  # each micro-batch draws among its own tokens
        return
    split = ["--micro-batch", "2", "--vocab-chunk", "5"]
    run(world, "--method", method, "--steps", "2", "--out", f"{method}-b", *split)
    start = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).state_dict()
    one, two = weights(world, f"{method}-a"), weights(world, f"{method}-b")
    moved = max((one[k] - start[k]).abs().max() for k in one)
    # AdamW's first steps are signs of gradients: where a gradient is about 0, rounding alone may turn one
    apart = torch.cat([(one[k] - two[k]).abs().flatten() for k in one])
    assert moved > 1e-4 and (apart < 1e-5).float().mean() > 0.995, (moved, apart.max())


def test_hybrid_ends_are_grpo_and_opd_bit_for_bit(world, rewarded):
    for alpha, method in (("0", "grpo"), ("1", "opd")):
        run(world, "--method", "hybrid", "--alpha", alpha, "--out", f"hybrid{alpha}")
        run(world, "--method", method, "--out", f"end-{method}")
        one, two = weights(world, f"hybrid{alpha}"), weights(world, f"end-{method}")
        assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(weights(world, "end-grpo")[k], weights(world, "end-opd")[k]) for k in one)


def test_seed_governs_everything(world, rewarded):
    a, b, c = (run(world, "--out", f"seed-{i}", "--seed", s) for i, s in enumerate("001"))
    assert a == b and a != c
    d = run(world, "--out", "seed-eval", "--seed", "0", "--eval-every", "1", "--stats-every", "0")
    # looking does not change what is seen
    assert [line["loss_D"] for line in d] == [line["loss_D"] for line in a]


def test_resume_is_bit_for_bit(world, rewarded):
    whole = run(world, "--out", "whole", "--steps", "4")
    run(world, "--out", "parts", "--steps", "2")
    with open(world / "parts" / "metrics.jsonl", "a") as file:
        # a line written after the last checkpoint, then a kill
        file.write(json.dumps({"step": 3, "reward": 9.0}) + "\n")
    parts = run(world, "--resume", "parts", "--out", "parts", "--steps", "4")
    assert [{k: v for k, v in x.items() if k != "accuracy"} for x in parts] == [
        {k: v for k, v in x.items() if k != "accuracy"} for x in whole]
    one, two = weights(world, "whole"), weights(world, "parts")
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_eg_takes_its_peek_back(world, rewarded):
    """With a vanishing --lr the outer step is nothing: weights that moved would be the inner step's."""
    run(world, "--method", "m3-eg", "--lr", "1e-14", "--out", "eg0", "--eta-in", "1e14")
    start = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).state_dict()
    assert all((v - start[k]).abs().max() < 1e-13 for k, v in weights(world, "eg0").items())
    run(world, "--method", "m3-eg", "--out", "eg1", "--eta-in", "0")
    run(world, "--method", "m3-eg", "--out", "eg2", "--eta-in", "1e4")
    assert any(not torch.equal(weights(world, "eg1")[k], v) for k, v in weights(world, "eg2").items())


def test_swa_is_the_mean_of_the_last_two_checkpoints(world, rewarded, monkeypatch):
    """Of the last two that this run wrote: an abandoned one, another run's, other folders do not count."""
    from safetensors.torch import load_file
    judged, out = [], world / "swa"

    def evaluate(model, *rest, original=train.evaluate):
        judged.append({name: value.clone() for name, value in model.state_dict().items()})
        return original(model, *rest)
    monkeypatch.setattr(train, "evaluate", evaluate)
    run(world, "--out", "swa", "--lr", "1e-2", "--steps", "4")
    (out / "last").unlink()
    (out / "last").symlink_to("checkpoint-2")  # back to step 2, on to step 3: checkpoint-4 is abandoned
    shutil.copytree(out / "checkpoint-1", out / "checkpoint-50")
    (out / "checkpoint-best").mkdir()
    run(world, "--resume", "swa", "--swa")
    two, three = (load_file(out / f"checkpoint-{step}/model.safetensors") for step in (2, 3))
    assert all(torch.allclose(judged[-1][name], (two[name] + three[name]) / 2) for name in two)
    assert any(not torch.equal(two[name], three[name]) for name in two)
    assert "accuracy_swa" in json.loads((out / "summary.json").read_text())
    assert (out / "checkpoint-best").exists() and (out / "checkpoint-50").exists()


def test_swa_of_one_checkpoint_is_none(world, rewarded, capsys):
    run(world, "--out", "swa-one", "--swa", "--steps", "1")
    assert "accuracy_swa" not in json.loads((world / "swa-one/summary.json").read_text())
    assert "--swa: only one checkpoint" in capsys.readouterr().out


def test_probe_ends_with_the_papers_rule(world, rewarded, capsys):
    run(world, "--probe", "--out", "probe")
    printed = capsys.readouterr().out
    assert "Caveat" in printed and json.loads((world / "probe" / "summary.json").read_text())["steps"] == 10


def test_compare_makes_one_table_and_goes_on_where_it_stopped(world, capsys):
    argv, out = ["--seeds", "2", "--out", "cmp"], world / "cmp"
    run(world, "--compare", "m3-select", *argv, read=False)
    table = (out / "table.md").read_text()
    assert table.count("\n") == 3 and "| m3-select |" in table and "±" in table
    assert (out / "curves.png").stat().st_size > 10_000
    assert "2 of 2 runs, 0 minutes left" in capsys.readouterr().out
    stamp = (out / "m3-select-0" / "summary.json").stat().st_mtime
    one = out / "m3-select-1"
    (one / "summary.json").unlink()  # as if killed before its end, then copied by something that drops links
    (one / "last").unlink()
    (one / "notes.txt").write_text("mine")
    run(world, "--compare", "m3-select", *argv, read=False)
    assert "goes on from cmp/m3-select-1/checkpoint-3" in (out / "m3-select-1.log").read_text()
    assert (one / "summary.json").exists() and (out / "table.md").read_text() == table
    assert (out / "m3-select-0" / "summary.json").stat().st_mtime == stamp
    assert (one / "notes.txt").read_text() == "mine" and (one / "checkpoint-1").exists()
    run(world, "--compare", "grpo", "--seeds", "1", "--out", "cmp", read=False)  # one more row, no spread
    table = (out / "table.md").read_text()
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| grpo", "| m3-select"]
    assert "±" not in table


def test_compare_refuses_what_it_did_not_make(world, capsys):
    out = world / "refused"
    run(world, "--method", "opd", "--out", "refused/opd-0", read=False)
    capsys.readouterr()
    for extra in (["--alpha-max", "0.5"], ["--lr", "0.001"], ["--steps", "4"], ["--temperature", "0.5"]):
        run(world, "--compare", "opd", "--seeds", "1", "--out", "refused", *extra, code=2)  # of other flags
        one_line(capsys, "refused/opd-0", *extra, "--out")
    (out / "grpo-0").mkdir()
    (out / "grpo-0" / "notes.txt").write_text("mine")
    run(world, "--compare", "grpo", "--seeds", "1", "--out", "refused", code=2)
    one_line(capsys, "refused/grpo-0", "notes.txt")
    run(world, "--compare", "rlsd", "--seeds", "1", "--lora-rank", "2", "--out", "refused-too", code=2)
    one_line(capsys, "--lora-rank 0")
    assert (out / "grpo-0" / "notes.txt").read_text() == "mine" and not (out / "table.md").exists()
    assert not list(out.glob("*.log"))  # no process was started


@pytest.mark.parametrize("name", ["model", "mixed", "unlogged", "foreign"])
def test_a_run_overwrites_nothing_of_others(world, rewarded, capsys, name):
    """--out may name a folder that exists: what it holds under a run's names, of no run, stays as it is."""
    out = world / "others" / name
    base = world / train.toy_path()
    if name == "model":
        shutil.copytree(base, out)
    elif name == "mixed":
        shutil.copytree(base, out / "checkpoint-2")
        (out / "last").write_text("precious")
    elif name == "unlogged":
        run(world, "--out", f"others/{name}", read=False)
        (out / "metrics.jsonl").unlink()
        (out / "last").unlink()
    else:
        out.mkdir(parents=True)
        (out / "metrics.jsonl").write_text("mine")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capsys.readouterr()
    run(world, "--out", f"others/{name}", "--seed", "5", code=2)
    one_line(capsys, f"others/{name}", "--out")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_run_goes_beside_what_it_does_not_touch(world, rewarded):
    (world / "beside").mkdir()
    (world / "beside" / "job.log").write_text("mine")
    run(world, "--out", "beside")
    assert (world / "beside" / "job.log").read_text() == "mine"


def test_standing_of_a_run(world, rewarded, monkeypatch):
    """new, broken, finished: by its flags, its checkpoints and its summary, not by the folder's name."""
    run(world, "--out", "stand", "--save-every", "2")
    monkeypatch.chdir(world)
    flags = train.parse_flags([*FAST, "--out", "stand", "--threads", "2", "--save-every", "9"])
    out = world / "stand"
    assert train.standing(out, flags) == "finished"  # --threads, --save-every change no result
    flags.steps = 9
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace('"steps": 3', '"steps": 9'))
    # taken further, then killed: that summary is of three steps
    assert train.standing(out, flags) == "broken"
    for name in ("checkpoint-2", "checkpoint-3", "last"):
        (out / name).rename(world / f"stand-{name}")
    assert train.standing(out, flags) == "new"  # killed before its first checkpoint
    (out / "checkpoint-5").mkdir()
    with pytest.raises(SystemExit):  # holds no weights, but who knows what
        train.standing(out, flags)
    (out / "checkpoint-5").rmdir()
    (out / "config.json").write_text(config)
    flags.steps = 3
    assert train.standing(world / "nowhere", flags) == "new" and train.standing(out, flags) == "new"
    before = (out / "metrics.jsonl").read_text()
    assert len(run(world, "--out", "stand")) == 4  # the same flags start in place
    assert [json.loads(line)["step"] for line in before.splitlines()] == [0, 1, 2, 3]


def test_a_collapsed_run_is_seen_and_may_stop(world, monkeypatch, capsys):
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: 0)
    lines = run(world, "--out", "fall", "--steps", "14", "--stop-on-collapse", "--method", "grpo")
    assert [line["step"] for line in lines if line["collapsed"]] == [10] and lines[-1]["step"] == 10
    assert json.loads((world / "fall" / "summary.json").read_text())["collapsed_at"] == 10
    assert len(run(world, "--resume", "fall", "--steps", "14")) == 11
    assert "with --no-stop-on-collapse and a larger --steps" in capsys.readouterr().out


def test_checkpoint_loads_as_an_ordinary_model(world, rewarded):
    run(world, "--out", "loads", pictures=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (c.from_pretrained(world / "loads" / "last")
                        for c in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("Ann has 7 pens , gets 5 . How many ? Answer :", return_tensors="pt")
    longer = model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert longer.shape[1] >= ids["input_ids"].shape[1]
    written = {"config.json", "metrics.jsonl", "samples.jsonl", "summary.json", "curves.png", "report.html",
               "checkpoint-1", "checkpoint-2", "checkpoint-3", "last"}
    assert {p.name for p in (world / "loads").iterdir()} == written
    summary = json.loads((world / "loads" / "summary.json").read_text())
    assert set(summary) == {"method", "seed", "steps", "accuracy_start", "accuracy_end", "reward_first20",
                            "reward_last20", "kappa_mean", "conflict_mean", "conflict_rewarded_mean",
                            "collapsed_at", "seconds"}


def test_report_is_one_page_that_loads_nothing(world, rewarded):
    out = world / "reported"
    run(world, "--method", "m3-select", "--out", "reported", pictures=True)
    page = re.sub(r"base64,[A-Za-z0-9+/=]*", "base64,", (out / "report.html").read_text(encoding="utf-8"))
    assert "http" not in page and "<script" not in page and "<link" not in page and "url(" not in page
    assert re.findall(r"src=.{6}", page) == ['src="data:']
    assert "3 steps" in page and "<td>--method<td>m3-select" in page.replace("\n", "")
    looked = [line for line in records(out, "samples") if "tokens" in line]
    assert looked[0]["step"] == 1 and looked[-1]["step"] == 3
    for line in (looked[0], looked[-1]):
        assert f"Step {line['step']}: {html.escape(line['prompt'])}" in page
        assert len(line["tokens"]) == len(line["advantages"]) == 4
        for text, cos, alpha in line["tokens"][0]:
            shown = html.escape(text.replace("\n", "\u21b5"))
            assert f'title="cos {cos:+.3f}, alpha {alpha:.3f}">{shown}</span>' in page
    before = (out / "samples.jsonl").read_text()
    (out / "samples.jsonl").write_text(before.replace(looked[0]["prompt"], "is 2 <script>&lt; 'x' & 3?"))
    train.report(out)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "is 2 &lt;script&gt;&amp;lt; &#x27;x&#x27; &amp; 3?" in page


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_log_file_is_plain_lines(world, rewarded, capsys):
    run(world, "--method", "grpo", "--out", "plain-lines")
    said = capsys.readouterr().out
    steps = re.findall(r"^step (\d) of 3: reward \d\.\d+, accuracy \d\.\d+, \d+ s$", said, re.M)
    assert steps == ["1", "2", "3"]
    terminal = Terminal()
    with contextlib.redirect_stderr(terminal):
        run(world, "--method", "grpo", "--out", "on-a-terminal")
    assert "step 1 of 3" not in capsys.readouterr().out and "3/3" in terminal.getvalue()
    bar = types.SimpleNamespace(disable=True, set_postfix_str=lambda *args, **kw: None, update=lambda: None)
    log = [dict(step=0, accuracy=0.5)]
    for step in range(1, 201):
        log.append(dict(step=step, accuracy=None, truncated=0, zero_advantage=0, reward=0.25, seconds=1.0))
        train.show_progress(bar, log, range(1, 201))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and lines[0].startswith("step 10 of 200: reward 0.250, accuracy 0.500")


def test_the_gates_share_on_misled_tokens_is_logged(world, rewarded, monkeypatch):
    """alpha_misled, alpha_honest: mean alpha of tokens with a reward signal, by their hint."""
    def by_row(s, f):
        """a share that tells the rows apart"""
        return m3.m3_seed(s, f, s.row / 100)

    kept, log_line = [], train.log_line

    def keeping(step, flags, rollouts, rewards, batch, *rest):
        kept.append((rollouts.asked, batch))
        return log_line(step, flags, rollouts, rewards, batch, *rest)

    monkeypatch.setitem(m3.METHODS, "by-row", m3.Method(by_row, scaled=True))
    monkeypatch.setattr(train, "log_line", keeping)
    lines = run(world, "--method", "by-row", "--hint-error", "0.5", "--out", "by-row", "--steps", "2",
                "--micro-batch", "3")[1:]
    seen = set()
    for line, (asked, batch) in zip(lines, kept, strict=True):
        shares = {"misled": [], "honest": []}
        for row, problem in enumerate(asked):
            name = "misled" if "misled" in problem else "honest"
            if batch.advantages[row] != 0:
                shares[name] += [row / 100] * int(batch.mask[row].sum())
        if any("misled" in problem for problem in asked):
            for name, values in shares.items():
                want = pytest.approx(sum(values) / len(values)) if values else None
                assert line[f"alpha_{name}"] == want
                seen |= {name} if values else set()
    assert seen == {"misled", "honest"}
    assert "alpha_misled" not in run(world, "--method", "grpo", "--steps", "1", "--out", "no-hint-error")[1]


def test_the_sampled_policy_is_the_scored_one(world, capsys):
    """Sampling has no filters: with one, log pi of eq 2 would be of another policy."""
    for argv in (["--top-k", "1"], ["--top-p", "0.9"], ["--min-p", "0.1"]):
        run(world, *argv, "--out", "filtered", code=2)
        one_line(capsys, argv[0])
    assert not (world / "filtered").exists()


def test_what_is_printed_fits_80_columns_and_names_the_report(world, rewarded, capsys):
    run(world, "--out", "narrow")
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80 and "narrow/report.html" in said
    assert "step 2 of 3: reward" in said  # standard error is no terminal here: lines in place of a bar
    page = (world / "narrow" / "report.html").read_text()
    assert "<h3>Step 1:" in page and 'class="reply"' in page and "--group-size<td>4" in page


def test_plot_takes_the_newest_run(world, rewarded, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        train.main(["--plot"])
    one_line(capsys, "no run in runs/")
    run(world, "--out", "plotted", pictures=True)
    for name, age in (("old", 100), ("new", 50)):
        shutil.copytree(world / "plotted", f"runs/{name}", symlinks=True)
        os.unlink(f"runs/{name}/curves.png")
        os.utime(f"runs/{name}", (time.time() - age,) * 2)
    train.main(["--plot"])
    assert os.path.exists("runs/new/curves.png") and not os.path.exists("runs/old/curves.png")


def test_a_run_needs_no_matplotlib(world, rewarded, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(world, "--out", "no-picture", "--steps", "1")
    page = (world / "no-picture" / "report.html").read_text()
    assert 'class="reply"' in page and "<img" not in page
    run(world, "--plot", "no-picture", code=2)
    one_line(capsys, "pip install matplotlib")


def test_a_picture_has_six_lines_a_panel_at_most(tmp_path):
    from matplotlib.image import imread
    for number in range(8):
        (tmp_path / str(number)).mkdir()
        config = {"method": f"m{number}", "teacher": "privileged"}
        (tmp_path / str(number) / "config.json").write_text(json.dumps(config))
        line = dict.fromkeys(train.METRICS) | {"step": 1, "reward": 0.5, "kappa": 2.0}
        (tmp_path / str(number) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    heights = []
    for count in (1, 6, 8):
        train.plot([tmp_path / str(number) for number in range(count)], tmp_path / "p.png")
        heights.append(imread(tmp_path / "p.png").shape[0])
    assert heights[0] == heights[1] == heights[2] // 2  # eight lines: two blocks of panels


def test_a_picture_names_the_flags_that_differ(world, rewarded, monkeypatch):
    from matplotlib.figure import Figure
    drawn = []
    for seed, lr in (0, "1e-4"), (1, "1e-4"), (0, "0.01"):
        run(world, "--out", f"lr/{lr}-{seed}", "--lr", lr, "--seed", str(seed), "--threads", str(1 + seed))
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, dpi: drawn.append((figure.axes, file)))
    run(world, "--plot", "lr/1e-4-0", "lr/1e-4-1", "lr/0.01-0", read=False)
    (axes, file), = drawn
    assert [line.get_label() for line in axes[0].lines] == ["--lr 0.0001", "--lr 0.01"]
    assert str(file) == os.path.join("lr", "curves.png")  # beside the runs: each keeps its own
    run(world, "--plot", "lr/0.01-0", read=False)
    assert str(drawn[1][1]) == os.path.join("lr", "0.01-0", "curves.png")
    assert [line.get_label() for line in drawn[1][0][0].lines] == ["m3-soft"]


def test_a_picture_has_panels_for_what_was_measured_alone(tmp_path, monkeypatch):
    from matplotlib.figure import Figure
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, dpi: drawn.append(figure.axes))
    known = {"reward": 0.5, "accuracy": 0.5, "kappa": 2.0, "conflict": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"method": "grpo", "teacher": "privileged"}))
    for names in (["accuracy"], ["reward", "accuracy"], ["reward", "accuracy", "conflict"], list(known)):
        line = dict.fromkeys(train.METRICS) | {"step": 1} | {name: known[name] for name in names}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        train.plot([tmp_path], tmp_path / "p.png")
        axes = drawn.pop()
        titles = [title for key, title, *_ in train.PANELS if key in names]
        assert [axis.get_title() for axis in axes] == titles
        assert all(axis.lines for axis in axes)
        dotted = [len(axis.lines) > 1 for axis in axes]
        assert dotted == [title.startswith(r"$\kappa") for title in titles]


@pytest.mark.parametrize("argv, word", [
    (["--no-such-flag"], "--no-such-flag"), (["--method", "m4"], "--method"),
    (["--group-size", "1"], "--group-size"), (["--lam", "1"], "--lam"),
    (["--micro-batch", "-1"], "--micro-batch"), (["--steps", "two"], "--steps"),
    (["--resume", "nowhere"], "--resume"), (["--temperature", "0"], "--temperature"),
    (["--plot", "nowhere"], "--plot")])
def test_a_users_mistake_ends_with_2_and_one_line(world, capsys, argv, word):
    run(world, *argv, code=2)
    error = capsys.readouterr().err.strip()
    assert word in error and "\n" not in error and "Traceback" not in error


def test_toy_world(world):
    tokenizer, rows = train.toy_tokenizer(), train.toy_rows(400, 1) + train.toy_rows(100, 0, heldout=True)
    for row in rows:
        ids = tokenizer(row["solution"])["input_ids"]
        assert tokenizer.unk_token_id not in ids + tokenizer(row["question"])["input_ids"]
        assert m3.verify(tokenizer.decode(ids), row["answer"], "gsm8k") == 1
        wrong = str(int(row["answer"]) + 1)
        assert m3.verify(tokenizer.decode(ids), wrong, "gsm8k") == 0
        texts = [m3.prompt_text(tokenizer, row, reference=hint) for hint in ("", row["solution"])]
        student, teacher = m3.encode(tokenizer, texts)
        assert student[-2:] == teacher[-2:] and row["solution"] not in texts[0]
        assert [tokenizer.decode(ids) for ids in (student, teacher)] == texts
    held = {row["question"].split(" ", 1)[1] for row in rows[400:]}
    assert not held & {row["question"].split(" ", 1)[1] for row in rows[:400]}


def test_toy_problems_stay_what_they_were():
    """The published tables are of these problems: by number, not by another run of the same code."""
    first, *_, last = train.toy_rows(4096, 0)
    assert first == {
        "question": "Dua has 15 keys , loses 2 , gets 4 , doubles them . How many ?",
        "solution": "15 - 2 = 13\n13 + 4 = 17\n17 * 2 = 34\n#### 34", "answer": "34", "kind": "toy"}
    assert (last["question"], last["answer"]) == (
        "Eli has 3 nuts , gets 5 . How many ?", "8")
    held = train.toy_rows(200, 0, heldout=True)[-1]
    assert held["question"] == "Hana has 9 figs , loses 3 , loses 1 , loses 1 . How many ?"


def test_toy_tokenizer_reads_signs_that_touch_a_word():
    tokenizer = train.toy_tokenizer()
    spaced = "Ann has 3 pens , gets 4 . How many ? Hint : 3 + 4 = 7\n#### 7\nAnswer :"
    close = "Ann has 3 pens, gets 4. How many? Hint: 3+4=7\n####7\nAnswer:"
    assert m3.encode(tokenizer, [close]) == m3.encode(tokenizer, [spaced])
    assert tokenizer.decode(m3.encode(tokenizer, [close])[0]) == spaced
    close, spaced = m3.encode(tokenizer, ["Ann,Bob  has 5-2*2\n\n", "Ann , Bob has 5 - 2 * 2 \n \n"])
    assert close == spaced
    assert tokenizer("Ann<eos>")["input_ids"] == [tokenizer.convert_tokens_to_ids("Ann"), EOS]
    assert tokenizer("pen, 100")["input_ids"].count(tokenizer.unk_token_id) == 2


def test_hints_that_err():
    rows = {share: train.toy_rows(1000, 1, hint_error=share) for share in (0.0, 0.25, 0.5, 1.0)}
    misled = {share: {row["question"] for row in part if "misled" in row} for share, part in rows.items()}
    assert [len(names) for names in misled.values()] == [0, 228, 475, 980]  # 20 of 1000: 2 + 2 = 2 * 2
    assert misled[0.25] < misled[0.5] < misled[1.0]  # by the numbers of the problem: nested, for every seed
    for part in rows.values():
        assert [{**row, "misled": 0} for row in part] == [{**row, "misled": 0} for row in rows[0.0]]
    tokenizer = train.toy_tokenizer()
    for row in rows[1.0]:
        honest = {name: value for name, value in row.items() if name != "misled"}
        assert m3.verify(row["solution"], row["answer"], "toy") == 1
        assert m3.prompt_text(tokenizer, row) == m3.prompt_text(tokenizer, honest)
        for hint in ("solution", "answer"):
            shown = m3.reference_text(row, hint)
            if "misled" not in row:
                assert shown == m3.reference_text(honest, hint) and "2 * 2 = 4" in row["solution"]
                continue
            assert m3.verify(shown, row["answer"], "toy") == 0
            assert shown.endswith(f"#### {row['misled']['answer']}")
            assert shown.startswith("####") == (hint == "answer")
    for ops, solution in (([("*", 2)], "5 + 2 = 7\n#### 7"), ([("+", 3)], "5 - 3 = 2\n#### 2"),
                          ([("+", 1), ("-", 2)], "5 + 1 = 6\n6 + 2 = 8\n#### 8")):
        assert train.toy_misled(5, ops, 1.0)["solution"] == solution
    row = rows[1.0][0] | {"kind": "gsm8k"}  # a real model's examples are right, whatever its teacher is shown
    text = m3.prompt_text(tokenizer, ROW, shots=[row], reference=m3.reference_text(row, "solution"))
    assert text.count(row["solution"]) == 2 and text.count(row["misled"]["solution"]) == 1


def test_phase_map_by_hand(tmp_path, capsys):
    """Means .5 and .2, deviations .1, three seeds: .3 / sqrt(2 x .01 / 3) = 3.7 standard errors."""
    middle = dict.fromkeys(phase_map.COLOURS, 0.1) | {"m3-soft": 0.5, "hybrid": 0.2}
    for method, mean in middle.items():
        for seed, reward in enumerate((mean - 0.1, mean, mean + 0.1)):
            out = tmp_path / "cell" / f"{method}-{seed}"
            out.mkdir(parents=True)
            (out / "config.json").write_text(json.dumps({"hint_error": 0.5, "lr": 1e-3, "method": method}))
            (out / "summary.json").write_text(json.dumps({"reward_last20": reward, "accuracy_end": reward}))
    cells = phase_map.read_cells([tmp_path / "cell"])
    lead = 0.3 / (0.02 / 3) ** 0.5
    assert phase_map.verdict(cells[0.5, 1e-3]) == ("m3-soft", "hybrid", pytest.approx(lead))
    phase_map.show(cells)
    assert "| m3-soft, 3.7 s.e. over hybrid |" in capsys.readouterr().out
    phase_map.draw(cells, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    phase_map.check(cells)
    cells[0.5, 1e-3]["opd"].pop()
    cells[0.5, 1e-3]["opd"].pop()
    for broken, word in (cells, "runs of opd"), ({}, "map-misled"):
        with pytest.raises(SystemExit):
            phase_map.check(broken)
        one_line(capsys, word)


def test_a_second_toy_task_is_one_entry(world, monkeypatch):
    """--model sum, --dataset sum: problems, words and a corpus; prompts and verifier are the kind's."""
    def sums(flags):
        rows = [{"question": f"{a} + {b}", "solution": f"#### {a + b}", "answer": str(a + b), "kind": "toy"}
                for a in range(5) for b in range(5)]
        return {"train": rows[:20], flags.eval_split: rows[20:]}

    def corpus(rng, count, larger):
        pairs = [(rng.randrange(5), rng.randrange(5)) for _ in range(count)]
        return [(f"{a} + {b} Answer :", f"#### {a + b}") for a, b in pairs]

    words = ["<pad>", "<eos>", "<unk>", "\n", "+", "####", "Answer", "Hint", ":", *map(str, range(9))]
    monkeypatch.setitem(train.TASKS, "sum", train.Task(sums, corpus, words))
    folder = world / train.toy_path(task="sum")
    train.toy_base_model(0, steps=1, task="sum").save_pretrained(folder)
    train.toy_tokenizer(words).save_pretrained(folder)
    log = run(world, "--model", "sum", "--dataset", "sum", "--out", "sum", "--steps", "1")
    assert len(log) == 2 and folder.name.startswith("sum-base-")
    prompts = {line["prompt"] for line in records(world / "sum", "samples")}
    assert len(prompts) == 4 and all(re.fullmatch(r"\d \+ \d", prompt) for prompt in prompts)


def test_command_line_in_its_own_process(world):
    done = subprocess.run([sys.executable, str(HERE / "train.py"), *FAST, "--out", "cli"], cwd=world,
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "greedy accuracy" in done.stdout and (world / "cli" / "last" / "model.safetensors").exists()
    done = subprocess.run([sys.executable, str(HERE / "train.py"), "--plot", "cli"], cwd=world,
                          capture_output=True, text=True)
    assert done.returncode == 0 and (world / "cli" / "curves.png").stat().st_size > 10_000


# --- baselines ----------------------------------------------------------------------------------------------


def two_gradients(seed=0, angle=None):
    """(g_R, g_D, norm_R, norm_D, phi) of two vectors, at a given angle if wanted."""
    g_R, g_D = logits64(2, 50, seed=seed)
    if angle is not None:
        side = g_D - (g_D @ g_R) / (g_R @ g_R) * g_R
        g_D = 3 * (math.cos(angle) * g_R / g_R.norm() + math.sin(angle) * side / side.norm())
    norms = g_R.norm().item(), g_D.norm().item()
    return g_R, g_D, *norms, (g_R @ g_D).item() / norms[0] / norms[1]


def test_gradnorm_equalises_the_norms_and_never_divides_by_zero():
    for norm_R, norm_D in ((3.0, 0.5), (1e-3, 7.0)):
        kappa = norm_R / norm_D
        w_R, w_D = m3.gradnorm(norm_R, norm_D, 0.0)
        assert (w_R, w_D) == pytest.approx((1 / (1 + kappa), kappa / (1 + kappa)))  # Prop. 5
        assert w_R * norm_R == pytest.approx(w_D * norm_D) and w_R + w_D == pytest.approx(1)
    assert m3.gradnorm(0.0, 2.0, 0.0) == (1.0, 0.0) and m3.gradnorm(2.0, 0.0, 0.0) == (0.0, 1.0)
    assert m3.gradnorm(0.0, 0.0, 0.0) == (0.5, 0.5)


@pytest.mark.parametrize("angle", [2.0, 2.9, 1.0])
def test_pcgrad_projects_on_the_original_other(angle):
    g_R, g_D, *scalars = two_gradients(angle=angle)
    norm_R, norm_D, phi = scalars
    w_R, w_D = m3.pcgrad(norm_R, norm_D, phi)
    got = w_R * g_R + w_D * g_D
    if phi >= 0:
        torch.testing.assert_close(got, g_R + g_D)
        return
    p_R, p_D = g_R - (g_R @ g_D) / (g_D @ g_D) * g_D, g_D - (g_R @ g_D) / (g_R @ g_R) * g_R
    torch.testing.assert_close(got, p_R + p_D)
    factor = math.sqrt(1 - phi**2)  # Prop. 19: both norms shrink by this, so their ratio is kept
    assert p_R.norm().item() == pytest.approx(factor * norm_R)
    assert p_D.norm().item() == pytest.approx(factor * norm_D)


@pytest.mark.parametrize("angle", [0.3, 1.5, 2.8, None])
def test_minnorm_against_brute_force(angle):
    g_R, g_D, *scalars = two_gradients(seed=3, angle=angle)
    a = m3.minnorm(*scalars)[1]
    grid = torch.linspace(0, 1, 10001).double()[:, None]
    best = grid[(grid * g_D + (1 - grid) * g_R).norm(dim=-1).argmin()].item()
    assert a == pytest.approx(best, abs=2e-4)


def rlsd_advantages(A, logp_T, logp_S, step=1):
    """The advantage that m3.rlsd gives to each token: two words, the sampled one and another."""
    z_T, z_S = (torch.stack([logp, torch.log1p(-logp.exp())], -1) for logp in (logp_T, logp_S))
    signals = types.SimpleNamespace(z_T=z_T, z_S=z_S, advantages=A, tokens=torch.zeros(len(A)).long())
    seed, alpha = m3.rlsd(signals, m3.Settings(step=step))
    assert alpha == 0
    return seed[:, 1] / z_S[:, 1].exp()  # of the other word: A_n p_S


def test_rlsd_scales_the_advantage_and_never_turns_it():
    A = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 2.0])
    logp_T = torch.tensor([-0.1, -9.0, -0.1, -9.0, -3.0, -1.0])
    logp_S = torch.tensor([-2.0, -2.0, -2.0, -2.0, -1.0, -1.0])
    # rewarded and the teacher likes it: pushed more; punished and the teacher likes it: punished less
    first = rlsd_advantages(A, logp_T, logp_S)
    assert first.tolist() == pytest.approx([1.1, 0.9, -0.9, -1.1, 0.0, 2.0])
    half = rlsd_advantages(A, logp_T, logp_S, step=31)
    assert half.tolist() == pytest.approx([1.05, 0.95, -0.95, -1.05, 0.0, 2.0])
    for step in (61, 200):
        torch.testing.assert_close(rlsd_advantages(A, logp_T, logp_S, step), A)


def test_sdpo_siblings_and_residual():
    rewards = [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert m3.sdpo_siblings(rewards, 4) == [1, 3, 1, 1, 6, 6, None, 6, None, 8, 8, 8]
    student, teacher = logits64(4, 12).requires_grad_(), logits64(4, 12, seed=1)
    top = student.detach().topk(3).indices
    loss = 0.0
    for s, t, index in zip(student.softmax(-1), teacher.softmax(-1), top):
        p, q = (torch.cat([x[index], (1 - x[index].sum())[None]]) for x in (s, t))
        m = (p + q) / 2
        loss = loss + ((q * (q / m).log()).sum() + (p * (p / m).log()).sum()) / 2
    (gradient,) = torch.autograd.grad(loss, student)
    residual = m3.sdpo_residual(student.detach(), teacher, 3)
    torch.testing.assert_close(residual, gradient, rtol=1e-8, atol=1e-10)
    everything = m3.sdpo_residual(student.detach(), teacher, 99)
    torch.testing.assert_close(everything, m3.distill_residual(student.detach(), teacher, "jsd"))


def test_sdpo_without_a_sibling_does_nothing(world, monkeypatch):
    """One success in a group: it teaches the others, and itself has no OTHER success to learn from."""
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: 0)
    lines = run(world, "--method", "sdpo", "--out", "sdpo-none")
    # nothing to compare with, so no loss
    assert all(line["grad_norm"] == 0 and line["loss_D"] == 0 for line in lines[1:])
    start = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).state_dict()
    assert all(torch.equal(v, start[k]) for k, v in weights(world, "sdpo-none").items())
    # nor conflicts with a reply that taught nobody
    assert all(line["conflict"] == 0 and line["conflict_rewarded"] is None for line in lines[1:])


def test_sdpo_counts_conflicts_of_the_rows_it_keeps(world, rewarded, monkeypatch):
    """A row without a successful sibling is masked: what its stand-in for a teacher says is no conflict."""
    batches, results = [], []
    keep_results(monkeypatch, train, "to_batch", batches)
    keep_results(monkeypatch, m3, "m3_step", results)
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: len(text) % 5 == 0)  # few, often one alone
    lines = run(world, "--method", "sdpo", "--kernel", "logit", "--out", "sdpo-few", "--steps", "6")[1:]
    masked = 0
    for line, batch, result in zip(lines, batches, results, strict=True):
        kept = batch.weights[result.seen["row"]].amax(1) > 0
        paid = kept & (result.seen["advantage"] != 0)
        masked += int((~kept & (result.seen["K"] < 0)).sum())
        K = result.seen["K"]
        assert line["conflict"] == pytest.approx((K[kept] < 0).float().mean().item() if kept.any() else 0)
        want = (K[paid] < 0).float().mean().item() if paid.any() else None
        assert line["conflict_rewarded"] == pytest.approx(want)
    assert masked > 0


# --- verifier ----------------------------------------------------------------------------------------------


KINDS = ("gsm8k", "svamp", "math", "arc")
# Pieces that have hung or crashed graders: unbalanced brackets, half commands, towers, marks, long numbers.
NASTY = ["(", ")", "{", "}", "\\", "\\boxed{", "\\frac{", "\\frac1", "\\text{", "\\sqrt", "\\left", "^{9",
         "9^{9^{9^{9}}}", "9", "1,", "1,234,", "123 ", "1/", "3/0 ", "1e9", "1e999999999", "-", "=", ".",
         ", ", "? ", " ", "\n", "\t", "\0", "####", "#### 5\n", "**", "<think>", "</think>",
         "<answer>", "Answer: ", "answer is ", "A: 1\n", "(A) ", "A or ", "Question:\n",
         "5 or ", "not ", "−", "½", "²", "٣",
         "\u2003", "\ud800", "😀", "a"]


def lines(name):
    path = HERE.parent / "shared" / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


CASES = [  # kind, completion, gold, reward, why; most come in pairs, a right and a wrong gold
    # the marked line
    ("gsm8k", "Uma plants 7 rows of 9 leeks, 7 * 9 = <<7*9=63>>63.\n#### 63", "63", 1, "marked answer"),
    ("gsm8k", 'A line such as "#### 8" ends it. Now 6 * 9 = 54.\n#### 54',
     "54", 1, "quoted format, then the answer"),
    ("gsm8k", "#### 71\nI missed the two spare ones.\n#### 73", "71", 0, "withdrawn mark"),
    ("gsm8k", "The answer is 26.\n####", "26", 0, "an empty last mark is an empty answer"),
    ("gsm8k", "#### \\boxed{26}", "26", 1, "box on the marked line"),
    ("gsm8k", "#### Total cost: $26.00 (for both)", "26", 1, "words, currency, zero cents, remark"),
    # reading one number
    ("gsm8k", "#### 3,604.00", "3604", 1, "thousands comma and zero decimals"),
    ("gsm8k", "#### 3,604.00", "604", 0, "tail of a grouped number"),
    ("gsm8k", "\\boxed{\\$5{,}120}", "5120", 1, "LaTeX comma group"),
    ("gsm8k", "#### 4,7", "47", 0, "two digits after a comma are no thousands"),
    ("gsm8k", "#### 4,7", "4", 0, "two numbers are no answer"),
    ("gsm8k", "#### 700", "7", 0, "zeros of an integer count"),
    ("gsm8k", "#### 32", "2", 0, "gold inside a longer number"),
    ("gsm8k", "#### -23", "23", 0, "sign matters"),
    ("gsm8k", "It fell from 9 to −4 degrees.", "-4", 1, "Unicode minus in prose"),
    ("gsm8k", "He is left with 30-4.", "-4", 0, "a difference is not a negative number"),
    ("gsm8k", "#### 2 3/4", "2.75", 1, "mixed number"),
    ("gsm8k", "#### 3/0", "0", 0, "division by zero"),
    ("gsm8k", "So 65% of the lamps work.", "65", 1, "percent sign"),
    ("gsm8k", "#### 1e999999999", "1", 0, "absurd exponent, not read as 1"),
    ("gsm8k", "#### 36028797018963969", "36028797018963968", 0, "beyond 2**53, off by one"),
    ("gsm8k", "#### 14 + 3 = 17", "17", 1, "result behind the equals sign"),
    ("gsm8k", "\\boxed{14\\sqrt{2}}", "14", 0, "factor of a root"),
    ("gsm8k", "#### 20-25", "20", 0, "range"),
    ("gsm8k", "#### ", "", 0, "an empty gold is never right"),
    ("svamp", "#### 3/0",
     "see table", 0, "nor is a gold without a number, even if the reply has none either"),
    ("svamp", "12 + 19 = 31\n#### 31", "31.0", 1, "gold stored as a float"),
    ("svamp", "#### 310", "31.0", 0, "the dot of the gold is not dropped"),
    # a box, a tag, a statement
    ("gsm8k", "\\boxed{15} at first, \\boxed{16} in the end, for 3 people.",
     "16", 1, "last box, before later numbers"),
    ("gsm8k", "The answer is \\boxed{1", "1", 0, "box cut off: the number may go on"),
    ("svamp", "<answer>77</answer> since 70 + 7 = 77", "77", 1, "tag"),
    ("svamp", "<answer></answer>", "77", 0, "empty tag"),
    ("gsm8k", "**Final Answer:** 39 plums, so Bo has 39 - 4 = 35", "39", 1, "bold label, later number"),
    ("gsm8k", "**Final Answer:** 39 plums, so Bo has 39 - 4 = 35", "35", 0, "number after the first clause"),
    ("gsm8k", "Kai drives 2 * 45 = 90 miles\nA: 90", "90", 1, "short label at the line start"),
    ("gsm8k", "The answer is 8 or 9.", "8", 0, "two statements in one"),
    ("gsm8k", "The answer is not 8, it is 9.", "9", 1, "denied, then given"),
    ("gsm8k", "The answer is not 8.", "8", 0, "denied"),
    # the closing sentence
    ("gsm8k", "2 tents cost 2 * 40 = 80. With the rope, 11 more, she pays $91", "91", 1, "last number"),
    ("gsm8k", "So Pia counts 67 geese, all told, by noon.", "67", 1, "a comma is no number"),
    ("gsm8k", "Each jug holds 3.25 litres", "3.25", 1, "decimal and unit without a stop"),
    ("gsm8k", "It could be 13, 27 or 31.", "31", 0, "undecided"),
    ("gsm8k", "Perhaps Pia has 31.", "31", 0, "hedged"),
    ("gsm8k", "First 5 * 14 = 70, which then gets shared by", "70", 0, "cut off after the number"),
    ("gsm8k", "The price is 5 * 14.", "14", 0, "product left unfinished"),
    # whose words
    ("gsm8k", "5 * 8 = 40\n#### 40\n\nQuestion: Ed owns 2 dogs.\nAnswer: 2\n#### 2",
     "40", 1, "run-on question cut"),
    ("gsm8k", "5 * 8 = 40\n#### 40\n\nQuestion: Ed owns 2 dogs.\nAnswer: 2\n#### 2",
     "2", 0, "answer to the run-on"),
    ("gsm8k", "I give up.\nProblem 2: What is 4 + 4?\n#### 8", "8", 0, "only the run-on is answered"),
    ("gsm8k", "Question: Add 15 to 4.", "4", 0, "echo alone"),
    ("gsm8k", "How many are 15 and 4?", "4", 0, "a question is no answer"),
    ("gsm8k", "Question: Add 15 to 4.\nThat makes 19.", "19", 1, "echo, then the answer"),
    ("gsm8k", "<think>Answer: 6? #### 6</think>\nAnswer: 21", "21", 1, "answer after the thinking"),
    ("gsm8k", "so #### 6, hm</think> The answer is 21.", "6", 0, "thinking opened in the prompt"),
    ("gsm8k", "<think>5 + 1, so #### 6", "6", 0, "thinking never closed"),
    # math
    ("math", "29", "29", 0, "no box"),
    ("math", "It goes in \\boxed{}. 5*7=35.\n\\[\n\\boxed{35}\n\\]",
     "35", 1, "display math after an empty box"),
    ("math", "I get \\boxed{8}. No: \\boxed{3}\n\nProblem: 1+1?\n\\boxed{2}",
     "3", 1, "last box before a run-on"),
    ("math", "\\boxed{\\dfrac{4}{11}}", "\\frac{4}{11}", 1, "nested braces"),
    ("math", "\\boxed{4/11}", "\\frac4{11}", 1, "slash for a fraction"),
    ("math", "\\boxed{4/11}", "4", 0, "numerator only"),
    ("math", "\\boxed{-2\\frac{1}{5}}", "-2.2", 1, "negative mixed number"),
    ("math", "\\boxed{6\\sqrt{5}}", "6", 0, "a root is not dropped"),
    ("math", "\\boxed{4,9}", "4, 9", 1, "list"),
    ("math", "\\boxed{4,9}", "49", 0, "list is not one number"),
    ("math", "\\boxed{4 9}", "49", 0, "nor with a space"),
    ("math", "\\boxed{\\text{17}}", "17", 1, "number in text"),
    ("math", "\\boxed{17\\text{ m}^2}", "17", 1, "unit on one side"),
    ("math", "\\boxed{17\\text{ m}}", "17\\text{ km}", 0, "another unit"),
    ("math", "\\boxed{17x}", "17", 0, "a variable is no unit"),
    ("math", "\\boxed{t = 8}", "8", 1, "name on one side"),
    ("math", "\\boxed{(2, \\pi)}", "(\\pi, 2)", 0, "order"),
    ("math", "\\boxed{}", "", 0, "empty gold"),
    ("math", "\\boxed{7^{8^{9^{9}}}}", "7", 0, "tower of powers"),
    # arc
    ("arc", "(D)", "D", 1, "label alone"),
    ("arc", "D) A prism splits light.", "D", 1, "label and option text"),
    ("arc", "D) A prism splits light.", "A", 0, "article in the option text"),
    ("arc", "Answer: \n\nAnswer: D", "D", 1, "last statement"),
    ("arc", "The answer is a lever.", "A", 0, "article"),
    ("arc", "\\boxed{C} no, \\boxed{\\text{E: the moon}}", "E", 1, "last box, with text"),
    ("arc", "The answer is D, not B.", "B", 0, "rejected label"),
    ("arc", "Answer: A or D", "A", 0, "two labels"),
    ("arc", "Answer: (A), (D)", "A", 0, "two bracketed labels"),
    ("arc", "(A) tin\n(B) zinc\n(C) lead", "C", 0, "options echoed"),
    ("arc", "Both are metals, which leaves (C).", "C", 1, "the only label of the reply"),
    ("arc", "1. Ice melts.\n2. Steam rises.\nC", "C", 1, "numbered lines are no labels beside letters"),
    ("arc", "The answer is (2).", "2", 1, "digit label"),
    ("arc", "", "", 0, "empty gold"),
    # #### as a heading, and a later, clearer mark (18)
    ("gsm8k", "#### Step 1\n7 * 2 = 14\n#### Step 2: double\n14 * 2 = 28\n\nThe answer is 28.",
     "28", 1, "a heading is no mark"),
    ("gsm8k", "#### Step 1\n7 * 2 = 14\n#### Step 2: double\n14 * 2 = 28\n\nThe answer is 28.",
     "2", 0, "a heading is no mark"),
    ("gsm8k", "#### Step 1\n7 * 2 = 14\n#### Step 2: double\n14 * 2 = 28\n\n\\boxed{28}",
     "28", 1, "a heading is no mark"),
    ("gsm8k", "#### Step 1:\n7 * 2 = 14\n#### Step 2:\n14 * 2 = 28", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### Step 1:\n7 * 2 = 14\n#### Step 2:\n14 * 2 = 28", "2", 0, "a heading is no mark"),
    ("gsm8k", "#### 28\n\n#### Check", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### 28\n\n#### Check\n14 * 2 = 28, correct.", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### 28\n\n#### Check\nThe answer is correct.", "28", 1, "a heading is no mark"),
    ("gsm8k", "Some say the answer is 28.", "28", 0, "another's claim"),
    ("gsm8k", "She has -(-28) eggs.", "-28", 0, "a minus before a bracket"),
    ("gsm8k", "She has -(28) eggs.", "28", 0, "a minus before a bracket"),
    ("gsm8k", "She has (28) eggs.", "28", 1, "a bracket"),
    ("gsm8k", "#### 1\n7 * 2 = 14\n#### 2\n14 * 2 = 28\n\nThe answer is 28.",
     "28", 1, "a heading is no mark"),
    ("gsm8k", "#### 1\n7 * 2 = 14\n#### 2\n14 * 2 = 28\n\nThe answer is 28.", "2", 0, "a heading is no mark"),
    ("gsm8k", "#### 1\n7 * 2 = 14\n#### 2\n14 * 2 = 28", "2", 0, "a heading is no mark"),
    ("gsm8k", "#### 1. Start\n7*2=14\n#### 2. Double\n14*2=28\n#### 3. Answer\n28",
     "28", 1, "a heading is no mark"),
    ("gsm8k", "#### 1. Start\n7*2=14\n#### 2. Double", "2", 0, "a heading is no mark"),
    ("gsm8k", "#### 2) Double", "2", 0, "a heading is no mark"),
    ("gsm8k", "#### Step 2", "2", 0, "a heading is no mark"),
    ("gsm8k", "7*2=14\n## Step 2", "2", 0, "a heading is no mark"),
    ("gsm8k", "7*2=14\n**Step 2:**", "2", 0, "a heading is no mark"),
    ("gsm8k", "7*2=14\nStep 2", "2", 0, "a heading is no mark"),
    ("gsm8k", "#### Solution\n2*14=28\n#### Final Answer\n28", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### Solution\n2*14=28\n#### Final Answer\n\\boxed{28}", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### Solution\n2*14=28\n#### Final Answer: 28", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### Final Answer: 28\n#### Explanation\n2*14=28", "28", 1, "a heading is no mark"),
    ("gsm8k", "#### 14\n\n#### Step 2\n14*2 = 28", "14", 0, "a heading is no mark"),
    ("gsm8k", "The answer is 14.\n#### Step 2\n14*2", "14", 0, "a heading is no mark"),
    ("gsm8k", "#### 2.4 million", "2400000", 1, "a heading is no mark"),
    ("gsm8k", "#### 2.4 million", "2.4", 0, "a heading is no mark"),
    ("gsm8k", "#### 2.4M", "2.4", 0, "a heading is no mark"),
    ("gsm8k", "#### 2.4-million", "2400000", 1, "a heading is no mark"),
    ("gsm8k", "#### 2.4 million and 3 thousand", "2400000", 0, "a heading is no mark"),
    ("gsm8k", "#### 2.4 (in millions)", "2.4", 0, "a heading is no mark"),
    ("gsm8k", "#### 2.4 (million)", "2400000", 1, "a heading is no mark"),
    ("gsm8k", "#### 4.5 × 10^3", "4500", 1, "a heading is no mark"),
    ("gsm8k", "#### 4.5 × 10³", "4500", 1, "a heading is no mark"),
    ("gsm8k", "#### 4.5 x 10^3", "4500", 1, "a heading is no mark"),
    # words and letters of size (19)
    ("gsm8k", "#### $18K per year", "18000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 2.4M", "2400000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 18 thousand dollars", "18000", 1, "the size belongs to the number"),
    ("gsm8k", "#### $2.4m", "2.4", 0, "the size belongs to the number"),
    ("gsm8k", "#### $2.4m", "2400000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 18m", "18", 1, "the size belongs to the number"),
    ("gsm8k", "#### 3 hundred", "300", 1, "the size belongs to the number"),
    ("gsm8k", "The answer is 2 billion people.", "2000000000", 1, "the size belongs to the number"),
    ("gsm8k", "The answer is 2 billion people.", "2", 0, "the size belongs to the number"),
    ("gsm8k", "So the city has 2.4 million inhabitants.", "2400000", 1, "the size belongs to the number"),
    ("gsm8k", "So the city has 2.4 million inhabitants.", "2.4", 0, "the size belongs to the number"),
    ("gsm8k", "\\boxed{2.4\\text{ million}}", "2400000", 1, "the size belongs to the number"),
    ("gsm8k", "\\boxed{2.4 \\text{ million}}", "2.4", 0, "the size belongs to the number"),
    ("math", "\\boxed{2.4\\text{ million}}", "2400000", 1, "the size belongs to the number"),
    ("math", "\\boxed{2.4\\text{ million}}", "2.4", 0, "the size belongs to the number"),
    ("math", "\\boxed{2.4\\text{ million dollars}}", "2400000", 1, "the size belongs to the number"),
    ("math", "\\boxed{2.4\\text{ million dollars}}", "2.4", 0, "the size belongs to the number"),
    ("math", "\\boxed{2.4}", "2.4\\text{ million}", 0, "the size belongs to the number"),
    ("math", "\\boxed{18k}", "18000", 0, "the size belongs to the number"),
    ("math", "\\boxed{2k}", "2k", 1, "the size belongs to the number"),
    ("math", "\\boxed{\\frac{1}{2}\\text{ million}}", "500000", 1, "the size belongs to the number"),
    ("gsm8k", "#### ½ million", "500000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 5 hundredths", "5", 0, "the size belongs to the number"),
    ("gsm8k", "The answer in millions is 2.4", "2.4", 0, "the size belongs to the number"),
    ("gsm8k", "#### 12 dozen", "12", 1, "the size belongs to the number"),
    ("gsm8k", "So it costs $1.5 million.", "1500000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 18 million", "18", 0, "the size belongs to the number"),
    ("gsm8k", "#### 18million", "18000000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 1,200 thousand", "1200000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 18 Thousand", "18000", 1, "the size belongs to the number"),
    ("gsm8k", "#### 18 thousands", "18000", 1, "the size belongs to the number"),
    ("gsm8k", "The answer is 18k dollars", "18000", 1, "the size belongs to the number"),
    ("gsm8k", "So she earns $18k.", "18000", 1, "the size belongs to the number"),
    ("gsm8k", "So she earns $18k a year.", "18", 0, "the size belongs to the number"),
    ("gsm8k", "#### 2 hundred thousand", "2", 0, "the size belongs to the number"),
    # signs around a number (20)
    ("gsm8k", "#### 18k", "18000", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 18k", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 18 k", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5²", "25", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5²", "5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 3½", "3.5", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 3½", "3", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 3 ½ hours", "3.5", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### ½", "0.5", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### -½", "-0.5", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### ≥ 18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### ≤18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### > 18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "x >= 18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### <18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "The answer is x ≥ 18.", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 18+", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 18 or more", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### more than 18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 10³", "1000", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 10³", "10", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 2^10", "1024", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 10^-2", "0.01", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 10⁻²", "0.01", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5^2^2", "25", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### (-5)^2", "-5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 3 and a half", "3", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 3 and a half hours", "3.5", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 3 and a third", "3", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 18 m²", "18", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 18 cm^2", "18", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### √18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 2√3", "2", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5π", "5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### negative 5", "5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### half of 18", "18", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5 * (2 + 1)", "5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5(3)", "5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "#### 5x", "5", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "Final answer: 28 (or 29)", "28", 0, "powers, fractions, bounds, pieces"),
    ("gsm8k", "She has <<2*14=28>>28 eggs.", "28", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "2*14=<<2*14=28>>28", "28", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "The answer is <b>28</b>.", "28", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "The answer is *28*.", "28", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "The answer is `28`.", "28", 1, "powers, fractions, bounds, pieces"),
    ("gsm8k", "The answer is _28_.", "28", 1, "powers, fractions, bounds, pieces"),
    # spellings of LaTeX (21)
    ("gsm8k", "#### \\geq 18", "18", 0, "one thing, several spellings"),
    ("gsm8k", "\\boxed {18}", "18", 1, "one thing, several spellings"),
    ("math", "\\boxed {18}", "18", 1, "one thing, several spellings"),
    ("math", "\\boxed\n{18}", "18", 1, "one thing, several spellings"),
    ("math", "\\fbox{18}", "18", 1, "one thing, several spellings"),
    ("math", "\\boxed{x \\le 5}", "x \\leq 5", 1, "one thing, several spellings"),
    ("math", "\\boxed{x ≤ 5}", "x\\leqslant 5", 1, "one thing, several spellings"),
    ("math", "\\boxed{x \\ge 5}", "x \\leq 5", 0, "one thing, several spellings"),
    ("math", "\\boxed{x \\neq 5}", "x\\ne5", 1, "one thing, several spellings"),
    ("math", "\\boxed{x \\ge 5}", "5", 0, "one thing, several spellings"),
    ("math", "\\boxed{≥ 5}", "5", 0, "one thing, several spellings"),
    ("math", "\\boxed{\\log_{2} 3}", "\\log_23", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\log_2 3}", "\\log_{2}3", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\log_2 3}", "\\log_{23}", 0, "one thing, several spellings"),
    ("math", "\\boxed{\\log_3 2}", "\\log_2 3", 0, "one thing, several spellings"),
    ("math", "\\boxed{\\displaystyle\\frac{1}{2}}", "\\frac12", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\cfrac{1}{2}}", "0.5", 1, "one thing, several spellings"),
    ("math", "\\boxed{1, 2, \\dots, 9}", "1,2,\\ldots,9", 1, "one thing, several spellings"),
    ("math", "\\boxed{1+2+\\cdots+9}", "1+2+…+9", 1, "one thing, several spellings"),
    ("math", "\\boxed{3½}", "3.5", 1, "one thing, several spellings"),
    ("math", "\\boxed{2^{10}}", "1024", 1, "one thing, several spellings"),
    ("math", "\\boxed{5²}", "5", 0, "one thing, several spellings"),
    ("math", "\\boxed{x²}", "x^2", 1, "one thing, several spellings"),
    ("math", "\\boxed{x^{12}}", "x¹²", 1, "one thing, several spellings"),
    ("math", "\\boxed{3\\times 4}", "3\\cdot4", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\frac{ 1 }{ 2 }}", "\\frac12", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\bigl(1, 2\\bigr)}", "(1,2)", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\dbinom{5}{2}}", "\\binom{5}{2}", 1, "one thing, several spellings"),
    ("math", "\\boxed{-\\infty}", "−∞", 1, "one thing, several spellings"),
    ("math", "\\boxed{\\frac{x}{2}}", "\\frac{x}{2}", 1, "one thing, several spellings"),
    ("math", "\\boxed{(-\\infty, 2]}", "(-\\infty,2]", 1, "one thing, several spellings"),
    ("gsm8k", "#### $x \\geq 18$", "18", 0, "one thing, several spellings"),
    ("gsm8k", "\\boxed{x \\ge 18}", "18", 0, "one thing, several spellings"),
    ("gsm8k", "\\boxed{\\ge 18}", "18", 0, "one thing, several spellings"),
    # an option chosen in other words (35)
    ("arc", "I choose D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Option D is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The correct option is D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The answer is therefore D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Therefore, D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "I would pick (D).", "D", 1, "chosen, or denied and undecided"),
    ("arc", "So D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "So, D", "D", 1, "chosen, or denied and undecided"),
    ("arc", "I'd go with D", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Hence (D).", "D", 1, "chosen, or denied and undecided"),
    ("arc", "It is D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Thus, the correct choice is (D).", "D", 1, "chosen, or denied and undecided"),
    ("arc", "So it must be D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "So it's D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "D is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "(D) is the correct answer.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "I think D is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "D is the answer.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The best option is D: the sun.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Option D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Option D", "D", 1, "chosen, or denied and undecided"),
    ("arc", "My choice is D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The correct letter is d.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The answer, therefore, is D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The correct answer is option D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The answer must be D.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "I select option D because it melts.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "**Option D** is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Option D is correct, but so is option A.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Some say option D is correct, but it is wrong.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Some say that D is correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I thought D is correct, but that is false.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "D is correct, but it is not easy to see.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Option D is correct, but A is wrong.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "This means D is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The answer is D, but so is A.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Therefore, option D is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Only option D is correct.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "Therefore, the answer is D", "D", 1, "chosen, or denied and undecided"),
    ("arc", "not D", "D", 0, "chosen, or denied and undecided"),
    ("arc", "It is not (D).", "D", 0, "chosen, or denied and undecided"),
    ("arc", "It is not D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "A or D", "D", 0, "chosen, or denied and undecided"),
    ("arc", "So A or D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I choose A or D.", "A", 0, "chosen, or denied and undecided"),
    ("arc", "I choose A or D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Option D is not correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Option D is incorrect.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Neither option A nor option D is correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "A or D is correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Both A and D are correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Option A or option D is correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I would not pick D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I don't think option D is correct.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I don't think the answer is D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I don't think it is D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "(D) is wrong.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "D) is wrong.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "It can't be (D).", "D", 0, "chosen, or denied and undecided"),
    ("arc", "So A is heavier than B.", "A", 0, "chosen, or denied and undecided"),
    ("arc", "Vitamin D is the answer to weak bones.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "The wrong option is D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I choose a", "A", 0, "chosen, or denied and undecided"),
    ("arc", "It is a", "A", 0, "chosen, or denied and undecided"),
    ("arc", "The correct option is not D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Therefore, not D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I choose D over (A).", "A", 0, "chosen, or denied and undecided"),
    ("arc", "#### A closer look\nIce floats.\nThe answer is D.", "A", 0, "chosen, or denied and undecided"),
    ("arc", "Therefore, A, B and D.", "A", 0, "chosen, or denied and undecided"),
    ("arc", "Is it D?", "D", 0, "chosen, or denied and undecided"),
    ("arc", "So D?", "D", 0, "chosen, or denied and undecided"),
    ("arc", "It is (C), not (D).", "D", 0, "chosen, or denied and undecided"),
    ("arc", "The answer is either B or D.", "B", 0, "chosen, or denied and undecided"),
    ("arc", "The answer is neither B nor D.", "B", 0, "chosen, or denied and undecided"),
    ("arc", "I would choose B if it were colder, but D is correct.",
     "B", 0, "chosen, or denied and undecided"),
    ("arc", "I cannot choose D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I did not choose D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I don't choose D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I would never pick D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I choose not D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "I choose neither A nor D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "So not D.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "(A) is wrong, (B) is wrong, (C) is right.", "C", 1, "chosen, or denied and undecided"),
    ("arc", "The answer is D and not A.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The answer is D rather than A.", "D", 1, "chosen, or denied and undecided"),
    ("arc", "The answer is D is wrong.", "D", 0, "chosen, or denied and undecided"),
    ("arc", "Grade A is the best choice.", "A", 0, "chosen, or denied and undecided"),
    ("arc", "Hepatitis B is the answer.", "B", 0, "chosen, or denied and undecided"),
    # two units, a share, a remark behind the mark
    ("gsm8k", "#### 3 hours 20 minutes", "3", 0, "two units are one quantity"),
    ("gsm8k", "#### $5 and 50 cents", "5", 0, "so are dollars and cents"),
    ("gsm8k", "#### 18 out of 20", "18", 0, "a share"),
    ("gsm8k", "#### 28\n(The answer is in eggs.)", "28", 1, "a remark is no second answer"),
    ("gsm8k", "#### 14\nWait, that is wrong. The answer is 28.", "14", 0, "withdrawn by a later statement"),
    ("gsm8k", "#### 14\nWait, that is wrong. The answer is 28.", "28", 1, "the later statement"),
    ("gsm8k", "#### 28\nIf she had three more, the answer would be 31.", "31", 0, "a supposition"),
    ("gsm8k", "#### 28\nIf she had three more, the answer would be 31.", "28", 1, "the mark before it"),
    # a statement in doubt
    ("gsm8k", "I don't think the answer is 8.", "8", 0, "doubt is no statement"),
    ("gsm8k", "The answer is 8? Let me see.", "8", 0, "doubt is no statement"),
    ("gsm8k", "The answer is 28, I don't think so.", "30", 0, "doubt is no statement"),
    ("gsm8k", "It's not true that the answer is 8.", "8", 0, "doubt is no statement"),
    ("gsm8k", "The answer is definitely 28.", "28", 1, "doubt is no statement"),
    ("gsm8k", "The answer is clearly not 8.", "8", 0, "doubt is no statement"),
    ("gsm8k", "Is the answer 8?", "8", 0, "doubt is no statement"),
    ("gsm8k", "I am not sure the answer is 8.", "8", 0, "doubt is no statement"),
    # what a stranger's replies found
    ("gsm8k", "50 - 36 = 14 do not. 22 more do than not\n#### 22", "22", 1, "`not` of the line before"),
    ("gsm8k", "Lou gave 6 nuts to Ada, but no: since 36 is always 18.", "6", 0, "no closing number"),
    ("gsm8k", "#### 24\n\nLet's check the answer: 12 + 3 + 5 = 20. ✓", "20", 0, "a remark is no answer"),
    ("gsm8k", "#### 24\n\nLet's check the answer: 12 + 3 + 5 = 20. ✓", "24", 1, "a remark is no answer"),
    ("gsm8k", "The answer is 24.\n\nTo verify the answer:\n20 - 3 - 5 = 12\n12 * 2 = 24",
     "12", 0, "a later remark is no answer"),
    ("gsm8k", "#### 24\n\nThe answer is rounded to 2 decimal places.", "2", 0, "a later remark is no answer"),
    ("gsm8k", "#### 24\n\nNote: The answer is based on 7 days a week.",
     "7", 0, "a later remark is no answer"),
    ("gsm8k", "To get the answer: 20 - 8 = 12 jars. Then multiply by $2: 12 * 2 = $24.",
     "12", 0, "a later remark is no answer"),
    ("gsm8k", "The answer is 24.\n\nThe answer is the product of 12 and 2.",
     "24", 1, "a later remark is no answer"),
    ("arc", "Answer: B\n\nOption A is correct only for animals.", "B", 1, "a later remark is no answer"),
    ("arc", "Answer: B\n\nOption A is correct only for animals.", "A", 0, "a later remark is no answer"),
    ("arc", "Answer: B\n\nOne might think that the answer is A.", "A", 0, "a later remark is no answer"),
    ("arc", "Answer: A magnet attracts iron.", "A", 0, "an article or a quantity is no label"),
    ("arc", "The correct answer is: A decrease in temperature",
     "A", 0, "an article or a quantity is no label"),
    ("arc", "\\boxed{\\text{A magnet}}", "A", 0, "an article or a quantity is no label"),
    ("arc", "The answer is 5 meters.", "5", 0, "an article or a quantity is no label"),
    ("arc", "Answer: 2.5 m", "2", 0, "an article or a quantity is no label"),
    ("gsm8k", "Thus, the number of students who did not pass is $\\boxed{24}$.",
     "24", 1, "a number's name is no doubt"),
    ("gsm8k", "\\boxed{12} passed. The number of students who did not pass is $\\boxed{24}$.",
     "12", 0, "a number's name is no doubt"),
    ("gsm8k", "So the initial number of apples is \\boxed{24}.", "24", 1, "a number's name is no doubt"),
    ("gsm8k", "The least number of boxes she needs is \\boxed{24}.", "24", 1, "a number's name is no doubt"),
    ("gsm8k", "If x = 12 then the answer is 2 * 12 = 24.", "24", 1, "a number's name is no doubt"),
    ("gsm8k", "The answer is 24 because 20 - 3 - 5 = 12 jars are sold at $2 each.",
     "12", 0, "why it is so is no answer"),
    ("gsm8k", "#### 24 (20 - 3 - 5 = 12 jars at $2)", "12", 0, "why it is so is no answer"),
    ("gsm8k", "#### 240 minutes (1 hour = 60 minutes)", "60", 0, "why it is so is no answer"),
    ("gsm8k", "The answer is 240 minutes (since 1 hour = 60 minutes).",
     "240", 1, "why it is so is no answer"),
    ("gsm8k", "The total cost is $48 ($12 per ticket).", "12", 0, "why it is so is no answer"),
    ("arc", "Let's look at each option:\n\nA. Iron: this is a metal that",
     "A", 0, "options looked at, not chosen"),
    ("arc", "To answer this, consider the options:\n\n(A) Iron: this is a metal. It conducts heat well, and",
     "A", 0, "options looked at, not chosen"),
    ("arc", "Let's assume the correct answer is B.", "B", 0, "options looked at, not chosen"),
    ("gsm8k", "#### 24\n\n### Problem 2\nTom has 5 apples and buys 3.\n#### 8",
     "8", 0, "an echoed or invented question"),
    ("gsm8k", "#### 24\n\nFollow-up question: How much would she make at $3 per jar?\nAnswer: 27",
     "27", 0, "an echoed or invented question"),
    ("arc", "Answer: B\n\nExercise 2: Which is a metal?\nAnswer: A",
     "A", 0, "an echoed or invented question"),
    ("math", "Let's solve it.\n\n**Problem:** find x.\n\n**Solution:** \\boxed{5}",
     "5", 1, "an echoed or invented question"),
    ("gsm8k", "#### 20\n\nWait, that's wrong. She has 12 jars left, so she makes 12 * 2 = $24.",
     "20", 0, "a mark taken back"),
    ("gsm8k", "The answer is 20.\n\nWait, I made a mistake. 12 * 2 = 24, so she makes $24.",
     "24", 1, "a mark taken back"),
    ("math", "The solutions are \\boxed{2} and \\boxed{3}.", "3", 0, "boxes, units and names"),
    ("math", "The solutions are $\\boxed{2}$ and $\\boxed{3}$.", "2,3", 1, "boxes, units and names"),
    ("math", "\\boxed{5 \\text{ or more}}", "5", 0, "boxes, units and names"),
    ("math", "\\boxed{2 \\text{ pi}}", "2", 0, "boxes, units and names"),
    ("math", "\\boxed{3 \\text{ halves}}", "3", 0, "boxes, units and names"),
    ("math", "\\boxed{m+n = 24}", "24", 1, "boxes, units and names"),
    ("math", "\\boxed{C}", "\\text{(C)}", 1, "boxes, units and names"),
    ("gsm8k", "Therefore, the total bill is $24.", "24", 1, "words are no sizes"),
    ("gsm8k", "The answer is 24 T-shirts.", "24", 1, "words are no sizes"),
    ("gsm8k", "#### 24 M&Ms", "24", 1, "words are no sizes"),
    ("gsm8k", "#### 24 grandchildren", "24", 1, "words are no sizes"),
    ("gsm8k", "#### number 24", "24", 1, "how a mark is written"),
    ("gsm8k", "The answer is:\n\\[\n24\n\\]", "24", 1, "how a mark is written"),
    ("gsm8k", "Answer:\n```\n24\n```", "24", 1, "how a mark is written"),
    ("gsm8k", "Answer:\n- 24", "24", 1, "how a mark is written"),
    ("arc", "The correct answer to this question is C.", "C", 1, "an option in other words"),
    ("arc", "The answer is most likely C.", "C", 1, "an option in other words"),
    ("arc", "Therefore, C is the best answer.", "C", 1, "an option in other words"),
    ("arc", "Ans: C", "C", 1, "an option in other words"),
    ("gsm8k", "The answer is 3. Wait, no, it is 4.", "3", 0, "a mark taken back"),
    ("gsm8k", "#### 3\nWait, that's wrong. It should be 4.", "3", 0, "a mark taken back"),
    ("gsm8k", "#### 3\nCorrection: 4", "3", 0, "a mark taken back"),
    ("gsm8k", "#### 3\n\nOops, 4.", "3", 0, "a mark taken back"),
    ("gsm8k", "#### 3 and three quarters", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 quarters", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 fifths", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 sevenths", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 hrs 20 min", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3h 20m", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 kg 200 g", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", '#### 3\' 6"', "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 plus 4", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 minus 1", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 divided by 4", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 multiplied by 4", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 over 4", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3% of 50", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 less than 10", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 per 4", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 3 in 4", "3", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 -> 5", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 & 5", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 vs 5", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 | 3", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 ≈ 5", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 pi", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 4 sqrt(2)", "4", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 12 crore", "12", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 12'000", "12", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 12 of 13", "12", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 2 through 3", "2", 0, "a piece, a size or an operation"),
    ("gsm8k", "#### 0.3 repeating", "0.3", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 thirds}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 halves}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 dozen}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 squared}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 pi}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 sqrt}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 is wrong}", "5", 0, "a piece, a size or an operation"),
    ("math", "\\boxed{5 not sure}", "5", 0, "a piece, a size or an operation"),
    ("arc", "The answer is A magnet", "A", 0, "an article, a range or a denial"),
    ("arc", "Answer: A plant needs water", "A", 0, "an article, a range or a denial"),
    ("arc", "Answer: A is incorrect", "A", 0, "an article, a range or a denial"),
    ("arc", "Answer: A through D", "A", 0, "an article, a range or a denial"),
    ("arc", "Answer: A to D", "A", 0, "an article, a range or a denial"),
    ("arc", "Answer: A - D", "A", 0, "an article, a range or a denial"),
]


@pytest.mark.parametrize("kind, completion, gold, reward, why", CASES)
def test_case(kind, completion, gold, reward, why):
    assert m3.verify(completion, gold, kind) == reward, why


def test_shared_cases():
    rows = lines("verifier_cases.jsonl")
    for row in rows:
        assert m3.verify(row["completion"], row["gold"], row["kind"]) == row["reward"], row


@pytest.mark.parametrize("name, rows", [("gsm8k_train", 7473), ("gsm8k_test", 1319)])
def test_gsm8k_golds(name, rows):
    answers = [row["answer"] for row in lines(f"data/{name}.jsonl")]
    golds = [answer.rpartition("####")[2].strip() for answer in answers]
    assert len(golds) == rows
    for answer, gold in zip(answers, golds, strict=True):
        assert m3.verify(answer, gold, "gsm8k") == 1, answer
    assert [gold for gold in golds if m3.verify(f"#### {gold}", gold, "gsm8k") != 1] == []
    assert [gold for gold in golds if m3.verify(f"#### {gold}1", gold, "gsm8k") != 0] == []


def test_svamp_golds():
    golds = [str(row["Answer"]) for row in lines("data/svamp.json")]
    assert len(golds) == 1000
    assert [gold for gold in golds if m3.verify(f"#### {gold}", gold, "svamp") != 1] == []


def test_real_replies():
    """Real model replies with right/wrong marks set by others: no false positive, no false negative."""
    seen, right = 0, 0
    for row in lines("data/gsm8k_model_solutions.jsonl"):
        gold = row["ground_truth"].rpartition("A:")[2].strip()
        for reply in (value for value in row.values() if isinstance(value, dict)):
            assert m3.verify(reply["solution"], gold, "gsm8k") == reply["is_correct"], reply["solution"]
            seen, right = seen + 1, right + reply["is_correct"]
    assert (seen, right) == (5276, 2001)


@pytest.mark.parametrize("size", [0, 1, 40, 4301, 200_000])
def test_nasty_text(size):
    """0 or 1, no exception, and a second at most, whatever the text or the gold."""
    rng = random.Random(size)
    for _ in range(8 if size > 5000 else 100):
        pieces = rng.choices(NASTY, k=rng.choice((1, 1, 2, 4, 40)))
        text = "".join(rng.choices(pieces, k=size))[:size]
        text = rng.choice(("", "#### ", "\\boxed{", "Answer: ", "The total is 6 ")) + text
        text += rng.choice(("", "}", "x", " 5."))
        for kind in KINDS:
            start = time.process_time()
            assert m3.verify(text, rng.choice(("5", "A", "", text)), kind) in (0, 1)
            assert time.process_time() - start < 1, (kind, pieces, text[:60])


@pytest.mark.parametrize("piece", NASTY)
def test_long_runs(piece):
    text = piece * (200_000 // len(piece))
    for kind in KINDS:
        start = time.process_time()
        assert m3.verify(text, "3", kind) in (0, 1)
        assert m3.verify(f"\\boxed{{{text}", "3", kind) == 0
        assert time.process_time() - start < 2, kind


@pytest.mark.parametrize("gold", ["0", "7", "-12", "1,250", "3.50", "9007199254740993", "3/4", "9" * 900])
def test_gold_verifies_against_itself(gold):
    assert m3.verify(f"#### {gold}", gold, "gsm8k") == m3.verify(f"\\boxed{{{gold}}}", gold, "math") == 1
    assert m3.verify(f"#### {gold}", f"{gold}5", "gsm8k") == 0
    assert m3.verify(f"\\boxed{{{gold}5}}", gold, "math") == 0


def test_unknown_kind_is_a_programming_error():
    with pytest.raises(KeyError):
        m3.verify("#### 3", "3", "gsm9k")


# --- real models and data -----------------------------------------------------------------------------------


class Failed(SystemExit):
    """What train.fail does, with its message at hand."""


@pytest.fixture
def failing(monkeypatch):
    def fail(message, code=2):
        assert "\n" not in message
        raise Failed(message)
    monkeypatch.setattr(train, "fail", fail)


SHARED = HERE.parent / "shared/data"
with_files = pytest.mark.skipif(not SHARED.exists(), reason="no gsm8k_train.jsonl beside the project")
NONE = dict(prompt=None, answer=None, solution=None)
CHATML = ("{{ bos_token or '' }}{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> "
          "{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant "
          "{% if enable_thinking is defined and not enable_thinking %}"
          "<think> </think>{% endif %}{% endif %}")
ROW = dict(question="Ann has 3 cups and gets 4", solution="3 + 4 = 7\n#### 7", answer="7", kind="gsm8k")


def tokenizer(template=None, bos=False, words="", pad="<pad>"):
    text = f"<s> </s> <pad> <unk> <|im_start|> <|im_end|> <think> </think> {words} "
    text += " ".join(map(str, range(30))) + " Ann has cups and gets + = ####"
    vocab = {w: i for i, w in enumerate(dict.fromkeys(text.split()))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token=pad,
                                   bos_token="<s>" if bos else None, chat_template=template)


def tiny_model(kind, **kw):
    torch.manual_seed(0)
    common = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=8, bos_token_id=0, eos_token_id=1,
                  pad_token_id=2) | kw
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                          bos_token_id=0, eos_token_id=1, **kw)).eval()
    config, model = dict(qwen3=(Qwen3Config, Qwen3ForCausalLM), llama=(LlamaConfig, LlamaForCausalLM),
                         gemma2=(Gemma2Config, Gemma2ForCausalLM), cohere=(CohereConfig, CohereForCausalLM),
                         granite=(GraniteConfig, GraniteForCausalLM))[kind]
    return model(config(**common)).eval()


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def one_row(tmp_path, row, fields=NONE):
    return train.load_rows(write(tmp_path / "x.jsonl", [row]), fields, 0, ["train"])["train"][0]


# --- rows ---------------------------------------------------------------------------------------------------


@with_files
def test_all_shared_rows_load(capsys):
    splits = train.load_rows(str(SHARED), NONE, 0)  # gsm8k_train, gsm8k_test
    assert {s: len(r) for s, r in splits.items()} == {"train": 6973, "validation": 500, "test": 1319}
    assert {r["kind"] for rows in splits.values() for r in rows} == {"gsm8k"}
    # nothing in two splits
    assert len({r["question"] for rows in splits.values() for r in rows}) == 7473 + 1319
    assert not any("<<" in r["solution"] for r in splits["train"])
    assert "####" in splits["train"][0]["solution"]
    assert "its gsm8k_model_solutions.jsonl, svamp.json not read" in capsys.readouterr().out
    parts = train.load_rows(str(SHARED / "svamp.json"), NONE, 0)
    svamp = [r for s in splits for r in parts[s]]
    assert len(svamp) == 1000 and {r["kind"] for r in svamp} == {"svamp"}
    assert svamp[0]["question"].endswith("pack, How much do you have to pay to buy each pack?")
    assert (svamp[0]["answer"], svamp[0]["solution"]) == ("51", "( 76 - 25 ) = 51")
    assert not any("." in r["answer"] for r in svamp) and capsys.readouterr().out == ""


def test_layouts(tmp_path):
    stem, texts = "Which one melts?", ["ice", "iron", "air", "sand"]
    for labels, key in (("ABCD", "C"), ("1234", "3")):  # Ha27
        choices = [dict(text=text, label=label) for text, label in zip(texts, labels)]
        nested = {"question": {"stem": stem, "choices": choices}, "answerKey": key}
        flat = {"id": "x", "question": stem, "choices": {"text": texts, "label": list(labels)},
                "answerKey": key}
        for row in (nested, flat):
            got = one_row(tmp_path, row)
            assert got == dict(question=stem + "\nA. ice\nB. iron\nC. air\nD. sand", solution="C. air",
                               answer="C", kind="arc")
            assert m3.verify("C", got["answer"], "arc") == 1
    for n in (3, 5):
        row = {"question": stem, "choices": {"text": list("vwxyz"[:n]), "label": list("12345"[:n])},
               "answerKey": str(n)}
        assert one_row(tmp_path, row)["answer"] == "ABCDE"[n - 1]
        assert one_row(tmp_path, row)["question"].count("\n") == n
    row = {"problem": "p", "solution": r"so \boxed{\frac12}", "answer": r"\frac{1}{2}", "level": 1}
    math = one_row(tmp_path, row)
    assert (math["kind"], math["answer"], math["solution"]) == ("math", r"\frac{1}{2}", r"so \boxed{\frac12}")
    asked = dict(question="p", solution="", answer="7", kind="gsm8k")
    assert one_row(tmp_path, {"prompt": "p", "answer": 7}) == asked
    assert one_row(tmp_path, {"prompt": "p", "answer": "x+1"})["kind"] == "math"
    fields = dict(prompt="q", answer="gold", solution="why")
    asked = dict(question="p", solution="w", answer="B", kind="arc")
    assert one_row(tmp_path, {"q": "p", "gold": "B", "why": "w"}, fields) == asked
    assert one_row(tmp_path, {"question": "p", "answer": "<<1+2=3>>3\n#### 1,003"})["answer"] == "1,003"


def test_files(tmp_path):
    rows = [{"question": f"q\u2028{i}", "answer": f"so\n#### {i}"} for i in range(50)]
    def same(path):
        parts = train.load_rows(str(path), NONE, 0)
        assert sorted(int(r["answer"]) for part in parts.values() for r in part) == list(range(50))
        return parts
    first = same(write(tmp_path / "a.jsonl", rows))
    (tmp_path / "array.jsonl").write_text(json.dumps(rows, indent=1))  # Hd12
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    import datasets
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
    assert all(same(tmp_path / name) == first for name in ("array.jsonl", "a.csv", "a.parquet"))
    other = train.load_rows(str(tmp_path / "a.jsonl"), NONE, 1)
    assert other["train"] != first["train"]  # another seed holds out other rows
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train-00000-of-00002.jsonl", rows[:20])
    write(folder / "train-00001-of-00002.jsonl", rows[20:30])
    write(folder / "dev.json", rows[30:40])
    write(folder / "test.jsonl", rows[40:])
    parts = train.load_rows(str(folder), NONE, 0)
    assert {name: len(part) for name, part in parts.items()} == {"train": 30, "validation": 10, "test": 10}


def test_cells_stay_as_they_stand(tmp_path):
    """What a reader that guesses column types changes or refuses."""
    def golds(name, text, encoding="utf-8"):
        (tmp_path / name).write_text(text, encoding)
        return [r["answer"] for r in train.load_rows(str(tmp_path / name), NONE, 0, ["train"])["train"]]
    assert golds("a.csv", 'question,answer\na,007\nb,1.50\nc,7\n"d, e",x\n') == ["007", "1.50", "7", "x"]
    mixed = '{"question": "a", "answer": 7}\n\n{"answer": "x+1", "question": "b", "why": {"x": 1}}\n'
    assert golds("a.jsonl", mixed) == ["7", "x+1"]
    assert golds("b.json", '{"question": "a", "answer": "2020-01-02"}\r\n', "utf-8-sig") == ["2020-01-02"]


def test_math_500_is_cut_in_three(monkeypatch):
    import datasets
    rows = [{"problem": f"p{i}", "solution": f"\\boxed{{{i}}}", "answer": str(i)} for i in range(500)]
    known = {("HuggingFaceH4/MATH-500",): {"test": rows}}
    monkeypatch.setattr(datasets, "load_dataset", lambda *name: known[name])
    parts = train.load_rows("math", NONE, 0)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [350, 50, 100]
    assert len({r["question"] for part in parts.values() for r in part}) == 500


def test_bad_golds_are_counted_and_named(tmp_path, capsys):
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(30)]
    rows.append({"question": "odd", "answer": "#### n/a"})
    parts = train.load_rows(write(tmp_path / "x.jsonl", rows), NONE, 0)
    got = [r for part in parts.values() for r in part]
    assert len(got) == 30 and {r["kind"] for r in got} == {"gsm8k"}
    out = capsys.readouterr().out
    assert "1 of 31 rows left out" in out and "odd -> n/a" in out and out.count("\n") == 1


USER = [{"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize("question, text", [
    (USER, "1 + 1?"), (USER[0], "1 + 1?"), ([{"role": "system", "content": "Add."}, *USER], "Add.\n\n1 + 1?"),
    ([{"content": [{"type": "text", "text": "1 + 1?"}], "role": "user"}], "1 + 1?"), (["1 + 1?"], "1 + 1?"),
    (json.dumps(USER), "1 + 1?"), (str(USER), "1 + 1?"), ('[{"x": 1}] has how many keys?', None), (5, "5"),
    ("[1, 2] has which sum?", None)])
def test_questions_that_are_messages(tmp_path, question, text):
    """TRL's and verl's layout, and the same as text, as a .csv holds it."""
    for column in ("prompt", "question"):
        assert one_row(tmp_path, {column: question, "answer": "2"})["question"] == (text or question)
    row = one_row(tmp_path, {"prompt": question, "reward_model": {"style": "rule", "ground_truth": "2"}})
    assert (row["question"], row["answer"]) == (text or question, "2")


@pytest.mark.parametrize("answer, gold", [
    (["1"], "1"), ('["1"]', "1"), ("['1']", "1"), ("[1]", "1"), ([7], "7"), ([["7"]], "7"), ([2.5], "2.5"),
    ('["$\\\\frac{1}{2}$"]', r"$\frac{1}{2}$"), ("[1, 2]", "[1, 2]"), ("[0, 1)", "[0, 1)"),
    ("{1, 2}", "{1, 2}"), (["1", "2"], None), ('["1", "2"]', None), ("""["1", '2']""", None),
    ('[["1"]]', None), ([], None), ({"a": 1}, None), (True, None), (math.nan, None), (math.inf, None),
    (None, None), ("NaN", None), ("", None), ("1\ud83d", None),
    ([{"role": "assistant", "content": "2"}], None)])
def test_golds_that_are_lists_or_no_text(tmp_path, capsys, answer, gold):
    """A list of one is that one; several, or what is no text, is left out and named, never spelled out."""
    rows = [{"problem": f"p{i}", "answer": "x + 1"} for i in range(9)]
    rows.append({"problem": "odd", "answer": answer})
    got = train.load_rows(write(tmp_path / "x.jsonl", rows), NONE, 0, ["train"])
    golds = {r["question"]: r["answer"] for part in got.values() for r in part}
    assert golds.get("odd") == gold and len(golds) == 9 + (gold is not None)
    assert ("x.jsonl: 1 of 10 rows left out" in capsys.readouterr().out) == (gold is None)


@pytest.mark.parametrize("question", [
    "", None, math.nan, True, [], ["a", "b"], {"text": None}, [{"role": "user"}],
    [{"role": "user", "content": None}], [*USER, {"role": "assistant", "content": "2"}], [*USER, "b"],
    "Ann \ud83d has", [{"role": "user", "content": "\udc00"}], '[{"role": "user", "content": "cut'])
def test_questions_that_are_no_text(tmp_path, capsys, question):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(9)]
    rows.append({"question": question, "answer": "10"})
    got = train.load_rows(write(tmp_path / "x.jsonl", rows), NONE, 0, ["train"])
    assert sorted(int(r["answer"]) for part in got.values() for r in part) == list(range(9))
    out = capsys.readouterr().out
    assert "x.jsonl: 1 of 10 rows left out" in out and out.count("\n") == 1
    out.encode()


def test_solutions_may_lack(tmp_path):
    for solution, text in ((None, ""), (math.nan, ""), (["first", "second"], "first"), ("<<1+1=2>>2", "2")):
        assert one_row(tmp_path, {"question": "q", "answer": "2", "solution": solution})["solution"] == text


def keys(rows):
    return {" ".join(row["question"].lower().split()) for row in rows}


def test_equal_questions_stay_in_one_split(tmp_path, capsys):
    spellings = "What is {} ?", "what is {} ?", " What  is {} ?", "WHAT IS\n{} ? ", "What is {} ?"
    rows = [{"question": text.format(i), "answer": str(i)} for text in spellings for i in range(40)]
    parts = train.load_rows(write(tmp_path / "x.jsonl", rows), NONE, 0)
    assert {name: len(part) for name, part in parts.items()} == {"test": 40, "validation": 20, "train": 140}
    for a, b in (("train", "test"), ("train", "validation"), ("validation", "test")):
        assert not keys(parts[a]) & keys(parts[b])
    assert "x.jsonl: 160 of 200 rows ask what another asks" in capsys.readouterr().out


def test_no_test_row_stands_in_train(tmp_path, capsys):
    rows = [{"question": f"q {i}", "answer": str(i)} for i in range(60)]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.json", rows[:40] + rows[50:])
    write(folder / "train-backup.json", [row | {"question": row["question"].upper()} for row in rows[:40]])
    write(folder / "test.json", rows[50:])
    parts = train.load_rows(str(folder), NONE, 0)
    assert {name: len(part) for name, part in parts.items()} == {"test": 10, "validation": 8, "train": 72}
    assert not keys(parts["train"]) & (keys(parts["test"]) | keys(parts["validation"]))
    out = capsys.readouterr().out
    assert "40 of 100 rows ask what another asks" in out
    assert "10 of 100 rows left out, a held-out row asks the same: 'q 50'" in out


def test_a_large_file_is_read_once_under_bars(tmp_path, monkeypatch):
    """Work is counted, not timed: each row once, each different gold once, the guess from 1000 rows."""
    count, bars, read, verified = 3000, {}, [], []
    rows = [{"question": f"q{i}", "answer": f"{i % 50}.5"} for i in range(count)]
    path = write(tmp_path / "x.jsonl", rows)
    bar, read_file, verify = train.bar, train.read_file, m3.verify

    def counting_bar(rows, text):
        bars[text.split(", ")[-1]] = len(rows)
        return bar(rows, text)
    monkeypatch.setattr(train, "bar", counting_bar)
    monkeypatch.setattr(train, "read_file", lambda path: read.append(path) or read_file(path))
    monkeypatch.setattr(m3, "verify", lambda *a: verified.append(a) or verify(*a))
    train.gold_parses.cache_clear()
    parts = train.load_rows(path, NONE, 0)
    assert sum(map(len, parts.values())) == count and bars == {"train": count, "answers": count}
    assert (len(read), len(verified)) == (1, 50)
    encoded(tokenizer(), parts["train"])
    assert bars["by the thousand"] == math.ceil(len(parts["train"]) / 1000)


@pytest.mark.parametrize("kind", ["gsm8k", "math", "arc", "toy"])
def test_plain_numbers_parse_without_the_verifier(kind):
    for gold in ("7", "-12", "0", "007", "9" * 15, "9" * 16, "-", "1.5", "x", "", "B", "٣", "7\n"):
        want = m3.verify(m3.FINISH[kind][0].format(gold), gold, kind) == 1 and gold.strip() != ""
        assert (train.gold_parses(gold, kind) and gold.strip() != "") == want, gold


def test_one_odd_row_does_not_refuse_the_file(tmp_path, capsys):
    """Each is left out and counted: a null, a number, a comma without quotes; a very long cell is read."""
    good = [json.dumps({"question": f"q {i}", "answer": str(i)}) for i in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join([*good, "null", "7", '"text"']))
    parts = train.load_rows(str(tmp_path / "x.jsonl"), NONE, 0)
    assert sum(map(len, parts.values())) == 20 and "3 of 23 rows left out" in capsys.readouterr().out
    lines = [f"q {i} ?,{i}" for i in range(20)]
    wide = ['"' + "long " * 40_000 + '",7']
    moved = "Ann has 3 pens, gets 2 .,5"
    (tmp_path / "X.CSV").write_text("\n".join(["question,answer", *lines, moved, *wide]))
    parts = train.load_rows(str(tmp_path / "X.CSV"), NONE, 0)
    rows = [row for part in parts.values() for row in part]
    assert len(rows) == 21 and max(len(row["question"]) for row in rows) > 190_000
    out = capsys.readouterr().out
    assert "1 of 22 rows left out" in out and "more cells than columns" in out


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no system turn') }}", "{{ ' ' }}"])
def test_a_chat_template_that_fails(world, capsys, template):
    real_world(world, "qwen3", "model-qwen3")
    folder = world / "bad-template"
    shutil.copytree(world / "model-qwen3", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    run(world, "--model", "bad-template", "--out", "bad", code=2)
    one_line(capsys, "--model bad-template", "chat template")


@pytest.mark.usefixtures("failing")
def test_data_errors(tmp_path):
    def line(dataset, split="train", fields=NONE):
        with pytest.raises(Failed) as error:
            train.load_rows(str(dataset), fields, 0, [split])
        return str(error.value)
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl: 0 train rows" in line(tmp_path / "empty.jsonl")
    text = line(write(tmp_path / "x.jsonl", [{"prompt": "p", "label": "7"}]))  # Hd10
    assert "no column 'answer' in some row, the columns are prompt, label" in text and "x.jsonl" in text
    assert "'why'" in line(tmp_path / "x.jsonl", fields=dict(prompt=None, answer="label", solution="why"))
    for name in ("/no/such/dir", "./mistyped-dir", "gsm9k"):  # Hd08
        assert "folder not found" in line(name)
    assert "--dataset FILE" in line("gsm8k") and "ffline" in line("gsm8k")  # Hd07: offline
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n{"question": \n')
    assert "cannot be read" in line(tmp_path / "bad.jsonl") and "line 2" in line(tmp_path / "bad.jsonl")
    (tmp_path / "list.json").write_text('["a", "b"]')
    assert "0 train rows" in line(tmp_path / "list.json")
    (tmp_path / "nothing").mkdir()
    assert "no file in it has train in its name" in line(tmp_path / "nothing")
    (tmp_path / "test-and-more").mkdir()  # the test rows are not for training
    for name in ("test.jsonl", "more.jsonl"):
        write(tmp_path / "test-and-more" / name, [{"prompt": name, "answer": "7"}])
    assert "no file in it has train in its name" in line(tmp_path / "test-and-more")
    lines = [f"How many are {i},{i}" for i in range(20)]
    for place, bad in (5, '"How many,5'), (5, 'How many,"5'), (5, '"How" many,5'):
        (tmp_path / "q.csv").write_text("\n".join(["question,answer", *lines[:place], bad, *lines[place:]]))
        assert "a quote that does not end" in line(tmp_path / "q.csv")
    two = [*lines[:5], '"How many,5', *lines[5:9], '"How much,5', *lines[9:]]
    (tmp_path / "q.csv").write_text("\n".join(["question,answer", *two]))
    assert "a quote that does not end" in line(tmp_path / "q.csv")
    (tmp_path / "q.csv").write_text("\n".join(["question,answer,answer", "How many,4,5"]))
    assert "stands twice" in line(tmp_path / "q.csv")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "Ännchen", "answer": "1"}'.encode("latin-1"))
    assert "UTF-8" in line(tmp_path / "latin.jsonl")
    assert "0 test rows" in line(write(tmp_path / "y.jsonl", [{"prompt": "p", "answer": "7"}]), "test")
    assert "0 usable train rows" in line(write(tmp_path / "y.jsonl", [{"prompt": "p", "answer": ""}]))


@pytest.mark.parametrize("names", [
    ("Train.jsonl", "Test.JSONL"), ("train1.jsonl", "train2.jsonl", "test.jsonl"),
    ("training.jsonl", "testing.jsonl"), ("my_train.jsonl", "._train.jsonl", "test-1.jsonl", "info.json"),
    ("train.jsonl", "Eval.jsonl", "test.jsonl")])
def test_a_folders_test_rows_are_never_trained_on(tmp_path, capsys, names):
    for name in names:
        part = next(word for word in ("train", "test", "eval", "info") if word in name.lower())
        rows = [{"question": f"{part} {name} {i}", "answer": str(i)} for i in range(20)]
        if name[0] == ".":
            (tmp_path / name).write_bytes(b"\x00\x05\xff\xfe")  # what macOS leaves on a stick
        else:
            write(tmp_path / name, rows)
    splits = train.load_rows(str(tmp_path), NONE, 0)
    for split, word in ("train", "train"), ("test", "test"):
        assert {row["question"].split()[0] for row in splits[split]} == {word}
    files = [name for name in names if "train" in name.lower() and name[0] != "."]
    assert {row["question"].split()[1] for row in splits["train"]} == set(files)
    said = capsys.readouterr().out
    assert ("its info.json not read" in said) == ("info.json" in names)


def test_questions_that_look_alike_share_a_split():
    first, *others = (train.question_key({"question": text}) for text in (
        "Où est Zoë ?", "Ou\u0300 est Zoe\u0308?", "Où\u200b est  Zoë ?\ufeff", "OÙ EST ZOË?"))
    assert others == [first] * 3
    assert train.question_key({"question": "3 - 4?"}) != train.question_key({"question": "3 + 4?"})


# --- prompts ------------------------------------------------------------------------------------------------


def encoded(tok, rows=(ROW,), context=10 ** 6, shots=(), hint="solution"):
    return train.encode_rows(list(rows), tok, context, 16, list(shots), hint)


@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [None, CHATML])
def test_tails_and_start_token(template, bos, shots):
    words = "Solution: Question: user assistant Reason step by step, then finish with Reference solution:"
    tok = tokenizer(template, bos, words=words)
    examples = [ROW | dict(question=f"Ann has {i}", answer=str(i), solution=f"{i} = {i}")
                for i in range(shots)]
    row = encoded(tok, shots=examples)[0]
    student, teacher = (tok.decode(row[k]) for k in ("prompt_ids", "teacher_ids"))
    tail = "<|im_start|> assistant <think> </think>" if template else "Solution:"
    assert student.endswith(tail) and teacher.endswith(tail)  # Hc12, Hd05
    shared = next(i for i in range(1, 99) if row["prompt_ids"][-i] != row["teacher_ids"][-i]) - 1
    assert shared >= 10  # the instruction too, not the prefix alone
    assert [row[k].count(0) for k in ("prompt_ids", "teacher_ids")] == [bos] * 2
    assert (row["prompt_ids"][0] == 0) == bos  # Hc19, Hd04
    assert student.count("#### 0") == (shots > 0) and row["prompt"] == ROW["question"]
    assert tok.eos_token_id not in row["prompt_ids"]


def test_gold_is_only_in_the_teachers_prompt():
    row = ROW | dict(solution="ZEBRA-41 then\n#### 29", answer="29")  # Hc18
    for template in (None, CHATML):
        tok = tokenizer(template, words="ZEBRA-41")
        for shots in ((), [ROW], [ROW, row]):  # the row itself as an example: it is no problem then
            for got in encoded(tok, [row, ROW | {"question": "another"}], shots=shots):
                if got["question"] == row["question"]:
                    student, teacher = (tok.decode(got[k]) for k in ("prompt_ids", "teacher_ids"))
                    assert "ZEBRA-41" not in student and " 29" not in student and "ZEBRA-41" in teacher
        assert len(encoded(tok, [row | {"question": "new"}, ROW], shots=[ROW])) == 1
        answer = tok.decode(encoded(tok, [row], hint="answer")[0]["teacher_ids"])
        assert "#### 29" in answer and "ZEBRA-41" not in answer


def test_shots_show_the_teacher_how_a_reference_is_used():
    shots = [ROW | dict(question=f"Ann has {i}", answer=str(i), solution=f"{i} = {i}") for i in (3, 5)]
    student, teacher = (m3.prompt_text(tokenizer(), ROW, shots, reference) for reference in ("", "2 = 2"))
    for i in (3, 5):
        assert student.count(f"{i} = {i}") == 1 and teacher.count(f"{i} = {i}") == 2
    assert teacher.count("Reference solution") == 3 and "Reference solution" not in student


def test_text_per_kind():
    tok = tokenizer()
    for kind, gold, end in (("gsm8k", "7", '"#### number"'), ("svamp", "7", '"#### number"'),
                            ("math", "x", r'"\boxed{answer}"'), ("arc", "B", '"Answer: letter"')):
        row = dict(question="Q?", solution="work", answer=gold, kind=kind)
        teacher = m3.prompt_text(tok, row, reference=m3.reference_text(row, "solution"))
        assert m3.prompt_text(tok, row).endswith(end + ".\nSolution:")
        assert teacher.endswith(end + ".\nSolution:")
        assert m3.verify(m3.reference_text(row, "solution"), gold, kind) == 1
        assert "in your own words" in teacher
    assert m3.reference_text(ROW, "solution") == ROW["solution"]  # closed already: nothing is added


@pytest.mark.usefixtures("failing")
def test_length_filter(capsys):  # Hc10, Hd09, Hd11
    tok = tokenizer(CHATML)
    long = ROW | dict(question="too long", solution="and " * 200)
    full = encoded(tok, [ROW, long])
    room = max(len(full[0]["prompt_ids"]), len(full[0]["teacher_ids"])) + 16
    # exactly at the limit; the teacher's prompt counts too
    assert encoded(tok, [ROW, long], context=room) == full[:1]
    out = capsys.readouterr().out
    assert out.startswith("prompts: 1 of 2 rows left out") and "too long" in out and out.count("\n") == 1
    with pytest.raises(Failed, match="0 of 2 rows left after the length filter"):
        encoded(tok, [ROW, long], context=room - 1)


DATED = "{{ strftime_now('%d %b %Y') }} {% for m in messages %}{{ m.content }} {% endfor %}"


def test_the_date_in_a_prompt_is_given():
    tok = tokenizer(DATED, words="31 Dec 2024")
    assert m3.prompt_text(tok, ROW, date="2024-12-31").startswith("31 Dec 2024 Ann has 3")
    assert m3.prompt_text(tok, ROW, [ROW], "3 + 4", "2024-12-31").startswith("31 Dec 2024 Ann has 3")
    before, text = datetime.date.today(), m3.prompt_text(tok, ROW)
    assert text[:11] in [f"{day:%d %b %Y}" for day in (before, datetime.date.today())]
    keyword = tokenizer(DATED.replace("('", "(format='"), words="31 Dec 2024")
    assert m3.prompt_text(keyword, ROW, date="2024-12-31").startswith("31 Dec 2024 Ann has 3")
    row = train.encode_rows([ROW], tok, 10 ** 6, 16, [], "solution", "2024-12-31")[0]
    assert [tok.decode(row[name])[:11] for name in ("prompt_ids", "teacher_ids")] == ["31 Dec 2024"] * 2


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("few", [8, 100])
def test_few_shot_may_not_take_every_row(few):
    rows = [ROW | {"question": f"Ann has {i}"} for i in range(8)]
    with pytest.raises(Failed, match=f"--few-shot {len(rows[:few])} takes all rows"):
        encoded(tokenizer(), rows, shots=rows[:few])
    again = rows[0] | {"question": " ANN has 0"}  # the same question: the answer stands in the prompt
    left = encoded(tokenizer(), [again, *rows[1:]], shots=rows[:7])
    assert [row["question"] for row in left] == ["Ann has 7"]


# --- models -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("failing")
def test_load_model(tmp_path, capsys):
    for kind in ("qwen3", "llama", "gpt2"):
        folder = tmp_path / kind
        tiny_model(kind).save_pretrained(folder)
        with pytest.raises(Failed, match="cannot load its tokenizer"):
            train.load_model(str(folder), "float32", "cpu")
        tokenizer(pad=None).save_pretrained(folder)
        model, tok, eos_ids = train.load_model(str(folder), torch.bfloat16, "cpu")
        assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
        assert not model.training
        assert tok.pad_token == "</s>" and "</s>" in capsys.readouterr().out and eos_ids == {1}  # Hd02
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    assert train.load_model(str(folder), torch.float32, "cpu")[2] == {1, 5} and capsys.readouterr().out == ""
    state = {k: v for k, v in model.state_dict().items() if "h.1.mlp" not in k}
    model.save_pretrained(folder, state_dict=state)
    for path, words in ((folder, "no weights for"), ("/no/such/dir", "folder not found"),
                        ("./mistyped-dir", "folder not found"),
                        ("no-such/model", "cannot load its tokenizer")):
        with pytest.raises(Failed, match=words):
            train.load_model(str(path), torch.float32, "cpu")


@pytest.mark.usefixtures("failing")
def test_teacher_is_checked():
    ours = tokenizer(words="cat dog")
    m3.check_teacher(ours, tokenizer(CHATML, words="cat dog"), ("S", "T"), (64, 64))
    with pytest.raises(ValueError, match="S and T.*'cat'"):  # Hc02: equal size, two words swapped
        m3.check_teacher(ours, tokenizer(words="dog cat"), ("S", "T"), (64, 64))
    with pytest.raises(ValueError, match="S are 64 wide, those of T 72"):  # Hc01
        m3.check_teacher(ours, ours, ("S", "T"), (64, 72))


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("kind, kw",
                         [("qwen3", {}), ("qwen3", dict(tie_word_embeddings=True)), ("llama", {}),
                          ("gpt2", {}),
                                      ("gemma2", dict(final_logit_softcapping=0.02)), ("cohere", {}),
                                      ("granite", dict(logits_scaling=8.0))])
def test_split_head(kind, kw):
    model = tiny_model(kind, **kw)
    ids = torch.randint(64, (2, 9))
    for m in (model, model.bfloat16()):
        backbone, head = m3.split_head(m)
        torch.testing.assert_close(head(backbone(input_ids=ids).last_hidden_state), m(input_ids=ids).logits)
    assert isinstance(head, torch.nn.Linear) == (kind in ("qwen3", "llama", "gpt2"))
    if kind == "llama":
        forward = model.forward

        def doubled(**kw):
            return types.SimpleNamespace(logits=forward(**kw).logits * 2)
        model.forward = doubled
        with pytest.raises(ValueError, match="LlamaForCausalLM"):
            m3.split_head(model)


# --- LoRA ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, layers, kw",
                         [("qwen3", 14, dict(tie_word_embeddings=True)), ("llama", 14, {}), ("gpt2", 8, {})])
def test_lora(kind, layers, kw, dtype, tmp_path):
    model, ids = tiny_model(kind, **kw).to(dtype), torch.randint(64, (2, 9))

    def logits():
        return model(input_ids=ids).logits.detach()

    base, names, noise = logits(), list(model.state_dict()), torch.get_rng_state()
    m3.add_lora(model, 4, seed=1)
    assert torch.equal(torch.get_rng_state(), noise)  # no global draw
    assert torch.equal(logits(), base)  # B = 0: exactly the base
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * layers and all(p.dtype == torch.float32 for p in trained.values())
    assert set(trained) == set(m3.lora_state(model)) and not any("lm_head" in n for n in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=0.02)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        assert all((p.grad is not None) == (n in trained) for n, p in model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    tuned, before = logits(), {k: v.clone() for k, v in model.state_dict().items()}
    assert (tuned - base).abs().max() > 0.01
    with m3.lora_off(model):
        assert torch.equal(logits(), base)
    with pytest.raises(KeyError), m3.lora_off(model):
        raise KeyError
    assert torch.equal(logits(), tuned)  # on again, after an error too

    state = m3.merged_state(model)
    assert sorted(state) == sorted(names)
    model.save_pretrained(tmp_path, state_dict=state)
    loaded, info = type(model).from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    close = dict(atol=1e-5, rtol=1e-4) if dtype == torch.float32 else dict(atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(loaded.eval()(input_ids=ids).logits, tuned, **close)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(logits(), tuned)

    # the adapter alone restores a fresh model
    adapter = {k: v.clone() for k, v in m3.lora_state(model).items()}
    model = tiny_model(kind, **kw).to(dtype)
    m3.add_lora(model, 4, seed=2)
    assert not model.load_state_dict(adapter, strict=False).unexpected_keys and torch.equal(logits(), tuned)


def test_lora_seed_and_scale():
    first, second, third = (tiny_model("llama") for _ in range(3))
    for model, seed in ((first, 0), (second, 0), (third, 1)):
        m3.add_lora(model, 4, seed)
    a, b, c = (m3.lora_state(m)["model.layers.1.mlp.up_proj.lora_A.weight"] for m in (first, second, third))
    assert torch.equal(a, b) and not torch.equal(a, c) and a.abs().max() <= 32 ** -0.5
    layer, x = first.model.layers[0].mlp.up_proj, torch.randn(3, 32)
    layer.lora_B.weight.data.normal_()
    # alpha = 2 r: scale 2 at any rank
    want = x @ (layer.base.weight + 2 * layer.lora_B.weight @ layer.lora_A.weight).T
    torch.testing.assert_close(layer(x), want)


# --- the start-up check ----------------------------------------------------------------------------------


def starting(model, other=None, **flags):
    """train.try_out, as a run calls it before its first rollouts."""
    usual = {"model": "M", "teacher": "T", "lora_rank": 0, "gradient_checkpointing": False, "kernel": "logit"}
    return train.try_out(model, other, types.SimpleNamespace(**usual | flags))


def settings_of(model):
    """Its config, but for two values that each save_pretrained writes into it."""
    return {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("dtype", "architectures")
    }


def by_name(name, **kw):
    """A tiny random causal model of any architecture in transformers."""
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**common | kw)
    ).eval()


HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = HEADS | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_topk": 2,
}


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize(
    "name, kw",
    [
        ("Mamba", {"state_size": 8}),
        ("Lfm2", HEADS | {"layer_types": ["conv", "full_attention"]}),
        (
            "Qwen3Next",
            EXPERTS
            | {
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "shared_expert_intermediate_size": 16,
            },
        ),
    ],
)
def test_models_without_keys_and_values_are_refused_at_the_start(name, kw):
    model = by_name(name, **kw)
    with pytest.raises(Failed, match="--model M cannot be sampled.*keys and values"):
        starting(model)
    with pytest.raises(Failed, match="--teacher T cannot be sampled"):
        starting(tiny_model("llama"), model)


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_start_up_check_lets_sound_models_pass_and_moves_nothing(dtype, capsys):
    for kind in ("qwen3", "gemma2", "gpt2", "cohere"):
        for lora_rank in (0, 4):
            model = tiny_model(kind).to(dtype)
            if lora_rank:
                m3.add_lora(model, lora_rank, 0)
            teacher = tiny_model("llama").to(dtype)
            before, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
            settings = settings_of(model)
            for checkpointing in (False, True):
                starting(model, teacher, lora_rank=lora_rank, gradient_checkpointing=checkpointing)
            assert torch.equal(torch.get_rng_state(), noise) and settings_of(model) == settings
            assert same(dict(model.state_dict()), dict(before)) and not any(
                m.training for m in model.modules()
            )
            assert all(p.grad is None for p in model.parameters())
            assert ("(100%)" in capsys.readouterr().out) == bool(lora_rank)


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("name, change, words", [
    ("sample", lambda drawn: (*drawn[:2], drawn[2] - 0.3), "sampled"),
    ("hidden_states", lambda h: 2 * h, "scored"),
    ("hidden_states", lambda h: h * math.nan, "scored"),
    ("hidden_states", lambda h: h.detach().requires_grad_(), "grad")])
def test_the_start_up_check_sees_what_is_wrong(name, change, words, monkeypatch):
    right = getattr(m3, name)
    monkeypatch.setattr(m3, name, lambda *args, **kw: change(right(*args, **kw)))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(Failed, match=words):
            starting(tiny_model("llama", initializer_range=0.2).to(dtype))


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize(
    "name, kw",
    [
        (
            "OPT",
            {
                "ffn_dim": 48,
                "num_attention_heads": 4,
                "word_embed_proj_dim": 32,
                "dropout": 0.1,
                "attention_dropout": 0.1,
                "layerdrop": 0.5,
            },
        ),
        ("Starcoder2", HEADS | {"embedding_dropout": 0.1}),
        ("GPTNeoX", HEADS | {"hidden_dropout": 0.1}),
        ("GPTBigCode", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
        ("Phi3", HEADS | {"resid_pdrop": 0.1, "embd_pdrop": 0.1}),
    ],
)
def test_gradient_checkpointing_has_no_dropout_at_all(name, kw, monkeypatch):
    model = by_name(name, **kw)
    settings = settings_of(model)
    starting(model, gradient_checkpointing=True)  # its gradients are those of plain forward passes
    model.train()
    ids = torch.arange(12)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert settings_of(model) == settings  # what is saved keeps its dropouts
    model = by_name(name, **kw)
    monkeypatch.setattr(
        train, "use_checkpointing", lambda m: m.gradient_checkpointing_enable()
    )  # dropouts left on
    with pytest.raises(Failed, match="--gradient-checkpointing does not work with M: leave it out"):
        starting(model, gradient_checkpointing=True)


@pytest.mark.usefixtures("failing")
def test_adapters_say_how_much_of_the_blocks_they_cover(capsys):
    model = m3.add_lora(by_name("Qwen3Moe", **EXPERTS), 4, 0)
    matrices = [
        p
        for name, p in by_name("Qwen3Moe", **EXPERTS).named_parameters()
        if ".layers." in name and p.ndim > 1
    ]
    attention = 2 * (32 * 32 * 2 + 16 * 32 * 2)  # two layers of q, o and the smaller k, v
    assert m3.lora_share(model) == (attention, sum(p.numel() for p in matrices))
    starting(model, lora_rank=4)
    assert f"adapters on {attention:,} of" in capsys.readouterr().out
    if hasattr(
        transformers, "PhimoeForCausalLM"
    ):  # its router is a Linear with two outputs: no adapter there
        starting(m3.add_lora(by_name("Phimoe", **EXPERTS), 4, 0), lora_rank=4)
        assert "adapters on 6,144 of 43,264 block weights (14%)" in capsys.readouterr().out
    with pytest.raises(
        Failed, match="--lora-rank: adapters do not fit M: leave it out"
    ):  # reads a layer's weight itself
        starting(m3.add_lora(by_name("HunYuanMoEV1", **EXPERTS), 4, 0), lora_rank=4)
    bare = tiny_model("llama").requires_grad_(False)
    with pytest.raises(Failed, match="no linear layers"):
        starting(bare, lora_rank=4)


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_no_numbers_are_refused(tmp_path, bad):
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = bad
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(Failed, match="--teacher .*NaN or infinity in 1 weights.*layers.1.mlp.up_proj.weight"):
        train.load_model(str(tmp_path), torch.float32, "cpu", "--teacher")


@pytest.mark.usefixtures("failing")
def test_end_ids_are_the_tokenizers(tmp_path):
    model, bare = tiny_model("gpt2"), tokenizer(pad=None)
    bare.eos_token = None
    bare.save_pretrained(tmp_path)
    for vocab in (64, 60_000):  # outside the model's vocabulary too, or only the tokenizer's
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab, n_embd=8, n_layer=1, n_head=1)
        )  # 50256 by default
        model.save_pretrained(tmp_path)
        with pytest.raises(Failed, match=r"no end token in tokenizer or settings, only \[50256\]"):
            train.load_model(str(tmp_path), torch.float32, "cpu")
    for named, ends in ([50256, 1, 5, -1], {1, 5}), (0, {0}), ([0, 5], {0, 5}):  # 0 is an id, not "none"
        model.generation_config.eos_token_id = named
        model.save_pretrained(tmp_path)
        assert train.load_model(str(tmp_path), torch.float32, "cpu")[2] == ends


@pytest.mark.parametrize(
    "config, length",
    [
        (LlamaConfig(max_position_embeddings=64), 64),
        (BloomConfig(), 10**9),
        (GPT2Config(n_positions=48), 48),
        (
            Phi3Config(
                hidden_size=32,
                num_attention_heads=4,
                max_position_embeddings=64,
                original_max_position_embeddings=12,
                rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
            ),
            12,
        ),
        (
            LlamaConfig(
                max_position_embeddings=64,
                rope_scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 12},
            ),
            12,
        ),
        (LlamaConfig(max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 64),
        (
            LlamaConfig(
                max_position_embeddings=64,
                rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            ),
            64,
        ),
        (
            LlamaConfig(
                max_position_embeddings=64,
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            ),
            64,
        ),
    ],
)
def test_context_length(config, length):
    assert train.context_length(config) == length


def test_within_the_context_length_the_number_of_tokens_changes_nothing():
    """LongRoPE: a long row beside a short one changes the short one's logits, but only beyond the limit."""
    model = by_name(
        "Phi3",
        **HEADS,
        max_position_embeddings=64,
        original_max_position_embeddings=12,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    )
    limit = train.context_length(model.config)
    short = torch.arange(5, 11)[None]
    logits = [model(input_ids=F.pad(short, (0, n - 6))).logits[:, :6] for n in (6, limit, limit + 1)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)
    assert (logits[0] - logits[2]).abs().max() > 1e-3


# --- the program on models that are not the toy -------------------------------------------------------------


def real_world(world, kind, name):
    """A tiny random model of a real architecture, saved as an ordinary folder, with the toy world's words."""
    folder = world / name
    if not folder.exists():
        words = ("Question: Solution: Reason step by step, then finish with number "
                 "Reference solution: Now derive the answer in your own")
        tok = tokenizer(words=f"{words} {' '.join(w for w in train.TOY_WORDS if w.strip())}")
        config = dict(vocab_size=len(tok), num_hidden_layers=2, pad_token_id=None, bos_token_id=None,
                      eos_token_id=1)
        torch.manual_seed(0)
        if kind == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **config))
        else:
            config |= dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                           head_dim=8, max_position_embeddings=256, tie_word_embeddings=kind == "qwen3",
                           initializer_range=0.2)
            model = {"qwen3": Qwen3ForCausalLM, "llama": LlamaForCausalLM}[kind](
                {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind](**config))
        model.save_pretrained(folder)
        tok.save_pretrained(folder)
    return ["--model", name, "--stats-every", "1"]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_lora_run_resumes_and_saves_a_merged_model(world, rewarded, kind):
    argv = real_world(world, kind, f"model-{kind}")
    argv += ["--lora-rank", "4", "--kernel", "local", "--lr", "1e-2"]
    whole = run(world, *argv, "--out", f"lora-{kind}")
    run(world, *argv, "--out", f"lora2-{kind}", "--steps", "2")
    parts = run(world, *argv, "--resume", f"lora2-{kind}", "--out", f"lora2-{kind}", "--steps", "3")
    for line in [*whole, *parts]:
        line.pop("accuracy")
    assert whole == parts and all(line["kappa"] > 0 for line in whole[1:])
    one, two = weights(world, f"lora-{kind}"), weights(world, f"lora2-{kind}")
    assert all(torch.equal(one[k], two[k]) for k in one)
    loaded, info = AutoModelForCausalLM.from_pretrained(world / f"lora-{kind}" / "last",
                                                        output_loading_info=True)
    start = AutoModelForCausalLM.from_pretrained(world / f"model-{kind}").state_dict()
    assert not info["missing_keys"] and not info["unexpected_keys"]
    moved = {k for k, v in loaded.state_dict().items() if not torch.equal(v, start[k])}
    # no norm, head or embedding
    assert moved and all(("mlp" in k or "attn" in k) and k.endswith("weight") for k in moved)


def test_a_run_keeps_its_date(world, rewarded, monkeypatch):
    """A chat template writes the day: a run resumed on another day reads the prompts that it began with."""
    argv = real_world(world, "qwen3", "dated")
    tok = transformers.AutoTokenizer.from_pretrained(world / "dated")
    tok.chat_template = DATED
    tok.save_pretrained(world / "dated")
    prompts, prompt_text = [], m3.prompt_text

    def kept(*args, **kw):
        prompts.append(prompt_text(*args, **kw))
        return prompts[-1]
    monkeypatch.setattr(m3, "prompt_text", kept)
    run(world, *argv, "--method", "sdpo", "--out", "dated-run", "--steps", "1", read=False)
    config = json.loads((world / "dated-run" / "config.json").read_text())
    assert abs(datetime.date.today() - datetime.date.fromisoformat(config["date"])).days <= 1
    (world / "dated-run" / "config.json").write_text(json.dumps(config | {"date": "2001-02-03"}))
    prompts.clear()
    run(world, "--resume", "dated-run", "--steps", "2", read=False)
    assert {text[:11] for text in prompts} == {"03 Feb 2001"} and any("own words" in text for text in prompts)


def test_hint_error_is_what_the_teacher_reads(world, rewarded, monkeypatch):
    read, reference_text = [], m3.reference_text
    monkeypatch.setattr(m3, "reference_text", lambda *a: read.append(reference_text(*a)) or read[-1])
    run(world, "--hint-error", "0.5", "--steps", "1", "--out", "misled", read=False)
    rows = few_rows(4096, 0, hint_error=0.5)
    assert read[:len(rows)] == [reference_text(row, "solution") for row in rows]
    assert 0.4 < sum("misled" in row for row in rows) / len(rows) < 0.5
    run(world, "--hint-error", "0.5", "--dataset", "gsm8k", "--model", "anything", code=2)


@pytest.mark.parametrize("extra", [["--gradient-checkpointing"], ["--vocab-chunk", "3"]])
def test_memory_flags_do_not_change_the_result(world, rewarded, extra):
    argv = real_world(world, "llama", "model-llama")
    argv += ["--lora-rank", "4", "--steps", "1", "--kernel", "local"]
    name = extra[0].strip("-")
    if not (world / "mem-plain").exists():
        run(world, *argv, "--out", "mem-plain")
    run(world, *argv, *extra, "--out", f"mem-{name}")
    a, b = ([json.loads(line) for line in (world / o / "metrics.jsonl").read_text().splitlines()][1]
            for o in ("mem-plain", f"mem-{name}"))
    for key in ("reward", "loss_R", "loss_D", "kappa", "phi", "grad_norm", "conflict", "entropy"):
        assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-6), key


def test_bfloat16_weights_move_by_float32_masters(world, rewarded):
    """A step of 1e-6 is below bf16's spacing: without float32 copies two hundred of them would be lost."""
    argv = real_world(world, "llama", "model-llama")
    argv += ["--dtype", "bfloat16", "--lr", "1e-6", "--kernel", "logit"]
    run(world, *argv, "--out", "bf16", "--steps", "2")
    state = torch.load(world / "bf16" / "last" / "trainer.pt", weights_only=True)
    start = AutoModelForCausalLM.from_pretrained(world / "model-llama", dtype=torch.bfloat16)
    pairs = list(zip(state["masters"], start.parameters()))
    assert pairs and all(m.dtype == torch.float32 for m, _ in pairs)
    assert all(v.dtype == torch.float32 for s in state["optimizer"]["state"].values()
               for k, v in s.items() if k != "step")
    moved = [(m - p.float()).abs().max() for m, p in pairs]
    assert max(moved) > 1e-6 and max(moved) < 1e-5


def test_another_model_teaches(world, rewarded):
    argv = [*real_world(world, "llama", "model-llama"), "--method", "opd", "--lr", "1e-2"]
    real_world(world, "qwen3", "model-qwen3")
    lines = run(world, *argv, "--teacher", "model-qwen3", "--out", "taught", "--steps", "3")
    assert lines[1]["loss_D"] > 0
    argv += ["--lr", "0", "--steps", "1"]
    same = run(world, *argv, "--teacher", "model-llama", "--out", "taught-by-itself")
    # the student's own weights, reading the student's own prompt
    assert same[1]["loss_D"] == pytest.approx(0, abs=1e-6)


def test_an_architecture_local_does_not_know_is_refused_at_once(world, capsys):
    folder = world / "bloom"
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    run(world, "--model", "bloom", "--dataset", "toy", "--kernel", "local", "--out", "bloomed", code=2)
    assert "--kernel logit" in capsys.readouterr().err


def spoiled(world, name, change):
    """The tiny llama of real_world, loaded, changed and saved again as a folder of this name."""
    real_world(world, "llama", "model-llama")
    model = AutoModelForCausalLM.from_pretrained(world / "model-llama")
    tok = transformers.AutoTokenizer.from_pretrained(world / "model-llama")
    change(model, tok)
    model.save_pretrained(world / name)
    tok.save_pretrained(world / name)
    return name


def test_the_start_up_check_ends_a_run_before_its_first_rollouts(world, capsys, monkeypatch):
    monkeypatch.setattr(train, "evaluate", None)  # nothing is sampled in earnest
    llama = ["--model", "model-llama"]
    ending = spoiled(
        world, "ends-elsewhere", lambda model, tok: setattr(model.generation_config, "eos_token_id", [1, 5])
    )
    broken = spoiled(world, "broken", lambda model, tok: model.lm_head.weight.data[:2].fill_(math.nan))
    tok = transformers.AutoTokenizer.from_pretrained(world / "model-llama")
    for name, kw in (
        ("Lfm2", HEADS | {"layer_types": ["conv", "full_attention"]}),
        ("HunYuanMoEV1", EXPERTS),
    ):
        by_name(name, **kw | {"vocab_size": len(tok), "max_position_embeddings": 256}).save_pretrained(
            world / name
        )
        tok.save_pretrained(world / name)
    for argv, words in (
        (["--model", "Lfm2"], ["--model Lfm2", "keys and values"]),
        ([*llama, "--teacher", "Lfm2"], ["--teacher Lfm2"]),
        (["--model", "HunYuanMoEV1", "--lora-rank", "4"], ["--lora-rank", "leave it out"]),
        ([*llama, "--teacher", ending], ["--teacher", "ends with [1, 5]"]),
        (["--model", broken], ["NaN or infinity in 1 weights", "lm_head"]),
    ):
        run(world, *argv, "--out", "never", code=2)
        one_line(capsys, *words)
    assert not (world / "never" / "metrics.jsonl").exists()


def test_the_start_up_check_changes_no_result(world, rewarded, request):
    one = run(world, "--out", "tried", "--steps", "1")
    request.getfixturevalue("untried")
    assert one == run(world, "--out", "untried", "--steps", "1")
    assert same(weights(world, "tried"), weights(world, "untried"))


def test_the_length_filter_counts_the_original_context(world, rewarded, capsys):
    tok = tokenizer(words=" ".join(word for word in train.TOY_WORDS if word.strip()))
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    by_name(
        "Phi3",
        **HEADS
        | {
            "vocab_size": len(tok),
            "max_position_embeddings": 512,
            "rope_scaling": scaling,
            "original_max_position_embeddings": 200,
        },
    ).save_pretrained(world / "phi3")
    tok.save_pretrained(world / "phi3")
    run(world, "--model", "phi3", "--out", "phi3-run", "--steps", "1")
    assert "depends on the length beyond 200 tokens: the length filter counts 200" in capsys.readouterr().out
    run(world, "--model", "phi3", "--out", "phi3-long", "--max-new-tokens", "199", code=2)
    one_line(capsys, "within a context of 200")


# --- ntk.py: four kernels, proven against each other --------------------------------------------------------


V, CONFIGS = (
    29,
    {
        "qwen3": Qwen3Config,
        "qwen2": Qwen2Config,
        "llama": LlamaConfig,
        "mistral": MistralConfig,
        "phi3": Phi3Config,
    },
)


def small(kind="qwen3", tied=True, layers=2):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=V,
            n_embd=16,
            n_layer=layers,
            n_head=4,
            n_positions=32,
            tie_word_embeddings=tied,
            scale_attn_by_inverse_layer_idx=True,
        )
    else:
        more = {
            "qwen3": {"head_dim": 6},
            "mistral": {"sliding_window": 4},
            "llama": {"attention_bias": True, "mlp_bias": True},
        }
        config = CONFIGS[kind](
            vocab_size=V,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
            pad_token_id=0,
            **more.get(kind, {}),
        )
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():  # norm weights off 1, biases off 0, weights large enough to matter
        for p in model.parameters():
            p.mul_(2 if p.ndim > 1 else 1).add_(0.2 * torch.randn_like(p))
    return model.eval()


def rows_of(B=4, prompt=5, N=5, group=2, seed=1):
    """Left-padded prompts shared by groups, right-padded responses; residuals zero outside the mask."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, V, (B, prompt + N), generator=g)
    mask = torch.ones_like(ids)
    for i in range(B):
        ids[i, :prompt], mask[i, : i // group] = ids[i - i % group, :prompt], 0
        mask[i, prompt + N - i % 3 :] = 0
    delta = [
        torch.randn(B, N, V, generator=g, dtype=torch.float64).softmax(-1)
        * (1 + torch.arange(B)[:, None, None])
        - torch.randn(B, N, V, generator=g, dtype=torch.float64).mul(2).softmax(-1)
        for _ in range(2)
    ]
    return (ids, mask, *(d * mask[:, prompt:, None] for d in delta))


def position_gradients(model, ids, mask, delta):
    """The plain loop: J^n delta^n, one backward pass per position over the whole row -> [B,N,parameters]."""
    B, N, _ = delta.shape
    params, out = [p for p in model.parameters() if p.requires_grad], []
    for b in range(B):
        row, m = ids[b : b + 1], mask[b : b + 1]
        z = model(input_ids=row, attention_mask=m, position_ids=m3.positions_of(m)).logits[0]
        for n in range(N):
            g = torch.autograd.grad(
                (z[-N - 1 + n] * delta[b, n]).sum(), params, retain_graph=True, allow_unused=True
            )
            out.append(
                torch.cat(
                    [
                        (torch.zeros_like(p) if x is None else x).flatten()
                        for x, p in zip(g, params, strict=False)
                    ]
                )
            )
    return torch.stack(out).view(B, N, -1)


def loop(model, ids, mask, delta_D, delta_R):
    D, R = (position_gradients(model, ids, mask, d) for d in (delta_D, delta_R))
    K = (D * R).sum(-1)
    return K, K / (D.norm(dim=-1) * R.norm(dim=-1)).clamp_min(1e-30)


def close(got, want, tol=1e-9):
    for x, y in zip(got, want, strict=False):
        assert torch.isfinite(x).all() and (x - y).abs().max() <= tol * y.abs().max(), (x, y)


def cut_attention(module, q, k, v, attention_mask, scaling=None, **kwargs):
    """The cut attention, the obvious way: detached keys and values."""
    k, v = (x.detach().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling  # GPT-2 of transformers 5.0 gives none
    return ((q @ k.mT * scaling + attention_mask).softmax(-1) @ v).transpose(1, 2), None


@pytest.fixture(scope="session", autouse=True)
def cut_attentions():
    AttentionInterface.register("cut_plainly", cut_attention)
    AttentionMaskInterface.register("cut_plainly", eager_mask)
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("cut_plainly")


class Linear2(nn.Module):
    """z = W2 W1 e(token): everything of K_DR can be written down."""

    def __init__(self):
        super().__init__()
        self.e, self.W1, self.W2 = (
            nn.Embedding(V, 6),
            nn.Linear(6, 5, bias=False),
            nn.Linear(5, V, bias=False),
        )
        self.e.weight.requires_grad_(False)

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        return type("Out", (), {"logits": self.W2(self.W1(self.e(input_ids)))[:, -logits_to_keep:]})


class Lora(nn.Module):
    def __init__(self, base, r=3):
        super().__init__()
        self.base, self.A = base, nn.Linear(base.in_features, r, bias=False)
        self.B = nn.Linear(r, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.B(self.A(x))


def with_lora(model):
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")),
            (layer.mlp, ("down_proj",)),
        ):
            for name in names:
                setattr(part, name, Lora(getattr(part, name)))
    return model.double()


# --- exact and hutchinson -----------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_exact_is_the_loop(kind):
    model, data = small(kind), rows_of()
    want = loop(model, *data)
    close(ntk.kdr(model, *data, "exact", chunk=2), want)
    close(ntk.kdr(model, *data, "exact", chunk=64), want)
    model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    close(ntk.kdr(model, *data, "exact"), loop(model, *data))


def test_exact_of_a_row_without_signal():
    model, (ids, mask, D, R) = small(), rows_of()
    R[1] = 0
    K, cos = ntk.kdr(model, ids, mask, D, R, kernel="exact")
    assert (K[1] == 0).all() and (cos[1] == 0).all() and (K[0] != 0).any()


def test_exact_by_hand():
    model, (ids, mask, D, R) = Linear2().double(), rows_of()
    W1, W2, e = model.W1.weight, model.W2.weight, model.e(ids[:, 4:-1])
    K = (D * R).sum(-1) * (e @ W1.T).square().sum(-1) + ((D @ W2) * (R @ W2)).sum(-1) * e.square().sum(-1)
    close(ntk.kdr(model, ids, mask, D, R, "exact")[:1], [K.detach()])
    signs = hadamard(8)[:, None, :5].expand(-1, 4, -1)
    close(ntk.kdr(model, ids, mask, D, R, "hutchinson", signs=signs)[:1], [K.detach()], 1e-6)


def hadamard(n):
    H = torch.ones(1, 1)
    while len(H) < n:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def test_hutchinson():
    model, data = small(), rows_of()
    want = ntk.kdr(model, *data, "exact")
    close(ntk.kdr(model, *data, "hutchinson", signs=hadamard(8)[:, None, :5].expand(-1, 4, -1)), want, 1e-6)
    row = hadamard(8)[:4, :5]  # [B,N], where the number of probes is that of the rows: one probe, not four
    one, other = (ntk.kdr(model, *data, "hutchinson", signs=signs) for signs in (row, row[None]))
    close(one, other)
    seeded = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        row = [x[:1] for x in data]
        seeded.append(ntk.kdr(model, *row, "hutchinson", probes=32, generator=generator)[0])
    assert (seeded[0] == seeded[1]).all()
    close(seeded[:1], [want[0][:1]], 0.5)  # the mean of random probes comes near


# --- the local kernel ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*CONFIGS, "gpt2"])
def test_local_is_exact_under_the_same_cut(kind, tied):
    model, data = small(kind, tied), rows_of()
    order = torch.tensor([3, 0, 2, 1])  # prompts are recognised and run once wherever their rows stand
    with shapes_read(model.get_decoder()) as read:
        got, shuffled = ntk.kdr(model, *data, "local"), ntk.kdr(model, *(x[order] for x in data), "local")
    assert (
        read == [(2, 4), (8, 5)] * 2
    )  # all but the last column of 2 prompts, then the 5 input tokens of twice 4 rows
    model.set_attn_implementation("cut_plainly")
    close(got, ntk.kdr(model, *data, "exact"))
    close(shuffled, [x[order] for x in got])


@pytest.mark.parametrize("change", ["lora", "norms", "head", "one_prompt_column", "chunks"])
def test_local_counts_what_is_trained(change):
    model, data = small(), rows_of(**{"prompt": 1, "group": 1} if change == "one_prompt_column" else {})
    if change == "one_prompt_column":
        data[1][:, :3] = 1  # rows_of hides the first columns of these rows: their prompt and more
    if change == "lora":
        with_lora(model)
    if change in ("norms", "head"):
        for name, p in model.named_parameters():
            p.requires_grad_(
                ("norm" in name) == (change == "norms") and (change == "norms" or "embed" in name)
            )
    if change == "chunks":  # the training loop's way: residuals seen by chunks of positions
        ids, mask, D, R = data
        read, halves = ids[:, 4:-1], (slice(0, 2), slice(2, 5))
        parts = [ntk.head_terms(model, D[:, i], R[:, i], read[:, i]) for i in halves]
        terms = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        K = ntk.local_terms(model, ids, mask, terms)[0]
        return close([K], ntk.kdr(model, *data, "local")[:1])
    got = ntk.kdr(model, *data, "local")
    model.set_attn_implementation("cut_plainly")
    close(got, loop(model, *data))


def test_local_is_exact_where_nothing_is_left_out():
    model, (ids, mask, D, R) = small("mistral"), rows_of(prompt=1, group=4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # what keys and values do no longer reaches the logits
    close(ntk.kdr(model, ids, mask, D, R, "local"), loop(model, ids, mask, D, R))


@pytest.mark.parametrize("kernel", ["local", "exact", "logit"])
def test_flat_tokens_by_chunks_are_the_same(kernel, monkeypatch):
    model, (ids, mask, D, R) = small(), rows_of(B=6)
    R[2:5] = 0  # rows without a reward signal: K = cos = 0, and `local` does not run them
    real, ran, local = mask[:, -D.shape[1] :].bool(), [], ntk.local_terms

    def counted(model, ids, *rest):
        ran.append(len(ids))
        return local(model, ids, *rest)

    monkeypatch.setattr(ntk, "local_terms", counted)
    for chunk in (4, 100):
        pieces = zip(D[real].split(chunk), R[real].split(chunk), strict=True)
        got = ntk.kdr_flat(model, ids, mask, real, pieces, kernel)
        close(got, [x[real] for x in ntk.kdr(model, ids, mask, D, R, kernel)])
    assert ran[::2] == ([3, 3] if kernel == "local" else []) and (got[0] == 0).sum() >= real[2:5].sum()
    if kernel == "local":  # no row at all has one
        assert not torch.stack(ntk.kdr_flat(model, ids, mask, real, [(D[real], 0 * R[real])], kernel)).any()


def test_the_cosine_of_tiny_residuals_is_exact():
    """A settled token's residuals may be of norm 1e-12: their conflict is one like any other."""
    draw = torch.Generator().manual_seed(0)
    D, R = torch.randn(2, 3, 5, 9, generator=draw)
    want = torch.nn.functional.cosine_similarity(D.double(), R.double(), dim=-1).float()
    for size in (1.0, 1e-6, 1e-12):
        K, cos = m3.isotropic_kernel(size * D, size * R)
        close(cos, want, 1e-5)
        assert ((K < 0) == (want < 0)).all()
    _, cos = m3.isotropic_kernel(D, -3 * D)
    assert (cos >= -1).all() and (cos < -1 + 1e-6).all()
    _, cos = m3.isotropic_kernel(D, 0 * D)
    assert not cos.any()


def test_local_by_hand():
    """The worked case in ntk.py's comments: a linear layer at two positions; then a norm of 1 + w."""
    a = torch.tensor([[[1.0, 2], [0, 3]]])
    b_D, b_R = torch.tensor([[[1.0, -1], [0, 1]]]), torch.tensor([[[2.0, 1], [1, -2]]])
    layer, terms = nn.Linear(2, 2), torch.zeros(3, 1, 2)
    layer.register_forward_hook(ntk._hook(["weight"], terms, set(), {}))
    out = layer(a.repeat_interleave(2, 0))
    out.backward(torch.cat([b_D, b_R]))
    assert terms.tolist() == [[[5.0, -18.0]], [[10.0, 9.0]], [[25.0, 45.0]]]
    assert ntk.linear_share(a, b_D, b_R, ["weight", "bias"])[0].tolist() == [[6.0, -20.0]]

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.tensor([5.0, 7.0])),
                nn.Parameter(torch.tensor([9.0, 9.0])),
            )

        def forward(self, x):
            return x / 2 * (1 + self.weight) + self.bias

    share = ntk.norm_share(Norm(), a, b_D, b_R, ["weight"])  # x_hat = (0.5, 1) and (0, 1.5)
    assert share[0].tolist() == [[2 * 0.25 - 1, -2 * 2.25]]
    share = ntk.norm_share(Norm(), a, b_D, b_R, ["weight", "bias"])
    assert share[0].tolist() == [[2 * 0.25 - 1 + 1, -2 * 2.25 - 2]]
    heads = torch.stack([a, 2 * a], 2)  # [1,2,2 heads,2]: one weight serves both, gradients add up first
    pair = [torch.stack([b, b], 2) for b in (b_D, b_R)]
    assert ntk.norm_share(Norm(), heads, *pair, ["weight"])[0].tolist() == [
        [9 * (2 * 0.25 - 1), 9 * -2 * 2.25]
    ]


def test_local_gives_the_padding_row_of_an_embedding_nothing():
    """torch gives that row no gradient, also where its id is read in a reply."""
    for tied in (True, False):
        model, data = small(tied=tied), rows_of()
        model.get_input_embeddings().padding_idx = 4
        ids = data[0].clone()
        ids[:, 6::2] = 4
        data = (ids, *data[1:])
        model.set_attn_implementation("cut_plainly")
        want = loop(model, *data)
        model.set_attn_implementation("sdpa")
        close(ntk.kdr(model, *data, "local"), want)
        model.get_input_embeddings().padding_idx = None
        assert (ntk.kdr(model, *data, "local")[0] - want[0]).abs().max() > 0.01


@pytest.mark.parametrize("frozen", [False, True])
def test_local_where_embeddings_are_scaled_in_place(frozen):  # CTRL
    torch.manual_seed(0)
    config = transformers.CTRLConfig(vocab_size=V, n_positions=32, n_embd=16, dff=20, n_layer=2, n_head=2)
    model, data = AutoModelForCausalLM.from_config(config).double().eval(), rows_of()
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
    got = ntk.kdr(model, *data, "local")
    ntk.try_kernel(model.float(), "local")
    model.double().set_attn_implementation("cut_plainly")
    close(got, loop(model, *data))


def test_a_kernel_that_cannot_run_says_so_at_the_start():
    def made(config):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()

    shape = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    moe = made(transformers.Qwen3MoeConfig(**shape, **experts, intermediate_size=20, num_key_value_heads=2))
    bloom = made(BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2))
    checkpointed = small().float()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in (moe, bloom):
        for kernel in ("exact", "logit"):
            ntk.try_kernel(model, kernel)
    for model, kernel in (
        (moe, "hutchinson"),
        (bloom, "hutchinson"),
        (checkpointed, "hutchinson"),
        (moe, "local"),
        (bloom, "local"),
    ):
        with pytest.raises(ValueError, match="--kernel logit") as error:
            ntk.try_kernel(model, kernel)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
    for kernel in ("local", "exact", "hutchinson", "logit"):
        for dtype in (torch.float32, torch.bfloat16):
            ntk.try_kernel(small().to(dtype), kernel)
            ntk.try_kernel(with_lora(small()).to(dtype), kernel)
    ntk.try_kernel(checkpointed, "local")


def test_a_model_that_local_would_get_wrong_is_refused():
    model = small().float()
    layer = model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, args, out: out + args[0] @ module.weight.T)  # a second use
    with pytest.raises(ValueError, match="exact under the same cut"):
        ntk.try_kernel(model, "local")


def test_low_precision():
    model, data = small(), rows_of()
    want = ntk.kdr(model, *data, "local")
    single = [x.float() if x.is_floating_point() else x for x in data]
    K, cos = ntk.kdr(copy.deepcopy(model).bfloat16(), *single, "local")
    assert K.dtype == cos.dtype == torch.float32 and (cos - want[1]).abs().max() < 0.05
    close(ntk.kdr(copy.deepcopy(model).float(), *data, "local"), want, 1e-4)


def test_errors_name_the_mend():
    model, data = small(), rows_of()
    bloom = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=V, hidden_size=16, n_layer=2, n_head=2)
    ).double()
    odd = small()
    odd.model.layers[0].mlp.scale = nn.Parameter(torch.ones(2, 2))
    capped = small()
    capped.config.final_logit_softcapping = 30.0
    for bad in (bloom, odd, capped, Linear2()):
        with pytest.raises(ValueError, match="--kernel logit"):
            ntk.kdr(bad, *data, "local")
        assert ntk.kdr(bad, *data, "logit")[0].shape == (4, 5)
    with pytest.raises(ValueError, match="trainable"):
        ntk.kdr(small().requires_grad_(False), *data, "local")
    for kernel in ("logit", "local"):
        with pytest.raises(ValueError, match="chunk"):
            ntk.kdr(model, *data, kernel, chunk=4)
    with pytest.raises(ValueError, match="magic"):
        ntk.kdr(model, *data, kernel="magic")
    flat, none = [x[:, 0] for x in data[2:]], [x[:, :0] for x in data[2:]]
    for kernel in ("logit", "local", "exact"):
        for ids_and_mask, deltas in ((data[:2], [data[2], data[3][:, 1:]]), (data[:2], flat),
                                     (data[:2], none), ([x[0] for x in data[:2]], data[2:])):
            with pytest.raises(ValueError, match="N < L"):
                ntk.kdr(model, *ids_and_mask, *deltas, kernel)


# --- all kernels --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", ["logit", "local", "exact", "hutchinson"])
def test_model_comes_back_as_it_was(kernel):
    model, data = small(), rows_of()
    model.train().model.layers[0].eval()
    model.model.layers[1].mlp.requires_grad_(False)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)

    def state():
        hooks = [
            (n, m.training, len(m._forward_hooks), len(m._backward_hooks)) for n, m in model.named_modules()
        ]
        weights = [
            (
                n,
                p.requires_grad,
                p._backward_hooks,
                p.data_ptr(),
                p.sum().item(),
                p.grad is None or p.grad.sum(),
            )
            for n, p in model.named_parameters()
        ]
        interface = model.config._attn_implementation, sorted(AttentionInterface._global_mapping)
        return hooks, weights, interface, torch.is_grad_enabled()

    with torch.no_grad():
        before = state()
        ntk.kdr(model, *data, kernel)
        assert state() == before
        if kernel == "local":  # also after an error halfway
            model.config.num_hidden_layers = 9
            with pytest.raises((ValueError, IndexError)):
                ntk.kdr(model, *data, kernel)
            assert state() == before


@pytest.mark.parametrize("kernel", ["logit", "local", "exact"])
def test_invariances(kernel):
    model, (ids, mask, D, R) = small(), rows_of()
    want = ntk.kdr(model, ids, mask, D, R, kernel)

    def pad(x):
        return torch.cat([torch.zeros_like(x[:, :3]), x], 1)

    def more(x):
        return torch.cat([x, torch.zeros_like(x[:, :2])], 1)

    close(ntk.kdr(model, pad(ids), pad(mask), D, R, kernel), want)  # left padding
    close([x[:, :5] for x in ntk.kdr(model, *map(more, (ids, mask, D, R)), kernel)], want)  # right padding
    order = torch.tensor([2, 0, 3, 1])
    shuffled = ntk.kdr(model, *(x[order] for x in (ids, mask, D, R)), kernel)
    close(shuffled, [x[order] for x in want])  # row order
    halves = [ntk.kdr(model, *(x[i : i + 2] for x in (ids, mask, D, R)), kernel) for i in (0, 2)]
    close([torch.cat(x) for x in zip(*halves, strict=False)], want)  # batch split
    junk = torch.where(mask.bool(), ids, 7)
    close(ntk.kdr(model, junk, mask, D, R, kernel), want)  # masked tokens
    R = R.clone()
    R[1, 2] = 0  # A = 0, or clipped
    K, cos = ntk.kdr(model, ids, mask, D, R, kernel)
    assert K[1, 2] == cos[1, 2] == 0 and (K[1, 1] != 0) and cos.abs().max() <= 1


@pytest.mark.parametrize("kernel", ["logit", "local", "exact"])
def test_conflict_on_purpose(kernel):
    """A > 0 on a token that the teacher puts far below the student: the pushes fight; far above: agree."""
    model, (ids, mask, _, _) = small(), rows_of()
    z = model(input_ids=ids, attention_mask=mask, position_ids=m3.positions_of(mask)).logits[:, 4:-1].detach()
    y = ids[:, 5:, None]
    R = -(torch.zeros_like(z).scatter(-1, y, 1.0) - z.softmax(-1)) * mask[:, 5:, None]
    for shift, sign in ((-8.0, -1), (8.0, 1)):
        D = (z.softmax(-1) - z.scatter_add(-1, y, torch.full_like(z[..., :1], shift)).softmax(-1)) * mask[
            :, 5:, None
        ]
        assert (ntk.kdr(model, ids, mask, D, R, kernel)[1] * sign >= 0).all()


def test_eq35_identity():
    p_S, p_T = (torch.randn(4, 5, V, dtype=torch.float64).softmax(-1) for _ in range(2))
    A, y, (ids, mask, *_) = torch.randn(4, 1, dtype=torch.float64), torch.randint(V, (4, 5, 1)), rows_of()
    R = -A[..., None] * (torch.zeros_like(p_S).scatter(-1, y, 1.0) - p_S)
    sigma, eta = (p_S - p_T).gather(-1, y)[..., 0], (p_T * p_S).sum(-1) - p_S.square().sum(-1)
    close(ntk.kdr(None, ids, mask, p_S - p_T, R, "logit")[:1], [-A * (sigma + eta)])


def test_eq13_select_keeps_the_reward():
    model, (ids, mask, D, R) = small(), rows_of()
    D, R = (x / (x.norm(dim=-1, keepdim=True) + 0.1) for x in (D, R))
    K = ntk.kdr(model, ids, mask, D, R, "exact")[0]
    h_D, h_R = (position_gradients(model, ids, mask, x) for x in (D, R))
    alpha = 0.4 * (K >= 0).double()[..., None]
    h_H = alpha * h_D + (1 - alpha) * h_R
    assert (K < 0).any() and ((h_H * h_R).sum(-1) >= (1 - 0.4) * h_R.square().sum(-1) - 1e-12).all()


def guarantees(model):
    """Exact K, h_D, h_R of normalised residuals, and the live positions (each [B,N,...])."""
    ids, mask, D, R = rows_of()
    D, R = m3.normalize(D, 0.1), m3.normalize(R, 0.1)
    K = ntk.kdr(model, ids, mask, D, R, "exact")[0]
    h_D, h_R = (position_gradients(model, ids, mask, x) for x in (D, R))
    live = mask[:, 5:].bool()
    assert (K[live] < 0).any() and (K[live] > 0).any()
    return K, h_D, h_R, live


def test_prop9_a_select_step_never_hurts_the_reward():
    """Eq 13 as a step: at every position the reward's local loss <z^n, delta_R> falls at least (1 -
    alpha_max) times as much as under the reward alone. Without the gate it does not, on any conflict."""
    model, (ids, mask, _, R) = small(), rows_of()
    R = m3.normalize(R, 0.1)
    K, h_D, h_R, live = guarantees(model)
    alpha_max, eta = 0.8, 1e-6

    def fall(step, b, n):
        """How much the loss of this position falls along this step, by running the model at both ends."""
        ends = []
        for sign in (1, -1):
            moved, at = copy.deepcopy(model), 0
            with torch.no_grad():
                for p in moved.parameters():
                    p += sign * eta * step[at : at + p.numel()].view_as(p)
                    at += p.numel()
                z = moved(
                    input_ids=ids[b : b + 1],
                    attention_mask=mask[b : b + 1],
                    position_ids=m3.positions_of(mask[b : b + 1]),
                ).logits[0, 4 + n]
            ends.append((z @ R[b, n]).item())
        return (ends[0] - ends[1]) / (2 * eta)

    worse = 0
    for b, n in live.nonzero().tolist():
        alpha = m3.gate_select(K[b, n], alpha_max)
        gated, ungated = (a * h_D[b, n] + (1 - a) * h_R[b, n] for a in (alpha, alpha_max))
        reward_alone = h_R[b, n].square().sum().item()
        assert fall(gated, b, n) >= (1 - alpha_max) * reward_alone * (1 - 1e-6)
        worse += fall(ungated, b, n) < (1 - alpha_max) * reward_alone * (1 - 1e-6)
    assert worse == int((K[live] < 0).sum()) > 0


def test_prop16_what_the_gate_gains_over_m3_norm():
    """alpha_max (||h_R||^2 - K_DR(n)) > 0 of alignment with the reward on a conflict, nothing elsewhere."""
    K, h_D, h_R, live = guarantees(small())
    alpha_max = 0.25  # exact in float32, which the gate gives
    alpha = m3.gate_select(K, alpha_max).double()[..., None]
    gated, ungated = (a * h_D + (1 - a) * h_R for a in (alpha, alpha_max))
    gain = ((gated - ungated) * h_R).sum(-1)
    want = torch.where(K < 0, alpha_max * (h_R.square().sum(-1) - K), 0.0)
    torch.testing.assert_close(gain, want)
    assert (gain[live & (K < 0)] > 0).all()


# --- batch statistics ---------------------------------------------------------------------------------------
def test_geometry_eq7_and_eq72():
    model, (ids, mask, D, R) = small(), rows_of()
    params = list(model.parameters())
    z = model(input_ids=ids, attention_mask=mask, position_ids=m3.positions_of(mask)).logits[:, 4:-1]
    model.lm_head.weight.grad = mark = torch.ones_like(model.lm_head.weight)
    got = ntk.gradient_geometry(model, z, D / 20, R / 20)
    assert model.lm_head.weight.grad is mark and all(not p._post_accumulate_grad_hooks for p in params)
    assert all(p.grad is None for p in params if p is not model.lm_head.weight)
    g_D, g_R = (torch.autograd.grad(z, params, x / 20, retain_graph=True) for x in (D, R))
    assert got == pytest.approx(m3.geometry(g_R, g_D))
    assert got["kappa"] == pytest.approx(got["norm_R"] / got["norm_D"])
    flat_D, flat_R = (torch.cat([g.flatten() for g in x]) for x in (g_D, g_R))
    assert got["norm_D"] == pytest.approx(flat_D.norm().item())
    assert got["phi"] == pytest.approx(torch.cosine_similarity(flat_D, flat_R, 0).item())
    h_D, h_R = (position_gradients(model, ids, mask, x).flatten(0, 1) for x in (D, R))
    pairs = (h_D @ h_R.T) / 400  # N = 20 positions
    assert got["phi"] * got["norm_R"] * got["norm_D"] == pytest.approx(pairs.sum().item())
    K = ntk.kdr(model, ids, mask, D, R, "exact")[0]
    assert pairs.diagonal().sum().item() == pytest.approx(K.sum().item() / 400)


def test_geometry_of_nothing():
    """Without a reward gradient there is no kappa: a 0 would be averaged into the probe's verdict."""
    one, zero = [torch.ones(3), None], [torch.zeros(3), None]
    for g_R, g_D, want in (
        (zero, one, (None, None)),
        (one, zero, (math.inf, 0.0)),
        (zero, zero, (None, None)),
    ):
        got = m3.geometry(g_R, g_D)
        assert (got["kappa"], got["phi"]) == want
        assert ntk.distillation_hurt(got["phi"], got["kappa"], 0.5) is False
    assert m3.minnorm(0.0, 2.0, 0.0)[1] == 0.0 and m3.minnorm(0.0, 0.0, 0.0)[1] == 0.5
    model, (ids, mask, D, R) = small(), rows_of()
    z = model(input_ids=ids, attention_mask=mask).logits[:, 4:-1]
    assert ntk.gradient_geometry(model, z, D, 0 * R)["kappa"] is None


@pytest.mark.parametrize("seed", range(6))
def test_min_norm_and_hurt_by_brute_force(seed):
    torch.manual_seed(seed)
    g_R, g_D = torch.randn(4, dtype=torch.float64) * 3 ** (seed - 3), torch.randn(4, dtype=torch.float64)
    got = m3.geometry([g_R], [g_D])
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]
    best = grid[(grid * g_D + (1 - grid) * g_R).norm(dim=-1).argmin()].item()
    assert m3.minnorm(got["norm_R"], got["norm_D"], got["phi"])[1] == pytest.approx(best, abs=1e-3)
    for alpha in (0.0, 0.1, 0.5, 0.9, 1.0):  # hurt: the step -(alpha g_D + (1-alpha) g_R) climbs L_D
        step = alpha * g_D + (1 - alpha) * g_R
        assert ntk.distillation_hurt(got["phi"], got["kappa"], alpha) == bool(g_D @ step < 0)


def test_shares_folding_and_verdict():
    assert m3.minnorm(1.0, 1.0, 1.0)[1] == 0.5 and m3.minnorm(2.0, 0.0, 0.0)[1] == 1.0
    K, cos = torch.tensor([[-1.0, -1e-6, 0.0, 2.0, -3.0]]), torch.tensor([[-0.5, -1e-5, 0.0, 0.1, -0.2]])
    mask, rewarded, none = torch.tensor([[1, 1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 1, 1]]), torch.zeros(1, 5)
    got = ntk.conflict_share(K, cos, mask, rewarded)  # of rewarded real tokens: 0, 2, 3
    assert got == {"conflict": 0.5, "conflict_deadband": 0.25, "conflict_rewarded": pytest.approx(1 / 3)}
    nothing = {"conflict": 0.0, "conflict_deadband": 0.0, "conflict_rewarded": None}
    assert ntk.conflict_share(K, cos, none, rewarded) == nothing
    assert ntk.conflict_share(K, cos, mask, none)["conflict_rewarded"] is None
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])
    assert ntk.gradient_folding([a, a, a]) == pytest.approx(0) and ntk.gradient_folding(
        [a, -a]
    ) == pytest.approx(1)
    assert ntk.gradient_folding([[a, b], [a, -b]]) == pytest.approx(1 - 4 / (2 * 10))
    assert ntk.gradient_folding([0 * a, 0 * a]) == 0
    for kappa, conflict, method in (
        (6e3, 0.1, "m3-select"),
        (5e3, 0.1, "m3-soft"),
        (1001, 0.4, "m3-soft"),
        (1e3, 0.5, "hybrid"),
        (10, 0.6, "m3-select"),
    ):
        got, sentence = ntk.probe_verdict(kappa, conflict)
        assert got == method and method in sentence and "Caveat" in sentence
    for kappa, conflict in ((math.nan, 0.1), (None, 0.1), (1.0, math.nan)):
        with pytest.raises(ValueError):
            ntk.probe_verdict(kappa, conflict)


# --- diagnostics --------------------------------------------------------------------------------------------
def test_diagnostics():
    assert ntk.learning_signal(3.0, 2.0) == 2.25 and math.isnan(ntk.learning_signal(1.0, 0.0))
    g0, g1, h0, h1 = (torch.tensor(x) for x in ([1.0, 2.0], [3.0, -2.0], [1.0, 1.0], [0.0, 4.0]))
    got = ntk.occupancy([g0], [g1], h0, h1)
    assert got == {
        "g2": -1.0,
        "X": 4.5,
        "alpha": -4.5,
    }  # 1*3 - 2*2; (1*3 - 1*2 + 0*1 + 4*2)/2: signs are kept
    X, Y = torch.randn(12, 5), torch.randn(12, 7)
    Q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    x, y = (t.double() - t.double().mean(0) for t in (X, Y))
    want = (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())
    assert ntk.linear_cka(X, Y) == pytest.approx(want.item())
    assert (
        ntk.linear_cka(X, 3 * X.double() @ Q + 5) == pytest.approx(1)
        and ntk.linear_cka(X, torch.ones(12, 2)) == 0
    )
    model = small()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        model.lm_head.weight += 0.5  # tied: counts once, above and below the line
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    want = (
        0.5
        * sizes["model.embed_tokens.weight"] ** 0.5
        / sum(p.square().sum().item() for p in start.values()) ** 0.5
    )
    assert "lm_head.weight" not in sizes and ntk.parameter_change(model, start) == pytest.approx(
        want, rel=1e-5
    )


def test_signal_drop_by_hand():
    losses = [4.0, 2.0, 2.0, 1.0, 0.5, None, 0.5, -1.0]
    norms = [4.0, 2.0, 6.0, 2.0, None, 1.0, 1.0, 1.0]  # mu: 2, 1, 9, 2, none, none, 1, none
    got = ntk.signal_drop(losses, norms, 3)
    assert got == {"before": 2.0, "after": 1.5, "drop": 4 / 3, "remaining": 0.375, "last50": 2.0}
    empty = ntk.signal_drop([1.0, 0.0], [None, 1.0], 1)
    assert all(math.isnan(empty[name]) for name in ("before", "after", "drop", "last50"))
    # a teacher that is the student: nothing to lose
    assert all(math.isnan(value) for value in ntk.signal_drop([0.0, 0.0], [0.0, 0.0], 1).values())
    assert math.isnan(ntk.signal_drop([None, 1.0], [None, 1.0], 1)["remaining"])
    late = ntk.signal_drop(
        [1.0] * 100, [2.0] * 10 + [1.0] * 30 + [20.0] * 60, 10
    )  # 30 steps after the split, no more
    assert (late["before"], late["after"], late["last50"]) == (2.0, 0.5, 200.0)


# [VLS] Table E.3 as printed: before, after, drop, remaining in %, last 50; checkpoints with 1 + X/g^2 > 0
TABLE_E3 = {
    "RL-Code": ("272", "40.9", "6.7", "12.6", "2.37", None),
    "JustRL": ("7.11", "3.37", "2", "73.0", "0.56", 13),
    "Qwen3-14B": ("60.7", "5.05", "12.0", "98.8", "3.78", 19),
    "Skywork": ("3.73", "0.38", "10", "86.5", "0.090", 12),
    "R1-Distill-7B": ("1.14", "0.121", "9", "86.5", "0.056", 13),
}


def test_the_published_table_comes_out():
    curves = vls_table.read_curves([])
    assert set(curves) == set(TABLE_E3)
    for name, (*printed, falls) in TABLE_E3.items():
        curve = curves[name]
        assert len(curve["training"]) == 200 and len(curve["occupancy"]) == (20 if falls else 0)
        got = ntk.signal_drop(*zip(*curve["training"], strict=True), curve["split"])
        got["remaining"] *= 100
        for value, text in zip(got.values(), printed, strict=True):
            places = len(text.partition(".")[2])
            assert abs(value - float(text)) <= 0.5001 * 10**-places, (name, value, text)
        assert falls is None or sum(1 + X / g2 > 0 for g2, X in curve["occupancy"]) == falls
    assert "MIT License" in (HERE / "assets" / "vls" / "SOURCE.md").read_text(encoding="utf-8")


def test_our_runs_beside_the_published_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [{"step": 0, "loss_D": None, "grad_norm": None}]
    lines += [
        {
            "step": k,
            "loss_D": 2.0 / k,
            "grad_norm": 2.0,
            "occupancy_g2": 1.0 if k % 2 else None,
            "occupancy_X": 0.5,
        }
        for k in range(1, 71)
    ]
    run_folder = tmp_path / "ours"
    run_folder.mkdir()
    (run_folder / "config.json").write_text('{"method": "opd"}')
    (run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    vls_table.main(["ours"])
    table = {
        line.split()[0]: line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ")
    }
    assert table["ours"][1:] == ["30", "15.500", "45.500", "0.341", "0.033", "45.500", "35", "of", "35"]
    assert table["Qwen3-14B"][1:] == ["15", "60.677", "5.049", "12.017", "0.988", "3.784", "19", "of", "20"]
    (run_folder / "config.json").write_text('{"method": "grpo"}')
    for folder, word in (("ours", "opd"), ("nowhere", "nowhere")):
        with pytest.raises(SystemExit) as end:
            vls_table.main([folder])
        error = capsys.readouterr().err.strip()
        assert end.value.code == 2 and word in error and "vls_table" in error and "\n" not in error


# --- the [VLS] diagnostics: occupancy, teachers -------------------------------------------------------------


def test_occupancy_is_unbiased_and_gives_the_decay_of_the_loss():
    """A tabular policy of two tokens: the first, y1, decides which row of a table the second is drawn from.
    There the gradient of the expected loss is g + h in closed form: g holds responses fixed, h moves visits.
    """
    torch.manual_seed(0)
    # row 0: first token; row 1 + y1: second token
    theta = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1)

    def D(t):  # KL(p_S || p_T) of each row
        return (t.softmax(-1) * (t.log_softmax(-1) - teacher)).sum(-1)

    def grad(value):
        return torch.autograd.grad(value, theta, retain_graph=True)[0].flatten()

    def loss(t):
        return (D(t)[0] + (t[0].softmax(-1) * D(t)[1:]).sum()) / 2

    pi = theta[0].softmax(-1)
    each = [(D(theta)[0] + D(theta)[1 + y]) / 2 for y in range(3)]  # loss of a response that begins with y
    g = grad(sum(p.item() * cost for p, cost in zip(pi, each)))
    h = grad(sum(p * cost.item() for p, cost in zip(pi, each)))
    torch.testing.assert_close(g + h, grad(loss(theta)))
    # draws of two folds of two responses each, as the training loop cuts them
    kinds = [(y1, y2) for y1 in range(3) for y2 in range(3)]
    score = torch.stack([grad(theta[0].log_softmax(-1)[y1] + theta[1 + y1].log_softmax(-1)[y2])
                         for y1, y2 in kinds])
    pull = torch.stack([grad(each[y1]) for y1, _ in kinds])
    cost = torch.tensor([each[y1].item() for y1, _ in kinds])
    p = torch.tensor([(pi[y1] * theta[1 + y1].softmax(-1)[y2]).item() for y1, y2 in kinds])
    found = []
    for draw in torch.multinomial(p, 4 * 4000, replacement=True).view(4000, 2, 2):
        L = cost[draw].double()
        hs = [((L[k] - L[1 - k].mean())[:, None] * score[draw[k]]).mean(0) for k in (0, 1)]
        got = ntk.occupancy(pull[draw[0]].mean(0), pull[draw[1]].mean(0), *hs)
        found.append([got["g2"], got["X"]])
    found = torch.tensor(found, dtype=torch.float64)
    error = found.std(0) / 4000 ** 0.5
    want = torch.stack([g @ g, h @ g]).detach()
    assert ((found.mean(0) - want).abs() < 4 * error).all(), (found.mean(0), want, error)
    assert (want.abs() > 8 * error).all(), (want, error)
    # d/dt identity: along plain gradient flow of g alone, dL/dt = -2 gamma L with gamma = mu (1 + alpha)
    mu, alpha, eta = ntk.learning_signal(g.norm().item(), loss(theta).item()), (h @ g / (g @ g)).item(), 1e-5
    ahead, behind = (loss((theta - s * eta * g.view(4, 3)).detach()).item() for s in (1, -1))
    assert (ahead - behind) / (2 * eta) == pytest.approx(-2 * mu * (1 + alpha) * loss(theta).item(), rel=1e-6)


@pytest.mark.parametrize("extra", [[], ["--micro-batch", "3", "--vocab-chunk", "7"]])
def test_occupancy_of_the_loop_is_plain_autograd(world, rewarded, untried, monkeypatch, extra):
    """g and h of both folds, one response at a time, through the whole model and its loss by autograd."""
    caught, drawn, sample, occupancy = [], [], m3.sample, ntk.occupancy

    def kept_occupancy(*grads):
        caught.extend(grads)
        return occupancy(*grads)

    def kept_sample(model, prompts, *rest, **kw):
        drawn.append((prompts, *sample(model, prompts, *rest, **kw)))
        return drawn[-1][1:]

    monkeypatch.setattr(ntk, "occupancy", kept_occupancy)
    monkeypatch.setattr(m3, "sample", kept_sample)
    line = run(world, "--method", "opd", "--divergence", "rkl-topk", "--occupancy-every", "1", "--steps", "1",
               "--out", f"occupied{len(extra)}", *extra)[1]
    prompts, tokens, mask, _ = drawn[1]  # 0 is the evaluation before the first step
    model = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).eval().double()
    params, tok = list(model.parameters()), train.toy_tokenizer()
    rows = train.encode_rows(few_rows(4096, 0), tok, 256, 8, [], "solution")
    hinted = {tuple(row["prompt_ids"]): row["teacher_ids"] for row in rows}

    def read(prompt, reply):
        return model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1:-1]

    losses, pull, score = [], [], []
    for b in range(16):  # 4 prompts, 4 replies to each
        reply = tokens[b][mask[b]].tolist()
        z = read(prompts[b // 4], reply)
        with torch.no_grad():
            z_T = read(hinted[tuple(prompts[b // 4])], reply)
        logp = z.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None]).sum()
        losses.append(m3.divergence(z, z_T, "rkl-topk").mean().item())
        pull.append(torch.autograd.grad(topk_loss(z, z_T).mean(), params, retain_graph=True))
        score.append(torch.autograd.grad(logp, params))
    for k in (0, 1):
        fold, other = [[b for b in range(16) if b % 4 % 2 == x] for x in (k, 1 - k)]
        gain = {b: losses[b] - sum(losses[c] for c in other if c // 4 == b // 4) / 2 for b in fold}
        for i in range(len(params)):
            g = sum(pull[b][i] for b in fold) / len(fold)
            h = sum(gain[b] * score[b][i] for b in fold) / len(fold)
            for got, want in ((caught[k][i], g), (caught[2 + k][i], h)):
                atol = 2e-5 * max(1, want.abs().max().item())
                torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=atol)
    assert line["occupancy_g2"] == pytest.approx(occupancy(*caught)["g2"]) and line["occupancy_X"] != 0


def test_stall_by_hand():
    start, end, prompts = small(), small(), [[3, 4, 5], [6, 7], [8, 9, 10, 11], [4]]
    same = ntk.stall(start, end, prompts, [2.0, 0.5, 1.0])
    assert same["d_par"] == 0 and same["cka"] == [pytest.approx(1)] * 3
    assert same["cka_min"] == pytest.approx(1)
    assert same["loss_reduction_max"] == 0.75 and same["loss_reduction_final"] == 0.5
    assert same["gamma"] == pytest.approx(math.log(2) / 4)
    with torch.no_grad():
        end.model.layers[1].mlp.down_proj.weight += 0.3
    moved = ntk.stall(start, end, prompts, [2.0, -1.0])
    # the embedding's output comes first
    assert moved["cka"][:2] == [pytest.approx(1)] * 2 and moved["d_par"] > 0
    assert moved["cka_min"] == moved["cka"][2] < 0.999
    holes = ntk.stall(start, end, prompts, [None, 2.0, None, 0.5, 1.0, None])  # steps that were not finite
    assert holes["loss_reduction_max"] == 0.75 and holes["loss_reduction_final"] == 0.5
    assert holes["gamma"] == pytest.approx(math.log(2) / 6)  # three steps from the first known to the last
    assert ntk.stall(start, end, prompts, [None, None])["loss_reduction_max"] is None
    # a top-k loss may fall below 0: reported raw
    assert moved["loss_reduction_max"] == 1.5 and moved["gamma"] is None
    with torch.no_grad():
        end.get_input_embeddings().weight[3:6] *= -3
    assert ntk.stall(start, end, prompts, [1.0])["cka"][0] < 0.999
    assert ntk.stall(start.bfloat16(), end.bfloat16(), prompts, [1.0])["d_par"] is None


def test_a_second_style_of_solution():
    ops = [("+", 3), ("-", 5), ("*", 2)]
    assert train.toy_solution(12, ops) == "12 + 3 = 15\n15 - 5 = 10\n10 * 2 = 20\n#### 20"
    assert train.toy_solution(12, ops, swapped=True) == "3 + 12 = 15\n15 - 5 = 10\n10 + 10 = 20\n#### 20"


def test_teachers_are_made_once_and_compared(world, monkeypatch, capsys):
    for kind in train.TOY_TEACHERS:  # planted: only what is done with them is tested here
        if not (world / train.toy_path(kind)).exists():
            shutil.copytree(world / train.toy_path(), world / train.toy_path(kind))
    argv = ["--compare-teachers", "--seeds", "1", "--divergence", "rkl-topk", "--steps", "2",
            "--stats-every", "1", "--out", "teachers"]
    run(world, *argv, read=False)
    table = (world / "teachers" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| privileged", "| self-rl", "| larger"]
    assert "loss_reduction_final | gamma | d_par | cka_min" in table[0]
    assert (world / "teachers/curves.png").stat().st_size > 10_000
    runs = {kind: json.loads((world / "teachers" / f"{kind}-0" / "summary.json").read_text())
            for kind in ("privileged", "larger")}
    assert 0 < runs["privileged"]["d_par"] < 0.1 and 0.9 < runs["privileged"]["cka_min"] <= 1
    assert runs["larger"]["d_par"] == 0  # planted: it agrees, and then the gradient is exactly 0
    assert len(runs["larger"]["cka"]) == 3  # the embedding and two layers
    first = {kind: records(world / "teachers" / f"{kind}-0")[1] for kind in ("privileged", "larger")}
    # planted: the student itself, without a hint
    assert abs(first["larger"]["loss_D"]) < 1e-6 < first["privileged"]["loss_D"]
    monkeypatch.setattr(train, "SELF_RL", " ".join(FAST) + " --method grpo --steps 1")
    monkeypatch.chdir(world)
    made = train.toy_model("self-rl")
    assert "training it once" in capsys.readouterr().out
    model, tok, ends = train.load_model(made, torch.float32, "cpu")
    assert ends == {1}
    assert m3.encode(tok, ["Ann has 3 pens ."]) == m3.encode(train.toy_tokenizer(), ["Ann has 3 pens ."])
    assert train.toy_model("self-rl") == made and "training" not in capsys.readouterr().out


# --- python ntk.py ------------------------------------------------------------------------------------------

NTK_FAST = [
    "--prompts-per-step",
    "2",
    "--group-size",
    "2",
    "--max-new-tokens",
    "5",
    "--rows-exact",
    "2",
    "--threads",
    "1",
]


def every_other():
    """An untrained model never answers right: a verifier that pays every other response."""
    calls = iter(range(100))
    return lambda text, gold, kind: next(calls) % 2


def test_ntk_main(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setattr(m3, "verify", every_other())
    seen, heat_map = [], ntk.heat_map
    monkeypatch.setattr(ntk, "heat_map", lambda out, panels: (seen.extend(panels), heat_map(out, panels)))
    ntk.main([*NTK_FAST, "--out", "heat"])
    text = capsys.readouterr().out
    for part in ("1. Token level", "2. Token level", "Batch level, local kernel: norm_R", "3. heat"):
        assert part in text
    table = {line[:26].strip(): line[26:].split() for line in text.splitlines()}
    assert table["exact"][:3] == ["1.000"] * 3
    for name in ("logit", "local", *(f"hutchinson, P={P}" for P in (1, 4, 16))):
        sign, corr = map(float, table[name][:2])
        assert 0 <= sign <= 1 and -1 <= corr <= 1
    counts = [
        int(table[f"{name}, A {sign} 0"][0])
        for name in ("conflict", "compatible")
        for sign in ("<", ">", "!=")
    ]
    assert counts[0] + counts[1] == counts[2] > 0 and counts[3] + counts[4] == counts[5] > 0
    page = (world / "heat/heatmap.html").read_text()
    assert (
        len(seen) == 2 and "correct (A = +0.71)" in page and "wrong (A = -0.71)" in page
    )
    for _, tokens in seen:
        assert tokens and all(
            html.escape(token) in page and f'title="{c:+.3f}"' in page for token, c in tokens
        )
    assert "<eos>" not in page and "http" not in page


def test_ntk_main_leaves_the_model_alone_and_repeats(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    texts = []
    for _ in range(2):
        monkeypatch.setattr(m3, "verify", every_other())
        ntk.main([*NTK_FAST, "--out", "again"])
        texts.append(capsys.readouterr().out.split("2. Token level")[1])  # part 1 holds times
    assert texts[0] == texts[1]


@pytest.mark.parametrize("argv, word", [
    (["--out", "a-file"], "a-file"), (["--compare", "grpo"], "--compare"), (["--plot"], "--plot"),
    (["--probe"], "--probe"), (["--resume", "again"], "--resume"), (["--resume=again"], "--resume")])
def test_ntk_main_ends_a_mistake_at_once(world, monkeypatch, capsys, argv, word):
    monkeypatch.chdir(world)
    pathlib.Path("a-file").write_text("mine")
    monkeypatch.setattr(train, "load", None)  # nothing is loaded before
    with pytest.raises(SystemExit) as end:
        ntk.main([*NTK_FAST, *argv])
    assert end.value.code == 2
    one_line(capsys, word)


def test_heat_map_escapes(tmp_path):
    ntk.heat_map(
        tmp_path, [("a < b & $c$ " * 20, [("<script>", 0.5), ("$x_1$", -1.0), ("", 0.0), ("&", 1.0)] * 12)]
    )
    page = (tmp_path / "heatmap.html").read_text()
    spans = ntk.heat_html([("<b>", -0.6, 'cos "x"'), ("+", 0.0, "")])
    assert spans == (
        '<span style="background:#d97373;color:white" title="cos &quot;x&quot;">&lt;b&gt;</span>\n'
        '<span style="background:#f3f3f3;color:black" title="">+</span>'
    )
    assert "<script>" not in page and "&lt;script&gt;" in page and "#c81e1e" in page and "#1e5ac8" in page


@pytest.mark.parametrize(
    "argv, word",
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--prompts-per-step", "0"], "--prompts-per-step"),
        (["--group-size", "1"], "--group-size"),
        (["--lr", "x"], "--lr"),
        (["--length", "-1"], "--length"),
        (["--rows-exact", "x"], "--rows-exact"),
        (["--dataset", "gsm8k"], "--dataset"),
        (["--model", "./nowhere"], "--model"),
        (["--checkpoint", "./nowhere"], "--checkpoint"),
        (["--device", "nowhere"], "--device"),
    ],
)
def test_ntk_main_mistakes(world, monkeypatch, capsys, argv, word):
    monkeypatch.chdir(world)
    with pytest.raises(SystemExit) as end:
        ntk.main(argv)
    error = capsys.readouterr().err.strip()
    assert end.value.code == 2 and word in error and "\n" not in error


def test_ntk_main_leaves_out_a_kernel_that_cannot_run(world, rewarded, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setattr(ntk, "try_kernel", lambda model, kernel, really=ntk.try_kernel: really(
        model, "magic" if kernel in ("local", "hutchinson") else kernel))
    ntk.main([*NTK_FAST, "--kernel", "logit", "--out", "left-out"])
    said = capsys.readouterr().out
    assert "local is left out" in said and "hutchinson, P=4 is left out" in said
    table = said.split("1. Token level")[1].split("2. Token level")[0]
    assert "logit" in table and "exact" in table and "local" not in table and "hutchinson" not in table


@pytest.mark.parametrize("argv", [["--gradient-checkpointing"], ["--preset", "table-calm"]])
def test_ntk_main_refuses_what_it_would_ignore(world, monkeypatch, capsys, argv):
    monkeypatch.chdir(world)
    with pytest.raises(SystemExit):
        ntk.main(argv)
    one_line(capsys, argv[0], "leave")
    monkeypatch.setattr(train, "WORLD", 2)
    with pytest.raises(SystemExit):
        ntk.main([])
    one_line(capsys, "torchrun")


def test_ntk_main_without_any_reward(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    with pytest.raises(SystemExit) as end:
        ntk.main(NTK_FAST)
    assert end.value.code == 1 and "--group-size" in capsys.readouterr().err


# --- the 103 reported faults: each is pinned by a test, or cannot occur -------------------------------------

REPORTS = {
    **{f"Ha{i:02}": "test_case" for i in [*range(1, 19), *range(20, 32)]},
    "Ha27": "test_layouts",
    "Ha19": "test_training_and_evaluation_use_one_verifier",
    "Ha32": "test_what_stands_behind_the_end_token_is_not_scored",
    "Ha33": "test_all_replies_cut_is_said_once",
    "Ha34": "test_greedy_equals_generate_and_padding_does_not_matter", "Hb01": "test_group_advantages",
    "Hb02": "test_group_advantages", "Hb03": "test_group_advantages", "Hb04": "test_group_advantages",
    "Hb05": "test_models_that_return_all_logits", "Hb06": "test_hidden_states_equal_one_row_at_a_time",
    "Hb07": "test_hidden_states_equal_one_row_at_a_time",
    "Hb08": "test_greedy_equals_generate_and_padding_does_not_matter",
    "Hb09": "test_seeded_backward_through_shared_prompts_and_chunks_equals_autograd",
    "Hb10": "test_pad_equal_to_end_token", "Hb11": "test_sampler_mask_logprobs_and_uniforms",
    "Hb12": "test_scores_are_the_sampled_probabilities",
    "Hb13": "test_sampler_draws_from_the_model_and_not_from_its_generation_config",
    "Hb14": "test_dropout_is_off", "Hb15": "test_token_weights_pin_the_reduction",
    "Hb16": "test_handed_reductions", "Hb17": "test_a_smaller_last_micro_batch",
    "Hb18": "cannot occur: truncated responses are trained on like all others",
    "Hb19": "test_nothing_but_masked_tokens", "Hb20": "test_handed_reductions",
    "Hb21": "cannot occur: no reference-KL term; that the teacher's term pulls: "
            "test_distillation_comes_nearer",
    "Hb22": "test_low_precision_logits_are_scored_in_float32",
    "Hb23": "test_reward_residual_is_the_gradient_and_has_the_right_sign",
    "Hb24": "test_the_text_of_a_reply_is_not_trained_on", "Hb25": "test_a_logged_loss_is_not_the_gradient",
    "Hc01": "test_teacher_is_checked", "Hc02": "test_teacher_is_checked", "Hc03": "test_divergences_by_hand",
    "Hc04": "test_divergences_by_hand", "Hc05": "test_handed_reductions", "Hc06": "test_handed_reductions",
    "Hc07": "test_padded_vocabulary_gives_no_nan", "Hc08": "test_handed_divergences",
    "Hc09": "test_handed_divergences", "Hc10": "test_length_filter",
    "Hc11": "test_hidden_states_equal_one_row_at_a_time", "Hc12": "test_tails_and_start_token",
    "Hc13": "test_dropout_is_off", "Hc14": "test_dropout_is_off",
    "Hc15": "test_the_teacher_stays_where_it_was", "Hc16": "test_divergences_by_hand",
    "Hc17": "test_distill_residual_is_the_gradient", "Hc18": "test_gold_is_only_in_the_teachers_prompt",
    "Hc19": "test_tails_and_start_token", "Hd01": "test_tails_and_start_token", "Hd02": "test_load_model",
    "Hd03": "test_pad_equal_to_end_token", "Hd04": "test_tails_and_start_token",
    "Hd05": "test_tails_and_start_token", "Hd06": "test_length_filter", "Hd07": "test_data_errors",
    "Hd08": "test_load_model", "Hd09": "test_length_filter", "Hd10": "test_data_errors",
    "Hd11": "test_length_filter", "Hd12": "test_files", "He01": "test_kill_at_any_moment_and_resume",
    "He02": "test_bfloat16_weights_move_by_float32_masters", "He03": "test_disk_full",
    "He04": "test_checkpoints_are_ordered_by_number", "He05": "test_disk_full",
    "He06": "test_non_finite_steps", "He07": "test_signals_save_within_a_step",
    "He08": "test_memory_flags_do_not_change_the_result", "He09": "test_resume_is_bit_for_bit",
    "He10": "test_sampler_mask_logprobs_and_uniforms", "He11": "test_mistakes_of_machine_and_number",
    "He12": "test_evaluation_changes_nothing_and_counts_every_row",
    "He13": "test_evaluation_changes_nothing_and_counts_every_row"}


def test_every_report_has_its_test():
    counts = zip("abcde", (34, 25, 19, 12, 13))
    assert set(REPORTS) == {f"H{part}{i:02}" for part, n in counts for i in range(1, n + 1)}
    tests = {node.name for node in ast.parse(pathlib.Path(__file__).read_text()).body
             if isinstance(node, ast.FunctionDef)}
    lost = [name for name in REPORTS.values() if name not in tests and not name.startswith("cannot occur: ")]
    assert lost == []


# The forty reports of a second list.
REPORTS2 = {
    1: ["test_models_without_keys_and_values_are_refused_at_the_start"],
    2: ["test_gradient_checkpointing_has_no_dropout_at_all"],
    3: ["test_context_length", "test_within_the_context_length_the_number_of_tokens_changes_nothing",
        "test_the_length_filter_counts_the_original_context"],
    4: ["test_end_ids_are_the_tokenizers"],
    5: ["test_adapters_say_how_much_of_the_blocks_they_cover"],
    6: ["test_a_kernel_that_cannot_run_says_so_at_the_start"],
    7: ["test_local_where_embeddings_are_scaled_in_place",
        "test_a_model_that_local_would_get_wrong_is_refused"],
    8: ["test_two_runs_started_at_once_get_a_folder_each"],
    9: ["test_a_file_system_without_links"],
    10: ["test_settings_that_transformers_does_not_save"],
    11: ["test_signals_save_within_a_step", "test_nohup_is_respected"],
    12: ["test_printing_ends_no_run", "test_files_are_utf8_on_every_system"],
    13: ["test_the_date_in_a_prompt_is_given", "test_a_run_keeps_its_date"],
    14: ["test_questions_that_are_messages"],
    15: ["test_golds_that_are_lists_or_no_text"],
    16: ["test_equal_questions_stay_in_one_split"],
    17: ["test_questions_that_are_no_text"],
    18: ["test_case"],
    19: ["test_case"],
    20: ["test_case"],
    21: ["test_case"],
    22: ["test_compare_makes_one_table_and_goes_on_where_it_stopped",
         "test_compare_refuses_what_it_did_not_make"],
    23: ["test_compare_refuses_what_it_did_not_make", "test_standing_of_a_run"],
    24: ["test_the_newest_complete_checkpoint_is_taken", "test_a_checkpoint_is_no_run"],
    25: ["test_a_resume_keeps_its_flags", "test_a_resume_with_flags_that_do_not_fit"],
    26: ["test_swa_is_the_mean_of_the_last_two_checkpoints", "test_checkpoints_are_ordered_by_number"],
    27: ["test_a_kernel_that_cannot_run_says_so_at_the_start"],
    28: ["test_a_comparison_ends_with_its_runs_saved"],
    29: ["test_a_folder_has_one_run_at_a_time"],
    30: ["test_the_sampled_policy_is_the_scored_one"],
    31: ["test_the_start_up_check_ends_a_run_before_its_first_rollouts"],
    32: ["test_golds_that_are_lists_or_no_text"],
    33: ["test_few_shot_may_not_take_every_row"],
    34: ["test_no_test_row_stands_in_train"],
    35: ["test_case"],
    36: ["test_weights_that_are_no_numbers_are_refused", "test_mistakes_of_machine_and_number"],
    37: ["test_disk_full_at_the_first_save"],
    38: ["test_a_large_file_is_read_once_under_bars"],
    39: ["test_two_processes_equal_one", "test_kill_at_any_moment_and_resume"],
    40: "no test: tried by hand in a fresh environment, since pytest runs in the one that it is in"}


def test_every_report_of_the_second_list_has_its_test():
    assert set(REPORTS2) == set(range(1, 41))
    for names in REPORTS2.values():
        if isinstance(names, str):
            assert names.startswith("no test: ")
        else:
            assert names and all(callable(globals().get(name)) for name in names), names


def test_what_stands_behind_the_end_token_is_not_scored():  # Ha32
    tok = train.toy_tokenizer()
    ids = torch.tensor([tok("#### 8 <eos> #### 9")["input_ids"]])
    # as m3.sample makes it: the first end token is in, all after it out
    mask = torch.tensor([[1, 1, 1, 0, 0]]).bool()
    assert m3.decode(tok, ids, mask) == ["#### 8"]
    assert [m3.verify(*m3.decode(tok, ids, mask), gold, "toy") for gold in "89"] == [1, 0]


def test_handed_reductions():
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    loss = torch.tensor([[4.0] * 6, [1.0] * 6])
    halves = [(m3.token_weights(mask[i:i + 1], 2, mask.sum()) * loss[i]).sum().item() for i in range(2)]
    # Hb16: two micro-batches of 2 and 6 tokens; their own means would give 2.5
    assert sum(halves) == pytest.approx(1.75)
    # 1/N_i: that is it
    assert sum((m3.token_weights(mask[i:i + 1], 2) * loss[i]).sum().item()
               for i in range(2)) == pytest.approx(2.5)
    kl, mask = torch.tensor([[0.4, 0.2, 9.0, 9.0]]), torch.tensor([[1, 1, 0, 0]]).bool()
    for tokens in (None, mask.sum()):
        assert (m3.token_weights(mask, 1, tokens) * kl).sum().item() == pytest.approx(0.3)  # Hc06
    S, T = torch.randn(2, 5, 11), torch.randn(2, 5, 11)  # Hc05: a sum over words, then a mean over tokens
    D, every = m3.divergence(S, T, "fkl"), torch.ones(2, 5).bool()
    terms = F.kl_div(S.log_softmax(-1), T.log_softmax(-1), reduction="none", log_target=True)
    assert D.shape == (2, 5)
    assert (m3.token_weights(every, 2) * D).sum().item() == pytest.approx(terms.sum().item() / 10)
    near, far = -0.5, -95.5  # Hb20: exp(95) is inf in float32
    A, logp_T = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([near, far, near])
    A = rlsd_advantages(A, logp_T, torch.tensor([far, near, far]))
    assert A.tolist() == pytest.approx([1.1, -1.1, 0.0])


def test_handed_divergences():
    T, S = torch.tensor([0.6, 0.2, 0.15, 0.05]).log(), torch.tensor([0.7, 0.25, 0.03, 0.02]).log()
    # Hc08: the full sum, never below 0
    assert m3.divergence(S, T, "fkl").item() == pytest.approx(0.1501, abs=1e-4)
    bucket = [torch.cat([p[:2], p[2:].exp().sum().log()[None]]) for p in (S, T)]
    # SDPO: with the tail
    torch.testing.assert_close(m3.sdpo_residual(S, T, 2)[:2], m3.distill_residual(*bucket, "jsd")[:2])
    # Hc09: the token's sum is clipped
    T, S = torch.tensor([0.8, 0.1, 0.1]).log(), torch.tensor([0.2, 0.4, 0.4]).log()
    assert m3.divergence(S, T, "fkl").item() == pytest.approx(0.8318, abs=1e-4)
    assert (m3.distill_residual(S, T, "fkl", tau=0.05) == 0).all()
    assert (m3.distill_residual(S, T, "fkl", tau=0.84) != 0).all()


def test_pad_equal_to_end_token():  # Hb10, Hd03
    model = tiny()
    a, b = (m3.sample(model, PROMPTS, 8, 9, eos_ids=[EOS, 2], pad_id=pad,
                      generator=torch.Generator().manual_seed(5)) for pad in (EOS, PAD))
    assert torch.equal(a[1], b[1]) and torch.equal(a[0][a[1]], b[0][b[1]]) and not a[1].all()
    for row, mask in zip(*a[:2]):
        ends = torch.isin(row, torch.tensor([EOS, 2])).nonzero()
        # `ids != pad` would leave the end token out
        assert mask.sum() == (int(ends[0]) + 1 if len(ends) else len(row))
    h = [m3.hidden_states(model.base_model, each(PROMPTS, 8), a[0], pad)[a[1]] for pad in (EOS, PAD)]
    assert torch.equal(*h)


def test_models_that_return_all_logits():  # Hb05
    model, other = tiny(), tiny()
    forward = other.forward

    def all_logits(logits_to_keep=0, **kw):
        return forward(**kw)
    other.forward = all_logits
    a, b = (m3.sample(m, PROMPTS, 2, 5, eos_ids=[EOS], pad_id=PAD, generator=torch.Generator().manual_seed(0))
            for m in (model, other))
    assert torch.equal(a[0], b[0]) and torch.allclose(a[2], b[2], atol=1e-5)


def test_a_word_of_probability_zero_is_never_drawn():
    model = tiny()
    model.get_output_embeddings().weight.data.mul_(1e4)  # one word has all the probability, others exactly 0
    for u in (0.0, 1 - 2**-24):  # the ends of what torch.rand can give
        a = m3.sample(model, PROMPTS, 2, 6, eos_ids=[EOS], pad_id=PAD, uniforms=torch.full((6, 6), u))
        b = m3.sample(model, PROMPTS, 2, 6, 0.0, eos_ids=[EOS], pad_id=PAD)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("prompts, tokens",
                         [(PROMPTS, [[EOS]] * 6), ([[5], [6]], [[EOS, PAD], [7, EOS]] * 2)])
def test_empty_replies_and_one_token_prompts(prompts, tokens):
    model, tokens, G = tiny(), torch.tensor(tokens), 2
    h = m3.hidden_states(model.base_model, each(prompts, G), tokens, PAD)
    z = model.get_output_embeddings()(h)
    for row in range(len(tokens)):
        full = torch.tensor([prompts[row // G] + tokens[row].tolist()])
        want = model(full).logits[0, -tokens.shape[1] - 1:-1]
        torch.testing.assert_close(z[row], want, rtol=1e-4, atol=1e-4)


def test_nothing_but_masked_tokens():  # Hb19
    model = tiny()
    tokens, mask, _ = responses(model)
    none = torch.zeros_like(mask)
    h = m3.hidden_states(model.base_model, each(PROMPTS, 3), tokens, PAD)[none]
    z, params = model.get_output_embeddings()(h), list(model.parameters())
    signals = types.SimpleNamespace(delta_D=m3.distill_residual(z, z),
                                    delta_R=m3.reward_residual(z, tokens[none], torch.ones(0)))
    seed, _ = m3.m3_seed(signals, m3.Settings(), torch.ones(0))
    into = [torch.zeros_like(p) for p in params]
    m3.accumulate(into, z, params, seed)
    assert z.shape == (0, 23) and all((g == 0).all() for g in into)
    share = ntk.conflict_share(none.float(), none.float(), none, none)
    assert share == {"conflict": 0.0, "conflict_deadband": 0.0, "conflict_rewarded": None}


# --- the program: what it trains on -------------------------------------------------------------------------


def test_training_and_evaluation_use_one_verifier(world, monkeypatch):
    # Ha19; and a batch of all-equal groups
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: 1)
    lines = run(world, "--method", "grpo", "--out", "paid", "--steps", "2")
    assert all(x["reward"] == x["zero_advantage"] == 1
               and x["grad_norm"] == 0 and x["kappa"] is x["phi"] is None for x in lines[1:])
    assert lines[2]["accuracy"] == 1
    start = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).state_dict()
    assert all(torch.equal(v, start[k]) for k, v in weights(world, "paid").items())


@pytest.mark.parametrize("method", ["grpo", "m3-soft", "m3-eg", "pcgrad", "sdpo"])
def test_replies_of_only_an_end_token(world, untried, monkeypatch, method):
    def ended_at_once(model, prompts, group, *settings, eos_ids, **kw):
        tokens = torch.full((len(prompts) * group, 1), min(eos_ids))
        return tokens, torch.ones_like(tokens).bool(), torch.zeros(tokens.shape)
    monkeypatch.setattr(m3, "sample", ended_at_once)
    line = run(world, "--method", method, "--out", f"eos-{method}", "--steps", "1", "--kernel", "local")[1]
    known = {k: v for k, v in line.items() if v is not None and k != "collapsed"}
    assert all(math.isfinite(v) for v in known.values())
    assert {"grad_norm", "conflict"} <= set(known) and line["kappa"] is line["phi"] is None
    assert (line["length"], line["reward"], line["truncated"]) == (1, 0, 0)
    # only the teacher has something to say
    assert (line["grad_norm"] > 0) == (method in ("m3-soft", "pcgrad"))


def test_all_replies_cut_is_said_once(world, untried, monkeypatch, capsys):  # Ha33
    def cut(*args, f=m3.sample, eos_ids, **kw):
        tokens, mask, logprobs = f(*args, eos_ids=[-1], **kw)
        return tokens.masked_fill(torch.isin(tokens, torch.tensor(sorted(eos_ids))), 5), mask, logprobs
    monkeypatch.setattr(m3, "sample", cut)
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: 0)
    lines = run(world, "--method", "grpo", "--out", "cut")
    assert all((x["truncated"], x["zero_advantage"], x["reward"]) == (1, 1, 0) for x in lines[1:])
    said = capsys.readouterr()
    assert (said.out + said.err).count("--max-new-tokens") == 1


def test_scores_are_the_sampled_probabilities(world, rewarded, untried, monkeypatch):
    # Hb12: at a temperature that is not 1
    seen = []
    keep_results(monkeypatch, m3, "sample", seen)
    keep_results(monkeypatch, m3, "group_advantages", seen)
    line = run(world, "--method", "grpo", "--temperature", "0.5", "--out", "cool", "--steps", "1")[1]
    tokens, mask, logprobs = seen[1]  # 0 is the evaluation before training
    loss = -(m3.token_weights(mask, len(mask)) * seen[2][:, None] * logprobs).sum().item()
    assert line["loss_R"] == pytest.approx(loss, rel=1e-4) and abs(loss) > 1e-3


def test_a_logged_loss_is_not_the_gradient(world, rewarded):  # Hb25
    for line in run(world, "--method", "grpo", "--out", "loss")[1:]:
        assert abs(line["loss_R"]) < 1 < line["grad_norm"]


def test_the_text_of_a_reply_is_not_trained_on(world, monkeypatch):  # Hb24
    run(world, "--method", "opd", "--out", "text")
    monkeypatch.setattr(m3, "decode", lambda tokenizer, tokens, mask: ["12"] * len(tokens))
    run(world, "--method", "opd", "--out", "no-text")
    one, two = weights(world, "text"), weights(world, "no-text")
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_smaller_last_micro_batch(world, rewarded):
    # Hb17: 16 rows as 12 and 4, or, across groups, as 5, 5, 5 and 1
    for method, reduction in (("hybrid", "response"), ("hybrid", "token"), ("m3-soft", "response")):
        # K_DR, alpha_eff: local's
        argv = ["--method", method, "--reduction", reduction, "--steps", "1", "--kernel", "local"]
        a, *others = (run(world, *argv, "--out", f"mb{size}-{method}-{reduction}", "--micro-batch", size)[1]
                      for size in ("0", "12", "5"))
        for b in others:
            assert all(a[k] == pytest.approx(b[k], rel=1e-4)
                       for k in ("grad_norm", "loss_R", "loss_D", "kappa", "phi", "alpha_eff"))


def test_micro_batches_hold_rows_of_like_length(world, rewarded, untried, monkeypatch):
    """The longest first, each cut at its own longest; every row once, with its own prompt."""
    seen, hidden, sample = [], m3.hidden_states, m3.sample
    cut = torch.arange(12) < torch.tensor([5, 3, 12, 1] * 4)[:, None]

    def cut_sample(*args, **kw):
        tokens, mask, logp = sample(*args, **kw | {"eos_ids": [-1]})  # no reply ends by itself
        return tokens, mask & cut[:len(mask), :mask.shape[1]], logp

    def kept_hidden(backbone, prompts, tokens, *rest, **kw):
        seen.append((prompts, tokens))
        return hidden(backbone, prompts, tokens, *rest, **kw)

    monkeypatch.setattr(m3, "sample", cut_sample)
    monkeypatch.setattr(m3, "hidden_states", kept_hidden)
    line = run(world, "--method", "grpo", "--stats-every", "0", "--kdr-every", "0", "--steps", "1",
               "--max-new-tokens", "12", "--micro-batch", "3", "--out", "sorted")[1]
    widths = [tokens.shape[1] for _, tokens in seen]
    assert widths == [12, 12, 5, 3, 1, 1] and line["length"] == 5.25 and line["grad_norm"] > 0
    assert [len(prompts) for prompts, _ in seen] == [3, 3, 3, 3, 3, 1]
    asked = [tuple(p) for prompts, _ in seen for p in prompts]
    assert sorted(map(asked.count, set(asked))) == [4, 4, 4, 4]


def test_distillation_comes_nearer(world, monkeypatch):  # Hb21
    """The sign of the whole chain, from residual to weights: on the same problems OPD's loss falls."""
    monkeypatch.setattr(m3, "draw_problems", lambda n, count, seed, step: range(count))
    lines = run(world, "--method", "opd", "--lr", "3e-3", "--steps", "12", "--save-every", "12",
                "--eval-every", "12", "--out", "near")
    assert lines[-1]["loss_D"] < 0.85 * lines[1]["loss_D"]


@pytest.mark.parametrize("extra", [[], ["--gradient-checkpointing"]])
def test_dropout_is_off(world, extra):
    # Hb14, Hc13, Hc14: GPT-2 has dropout 0.1; a teacher with the same weights agrees exactly
    argv = real_world(world, "gpt2", "model-gpt2")
    argv += ["--teacher", "model-gpt2", "--method", "opd", "--lr", "0", "--steps", "1"]
    line = run(world, *argv, "--out", f"drop{len(extra)}", *extra)[1]
    assert line["loss_D"] == pytest.approx(0, abs=1e-6) and line["grad_norm"] < 1e-3


def test_the_teacher_stays_where_it_was(world, rewarded, untried, monkeypatch):  # Hc15
    models, split_head = [], m3.split_head

    def kept_split(model):
        models.append(model)
        return split_head(model)
    monkeypatch.setattr(m3, "split_head", kept_split)
    run(world, "--method", "m3-eg", "--lr", "1e-2", "--out", "teacher")
    start = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).state_dict()
    student, teacher = (m.state_dict() for m in models)
    assert all(torch.equal(v, start[k]) for k, v in teacher.items())
    assert not torch.equal(student["lm_head.weight"], start["lm_head.weight"])
    assert not any(p.requires_grad for p in models[1].parameters())


def test_evaluation_changes_nothing_and_counts_every_row(monkeypatch):  # He12, He13
    verdicts = iter([1, 1, 1, 1, 1, 1, 0, 0, 1, 0])  # batches of 4, 4, 2 with 4, 2, 1 right
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: next(verdicts))
    model = tiny(vocab=len(train.TOY_WORDS)).train()
    rows = [dict(prompt_ids=[5, 6 + i], answer="1", kind="toy") for i in range(10)]
    before, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flags = train.argparse.Namespace(prompts_per_step=2, group_size=2, max_new_tokens=3)
    sizes, sample = [], m3.sample

    def counted(model, prompts, *rest, **kw):
        sizes.append(len(prompts))
        return sample(model, prompts, *rest, **kw)
    monkeypatch.setattr(m3, "sample", counted)
    world = train.World(None, None, train.toy_tokenizer(), [1], [], [], rows)
    accuracy, texts = train.evaluate(model, world, flags)
    assert (accuracy, len(texts), sizes) == (0.7, 10, [4, 4, 2])
    assert model.training and torch.equal(noise, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_random_probes_follow_the_seed(world, rewarded):
    # kernel hutchinson: not the global generator, which evaluations may move
    argv = real_world(world, "llama", "model-llama")
    argv += ["--prompts-per-step", "1", "--group-size", "2", "--max-new-tokens", "2", "--steps", "1",
             "--kernel", "hutchinson"]
    lines = []
    for i in range(2):
        torch.manual_seed(i)
        lines.append(run(world, *argv, "--out", f"probes{i}"))
    assert lines[0] == lines[1]


# --- the program: what stops it, and what is left then ------------------------------------------------------


def one_line(capsys, *words):
    """The error is one line that names the mend, and no traceback."""
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if "train.py: error:" in line]
    assert len(errors) == 1 and "Traceback" not in said, said[-2000:]
    assert all(word in errors[0] for word in words), errors[0]
    return errors[0]


@pytest.mark.parametrize("argv, word", [
    ("--device gpu9", "--device"), ("--lora-rank -1", "--lora-rank"), ("--threads -1", "--threads"),
    ("--few-shot -1", "--few-shot"), (f"--seed {10**30}", "--seed"), ("--seed -1", "--seed"),
    ("--beta nan", "--beta"), ("--lr inf", "--lr"), ("--lr nan", "--lr"), ("--eps inf", "--eps"),
    ("--eta-in nan", "--eta-in"), ("--weight-decay nan", "--weight-decay"), ("--lr 1e30", "--lr"),
    ("--out file/run", "file/run"), ("--out file", "cannot write"), ("--resume unsaved", "delete it"),
    ("--plot unlogged", "unlogged"), ("--teacher ./none --model model-llama", "--teacher ./none"),
    ("--model other --kernel logit", "embeddings"), ("--prompts-per-step 3", "--prompts-per-step"),
    ("--compare grpo", "torchrun"), ("--hint-error 1.1", "--hint-error"), ("--eg-gate hard", "--eg-gate"),
    ("--lam 0.999", "0.056"), ("--lam 0.001", "--lam"), ("--hint-error 0.5 --teacher larger", "--hint-error"),
    ("--stats-every -1", "--stats-every"), ("--seeds 0", "--seeds"), ("--steps 1.5", "whole number"),
    ("--teacher larger --model model-llama", "toy world"), ("--eval-limit 300000", "--eval-limit"),
    ("--threads 99999999999", "--threads"), ("--lora-rank 1000000000000", "--lora-rank"),
    ("--prompts-per-step 99999999999999999999", "whole number"), ("--device meta", "--device meta"),
    ("--vocab-chunk 99999999999999999999", "--vocab-chunk"), ("--beta 1e39", "--beta"),
    ("--distill-scale 1e39", "--distill-scale"), ("--date yesterday", "2026-12-31"),
    ("--date 2026-02-30", "--date"), ("--few-shot 3", "--few-shot 3"), ("--plot foreign", "foreign"),
    ("--probe --compare grpo", "--probe"),
    ("--method m3-eg --dtype bfloat16", "--lora-rank"),
    ("--method sdpo --dtype bfloat16", "--dtype float32")])
def test_mistakes_of_machine_and_number(world, capsys, monkeypatch, argv, word):  # He11, Hd08 ...
    (world / "file").write_text("a file, not a folder")
    real_world(world, "llama", "model-llama")
    # a folder whose tokenizer belongs to a larger model
    if "other" in argv and not (world / "other").exists():
        tiny_model("llama", vocab_size=20).save_pretrained(world / "other")
        transformers.AutoTokenizer.from_pretrained(world / "model-llama").save_pretrained(world / "other")
    for name in ("unsaved", "unlogged"):  # killed before its first checkpoint; no log at all
        (world / name).mkdir(exist_ok=True)
        (world / name / "config.json").write_text('{"method": "grpo"}')
    (world / "foreign").mkdir(exist_ok=True)  # a log, but not of a run
    (world / "foreign" / "config.json").write_text('{"method": "grpo", "teacher": "privileged"}')
    (world / "foreign" / "metrics.jsonl").write_text('{"loss": 1.5}\n')
    monkeypatch.setattr(train, "WORLD", 2 if word in ("--prompts-per-step", "torchrun") else 1)
    run(world, *argv.split(), code=2)
    one_line(capsys, word)


def test_models_without_a_longest_context(world, rewarded):
    real_world(world, "gpt2", "model-gpt2")
    folder = world / "no-limit"
    if not folder.exists():
        tok = transformers.AutoTokenizer.from_pretrained(world / "model-gpt2")
        bloom = BloomForCausalLM(BloomConfig(vocab_size=len(tok), hidden_size=16, n_layer=1, n_head=2))
        bloom.save_pretrained(folder)
        tok.save_pretrained(folder)
    # its positions are ALiBi's
    assert run(world, "--model", "no-limit", "--out", "unlimited", "--steps", "1")[1]["grad_norm"] > 0


def test_no_code_from_a_model_folder_is_run(world, capsys, monkeypatch):
    folder = world / "evil"
    folder.mkdir(exist_ok=True)
    code = "open('evil-ran', 'w').write('x')\nclass T: pass\nclass M: pass\nclass C: pass\n"
    (folder / "evil.py").write_text(code)
    names = {"AutoTokenizer": ["evil.T", None], "AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"auto_map": names, "model_type": "evil",
                                               "tokenizer_class": "T"}))
    asked = []
    monkeypatch.setattr("builtins.input", lambda *question: asked.append(question) or "y")
    run(world, "--model", "evil", "--out", "evil-run", code=2)
    one_line(capsys, "--model evil")
    assert not (world / "evil-ran").exists() and not asked


class Evil:
    """A pickle of it would run code."""
    def __reduce__(self):
        return os.mkdir, ("pickle-ran",)


class Damage:
    """Ways for a checkpoint to be unreadable."""
    def cut_state(out):
        os.truncate(out / "last/trainer.pt", 1000)

    def junk_state(out):
        (out / "last/trainer.pt").write_bytes(b"\x80junk" * 99)

    def cut_weights(out):
        os.truncate(out / "last/model.safetensors", 5000)

    def no_log(out):
        (out / "metrics.jsonl").unlink()

    def short_log(out):
        first = (out / "metrics.jsonl").read_text().split("\n")[0]
        (out / "metrics.jsonl").write_text(first + "\n")

    def poisoned(out):
        (out / "last/trainer.pt").write_bytes(pickle.dumps(Evil()))


@pytest.fixture
def saved(world, rewarded):
    """A fresh copy of a run of three steps; the unbroken run that a resume must equal."""
    if not (world / "saved").exists():
        run(world, "--out", "saved")
    shutil.rmtree(world / "hurt", ignore_errors=True)
    shutil.copytree(world / "saved", world / "hurt", symlinks=True)
    return world / "hurt"


def repaired(world, step):
    """What the message tells: point `last` at an earlier checkpoint. The rest is done again, bit for bit."""
    (world / "hurt/last").unlink(missing_ok=True)
    (world / "hurt/last").symlink_to(f"checkpoint-{step}")
    lines = run(world, "--resume", "hurt", "--out", "hurt")
    one, two = weights(world, "saved"), weights(world, "hurt")
    assert all(torch.equal(one[k], two[k]) for k in one) and [line["step"] for line in lines] == [0, 1, 2, 3]
    samples = [(world / name / "samples.jsonl").read_text() for name in ("saved", "hurt")]
    assert samples[0] == samples[1]  # a step that is done twice is written down once


@pytest.mark.parametrize("name", [name for name in vars(Damage) if name[0] != "_"])
def test_corrupt_checkpoints(world, saved, capsys, name):
    getattr(Damage, name)(saved)
    run(world, "--resume", "hurt", code=2)
    one_line(capsys, "--resume", "ln -sfn checkpoint-")
    assert not (world / "pickle-ran").exists()
    if name in ("cut_state", "cut_weights"):
        repaired(world, 1)


def no_last(out):
    (out / "last").unlink()


def dangling(out):
    no_last(out)
    (out / "last").symlink_to("checkpoint-9")


def incomplete(out):
    (out / "checkpoint-3" / "trainer.pt").unlink()


def without_weights(out):
    (out / "checkpoint-3" / "model.safetensors").unlink()


def in_words(out):
    no_last(out)
    (out / "last").write_text("checkpoint-2\n")


def strangers(out):
    no_last(out)
    shutil.copytree(out / "checkpoint-1", out / "checkpoint-50")  # of another run: this one's log has 3 steps
    for name in ("checkpoint-best", "checkpoint-3-old", "checkpoint-"):
        (out / name).mkdir()


@pytest.mark.parametrize("damage, step", [(no_last, 3), (dangling, 3), (incomplete, 2), (without_weights, 2),
                                          (in_words, 2), (strangers, 3)])
def test_the_newest_complete_checkpoint_is_taken(world, saved, capsys, damage, step):
    damage(saved)
    assert train.newest_checkpoint(saved).name == f"checkpoint-{step}"
    lines = run(world, "--resume", "hurt")
    assert f"goes on from hurt/checkpoint-{step}" in capsys.readouterr().out
    one, two = weights(world, "saved"), weights(world, "hurt") if step < 3 else weights(world, "saved")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert (train.newest_checkpoint(saved) / "trainer.pt").exists()


def test_a_checkpoint_is_no_run(world, saved, capsys):
    for name in ("hurt/checkpoint-2", "hurt/last"):
        run(world, "--resume", name, code=2)
        one_line(capsys, "--resume", "hurt, its run, goes on from", "checkpoint-3")
    os.unlink(saved / "last")
    shutil.copytree(saved / "checkpoint-3", saved / "last")  # a copy that has followed the link
    before = (saved / "metrics.jsonl").read_text()
    run(world, "--resume", "hurt", "--steps", "5", code=2)
    one_line(capsys, "hurt/last is a folder", "move it away")
    assert (saved / "metrics.jsonl").read_text() == before and (saved / "last" / "trainer.pt").exists()


FIXED = ("--method grpo", "--model other", "--teacher larger", "--lora-rank 2", "--seed 1", "--group-size 2",
         "--prompts-per-step 8", "--max-new-tokens 9", "--kernel exact", "--temperature 0.5", "--std none",
         "--alpha-max 0.3", "--few-shot 1", "--divergence rkl", "--eval-limit 5", "--hint answer", "--tau 1",
         "--eg-gate soft")


def test_a_resume_with_flags_that_do_not_fit(world, saved, capsys):
    before = (saved / "config.json").read_text()
    for argv in (*FIXED, "--out elsewhere", "--steps 2", "--compare grpo"):
        run(world, "--resume", "hurt", *argv.split(), code=2)
        one_line(capsys, "--resume" if "--compare" in argv else " ".join(argv.split()[:2]))
    assert (saved / "config.json").read_text() == before and not (world / "elsewhere").exists()
    repaired(world, 3)


def test_a_resume_wants_the_rows_it_began_with(world, saved, capsys, monkeypatch):
    before = (saved / "metrics.jsonl").read_text()
    monkeypatch.setattr(train, "toy_problems", lambda flags, made=train.toy_problems: {
        split: rows[1:] + rows[:1] for split, rows in made(flags).items()})
    monkeypatch.setitem(train.TASKS, "toy", train.TASKS["toy"]._replace(problems=train.toy_problems))
    run(world, "--resume", "hurt", "--steps", "5", code=2)
    one_line(capsys, "--resume hurt", "other rows")
    assert (saved / "metrics.jsonl").read_text() == before


def test_a_resume_keeps_its_flags(world, saved, capsys, monkeypatch):
    """config.json is what the run is: the next bare --resume needs no flags."""
    run(world, "--resume", "hurt", "--steps", "5", "--lr", "1e-3", "--micro-batch", "2", "--eval-every", "4")
    kept = json.loads((saved / "config.json").read_text())
    assert (kept["steps"], kept["lr"], kept["micro_batch"], kept["eval_every"]) == (5, 1e-3, 2, 4)
    assert [line["lr"] for line in records(saved)[1:]] == [1e-4] * 3 + [1e-3] * 2
    (saved / "last").unlink()
    (saved / "last").symlink_to("checkpoint-4")  # as if killed after step 4
    here = os.getcwd()
    monkeypatch.setattr(train, "toy_rows", few_rows)
    try:
        os.chdir(world)
        train.main(["--resume", "hurt"])
        assert "is finished" not in capsys.readouterr().out
        train.main(["--resume", "hurt"])
    finally:
        os.chdir(here)
    assert capsys.readouterr().out.count("finished, 5 steps") == 1
    assert json.loads((saved / "config.json").read_text()) == kept
    assert [line["lr"] for line in records(saved)[1:]] == [1e-4] * 3 + [1e-3] * 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"),
                                   RuntimeError("PytorchStreamWriter failed writing file")])
def test_disk_full(world, saved, rewarded, capsys, monkeypatch, error):  # He03, He05
    repaired(world, 1)
    def half(state, path, f=torch.save):
        if state["step"] < 5:
            return f(state, path)
        path.write_bytes(b"half of it")
        raise error
    monkeypatch.setattr(torch, "save", half)
    run(world, "--resume", "hurt", "--steps", "9", code=1)
    one_line(capsys, str(error)[-20:], "--resume hurt")
    out = world / "hurt"
    assert os.readlink(out / "last") == "checkpoint-4" and not (out / "checkpoint-5").exists()
    assert not list(out.glob(".*"))
    assert train.Qwen3ForCausalLM.from_pretrained(out / "last")
    assert torch.load(out / "last/trainer.pt", weights_only=True)["step"] == 4
    monkeypatch.undo()
    monkeypatch.setattr(m3, "verify", lambda text, gold, kind: len(text) % 2)
    lines = run(world, "--resume", "hurt", "--out", "hurt", "--steps", "5")
    assert [line["step"] for line in lines] == list(range(6))


def test_disk_full_between_checkpoints(world, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(train, "append_line", full)
    run(world, "--out", "full", code=1)
    one_line(capsys, "No space left", "there is no checkpoint yet")


def test_disk_full_at_the_first_save(world, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    run(world, "--out", "full-at-once", code=1)
    said = one_line(capsys, "No space left", "there is no checkpoint yet")
    assert "goes on from" not in said and not list((world / "full-at-once").glob("*checkpoint*"))


def test_a_file_system_without_links(world, saved, monkeypatch):
    def no_links(*_):
        raise OSError(1, "Operation not permitted")
    monkeypatch.setattr(pathlib.Path, "symlink_to", no_links)
    run(world, "--resume", "hurt", "--steps", "4")
    assert not (saved / "last").is_symlink() and (saved / "last").read_text().strip() == "checkpoint-4"
    assert [line["step"] for line in run(world, "--resume", "hurt", "--steps", "5")] == [0, 1, 2, 3, 4, 5]
    assert train.newest_checkpoint(saved) == saved / "checkpoint-5"


@pytest.mark.parametrize("settings", [{"temperature": 0.3}, {"output_attentions": True}, {"num_beams": 0}])
def test_settings_that_transformers_does_not_save(world, rewarded, settings, monkeypatch):
    """A start model's sampling settings may be some that save_pretrained refuses; the run saves none."""
    argv, load = real_world(world, "llama", "model-llama"), train.load_model

    def with_settings(*rest):
        model, *more = load(*rest)
        for name, value in settings.items():
            setattr(model.generation_config, name, value)
        return model, *more
    monkeypatch.setattr(train, "load_model", with_settings)
    name = f"settings-{next(iter(settings))}"
    run(world, *argv, "--steps", "1", "--out", name)
    kept = json.loads((world / name / "last" / "generation_config.json").read_text())
    assert not {*settings} & {*kept} and kept["eos_token_id"] is not None


def test_two_runs_started_at_once_get_a_folder_each(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    one, two, three = (train.parse_flags(["--method", "grpo"]) for _ in range(3))
    with train.claim(one), train.claim(two), train.claim(three):
        assert [one.out, two.out, three.out] == [f"runs/now-grpo{end}" for end in ("", "-2", "-3")]
    assert not pathlib.Path(one.out).exists()  # it wrote nothing
    pathlib.Path("empty").mkdir()
    for extra in ([], ["--out", "empty"], ["--out", "fresh"]):
        run(world, "--device", "gpu9", "--method", "grpo", *extra, code=2)
    assert not pathlib.Path(one.out).exists() and not pathlib.Path("fresh").exists()
    assert pathlib.Path("empty").exists()  # the user's


def test_a_folder_has_one_run_at_a_time(world, saved, monkeypatch, capsys):
    monkeypatch.chdir(world)
    before = (saved / "metrics.jsonl").read_text()
    with train.claim(train.parse_flags(["--resume", "hurt"])):
        run(world, "--resume", "hurt", code=2)
        one_line(capsys, "hurt is in use")
    with train.claim(train.parse_flags(["--out", "one"])):
        run(world, "--out", "one", code=2)
        one_line(capsys, "one is in use")
        monkeypatch.setattr(train, "fcntl", None)  # a system without such locks
        with train.claim(train.parse_flags(["--out", "one"])):
            pass
    assert (saved / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("method", ["m3-soft", "m3-eg", "minnorm"])
def test_non_finite_steps(world, rewarded, monkeypatch, capsys, method):  # He06
    bad, step, draw, hidden = {2}, [0], m3.draw_problems, m3.hidden_states

    def counted(n, count, seed, number):
        step[0] = number
        return draw(n, count, seed, number)

    def broken(*args, **kw):
        return hidden(*args, **kw) * (math.nan if step[0] in bad else 1)

    monkeypatch.setattr(m3, "draw_problems", counted)
    monkeypatch.setattr(m3, "hidden_states", broken)
    argv = ["--method", method, "--steps", "5", "--eval-every", "5"]
    lines = run(world, *argv, "--out", f"nan1-{method}")
    out, load = world / f"nan1-{method}", lambda f: train.Qwen3ForCausalLM.from_pretrained(f).state_dict()
    one, two, three = (load(out / f"checkpoint-{i}") for i in (1, 2, 3))
    assert lines[2]["grad_norm"] is lines[2]["loss_D"] is None
    assert all(line["grad_norm"] > 0 for line in lines[1:2] + lines[3:])
    # not applied, and nothing stays behind
    assert all(torch.equal(one[k], two[k]) and torch.isfinite(three[k]).all() for k in one)
    assert any(not torch.equal(two[k], three[k]) for k in one)
    batch = torch.load(out / "non-finite-2-rank-0.pt", weights_only=True)
    assert batch["step"] == 2 and batch["tokens"].shape == batch["mask"].shape and len(batch["rewards"]) == 16
    bad |= {3, 4}
    capsys.readouterr()
    run(world, *argv, "--out", f"nan3-{method}", code=1)
    one_line(capsys, "three non-finite steps")
    out = world / f"nan3-{method}"
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]
    assert {f.name for f in out.glob("non*")} == {f"non-finite-{i}-rank-0.pt" for i in (2, 3, 4)}
    assert all(torch.equal(v, one[k]) for k, v in load(out / "last").items())


def test_checkpoints_are_ordered_by_number(world, saved):  # He04: as text, 1000 comes before 900
    for old, new in ((1, 900), (2, 1000)):
        (saved / f"checkpoint-{old}").rename(saved / f"checkpoint-{new}")
    (saved / "last").unlink()
    (saved / "metrics.jsonl").write_text("{}\n" * 1001)
    assert train.newest_checkpoint(saved).name == "checkpoint-1000"


def test_a_folder_that_stands_in_the_way_is_kept(world, saved):
    """Going on writes checkpoint-N again; what somebody else put under that name is moved aside."""
    (saved / "last").unlink()
    (saved / "last").symlink_to("checkpoint-1")
    (saved / "checkpoint-3" / "notes.txt").write_text("mine")
    run(world, "--resume", "hurt")
    assert (saved / "checkpoint-3-before" / "notes.txt").read_text() == "mine"
    assert not (saved / "checkpoint-3" / "notes.txt").exists()
    assert not (saved / "checkpoint-2-before").exists()


@pytest.mark.parametrize("method, steps", [("sdpo", 1), ("rlsd", 19)])
def test_a_moving_teacher_is_resumed(world, rewarded, method, steps):
    argv, out = ["--method", method, "--lr", "1e-2", "--eval-every", "1"], f"state-{method}"
    run(world, *argv, "--out", out, "--steps", "1")
    if steps > 1:  # RLSD's teacher moves at step 20: let this be step 19
        state = torch.load(world / out / "last/trainer.pt", weights_only=True)
        torch.save(state | dict(step=steps), world / out / "last/trainer.pt")
        log = records(world / out)[1] | dict(seconds=1.0)
        logs = [json.dumps(log | dict(step=i)) + "\n" for i in range(steps + 1)]
        (world / out / "metrics.jsonl").write_text("".join(logs))
    shutil.copytree(world / out, world / f"{out}-2", symlinks=True)
    whole = run(world, "--resume", out, "--out", out, "--steps", str(steps + 2))
    run(world, "--resume", f"{out}-2", "--out", f"{out}-2", "--steps", str(steps + 1))
    assert run(world, "--resume", f"{out}-2", "--out", f"{out}-2", "--steps", str(steps + 2)) == whole
    a, b = (torch.load(world / name / "last/trainer.pt", weights_only=True) for name in (out, f"{out}-2"))
    start = train.Qwen3ForCausalLM.from_pretrained(world / train.toy_path()).state_dict()
    assert same(a, b) and same(weights(world, out), weights(world, f"{out}-2"))
    assert not torch.equal(a["teacher"]["lm_head.weight"], start["lm_head.weight"])


def same(a, b):
    """Equal to the bit, however nested."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


FORKS = """
import json, os, signal, sys, traceback
sys.path.insert(0, sys.argv[1])
import m3, train
m3.verify = lambda text, gold, kind: len(text) % 2  # see the fixture `rewarded`
toy_rows = train.toy_rows
train.toy_rows = lambda n, *rest, **kw: toy_rows(min(n, 256), *rest, **kw)  # see few_rows
train.plot = lambda folders, file: None
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # pytest itself may run under nohup

def signal_itself(folder, number, events, lines):
    # At the file operation of this number in the folder, once the log has so many lines: no clock, no race.
    seen = 0

    def hook(event, args):
        nonlocal seen
        if seen < 0 or not any(folder + "/" in str(arg) for arg in args[:2]):
            return
        count, seen = seen + 1, -1  # reading the log is a file operation too
        log = folder + "/metrics.jsonl"
        if count < events or lines and not (os.path.exists(log) and open(log).read().count("\\n") >= lines):
            seen = count
            return
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a second one, impatient, does no harm
    sys.addaudithook(hook)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code, log = 1, os.open("forks.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        argv, at = json.loads(line)
        try:
            if at:
                signal_itself(*at)
            train.main(argv)
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def fork(world):
    """fork(*flags) runs train.py in a process of its own, forked from one that has torch in memory already.
    Returns its exit code. at=(folder, signal, events, lines): it signals itself, see FORKS. meanwhile(pid) is
    called while it runs."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    parent = subprocess.Popen([sys.executable, "-c", FORKS, str(HERE)], cwd=world, text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(*argv, at=None, meanwhile=None):
        print(json.dumps([[*FAST, *argv], at]), file=parent.stdin, flush=True)
        pid = int(parent.stdout.readline())
        if meanwhile:
            meanwhile(pid)
        return int(parent.stdout.readline())
    yield start
    parent.stdin.close()
    assert parent.wait(600) == 0


def logged(out):
    return (out / "metrics.jsonl").read_text().count("\n") if (out / "metrics.jsonl").exists() else 0


def wait_for(out, lines):
    limit = time.time() + 240  # a busy machine is slow, not wrong
    while logged(out) < lines:
        assert time.time() < limit, f"no line {lines} in {out}"
        time.sleep(0.002)


def records(out, name="metrics"):
    rows = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second")} for row in rows]


def test_kill_at_any_moment_and_resume(world, fork):  # He01
    argv = ["--steps", "12", "--method", "m3-soft", "--lr", "1e-2", "--eval-every", "1",
            "--max-new-tokens", "5"]
    assert fork(*argv, "--out", "unbroken") == 0
    out, rng = world / "killed", random.Random(0)
    for _ in range(7):
        resume = (out / "last").exists()
        if not resume and out.exists():
            shutil.rmtree(out)  # killed before its first checkpoint: the message says, delete it
        # A step takes about 30 file operations, before them those that read the checkpoint.
        moment = ["killed", signal.SIGKILL, rng.randint(1, 60), 0]
        assert fork(*argv, "--resume" if resume else "--out", "killed", at=moment) == -9
    assert fork(*argv, "--resume" if (out / "last").exists() else "--out", "killed") == 0, (
        (world / "forks.log").read_text()[-2000:])
    whole = world / "unbroken"
    assert records(out) == records(whole) and records(out, "samples") == records(whole, "samples")
    assert [row["step"] for row in records(out)] == list(range(13))
    assert os.readlink(out / "last") == "checkpoint-12"
    assert same(*(torch.load(o / "last/trainer.pt", weights_only=True) for o in (out, whole)))
    assert same(weights(world, "killed"), weights(world, "unbroken"))
    assert not [f.name for f in out.iterdir() if f.name[0] == "."]  # nothing half-written lies about


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_save_within_a_step(world, fork, number):  # He07
    argv = ["--method", "m3-soft", "--steps", "60", "--save-every", "60", "--eval-every", "60",
            "--lr", "1e-2"]
    name = f"signal{int(number)}"
    out = world / name
    code = fork(*argv, "--out", name, at=[name, number, 0, 4])  # as soon as steps 0 to 3 are in the log
    said = (world / "forks.log").read_text()
    assert code == 128 + number and said.count("train.py: error") == 1
    assert f"--resume {name}" in said and "Traceback" not in said
    done = len(records(out)) - 1
    assert done <= 4 and os.readlink(out / "last") == f"checkpoint-{done}" and not list(out.glob(".*"))
    assert fork(*argv, "--resume", name, "--steps", str(done + 1)) == 0
    assert [row["step"] for row in records(out)] == list(range(done + 2))


def test_nohup_is_respected():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        train.on_stop(print)
        assert signal.getsignal(signal.SIGTERM) is print and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        train.on_stop(print)
        assert signal.getsignal(signal.SIGHUP) is print
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_ends_with_its_runs_saved(world, fork, number):
    """A signal is passed on; SIGKILL cannot be, but the run sees that it is alone."""
    name = f"stopped{int(number)}"
    argv = ["--compare", "grpo", "--seeds", "1", "--steps", "99999", "--save-every", "99999",
            "--eval-every", "99999", "--out", name]
    out = world / name / "grpo-0"

    def stop(pid):
        wait_for(out, 3)
        os.kill(pid, number)
    code = fork(*argv, meanwhile=stop)
    said, limit = (world / "forks.log").read_text(), time.time() + 120
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said and said.count("train.py: error") == (number != signal.SIGKILL)
    while number == signal.SIGKILL and not (out / "last").exists():
        assert time.time() < limit
        time.sleep(0.05)
    done = logged(out) - 1  # it had saved and ended when the comparison did
    assert done >= 2 and os.readlink(out / "last") == f"checkpoint-{done}"
    with open(f"{out}.log") as log:
        assert "stopped by signal 15" in log.read() or number == signal.SIGKILL


class Broken(io.StringIO):
    """A terminal that was closed."""
    def write(self, *_):
        raise OSError(5, "Input/output error")

    flush = write


def test_printing_ends_no_run(monkeypatch, world, rewarded):
    raw = io.BytesIO()
    printer = train.Printer(io.TextIOWrapper(raw, encoding="ascii"))
    print("5 − 3", file=printer, flush=True)
    assert raw.getvalue() == b"5 ? 3\n"
    monkeypatch.setattr(m3, "decode", lambda tokenizer, tokens, mask: ["5 − 3 \ud83d"] * len(tokens))
    for name, stream in (("ascii", io.TextIOWrapper(io.BytesIO(), encoding="cp1252")), ("closed", Broken())):
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            lines = run(world, "--out", f"print-{name}")
        assert [line["step"] for line in lines] == [0, 1, 2, 3]
        assert (world / f"print-{name}" / "last").exists()
        samples = records(world / f"print-{name}", "samples")
        assert samples[0]["completions"][0] == "5 − 3 \ud83d"


def test_files_are_utf8_on_every_system(world):
    code = ("import sys; sys.path.insert(0, sys.argv.pop(1)); import m3, train\n"
            "m3.decode = lambda tokenizer, tokens, mask: ['5 \\u2212 3'] * len(tokens)\ntrain.main()")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-c", code, str(HERE), *FAST, "--out", "plain"]
    done = subprocess.run(argv, cwd=world, text=True, capture_output=True, env=os.environ | plain)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "−" in (world / "plain" / "samples.jsonl").read_text(encoding="utf-8") and "5 ? 3" in done.stdout


def test_help_names_the_methods(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def mine(s, f):
        """of tomorrow"""

    monkeypatch.setitem(m3.METHODS, "m9", m3.Method(mine))
    with pytest.raises(SystemExit) as end:
        train.parse_flags(["--help"])
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert end.value.code == 0 and "FLAG" in lines[0] and lines[2].endswith("distillation.")
    for name, method in m3.METHODS.items():
        assert f"\n  {name:<12}{(method.seed or method.mix).__doc__}" in said


def test_new_flags():
    assert train.parse_flags([]).hint_error == 0 and train.parse_flags([]).eg_gate == "select"
    assert train.parse_flags(["--hint-error", "0.5", "--eg-gate", "soft", "--no-swa"]).hint_error == 0.5
    argv = ["--tau", "2.5", "--swa", "--out", "a=b", "--lr", "1e-05"]
    config = train.config_of(train.parse_flags(argv))
    assert train.config_of(train.parse_flags(train.as_argv(config))) == config  # a config is a command line


# --- several processes ------------------------------------------------------------------------------------


def torchrun(world, *argv, code="import train; train.main()"):
    """train.py under torchrun, two processes on the CPU; `code` is what each of them runs."""
    script = world / "ranked.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r})\n{code}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(port),
    ]
    return subprocess.run(
        [*launch, script, *FAST, *argv], cwd=world, capture_output=True, text=True, timeout=900
    )


@pytest.mark.parametrize("method, kernel", [("m3-soft", "local"), ("m3-eg", "logit")])
def test_two_processes_equal_one(world, rewarded, untried, monkeypatch, method, kernel):
    argv = ["--method", method, "--kernel", kernel, "--reduction", "token", "--eval-limit", "5"]
    argv += ["--occupancy-every", "2"] if method == "m3-soft" else []
    code = f"""
import torch, m3
{inspect.getsource(drawn_without_a_model)}
m3.sample = drawn_without_a_model
m3.verify = lambda text, gold, kind: len(text) % 2
import train
{inspect.getsource(few_rows)}
train.toy_rows = few_rows
train.try_out = lambda *args: None
train.main()"""
    done = torchrun(world, *argv, "--out", f"two-{method}", code=code)
    assert done.returncode == 0, done.stderr[-2000:]
    monkeypatch.setattr(m3, "sample", drawn_without_a_model)
    one, two = run(world, *argv, "--out", f"one-{method}"), records(world / f"two-{method}")
    samples = zip(*(records(world / f"{name}-{method}", "samples") for name in ("one", "two")), strict=True)
    for a, b in samples:  # words are the same, numbers as near as those of the log
        for reply, other in zip(a.pop("tokens", []), b.pop("tokens", []), strict=True):
            for (word, *numbers), (same_word, *others) in zip(reply, other, strict=True):
                assert word == same_word and numbers == pytest.approx(others, abs=0.02)
        assert a == b
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        for key, value in a.items():
            near = pytest.approx(value, rel=1e-2, abs=1e-4) if isinstance(value, float) else value
            if key.startswith("conflict") and value is not None:  # of tokens with K about 0, rounding decides
                near = pytest.approx(value, abs=0.02)
            assert b[key] == near, (a["step"], key)
    # The gradients, as AdamW has averaged them: a weight whose gradient is about 0 may go either way.
    a, b = (
        torch.load(world / f"{name}-{method}/last/trainer.pt", weights_only=True) for name in ("one", "two")
    )
    for name in ("exp_avg", "exp_avg_sq"):
        x, y = (
            torch.cat([s[name].flatten() for s in state["optimizer"]["state"].values()]) for state in (a, b)
        )
        assert (x - y).norm() < 1e-2 * x.norm(), name
    assert done.stdout.count("greedy accuracy") == 1  # rank 0 alone speaks


def test_a_failing_rank_ends_all(world):
    fails = (
        "import m3, os\nif os.environ['RANK'] == '1':\n    import torch\n"
        "    def full(*a): raise torch.OutOfMemoryError\n    m3.m3_seed = full\nimport train; train.main()"
    )
    done = torchrun(world, "--out", "ranks-broken", code=fails)
    assert done.returncode != 0 and "out of memory: lower --micro-batch" in done.stderr
    assert "another has ended" in done.stderr or "Signal 15" in done.stderr or "SIGTERM" in done.stderr


# --- the README's recipe for TRL: runs where TRL is installed -----------------------------------------------


def recipe():
    """The recipe for TRL, as it is to be pasted."""
    blocks = (HERE / "assets" / "results.md").read_text(encoding="utf-8").split("```python\n")[1:]
    return next(block.split("```")[0] for block in blocks if "class M3Trainer" in block)


@pytest.fixture(scope="session")
def recipe_run(tmp_path_factory):
    """The recipe after one step of training, the first policy, and all batches of a second run of two steps.

    A tiny random Qwen3 with the toy tokenizer. Rows of a step come in two halves: accumulation is tested too.
    """
    trl = pytest.importorskip("trl")
    tok, rows = train.toy_tokenizer(), train.toy_rows(6, 0)
    model = tiny(vocab=len(tok), max_position_embeddings=256, pad_token_id=0, eos_token_id=1,
                 bos_token_id=None)
    start = copy.deepcopy(model)
    # so that random responses end, at different lengths
    model.generation_config.eos_token_id = list(range(1, 30))
    args = trl.GRPOConfig(str(tmp_path_factory.mktemp("trl")), num_generations=4,
                          per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=1,
                          max_completion_length=12, learning_rate=1e-2, max_grad_norm=0.0,
                          lr_scheduler_type="constant", temperature=1.3, use_cpu=True, bf16=False,
                          gradient_checkpointing=False, report_to="none", save_strategy="no",
                          logging_strategy="no", disable_tqdm=True)
    names = dict(model=model, tokenizer=tok, args=args, rows=rows)
    with pytest.MonkeyPatch.context() as patch:
        # a random model never answers right
        patch.setattr(m3, "verify", lambda text, gold, kind: len(text) % 2)
        exec(recipe(), names)
        trainer = names["trainer"]
        # it has trained
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters()))

        steps, batches = [], []  # (weights, micro-batches, gradient) of each step

        class Record(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, *_, **__):
                gradient = [p.grad.clone() for p in model.parameters()]
                steps.append((copy.deepcopy(model.state_dict()), batches[:], gradient))
                batches.clear()

        inner = trainer._compute_loss

        def kept_loss(model, inputs):
            batches.append(inputs)
            return inner(model, inputs)

        patch.setattr(trainer, "_compute_loss", kept_loss)
        trainer.add_callback(Record())
        args.max_steps = 2
        trainer.train()
    return trainer, start, tok, steps


def row_ids(inputs, b, name):
    return inputs[f"{name}_ids"][b][inputs[f"{name}_mask"][b].bool()]


def reply_logits(model, prompt, reply):
    return model(torch.cat([prompt, reply])[None]).logits[0, len(prompt) - 1:-1]


def m3_soft_gradient(model, teacher, batches, alpha_max=0.15, sharpness=1.0, eps=0.1, temperature=1.3):
    """What the recipe should give the optimizer, from the paper's equations alone: float64, row by row.

    The residuals are taken by autograd from the two losses; none of m3.py's functions is used.
    """
    model, teacher = model.double(), teacher.double()
    rows = [(inputs, b) for inputs in batches for b in range(len(inputs["advantages"]))]
    total = 0
    for inputs, b in rows:
        y, A = row_ids(inputs, b, "completion"), inputs["advantages"][b].double()
        z = reply_logits(model, row_ids(inputs, b, "prompt"), y) / temperature
        z_T = reply_logits(teacher, row_ids(inputs, b, "teacher"), y).detach() / temperature
        leaf = z.detach().requires_grad_()
        log_p = leaf.log_softmax(-1)
        (delta_R,) = torch.autograd.grad(-A * log_p[range(len(y)), y].sum(), leaf, retain_graph=True)
        kl = F.kl_div(log_p, z_T.log_softmax(-1), log_target=True, reduction="sum")
        (delta_D,) = torch.autograd.grad(kl, leaf)
        size_R, size_D = delta_R.norm(dim=-1, keepdim=True), delta_D.norm(dim=-1, keepdim=True)
        cos = (delta_R * delta_D).sum(-1, keepdim=True) / (size_R * size_D).clamp(min=1e-30)
        alpha = alpha_max / (1 + torch.exp(-sharpness * cos))
        seed = alpha * delta_D / (size_D + eps) + (1 - alpha) * delta_R / (size_R + eps)
        # seed has no graph: the gradient in z is the seed
        total = total + (seed * z).sum() / len(y) / len(rows)
    return torch.autograd.grad(total, list(model.parameters()))


def test_trl_recipe_hands_the_m3_gradient_to_the_optimizer(recipe_run):
    trainer, start, tok, steps = recipe_run
    assert len(steps) == 2 and all(len(batches) == 2 for _, batches, _ in steps)
    lengths, hints, wrong = set(), set(), copy.deepcopy(start)
    for weights, batches, gradient in steps:
        model = copy.deepcopy(start)
        model.load_state_dict(weights)
        assert any((inputs["advantages"] != 0).any() for inputs in batches)
        for inputs in batches:
            lengths |= set(inputs["completion_mask"].sum(1).tolist())
            hints |= set(inputs["teacher_mask"].sum(1).tolist())
            for b in range(4):  # each response's teacher reads that response's own problem, solved
                asked, told = (tok.decode(row_ids(inputs, b, name)) for name in ("prompt", "teacher"))
                assert told.startswith(asked.removesuffix("Answer :") + "Hint :") and "####" in told
        expected = m3_soft_gradient(model, copy.deepcopy(start), batches)
        scale = max(g.abs().max() for g in expected)
        for ours, truth in zip(gradient, expected):
            torch.testing.assert_close(ours.double() / scale, truth / scale, rtol=0, atol=1e-5)
    assert len(lengths) > 3 and len(hints) > 1  # padding was there to be got wrong, on both sides
    for p in wrong.parameters():
        p.data.mul_(1.1)  # another teacher gives another gradient: the comparison can fail
    other = m3_soft_gradient(model, wrong, batches)
    assert max((a - b).abs().max() for a, b in zip(other, expected)) > 1e-3 * scale


def test_trl_recipe_steps_in_the_right_direction(recipe_run, monkeypatch):
    """For a batch of one token a step along its seed must move that token's own loss down."""
    trainer, start, tok, steps = recipe_run
    model, inputs = trainer.model, steps[-1][1][0]
    home = copy.deepcopy(model.state_dict())

    def log_p(reader, b, name):
        return (reader(row_ids(inputs, b, name)[None]).logits[0, -1] / 1.3).log_softmax(-1)

    def loss(b, A, hinted):
        """A 1: the token becomes likelier; -1: less likely; 0: the policy comes closer to the teacher."""
        own = log_p(model, b, "prompt")
        if A == 0:
            return F.kl_div(own, hinted, log_target=True, reduction="sum").item()
        return -A * own[inputs["completion_ids"][b, 0]].item()

    for b in range(4):
        only = {k: v[b:b + 1, :1] if k.startswith("completion") else v[b:b + 1]
                for k, v in inputs.items() if v.dim()}
        hinted = log_p(start.float(), b, "teacher").detach()
        for A, alpha_max in ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0)):
            monkeypatch.setattr(trainer, "alpha_max", alpha_max)
            model.zero_grad()
            trainer._compute_loss(model, only | {"advantages": torch.tensor([A])}).backward()
            with torch.no_grad():
                before = loss(b, A, hinted)
                for p in model.parameters():
                    p.sub_(1e-3 * p.grad)
                assert loss(b, A, hinted) < before
                model.load_state_dict(home)


# --- benchmarks: pytest -m benchmark -s ---------------------------------------------------------------------
# Times on a shared machine are noisy: every figure is a median, every ratio is of two things timed in turn.


def timed(*jobs, repeats=7):
    """Median seconds of each job, run in turn so that a slow minute hits all of them."""
    times = [[] for _ in jobs]
    for _ in range(repeats + 1):
        for job, out in zip(jobs, times):
            start = time.perf_counter()
            job()
            out.append(time.perf_counter() - start)
    return [sorted(out[1:])[repeats // 2] for out in times]  # the first round warms up


def report(name, **figures):
    print("\n" + json.dumps({"benchmark": name, "threads": torch.get_num_threads(),
                             "torch": torch.__version__,
                             **{k: float(f"{v:.3g}") if isinstance(v, float) else v
                                for k, v in figures.items()}}))


def toy_batch(P=8, G=8, N=24):
    """The toy base model and one step's rollouts of it."""
    model, tok = train.Qwen3ForCausalLM.from_pretrained(train.toy_model()).eval(), train.toy_tokenizer()
    rows = train.encode_rows(train.toy_rows(P, 5), tok, 256, N, [], "solution")
    ids = [row["prompt_ids"] for row in rows]

    def go():
        generator = torch.Generator().manual_seed(0)
        return m3.sample(model, ids, G, N, eos_ids={tok.eos_token_id}, pad_id=0, generator=generator)

    return types.SimpleNamespace(model=model, tok=tok, rows=rows, ids=ids, sample=go)


def seeded_step(model, prompts, tokens, mask, chunk=4096):
    """One GRPO forward and backward as the loop does it. prompts: one per row."""
    params = [p for p in model.parameters() if p.requires_grad]
    backbone, head = m3.split_head(model)
    A, w = torch.linspace(-1, 1, len(tokens)), m3.token_weights(mask, len(tokens))[mask]
    into = [torch.zeros_like(p) for p in params]
    h = m3.hidden_states(backbone, prompts, tokens, 0)[mask]
    leaf = h.detach().requires_grad_()
    leaf_grad, y, a = torch.zeros_like(leaf), tokens[mask], A[:, None].expand_as(mask)[mask]
    for c in (slice(i, i + chunk) for i in range(0, len(y), chunk)):
        z = head(leaf[c]).float()
        m3.accumulate([leaf_grad, *into], z, [leaf, *params],
                      m3.reward_residual(z.detach(), y[c], a[c]) * w[c, None])
    m3.accumulate(into, h, params, leaf_grad)
    return into


def step_jobs():
    """The parts of one step of the toy world, each as a function without arguments, and what they work on."""
    toy = toy_batch()
    model, ids, (tokens, mask, _) = toy.model, toy.ids, toy.sample()
    teacher_ids = [row["teacher_ids"] for row in toy.rows]
    full, attention, _ = m3.left_pad(each(ids, 8), 0)
    full, attention = torch.cat([full, tokens], 1), torch.cat([attention, mask.long()], 1)
    paid = [m3.verify(text, toy.rows[i // 8]["answer"], "toy")
            for i, text in enumerate(m3.decode(toy.tok, tokens, mask))]
    A = m3.group_advantages(torch.tensor(paid).float(), 8)
    with torch.no_grad():
        z_S, z_T = (model.lm_head(m3.hidden_states(model.base_model, each(p, 8), tokens, 0))
                    for p in (ids, teacher_ids))
        residuals = m3.distill_residual(z_S, z_T), m3.reward_residual(z_S, tokens, A)
    delta = [mask[..., None] * x for x in residuals]
    params = list(model.parameters())
    z = model.lm_head(m3.hidden_states(model.base_model, each(ids, 8), tokens, 0))

    def teacher():
        with torch.no_grad():
            m3.hidden_states(model.base_model, each(teacher_ids, 8), tokens, 0)

    def score():
        return seeded_step(model, each(ids, 8), tokens, mask)

    def local():
        return ntk.kdr_flat(model, full, attention, mask, [[x[mask] for x in delta]], "local")

    def statistics():
        return m3.geometry(*(torch.autograd.grad(z, params, x, retain_graph=True) for x in delta))

    optimizer = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in params])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    jobs = dict(sample=toy.sample, teacher=teacher, score_and_backward=score, kernel_local=local,
                optimizer=optimizer.step, statistics=statistics)
    return jobs, model, ids, (tokens, mask, A)


def model_calls(model, ids, tokens, mask):
    """The model alone, with as many rows and columns as a step: no choice of tokens, no residuals."""
    left, real, positions = m3.left_pad(ids, 0)
    kv, params = m3.cache_name(model), list(model.parameters())

    def calls():
        with torch.inference_mode():
            out = model(input_ids=left, attention_mask=real, position_ids=positions, use_cache=True,
                        logits_to_keep=1)
            cache, at = out[kv], positions[:, -1:].repeat_interleave(8, 0)
            seen = F.pad(real, (0, 24), value=1).repeat_interleave(8, 0)
            cache.batch_repeat_interleave(8)
            for i, alive in enumerate(mask.sum(0).tolist()[1:]):
                if alive < len(seen):
                    cache.batch_select_indices(torch.arange(alive))
                    seen, at = seen[:alive], at[:alive]
                at = at + 1
                model(input_ids=tokens[:alive, i:i + 1], attention_mask=seen[:, :left.shape[1] + i + 1],
                      position_ids=at, use_cache=True, **{kv: cache})
        h = m3.hidden_states(model.base_model, each(ids, 8), tokens, 0)
        torch.autograd.grad(model.lm_head(h[mask]).sum(), params)
    return calls


@pytest.mark.benchmark
def test_benchmark_toy_step():
    """Where a step's time goes, and how far it is from its matrix products alone."""
    import resource
    jobs, model, ids, (tokens, mask, A) = step_jobs()
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    n, size = int(mask.sum()), sum(p.numel() for p in model.parameters())
    weights = [p for p in model.parameters() if p.ndim == 2]
    few, many = ([torch.randn(k, w.shape[1]) for w in weights] for k in (len(tokens), n))

    def square():
        return a @ b

    def products():
        # those of the model itself: once per sampled position, then forward and twice as much backward
        with torch.no_grad():
            for inputs in [few] * tokens.shape[1] + [many] * 3:
                for x, w in zip(inputs, weights):
                    x @ w.T

    jobs |= dict(square=square, own_products=products, model_calls=model_calls(model, ids, tokens, mask))
    cost = dict(zip(jobs, timed(*jobs.values())))
    # 2 per sampled, 6 per trained token and parameter
    floor = 8 * size * n / (2 * 1024**3 / cost.pop("square"))
    grpo = cost["sample"] + cost["score_and_backward"] + cost["optimizer"]
    logit = grpo + cost["teacher"]
    local = logit + cost["kernel_local"]
    report("toy step, 8 x 8 responses", tokens=n, groups_with_a_signal=len(A.view(-1, 8).any(1).nonzero()),
           **cost, grpo_step=grpo, m3_logit_step=logit, m3_local_step=local, gemm_floor=floor,
           grpo_over_floor=grpo / floor, grpo_over_own_products=grpo / cost["own_products"],
           model_calls_over_own_products=cost["model_calls"] / cost["own_products"],
           m3_logit_over_grpo=logit / grpo, m3_local_over_grpo=local / grpo,
           local_over_forward_backward=cost["kernel_local"] / cost["score_and_backward"],
           tokens_per_second=n / grpo,
           peak_gigabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


@pytest.mark.benchmark
@pytest.mark.parametrize("toy", [True, False], ids=["toy", "real"])
def test_benchmark_sampling_against_generate(toy):
    if toy:
        batch, G, N, repeats = toy_batch(), 8, 24, 7
        model, tok, ids, eos_ids = batch.model, batch.tok, batch.ids, {batch.tok.eos_token_id}
    else:
        if not os.environ.get("M3_REAL_MODEL"):
            pytest.skip("set M3_REAL_MODEL to the folder of a small real model, SmolLM2-135M for one")
        model, tok, eos_ids = train.load_model(os.environ["M3_REAL_MODEL"], torch.float32, "cpu")
        ids = m3.encode(tok, [m3.prompt_text(tok, row | {"kind": "gsm8k"}) for row in train.toy_rows(2, 5)])
        G, N, repeats = 4, 64, 3
    pad = tok.pad_token_id
    left, attention, _ = m3.left_pad(each(ids, G), pad)
    produced = []

    def sample():  # as the loop does it
        with m3.packed(model):
            return m3.sample(model, ids, G, N, eos_ids=eos_ids, pad_id=pad,
                             generator=torch.Generator().manual_seed(0))

    def generate():
        torch.manual_seed(0)
        out = model.generate(left, attention_mask=attention, do_sample=True, temperature=1.0, top_p=1.0,
                             top_k=0, max_new_tokens=N, eos_token_id=sorted(eos_ids), pad_token_id=pad)
        out = out[:, left.shape[1]:]
        ends = torch.isin(out, torch.tensor(sorted(eos_ids))).cumsum(1)
        produced.append(int((ends.cumsum(1) <= 1).sum()))  # up to the first end token, that included

    ours, theirs = timed(sample, generate, repeats=repeats)
    n = int(sample()[1].sum())
    report(f"sampling, {'toy' if toy else 'real model'}, {len(ids)} x {G} x {N}", ours=n / ours,
           generate=produced[-1] / theirs, ratio=n / ours / (produced[-1] / theirs))


@pytest.mark.benchmark
@pytest.mark.parametrize("chunk", [1024, 128, 48])
def test_benchmark_vocabulary_chunks(chunk):
    """Seconds and memory growth of a backward pass, V = 151,936, 1,024 positions, in its own process."""
    code = f"""
import resource, time, torch, sys
sys.path.insert(0, {str(HERE)!r})
import test_m3
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, hidden_size=128, intermediate_size=256,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)).eval()
model.get_output_embeddings().weight.requires_grad_(False)
tokens, mask = torch.randint(9, (16, 64)), torch.ones(16, 64).bool()
prompts = [[5, 6, 7]] * 16
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
test_m3.seeded_step(model, prompts, tokens, mask, {chunk})
print(time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""
    # Through a shell that forks: a process started directly inherits the highest mark of this one's memory.
    done = subprocess.run(["sh", "-c", '"$0" -c "$1"; exit', sys.executable, code], capture_output=True,
                          text=True)
    seconds, grown = map(float, done.stdout.split())
    report("vocabulary chunks, V = 151,936, 1,024 positions", chunk=chunk, seconds=seconds,
           gigabytes_grown=grown)


@pytest.mark.benchmark
def test_benchmark_micro_batches_by_length():
    """64 responses of 8 to 256 tokens in micro-batches of 16: sorted by length, as the loop does, or not."""
    torch.manual_seed(0)
    model = train.Qwen3ForCausalLM(train.Qwen3Config(vocab_size=1000, hidden_size=256, intermediate_size=768,
                                                     head_dim=64, num_hidden_layers=4, num_attention_heads=4,
                                                     num_key_value_heads=2)).eval()
    prompts = each(torch.randint(3, 1000, (8, 100)).tolist(), 8)
    lengths, tokens = torch.randint(8, 257, (64,)), torch.randint(3, 1000, (64, 256))
    mask = torch.arange(256) < lengths[:, None]

    def step(order):
        for rows in order.split(16):
            n = lengths[rows].max()
            seeded_step(model, [prompts[b] for b in rows], tokens[rows, :n], mask[rows, :n])

    by_length, plain = timed(lambda: step(lengths.argsort(descending=True)), lambda: step(torch.arange(64)),
                             repeats=5)
    report("micro-batches by length", tokens=int(mask.sum()), by_length=by_length, as_they_come=plain,
           ratio=by_length / plain)


@pytest.mark.benchmark
def test_benchmark_exact_kernel_against_the_loop():
    toy = toy_batch(P=1, G=2)
    model, (tokens, mask, _) = toy.model, toy.sample()
    full, attention, _ = m3.left_pad([toy.ids[0]] * 2, 0)
    full, attention = torch.cat([full, tokens], 1), torch.cat([attention, mask.long()], 1)
    delta = [torch.randn(*tokens.shape, len(toy.tok)) * mask[..., None] * 0.1 for _ in range(2)]
    fast, slow = timed(lambda: ntk.kdr(model, full, attention, *delta, kernel="exact"),
                       lambda: loop(model, full, attention, *delta), repeats=3)
    report("exact kernel against a plain loop, toy, 2 rows", vmap=fast, loop=slow, ratio=slow / fast)


def our_steps(folder, argv, out):
    """A run of train.py in this process and in this folder -> its log."""
    here, stops = os.getcwd(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in stops]
    os.chdir(folder)
    try:  # what both sides print on the way is not the report
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train.main([*argv, "--out", out])
        return train.read_log(pathlib.Path(out) / "metrics.jsonl")
    finally:
        os.chdir(here)
        for number, handler in zip(stops, handlers):  # the run took Ctrl-C for itself
            signal.signal(number, handler)


def trl_steps(trainer):
    """Seconds and response tokens of each step of a TRL trainer but the first, which warms up."""
    ends, seen = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    with pytest.MonkeyPatch.context() as patch:
        keep_results(patch, trainer, "_generate_and_score_completions", seen)
        trainer.add_callback(Clock())
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return [b - a for a, b in zip(ends, ends[1:])], [int(out["completion_mask"].sum()) for out in seen[1:]]


def against_trl(folder, make, method, toy):
    """Whole steps of `python train.py` and of a TRL trainer, in turn, on the same model, prompts and lengths.

    make(out, settings, G, model, rows, tok): the trainer. Ours is timed by its own log, TRL from one step's
    end to the next: data, sampling, scoring, backward and optimizer, without evaluating or saving, for both.
    """
    if not toy and not os.environ.get("M3_REAL_MODEL"):
        pytest.skip("set M3_REAL_MODEL to the folder of a small real model, SmolLM2-135M for one")
    path = train.toy_model() if toy else str(pathlib.Path(os.environ["M3_REAL_MODEL"]).resolve())
    P, G, N = (8, 8, 24) if toy else (2, 4, 64)
    rounds, steps = (3, 6) if toy else (2, 3)
    argv = ["--method", method, "--kernel", "logit", "--stats-every", "0", "--kdr-every", "0",
            "--device", "cpu", "--dtype", "float32", "--lr", "1e-6", "--eval-every", "999",
            "--save-every", "999", "--eval-limit", "1", "--steps", str(steps + 2),
            "--prompts-per-step", str(P), "--group-size", str(G), "--max-new-tokens", str(N),
            "--model", "toy" if toy else path]
    model, tok, _ = train.load_model(path, torch.float32, "cpu")
    problems = [row if toy else row | {"kind": "gsm8k"} for row in train.toy_rows(4096, 0)]
    order = [i for step in range(1, steps + 2) for i in m3.draw_problems(len(problems), P, 0, step)]
    rows = [problems[i] | {"prompt": m3.prompt_text(tok, problems[i])} for i in order]
    prompts = [row["prompt"] for row in rows]
    assert tok(text=prompts)["input_ids"] == m3.encode(tok, prompts)  # both read the same ids
    settings = dict(max_steps=steps + 1, per_device_train_batch_size=P * G, max_completion_length=N,
                    learning_rate=1e-6, lr_scheduler_type="constant", temperature=1.0, max_grad_norm=1.0,
                    shuffle_dataset=False, use_cpu=True, bf16=False, gradient_checkpointing=False,
                    report_to="none", save_strategy="no", eval_strategy="no", logging_strategy="no",
                    disable_tqdm=True, dataloader_pin_memory=False)
    if toy:  # the cached base model is found from the folder that train.py runs in
        (folder / "runs").mkdir()
        (folder / "runs/cache").symlink_to(HERE / "runs/cache")
    ours, theirs, our_tokens, their_tokens = [], [], [], []
    for i in range(rounds):
        log = our_steps(folder, argv, f"{method}-{toy}-{i}")
        # Step 1 warms up, the last one holds an evaluation.
        ours += [b["seconds"] - a["seconds"] for a, b in zip(log[1:-2], log[2:-1])]
        our_tokens += [line["length"] * P * G for line in log[2:-1]]
        trainer = make(folder / "trl", settings, G, copy.deepcopy(model), rows, tok)
        seconds, tokens = trl_steps(trainer)
        theirs += seconds
        their_tokens += tokens
        shutil.rmtree(folder / f"{method}-{toy}-{i}")  # a checkpoint of a real model is large
    a, b = (sorted(x)[len(x) // 2] for x in (ours, theirs))
    m, n = (sum(x) / len(x) for x in (our_tokens, their_tokens))
    name, world = type(trainer).__name__, "toy" if toy else "real model"
    report(f"{method} against TRL's {name}, {world}, {P} x {G} x {N}",
           steps=len(ours), ours=a, trl=b, ratio=a / b, ours_tokens=m, trl_tokens=n,
           ratio_per_token=(a / m) / (b / n), trl_version=sys.modules["trl"].__version__,
           transformers=transformers.__version__)


@pytest.mark.benchmark
@pytest.mark.parametrize("toy", [True, False], ids=["toy", "real"])
def test_benchmark_grpo_against_trl(tmp_path, toy):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    def pay(completions, answer, kind, **_):
        return [m3.verify(*row) for row in zip(completions, answer, kind)]

    def make(out, settings, G, model, rows, tok):  # loss_type "grpo": eq 2's own average, as ours
        args = trl.GRPOConfig(str(out), num_generations=G, beta=0.0, loss_type="grpo", **settings)
        return trl.GRPOTrainer(model, pay, args, datasets.Dataset.from_list(rows), processing_class=tok)

    against_trl(tmp_path, make, "grpo", toy)


@pytest.mark.benchmark
@pytest.mark.parametrize("toy", [True, False], ids=["toy", "real"])
def test_benchmark_distillation_against_trl(tmp_path, toy):
    """M3-Soft, whose teacher reads the solution too, against on-policy distillation without a reward."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    if not hasattr(trl, "DistillationTrainer"):
        pytest.skip("this TRL has no DistillationTrainer")

    def make(out, settings, G, model, rows, tok):
        # one response per prompt there: each comes G times. beta 0: fkl
        rows = [{"prompt": row["prompt"]} for row in rows for _ in range(G)]
        args = trl.DistillationConfig(str(out), beta=0.0, **settings)
        return trl.DistillationTrainer(model, copy.deepcopy(model).requires_grad_(False), args,
                                       datasets.Dataset.from_list(rows), processing_class=tok)

    against_trl(tmp_path, make, "m3-soft", toy)


@pytest.mark.slow
def test_a_real_model_trains(world):
    """M3_MODEL=FOLDER pytest -m slow: two steps of a real model on toy questions, by adapter."""
    if not os.environ.get("M3_MODEL"):
        pytest.skip("set M3_MODEL to the folder of a real model, SmolLM2-135M-Instruct for one")
    lines = run(world, "--model", os.environ["M3_MODEL"], "--lora-rank", "8", "--lr", "1e-4",
                "--max-new-tokens", "32", "--kernel", "local", "--steps", "2", "--vocab-chunk", "128",
                "--out", "real")
    assert all(math.isfinite(line["loss_D"]) and line["loss_D"] > 0 for line in lines[1:])
