"""A page that shows captured attention; README.md describes it and its data."""
