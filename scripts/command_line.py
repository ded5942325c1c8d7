from attention_jax.command_line import run_command  # noqa: F401
