"""Results of the simulated device equal the CPU's bit by bit: models, optimizers, mixed precision."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyscale.testing import tiny_gpt2

pytestmark = pytest.mark.usefixtures("on_sim")


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu())
    return all(equal(a, b) for a, b in zip(one, other, strict=True))


class Block(nn.Module):
    """Attention, convolution, normalisation, dropout and tied embeddings in one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, activation="gelu")
        self.convolution = nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(16, 16, 2, stride=2)
        self.batch = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.attention(self.embedding(tokens))
        x = self.batch(self.up(self.convolution(x.transpose(1, 2))))
        x = F.max_pool1d(x, 2).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def trained(device, make, *, optimizer, steps=3, clip=None, **options):
    torch.manual_seed(1)
    model = make()
    model.to(device)
    chosen = optimizer(model.parameters(), **options)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(step)).to(device)
        torch.manual_seed(step)
        loss = model(tokens) if make is Block else model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if clip:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).detach())
        chosen.step()
        losses.append(loss.detach())
        if step < steps - 1:
            chosen.zero_grad(set_to_none=step % 2 == 0)
    return losses, [p.grad for p in model.parameters()], list(model.parameters()), list(model.buffers())


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw single": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "rmsprop foreach": (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_cpus(name):
    optimizer, options = OPTIMIZERS[name]
    assert equal(
        trained("sim:1", Block, optimizer=optimizer, **options), trained("cpu", Block, optimizer=optimizer, **options)
    )


@pytest.mark.parametrize("foreach", [True, False])
def test_gpt2_equals_the_cpus(foreach):
    options = {"optimizer": torch.optim.AdamW, "lr": 0.01, "foreach": foreach, "clip": 0.5}
    assert equal(trained("sim", tiny_gpt2, **options), trained("cpu", tiny_gpt2, **options))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_layers_are_close_to_the_cpus(kind):
    torch.manual_seed(2)
    layer, x = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True), torch.randn(3, 7, 6)
    results = []
    for device in ("cpu", "sim"):
        layer.zero_grad()
        layer.to(device)
        out, _ = layer(x.to(device))
        out.square().sum().backward()
        results.append([out.detach().cpu(), *(p.grad.cpu() for p in layer.parameters())])
    for ours, hosts in zip(*results, strict=True):
        torch.testing.assert_close(ours, hosts, rtol=1e-4, atol=1e-5)


def test_attention_takes_the_kernel_of_the_cpu():
    q, k, v = (torch.randn(2, 3, 8, 16) for _ in range(3))
    mask = torch.randn(8, 8)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask > 0}, {"scale": 0.3}):
        grads = []
        for device in ("cpu", "sim"):
            inputs = [t.to(device).detach().requires_grad_() for t in (q, k, v)]
            here = {key: value.to(device) if key == "attn_mask" else value for key, value in options.items()}
            out = F.scaled_dot_product_attention(*inputs, **here)
            out.square().sum().backward()
            grads.append([out, *(t.grad for t in inputs)])
        assert equal(*grads)


def test_operators_of_many_kinds_equal_the_cpus():
    x, y = torch.randn(6, 6), torch.randint(0, 6, (6,))
    operators = (
        lambda x, y: x.to(torch.complex64).conj() @ x.to(torch.complex64),
        lambda x, y: torch.linalg.svd(x),
        lambda x, y: torch.linalg.solve(x + 6 * torch.eye(6, device=x.device), x),
        lambda x, y: torch.fft.rfft(x),
        lambda x, y: x.topk(2),
        lambda x, y: torch.unique(y, return_counts=True),
        lambda x, y: x.nonzero(),
        lambda x, y: x[y],
        lambda x, y: x.scatter_add(0, y.expand(6, 6), x),
        lambda x, y: x.index_add(0, y, x),
        lambda x, y: torch.einsum("ij,jk->ik", x, x),
        lambda x, y: x.bfloat16() @ x.bfloat16(),
        lambda x, y: torch.logsumexp(x, 1),
        lambda x, y: x.masked_select(x > 0),
        lambda x, y: torch.nn.utils.parameters_to_vector([x, x]),
        lambda x, y: torch.tril(x).cumsum(1),
        lambda x, y: F.grid_sample(x.view(1, 1, 6, 6), torch.zeros(1, 2, 2, 2, device=x.device), align_corners=False),
        lambda x, y: torch.arange(3, 9, device=x.device) + torch.linspace(0, 1, 6, device=x.device),
        lambda x, y: torch._foreach_norm([x, x]),
    )
    for operator in operators:
        assert equal(operator(x.to("sim"), y.to("sim")), operator(x, y))


