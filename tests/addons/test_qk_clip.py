"""QK-clip: after it, the same inputs give logits of at most the threshold, and nothing else has changed."""

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, HeadRows, MuonSW, QKClip, ScheduleFree, max_attention_logits

LENGTH, WIDTH, SIZE = 7, 12, 4


def inputs(seed=0):
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(rows, bias=False, seed=1):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, rows, bias=bias).double()


def by_loops(q, k):
    """The largest logit of each head, pair by pair; q is (batch, heads, length, size), k may have fewer heads."""
    q, k, shared = q.detach(), k.detach(), q.shape[1] // k.shape[1]
    actual = []
    for head in range(q.shape[1]):
        pairs = [(b, i, j) for b in range(q.shape[0]) for i in range(LENGTH) for j in range(LENGTH)]
        actual.append(max(float(q[b, head, i] @ k[b, head // shared, j]) / q.shape[-1] ** 0.5 for b, i, j in pairs))
    return torch.tensor(actual, dtype=torch.float64)


def heads_of(x, heads):
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


@pytest.mark.parametrize("alpha", [0.5, 0.3, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_above_the_threshold_reach_it_and_the_others_stay(alpha, bias):
    q, k, x = linear(3 * SIZE, bias, seed=1), linear(3 * SIZE, bias, seed=2), inputs()

    def logits():
        return by_loops(heads_of(q(x), 3), heads_of(k(x), 3))

    before, weights = logits(), [q.weight.detach().clone(), k.weight.detach().clone()]
    threshold = float(before.median())
    clip = QKClip(threshold, alpha=alpha)
    clip.add(query=list(q.parameters()), key=list(k.parameters()), heads=3).observe(before)
    torch.testing.assert_close(clip.step(), before.float())
    torch.testing.assert_close(logits(), before.clamp(max=threshold), rtol=1e-6, atol=0)
    for head in range(3):
        gamma = min(1.0, threshold / float(before[head]))
        rows = slice(SIZE * head, SIZE * (head + 1))
        torch.testing.assert_close(q.weight[rows], weights[0][rows] * gamma**alpha, rtol=1e-6, atol=0)
        torch.testing.assert_close(k.weight[rows], weights[1][rows] * gamma ** (1 - alpha), rtol=1e-6, atol=0)


def test_a_group_that_shares_keys_is_clipped_by_its_largest_logit():
    q, k, x = linear(4 * SIZE, seed=1), linear(2 * SIZE, seed=2), inputs()
    before = by_loops(heads_of(q(x), 4), heads_of(k(x), 2))
    threshold = 0.5 * float(before.min())
    clip = QKClip(threshold)
    clip.add(query=q.weight, key=k.weight, heads=4, key_heads=2).observe(before)
    clip.step()
    after = by_loops(heads_of(q(x), 4), heads_of(k(x), 2))
    largest = before.view(2, 2).amax(1, keepdim=True).expand(2, 2).reshape(-1)
    torch.testing.assert_close(after, before * threshold / largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["one after another", "head by head"])
def test_fused_projections_lose_nothing_of_their_values(layout):
    heads, x = 3, inputs()
    qkv = linear(3 * heads * SIZE)
    start, stride = (heads * SIZE, SIZE) if layout == "one after another" else (SIZE, 3 * SIZE)
    rows = [torch.cat([torch.arange(SIZE) + n * start + h * stride for h in range(heads)]) for n in range(3)]

    def parts():
        return [heads_of(qkv(x)[..., chosen], heads) for chosen in rows]

    q, k, v = parts()
    before = by_loops(q, k)
    threshold = 0.5 * float(before.min())
    clip = QKClip(threshold)
    query, key = (HeadRows(qkv.weight, SIZE, start=n * start, stride=stride) for n in range(2))
    clip.add(query=query, key=key, heads=heads).observe(before)
    clip.step()
    q, k, values = parts()
    torch.testing.assert_close(by_loops(q, k), torch.full((heads,), threshold, dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.equal(values, v)


def test_a_hook_clips_after_each_step_and_resets_the_maximum():
    q, k = linear(2 * SIZE, seed=1), linear(2 * SIZE, seed=2)
    optimizer = MuonSW([q.weight, k.weight], lr=0.0, heads=2)
    clip = QKClip(threshold=10.0)
    attention = clip.add(query=q.weight, key=k.weight, heads=2)
    optimizer.register_step_post_hook(clip)
    start = q.weight.detach().clone()
    for micro in ([5.0, 40.0], [30.0, 1.0]):
        attention.observe(torch.tensor([micro, [0.0, 0.0]]))
    for _ in range(2):  # nothing is reported before the second
        for weight in (q.weight, k.weight):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    expected = start.view(2, SIZE, WIDTH) * torch.tensor([(10 / 30) ** 0.5, 0.5]).view(2, 1, 1)
    torch.testing.assert_close(q.weight.detach(), expected.view_as(start), rtol=1e-6, atol=0)


@pytest.mark.parametrize("on", ["outside", "inside"])
def test_under_schedule_free_the_average_is_clipped_too(on):
    """Otherwise z would keep growing, and x = (y - (1 - b) z) / b would turn against the clipped weights."""
    q, k = linear(2 * SIZE, seed=1).weight, linear(2 * SIZE, seed=2).weight
    optimizer = ScheduleFree(AdamWSW([q, k], lr=0.05, weight_decay=0.0, decay="constant", betas=(0.0, 0.999)))
    optimizer.train()
    clip, x = QKClip(threshold=5.0), inputs().flatten(0, 1)
    attention = clip.add(query=q, key=k, heads=2)
    {"outside": optimizer, "inside": optimizer.optimizer}[on].register_step_post_hook(clip)

    def logits():
        queries, keys = ((x @ weight.T).view(-1, 2, SIZE).transpose(0, 1) for weight in (q, k))
        return queries @ keys.mT

    for _ in range(100):
        optimizer.zero_grad()
        actual = logits()
        attention.observe(actual.amax((-2, -1)))
        (-actual.diagonal(dim1=-2, dim2=-1).mean()).backward()
        optimizer.step()
    y = q.detach().clone()
    optimizer.eval()
    assert logits().max() < 2 * clip.threshold
    assert torch.cosine_similarity(q.flatten(), y.flatten(), dim=0) > 0.9


def two_heads(threshold):
    q, k = linear(2 * SIZE, seed=1), linear(2 * SIZE, seed=2)
    clip = QKClip(threshold)
    return q, clip, clip.add(query=q.weight, key=k.weight, heads=2)


def test_forward_passes_of_a_graph_report_at_each_replay():
    """A replay writes to the tensor that `observe` used at capture, and calls no Python."""
    q, clip, attention = two_heads(50.0)
    attention.observe(torch.tensor([1.0, 2.0]))
    used_by_the_graph = attention.maximum
    clip.step()
    assert clip.step().tolist() == [-torch.inf, -torch.inf]
    used_by_the_graph.copy_(torch.tensor([200.0, 3.0]))
    before = q.weight.detach().clone()
    assert clip.step().tolist() == [200.0, 3.0]
    torch.testing.assert_close(q.weight[:SIZE], 0.5 * before[:SIZE])


def test_an_evaluation_may_report_before_training_does():
    _, clip, attention = two_heads(50.0)
    with torch.inference_mode():
        attention.observe(torch.tensor([1.0, 2.0]))
    attention.observe(torch.tensor([3.0, 1.0]))
    assert clip.step().tolist() == [3.0, 2.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -3.0])
def test_invalid_logits_change_nothing(bad):
    q, clip, attention = two_heads(1.0)
    before = q.weight.detach().clone()
    attention.observe(torch.tensor([bad, bad]))
    clip.step()
    assert torch.equal(q.weight, before)


def test_weights_stored_as_in_out_are_scaled_by_columns():
    weight, key = nn.Parameter(torch.ones(5, 4)), nn.Parameter(torch.ones(4, 5))
    clip = QKClip(threshold=1.0)
    clip.add(query=HeadRows(weight, dim=1), key=key, heads=2).observe(torch.tensor([4.0, 0.5]))
    clip.step()
    assert torch.equal(weight.detach(), torch.tensor([0.5, 0.5, 1.0, 1.0]).expand(5, 4))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("block", [3, 1024])
def test_largest_logits_match_the_full_matrix(is_causal, block):
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, heads, LENGTH, SIZE, generator=generator, dtype=torch.float64) for heads in (6, 2))
    q[:, :2, 0] = 9 * k[:, :1, 0]  # the largest logits of two heads are those of the first query
    actual = max_attention_logits(q, k, is_causal=is_causal, block=block)
    logits = torch.einsum("bhid,bhjd->bhij", q, k.repeat_interleave(3, 1)) / SIZE**0.5
    if is_causal:
        logits = logits.where(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(actual, logits.amax((0, 2, 3)).float())


def test_mistakes_are_named():
    q, k = linear(2 * SIZE), linear(2 * SIZE)
    for key in ("threshold", "alpha"):
        with pytest.raises(ValueError, match=f"{key}=-1: must be"):
            QKClip(**{key: -1})
    for options, message in (
        ({"heads": 2.0}, "heads=2.0"),
        ({"key_heads": -1}, "key_heads=-1"),
        ({"key_heads": 4}, "multiple of key_heads=4"),
        ({"query": q}, "QK-clip takes weights and biases or HeadRows of them, not a Linear"),
        ({"query": HeadRows(q.weight, size=5)}, "2 heads of 5 rows .* do not fit"),
        ({"heads": 3}, "3 heads of 2 rows .* do not fit axis 0"),  # rows are left over
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            QKClip().add(**{"query": q.weight, "key": k.weight, "heads": 2, **options})
    with pytest.raises(RuntimeError, match="no attention to clip; call add"):
        QKClip().step()
    with pytest.raises(ValueError, match="logits of 3 heads from head 0 on do not fit an attention of 2 heads"):
        QKClip().add(query=q.weight, key=k.weight, heads=2).observe(torch.ones(3))
