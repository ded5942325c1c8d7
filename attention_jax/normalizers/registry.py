"""`get_normalizer`, which turns a name or a class into a `Normalizer`; the named `NORMALIZERS`."""

from attention_jax.core.names import named
from attention_jax.normalizers.contract import Normalizer
from attention_jax.normalizers.entmax import Entmax
from attention_jax.normalizers.log_scaled import LogScaled
from attention_jax.normalizers.sigmoid import Sigmoid
from attention_jax.normalizers.softmax import Softmax

# What `get_normalizer` accepts.
NormalizerLike = str | Normalizer | type[Normalizer]

# The normalisers by name, each with its default settings.
NORMALIZERS: dict[str, Normalizer] = {
    "entmax": Entmax(),
    "log_scaled": LogScaled(),
    "sigmoid": Sigmoid(),
    "softmax": Softmax(),
    "sparsemax": Entmax(2.0),
    "ssmax": LogScaled(learned=True),
}

DEFAULT_NORMALIZER = "softmax"  # the default of every argument `normalizer`


def get_normalizer(name_or_normalizer: NormalizerLike) -> Normalizer:
    """The `Normalizer` for a name or a class; a `Normalizer` is returned unchanged.

    The notation is that of `get_score`: "entmax(alpha=1.2)", "my_module:Mine",
    "log_scaled(normalizer=entmax)".

    Args:
        name_or_normalizer: a key of `NORMALIZERS`, or "module:Name" for a normaliser in a module
            that can be imported, both with or without arguments; a `Normalizer`; or a subclass of
            `Normalizer` that needs no arguments.

    Returns:
        a `Normalizer`.

    Raises:
        ValueError: there is no normaliser of that name, or it does not have these fields.

    >>> get_normalizer("softmax(sink=True)")
    Softmax(sink=True)
    >>> get_normalizer("sparsemax")
    Entmax(alpha=2.0)
    """
    normalizer = named(name_or_normalizer, Normalizer, NORMALIZERS, get_normalizer)
    if not isinstance(normalizer, Normalizer):
        raise ValueError(f"normalizer must be a name or a Normalizer; got {name_or_normalizer!r}")
    return normalizer
