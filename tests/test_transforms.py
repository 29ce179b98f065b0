"""Each exact step: its inverse, and what it folds into, so that attention never has to undo it token by token."""

from __future__ import annotations

import pytest
import torch

from hf_kvquant import TensorSpec
from hf_kvquant.exact import power_of_two, tree_sum, walsh_hadamard
from hf_kvquant.rotary import LayerRotary, RotaryLayout, RotaryTable
from hf_kvquant.transforms import Centre, Channels, Hadamard, Step, Tables, calibrate, steps_of
from tests.tolerances import TOLERANCES

DIM, TOKENS, START = 24, 10, 5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotary() -> LayerRotary:
    table = RotaryTable.empty_like(torch.empty(1, 1, 8), 1, 16)
    angles = torch.rand(1, 40, 8, generator=torch.Generator().manual_seed(1)) * 6
    table.append(1.3 * angles.cos(), 1.3 * angles.sin())  # scaled, as yarn's tables are
    return LayerRotary(RotaryLayout("key", "interleaved", 8, 4, 1, "single", False), table)


STEPS: dict[str, Step] = {
    "plain centre": Centre(normal(2, 3, DIM)),
    "rotated centre": Centre(normal(2, 3, DIM), rotary()),
    "hadamard": Hadamard(),
    "deviations": Channels(normal(2, 3, DIM).exp(), None),
    "deviations and order": Channels(normal(2, 3, DIM).exp(), torch.rand(2, 3, DIM).argsort(-1).to(torch.int16)),
}
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


@each_step
def test_inverse(step) -> None:
    x = normal(2, 3, TOKENS, DIM)
    torch.testing.assert_close(step.invert(step.apply(x, START).clone(), START), x, **TOLERANCES["exact_steps"])


@each_step
def test_scores_through_the_folded_query(step) -> None:
    x, query = normal(2, 3, TOKENS, DIM), normal(2, 3, 4, DIM, seed=2)
    scores = step.fold_query(query) @ step.apply(x, START).mT
    if isinstance(step, Centre):
        scores = scores + step.score_term(query, START, TOKENS)
    torch.testing.assert_close(scores, query @ x.mT, **TOLERANCES["exact_steps"])


@pytest.mark.parametrize("name", [name for name in STEPS if name != "rotated centre"])
def test_outputs_through_the_folded_output(name) -> None:
    x, probabilities = normal(2, 3, TOKENS, DIM), normal(2, 3, 4, TOKENS, seed=3).softmax(-1)
    output = STEPS[name].fold_output(probabilities @ STEPS[name].apply(x, START))
    torch.testing.assert_close(output, probabilities @ x, **TOLERANCES["exact_steps"])


def test_a_rotated_centre_does_not_fold_into_an_output() -> None:
    with pytest.raises(ValueError, match="center='rope' is not valid for values"):
        STEPS["rotated centre"].fold_output(normal(2, 3, 4, DIM))


def test_steps_in_the_order_of_the_spec() -> None:
    tables = Tables(normal(2, 3, DIM), normal(2, 3, DIM).exp(), None, None)
    spec = TensorSpec("midrise4", "token", None, center="rope", rotation="hadamard")
    kinds = [type(step) for step in steps_of(spec, Tables(tables.mean), rotary(), slice(None))]
    assert kinds == [Centre, Hadamard]
    spec = TensorSpec("midrise4", "token", None, center="plain", normalize=True)
    centre, channels = steps_of(spec, tables, rotary(), [1])
    assert isinstance(centre, Centre)
    assert isinstance(channels, Channels)
    assert centre.rotary is None
    assert centre.mean.shape == channels.deviation.shape == (1, 3, DIM)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_tokens_stay_out_of_the_statistics(bad) -> None:
    spec = TensorSpec("midrise4", "token", None, center="plain", normalize=True)
    x = normal(1, 2, 16, DIM)
    x[0, 1, 3, 5] = bad
    found = calibrate(x, spec, None, None, None)
    kept = torch.arange(16) != 3
    for got, right in zip(
        found.named().values(), calibrate(x[:, :, kept], spec, None, None, None).named().values(), strict=True
    ):
        torch.testing.assert_close(got[:, 1], right[:, 1], **TOLERANCES["exact_steps"])


def test_constant_heads_keep_finite_statistics() -> None:
    spec = TensorSpec("midrise4", "token", None, center="plain", widths=((4, 20), (2, 24), (0, 20)))
    found = calibrate(torch.zeros(1, 2, 16, DIM), spec, None, None, torch.zeros(1, 2, DIM))
    assert all(bool(tensor.float().isfinite().all()) for tensor in found.named().values())
    assert torch.equal(found.deviation, torch.ones(1, 2, DIM))  # pyright: ignore[reportArgumentType]


# -------------------------------------------------------------------- arithmetic that does not depend on shape


@pytest.mark.parametrize("size", [1, 2, 3, 7, 24, 64, 80, 128])
def test_sums_round_alike_in_any_shape(size) -> None:
    x = normal(5, 7, size, 9)
    whole = tree_sum(x, 2)
    torch.testing.assert_close(whole, x.double().sum(2, keepdim=True).float(), **TOLERANCES["exact_steps"])
    assert torch.equal(whole[3:4, 2:3], tree_sum(x[3:4, 2:3], 2))
    assert torch.equal(whole, tree_sum(x.transpose(2, 3).contiguous(), 3).transpose(2, 3))


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 40, 64, 80, 96, 128, 256])
def test_walsh_hadamard(dim) -> None:
    x, size = normal(3, dim), dim & -dim
    parity = [[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)]
    matrix = torch.block_diag(*[(1.0 - 2 * torch.tensor(parity)) / size**0.5] * (dim // size))
    torch.testing.assert_close(walsh_hadamard(x), x @ matrix, **TOLERANCES["exact_steps"])
    assert torch.equal(walsh_hadamard(x)[1:2], walsh_hadamard(x[1:2]))


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-126, 128)
    assert power_of_two(exponents.to(torch.int8)).tolist() == [2.0**e for e in exponents.tolist()]
