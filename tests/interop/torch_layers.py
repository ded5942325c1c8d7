"""What `torch.nn.MultiheadAttention` computes, for test_torch.py, which also runs without torch.

`python tests/interop/torch_layers.py` writes torch_layers.npz anew: for each case one vector
float32, `as_vector` of the results and gradients of torch 2.13.
"""

from pathlib import Path

import numpy as np
from oracles import normal

NUMBERS = Path(__file__).with_suffix(".npz")
B, T, S, E, DK, DV, N = 2, 5, 7, 8, 6, 3, 2
IGNORED = np.random.default_rng(5).random((B * N, T, S)) < 0.4
IGNORED[..., 0] = False  # rows without keys have a test of their own
PADDING = np.arange(S) >= np.array([[4], [7]])
ADDED = np.where(IGNORED, -np.inf, normal(B * N, T, S))
FUTURE = np.arange(S) > np.arange(T)[:, None]
# (num_heads, options of the layer, arguments of the call; all masks are torch's: True = ignore)
CASES = {
    "self": (N, {}, {}),
    "one head": (1, {}, {"key_padding_mask": PADDING}),
    "no bias": (4, {"bias": False}, {"attn_mask": IGNORED[0]}),
    "sizes": (
        N, {"kdim": DK, "vdim": DV},
        {"key_padding_mask": np.where(PADDING, -np.inf, 0.5), "attn_mask": ADDED},
    ),
    "sizes, no bias": (N, {"vdim": DV, "bias": False}, {"attn_mask": ADDED[0]}),
    "masks": (N, {}, {"key_padding_mask": PADDING, "attn_mask": IGNORED}),
    "length first": (N, {"batch_first": False}, {"attn_mask": IGNORED}),
    "causal": (N, {}, {"attn_mask": FUTURE, "is_causal": True, "need_weights": False}),
    "zero": (N, {"add_zero_attn": True}, {"key_padding_mask": PADDING, "attn_mask": IGNORED}),
}  # fmt: skip


def arrays_of(name):
    """The state by torch's names, and the tokens [B, length, features] of a case."""
    _, options, _ = CASES[name]
    sizes = {"q": E, "k": options.get("kdim", E), "v": options.get("vdim", E)}
    if {*sizes.values()} == {E}:
        state = {"in_proj_weight": normal(3 * E, E)}
    else:
        state = {f"{n}_proj_weight": normal(E, dim, seed=ord(n)) for n, dim in sizes.items()}
    if options.get("bias", True):
        state |= {"in_proj_bias": normal(3 * E), "out_proj.bias": normal(E)}
    state["out_proj.weight"] = normal(E, E)
    state = {key: array / 4 for key, array in state.items()}  # the size of torch's own weights
    tokens = [normal(B, T, E), normal(B, S, sizes["k"], seed=1), normal(B, S, sizes["v"], seed=2)]
    return state, tokens[:1] * 3 if name == "self" else tokens


def as_vector(outputs, gradients):
    """The outputs, then the gradients of the tokens and of the state, in the order of its names."""
    tokens, state = gradients
    leaves = [*outputs, *tokens, *(state[name] for name in sorted(state))]
    return np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float32)


def torch_results(name, *, grad=True):
    """Output [B, T, E] and weights [B, N, T, S], if the call returns them, of torch; as a vector.

    Args:
        name: of the case.
        grad: whether to append the gradients of sum(output * cos(0, 1, ...)); without them the
            layer is in evaluation, where torch may take another path.
    """
    import torch

    num_heads, options, call = CASES[name]
    state, tokens = arrays_of(name)
    options = {"batch_first": True} | options
    layer = torch.nn.MultiheadAttention(E, num_heads, **options).train(grad)
    layer.load_state_dict({key: torch.tensor(array) for key, array in state.items()})
    is_self = tokens[0] is tokens[1]
    tokens = [torch.tensor(array, requires_grad=grad) for array in tokens]
    given = tokens if options["batch_first"] else [each.transpose(0, 1) for each in tokens]
    given = given[:1] * 3 if is_self else given
    arrays = {key: torch.tensor(x) for key, x in call.items() if isinstance(x, np.ndarray)}
    arrays = {k: x.float() if x.is_floating_point() else x for k, x in arrays.items()}
    with torch.set_grad_enabled(grad):
        output, weights = layer(*given, **{**call, **arrays}, average_attn_weights=False)
    output = output if options["batch_first"] else output.transpose(0, 1)
    outputs = [output.detach()] + ([] if weights is None else [weights[..., :S].detach()])
    if not grad:
        return as_vector(outputs, ([], {}))
    (output * torch.cos(torch.arange(B * T * E)).reshape(output.shape)).sum().backward()
    tokens = tokens[:1] if is_self else tokens
    return as_vector(
        outputs,
        ([each.grad for each in tokens], {key: p.grad for key, p in layer.named_parameters()}),
    )


if __name__ == "__main__":
    np.savez_compressed(NUMBERS, **{name: torch_results(name) for name in CASES})
