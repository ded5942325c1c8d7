"""The API reference: its pages, and how pdoc renders them. `scripts/docs` runs it."""
