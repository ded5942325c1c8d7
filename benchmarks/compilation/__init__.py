"""Attention compiled for accelerators that are not there, and what their compilers say of it."""
