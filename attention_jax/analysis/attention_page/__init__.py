"""A page on which one looks at captured attention; README.md describes it and its data."""
