"""Any score inside models written for `jax.nn` or Flax, and with the weights of PyTorch's layer.

`dot_product_attention` and `flax_attention_fn` take queries [*B, T, N, Dq] and keys [*B, S, K, Dk],
positions before heads. N = K G, and query head n reads key head n // G (grouped-query attention;
multi-query for K = 1). Keys and values are never repeated for the G query heads that share them.
"""

from attention_jax.interop.flax_layers import flax_attention_fn
from attention_jax.interop.jax_nn import dot_product_attention
from attention_jax.interop.torch_layers import from_torch, to_torch

__all__ = ["dot_product_attention", "flax_attention_fn", "from_torch", "to_torch"]