def test_autocast_casts_as_on_torchs_own_devices():
    layer = nn.Linear(8, 8).to("sim")
    x = torch.randn(4, 8, device="sim")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("sim", dtype=dtype):
            out = layer(x)
            assert out.dtype == dtype
            assert F.softmax(out, 1).dtype == torch.float32
            assert F.mse_loss(out, x).dtype == torch.float32
            with torch.autocast("sim", enabled=False):
                assert layer(x).dtype == torch.float32
        expected = F.linear(x.cpu().to(dtype), layer.weight.cpu().to(dtype), layer.bias.cpu().to(dtype))
        assert equal(out, expected)
    assert layer(x).dtype == torch.float32
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("sim", dtype=torch.float64):
        assert layer(x).dtype == torch.float32


def test_autocast_of_the_cpu_does_not_reach_the_device():
    x = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.layer_norm(x.to("sim") @ x.to("sim"), (4,))
    assert out.dtype == torch.float32
    assert equal(out, F.layer_norm(x @ x, (4,)))


def test_the_loss_scaler_finds_infinities():
    weight = nn.Parameter(torch.ones(3, device="sim"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0, 0]
    weight.grad = torch.tensor([float("inf"), 0, 0], device="sim")
    scaler.scale(torch.ones((), device="sim"))
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0, 0]
    assert scaler.get_scale() == 4.0


def test_checkpointed_activations_draw_the_same_numbers_again():
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(1000, device="sim", requires_grad=True)
    torch.manual_seed(3)
    out = checkpoint(lambda x: F.dropout(x * 2, 0.5), x, use_reentrant=False)
    mask = (out.detach() > 0).cpu()
    torch.rand(17, device="sim")
    out.sum().backward()
    assert torch.equal((x.grad > 0).cpu(), mask)


def test_inference_mode_and_functional_transforms_work():
    x = torch.randn(3, 3)
    with torch.inference_mode():
        assert equal((x.to("sim") @ x.to("sim")).relu(), (x @ x).relu())
    grad = torch.func.vmap(torch.func.grad(lambda row: (row.sin() ** 2).sum()))
    assert equal(grad(x.to("sim")), grad(x))


def test_conjugated_and_negated_views_equal_the_cpus():
    def weighted(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x / x.abs()).abs().sum(), x)[0]

    x = torch.randn(4, dtype=torch.complex64)
    operators = (
        lambda x: x.conj().resolve_conj(),
        lambda x: x.conj().imag + 1,
        lambda x: torch.zeros_like(x).copy_(x.conj()),
        lambda x: torch.zeros_like(x).conj().copy_(x),
        lambda x: torch.fft.hfft(x),
        weighted,
    )
    for operator in operators:
        assert equal(operator(x.to("sim")), operator(x))
    assert equal(x.to("sim").conj().imag, x.conj().imag)


def test_gradients_that_autograd_knows_to_be_zero_have_memory():
    x = torch.randn(5, device="sim", requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert gradient.cpu().tolist() == [0] * 5


def test_tensors_that_are_not_over_one_memory_are_refused_by_kind():
    x = torch.ones(3, 3, device="sim")
    for kind, operator in (
        ("sparse", lambda: x.to_sparse()),
        ("sparse", lambda: x.to_sparse_csr()),
        ("quantized", lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        ("nested", lambda: torch._nested_tensor_from_mask(x[None], torch.ones(1, 3, device="sim") > 0)),
        ("mkldnn", lambda: x.to_mkldnn()),
    ):
        with pytest.raises(NotImplementedError, match=f"no {kind} tensors on sim"):
            operator()
